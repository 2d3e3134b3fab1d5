"""Mixed-precision attention: softmax attention without rows; with them, what follows from what is quantized."""

from typing import Any

import pytest
import torch
from torch import Tensor

import quatrain as qt
from quatrain.kernels import attention_math
from quatrain.kernels.attention import attention_backward, attention_forward, pack_views
from quatrain.kernels.attention_layout import Geometry, keep_tokens, key_means, memory_orders
from quatrain.kernels.attention_rows import NVFP4_ROWS, AttentionRows
from quatrain.kernels.rounding import make_key, random_bits
from quatrain.nn import attention_keys, quantized_attention
from quatrain.telemetry import saved_bytes

S = qt.QuantSpec
NONE = AttentionRows()
VALUE, NEAREST, SQUARE = S(scale="four-over-six"), S(), S(block=(16, 16), scale="four-over-six")
ROUNDED = AttentionRows(VALUE, VALUE, NEAREST, VALUE, NEAREST, VALUE)
sdpa = torch.nn.functional.scaled_dot_product_attention


def inputs(
    b: int = 2, h: int = 4, g: int = 2, tq: int = 33, tk: int = 33, d: int = 32, e: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:  # fmt: skip
    """q, k, v and the gradient of the output."""
    torch.manual_seed(tq * 1000 + tk)
    shapes = ((b, h, tq, d), (b, g, tk, d), (b, g, tk, e or d), (b, h, tq, e or d))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def run(function: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **arguments: Any) -> list[Tensor]:
    """O, dQ, dK, dV."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = function(*leaves, **arguments)
    out.backward(do)
    return [out.detach(), *(t.grad for t in leaves)]


def ours(*tensors: Tensor, spec: Any = NVFP4_ROWS, **arguments: Any) -> list[Tensor]:
    return run(qt.attention, *tensors, spec=spec, **arguments)


def theirs(*tensors: Tensor, **arguments: Any) -> list[Tensor]:
    return run(sdpa, *tensors, enable_gqa=True, **arguments)


def error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-12))


def assert_equal(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-6) -> None:
    for name, x, y in zip(("O", "dQ", "dK", "dV"), found, wanted, strict=True):
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), (name, float((x - y).abs().max()))


@pytest.mark.parametrize("tokens", [1, 9, 127, 128, 129])
@pytest.mark.parametrize("causal", [False, True])
def test_without_rows_it_is_softmax_attention(tokens: int, causal: bool) -> None:
    x = inputs(tq=tokens, tk=tokens)
    wanted = theirs(*x, is_causal=causal)
    assert_equal(ours(*x, spec=NONE, is_causal=causal), wanted)
    for y, z in zip(ours(*x, is_causal=causal), wanted, strict=True):
        assert (y - z).norm() < 0.3 * z.norm() + 1e-6  # of one token, dQ and dK are zero


@pytest.mark.parametrize(
    ("h", "g", "d", "e"),
    [(4, 4, 32, 32), (2, 1, 64, 64), (4, 1, 72, 72), (6, 2, 96, 40), (2, 2, 128, 128), (1, 1, 256, 256)],
)
def test_heads_and_their_sizes(h: int, g: int, d: int, e: int) -> None:
    x = inputs(b=1, h=h, g=g, d=d, e=e)
    assert_equal(ours(*x, spec=NONE, is_causal=True, scale=0.1), theirs(*x, is_causal=True, scale=0.1))
    found, wanted = ours(*x, is_causal=True), theirs(*x, is_causal=True)
    assert all(0.01 < error(a, b) < 0.3 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_long_and_unequal(causal: bool) -> None:
    x = inputs(b=1, h=2, g=1, tq=1001, tk=503, d=32)
    assert_equal(ours(*x, spec=NONE, is_causal=causal), theirs(*x, is_causal=causal))
    found = ours(*x, is_causal=causal)
    assert all(torch.isfinite(t).all() for t in found)
    assert all(error(a, b) < 0.3 for a, b in zip(found, theirs(*x, is_causal=causal), strict=True))


def test_gradcheck_without_rows() -> None:
    q, k, v, _ = inputs(b=1, h=2, g=1, tq=5, tk=7, d=3)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for arguments in ({}, {"is_causal": True, "bottom_right": True}, {"is_causal": True, "window": 2}):
        assert torch.autograd.gradcheck(lambda *t, a=arguments: qt.attention(*t, spec=NONE, **a), leaves)


def seen(tq: int, tk: int, causal: bool, window: int | None, bottom_right: bool) -> Tensor:
    """Straight from the words of the docstring."""
    rows = []
    for i in range(tq):
        place = i + (tk - tq if bottom_right else 0)
        if causal:
            rows.append([j <= place and (window is None or j > place - window) for j in range(tk)])
        else:
            rows.append([window is None or abs(j - place) <= window for j in range(tk)])
    return torch.tensor(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_masks(causal: bool, bottom_right: bool, window: int | None) -> None:
    x = inputs(tq=20, tk=33)
    rule = {"is_causal": causal, "bottom_right": bottom_right, "window": window}
    mask = seen(20, 33, causal, window, bottom_right)
    assert_equal(ours(*x, spec=NONE, **rule), theirs(*x, attn_mask=mask))
    assert_equal(ours(*x, spec=NONE, mask=mask[None, None]), theirs(*x, attn_mask=mask))
    # The same numbers enter whether a rule or a mask says what is seen, as long as every key is seen by some query.
    if not window and not (causal and not bottom_right):
        assert_equal(ours(*x, spec=ROUNDED, **rule), ours(*x, spec=ROUNDED, mask=mask[None, None]), 0)


def test_padding_counts_for_nothing() -> None:
    q, k, v, do = inputs(tq=24, tk=24)
    kept = torch.ones(2, 24, dtype=torch.bool)
    kept[0, :7] = False
    kept[1, 20:] = False
    mask = kept[:, None, None] & seen(24, 24, True, None, False)
    rules = {"is_causal": True, "key_padding": kept}
    found, wanted = ours(q, k, v, do, spec=NONE, **rules), theirs(q, k, v, do, attn_mask=mask)
    wanted[0][0, :, :7] = 0  # what sees nothing is zero
    assert_equal(found, [torch.nan_to_num(t) for t in wanted])
    spoiled = [torch.where(kept[:, None, :, None], t, torch.nan) for t in (k, v)]
    clean, dirty = ours(q, k, v, do, **rules), ours(q, *spoiled, do, **rules)
    assert_equal(dirty, clean, 0)
    assert not clean[2][0, :, :7].any() and not clean[3][1, :, 20:].any()
    # A mask says by itself which keys are padding: those that no query sees.
    assert_equal(ours(q, k, v, do, mask=mask), clean, 0)


def test_packed_sequences() -> None:
    q, k, v, do = inputs(b=1, tq=90, tk=90)
    cu = torch.tensor([0, 1, 10, 47, 47, 90], dtype=torch.int32)
    for spec, tolerance in ((NONE, 1e-6), (ROUNDED, 0.35)):
        found = ours(q, k, v, do, spec=spec, is_causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
        parts = []
        for a, b in zip(cu[:-1], cu[1:], strict=True):
            if a < b:
                parts.append(theirs(*(t[:, :, a:b] for t in (q, k, v, do)), is_causal=True))
        wanted = [torch.cat(part, 2) for part in zip(*parts, strict=True)]
        assert all(error(x, y) < tolerance for x, y in zip(found, wanted, strict=True))
    # A sequence is quantized by itself but for the tensor's maximum: blocks hold tokens of one sequence only.
    other = [torch.cat([t[:, :, :47], 0.5 * t[:, :, 47:]], 2) for t in (q, k, v, do)]
    quarter = ROUNDED
    biggest = torch.full((1, 1, 1, 1), 8.0, dtype=q.dtype)
    for tensors in ((q, k, v, do), other):
        tensors[0][:, :, :1], tensors[1][:, :, :1] = biggest, biggest
    rules = {"spec": quarter, "is_causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    assert torch.equal(ours(q, k, v, do, **rules)[0][:, :, :47], ours(*other, **rules)[0][:, :, :47])


def test_straight_through() -> None:
    """With exact dS and one view for both axes, gradients are those of the graph whose Q and K are what S reads."""
    rows = AttentionRows(SQUARE, SQUARE, None, SQUARE, None, SQUARE, smooth=False)
    q, k, v, do = inputs(tq=32, tk=32)

    def graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        read = [
            t + (qt.quantize(t.reshape(-1, 32), SQUARE).dequantize(t.dtype).view(t.shape) - t).detach() for t in (q, k)
        ]
        return sdpa(*read, v, is_causal=True, enable_gqa=True)

    assert_equal(ours(q, k, v, do, spec=rows, is_causal=True), run(graph, q, k, v, do))
    low = [t.bfloat16() for t in (q, k, v, do)]
    high = run(graph, *(t.double() for t in low))
    found = ours(*low, spec=rows, is_causal=True)
    wide = [t.float() for t in low]
    assert all(error(a, b) < 1e-6 for a, b in zip(ours(*wide, spec=rows, is_causal=True), high, strict=True))
    # In BF16 rounding exact results takes 1.5e-3 of them alone, so the graph rounds where the function does ...
    assert all(error(t.bfloat16(), t) > 1.4e-3 for t in high)
    same = run(rounded_graph, *wide)
    assert all(error(a, b.bfloat16()) < 1e-3 for a, b in zip(found, same, strict=True))
    # ... and what it rounds is no more than SDPA in BF16.
    for name, a, b, exact in zip(("O", "dQ", "dK", "dV"), found, run(graph, *low), high, strict=True):
        assert error(a, exact) < 1.05 * error(b, exact), name


def rounded_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of straight-through Q and K in fp32, with P, O and dS rounded to BF16 and delta from that O."""
    q, k = (t + (qt.quantize(t.reshape(-1, 32), SQUARE).dequantize().view(t.shape) - t).detach() for t in (q, k))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    s = torch.matmul(q, k.mT) * 32**-0.5
    s.register_hook(lambda ds: ds.bfloat16().float())
    return _RoundedSoftmax.apply(s.masked_fill(~torch.ones_like(s).tril().bool(), float("-inf")), v)


class _RoundedSoftmax(torch.autograd.Function):
    """softmax(S) V."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(s, -1)
        out = torch.matmul(p.bfloat16().float(), v).bfloat16().float()
        ctx.save_for_backward(p, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor]:
        p, v, out = ctx.saved_tensors
        ds = p * (torch.matmul(do, v.mT) - (do * out).sum(-1, keepdim=True))
        return ds, torch.matmul(p.bfloat16().float().mT, do)


def backward(views: list[Tensor], x: list[Tensor], rows: AttentionRows, g: Geometry, saved: list[Tensor]) -> Tensor:
    """dQ."""
    q, k, v, do = x
    return attention_backward(do, views, v, *saved, rows.to_json(), g, None)[0]


def test_rows_of_ds_sum_to_zero_only_with_the_views_of_forward() -> None:
    rows = AttentionRows(NEAREST, NEAREST, smooth=False)  # dQ = scale dS K with K as it is
    q, k, v, do = inputs(d=48)
    k[..., 15:] = torch.eye(33, dtype=k.dtype)  # so that dQ[..., 15:] is dS itself
    g = Geometry(4, 33, 48, 1.0, True)
    views = pack_views(q, k, rows.to_json(), g, None, True)
    saved = list(attention_forward(views, v, rows.to_json(), g, True))
    good = backward(views, [q, k, v, do], rows, g, saved)
    # The negative control: S recomputed from what was not quantized.
    plain = AttentionRows(smooth=False)
    bad = backward(pack_views(q, k, plain.to_json(), g, None, True), [q, k, v, do], plain, g, saved)
    good, bad = good[:, :, 1:, 15:], bad[:, :, 1:, 15:]  # dS of the first query, which sees one key, is zero
    assert (good.sum(-1).abs() <= 1e-6 * good.abs().sum(-1)).all()
    assert (bad.sum(-1).abs() > 1e-2 * bad.abs().sum(-1)).double().mean() > 0.9
    # delta, which backward takes from dO and O, is the sum of P dP over the views of forward alone.
    dp = torch.matmul(do, v.repeat_interleave(2, 1).mT)
    delta = (do * saved[0]).sum(-1)
    for read, same in ((rows, True), (plain, False)):
        qh, kh = (
            t if spec is None else qt.quantize(t.reshape(-1, 48), spec).dequantize(t.dtype).view(t.shape)
            for t, spec in ((q, read.scores_query), (k, read.scores_key))
        )
        s = torch.matmul(qh, kh.repeat_interleave(2, 1).mT)
        p = torch.exp(s - saved[1][..., None]).tril()
        assert torch.allclose((p * dp).sum(-1), delta, rtol=1e-5, atol=1e-5) == same


def test_the_bound_of_ds_holds() -> None:
    q, k, v, do = inputs()
    g = Geometry(4, 33, 32, 0.2, True)
    views = pack_views(q, k, NONE.to_json(), g, None, True)
    out, lse = attention_forward(views, v, NONE.to_json(), g, True)
    s = torch.matmul(q, k.repeat_interleave(2, 1).mT) * 0.2
    p = torch.exp(s - lse[..., None]).tril()
    delta = (do * out).sum(-1)
    ds = p * (torch.matmul(do, v.repeat_interleave(2, 1).mT) - delta[..., None])
    bound = attention_backward(do, views, v, out, lse, NONE.to_json(), g, None)[3]
    assert (ds.abs().amax((2, 3)) <= bound).all() and (bound < 1e3 * ds.abs().amax((2, 3))).all()
    norms = [t.square().sum(-1).sqrt() for t in (do, v.repeat_interleave(2, 1))]
    assert torch.equal(bound, (norms[0] * norms[1].amax(2, keepdim=True) + delta.abs()).amax(2).float())
    tiny = attention_math.ds_bound(1e-30 * do.float(), v.float(), 0 * delta.float())
    assert (tiny > 0).all()  # squares would have vanished in fp32


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "up", "stochastic-unbiased"])
def test_stochastic_rounding_is_unbiased_where_no_scale_clips(rounding: str) -> None:
    """The controls: rounding to nearest, and block scales rounded to nearest, below which the block's maximum clips."""
    grad = NVFP4_ROWS.dquery_grad if rounding == "up" else S(rounding=rounding)
    unbiased = rounding in ("up", "stochastic-unbiased")
    rows = AttentionRows(VALUE, VALUE, grad, VALUE, grad, VALUE)
    exact = AttentionRows(VALUE, VALUE, None, VALUE, None, VALUE)
    x = inputs(b=1, h=1, g=1, tq=24, tk=24, d=16, dtype=torch.float32)
    wanted = ours(*x, spec=exact, is_causal=True)
    draws = [ours(*x, spec=rows, is_causal=True, offset=i)[1:3] for i in range(256 if grad.stochastic else 2)]
    for i in range(2):
        drawn = torch.stack([d[i] for d in draws]).double()
        off = (drawn.mean(0) - wanted[i + 1].double()).abs()
        standard_error = drawn.std(0) / len(draws) ** 0.5 + 1e-7
        z = off / standard_error
        if unbiased:
            assert (z < 4).double().mean() > 0.995 and z.square().mean() < 1.3
        else:
            assert (z < 4).double().mean() < 0.97


@pytest.mark.parametrize("causal", [False, True])
def test_close_to_exact_attention(causal: bool) -> None:
    x = inputs(tq=128, tk=128, d=64, dtype=torch.bfloat16)
    wanted = theirs(*(t.double() for t in x), is_causal=causal)
    for found, want in zip(ours(*x, is_causal=causal), wanted, strict=True):
        assert torch.cosine_similarity(found.double().flatten(), want.flatten(), dim=0) > 0.97


def test_keys_and_bits() -> None:
    x = inputs(dtype=torch.bfloat16)
    first, again, other = (ours(*x, is_causal=True, seed=3, offset=o) for o in (1, 1, 2))
    assert_equal(again, first, 0)
    seeded = ours(*x, is_causal=True, seed=4, offset=1)
    assert not torch.equal(seeded[1], first[1])
    assert torch.equal(other[0], first[0]) and torch.equal(other[3], first[3])
    assert not torch.equal(other[1], first[1]) and not torch.equal(other[2], first[2])
    keys = attention_keys(torch.tensor([3]), torch.tensor([1]), torch.device("cpu"))
    assert torch.equal(keys, attention_keys(3, 1, torch.device("cpu"))) and len(keys.unique(dim=0)) == 6
    for operand, changed in ((2, 1), (4, 2)):  # dquery.grad moves dQ alone, dkey.grad dK alone
        moved = attention_keys(3, 1, torch.device("cpu"))
        moved[operand] += 1
        found = run(quantized_attention, *x, rows=NVFP4_ROWS, is_causal=True, keys=moved)
        assert [i for i in range(4) if not torch.equal(found[i], first[i])] == [changed]
    same = [t[:1, :1].expand(2, 2, -1, -1) for t in x]
    for t in ours(*same, is_causal=True)[1:3]:  # no two heads draw the same bits
        assert not torch.equal(t[0, 0], t[0, 1]) and not torch.equal(t[0, 0], t[1, 0])
    key = make_key(1, 2, torch.device("cpu"))
    whole = random_bits(key, 9, 40)
    assert torch.equal(random_bits(key, torch.tensor([2, 7]), 16, 16), whole[[2, 7], 16:32])


def test_chunks_change_no_bit_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(tq=70, tk=50)
    whole = ours(*x, is_causal=True, seed=1)
    monkeypatch.setattr(attention_math, "_CHUNK_ELEMENTS", 1)  # chunks of 16
    assert_equal(ours(*x, is_causal=True, seed=1), whole, 1e-12)


def test_mean_keys() -> None:
    """Of each sequence by itself, padding not counted."""
    k = inputs(tk=20)[1]
    kept = torch.rand(2, 20) < 0.5
    kept[1] = False
    found = key_means(keep_tokens(k, kept), Geometry(4, 33, 32, 1.0, kept=kept))
    assert torch.allclose(found[0, :, 0], k[0][:, kept[0]].mean(1)) and not found[1].any()
    starts = torch.tensor([0, 3, 3, 20])
    found = key_means(k[:1], Geometry(4, 33, 32, 1.0, starts_q=starts, starts_k=starts))
    assert torch.allclose(found[:, :, 2:4], torch.stack([k[:1, :, :3].mean(2), k[:1, :, 3:].mean(2)], 2))


def test_smoothing_and_views() -> None:
    q, k, v, do = inputs(b=2, h=4, g=4, tq=128, tk=128, d=64)
    biased = k + 2 * torch.randn(1, 4, 1, 64, dtype=k.dtype)
    wanted = theirs(q, biased, v, do, is_causal=True)

    def errors(**change: Any) -> list[float]:
        rows = AttentionRows(*ROUNDED.rows, **change)
        found = ours(q, biased, v, do, spec=rows, is_causal=True)
        return [error(a, b) for a, b in zip(found, wanted, strict=True)]

    smooth, plain, decoded = errors(), errors(smooth=False), errors(views="decoded")
    assert plain[0] > 1.3 * smooth[0] and plain[1] > 1.5 * smooth[1]
    assert decoded[0] == smooth[0] and decoded[1] > 1.05 * smooth[1] and decoded[2] > 1.05 * smooth[2]
    square = AttentionRows(SQUARE, SQUARE, NEAREST, SQUARE, NEAREST, SQUARE)
    worst = [error(a, b) for a, b in zip(ours(q, biased, v, do, spec=square, is_causal=True), wanted, strict=True)]
    assert worst[1] > 1.05 * smooth[1]


def test_fp4_where_the_split_forbids_it_costs_more() -> None:
    """The control of the split: dO V^T in NVFP4 raises the error of dQ at least 1.3 times."""
    q, k, v, do = inputs(b=2, h=2, g=2, tq=128, tk=128, d=64, dtype=torch.float32)
    wanted = theirs(*(t.double() for t in (q, k, v, do)), is_causal=True)[1]
    g = Geometry(2, 128, 64, 0.125, True)
    views = pack_views(q, k, ROUNDED.to_json(), g, None, True)
    out, lse = attention_forward(views, v, ROUNDED.to_json(), g, True)
    good, _, _, bound = attention_backward(do, views, v, out, lse, ROUNDED.to_json(), g, None)
    qh, kh, kt = (
        qt.quantize(t.reshape(-1, 64), VALUE).dequantize().view(t.shape) if i < 2
        else qt.quantize(t.reshape(-1, 64).t(), VALUE).dequantize().t().view(t.shape)
        for i, t in enumerate((q, k - k.mean(2, keepdim=True), k - k.mean(2, keepdim=True)))
    )  # fmt: skip
    p = torch.exp((torch.matmul(qh, kh.mT) * 0.125).tril() - lse[..., None]).tril()
    delta = (do * out).sum(-1, keepdim=True)

    def dquery(do: Tensor, v: Tensor) -> Tensor:
        left = attention_math.quantize_ds(p * (torch.matmul(do, v.mT) - delta), NEAREST, bound, None)
        return torch.matmul(left, kt) * (bound / NEAREST.constant)[..., None, None] * 0.125

    assert error(dquery(do, v), good) < 1e-2
    bad = dquery(*(qt.quantize(t, "nvfp4").dequantize() for t in (do, v)))
    assert error(bad, wanted) > 1.3 * error(good, wanted)


def test_what_is_kept_for_backward() -> None:
    q, k, v, _ = inputs(b=1, h=2, g=2, tq=256, tk=256, d=64, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    held = saved_bytes(lambda: qt.attention(*leaves, is_causal=True))["bytes"]
    assert held == 6.25 * q.numel() + 4 * 2 * 256 + 4 * 4  # views, V and O; L; four maxima
    square = AttentionRows(SQUARE, SQUARE, NEAREST, SQUARE, NEAREST, SQUARE)
    held = saved_bytes(lambda: qt.attention(*leaves, is_causal=True, spec=square))["bytes"]
    assert held == (5 + 2 / 256) * q.numel() + 4 * 2 * 256 + 4 * 2


def test_inputs_stay_and_non_finite_numbers_are_seen() -> None:
    x = inputs(dtype=torch.bfloat16)
    before = [t.clone() for t in x]
    ours(*x, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))
    for i in range(4):
        for bad in (float("nan"), float("inf")):
            spoiled = [t.clone() for t in before]
            spoiled[i][0, 0, 3, 5] = bad
            found = ours(*spoiled, is_causal=True)
            assert i == 3 or not torch.isfinite(found[0]).all()
            assert not any(torch.isfinite(t).all() for t in found[1:3])


def test_nothing_to_attend() -> None:
    for tq, tk in ((0, 5), (5, 0), (0, 0)):
        x = [1e4 * torch.ones_like(t) for t in inputs(tq=tq, tk=tk, dtype=torch.float16)]  # sums would overflow
        found = ours(*x, is_causal=True)
        assert found[0].shape[2] == tq and found[2].shape[2] == tk and not any(t.any() for t in found)


def test_half_precision_and_strides() -> None:
    x = inputs(tq=40, tk=40, dtype=torch.float16)
    wanted = theirs(*(t.double() for t in x), is_causal=True)
    found = ours(*x, is_causal=True)
    assert all(t.dtype == torch.float16 for t in found)
    assert all(error(a, b) < 0.3 for a, b in zip(found, wanted, strict=True))
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    strided[3] = torch.stack([strided[3], strided[3]], -1)[..., 0]
    assert not any(t.is_contiguous() for t in strided)
    assert_equal(ours(*strided, is_causal=True), found, 0)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_gradients_lie_as_their_tensors(order: tuple[int, int, int]) -> None:
    """So autograd copies none, eager and compiled; slices and tensors of one token too."""
    torch._dynamo.reset()  # the number of times a function is compiled is limited

    def laid_out(x: Tensor) -> Tensor:
        back = (*(order.index(i) for i in range(3)), 3)
        return x.permute(*order, 3).contiguous().permute(*back).requires_grad_()

    for tokens in (20, 1):
        x = inputs(tq=tokens, tk=tokens, dtype=torch.bfloat16)
        leaves = [laid_out(t) for t in x[:3]]
        for attend in (qt.attention, torch.compile(qt.attention, fullgraph=True, backend="aot_eager")):
            gradients = torch.autograd.grad(attend(*leaves, is_causal=True), leaves, x[3])
            for leaf, gradient in zip(leaves, gradients, strict=True):
                assert tokens == 1 or gradient.stride() == leaf.stride()
                assert gradient.permute(*order, 3).is_contiguous()
    part = laid_out(x[0])[:, :2]
    assert not part.permute(*order, 3).is_contiguous()
    found = torch.autograd.grad(qt.attention(part, part, part).sum(), part)[0]
    assert found.permute(*order, 3).is_contiguous()
    torch._dynamo.reset()


def test_square_blocks_of_heads_that_are_no_multiple_of_16() -> None:
    x = inputs(d=40)
    wanted = theirs(*x, is_causal=True)
    for rows in (AttentionRows(VALUE, VALUE, NEAREST, SQUARE, NEAREST, SQUARE), AttentionRows(dquery_key=SQUARE)):
        assert all(error(a, b) < 0.3 for a, b in zip(ours(*x, spec=rows, is_causal=True), wanted, strict=True))


def test_a_phase_in_bf16_is_plain_attention() -> None:
    x = inputs(dtype=torch.bfloat16)
    plain = ours(*x, spec=AttentionRows(smooth=False), is_causal=True)
    assert NVFP4_ROWS.without("both") == AttentionRows(smooth=False)
    assert_equal(ours(*x, spec=NVFP4_ROWS.without("both"), is_causal=True), plain, 0)
    forward = NVFP4_ROWS.without("forward")
    assert forward.smooth and forward.rows == (None, None, *NVFP4_ROWS.rows[2:])


def test_autocast_and_no_grad() -> None:
    q, k, v, _ = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = qt.attention(q, k, v, is_causal=True)
        mixed = qt.attention(q, k.bfloat16(), v, is_causal=True)
    low = qt.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out, low) and torch.equal(mixed, low)
    with torch.no_grad():
        assert torch.equal(qt.attention(q, k, v), qt.attention(q.requires_grad_(), k, v))


def test_compiles_whole() -> None:
    x = inputs(tq=37, tk=37, dtype=torch.bfloat16)
    kept = torch.ones(2, 37, dtype=torch.bool)
    kept[0, :4] = False
    compiled = torch.compile(qt.attention, fullgraph=True, backend="aot_eager")
    cu = torch.tensor([0, 11, 37])
    mask = torch.rand(2, 4, 37, 37) < 0.5
    for rules in ({"is_causal": True, "window": 5}, {"key_padding": kept}, {"mask": mask}):
        assert_equal(run(compiled, *x, seed=4, **rules), ours(*x, seed=4, **rules), 0)
    one = [t[:1] for t in x]
    packed = {"is_causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    assert_equal(run(compiled, *one, **packed), ours(*one, **packed), 0)
    plain = inputs(tq=32, tk=32)  # nothing is packed nor padded: views are the inputs
    assert_equal(run(compiled, *plain, spec=NONE), ours(*plain, spec=NONE), 0)
    leaf = inputs(g=4)[0].requires_grad_()
    assert torch.equal(compiled(leaf, leaf, leaf), qt.attention(leaf, leaf, leaf))  # one tensor three times
    meta = qt.attention(*(t.to("meta").requires_grad_() for t in x[:3]))
    meta.sum().backward()
    assert meta.shape == x[3].shape


@pytest.mark.parametrize("rows", [NVFP4_ROWS, NONE, AttentionRows(smooth=False)])
def test_operations_say_what_they_return(rows: AttentionRows) -> None:
    """Shapes, dtypes and strides as compilers are told; also of dynamic shapes, and of inputs in another layout."""
    q, k, v, do = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(tq=32, tk=32, dtype=torch.bfloat16))
    orders = memory_orders(q, k, v)
    assert orders == (0, 2, 1) * 3
    g, keys = Geometry(4, 32, 32, 0.2, True, orders=orders), attention_keys(0, 0, torch.device("cpu"))
    text = rows.to_json()
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    views = pack_views(q, k, text, g, keys, True)
    saved = attention_forward(views, v, text, g, True)
    for name, arguments in (
        ("views", (q, k, text, *g, keys, True)),
        ("forward", (views, v, text, *g, True, "auto")),
        ("backward", (do, views, v, *saved, text, *g, keys, "auto")),
    ):
        torch.library.opcheck(getattr(torch.ops.quatrain, f"attention_{name}").default, arguments, test_utils=tests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": "nvfp4"}, r"a recipe with \[attention\] rows"),
        ({"dropout_p": 0.1}, "does not serve dropout_p"),
        ({"attn_mask": torch.zeros(1)}, "does not serve attn_mask"),
        ({"enable_gqa": False}, "enable_gqa"),
        ({"window": 0}, "window must be a number of keys"),
        ({"window": 2.5}, "window must be a number of keys"),
        ({"is_causal": torch.ones(33, 33, dtype=torch.bool)}, "is_causal must be True or False"),
        ({"spec": "bf16"}, r"a recipe with \[attention\] rows"),
        ({"backend": "cpu"}, 'backend="auto", "reference", "triton" or "blackwell"'),
        ({"mask": torch.zeros(2, 4, 33, 33)}, "additive bias"),
        ({"mask": torch.ones(1, 1, 33, 33, dtype=torch.bool), "is_causal": True}, "a mask stands alone"),
        ({"key_padding": torch.ones(2, 9, dtype=torch.bool)}, "key_padding must be bool"),
        ({"cu_seqlens_q": torch.tensor([0, 33])}, "give both"),
        ({"cu_seqlens_q": torch.tensor([0, 33]), "cu_seqlens_k": torch.tensor([0, 33])}, "a batch of 1"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=message):
        qt.attention(q, k, v, **change)


@pytest.mark.parametrize("starts", [[0, 20], [0, 50], [5, 33], [0, 20, 10, 33], [0.0, 33.0], [[0, 33]], [0]])
def test_refused_sequences(starts: list[Any]) -> None:
    q, k, v, _ = inputs(b=1)
    cu = torch.tensor(starts)
    with pytest.raises(ValueError, match="cu_seqlens"):
        qt.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)


def test_refused_shapes_and_rows() -> None:
    q, k, v, _ = inputs()
    for bad in (
        (q[0], k, v), (q, k.float(), v), (q[:1], k, v), (q, k, v[:, :, :5]), (q[:, :3], k, v), (q.long(), k, v),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="received"):
            qt.attention(*bad)
    for rows in (
        {"scores_query": S("mxfp4")}, {"scores_key": S(transform="hadamard")}, {"dquery_grad": VALUE},
        {"dkey_grad": S(block=(16, 16))}, {"views": "third"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="received"):
            AttentionRows(**rows)
