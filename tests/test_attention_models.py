"""[attention] rows in recipes, and transformers models that train with them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

import quatrain as qt
from quatrain import checkpoint
from quatrain.nn import AttentionRows, QuantLinear, attention_interface
from quatrain.recipe import diff
from quatrain.train import train
from quatrain.train.config import replace_in
from tiny_run import history, make_run

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=7)),
    "qwen3": lambda: AutoModelForCausalLM.from_config(Qwen3Config(**GROUPED, head_dim=24)),
    "gemma": lambda: AutoModelForCausalLM.from_config(GemmaConfig(**GROUPED, head_dim=16)),
}
LINEARS = '[linear]\nfprop.input = "nvfp4"\nfprop.weight = "nvfp4"\n'


def llama() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["llama"]().train()


def tokens(length: int = 20) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 64, (2, length))


def step(model: nn.Module, call: Any = None, **arguments: Any) -> list[Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    x = tokens()
    loss = (model if call is None else call)(x, labels=x, use_cache=False, **arguments).loss
    loss.backward()
    return [loss.detach(), *gradients(model)]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_recipe_rows() -> None:
    recipe = qt.load_recipe("nvfp4-attention")
    assert qt.load_recipe(recipe.to_toml()) == recipe and not recipe.quantizes and recipe.attention.quantizes
    assert recipe.fingerprint() != qt.load_recipe("bf16").fingerprint()
    other = qt.load_recipe(recipe.to_toml().replace("smooth = true", "smooth = false"))
    assert diff(recipe, other) == [("attention.smooth", "True", "False")]
    assert ("dkey.grad", "BF16", "nvfp4 1x16 up stochastic") in diff(qt.load_recipe("bf16"), recipe)
    for text, message in (
        ('[attention]\nscores.queries = "nvfp4"', "unknown key 'scores.queries'"),
        ('[attention]\nscores.query = "fp8"', "scores.query must be nvfp4"),
        ("[attention]\nsmooth = 1", "attention.smooth must be true or false"),
        ('[attention]\nviews = "other"', "attention.views must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            qt.load_recipe(text)


@pytest.mark.parametrize("name", list(MODELS))
def test_without_rows_models_compute_what_they_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qt.register_attention()
    monkeypatch.setattr(attention_interface, "NVFP4_ROWS", AttentionRows())
    torch.manual_seed(0)
    model = MODELS[name]().double()
    left, right = torch.ones(2, 2, 20, dtype=torch.long)
    left[0, :6], right[1, 15:] = 0, 0
    packed = torch.cat([torch.arange(9), torch.arange(11)])[None].expand(2, -1)
    own = (torch.rand(2, 1, 20, 20) < 0.5) | torch.eye(20, dtype=torch.bool)
    for arguments in (
        {}, {"attention_mask": left}, {"attention_mask": right}, {"position_ids": packed}, {"attention_mask": own},
    ):  # fmt: skip
        found = []
        for implementation in ("sdpa", "quatrain"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            logits = model(tokens(), use_cache=False, **arguments).logits
            if arguments.get("attention_mask", own) is not own:
                logits = logits * arguments["attention_mask"][..., None]
            logits.square().mean().backward()
            found.append([logits.detach(), *gradients(model)])
        for x, y in zip(*found, strict=True):
            assert torch.allclose(x, y, rtol=1e-9, atol=1e-12)
    words = []
    for implementation in ("sdpa", "quatrain"):
        model.set_attn_implementation(implementation)
        words.append(model.generate(tokens(), attention_mask=left, max_new_tokens=6, do_sample=False))
        words.append(
            model.generate(
                tokens(), max_new_tokens=6, do_sample=False, cache_implementation="static", disable_compile=True
            )
        )
    assert equal(words[:2], words[2:])


def test_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """As data collators for FlashAttention say them: one row, and where its sequences begin."""
    qt.register_attention()
    monkeypatch.setattr(attention_interface, "NVFP4_ROWS", AttentionRows())
    model = llama().double().eval()
    x, cu = tokens()[:1], torch.tensor([0, 9, 20], dtype=torch.int32)
    places = torch.cat([torch.arange(9), torch.arange(11)])[None]
    apart = [model(part, use_cache=False).logits for part in (x[:, :9], x[:, 9:])]
    model.set_attn_implementation("quatrain")
    sequences = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11}
    together = model(x, position_ids=places, use_cache=False, **sequences).logits
    assert torch.allclose(together, torch.cat(apart, 1), rtol=1e-9, atol=1e-12)
    for bad in ({"cu_seq_lens_q": cu}, sequences | {"input_ids": tokens()}):
        with pytest.raises(ValueError, match="packed sequences need"):
            model(**({"input_ids": x} | bad), use_cache=False)


def test_an_encoder_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    qt.register_attention()
    monkeypatch.setattr(attention_interface, "NVFP4_ROWS", AttentionRows())
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES)).double().eval()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    found = []
    for implementation in ("sdpa", "quatrain"):
        model.set_attn_implementation(implementation)
        found += [model(tokens(), attention_mask=m).last_hidden_state[:, :12] for m in (mask, None)]
    assert torch.allclose(found[0], found[2]) and torch.allclose(found[1], found[3])


@pytest.mark.parametrize("linears", ["", LINEARS])
def test_apply_checkpointing_and_compile(linears: str) -> None:
    recipe = linears + "[attention]" + qt.load_recipe("nvfp4-attention").to_toml().split("[attention]")[1]
    base = llama()

    def converted() -> nn.Module:
        model = copy.deepcopy(base)
        report = qt.apply(model, recipe, seed=5)
        assert report.converted["model.layers.1.self_attn"] == "nvfp4, 6 of 6 attention operands"
        assert report.linears[0] == (14 if linears else 0)
        return model

    model = converted()
    first, second = step(model), step(model)
    assert qt.rng_state(model).tolist() == [2]
    assert torch.equal(first[0], second[0]) and not equal(first, second)  # forward draws nothing, dS does
    assert not torch.equal(first[0], step(base)[0])
    qt.check_finite(model)
    for reentrant in (False, True):
        checked = converted()
        checked.gradient_checkpointing_enable({"use_reentrant": reentrant})
        checked.enable_input_require_grads()
        assert equal(step(checked), first)
    whole = converted()
    assert equal(step(whole, torch.compile(whole, fullgraph=True, backend="aot_eager")), first)
    moved = copy.deepcopy(model)
    qt.set_rng_state(moved, torch.zeros(1, dtype=torch.int64))
    assert equal(step(moved), first)
    # Two forwards before the first backward: each keeps its own bits.
    apart = converted()
    x = tokens()
    losses = [apart(x, labels=x, use_cache=False).loss for _ in range(2)]
    losses[0].backward()
    assert equal([losses[0].detach(), *gradients(apart)], first)
    apart.zero_grad()
    losses[1].backward()
    assert equal([losses[1].detach(), *gradients(apart)], second)
    qt.set_precision(model, "both")
    assert torch.allclose(step(model)[0], step(base)[0], rtol=1e-6)


def test_a_few_steps_train() -> None:
    model = llama()
    qt.apply(model, "nvfp4-attention")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        losses.append(float(step(model)[0]))
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_without_a_recipe_it_trains_and_checkpoints() -> None:
    qt.register_attention()
    found = []
    for checkpointing in (False, True):
        model = llama()
        model.set_attn_implementation("quatrain")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(7)
        found.append(step(model))
    assert equal(*found)


@pytest.mark.parametrize(("projection", "operand"), [("q", "scores.query"), ("k", "scores.key"), ("v", "dquery.grad")])
def test_non_finite_numbers_are_named(projection: str, operand: str) -> None:
    model = llama()
    qt.apply(model, "nvfp4-attention")
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, f"{projection}_proj").weight[0, 0] = torch.nan
    step(model)
    with pytest.raises(qt.NonFiniteError, match=rf"layers.1.self_attn \({operand}\)"):
        qt.check_finite(model)


def test_a_converted_model_saves_loads_and_generates(tmp_path: Path) -> None:
    model = llama()
    qt.apply(model, "nvfp4-attention")
    model.eval().save_pretrained(tmp_path)
    assert "quatrain" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="quatrain").eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    words = [m.generate(tokens(), max_new_tokens=5, do_sample=False) for m in (model, loaded)]
    assert words[0].shape[1] == 25 and torch.equal(*words)
    assert qt.rng_state(model).tolist() == [0]


def test_shapes_on_the_meta_device_leave_the_clock() -> None:
    model = llama()
    qt.apply(model, "nvfp4-attention")
    step(model)
    with torch.device("meta"):
        x = [torch.empty(1, 4, 5, 16) for _ in range(3)]
    out = attention_interface.attention_interface(model.model.layers[0].self_attn, *x, None)[0]
    assert out.shape == (1, 5, 4, 16) and out.is_meta
    assert qt.rng_state(model).tolist() == [1]


def test_a_run_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_run(tmp_path, "recipe=nvfp4-attention")
    train(whole, progress=False)

    def resumed(name: str) -> list[dict[str, Any]]:
        run, calls = replace_in(whole, out=str(tmp_path / name)), iter(range(1, 1000))
        with pytest.raises(KeyboardInterrupt):
            train(run, progress=False, stop=lambda: next(calls) >= 3)
        train(run, progress=False)
        return history(run.out)

    assert resumed("parted") == history(whole.out)
    monkeypatch.setattr(checkpoint, "set_rng_state", lambda *_: None)  # the control: the clock is not put back
    assert resumed("forgetful") != history(whole.out)


def test_refusals() -> None:
    model = llama()
    qt.apply(model, "nvfp4-attention")
    with pytest.raises(ValueError, match="converts a model once"):
        qt.apply(model, "nvfp4-attention")
    with pytest.raises(ValueError, match="need a transformers model"):
        qt.apply(nn.Sequential(nn.Linear(16, 16)), "nvfp4-attention")
    for config, message in (
        (Gemma2Config(**GROUPED, head_dim=16), "softcap"),
        (GptOssConfig(**GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2), "s_aux"),
        (GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=1), "attn_pdrop"),
    ):
        refused = AutoModelForCausalLM.from_config(config).train()
        qt.apply(refused, "nvfp4-attention")
        with pytest.raises(ValueError, match=message):
            refused(tokens())
    biased = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=96, num_layers=1)).eval()
    qt.apply(biased, "nvfp4-attention")
    with pytest.raises(ValueError, match="position_bias"):
        biased(tokens(), decoder_input_ids=tokens())
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=64, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="AttentionInterface"):
        qt.apply(bloom, LINEARS + "[attention]\nscores.query = 'nvfp4'")
    assert not qt.rng_state(bloom).any() and all(type(m) is not QuantLinear for m in bloom.modules())
    attention = model.model.layers[0].self_attn
    x = [torch.randn(1, 4, 5, 16) for _ in range(3)]
    for name, value in (
        ("dropout", 0.1), ("softcap", 30.0), ("s_aux", torch.zeros(4)), ("head_mask", torch.ones(4)),
        ("position_bias", torch.zeros(1)), ("output_attentions", True), ("sinks", torch.zeros(4)),
        ("indices", torch.zeros(1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            attention_interface.attention_interface(attention, *x, None, **{name: value})
    with pytest.raises(ValueError, match="additive bias"):
        attention_interface.attention_interface(attention, *x, torch.zeros(1, 1, 5, 5))
    with pytest.raises(ValueError, match="add a dimension for heads"):
        attention_interface.attention_interface(attention, *x, torch.ones(1, 5, 5, dtype=torch.bool))


def test_only_softmax_attention_is_converted() -> None:
    config = MiniMaxConfig(
        **GROUPED, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    report = qt.apply(AutoModelForCausalLM.from_config(config), "nvfp4-attention")
    assert list(report.converted) == ["model.layers.1.self_attn"]
    assert "attention of 1 modules: nvfp4, 6 of 6 attention operands" in report.summary()
    assert "attention of" not in qt.apply(llama(), "nvfp4-plain").summary()
