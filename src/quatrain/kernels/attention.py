"""Attention's operations on bare tensors: pack the views, forward, backward. What autograd functions call.

Forward and backward are one opaque operation each to compilers. Between them only packed views, V, O and L are kept:
with NVFP4 rows 2.25 bytes per element of Q and K, against 4 in BF16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quatrain.formats import QTensor, QuantSpec
from quatrain.kernels.attention_layout import (
    Geometry,
    check_starts,
    empty_in_order,
    empty_views,
    in_orders,
    keep_tokens,
    key_means,
    pad_tokens,
    padded_tokens,
)
from quatrain.kernels.attention_math import Parts, Views, backward_reference, forward_reference
from quatrain.kernels.attention_rows import AttentionRows, serves_both
from quatrain.kernels.dispatch import BACKENDS, Choice, blackwell_obstacle, triton_obstacle
from quatrain.kernels.operands import quantize_both
from quatrain.kernels.quantize import quantize_parts


def pack_views(
    q: Tensor, k: Tensor, rows: str, geometry: Geometry, keys: Tensor | None, for_backward: bool
) -> list[Tensor]:
    """Q and K as products read them: smoothed, padded, packed; the inputs are not changed.

    Args:
        q: [b, h, q, d].
        k: [b, g, k, d].
        rows: `AttentionRows.to_json` text.
        geometry: sizes and masks.
        keys: int64 [6, 2], (seed, offset) of every operand, for stochastic rows.
        for_backward: also what products along tokens read.

    Returns:
        The tensors of `AttentionRows.slots`: rows [b h t', d] or columns [d, b h t'] as codes, scales and amax; or
        values [b, h, t', d] where a row is missing.
    """
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
        return _pack_op(q, k, rows, *geometry, keys, for_backward)
    return _pack_views(q, k, AttentionRows.from_json(rows), geometry, keys, for_backward)


def attention_forward(
    views: list[Tensor], v: Tensor, rows: str, geometry: Geometry, for_backward: bool, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """O [b, h, q, e] in v's dtype and L [b, h, q] in fp32 (float64 if v is).

    Args:
        views: of `pack_views`.
        v: [b, g, k, e].
        rows, geometry, for_backward: those that made the views.
        backend: as of `choose_attention`.
    """
    if torch.compiler.is_compiling() or isinstance(v, FakeTensor):
        return _forward_op(views, v, rows, *geometry, for_backward, backend)
    return _forward(views, v, AttentionRows.from_json(rows), geometry, for_backward, backend)


def attention_backward(
    do: Tensor,
    views: list[Tensor],
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: str,
    geometry: Geometry,
    keys: Tensor | None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK and dV in v's dtype, laid out in `geometry.orders`, and the bound of dS, fp32 [b, h].

    Shapes as in `backward_reference`.
    """
    if torch.compiler.is_compiling() or isinstance(v, FakeTensor):
        return _backward_op(do, views, v, out, lse, rows, *geometry, keys, backend)
    return _backward(do, views, v, out, lse, AttentionRows.from_json(rows), geometry, keys, backend)


def choose_attention(
    device: torch.device,
    requested: str,
    v: Tensor | None = None,
    geometry: Geometry | None = None,
    rows: AttentionRows | None = None,
) -> str:
    """The backend that runs attention on `device`: "reference", "triton" or "blackwell".

    Args:
        device: where the inputs live.
        requested: "auto", "reference", "triton" (decoded operands, any recent GPU) or "blackwell" (packed codes on its
            FP4 cores, where it has never run, so "auto" does not choose it); honoured or refused.
        v, geometry, rows: of the inputs, where they are known.

    Raises:
        ValueError: an unknown backend, one that does not hold attention, or one that cannot serve these inputs here.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, received {requested!r}")
    if requested == "cpu":
        raise ValueError(
            f'attention runs on backend="auto", "reference", "triton" or "blackwell", '
            f"received {requested!r} on {device}"
        )
    if requested == "reference" or (requested == "auto" and device.type != "cuda"):
        return "reference"
    native = requested == "blackwell"
    obstacle = blackwell_obstacle(device) if native else triton_obstacle(device)
    if obstacle is None and v is not None and geometry is not None:
        from quatrain.kernels.attention_triton import attention_obstacle, native_obstacle

        obstacle = attention_obstacle(v, geometry)
        if obstacle is None and native and rows is not None:
            obstacle = native_obstacle(v, rows, geometry)
    if obstacle is not None and requested != "auto":
        raise ValueError(f'backend="{requested}" cannot run here: {obstacle}; use backend="auto" or "reference"')
    return "reference" if obstacle is not None else ("blackwell" if native else "triton")


def attention_choice(device: torch.device) -> Choice:
    """The backend that "auto" takes on `device`, and which kernels that means; some inputs go to the reference."""
    if choose_attention(device, "auto") == "reference":
        return Choice("reference", "plain PyTorch operations")
    from quatrain.kernels.attention_hopper_triton import hopper_obstacle
    from quatrain.kernels.quantize_triton import architecture

    obstacle = hopper_obstacle(architecture(device.index))
    if obstacle is None:
        return Choice("triton", "Triton kernels, Hopper's own where attention is causal with head size 128")
    return Choice("triton", f"Triton kernels, those for any GPU: of Hopper's own, {obstacle}")


def _pack_views(
    q: Tensor, k: Tensor, rows: AttentionRows, g: Geometry, keys: Tensor | None, for_backward: bool
) -> list[Tensor]:
    if q.is_meta:
        return empty_views(q, k, rows, g, for_backward)
    check_starts(g.starts_q, q.shape[2])
    check_starts(g.starts_k, k.shape[2])
    k, k_amax = _smoothed(k, g) if rows.smooth else (pad_tokens(keep_tokens(k, g.kept), g.starts_k), None)
    q, q_amax = _dense(q, g) if rows.scores_query is not None else (pad_tokens(q, g.starts_q), None)
    query = _pack(q, rows.scores_query, rows.dkey_query, keys, (0, 5), rows, for_backward, q_amax)
    key = _pack(k, rows.scores_key, rows.dquery_key, keys, (1, 3), rows, for_backward, k_amax)
    slots = [*query[0], *key[0], *key[1], *query[1]]
    return [slots[i] for i in rows.slots(for_backward)]  # type: ignore[misc]


def _dense(q: Tensor, g: Geometry) -> tuple[Tensor, Tensor | None]:
    """Queries padded, and their largest magnitude where a kernel that had to copy them has found it."""
    copied = not q.is_contiguous() or q.shape[2] != padded_tokens(q.shape[2], g.starts_q)
    if copied and _has_kernels(q, g.starts_q):
        from quatrain.kernels.attention_views_triton import dense_rows

        return dense_rows(q)
    return pad_tokens(q, g.starts_q), None


def _has_kernels(x: Tensor, starts: Tensor | None) -> bool:
    """Whether `attention_views_triton` serves x, a batch or packed sequences."""
    return starts is None and x.is_cuda and x.dtype != torch.float64 and triton_obstacle(x.device) is None


def _smoothed(k: Tensor, g: Geometry) -> tuple[Tensor, Tensor | None]:
    """Keys less the mean of their sequence, padded, and their largest magnitude where a kernel has found it.

    Exact for gradients too: what is subtracted shifts a row of S, and rows of dS sum to zero.
    """
    if _has_kernels(k, g.starts_k):
        from quatrain.kernels.attention_views_triton import center_keys

        return center_keys(k, g)
    k = keep_tokens(k, g.kept)
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    k = keep_tokens((k.to(wide) - key_means(k, g)).to(k.dtype), g.kept)
    return pad_tokens(k, g.starts_k), None


def _pack(
    x: Tensor,
    row: QuantSpec | None,
    column: QuantSpec | None,
    keys: Tensor | None,
    operands: tuple[int, int],
    rows: AttentionRows,
    for_backward: bool,
    amax: Tensor | None = None,
) -> tuple[Parts, Parts]:
    """x [b, h, t', d] along d and along tokens; x itself where a row is missing.

    amax: fp32 [2], the largest magnitude along d and along tokens, where it is known.
    """
    wanted = column if for_backward and not serves_both(row, column) else None
    matrix = x.reshape(-1, x.shape[-1])
    row_key, column_key = _key(row, keys, operands[0]), _key(wanted, keys, operands[1])
    if rows.views == "decoded" and row is not None and wanted is not None:
        parts = quantize_parts(matrix, row.to_json(), row_key)
        decoded = QTensor(*parts, matrix.shape, row).dequantize()
        return parts, quantize_parts(decoded.t(), wanted.to_json(), column_key)
    texts = [None if spec is None else spec.to_json() for spec in (row, wanted)]
    first, second = quantize_both(matrix, texts[0], texts[1], row_key, column_key, amax=amax)
    return first or (x, None, None), second or (x, None, None)


def _key(spec: QuantSpec | None, keys: Tensor | None, operand: int) -> Tensor | None:
    if spec is None or not spec.stochastic:
        return None
    if keys is None:
        raise ValueError("stochastic rounding needs a key, received none; pass seed and offset")
    return keys[operand]


def _forward(
    tensors: list[Tensor], v: Tensor, rows: AttentionRows, g: Geometry, for_backward: bool, backend: str
) -> tuple[Tensor, Tensor]:
    if v.is_meta:
        return _empty_forward(v, g)
    views = _views(tensors, rows.slots(for_backward))
    with torch.autocast(v.device.type, enabled=False):  # products accumulate in fp32, whatever the surroundings
        chosen = choose_attention(v.device, backend, v, g, rows)
        if chosen != "reference":
            from quatrain.kernels import attention_triton

            return attention_triton.forward(views, v, rows, g, native=chosen == "blackwell")
        return forward_reference(views, v, rows, g)


def _backward(
    do: Tensor,
    tensors: list[Tensor],
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: AttentionRows,
    g: Geometry,
    keys: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if v.is_meta:
        return _empty_backward(v, g)
    views = _views(tensors, rows.slots(True))
    with torch.autocast(v.device.type, enabled=False):
        chosen = choose_attention(v.device, backend, v, g, rows)
        if chosen != "reference":
            from quatrain.kernels import attention_triton

            return attention_triton.backward(do, views, v, out, lse, rows, g, keys, native=chosen == "blackwell")
        *gradients, bound = backward_reference(do, views, v, out, lse, rows, g, keys)
        return *in_orders(gradients, g.orders), bound


def _views(tensors: list[Tensor], slots: tuple[int, ...]) -> Views:
    all_slots: list[Tensor | None] = [None] * 12
    for i, tensor in zip(slots, tensors, strict=True):
        all_slots[i] = tensor
    parts = [(all_slots[i], all_slots[i + 1], all_slots[i + 2]) for i in range(0, 12, 3)]
    return Views(*(None if p[0] is None else p for p in parts))  # type: ignore[arg-type]


def _empty_forward(v: Tensor, g: Geometry) -> tuple[Tensor, Tensor]:
    work = torch.float64 if v.dtype == torch.float64 else torch.float32
    out = v.new_empty(v.shape[0], g.queries, g.heads, v.shape[3]).transpose(1, 2)
    return out, v.new_empty(v.shape[0], g.heads, g.queries, dtype=work)


def _empty_backward(v: Tensor, g: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, groups, length, _ = v.shape
    shapes = (
        (batch, g.heads, g.queries, g.head_size),
        (batch, groups, length, g.head_size),
        (batch, groups, length, v.shape[3]),
    )
    dq, dk, dv = (empty_in_order(v, shape, g.orders, i, v.dtype) for i, shape in enumerate(shapes))
    return dq, dk, dv, v.new_empty(batch, g.heads, dtype=torch.float32)


# The fields of Geometry, as operations take them.
_GEOMETRY = (
    "SymInt heads, SymInt queries, SymInt head_size, float scale, bool causal, bool bottom_right, SymInt window, "
    "int[] orders, Tensor? kept, Tensor? mask, Tensor? starts_q, Tensor? starts_k"
)


@torch.library.custom_op(
    "quatrain::attention_views",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, str rows, {_GEOMETRY}, Tensor? keys, bool for_backward) -> Tensor[]",
)
def _pack_op(q: Tensor, k: Tensor, rows: str, *rest: Any) -> list[Tensor]:
    *geometry, keys, for_backward = rest
    views = _pack_views(q, k, AttentionRows.from_json(rows), Geometry(*geometry), keys, for_backward)
    # An operation returns no input, no storage twice, and strides as `empty_views` says, whatever those of the inputs.
    shared = [v is q or v is k or v.numel() == 1 for v in views]
    return [
        v.clone(memory_format=torch.contiguous_format) if s else v.contiguous()
        for v, s in zip(views, shared, strict=True)
    ]


@_pack_op.register_fake
def _(q: Tensor, k: Tensor, rows: str, *rest: Any) -> list[Tensor]:
    *geometry, _, for_backward = rest
    return empty_views(q, k, AttentionRows.from_json(rows), Geometry(*geometry), for_backward)


@torch.library.custom_op(
    "quatrain::attention_forward",
    mutates_args=(),
    schema=f"(Tensor[] tensors, Tensor v, str rows, {_GEOMETRY}, bool for_backward, str backend) -> (Tensor, Tensor)",
)
def _forward_op(tensors: list[Tensor], v: Tensor, rows: str, *rest: Any) -> tuple[Tensor, Tensor]:
    *geometry, for_backward, backend = rest
    return _forward(tensors, v, AttentionRows.from_json(rows), Geometry(*geometry), for_backward, backend)


@_forward_op.register_fake
def _(tensors: list[Tensor], v: Tensor, rows: str, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_forward(v, Geometry(*rest[:-2]))


@torch.library.custom_op(
    "quatrain::attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor do, Tensor[] tensors, Tensor v, Tensor out, Tensor lse, str rows, {_GEOMETRY}, Tensor? keys, "
        "str backend) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _backward_op(
    do: Tensor, tensors: list[Tensor], v: Tensor, out: Tensor, lse: Tensor, rows: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *geometry, keys, backend = rest
    g = Geometry(*geometry)
    *gradients, bound = _backward(do, tensors, v, out, lse, AttentionRows.from_json(rows), g, keys, backend)
    return *in_orders(gradients, g.orders), bound


@_backward_op.register_fake
def _(
    do: Tensor, tensors: list[Tensor], v: Tensor, out: Tensor, lse: Tensor, rows: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_backward(v, Geometry(*rest[:-2]))
