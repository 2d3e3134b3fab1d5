"""Mixed-precision attention for autograd: one function driven by six operand rows.

    S = Q K^T, dQ = dS K, dK = dS^T Q      quantized as their rows say
    O = P V, dV = P^T dO, dP = dO V^T      in the inputs' dtype

With no rows at all this is softmax attention. Kept for backward are the packed views of Q and K, V, O and the softmax
sums. Source: Full-Stack FP4 (Ding et al., 2026), Q-Attn.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quatrain.kernels.attention import attention_backward, attention_forward, choose_attention, pack_views
from quatrain.kernels.attention_layout import Geometry, memory_orders
from quatrain.kernels.attention_rows import AttentionRows, RowsPlan
from quatrain.kernels.rounding import make_key
from quatrain.nn.state import compute_dtype, maxima_row, note_maxima


def quantized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: AttentionRows | RowsPlan,
    *,
    is_causal: bool = False,
    bottom_right: bool = False,
    window: int | None = None,
    key_padding: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    keys: Tensor | None = None,
    seen: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention with quantized operands.

    Args:
        q: [b, h, q, d].
        k: [b, g, k, d]; g divides h, and query head i reads key head i // (h / g).
        v: [b, g, k, e].
        rows: which operands are quantized; or `AttentionRows.plan` of it.
        is_causal: query i sees keys up to i, as in torch's scaled_dot_product_attention; with `bottom_right` up to
            i + k - q, so that the last query sees the last key.
        bottom_right: alignment of `is_causal` and `window` where q and k differ in length.
        window: with `is_causal` a query sees the last `window` keys up to its own position, else those at most `window`
            positions away.
        key_padding: bool [b, k], False at padding; what lies there counts for nothing, NaN included.
        mask: bool [b or 1, h or 1, q, k], True where a query sees a key; alone, without the rules above.
        cu_seqlens_q: int [n + 1], where n sequences packed one after another begin, 0 first and q last (b = 1).
        cu_seqlens_k: the same for keys.
        scale: of the scores, None for 1 / sqrt(d).
        enable_gqa: whether g may differ from h.
        keys: int64 [6, 2], (seed, offset) of every operand (`attention_keys`), for stochastic rows.
        seen: fp32 [6], raised in place to the largest magnitude of each quantized operand.
        backend: "auto", "reference", "triton" or "blackwell" (`choose_attention`).

    Returns:
        [b, h, q, e] in the inputs' dtype (autocast's under autocast); 0 for a query that sees no key.

    Raises:
        ValueError: shapes, dtypes or arguments that do not fit together.
    """
    dtype = _one_dtype(q, k, v)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check_rules(is_causal, window)
    _check_shapes(q, k, v, enable_gqa)
    _check_masks(q, k, is_causal or window is not None, key_padding, mask, cu_seqlens_q, cu_seqlens_k)
    choose_attention(q.device, backend)
    if 0 in (q.numel(), k.numel(), v.numel()):  # zeros that still lead back to the inputs
        return q.new_zeros(*q.shape[:3], v.shape[3]) + sum(t.flatten()[:0].sum() for t in (q, k, v))
    if mask is not None:
        mask = mask.expand(q.shape[0], -1, q.shape[2], k.shape[2])
        key_padding = mask.any(2).any(1)
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    plan = rows.plan if isinstance(rows, AttentionRows) else rows
    # A compiler takes no tensor twice.
    v = v.view_as(v) if v is q or v is k else v
    k = k.view_as(k) if k is q else k
    if cu_seqlens_k is not None and cu_seqlens_k is cu_seqlens_q:
        cu_seqlens_k = cu_seqlens_k.view_as(cu_seqlens_k)
    orders = memory_orders(q, k, v)
    geometry = Geometry(q.shape[1], q.shape[2], q.shape[3], scale, is_causal, bottom_right, window or 0, orders)
    out, maxima = _AttentionFunction.apply(
        q, k, v, key_padding, mask, cu_seqlens_q, cu_seqlens_k, keys, seen, geometry[:8], plan.text,
        plan.slots[training], plan.grads, training, backend,
    )  # fmt: skip
    if seen is not None and not q.is_meta:
        note_maxima(seen, maxima)
    result: Tensor = out
    return result


def attention_keys(seed: int | Tensor, offset: int | Tensor, device: torch.device) -> Tensor:
    """int64 [6, 2]: (seed, 8 offset + operand) for each operand, so that no two draw the same bits."""
    key = make_key(seed, offset, device)
    operand = torch.arange(6, dtype=torch.int64, device=device)
    return torch.stack([key[0].expand(6), key[1] * 8 + operand], dim=1)


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    dtype = compute_dtype(q)
    if not q.is_floating_point() or not dtype == compute_dtype(k) == compute_dtype(v):
        raise ValueError(
            f"attention needs floating inputs of one dtype, received {q.dtype}, {k.dtype}, {v.dtype}; cast them first"
        )
    return dtype


def _check_rules(is_causal: bool, window: int | None) -> None:
    if not isinstance(is_causal, bool):
        raise ValueError(
            f"is_causal must be True or False, received {type(is_causal).__name__}; a mask is given as mask=..., True "
            "where a query sees a key"
        )
    if window is not None and (isinstance(window, (bool, float)) or window < 1):
        raise ValueError(
            f"window must be a number of keys, at least 1, received {window}; leave it out to see them all"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention takes [batch, heads, tokens, head size], received {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must agree in batch and head size, k and v in batch, heads and tokens, received {shapes}"
        )
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"heads of q and k must be equal without grouped queries, received {shapes}; set enable_gqa")
    if k.shape[1] and q.shape[1] % k.shape[1]:
        raise ValueError(f"heads of q must be a multiple of those of k, received {shapes}")


def _check_masks(
    q: Tensor,
    k: Tensor,
    ruled: bool,
    key_padding: Tensor | None,
    mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
) -> None:
    if key_padding is not None and (key_padding.dtype != torch.bool or key_padding.shape != (k.shape[0], k.shape[2])):
        raise ValueError(
            f"key_padding must be bool {(k.shape[0], k.shape[2])}, True at kept keys, received {key_padding.dtype} "
            f"{tuple(key_padding.shape)}"
        )
    if mask is not None:
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        fits = mask.dim() == 4 and all(n == 1 or n == size for n, size in zip(mask.shape, full, strict=True))
        if mask.dtype != torch.bool or not fits:
            raise ValueError(
                f"mask must be bool and broadcast to {full}, True where a query sees a key, received {mask.dtype} "
                f"{tuple(mask.shape)}; an additive bias is not served"
            )
        if ruled or key_padding is not None or cu_q is not None:
            raise ValueError("a mask stands alone, received it with other rules; put is_causal and the others into it")
    if (cu_q is None) != (cu_k is None):
        raise ValueError("packed sequences need cu_seqlens_q and cu_seqlens_k, received one of them; give both")
    if cu_q is None or cu_k is None:
        return
    lists = cu_q.dim() == cu_k.dim() == 1 and cu_q.shape == cu_k.shape and cu_q.numel() >= 2
    if q.shape[0] != 1 or key_padding is not None or not lists:
        raise ValueError(
            "packed sequences need a batch of 1, no key_padding, and cu_seqlens_q and cu_seqlens_k of one length "
            f"of at least 2, received batch {q.shape[0]} and {tuple(cu_q.shape)}, {tuple(cu_k.shape)}"
        )
    if {cu_q.dtype, cu_k.dtype} - {torch.int32, torch.int64}:
        raise ValueError(f"cu_seqlens must be int32 or int64, received {cu_q.dtype} and {cu_k.dtype}; cast them first")


class _AttentionFunction(torch.autograd.Function):
    """Forward now, backward later from the same packed views."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: Tensor | None,
        mask: Tensor | None,
        starts_q: Tensor | None,
        starts_k: Tensor | None,
        keys: Tensor | None,
        seen: Tensor | None,
        numbers: tuple[Any, ...],
        rows: str,
        slots: tuple[int, ...],
        grads: tuple[bool, bool],
        training: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        geometry = Geometry._make((*numbers, kept, mask, starts_q, starts_k))
        views = pack_views(q, k, rows, geometry, keys, training)
        out, lse = attention_forward(views, v, rows, geometry, training, backend)
        # Checkpointing replays forward later, when a model's clock has moved on: the keys of this forward stay here.
        compiling = torch.compiler.is_compiling()
        ctx.keys = None if compiling else keys
        ctx.save_for_backward(keys if compiling else None, v, out, lse, kept, mask, starts_q, starts_k, *views)
        ctx.numbers, ctx.rows, ctx.grads, ctx.backend, ctx.seen = numbers, rows, grads, backend, seen
        maxima = lse.new_empty(0)  # nobody asks
        if seen is not None:  # slots 2, 5, 8 and 11 are the maxima of Q, K, K along tokens and Q along tokens
            zero, amax = torch.zeros(1, device=v.device), dict(zip(slots, views, strict=True))
            maxima = maxima_row(zero, {0: amax.get(2), 1: amax.get(5), 3: amax.get(8), 5: amax.get(11)})
        ctx.mark_non_differentiable(maxima)
        return out, maxima

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        keys, v, out, lse, kept, mask, starts_q, starts_k, *views = ctx.saved_tensors
        keys = ctx.keys if keys is None else keys
        geometry = Geometry._make((*ctx.numbers, kept, mask, starts_q, starts_k))
        do = grads[0].to(v.dtype)
        dq, dk, dv, bound = attention_backward(do, views, v, out, lse, ctx.rows, geometry, keys, ctx.backend)
        if ctx.seen is not None and not v.is_meta:
            largest = bound.amax().reshape(1)
            found = {2: largest if ctx.grads[0] else None, 4: largest if ctx.grads[1] else None}
            note_maxima(ctx.seen, maxima_row(torch.zeros(1, device=v.device), found))
        needs = ctx.needs_input_grad
        return (dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, *(None,) * 12)
