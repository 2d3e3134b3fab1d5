"""apply: what is converted and what is kept, on plain modules and on transformers models."""

import copy
import warnings

import pytest
import torch
from torch import nn

import quatrain as qt
from quatrain.nn import QuantLinear

PLAIN = "nvfp4-plain"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 8, width: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.lm_head = nn.Linear(width, 64, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def kept_blocks(report) -> set[int]:
    return {int(n.split(".")[1]) for n in report.kept if n.startswith("layers.") and "norm" not in n}


def test_share_rounds_up_to_whole_blocks() -> None:
    report = qt.apply(Model(), "nvfp4")  # 15 % of 8 equal blocks: two
    assert kept_blocks(report) == {6, 7} and report.kept["layers.7.up"] == "block 8 of 8: last share 0.15"
    assert report.kept["lm_head"] == "output head" and report.kept["embed"] == "embedding"
    assert report.kept["layers.0.norm"] == "normalization"
    assert len(report.converted) == 12 and report.quantized_mac_share == 0.75
    assert report.quantized_mac_share_with_head < 0.75
    assert report.linears == (12, 17)
    assert "12 of 17 linears" in report.summary() and "75.0%" in report.summary()


def test_first_and_last_blocks() -> None:
    with pytest.warns(UserWarning, match="37.5%.*more than 25%"):
        report = qt.apply(Model(), "fp8")
    assert kept_blocks(report) == {0, 6, 7}


def test_nothing_else_in_the_plain_recipes() -> None:
    report = qt.apply(Model(), PLAIN)
    assert kept_blocks(report) == set() and report.quantized_mac_share == 1.0


def test_bf16_converts_nothing_and_is_no_error() -> None:
    model = Model()
    report = qt.apply(model, "bf16")
    assert report.converted == {} and not any(isinstance(m, QuantLinear) for m in model.modules())
    assert qt.apply(model, PLAIN).converted  # still free to be converted


def test_tied_head_stays_even_when_asked_for() -> None:
    text = qt.load_recipe(PLAIN).to_toml().replace("head = true", "head = false")
    report = qt.apply(Model(tied=True), text)
    assert report.kept["lm_head"] == "its weight is tied to the embedding embed"
    model = Model()
    report = qt.apply(model, text)
    assert "lm_head" in report.converted and report.head_macs == 0 and report.quantized_mac_share == 1.0


def test_names_keep_and_a_pattern_without_match_raises() -> None:
    text = qt.load_recipe(PLAIN).to_toml().replace("names = []", 'names = ["*.down"]')
    with pytest.warns(UserWarning, match="50.0%"):
        report = qt.apply(Model(), text)
    assert report.kept["layers.3.down"] == "name pattern '*.down'" and len(report.converted) == 8
    with pytest.raises(ValueError, match=r"pattern '\*.dwn' matches no linear.*layers.0.up"):
        qt.apply(Model(), text.replace("*.down", "*.dwn"))


def test_blocks_are_found_or_named() -> None:
    flat = nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)])
    with pytest.raises(ValueError, match='keep.blocks = "path.to.list"'):
        qt.apply(flat, "nvfp4")
    model = nn.ModuleDict({"body": flat})
    text = qt.load_recipe("nvfp4").to_toml().replace("[linear.keep]", '[linear.keep]\nblocks = "body"')
    assert set(qt.apply(model, text).kept) == {"body.8", "body.9"}
    with pytest.raises(ValueError, match="names no module"):
        qt.apply(Model(), text.replace('"body"', '"bodies"'))


def test_second_apply_and_nothing_to_convert_raise() -> None:
    model = Model()
    qt.apply(model, PLAIN)
    with pytest.raises(ValueError, match="converts a model once, received one whose 'layers.0.up' is converted"):
        qt.apply(model, "nvfp4")
    with pytest.raises(ValueError, match="would convert nothing: the model has no nn.Linear"):
        qt.apply(nn.Sequential(nn.ReLU()), PLAIN)
    with pytest.raises(ValueError, match="would convert nothing"):
        qt.apply(Model(2), qt.load_recipe("nvfp4").to_toml().replace("last_share = 0.15", "last_share = 0.99"))


def test_subclasses_routers_and_shared_modules() -> None:
    class Odd(nn.Linear):
        pass

    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 4)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"odd": Odd(32, 32), "moe": Moe(), "a": shared, "b": shared})
    report = qt.apply(model, PLAIN)
    assert report.kept["odd"].startswith("a subclass of nn.Linear") and report.kept["moe.gate"] == "router of experts"
    assert "a" in report.converted and "b" not in report.converted and model["b"] is model["a"]
    assert isinstance(model["b"], QuantLinear)


def test_shared_weights_of_two_linears_stay_shared() -> None:
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    qt.apply(model, PLAIN)
    model(torch.randn(4, 32)).sum().backward()
    assert a.weight is b.weight and a.weight.grad.abs().max() > 0


def test_state_dict_is_that_of_the_plain_model() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    qt.apply(model, "nvfp4")
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]


def test_deepcopy_has_a_clock_of_its_own() -> None:
    model = Model()
    qt.apply(model, PLAIN)
    twin = copy.deepcopy(model)
    twin(torch.randint(0, 64, (2, 16)))
    assert qt.rng_state(twin).tolist() == [1] and qt.rng_state(model).tolist() == [0]


def test_meta_model_converts_then_materializes() -> None:
    with torch.device("meta"):
        ghost = Model()
    qt.apply(ghost, PLAIN)
    assert ghost(torch.randint(0, 64, (2, 16), device="meta")).shape == (2, 16, 64)
    ghost = ghost.to_empty(device="cpu")
    real = Model()
    ghost.load_state_dict(real.state_dict())
    qt.apply(real, PLAIN)
    ids = torch.randint(0, 64, (2, 16))
    assert torch.equal(ghost(ids), real(ids))


@pytest.mark.parametrize(
    "name", [n for n in qt.recipe_names() if (r := qt.load_recipe(n)).quantizes and not r.attention.quantizes]
)
def test_every_recipe_trains_a_step(name: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model(12)
        report = qt.apply(model, name)
    assert report.converted
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 64, (4, 33))
    losses = []
    for _ in range(4):
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    qt.check_finite(model)
    assert losses[-1] < losses[0]


def tiny_nemotron_h():
    transformers = pytest.importorskip("transformers")
    config = transformers.NemotronHConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, hybrid_override_pattern="M-M*M-M-M-M-",
        num_hidden_layers=12,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, mamba_num_heads=4, mamba_head_dim=32,
        ssm_state_size=16, n_groups=1, chunk_size=32, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_nemotron_h_converts_projections_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_nemotron_h()
    report = qt.apply(model, "nvfp4")
    children = {name.rsplit(".", 1)[-1] for name in report.converted}
    assert children == {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    assert report.kept["lm_head"] == "output head" and report.kept["model.layers.11.mixer.up_proj"].startswith(
        "block 12 of 12"
    )
    assert (
        "A_log" in report.kept["model.layers.0.mixer"] and "convolution" in report.kept["model.layers.0.mixer.conv1d"]
    )

    calls = []
    import quatrain.nn.linear as linear

    original = linear.weight_codes
    owners = {id(model.get_submodule(name).weight): name for name in report.converted}
    monkeypatch.setattr(linear, "weight_codes", lambda w, *a: calls.append(owners[id(w)]) or original(w, *a))
    ids = torch.randint(0, 128, (2, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = sorted(report.converted)
    assert sorted(calls) == expected  # every one ran as a module, out_proj of each Mamba block included
    assert sum(n.endswith("out_proj") for n in calls) == 5
    for name in expected:
        assert model.get_submodule(name).weight.grad.abs().max() > 0


def test_fused_mamba_kernel_cannot_bypass_out_proj(monkeypatch: pytest.MonkeyPatch) -> None:
    """With mamba_ssm installed transformers passes out_proj.weight into a kernel; stand in for it and count."""
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    calls = []

    def fused(*args: object, **kwargs: object) -> None:
        calls.append(kwargs.get("outproj_weight"))

    monkeypatch.setattr(modeling, "mamba2_split_conv1d_scan_combined", fused)
    model = tiny_nemotron_h()
    model.config.use_cache = False
    ids = torch.randint(0, 128, (2, 64))
    model(input_ids=ids)
    assert calls and calls[0] is not None  # this is how the stock model would leave the module out
    calls.clear()
    report = qt.apply(model, "nvfp4")
    model(input_ids=ids, labels=ids).loss.backward()
    quantized = {id(model.get_submodule(name).weight) for name in report.converted}
    assert len(calls) == 1 and id(calls[0]) not in quantized  # only the block that is kept in BF16
    assert all(m.training for m in model.modules())


def test_llama_with_tied_embeddings() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    report = qt.apply(model, PLAIN)
    assert report.kept["lm_head"].startswith("its weight is tied") and len(report.converted) == 28


def test_fused_experts_count_and_are_named() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning, match="more than 25%"):
        report = qt.apply(model, "nvfp4")
    assert report.quantized_mac_share < 0.3 and any("fused expert weights" in note for note in report.notes)
    assert any("experts" in name for name in report.kept)


def test_heads_of_other_tasks_stay() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_labels=3
    )
    report = qt.apply(transformers.LlamaForSequenceClassification(config), PLAIN)
    assert report.kept["score"] == "output head"


def test_torchs_encoder_fast_path_cannot_bypass() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    plain = copy.deepcopy(encoder).eval()
    report = qt.apply(encoder, PLAIN)
    assert "layers.0.linear1" in report.converted and "layers.0.self_attn.out_proj" in report.kept
    x = torch.randn(2, 8, 32)
    encoder.train()
    expected = encoder(x)
    encoder.eval()
    with torch.no_grad():
        assert torch.allclose(encoder(x), expected, atol=1e-6) and not torch.allclose(encoder(x), plain(x), atol=1e-3)


def test_a_share_that_fits_exactly_takes_no_block_more() -> None:
    text = qt.load_recipe("nvfp4").to_toml()
    for count, share, kept in ((100, 0.07, 7), (50, 0.14, 7), (25, 0.28, 7)):
        model = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(count))})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = qt.apply(model, text.replace("0.15", str(share)))
        assert len(report.kept) == kept


def test_shared_blocks_and_their_other_names() -> None:
    block = Block(32)
    model = Model(4)
    model.layers[3] = model.layers[0] = block
    text = qt.load_recipe(PLAIN).to_toml()
    with pytest.warns(UserWarning):
        report = qt.apply(model, text.replace("last_blocks = 0", "last_blocks = 1"))
    assert "layers.0.up" in report.kept and not isinstance(block.up, QuantLinear)
    model = nn.ModuleDict({"a": block, "b": block, "c": nn.Linear(32, 32)})
    with pytest.warns(UserWarning):
        report = qt.apply(model, text.replace("names = []", 'names = ["b.*"]'))
    assert set(report.converted) == {"c"}


def test_blocks_without_linears_raise() -> None:
    model = nn.ModuleDict({"norms": nn.ModuleList([nn.LayerNorm(8)]), "layers": nn.ModuleList([nn.Linear(8, 8)])})
    text = qt.load_recipe("nvfp4").to_toml().replace("[linear.keep]", '[linear.keep]\nblocks = "norms"')
    with pytest.raises(ValueError, match="members hold nn.Linear layers, received 'norms'"):
        qt.apply(model, text)


def test_a_converted_mamba_model_can_be_copied_and_saved_whole(tmp_path) -> None:
    model = tiny_nemotron_h()
    qt.apply(model, "nvfp4")
    twin = copy.deepcopy(model)
    ids = torch.randint(0, 128, (1, 32))
    assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
    torch.save(model, tmp_path / "whole.pt")


def test_phases_are_mentioned_to_whoever_runs_the_loop() -> None:
    text = qt.load_recipe(PLAIN).to_toml() + '\n[[phase]]\nat = 0.8\nbf16 = "forward"\n'
    assert any("set_precision" in note for note in qt.apply(Model(), text).notes)


def test_linears_of_one_weight_are_not_split() -> None:
    """The first split would change the weight under the other; rows alone change nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    before = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match="keeps 66.7%"):
        report = qt.apply(model, '[linear]\nsplit = { kind = "svd", rank = 16 }\n')
    assert set(report.converted) == {"1"} and all("another linear's too" in report.kept[name] for name in "02")
    assert torch.equal(model[0].weight, before) and model[2].weight is model[0].weight
