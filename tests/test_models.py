"""The presets are what they claim, build the same bits from the same seed, and leave the world as it was."""

import json

import pytest
import torch

from quatrain.models import build, build_from_path, presets

PAPER_BLOCKS = {  # arXiv 2509.25149: Mamba-2, FFN, attention
    "nemotron-h-8b": (24, 24, 4),
    "nemotron-nano-12b-v2": (28, 28, 6),
}
NAMED_SIZES = {"nemotron-3b": 3e9, "nemotron-h-8b": 8e9, "nemotron-nano-12b-v2": 12e9}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(name, **sizes):
    with torch.device("meta"):
        return build(name, **sizes)


def block_macs(model):
    """Multiply-accumulates a token of each block's linears, and of the head."""
    blocks = [
        sum(module.weight.numel() for module in block.modules() if isinstance(module, torch.nn.Linear))
        for block in model.model.layers
    ]
    return blocks, model.lm_head.weight.numel()


@pytest.mark.parametrize("name", sorted(presets()))
def test_parameter_count_is_the_one_written_down(name):
    model = on_meta(name)
    assert count(model) == presets()[name].parameters
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}
    assert not any(isinstance(m, torch.nn.Linear) and m.bias is not None for m in model.modules())


@pytest.mark.parametrize(("name", "size"), NAMED_SIZES.items())
def test_parameter_count_is_near_the_name(name, size):
    assert abs(presets()[name].parameters / size - 1) < 0.04


def test_the_paper_s_dense_model_is_1_2b_up_to_its_unstated_vocabulary():
    preset = presets()["nemotron-1.2b"]
    assert abs(preset.parameters / 1.2e9 - 1) < 0.08 and "vocabulary" in preset.source
    layer = on_meta("nemotron-1.2b").model.layers[0]
    assert type(layer.mlp.act_fn).__name__ == "ReLUSquaredActivation"
    assert layer.self_attn.k_proj.weight.shape == (1024, 2048) and layer.mlp.up_proj.weight.shape == (6144, 2048)


@pytest.mark.parametrize(("name", "expected"), PAPER_BLOCKS.items())
def test_hybrid_pattern_holds_the_paper_s_blocks(name, expected):
    pattern = presets()[name].config["hybrid_override_pattern"]
    assert tuple(map(pattern.count, "M-*")) == expected
    kinds = [block.block_type for block in on_meta(name).model.layers]
    assert len(kinds) == sum(expected)
    assert [kinds.count(kind) for kind in ("linear_attention", "mlp", "full_attention")] == list(expected)
    assert pattern.startswith("M-") and pattern.endswith("M-")


def test_every_preset_says_what_it_is_and_whence():
    for name, preset in presets().items():
        assert preset.name == name and preset.description and len(preset.source) > 40
        assert hash(preset) == hash(presets()[name]) and preset == presets()[name]
        with pytest.raises(TypeError):
            preset.config["hidden_size"] = 1
    assert "our choice" in presets()["nemotron-3b"].source
    for name in PAPER_BLOCKS:
        assert "public configuration is used" in presets()[name].source


def test_tiny_hybrid_leaves_three_quarters_of_the_linears_quantized():
    blocks, head = block_macs(on_meta("tiny-hybrid"))
    total = sum(blocks)
    last = next(n for n in range(1, len(blocks)) if sum(blocks[-n:]) >= 0.15 * total)
    assert last == 2  # the closing M-
    kept_nvfp4, kept_fp8 = sum(blocks[-last:]), blocks[0] + sum(blocks[-2:])
    for kept in (kept_nvfp4, kept_fp8):
        assert (total - kept) / total >= 0.75
        assert (total - kept) / (total + head) >= 0.75


def test_tiny_llama_leaves_three_quarters_of_its_blocks():
    blocks, _ = block_macs(on_meta("tiny-llama"))
    assert (blocks[0] + sum(blocks[-2:])) / sum(blocks) <= 0.25


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-llama"])
def test_same_seed_same_bits_and_the_generator_is_left_alone(name):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second, other = build(name, seed=3), build(name, seed=3), build(name, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [dict(model.named_parameters()) for model in (first, second, other)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert any(not torch.equal(value, weights[2][key]) for key, value in weights[0].items())
    assert all(value.dtype == torch.float32 and value.device.type == "cpu" for value in weights[0].values())
    assert first.training and not first.config.use_cache


def test_sizes_can_be_overridden_and_the_default_dtype_does_not_matter():
    torch.set_default_dtype(torch.float64)
    try:
        model = build("tiny-hybrid", vocab_size=300, max_positions=77)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.lm_head.weight.shape[0] == model.get_input_embeddings().weight.shape[0] == 300
    assert model.config.max_position_embeddings == 77
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-llama"])
def test_tiny_models_train_and_every_linear_is_called_as_a_module(name):
    model = build(name)
    called = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, *_: called.add(module))
    ids = torch.randint(0, 1024, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=ids[:, :-1])
    loss = torch.nn.functional.cross_entropy(out.logits.float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert called == {module for module in model.modules() if isinstance(module, torch.nn.Linear)}
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert 6.5 < loss.item() < 7.8
    with torch.no_grad():  # causal: a later token changes no earlier logit
        changed = ids[:, :-1].clone()
        changed[:, 20] = (changed[:, 20] + 1) % 1024
        difference = (model(input_ids=changed).logits - model(input_ids=ids[:, :-1]).logits).abs().amax((0, 2))
    assert difference[:20].max() < 1e-5 < difference[20]


def test_shape_from_a_folder(tmp_path):
    build("tiny-llama").config.save_pretrained(tmp_path)
    model, same = build_from_path(tmp_path, seed=1, vocab_size=500), build_from_path(str(tmp_path), seed=1)
    assert model.lm_head.weight.shape == (500, 128)
    assert torch.equal(
        same.model.layers[0].mlp.up_proj.weight, build("tiny-llama", seed=1).model.layers[0].mlp.up_proj.weight
    )
    assert not same.config.use_cache


def test_errors_name_rule_received_and_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"one of llama-76m, nemotron-1\.2b, .*tiny-llama; received 'tiny'; choose"):
        build("tiny")
    with pytest.raises(ValueError, match="vocab_size is at least 1; received 0; leave it out"):
        build("tiny-llama", vocab_size=0)
    with pytest.raises(ValueError, match="max_positions is at least 1; received -1; leave it out"):
        build("tiny-llama", max_positions=-1)
    with pytest.raises(
        FileNotFoundError, match=r"holds a transformers config\.json; received '.*'.*give such a folder"
    ):
        build_from_path(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"config\.json must describe.*received '.*config\.json'.*correct the file"):
        build_from_path(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ValueError, match=r"must describe a model type.*no-such-model.*; correct the file"):
        build_from_path(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match=r"is a causal language model; received '.*' of type 'clip'.*choose another"):
        build_from_path(tmp_path)
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="causal language model"):
        build_from_path(tmp_path, seed=9)
    assert torch.equal(torch.random.get_rng_state(), state)
