"""The Triton twin of attention against the reference: on a GPU where there is one, else in Triton's interpreter.

Both read the same packed views, bit for bit. Sums over tokens run in another order, and the twin rounds P before it is
divided by the softmax sum, so O agrees to BF16's rounding; gradients, which start from the same O and L, to fp32's.
"""

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quatrain as qt
from quatrain.formats import QTensor
from quatrain.kernels import attention
from quatrain.kernels.attention_layout import Geometry, keep_tokens, key_means, memory_orders, pad_tokens
from quatrain.kernels.attention_math import backward_reference, forward_reference
from quatrain.kernels.attention_rows import NVFP4_ROWS, AttentionRows
from quatrain.nn.attention import attention_keys, quantized_attention

pytest.importorskip("triton", reason="triton has no build for this platform")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from quatrain.kernels import attention_hopper_triton, attention_triton, attention_views_triton  # noqa: E402
from quatrain.kernels.attention_block_triton import quantize_ds, scaling  # noqa: E402
from quatrain.kernels.attention_native_triton import packed_ds  # noqa: E402
from quatrain.kernels.attention_tiles import Tuning, tuning_for  # noqa: E402
from quatrain.kernels.decode_triton import decode  # noqa: E402
from quatrain.kernels.quantize_triton import architecture  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
KEYS = attention_keys(3, 5, DEVICE)
HOPPER = (
    attention_hopper_triton.hopper_obstacle(architecture(0)) if GPU else "no GPU here, and Gluon has no interpreter"
)

NEAREST = replace(NVFP4_ROWS, dquery_grad=qt.QuantSpec("nvfp4"), dkey_grad=qt.QuantSpec("nvfp4"))
SQUARE = qt.QuantSpec("nvfp4", block=(16, 16))
ONE_PACKING = replace(
    NVFP4_ROWS, scores_query=SQUARE, scores_key=SQUARE, dquery_key=SQUARE, dkey_query=SQUARE, dkey_grad=None
)
UNBIASED = replace(NVFP4_ROWS, dquery_grad=qt.QuantSpec("nvfp4", scale="to-4", rounding="stochastic-unbiased"))
FORWARD_ONLY = replace(NVFP4_ROWS, dquery_grad=None, dkey_grad=None)
ONE_SCORE = replace(NVFP4_ROWS, scores_query=None, dkey_query=None)
STARTS = {"starts_q": torch.tensor([0, 20, 20, 57, 90]), "starts_k": torch.tensor([0, 20, 25, 60, 95])}
KEPT = torch.ones(2, 70, dtype=torch.bool)
KEPT[0, :9], KEPT[1, 60:] = False, False
MASK = torch.rand(2, 1, 40, 50, generator=torch.Generator().manual_seed(2)) > 0.5

CASES: dict[str, tuple[Any, ...]] = {  # rows, (batch, heads, key heads, queries, keys, head size, V's), rules
    "plain": (NEAREST, (1, 2, 2, 48, 48, 32, 32), {}),
    "causal": (NVFP4_ROWS, (1, 2, 2, 50, 50, 32, 32), {"causal": True}),
    "grouped": (NVFP4_ROWS, (2, 4, 2, 37, 61, 32, 16), {"causal": True, "bottom_right": True}),
    "more queries": (NVFP4_ROWS, (1, 2, 1, 61, 37, 24, 32), {"causal": True, "bottom_right": True}),
    "top left": (NVFP4_ROWS, (1, 1, 1, 61, 37, 24, 32), {"causal": True}),
    "window": (NEAREST, (1, 1, 1, 100, 100, 16, 16), {"causal": True, "window": 20}),
    "two-sided window": (NEAREST, (1, 1, 1, 100, 90, 16, 16), {"window": 20}),
    "padding": (NVFP4_ROWS, (2, 1, 1, 70, 70, 32, 32), {"causal": True, "kept": KEPT}),
    "mask": (NVFP4_ROWS, (2, 2, 1, 40, 50, 32, 32), {"mask": MASK.expand(2, 1, 40, 50), "kept": MASK.any(2).any(1)}),
    "packed": (NVFP4_ROWS, (1, 2, 1, 90, 95, 32, 32), {"causal": True, **STARTS}),
    "one packing": (ONE_PACKING, (1, 2, 2, 50, 50, 32, 32), {"causal": True}),
    "no rows": (AttentionRows(), (1, 1, 1, 50, 50, 40, 32), {"causal": True}),
    "forward only": (FORWARD_ONLY, (1, 1, 1, 50, 50, 72, 32), {"causal": True}),
    "one score": (ONE_SCORE, (1, 1, 1, 50, 50, 32, 32), {}),
    "unbiased": (UNBIASED, (1, 2, 2, 50, 50, 32, 32), {}),
    "one token": (NVFP4_ROWS, (1, 2, 2, 1, 1, 32, 32), {}),
    "one query": (NVFP4_ROWS, (1, 2, 2, 1, 40, 32, 32), {"causal": True, "bottom_right": True}),
}
if GPU:
    CASES |= {
        f"size {d}": (NVFP4_ROWS, (2, 4, g, t, t, d, d), {"causal": True})
        for d, g, t in ((32, 4, 512), (64, 2, 1001), (72, 4, 300), (96, 1, 513), (128, 4, 1024), (128, 2, 1001),
                        (256, 4, 640))
    }  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """NumPy, which runs the interpreter, warns of what fp32 on a GPU does in silence."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


def inputs(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k with a common part, v and dO."""
    b, h, g, tq, tk, d, e = sizes
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    return draw(b, h, tq, d), draw(b, g, tk, d) + draw(1, g, 1, d), draw(b, g, tk, e), draw(b, h, tq, e)


def error(a: Tensor, b: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in CASES] + [(name, torch.float16) for name in ("causal", "forward only")],
)
def test_twin_equals_reference(name: str, dtype: torch.dtype) -> None:
    rows, sizes, rules = CASES[name]
    q, k, v, do = inputs(sizes, dtype)
    rules = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in rules.items()}
    geometry = Geometry(sizes[1], sizes[3], sizes[5], sizes[5] ** -0.5, **rules)
    tensors = attention.pack_views(q, k, rows.plan.text, geometry, KEYS, True)
    views = attention._views(tensors, rows.slots(True))
    out, lse = forward_reference(views, v, rows, geometry)
    expected = backward_reference(do, views, v, out, lse, rows, geometry, KEYS)

    found_out, found_lse = attention_triton.forward(views, v, rows, geometry)
    found = attention_triton.backward(do, views, v, out, lse, rows, geometry, KEYS)

    assert found_out.stride() == out.stride()
    assert error(found_out, out) < (4e-3 if dtype == torch.bfloat16 else 6e-4)
    seen = lse != float("-inf")
    assert torch.equal(seen, found_lse != float("-inf"))
    torch.testing.assert_close(found_lse[seen], lse[seen], rtol=0, atol=2e-6)
    # A rounding of dS that falls the other way at a boundary moves one element by one step.
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert ours.shape == theirs.shape and error(ours, theirs) < 1e-3
    torch.testing.assert_close(found[3], expected[3], rtol=1e-6, atol=0)


def test_same_seed_same_bits() -> None:
    q, k, v, do = inputs((1, 2, 1, 40, 40, 32, 32), torch.bfloat16)

    def gradients(seed: int) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        keys = attention_keys(seed, 0, DEVICE)
        out = quantized_attention(*leaves, NVFP4_ROWS, is_causal=True, keys=keys, backend="triton")
        return list(torch.autograd.grad(out, leaves, do))

    first, second, other = gradients(1), gradients(1), gradients(2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    assert torch.equal(first[2], other[2])  # dV draws nothing


def test_non_finite_numbers_come_through() -> None:
    for place in range(3):
        leaves = list(inputs((1, 1, 1, 20, 20, 32, 32), torch.bfloat16))
        leaves[place][0, 0, 3, 5] = float("nan")
        out = quantized_attention(*leaves[:3], NVFP4_ROWS, keys=KEYS, backend="triton")
        assert out.isnan().any()


def test_what_it_cannot_serve_is_refused() -> None:
    q, k, v, _ = (x.float() for x in inputs((1, 1, 1, 4, 4, 16, 16), torch.bfloat16))
    with pytest.raises(ValueError, match='backend="triton" cannot run here: its products are of BF16 or FP16'):
        quantized_attention(q, k, v, NVFP4_ROWS, keys=KEYS, backend="triton")
    with pytest.raises(ValueError, match="needs a positive scale, received -1.0"):
        quantized_attention(q.half(), k.half(), v.half(), NVFP4_ROWS, scale=-1.0, keys=KEYS, backend="triton")
    with pytest.raises(ValueError, match='attention runs on backend="auto", "reference", "triton" or "blackwell"'):
        quantized_attention(q, k, v, NVFP4_ROWS, keys=KEYS, backend="cpu")


@pytest.mark.skipif(GPU, reason="on a GPU these kernels would compile for its cores; the interpreter decodes")
@pytest.mark.parametrize("name", ["causal", "packed", "forward only"])
def test_packed_operands_give_what_decoded_ones_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the native kernels load, and dS as they pack it, with the cores' product in plain arithmetic."""
    rows, sizes, rules = CASES[name]
    q, k, v, do = inputs(sizes, torch.bfloat16)
    geometry = Geometry(sizes[1], sizes[3], sizes[5], sizes[5] ** -0.5, **rules)
    tensors = attention.pack_views(q, k, rows.plan.text, geometry, KEYS, True)
    views = attention._views(tensors, rows.slots(True))
    out, lse = attention_triton.forward(views, v, rows, geometry)
    expected = attention_triton.backward(do, views, v, out, lse, rows, geometry, KEYS)

    monkeypatch.setattr(attention_triton, "_decoded", lambda *_: pytest.fail("an operand was decoded"))
    if name == "forward only":
        monkeypatch.undo()  # its products with dS are not of packed codes
    found_out, found_lse = attention_triton.forward(views, v, rows, geometry, native=True)
    found = attention_triton.backward(do, views, v, out, lse, rows, geometry, KEYS, native=True)

    assert error(found_out, out) < 1e-6
    torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-6)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert theirs.any() and error(ours, theirs) < 1e-5


@triton.jit
def pack_kernel(x_ptr, codes_ptr, scales_ptr, values_ptr, M: tl.constexpr, N: tl.constexpr, Q: tl.constexpr):
    row, column = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + row * N + column)
    ideal, decode = scaling(tl.max(tl.max(tl.abs(x), 1), 0), Q)
    tl.store(values_ptr + row * N + column, quantize_ds(x, row, row, 0, ideal, decode, Q, tl.float32, 0))
    codes, scales = packed_ds(x, row, row, 0, ideal, decode, Q, 0)
    tl.store(codes_ptr + row * (N // 2) + tl.arange(0, N // 2)[None, :], codes)
    tl.store(scales_ptr + row * (N // 16) + tl.arange(0, N // 16)[None, :], scales)


@pytest.mark.skipif(GPU, reason="the interpreter's path")
@pytest.mark.parametrize("spec", [NVFP4_ROWS.dquery_grad, qt.QuantSpec("nvfp4"), UNBIASED.dquery_grad])
def test_packed_ds_decodes_to_the_values_multiplied_elsewhere(spec: qt.QuantSpec) -> None:
    x = torch.randn(16, 64) * torch.exp(4 * torch.randn(16, 1))
    x[3], x[:, 20] = 0.0, -0.0
    codes, scales, values = torch.zeros(16, 32).byte(), torch.zeros(16, 4).byte(), torch.zeros(16, 64)
    pack_kernel[(1,)](x, codes, scales, values, 16, 64, attention_triton._constants(spec))
    parts = QTensor(codes, scales.view(torch.float8_e4m3fn), torch.ones(1), x.shape, qt.QuantSpec("nvfp4"))
    assert torch.equal(parts.block_values(torch.float32), values) and values.any()


def test_native_is_chosen_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    v = torch.zeros(1, 1, 16, 64).bfloat16()
    device, geometry = torch.device("cuda"), Geometry(1, 16, 64, 0.1)

    def chosen(backend: str, rows: AttentionRows = NVFP4_ROWS, v: Tensor = v) -> str:
        return attention.choose_attention(device, backend, v, geometry, rows)

    with pytest.raises(ValueError, match='backend="blackwell" cannot run here: it needs a tensor on a CUDA device'):
        attention.choose_attention(torch.device("cpu"), "blackwell")
    for name in ("triton_obstacle", "blackwell_obstacle"):
        monkeypatch.setattr(attention, name, lambda device: None)
    assert chosen("blackwell") == "blackwell" and chosen("auto") == "triton"
    with pytest.raises(ValueError, match=r"blocks of 1 x 16, received \[16, 16\] in scores.query"):
        chosen("blackwell", ONE_PACKING)
    with pytest.raises(ValueError, match="the row scores.query is missing"):
        chosen("blackwell", ONE_SCORE)
    with pytest.raises(ValueError, match="hold head sizes up to 128, received 256"):
        chosen("blackwell", NVFP4_ROWS, torch.zeros(1, 1, 16, 256).bfloat16())
    with pytest.raises(ValueError, match="its products are of BF16 or FP16"):
        chosen("blackwell", NVFP4_ROWS, v.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padded", [False, True])
def test_keys_are_smoothed_to_the_bit(dtype: torch.dtype, padded: bool) -> None:
    tokens = 300 if GPU else 70
    k = inputs((2, 2, 2, tokens, tokens, 24, 24), dtype)[1].transpose(1, 2).contiguous().transpose(1, 2)
    kept = None
    if padded:
        kept = torch.ones(2, tokens, dtype=torch.bool, device=DEVICE)
        kept[0, 50:] = False
        k[0, :, 60] = float("nan")
    geometry = Geometry(2, tokens, 24, 1.0, kept=kept)
    found, amax = attention_views_triton.center_keys(k, geometry)
    clean = keep_tokens(k, kept)
    expected = pad_tokens(keep_tokens((clean.float() - key_means(clean, geometry)).to(dtype), kept), None)
    assert torch.equal(found, expected)
    assert torch.equal(amax, expected.abs().max().float().expand(2))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_memory_is_linear() -> None:
    """No [queries, keys] tensor: twice the tokens need at most 2.1 times the memory."""

    def peak(tokens: int) -> int:
        leaves = [torch.randn(1, 4, tokens, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        quantized_attention(*leaves, NVFP4_ROWS, is_causal=True, keys=KEYS, backend="triton").sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(4096)
    assert peak(16384) < 2.1 * peak(8192)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_rows_are_a_copy_and_its_maximum(dtype: torch.dtype) -> None:
    x = inputs((2, 3, 3, 70, 70, 24, 24), dtype)[0].transpose(1, 2).contiguous().transpose(1, 2)
    for place in (0.0, float("nan")):
        x[1, 2, 33, 3] = place
        found, amax = attention_views_triton.dense_rows(x)
        expected = pad_tokens(x, None)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)  # NaNs' payloads may differ
        assert found.is_contiguous()
        assert torch.equal(amax.nan_to_num(-1.0), x.abs().max().float().nan_to_num(-1.0).expand(2))


def test_heads_decoded_beside_each_other() -> None:
    heads, tokens, size = 3, 32, 32
    q = qt.quantize(torch.randn(2 * heads * tokens, size, device=DEVICE), qt.QuantSpec("nvfp4", scale="four-over-six"))
    found = decode(q.codes, q.scales, q.spec, heads=heads, tokens=tokens)
    expected = decode(q.codes, q.scales, q.spec).view(2, heads, tokens, size).transpose(1, 2)
    assert torch.equal(found.view(2, tokens, heads, size), expected) and found.any()


@pytest.mark.parametrize("groups", [2, 1])
def test_layouts_change_no_bit(groups: int) -> None:
    """Of tensors laid out [b, t, h, d], as projections give them; their gradients lie so too."""
    tokens, size = (200, 128) if GPU else (20, 16)
    q, k, v, do = inputs((2, 2, groups, tokens, tokens, size, size), torch.bfloat16)

    def run(*tensors: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in tensors]
        out = quantized_attention(*leaves, NVFP4_ROWS, is_causal=True, keys=KEYS, backend="triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]

    plain = run(q, k, v)
    found = run(*(x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert all(x.is_contiguous() for x in plain[1:]) and all(x.transpose(1, 2).is_contiguous() for x in found)


@pytest.mark.skipif(HOPPER is not None, reason=f"Hopper's own kernels: {HOPPER}")
@pytest.mark.parametrize("in_model", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("tokens", [1, 64, 512, 1000, 1001])
def test_hopper_kernels_give_the_bits_of_those_for_any_gpu(
    tokens: int, groups: int, in_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs((2, 4, groups, tokens, tokens, 128, 128), torch.bfloat16)
    if in_model:
        tensors = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)  # type: ignore[assignment]
    q, k, v, do = tensors
    rows = UNBIASED if groups == 1 else NVFP4_ROWS
    geometry = Geometry(4, tokens, 128, 128**-0.5, causal=True, orders=memory_orders(q, k, v))
    views = attention._views(attention.pack_views(q, k, rows.plan.text, geometry, KEYS, True), rows.slots(True))
    launched: list[str] = []
    launch = attention_hopper_triton.launch

    def recorded(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.append(kernel.__name__)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(attention_hopper_triton, "launch", recorded)

    def run(tuning: Tuning | None) -> list[Tensor]:
        out, lse = attention_triton.forward(views, v, rows, geometry, tuning)
        return [out, lse, *attention_triton.backward(do, views, v, out, lse, rows, geometry, KEYS, tuning)]

    expected = run(tuning_for(128, 90))
    assert not launched
    found = run(None)
    assert launched == ["hopper_forward_kernel", "hopper_query_kernel", *["hopper_key_kernel"] * (4 // groups)]
    for name, a, b in zip(("O", "L", "dQ", "dK", "dV", "bound"), found, expected, strict=True):
        assert torch.equal(a, b), name
        assert a.any() or tokens == 1, name  # a single key less its mean is zero
    assert [x.stride() for x in found[2:5]] == [x.stride() for x in expected[2:5]]


def test_where_hopper_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """One departure from what they are written for, and the kernels for any GPU run."""
    monkeypatch.setattr(attention_hopper_triton, "hopper_obstacle", lambda arch: None)
    v = torch.zeros(1, 2, 48, 128).bfloat16()
    geometry = Geometry(2, 48, 128, 0.1, causal=True)
    serves = attention_hopper_triton.serves
    assert serves(v, geometry, 90) and serves(v[:, :1], geometry, 90)
    starts = torch.tensor([0, 48])
    for change in (
        {"causal": False}, {"window": 5}, {"queries": 47}, {"head_size": 64}, {"kept": torch.ones(1, 48) > 0},
        {"mask": torch.ones(1, 1, 48, 48) > 0}, {"starts_q": starts, "starts_k": starts},
    ):  # fmt: skip
        assert not serves(v, geometry._replace(**change), 90), change
    assert not serves(v.half(), geometry, 90) and not serves(v[..., :64], geometry, 90)
    q = torch.zeros(1, 2, 48, 128).bfloat16()
    for rows in (NVFP4_ROWS, UNBIASED, NEAREST, ONE_PACKING, ONE_SCORE, FORWARD_ONLY):
        views = attention._views(attention.pack_views(q, q, rows.plan.text, geometry, KEYS, True), rows.slots(True))
        wanted = rows in (NVFP4_ROWS, UNBIASED)
        assert attention_hopper_triton.serves_backward(views, rows) is wanted


def test_why_hopper_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    obstacle = attention_hopper_triton.hopper_obstacle.__wrapped__
    assert obstacle(90) is None and obstacle(80) == "they need compute capability 9.0, this is 8.0"
    monkeypatch.setattr(attention_hopper_triton, "_NEEDED", ("warp_specialize", "warp_weaver"))
    assert obstacle(90) == "the Gluon of this version of Triton has no warp_weaver"
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.nvidia.hopper", None)
    assert obstacle(90).startswith("this version of Triton has no Gluon that they can be written in (import of")
