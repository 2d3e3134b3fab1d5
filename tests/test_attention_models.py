"""[attention] rows in recipes, and transformers models that train with them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import quatrain as qt
from quatrain.nn import AttentionRows, attention_interface, register_attention
from quatrain.recipe import diff

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7)),
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
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


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
    register_attention()
    monkeypatch.setattr(attention_interface, "NVFP4_ROWS", AttentionRows())
    torch.manual_seed(0)
    model = MODELS[name]().double()
    left, right = torch.ones(2, 2, 20, dtype=torch.long)
    left[0, :6], right[1, 15:] = 0, 0
    packed = torch.cat([torch.arange(9), torch.arange(11)])[None].expand(2, -1)
    for arguments in ({}, {"attention_mask": left}, {"attention_mask": right}, {"position_ids": packed}):
        found = []
        for implementation in ("sdpa", "quatrain"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            logits = model(tokens(), use_cache=False, **arguments).logits
            if "attention_mask" in arguments:
                logits = logits * arguments["attention_mask"][..., None]
            logits.square().mean().backward()
            found.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
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


def test_an_encoder_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    register_attention()
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
    register_attention()
    found = []
    for checkpoint in (False, True):
        model = llama()
        model.set_attn_implementation("quatrain")
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(7)
        found.append(step(model))
    assert equal(*found)


def test_non_finite_numbers_are_named() -> None:
    model = llama()
    qt.apply(model, "nvfp4-attention")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    model(tokens())
    with pytest.raises(qt.NonFiniteError, match=r"layers.1.self_attn \(scores.query\)"):
        qt.check_finite(model)


def test_refusals() -> None:
    model = llama()
    qt.apply(model, "nvfp4-attention")
    with pytest.raises(ValueError, match="converts a model once"):
        qt.apply(model, "nvfp4-attention")
    with pytest.raises(ValueError, match="need a transformers model"):
        qt.apply(nn.Sequential(nn.Linear(16, 16)), "nvfp4-attention")
    attention = model.model.layers[0].self_attn
    x = [torch.randn(1, 4, 5, 16) for _ in range(3)]
    for name, value in (
        ("dropout", 0.1), ("softcap", 30.0), ("s_aux", torch.zeros(4)), ("head_mask", torch.ones(4)),
        ("position_bias", torch.zeros(1)), ("output_attentions", True),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            attention_interface.attention_interface(attention, *x, None, **{name: value})
    with pytest.raises(ValueError, match="additive bias"):
        attention_interface.attention_interface(attention, *x, torch.zeros(1, 1, 5, 5))
