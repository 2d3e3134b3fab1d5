"""Triton twin of attention, host side: operands decoded for BF16 products, which kernel runs, on which grid.

No [queries, keys] tensor is ever in memory. Besides its results a pass holds decoded copies of Q and K: two in
forward, three at once in backward, where dK is written over the copy of K if that lies as dK is to lie.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quatrain.formats import QTensor, QuantSpec
from quatrain.kernels import attention_backward_triton as kernels
from quatrain.kernels import attention_hopper_triton as hopper
from quatrain.kernels.attention_forward_triton import forward_kernel
from quatrain.kernels.attention_layout import BLOCK, Geometry, empty_in_order, memory_orders, padded_tokens
from quatrain.kernels.attention_math import Parts, Views
from quatrain.kernels.attention_rows import ATTENTION_OPERANDS, AttentionRows
from quatrain.kernels.attention_tiles import NATIVE_SIZE, Tile, Tuning, tuning_for
from quatrain.kernels.decode_triton import decode
from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2
from quatrain.kernels.quantize_triton import architecture


class Operand(NamedTuple):
    """What a kernel loads tiles of, and the tensor scale that is left.

    Attributes:
        values: [b, h, t', d']; with tokens adjacent [d, b h t']. Packed: codes, [b h t', d' / 2] or [d, b h t' / 2].
        tokens: whether tokens are adjacent.
        stride: of tokens, or of the other dimension; packed, in bytes.
        amax: fp32 [1]; anything for an operand that is not quantized.
        constant: of the tensor scale, 0 for such an operand.
        decoded: whether nobody else needs the values.
        scales: uint8 [., . / 8] where the values are codes.
    """

    values: Tensor
    tokens: bool
    stride: int
    amax: Tensor
    constant: float
    decoded: bool
    scales: Tensor | None = None


def attention_obstacle(v: Tensor, geometry: Geometry) -> str | None:
    """Why these kernels cannot serve such inputs, or None."""
    if v.dtype not in (torch.bfloat16, torch.float16):
        return f"its products are of BF16 or FP16, received {v.dtype}"
    size = max(geometry.head_size, v.shape[3])
    if size > 256:
        return f"its tiles hold head sizes up to 256, received {size}"
    if not 0 < geometry.scale < float("inf"):
        return f"it needs a positive scale, received {geometry.scale}"
    return None


def native_obstacle(v: Tensor, rows: AttentionRows, geometry: Geometry) -> str | None:
    """Why `native=True` cannot serve such inputs where `attention_obstacle` found nothing, or None."""
    size = max(geometry.head_size, v.shape[3])
    if size > NATIVE_SIZE:
        return f"its tiles of packed codes hold head sizes up to {NATIVE_SIZE}, received {size}"
    for name, spec in zip(ATTENTION_OPERANDS, rows.rows, strict=True):
        if spec is None and name.startswith("scores"):
            return f"its scores are products of packed codes, and the row {name} is missing"
        if spec is not None and spec.block_shape != (1, 16):
            return f"its cores take blocks of 1 x 16, received {list(spec.block_shape)} in {name}"
    return None


def forward(
    views: Views, v: Tensor, rows: AttentionRows, geometry: Geometry, tuning: Tuning | None = None, native: bool = False
) -> tuple[Tensor, Tensor]:
    """`forward_reference`, flash style; native: from packed codes, which Blackwell's cores multiply."""
    g, arch = geometry, architecture(v.device.index)
    b, groups, length, e = v.shape
    v = _adjacent(v)
    query, key = _score_operands(views, rows, g, v, groups, native)
    out = v.new_empty(b, g.queries, g.heads, e).transpose(1, 2)  # as a model's next product reads it
    lse = torch.empty(b, g.heads, g.queries, dtype=torch.float32, device=v.device)
    tile = (tuning or tuning_for(max(g.head_size, e), arch, native)).forward
    sources = (query.values, key.values, v)
    tma = not native and _descriptors_serve(sources, g, arch)
    factors = (query.constant, key.constant, g.scale)
    if tma and tuning is None and hopper.serves(v, g, arch):
        hopper.launch_forward(sources, (query.amax, key.amax), (out, lse), g, factors)
        return out, lse
    mask, others = _masks(g, v)
    launch(
        forward_kernel, (ceil_div(g.queries, tile.rows), b * g.heads, _sequences(g)),
        *_sources(sources, (tile.rows, tile.columns, tile.columns), tma), query.scales, key.scales, out, lse,
        query.amax, key.amax, *others,
        *_sizes(g, v, query, key), *v.stride()[:3], *out.stride()[:3], *_mask_strides(mask, g),
        factors, g.head_size, e, _rules(g), tile.rows, tile.columns,
        _wide(g.head_size, native), _wide(e), tile.stages, tma, arch, num_warps=tile.warps,
        maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse


def backward(
    do: Tensor,
    views: Views,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: AttentionRows,
    geometry: Geometry,
    keys: Tensor | None,
    tuning: Tuning | None = None,
    native: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`backward_reference`, flash style; the same for the same keys, whatever the order of programs."""
    g, arch = geometry, architecture(v.device.index)
    b, groups, length, e = v.shape
    v, do = _adjacent(v), _adjacent(do)
    tiles = tuning or tuning_for(max(g.head_size, e), arch, native)
    plain = (parts[0] for parts in (views.query, views.key) if parts[1] is None)
    special = tuning is None and not native and hopper.serves(v, g, arch) and hopper.serves_backward(views, rows)
    special = special and _descriptors_serve((v, do, *plain), g, arch)
    query, key = _score_operands(views, rows, g, v, groups, native, special)
    numbers, bound = _delta(do, v, out, lse, g, ceil_div(g.queries, hopper.PADDED) * hopper.PADDED if special else 0)
    walk = _Walk(do, v, numbers, bound, query, key, rows, g, keys, special)
    dq = empty_in_order(v, (b, g.heads, g.queries, g.head_size), g.orders, 0, v.dtype)
    packed = native and rows.dquery_grad is not None
    walk.run(_tokenwise(views.key_tokens, rows.dquery_key, key, v.dtype, packed), (dq,), tiles.query)
    packed = native and rows.dkey_grad is not None
    other = _tokenwise(views.query_tokens, rows.dkey_query, query, v.dtype, packed)
    dk, dv = _key_outputs(g, v, key)
    for turn in range(g.heads // groups):  # heads of a group are summed in fp32, in their order
        walk.run(other, (dk, dv), tiles.key, turn)
    return dq, dk.to(v.dtype), dv.to(v.dtype), bound


def _key_outputs(g: Geometry, v: Tensor, key: Operand) -> tuple[Tensor, Tensor]:
    """Where dK and dV go: their own dtype, fp32 where heads of a group are summed."""
    b, groups, length, e = v.shape
    dtype = v.dtype if groups == g.heads else torch.float32
    dv = empty_in_order(v, (b, groups, length, e), g.orders, 2, dtype)
    # No other program reads the keys whose dK it writes, and dQ is finished.
    own = key.decoded and g.starts_k is None and key.values.shape[2:] == (length, g.head_size)
    if own and groups == g.heads and memory_orders(key.values) == tuple(g.orders[3:6] or (0, 1, 2)):
        return key.values, dv
    return empty_in_order(v, (b, groups, length, g.head_size), g.orders, 1, dtype), dv


class _Walk(NamedTuple):
    """What both kernels of the backward pass read."""

    do: Tensor
    v: Tensor
    numbers: Tensor  # base and delta
    bound: Tensor
    query: Operand
    key: Operand
    rows: AttentionRows
    g: Geometry
    keys: Tensor | None
    special: bool  # whether Hopper's own kernels run

    def run(self, other: Operand, outputs: tuple[Tensor, ...], tile: Tile, turn: int = 0) -> None:
        """Launch the kernel for dQ, or that for dK and dV with one head of each group."""
        g, v, arch = self.g, self.v, architecture(self.v.device.index)
        b, groups, length, e = v.shape
        of_queries = len(outputs) == 1
        spec = self.rows.dquery_grad if of_queries else self.rows.dkey_grad
        random = None if self.keys is None else self.keys[2 if of_queries else 4]
        if spec is not None and spec.stochastic and random is None:
            raise ValueError("stochastic rounding of dS needs a key, received none; pass seed and offset")
        sources = (self.query.values, self.key.values, other.values, v, self.do)
        factors = (self.query.constant, self.key.constant, g.scale, other.constant)
        if self.special and random is not None:
            maxima = (self.bound, self.query.amax, self.key.amax, other.amax, random.contiguous())
            padded, constants = padded_tokens(g.queries, None), (factors, _constants(spec))
            if of_queries:
                hopper.launch_query(sources, self.numbers, maxima, outputs[0], g, padded, constants)
            else:
                hopper.launch_key(sources, self.numbers, maxima, outputs, g, padded, constants, turn)
            return
        native = self.key.scales is not None
        tma = not native and _descriptors_serve(sources, g, arch)
        tokens = (tile.rows, tile.columns) if of_queries else (tile.columns, tile.rows)
        mask, others = _masks(g, v)
        sequences = _sequences(g)
        launch(
            kernels.query_kernel if of_queries else kernels.key_kernel,
            (ceil_div(g.queries, tile.rows), b * g.heads, sequences)
            if of_queries
            else (ceil_div(length, tile.rows), b * groups, sequences),
            *_sources(sources, (*tokens, tile.columns, tokens[1], tokens[0]), tma),
            self.query.scales, self.key.scales, other.scales, *self.numbers, self.bound,
            self.query.amax, self.key.amax, other.amax, v if random is None else random.contiguous(), *outputs,
            *others, *(() if of_queries else (turn,)), *_sizes(g, v, self.query, self.key), other.stride,
            *v.stride()[:3], *self.do.stride()[:3], *(n for x in outputs for n in x.stride()[:3]),
            *_mask_strides(mask, g), factors, g.head_size, e, _rules(g), _constants(spec), other.tokens, tile.rows,
            tile.columns, _wide(g.head_size, native), _wide(e),
            tile.stages, tma, arch, tile.hold if of_queries else turn > 0, num_warps=tile.warps,
            maxnreg=tile.registers, enable_fp_fusion=False,
        )  # fmt: skip


def _delta(do: Tensor, v: Tensor, out: Tensor, lse: Tensor, g: Geometry, wide: int) -> tuple[Tensor, Tensor]:
    """-L in units of log2 and rowsum(dO O), fp32 [2, b, h, q], and the bound of dS, fp32 [b, h].

    wide: length of the rows of both, with -inf and 0 beyond the queries; 0 for q.
    """
    b, groups, keys, e = v.shape
    arch = architecture(v.device.index)
    found = torch.zeros(b * groups + b * g.heads, dtype=torch.int32, device=v.device)
    norms, bound = found[: b * groups], found[b * groups :]
    wide = wide or g.queries
    numbers = lse.new_empty(2, b, g.heads, wide)
    rows = 16 if arch == 0 else 64
    kept = v if g.kept is None else g.kept.contiguous().view(torch.uint8)
    launch(
        kernels.norms_kernel, (ceil_div(keys, rows), b * groups), v, kept, norms, groups, keys, *v.stride()[:3], e,
        g.kept is not None, rows, _wide(e), arch, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        kernels.delta_kernel, (ceil_div(g.queries, rows), b * g.heads), do, out, lse, norms, *numbers, bound,
        g.heads, groups, g.queries, wide, *do.stride()[:3], *out.stride()[:3], e, rows, _wide(e), arch, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return numbers, bound.view(torch.float32).view(b, g.heads)


def _score_operands(
    views: Views, rows: AttentionRows, g: Geometry, v: Tensor, groups: int, native: bool, special: bool = False
) -> tuple[Operand, Operand]:
    """Q and K as S reads them; special: K laid out as k is where dK can be written over it (descriptors find it)."""
    turned = special and groups == g.heads and tuple(g.orders[3:6]) == (0, 2, 1) and v.shape[2] % BLOCK == 0
    found = []
    for parts, spec, heads in ((views.query, rows.scores_query, g.heads), (views.key, rows.scores_key, groups)):
        codes, scales, amax = parts
        if spec is None or scales is None or amax is None:
            found.append(Operand(codes, False, codes.stride(2), v, 0.0, False))
            continue
        if native:
            found.append(_packed(parts, spec, False))
            continue
        shape = torch.Size((codes.shape[0], g.head_size))
        q = QTensor(codes, scales, amax, shape, spec)
        if turned and parts is views.key:
            values = _decoded(q, v.dtype, (heads, v.shape[2]))
            values = values.view(v.shape[0], -1, heads, values.shape[1]).transpose(1, 2)
        else:
            values = _decoded(q, v.dtype)
            values = values.view(v.shape[0], heads, -1, values.shape[1])
        found.append(Operand(values, False, values.stride(2), amax, spec.constant, True))
    return found[0], found[1]


def _packed(parts: Parts, spec: QuantSpec, tokens: bool) -> Operand:
    """Codes and scales as they are."""
    codes, scales, amax = parts
    if scales is None or amax is None:
        raise ValueError("packed operands need codes, scales and amax, received codes alone; use `pack_views`")
    codes, scales = codes.contiguous(), scales.view(torch.uint8).contiguous()
    return Operand(codes, tokens, codes.stride(0), amax, spec.constant, False, scales)


def _tokenwise(parts: Parts | None, spec: QuantSpec | None, row: Operand, dtype: torch.dtype, native: bool) -> Operand:
    """An operand along tokens; the one along the head dimension where that serves."""
    if parts is None:
        return row
    codes, scales, amax = parts
    if spec is None or scales is None or amax is None:
        return Operand(codes, False, codes.stride(2), row.amax, 0.0, False)
    if native:
        return _packed(parts, spec, True)
    shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
    values = _decoded(QTensor(codes, scales, amax, shape, spec), dtype)
    return Operand(values, True, values.stride(0), amax, spec.constant, True)


def _decoded(q: QTensor, dtype: torch.dtype, turned: tuple[int, int] | None = None) -> Tensor:
    """Code x block scale [rows, whole blocks], exact in BF16 and FP16.

    turned: heads and tokens of the rows, which then come in the order of [b, tokens, heads].
    """
    if q.codes.is_cuda:
        return decode(q.codes, q.scales, q.spec, torch.bfloat16, *(turned or (0, 0))).to(dtype)
    values = q.block_values(dtype)  # Triton's interpreter would take minutes
    if turned is None:
        return values
    return values.view(-1, *turned, values.shape[1]).transpose(1, 2).reshape(values.shape)


def _descriptors_serve(sources: tuple[Tensor, ...], g: Geometry, arch: int) -> bool:
    """Whether the tensor memory accelerator can load every source: Hopper and later, tiles without unused columns."""
    if arch < 90 or g.starts_q is not None or g.head_size != _wide(g.head_size):
        return False
    return all(
        x.data_ptr() % 16 == 0
        and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
        and (x.dim() == 2 or x.shape[3] == _wide(x.shape[3]))
        for x in sources
    )


def _sources(sources: tuple[Tensor, ...], lengths: tuple[int, ...], tma: bool) -> list[Tensor | TensorDescriptor]:
    """What a kernel loads tiles of so many tokens from."""
    if not tma:
        return list(sources)
    blocks = [[x.shape[0], n] if x.dim() == 2 else [1, 1, n, x.shape[3]] for x, n in zip(sources, lengths, strict=True)]
    return [TensorDescriptor.from_tensor(x, block) for x, block in zip(sources, blocks, strict=True)]


def _sizes(g: Geometry, v: Tensor, query: Operand, key: Operand) -> tuple[int, ...]:
    keys = v.shape[2]
    padded = (padded_tokens(g.queries, g.starts_q), padded_tokens(keys, g.starts_k))
    return g.heads, v.shape[1], g.queries, keys, *padded, query.stride, key.stride


def _constants(spec: QuantSpec | None) -> tuple[float | int, ...]:
    """What `attention_block_triton.scaling` calls Q."""
    if spec is None:
        return ()
    target = np.float32(spec.element_max)
    return (
        int(spec.scale == "to-6"), int(spec.scale_rounding == "up"), float(target), float(np.float32(1) / target),
        float(np.float32(spec.constant)), int(spec.stochastic),
    )  # fmt: skip


def _rules(g: Geometry) -> tuple[bool, bool, int, bool, bool, bool]:
    return g.causal, g.bottom_right, g.window, g.kept is not None, g.mask is not None, g.starts_q is not None


def _masks(g: Geometry, like: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mask in bits, and kept keys, it, and starts of sequences; any tensor stands for what is not there."""
    mask = like if g.mask is None else _bits(g.mask)
    kept = like if g.kept is None else g.kept.contiguous().view(torch.uint8)
    starts = [like if s is None else s.contiguous() for s in (g.starts_q, g.starts_k)]
    return mask, (kept, mask, *starts)


def _bits(mask: Tensor) -> Tensor:
    """bool [b, h, q, k] to int32 [b, h, q, ceil(k / 32)], key j in bit j % 32 of word j // 32."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[3] % 32)).view(torch.uint8).unflatten(3, (-1, 8))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)  # no copy from the CPU: graphs capture it
    return (padded * weights).sum(4, dtype=torch.uint8).view(torch.int32)


def _mask_strides(mask: Tensor, g: Geometry) -> tuple[int, int, int]:
    if g.mask is None:
        return 0, 0, 0
    return mask.stride(0), mask.stride(1) if mask.shape[1] > 1 else 0, mask.stride(2)


def _sequences(g: Geometry) -> int:
    return 1 if g.starts_q is None else g.starts_q.numel() - 1


def _adjacent(x: Tensor) -> Tensor:
    """x with its last dimension contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def _wide(size: int, native: bool = False) -> int:
    """Columns of a tile: tensor cores want at least 16, of packed codes 64."""
    return max(64 if native else 16, next_power_of_2(size))
