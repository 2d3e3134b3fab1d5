"""Forward and backward of a split linear: the six operand rows on what is left after the split, the rest beside them.

Low rank, with h = x L1^T, z = x Q1, P1 = Q1 Q1^T, P2 = Q2 Q2^T and G = dY^T x (Q1, Q2 orthonormal, of L1^T and L2):

    Y    = Qx(x) Qw(W_res)^T + beta h L2^T
    dX   = Q(dY) Qw(W_res) + beta (dY L2) L1
    dW_res = Q(dY - (dY Q2) Q2^T)^T Q(x - z Q1^T)            = (I - P2) G (I - P1)     (tangent)
    dL2  = beta dY^T h          dL1 = beta (dY L2)^T (decode(Q(x - z Q1^T)) + z Q1^T)

x itself is not kept: packed codes and z are, and h = z Q1^T L1^T. Mean: x = 1 mu^T + x', dY = 1 nu^T + dY', and

    Y = Q(x') Q(W)^T + 1 (W mu)^T      dX = Q(dY') Q(W) + 1 (nu W)      dW = Q(dY')^T Q(x') + T nu mu^T
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quatrain.formats import QuantSpec
from quatrain.kernels.matmul import gemm_parts
from quatrain.nn.factors import narrow_parts
from quatrain.nn.products import dgrad, operands, product, wgrad, wide_dtype
from quatrain.nn.split_joined import joined_backward, joined_forward
from quatrain.nn.state import maxima_row, note_maxima
from quatrain.nn.weights import Parts, Specs, one_weight

# kind, mode, beta, dense weight, needs Dgrad, needs Wgrad, runs joined (`quatrain.nn.split_joined`)
Plan = tuple[str, str, float, bool, bool, bool, bool]
PROJECTED = ("tangent", "onesided")  # modes whose kept operand is x less its part in the subspace
_NOTHING: Parts = (None, None, None)


@dataclass(frozen=True)
class _Forward:
    """What both kinds of split hand back: Y, what is kept for the backward pass, and the amax of fprop.input."""

    y: Tensor
    kept: Parts
    small: tuple[Tensor | None, ...]
    amax: Tensor | None


class SplitFunction(torch.autograd.Function):
    """The linear with a `split` row. Between forward and backward only packed operands and narrow tensors are alive."""

    @staticmethod
    def forward(  # noqa: D102 (torch's)
        ctx: Any,
        x: Tensor,  # [T, K] compute dtype
        weight: Tensor,  # [N, K] master; W_res where the factors are parameters
        bias: Tensor | None,  # [N]
        left: Tensor | None,  # [N, r] master of L2
        right: Tensor | None,  # [r, K] master of L1
        keys: Tensor,  # int64 [6, 2]
        specs: Specs,
        plan: Plan,
        at_once: tuple[bool, ...],
        *rest: Any,  # weight codes of Fprop and Dgrad (6), what `split_factors` gives or None (3), seen row, zero
    ) -> tuple[Tensor, Tensor]:
        codes, factors, seen_row, zero = rest[:6], rest[6:9], rest[9], rest[10]
        kind, needs_dgrad = plan[0], plan[4]
        plain = weight if factors[2] is None else factors[2]
        w_parts = codes[:3] if specs[1] else (plain.to(x.dtype), None, None)
        forward = _mean_forward if kind == "mean" else _joined_forward if plan[6] else _svd_forward
        done = forward(x, plain, bias, keys, specs, plan, at_once, w_parts, factors)
        dgrad_parts: Parts = _NOTHING
        if needs_dgrad:
            dgrad_parts = (plain, None, None) if specs[3] is None else codes[:3] if one_weight(specs) else codes[3:]
        compiling = torch.compiler.is_compiling()  # as in the linear without a split
        ctx.keys = None if compiling else keys
        extra = (weight,) if kind == "mean" else factors[:2]
        ctx.save_for_backward(keys if compiling else None, *done.kept, *dgrad_parts, *done.small, *extra)
        ctx.specs, ctx.plan, ctx.at_once, ctx.x_dtype = specs, plan, at_once, x.dtype
        ctx.shape = (x.shape[0], x.shape[1], weight.shape[0])
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias, left, right)]
        ctx.seen_row, ctx.zero = seen_row, zero
        seen = maxima_row(zero.to(x.device), {0: done.amax, 1: codes[2], 3: codes[5], 5: done.kept[2]})
        ctx.mark_non_differentiable(seen)
        if not compiling:
            ctx.set_materialize_grads(False)  # else zeros are made for `seen` before each backward pass
        return done.y, seen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 (torch's)
        dy = grads[0]  # [T, N]
        if dy is None:  # what follows the linear gave none
            return (None,) * 20
        keys, *saved = ctx.saved_tensors
        keys = ctx.keys if keys is None else keys
        joined = ctx.plan[6]
        backward = _mean_backward if ctx.plan[0] == "mean" else _joined_backward if joined else _svd_backward
        dx, dw, dleft, dright, seen = backward(ctx, dy, keys, tuple(saved))
        db = None
        if ctx.dtypes[1] is not None and ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=wide_dtype(dy)).to(ctx.dtypes[1])
        if not dy.is_meta:
            note_maxima(ctx.seen_row, maxima_row(ctx.zero.to(dy.device), seen))
        return (dx, dw, db, dleft, dright, *(None,) * 15)


def _joined_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor, specs: Specs, plan: Plan,
    at_once: tuple[bool, ...], w_parts: Parts, factors: tuple[Any, ...],
) -> _Forward:  # fmt: skip
    y, u, kept, amax = joined_forward(x, bias, keys, specs, plan[2], w_parts, factors[0], factors[1])
    return _Forward(y, kept, (u,), amax)


def _joined_backward(ctx: Any, dy: Tensor, keys: Tensor, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    kept, w_parts, u, inward, outward = saved[:3], saved[3:6], saved[6], saved[7], saved[8]
    dtypes, beta = ctx.dtypes, ctx.plan[2]
    found = joined_backward(dy, keys, ctx.specs, beta, kept, w_parts, u, inward, outward, dtypes[0])
    dx, dw, dleft, dright, amax = found
    return dx, dw.to(dtypes[0]), dleft.to(dtypes[2]), dright.to(dtypes[3]), {2: amax[:1], 4: amax[1:]}


def _svd_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor, specs: Specs, plan: Plan,
    at_once: tuple[bool, ...], w_parts: Parts, factors: tuple[Any, ...],
) -> _Forward:  # fmt: skip
    _, mode, beta, dense, _, needs_wgrad, _ = plan
    left, right, q1, _ = narrow_parts(factors[0], factors[1])
    dtype, wide = x.dtype, wide_dtype(x)
    x_parts, _ = operands(x, specs, 0, None, keys, (at_once[0], False))
    h = product(x, right, dtype)
    y = gemm_parts(x_parts, specs[0], w_parts, specs[1], (x.shape[0], weight.shape[0]), wide, bias)
    y = (y + beta * product(h, left, wide)).to(dtype)
    if not needs_wgrad:
        return _Forward(y, _NOTHING, (None,), x_parts[2])
    z = h if dense else product(x, q1, dtype, rows=True)
    if mode in PROJECTED:
        x = (x - product(z, q1, wide)).to(dtype)
    _, kept = operands(x, specs, None, 5, keys, (False, False))
    return _Forward(y, kept, (z,), x_parts[2])


def _svd_backward(ctx: Any, dy: Tensor, keys: Tensor, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    kept, dgrad_parts, z = saved[:3], saved[3:6], saved[6]
    left, right, q1, q2 = narrow_parts(saved[7], saved[8])
    _, mode, beta, dense, *_ = ctx.plan
    specs, dtype, wide = ctx.specs, ctx.x_dtype, wide_dtype(dy)
    tokens, in_features, out_features = ctx.shape
    needs = ctx.needs_input_grad
    has_dx, has_dw = needs[0], kept[0] is not None and (needs[1] or needs[3] or needs[4])
    down = product(dy, left, dtype, rows=True)  # [T, r] dY L2
    seen: dict[int, Any] = {}
    dx = dw = dleft = dright = None
    across = product(dy, q2, dtype, rows=True) if has_dw and mode in ("tangent", "core") else None
    # Both operands of dY come from one read, unless Wgrad's has its in-span part taken out.
    apart = has_dw and mode == "tangent"
    column = 4 if has_dw and not apart else None
    dy_parts, dyt_parts = operands(dy, specs, 2 if has_dx else None, column, keys, ctx.at_once[1:])
    source = dy
    if apart and across is not None:
        source = (dy - product(across, q2, wide)).to(dtype)
        _, dyt_parts = operands(source, specs, None, 4, keys, ctx.at_once[1:])
    if has_dx:
        seen[2] = dy_parts[2]
        dx = dgrad(dy_parts, dgrad_parts, specs, (tokens, in_features), dtype, wide)
        dx = (dx + beta * product(down, right, wide, rows=True)).to(dtype)
    if has_dw:
        dyt_parts = dyt_parts if specs[4] else (source.t(), None, None)
        seen[4] = dyt_parts[2]
        if needs[1]:
            dw = wgrad(dyt_parts, kept, specs, (out_features, in_features), wide)
            dw = _weight_gradient(dw, mode, dense, kept, specs[5], dy, across, z, q1, q2)
            dw = dw.to(ctx.dtypes[0])
        if needs[3]:
            dleft = beta * product(dy.t(), z.t(), wide) @ (q1.to(wide).t() @ right.to(wide).t())  # h = z Q1^T L1^T
            if mode == "core":
                dleft = q2.to(wide) @ (q2.to(wide).t() @ dleft)
            dleft = dleft.to(ctx.dtypes[2])
        if needs[4]:
            dright = (beta * _right_gradient(mode, kept, specs[5], down, z, q1)).to(ctx.dtypes[3])
    return dx, dw, dleft, dright, seen


def _weight_gradient(
    dw: Tensor, mode: str, dense: bool, kept: Parts, spec: str | None, dy: Tensor, across: Tensor | None,
    z: Tensor, q1: Tensor, q2: Tensor,
) -> Tensor:  # fmt: skip
    """What W_res gets, or of a dense weight the whole of G: the quantized product and the exact parts in the subspace.

    G = (I - P2) G (I - P1) + Q2 (dY Q2)^T (I - P1)x + (dY^T z) Q1^T, the middle term from the kept codes.
    """
    wide = dw.dtype
    q1w, q2w = q1.to(wide), q2.to(wide)
    if mode == "core" and across is not None:
        inside = q2w.t() @ dw @ q1w
        exact = product(across.t(), z.t(), wide) if dense else 0.0
        return dw + q2w @ (exact - inside) @ q1w.t()
    if not dense or mode == "naive":
        return dw
    if across is not None:
        dw = dw + q2w @ times_kept(across, kept, spec, wide)
    return dw + product(dy.t(), z.t(), wide) @ q1w.t()


def _right_gradient(mode: str, kept: Parts, spec: str | None, down: Tensor, z: Tensor, q1: Tensor) -> Tensor:
    """(dY L2)^T x [r, K] from the codes of x and the exact z = x Q1."""
    wide = wide_dtype(down)
    q1w = q1.to(wide)
    exact = product(down.t(), z.t(), wide)  # [r, r]
    if mode == "core":
        return exact @ q1w.t()
    found = times_kept(down, kept, spec, wide)
    if mode == "naive":  # the codes are of x itself: their part in the subspace gives way to the exact one
        exact = exact - found @ q1w
    return found + exact @ q1w.t()


def times_kept(narrow: Tensor, kept: Parts, spec: str | None, out: torch.dtype) -> Tensor:
    """narrow^T x [r, K] of a [T, r] tensor and the kept operand of Wgrad.

    The codes stay transformed along the tokens: the narrow side is transformed instead, and the two cancel.
    """
    if spec is None:
        return product(narrow.t(), kept[0], out, rows=True)
    turned = rotate_tokens(narrow, spec)
    return gemm_parts((turned, None, None), None, kept, spec, (narrow.shape[1], kept[0].shape[0]), out)


@torch.library.custom_op("quatrain::rotate_tokens", mutates_args=())
def rotate_tokens(narrow: Tensor, spec: str) -> Tensor:
    """[T, r] as [r, T'], T padded to whole blocks and transformed along them as `spec` transforms an operand."""
    resolved = QuantSpec.from_json(spec)
    hadamard = resolved.hadamard
    padded = torch.nn.functional.pad(narrow.t(), (0, -narrow.shape[0] % _run(resolved)))
    return (padded if hadamard is None else hadamard.forward(padded)).contiguous().clone()


@rotate_tokens.register_fake
def _(narrow: Tensor, spec: str) -> Tensor:
    run = _run(QuantSpec.from_json(spec))
    return narrow.new_empty((narrow.shape[1], -(-narrow.shape[0] // run) * run))


def _run(spec: QuantSpec) -> int:
    """Tokens that are padded to: a block, or the transform where that is longer."""
    return max(spec.block_shape[1], spec.hadamard.size if spec.hadamard is not None else 1)


def _mean_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor, specs: Specs, plan: Plan,
    at_once: tuple[bool, ...], w_parts: Parts, factors: tuple[Any, ...],
) -> _Forward:  # fmt: skip
    dtype, wide = x.dtype, wide_dtype(x)
    mean = token_mean(x)
    x = (x - mean).to(dtype)
    x_parts, kept = operands(x, specs, 0, 5 if plan[5] else None, keys, (at_once[0], False))
    y = gemm_parts(x_parts, specs[0], w_parts, specs[1], (x.shape[0], weight.shape[0]), wide, bias)
    y = (y + product(mean, weight.to(wide), wide)).to(dtype)
    return _Forward(y, kept, (mean,), x_parts[2])


def _mean_backward(ctx: Any, dy: Tensor, keys: Tensor, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    kept, dgrad_parts, mean, weight = saved[:3], saved[3:6], saved[6], saved[7]
    specs, dtype, wide = ctx.specs, ctx.x_dtype, wide_dtype(dy)
    tokens, in_features, out_features = ctx.shape
    has_dx, has_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1] and kept[0] is not None
    dmean = token_mean(dy)
    dy = (dy - dmean).to(dtype)
    both = operands(dy, specs, 2 if has_dx else None, 4 if has_dw else None, keys, ctx.at_once[1:])
    seen: dict[int, Any] = {}
    dx = dw = None
    if has_dx:
        seen[2] = both[0][2]
        dx = dgrad(both[0], dgrad_parts, specs, (tokens, in_features), dtype, wide)
        dx = (dx + product(dmean, weight.to(wide), wide, rows=True)).to(dtype)
    if has_dw:
        dyt_parts = both[1] if specs[4] else (dy.t(), None, None)
        seen[4] = dyt_parts[2]
        dw = wgrad(dyt_parts, kept, specs, (out_features, in_features), wide)
        dw = (dw + tokens * (dmean.t() @ mean)).to(ctx.dtypes[0])
    return dx, dw, None, None, seen


def token_mean(x: Tensor) -> Tensor:
    """Mean over the tokens [1, K], fp32 (float64 of float64); 0 of no tokens."""
    return x.sum(0, keepdim=True, dtype=wide_dtype(x)) / max(x.shape[0], 1)
