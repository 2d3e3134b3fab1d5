"""The scan against float64, with trained-like decays, and in transformers' Nemotron-H without changing what that is."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from quatrain.kernels.ssd import causal_conv_silu, ssd_scan

transformers = pytest.importorskip("transformers")
from quatrain.models import build, mamba  # noqa: E402
from quatrain.models.mamba import SsdMixer, use_ssd_scan  # noqa: E402

CHUNK = 32
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 1000)


def recurrence(x, dt, A, B, C, D):
    """The definition, one position after the other."""
    heads, groups = x.shape[2], B.shape[2]
    B, C = (t.repeat_interleave(heads // groups, 2) for t in (B, C))
    state, out = torch.zeros_like(x[:, 0, :, :, None] * B[:, 0, :, None, :]), []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        state = state * torch.exp(step * A[:, None, None]) + step * x[:, t, :, :, None] * B[:, t, :, None, :]
        out.append((state * C[:, t, :, None, :]).sum(-1) + x[:, t] * D[:, None])
    return torch.stack(out, 1)


def scan_inputs(length, heads=4, groups=2, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    parts = {
        "x": torch.randn(2, length, heads, 8, generator=g),
        "dt": torch.exp(torch.rand(2, length, heads, generator=g) * math.log(500)) * 1e-3,
        "A": -1 - 15 * torch.rand(heads, generator=g),
        "B": torch.randn(2, length, groups, 6, generator=g),
        "C": torch.randn(2, length, groups, 6, generator=g),
        "D": torch.randn(heads, generator=g),
    }
    return {name: t.to(dtype).requires_grad_() for name, t in parts.items()}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_scan_is_the_recurrence_in_float64(length, chunk):
    parts = scan_inputs(length)
    expected = recurrence(**parts)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad(expected, parts.values(), dy)
    y = ssd_scan(**parts, chunk=chunk)
    assert y.dtype == torch.float64 and torch.allclose(y, expected, rtol=1e-11, atol=1e-11)
    for name, found, want in zip(parts, torch.autograd.grad(y, parts.values(), dy), wanted, strict=True):
        assert torch.allclose(found, want, rtol=1e-9, atol=1e-10), name


def test_scan_survives_extreme_steps():
    """Decays that underflow, steps of zero, and sums far beyond the grid: no NaN, no infinity."""
    parts = scan_inputs(70, dtype=torch.float32)
    with torch.no_grad():
        parts["dt"][:, ::7] = 0.0
        parts["dt"][:, 3::5] = 1e4
    y = ssd_scan(**parts, chunk=32)
    grads = torch.autograd.grad(y.sum(), parts.values())
    assert all(torch.isfinite(t).all() for t in (y, *grads))
    wide = {name: t.detach().double() for name, t in parts.items()}
    assert torch.allclose(y.double(), recurrence(**wide), rtol=1e-5, atol=1e-3)


def test_scan_casts_gradients_and_rejects_what_does_not_fit():
    parts = scan_inputs(20, dtype=torch.bfloat16)
    y = ssd_scan(**parts, operands=torch.bfloat16)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert all(t.grad.dtype == torch.bfloat16 for t in parts.values())
    with pytest.raises(ValueError, match="chunk is at least 1, received 0; leave it out"):
        ssd_scan(**parts, chunk=0)
    with pytest.raises(ValueError, match=r"dt must have shape \(2, 20, 4\), received \(2, 20, 3\)"):
        ssd_scan(**parts | {"dt": parts["dt"][..., :3]})
    with pytest.raises(ValueError, match="groups must divide the heads, received"):
        ssd_scan(**parts | {"B": parts["B"].repeat(1, 1, 2, 1)[:, :, :3], "C": parts["C"].repeat(1, 1, 2, 1)[:, :, :3]})
    with pytest.raises(ValueError, match=r"operands is torch.bfloat16, torch.float32 here.*received torch.float16"):
        ssd_scan(**parts, operands=torch.float16)
    with pytest.raises(ValueError, match=r"x is \[b, t, h, p\]"):
        ssd_scan(**parts | {"x": parts["x"][0]})


def test_convolution_is_torchs_causal_depthwise_one():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 5, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, generator=g, dtype=torch.float64, requires_grad=True)
    y = causal_conv_silu(x, weight, bias)
    want = nn.functional.silu(nn.functional.conv1d(x.mT, weight[:, None], bias, padding=3, groups=5)[..., :9].mT)
    assert torch.allclose(y, want, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(t.sin().sum(), (x, weight, bias)) for t in (y, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    short = causal_conv_silu(x[:, :1].bfloat16(), weight.float(), None)
    assert short.dtype == torch.float32
    assert torch.allclose(short, nn.functional.silu(x[:, :1].bfloat16() * weight[:, -1].float()))


# --- in Nemotron-H ------------------------------------------------------------------------------------------------


class Wide(TorchFunctionMode):
    """Whatever a model casts to fp32 it casts to float64, so that its evaluation is float64 throughout."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        if func is torch.Tensor.to:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **(kwargs or {}))


def nemotron_h(groups=2, pattern="M-M*M", seed=0, heads=8):
    config = transformers.NemotronHConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, hybrid_override_pattern=pattern,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, mamba_num_heads=heads, mamba_head_dim=16,
        ssm_state_size=16, n_groups=groups, chunk_size=CHUNK, tie_word_embeddings=False, use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight *= 4
            if hasattr(module, "A_log"):  # as training leaves them: A from 1 to 16, steps from 1e-3 to 0.5
                module.A_log.copy_(torch.log(1 + 15 * torch.rand(heads)))
                step = torch.exp(torch.rand(heads) * math.log(500)) * 1e-3
                module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
                module.D.copy_(torch.randn(heads))
    return model


def converted(model, chunk=CHUNK):
    ours = copy.deepcopy(model)
    assert use_ssd_scan(ours) and not use_ssd_scan(ours)
    for module in ours.modules():
        if isinstance(module, SsdMixer):
            module.scan_chunk = chunk
    return ours


def tokens(length, batch=2, seed=0):
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def evaluate(model, ids, autocast=False, **more):
    """Logits and the gradient of every parameter, in float64."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        logits = model(input_ids=ids, **more).logits
    targets = ids.roll(-1, 1).flatten()
    nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets).backward()
    return {"logits": logits.detach().double()} | {n: p.grad.double() for n, p in model.named_parameters()}


def errors(found, true):
    return {name: ((found[name] - t).norm() / t.norm()).item() for name, t in true.items() if t.norm() > 1e-12}


def ratios(length, groups, autocast, chunk, draws):
    """Our error over transformers', root mean squares over draws and layers: eight numbers alone may come by luck."""
    total = {}
    for seed in range(draws):
        model, ids = nemotron_h(groups, seed=seed), tokens(length, seed=seed)
        with Wide():
            true = evaluate(copy.deepcopy(model).double(), ids)
        for column, candidate in enumerate((converted(model, chunk), model)):
            for name, error in errors(evaluate(candidate, ids, autocast), true).items():
                kind = ".".join(name.split(".")[-2:])
                total.setdefault(kind, [0.0, 0.0])[column] += error**2
    return {kind: math.sqrt(ours / stock) for kind, (ours, stock) in total.items()}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_error_is_at_most_twice_that_of_transformers(length, groups):
    found = ratios(length, groups, False, CHUNK, 6 if length < 1000 else 3)
    assert len(found) >= 16 or length == 1
    assert max(found.values()) <= 2.0, max(found, key=found.get)


@pytest.mark.parametrize("operands", [None, torch.bfloat16])
def test_error_under_autocast_is_at_most_twice_that_of_transformers(operands, monkeypatch):
    monkeypatch.setattr(mamba, "_operands", lambda projected: operands)
    for length, chunk, draws in ((33, CHUNK, 12), (300, 128, 6)):
        found = ratios(length, 2, True, chunk, draws)
        assert max(found.values()) <= 2.0, max(found, key=found.get)


def test_the_internal_chunk_does_not_matter():
    model, ids = nemotron_h(), tokens(100)
    logits = [converted(model, chunk)(input_ids=ids).logits for chunk in (None, 8, 24, 256)]
    assert all(torch.allclose(one, logits[0], atol=2e-5) for one in logits)
    assert "scan" in repr(converted(model, 24)) and "24" in repr(converted(model, 24))


def test_padding_is_masked_as_transformers_does():
    model, ids = nemotron_h(), tokens(50)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    mask[1, 40:] = 0
    stock, ours = evaluate(model, ids, attention_mask=mask), evaluate(converted(model), ids, attention_mask=mask)
    assert not torch.allclose(ours["logits"][0, 14:], evaluate(model, ids)["logits"][0, 14:], atol=1e-3)
    assert max(errors(ours, stock).values()) < 1e-4


def test_generation_and_packed_sequences_take_transformers_own_forward(monkeypatch):
    model, ids = nemotron_h().eval(), tokens(40, batch=1)
    ours = converted(model)
    text = [m.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True, pad_token_id=0) for m in (model, ours)]
    assert torch.equal(*text)
    full = ours(input_ids=text[0][:, :-1]).logits  # every step of the cache equals one scan
    assert torch.equal(full[0, 39:].argmax(-1), text[0][0, 40:])
    calls = []
    monkeypatch.setattr(mamba.NemotronHMamba2Mixer, "forward", lambda *a, **k: calls.append(k) or a[1])
    mixer = ours.model.layers[0].mixer
    x = torch.randn(1, 8, 64)
    for more in ({"cache": 1}, {"cache_params": 1}, {"seq_idx": torch.zeros(1, 8)}, {"cu_seqlens": 1}):
        assert mixer(x, **more) is x
    assert len(calls) == 4
    assert mixer(x, cache=None, seq_idx=None, num_items_in_batch=torch.tensor(3)) is not x


def test_checkpoint_stays_nemotron_h(tmp_path):
    model = build("tiny-hybrid", vocab_size=128, seed=1)
    mixers = [m for m in model.modules() if hasattr(m, "A_log")]
    assert len(mixers) == 6 and all(isinstance(m, SsdMixer) for m in mixers)
    ids = tokens(70)
    model.eval().save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config.architectures == ["NemotronHForCausalLM"] and plain.config.model_type == "nemotron_h"
    assert not any(isinstance(m, SsdMixer) for m in plain.modules())
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.allclose(plain(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4)
    whole = copy.deepcopy(model)
    torch.save(model, tmp_path / "whole.pt")
    again = torch.load(tmp_path / "whole.pt", weights_only=False)
    for twin in (whole, again):
        assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)


def test_meta_mixer_runs_without_memory():
    with torch.device("meta"):
        mixer = build("tiny-hybrid").model.layers[0].mixer
        assert isinstance(mixer, SsdMixer)
        out = mixer(torch.zeros(2, 65, 128))
    assert out.is_meta and out.shape == (2, 65, 128)
    out.sum().backward()
    assert mixer.A_log.grad.is_meta


def test_checkpointing_and_accumulation_give_the_same_gradients():
    model, ids = converted(nemotron_h()), tokens(45, batch=4)
    whole = evaluate(model, ids)
    model.zero_grad()
    for half in ids.chunk(2):
        logits = model(input_ids=half).logits.double()
        (nn.functional.cross_entropy(logits.flatten(0, 1), half.roll(-1, 1).flatten()) / 2).backward()
    halves = {n: p.grad.double() for n, p in model.named_parameters()}
    assert max(errors(halves, {n: g for n, g in whole.items() if n != "logits"}).values()) < 1e-5
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = evaluate(model, ids)
    assert all(torch.equal(again[name], g) for name, g in whole.items())
    parts = scan_inputs(40)
    y = checkpoint(lambda **p: ssd_scan(**p, chunk=8), **parts, use_reentrant=False)
    assert torch.equal(y, ssd_scan(**parts, chunk=8))


def test_scan_keeps_no_scores():
    """What the backward pass holds grows with the sequence as the inputs do, not with the chunk."""
    parts = scan_inputs(256, dtype=torch.float32)
    sizes = {}
    for chunk in (32, 128):
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: held.append(t.numel()) or t, lambda t: t):
            ssd_scan(**parts, chunk=chunk)
        sizes[chunk] = sum(held)
        assert max(held) <= 2 * parts["x"].numel()
    assert sizes[128] < sizes[32]


@pytest.mark.parametrize("autocast", [False, True])
def test_the_model_is_one_graph(autocast):
    """Traced whole, forward and backward; the compiler's own kernels are the next test's matter, they take long."""
    model, ids = converted(nemotron_h()), tokens(70)
    expected = evaluate(model, ids, autocast)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled.zero_grad = model.zero_grad
    compiled.named_parameters = model.named_parameters
    assert max(errors(evaluate(compiled, ids, autocast), expected).values()) < (0.1 if autocast else 1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        evaluate(compiled, tokens(70, seed=5), autocast)


def test_compiled_scan_gives_the_same_numbers():
    parts = scan_inputs(70, heads=2, groups=1, dtype=torch.float32)
    scan = torch.compile(lambda **p: ssd_scan(**p, chunk=32), fullgraph=True)
    y, same = scan(**parts), ssd_scan(**parts, chunk=32)
    true = ssd_scan(**{name: t.detach().double().requires_grad_() for name, t in parts.items()})
    assert (y - true).norm() < 2 * (same - true).norm()
    grads = [torch.autograd.grad(t.square().sum(), parts.values()) for t in (y, same)]
    for name, found, want in zip(parts, *grads, strict=True):
        assert (found - want).norm() < 3e-6 * want.norm(), name


def test_an_empty_sequence_gives_an_empty_one() -> None:
    x, dt, bc = torch.zeros(2, 0, 3, 4), torch.zeros(2, 0, 3), torch.zeros(2, 0, 1, 5)
    assert ssd_scan(x, dt, -torch.ones(3), bc, bc, torch.ones(3)).shape == x.shape
