"""Mamba-2's scan as matrix products over chunks (state-space duality), forward and backward.

    state_t = exp(dt_t A) state_{t-1} + dt_t B_t x_t^T        y_t = C_t state_t + D x_t

Within a chunk this is masked attention with decays; between chunks only one state a chunk exists. The backward pass is
written out: it keeps the inputs and the chunk states, makes the scores anew, and never divides by a decay. Decays,
states and sums are fp32 (float64 for float64 inputs); only operands of matrix products may be bf16. The result does not
depend on the chunk size beyond rounding.

The order of some lines serves torch.compile, which then makes about forty kernels of a layer, both passes together, and
writes only one tensor as large as the scores, those themselves, in a pass.

Legend: b batch, c or z chunk, l or s position within a chunk, h head, g group, r head within its group, p head
dimension, n state.
Source: arXiv 2405.21060 sections 6 and 7.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_GRID = 256.0  # a cumulative sum is a multiple of 1/256, exact in fp32 below 65536, and a remainder
_NOTHING = {torch.float32: -120.0, torch.float64: -800.0}  # a step whose decay rounds to 0; 512 of them fit the grid
_CHUNK = {"cpu": 32, "cuda": 128}  # scores grow with the chunk, states shrink with it
_UNROLLED = 16  # chunks up to which states are carried one after the other; beyond, in one product


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    chunk: int | None = None,
    operands: torch.dtype | None = None,
) -> Tensor:
    """Scan a sequence from a zero state.

    Args:
        x: [b, t, h, p], floating.
        dt: [b, t, h], the step sizes after softplus and clamping, at least 0.
        A: [h], at most 0.
        B, C: [b, t, g, n]; group i serves heads i h/g up to (i + 1) h/g.
        D: [h].
        chunk: positions a chunk, by default what suits the device; for speed alone.
        operands: dtype of the matrix products' operands, bf16 or (by default) the dtype of the sums.

    Returns:
        [b, t, h, p] in fp32, or float64 if x is.

    Raises:
        ValueError: the shapes do not fit, the chunk is not positive, or the operands have another dtype.
    """
    _check(x, dt, A, B, C, D)
    length = x.shape[1]
    size = _CHUNK.get(x.device.type, 64) if chunk is None else chunk
    if size < 1:
        raise ValueError(f"chunk is at least 1, received {size}; leave it out for the device's own")
    if length == 0:
        return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if length <= size:
        size = -(-length // 8) * 8  # tensor cores and vectors take multiples of eight
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    if operands not in (None, torch.bfloat16, work):
        raise ValueError(f"operands is torch.bfloat16, {work} here, or left out; received {operands}")
    parts = (_chunks(x, size), _chunks(dt.to(work), size), A.to(work), _chunks(B, size), _chunks(C, size), D.to(work))
    y: Tensor = _Scan.apply(*parts, operands or work)
    return y.flatten(1, 2)[:, :length]


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> None:
    if x.dim() != 4 or B.dim() != 4:
        raise ValueError(f"x is [b, t, h, p] and B [b, t, g, n], received {tuple(x.shape)} and {tuple(B.shape)}")
    heads, groups = x.shape[2], B.shape[2]
    wanted = {"dt": (dt, x.shape[:3]), "A": (A, (heads,)), "D": (D, (heads,)), "C": (C, B.shape)}
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {tuple(shape)}, received {tuple(tensor.shape)}")
    if B.shape[:2] != x.shape[:2] or heads % groups:
        raise ValueError(
            f"B must share x's batch and length and its groups must divide the heads, "
            f"received {tuple(B.shape)} for {tuple(x.shape)}"
        )


def _chunks(t: Tensor, size: int) -> Tensor:
    """[b, t, i, ...] to [b, c, size, i, ...], zeros at the end: a step of zero changes no state."""
    missing = -t.shape[1] % size
    if missing:
        t = torch.nn.functional.pad(t, (0, 0) * (t.dim() - 2) + (0, missing))
    return t.unflatten(1, (-1, size))


def _no_autocast(t: Tensor) -> AbstractContextManager[Any]:
    return nullcontext() if t.is_meta else torch.autocast(t.device.type, enabled=False)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over equal leading dimensions, in fp32 (float64) from operands of any dtype."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if not a.is_cuda:
        return a.float() @ b.float()
    flat = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
    return flat.unflatten(0, a.shape[:-2])


class _Decays(NamedTuple):
    high: Tensor  # [b, c, h, l]: sum of dt A from the chunk's start through l, less what the grid leaves
    low: Tensor  # [b, c, h, l]: the rest of that sum
    start: Tensor  # [b, c, l, h, 1]: decay from the chunk's start through l
    end: Tensor  # [b, c, l, h, 1]: decay from after l to the chunk's end


def _within(high: Tensor, low: Tensor) -> Tensor:
    """[..., l, s]: decay from after s through l, 0 where s > l, from the two parts of the sums [..., l]."""
    sums = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    return torch.where(_earlier(sums, 0), sums, -torch.inf).exp()


def _earlier(t: Tensor, by: int) -> Tensor:
    """Bool for the last two dimensions [l, s] of t: s is earlier than l by at least so many positions."""
    at = torch.arange(t.shape[-1], device=t.device)
    return at[:, None] - by >= at


def _decays(dt: Tensor, A: Tensor) -> _Decays:
    """Decays from dt [b, c, l, h, 1]. Sums come in two parts, since differences of long fp32 sums lose what short ones
    hold: the high part adds multiples of 1/256, so that it and its differences are exact; the low part stays small.
    """
    steps = (dt.squeeze(-1).double() * A.double()).clamp(min=_NOTHING[dt.dtype]).transpose(2, 3)
    coarse = torch.round(steps * _GRID) / _GRID
    high, low = coarse.to(dt.dtype).cumsum(-1), (steps - coarse).to(dt.dtype).cumsum(-1)
    start = (high + low).exp()
    end = ((high[..., -1:] - high) + (low[..., -1:] - low)).exp()
    return _Decays(high, low, _columns(start), _columns(end))


def _stored(t: Tensor) -> Tensor:
    """The same numbers, which a compiler must keep in memory rather than compute once more for every user."""
    t = t.contiguous()
    return t.as_strided(t.shape, t.stride())


def _per_group(t: Tensor, groups: int) -> Tensor:
    """[b, c, h, ...] to [b, c, g, r, ...]."""
    return t.unflatten(2, (groups, -1))


def _fold(t: Tensor, groups: int) -> Tensor:
    """[b, c, l, h, p] to [b, c, g, l, r p]."""
    return t.unflatten(3, (groups, -1)).transpose(2, 3).flatten(4)


def _unfold(t: Tensor, heads: int) -> Tensor:
    """[b, c, g, l, r p] to [b, c, l, h, p]."""
    return t.transpose(2, 3).flatten(3).unflatten(3, (heads, -1))


def _carry(decays: _Decays, states: Tensor, *, back: bool) -> Tensor:
    """States [b, c, g, n, r p] that each chunk adds, to those it starts from; `back`: gradients of the latter, to the
    gradients of the former."""
    by_chunk = decays.start[:, :, -1, :, 0]  # [b, c, h]
    count, groups = by_chunk.shape[1], states.shape[2]
    added = states.unflatten(4, (by_chunk.shape[2] // groups, -1))
    if count <= _UNROLLED:
        factors = by_chunk.unflatten(2, (groups, -1))[:, :, :, None, :, None]  # [b, c, g, 1, r, 1]
        found = [torch.zeros_like(added[:, 0])]
        for i in range(count - 1):
            at = count - 1 - i if back else i
            # What a chunk starts from reaches the next one through its decay, and backward from that one to it.
            found.append(added[:, at] if i == 0 else found[-1] * factors[:, at] + added[:, at])
        return torch.stack(found[::-1] if back else found, 1).flatten(4)
    logs = (decays.high[..., -1].double() + decays.low[..., -1].double()).transpose(1, 2)  # [b, h, c]
    after = logs.cumsum(-1)
    between = ((after - logs)[..., :, None] - after[..., None, :]).to(states.dtype)
    between = torch.where(_earlier(between, 1), between, -torch.inf).exp()
    rows = added.permute(0, 2, 4, 1, 3, 5).flatten(4)  # [b, g, r, z, n p]
    carried = (between.mT if back else between) @ rows.flatten(1, 2)
    return carried.unflatten(3, (states.shape[3], -1)).unflatten(1, (groups, -1)).permute(0, 3, 1, 4, 2, 5).flatten(4)


def _columns(t: Tensor) -> Tensor:
    """[b, c, h, l] to [b, c, l, h, 1]."""
    return _stored(t.transpose(2, 3)[..., None])


class _Scan(torch.autograd.Function):
    """The scan over chunks; keeps its inputs as operands, and the states before each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [b, c, l, h, p]
        dt: Tensor,  # [b, c, l, h]
        A: Tensor,  # [h]
        B: Tensor,  # [b, c, l, g, n]
        C: Tensor,  # [b, c, l, g, n]
        D: Tensor,  # [h]
        operands: torch.dtype,
    ) -> Tensor:  # [b, c, l, h, p]
        ctx.dtypes = x.dtype, B.dtype, C.dtype
        x, B, C = x.to(operands), B.to(operands).transpose(2, 3), C.to(operands).transpose(2, 3)
        dt = _stored(dt[..., None])
        # Here and in `backward`, not around the call: around it, torch.compile loses count of the autocast state.
        with _no_autocast(x):
            y, states = _forward(x, dt, A, B, C, D)
        ctx.save_for_backward(x, dt, A, B, C, D, states)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with _no_autocast(dy):
            return _backward(ctx.saved_tensors, ctx.dtypes, dy)


def _forward(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the states before each chunk [b, c, g, n, r p]; dt is [b, c, l, h, 1], B and C [b, c, g, l, n]."""
    heads, groups, operands = x.shape[3], B.shape[2], x.dtype
    skip, steps = x * D[:, None], x * dt  # first: what lies after a product or a sum a compiler would rather keep
    decays = _decays(dt, A)
    rows = steps.to(operands).transpose(2, 3).contiguous()  # [b, c, h, l, p]
    inputs = (steps * decays.end).to(operands)
    near = _scores(_within(decays.high, decays.low), C @ B.mT, operands) @ rows
    states = _carry(decays, _product(B.mT, _fold(inputs, groups)), back=False).to(operands)
    far = _unfold(C @ states, heads)
    return near.transpose(2, 3) + far * decays.start + skip, states


def _scores(within: Tensor, products: Tensor, operands: torch.dtype) -> Tensor:
    """[b, c, h, l, s] operands: decays [b, c, h, l, s] times C B^T [b, c, g, l, s] of each head's group."""
    return (_per_group(within, products.shape[2]) * products[:, :, :, None]).flatten(2, 3).to(operands)


def _backward(saved: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    x, dt, A, B, C, D, states = saved
    heads, groups, operands = x.shape[3], B.shape[2], x.dtype
    dskip, dD = dy * D[:, None], (dy * x).sum(-1).sum((0, 1, 2))
    decays, steps = _decays(dt, A), x * dt
    near = _near_gradients(steps.to(operands), B, C, decays, dy.to(operands))
    dfar = _fold((dy * decays.start).to(operands), groups)
    dC = (near.G @ B) + dfar @ states.mT
    dstates = _carry(decays, _product(C.mT, dfar), back=True).to(operands)
    dB = (near.G.mT @ C) + _fold((steps * decays.end).to(operands), groups) @ dstates.mT
    dinputs = _unfold(B @ dstates, heads) * decays.end
    dsteps = near.steps.transpose(2, 3) + dinputs
    dx = dsteps * dt + dskip
    # Of the sums of dt A: in the decays to the chunk's end, from its start, and of the whole chunk.
    dend = (dinputs * steps).sum(-1).transpose(2, 3)
    dstart = ((dy * _unfold(C @ states, heads)).sum(-1) * decays.start.squeeze(-1)).transpose(2, 3)
    whole = (dstates.to(dy.dtype) * states).unflatten(4, (heads // groups, -1)).sum((3, 5)).flatten(2)
    dlast = dend.sum(-1) + whole * decays.start[:, :, -1, :, 0]  # [b, c, h]
    dsums = near.sums + (dstart - dend)
    # An element is part of every sum from there on.
    dlogs = dsums.sum(-1, keepdim=True) - dsums.cumsum(-1) + dsums + dlast.double()[..., None]
    dlogs = dlogs.to(dt.dtype).transpose(2, 3)  # [b, c, l, h]
    ddt = (dsteps * x).sum(-1) + dlogs * A
    dA = (dlogs * dt.squeeze(-1)).sum((0, 1, 2))
    of_x, of_B, of_C = dtypes
    return dx.to(of_x), ddt, dA, dB.transpose(2, 3).to(of_B), dC.transpose(2, 3).to(of_C), dD, None


class _Near(NamedTuple):
    steps: Tensor  # [b, c, h, l, p], of x dt
    G: Tensor  # [b, c, g, l, s], of C B^T, as an operand
    sums: Tensor  # [b, c, h, l] float64, of the sums of dt A


def _near_gradients(steps: Tensor, B: Tensor, C: Tensor, decays: _Decays, dy: Tensor) -> _Near:
    """Gradients of what stays within a chunk: y = (C B^T * decay) (x dt)."""
    operands, groups, (high, low) = steps.dtype, B.shape[2], decays[:2]
    dy, steps = dy.transpose(2, 3).contiguous(), steps.transpose(2, 3).contiguous()
    products, weighted = C @ B.mT, dy @ steps.mT
    by_group = products[:, :, :, None]
    # The decays are made three times, in three layouts: a compiler then makes them where they are used, while what it
    # finds used three times it would write to memory, the largest tensor of all.
    within, grouped = _within(high, low), _within(_per_group(high, groups), _per_group(low, groups))
    turned = (high[..., None, :] - high[..., :, None]) + (low[..., None, :] - low[..., :, None])  # [b, c, h, s, l]
    turned = torch.where(_earlier(turned, 1).mT, turned, -torch.inf).exp()
    dsteps = _scores(within, products, operands).mT @ dy
    dG = (_per_group(weighted, groups) * grouped).sum(3).to(operands)
    # Rows less columns: what does not cross a position cancels there, so these sums are float64, and of equal terms.
    # No decay lies on the diagonal; left in, it would drown the others where decays are strong.
    rows = (_per_group(weighted * within, groups) * by_group).flatten(2, 3)
    rows = torch.where(_earlier(rows, 1), rows, 0.0).sum(-1, dtype=torch.float64)
    columns = (_per_group(weighted.mT * turned, groups) * by_group.mT).flatten(2, 3).sum(-1, dtype=torch.float64)
    return _Near(dsteps, dG, rows - columns)


def causal_conv_silu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of a depthwise convolution over time that sees the past only, as a sum of shifted products.

    Args:
        x: [b, t, i], i channels.
        weight: [i, taps]; the last tap meets the position itself.
        bias: [i].

    Returns:
        [b, t, i] in fp32, or float64 if x is.
    """
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    taps = weight.to(work)
    y: Tensor = _ConvSilu.apply(x, taps, torch.zeros_like(taps[:, 0]) if bias is None else bias.to(work))
    return y


def _shifted(t: Tensor, by: int) -> Tensor:
    """[b, t, i] moved to later positions (earlier ones where by < 0), with zeros where nothing comes from."""
    return torch.nn.functional.pad(t, (0, 0, by, -by))


class _ConvSilu(torch.autograd.Function):
    """Keeps its inputs alone; a compiler makes one kernel of each direction, since no shift has two users."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        y = torch.addcmul(bias, x, weight[:, -1])
        for back in range(1, min(weight.shape[1], x.shape[1])):
            kept = torch.nn.functional.pad(x[:, :-back], (0, 0, back, 0))
            y = torch.addcmul(y, kept, weight[:, -1 - back])
        return torch.nn.functional.silu(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias = ctx.saved_tensors
        taps, shifts = weight.shape[1], range(1, min(weight.shape[1], x.shape[1]))
        # The same sums again, with shifts written another way: compilers would keep shifts that they find in both.
        y = torch.addcmul(bias, x, weight[:, -1])
        for back in shifts:
            y = torch.addcmul(y, _shifted(x, back), weight[:, -1 - back])
        share = torch.sigmoid(y)
        dsums = _stored(dy * (share * (1 + y * (1 - share))))
        dx = dsums * weight[:, -1]
        dweight = [torch.zeros_like(bias)] * (taps - 1) + [(dsums * x).sum((0, 1))]
        for back in shifts:
            later = _shifted(dsums, -back)
            dx = torch.addcmul(dx, later, weight[:, -1 - back])
            dweight[-1 - back] = (later * x).sum((0, 1))
        return dx.to(x.dtype), torch.stack(dweight, 1), dsums.sum((0, 1))
