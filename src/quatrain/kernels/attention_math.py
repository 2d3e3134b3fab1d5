"""Attention with quantized operands in plain PyTorch, forward and backward: the definition.

    S = scale Qh Kh^T, P = softmax(S), O = P V                       Qh, Kh what the packed views decode to
    dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = scale Q(dS) K, dK = scale Q(dS)^T Q, dV = P^T dO

Backward makes P from the same packed Q and K as forward, so rows of dS sum to zero. Operands are exact in BF16, or of
the inputs' dtype where a row is missing; products accumulate in fp32 (float64 for float64 inputs). Queries go in
chunks: the largest tensor is [b, h, chunk, keys].
Source: Full-Stack FP4 (Ding et al., 2026), Q-Attn.
Legend: b batch, h query heads, g key heads, n = h / g, q queries, k keys, c queries of a chunk, d head size, e V's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quatrain.formats import E2M1, QTensor, QuantSpec, true_divide
from quatrain.kernels.attention_layout import BLOCK, Geometry, Sequence, keep_tokens, sequences, visible
from quatrain.kernels.attention_rows import AttentionRows
from quatrain.kernels.rounding import encode_nearest, encode_stochastic, random_bits
from quatrain.kernels.scaling import nvfp4_ideal_scale, nvfp4_scales

_CHUNK_ELEMENTS = 1 << 22  # scores that are held at once

Parts = tuple[Tensor, Tensor | None, Tensor | None]  # codes, scales, amax; or values, None, None


class Views(NamedTuple):
    """Q and K as products read them. Tokens are padded (`attention_layout`).

    Attributes:
        query, key: [b h q', d] and [b g k', d]: codes along d, or [b, h, q', d] values.
        key_tokens, query_tokens: [d, b g k'] and [d, b h q'], codes along tokens; None where `key`, `query` serve,
            or where no gradient is wanted.
    """

    query: Parts
    key: Parts
    key_tokens: Parts | None
    query_tokens: Parts | None


class _Operand(NamedTuple):
    """values [b, heads, tokens', d] in the accumulation dtype, and the scalar that multiplies them."""

    values: Tensor
    factor: Tensor | None


def _rowwise(parts: Parts, spec: QuantSpec | None, shape: tuple[int, int, int], d: int, work: torch.dtype) -> _Operand:
    """An operand along the head dimension; shape is (batch, heads, padded tokens)."""
    codes, scales, amax = parts
    if spec is None or scales is None or amax is None:
        return _Operand(codes.to(work), None)
    q = QTensor(codes, scales, amax, torch.Size((shape[0] * shape[1] * shape[2], d)), spec)
    return _Operand(q.block_values().view(*shape, -1)[..., :d].to(work), q.tensor_scale.to(work))


def _tokenwise(
    parts: Parts, spec: QuantSpec | None, shape: tuple[int, int, int], d: int, work: torch.dtype
) -> _Operand:
    """The same along tokens; codes are [d, b h t'], values [b, h, t', d]."""
    codes, scales, amax = parts
    if spec is None or scales is None or amax is None:
        return _Operand(codes.to(work), None)
    q = QTensor(codes, scales, amax, torch.Size((d, shape[0] * shape[1] * shape[2])), spec)
    values = q.block_values()[:d]  # square blocks pad rows too
    return _Operand(values.view(d, *shape).permute(1, 2, 3, 0).to(work), q.tensor_scale.to(work))


def _times(number: float, *factors: Tensor | None) -> Tensor | float:
    """number times the factors that are there, the factors first, left to right."""
    product: Tensor | None = None
    for factor in factors:
        if factor is not None:
            product = factor if product is None else product * factor
    return number if product is None else product * number


def _chunks(part: Sequence, per_query: int) -> list[range]:
    """Ranges of a sequence's queries, whole blocks of 16 but for the last."""
    queries = part.q.stop - part.q.start
    size = max(BLOCK, _CHUNK_ELEMENTS // max(per_query, 1) // BLOCK * BLOCK)
    return [range(i, min(i + size, queries)) for i in range(0, queries, size)]


def _scores(qh: Tensor, kh: Tensor, factor: Tensor | float, seen: Tensor | None) -> Tensor:
    """qh [b, h, c, d], kh [b, g, k, d] to [b, h, c, k], -inf where a key is not seen."""
    b, h, c, d = qh.shape
    s = torch.matmul(qh.reshape(b, kh.shape[1], -1, d), kh.mT).view(b, h, c, -1) * factor
    return s if seen is None else s.masked_fill(~seen, float("-inf"))


def _probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """exp(S - L) with L [b, h, c]; 0 for a query that sees nothing."""
    return torch.exp(s - torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)[..., None])


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[b, h, c, ...] to [b, g, n c, ...]."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1])


def forward_reference(views: Views, v: Tensor, rows: AttentionRows, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """O [b, h, q, e] in v's dtype and the natural logarithm of the softmax sum L [b, h, q], -inf where none is seen."""
    g = geometry
    work = torch.float64 if v.dtype == torch.float64 else torch.float32
    b, groups, keys, e = v.shape
    query, key = _score_operands(views, rows, g, (b, groups), work)
    factor = _times(g.scale, query.factor, key.factor)
    out = v.new_zeros(b, g.queries, g.heads, e).transpose(1, 2)  # as output projections read it: they need no copy
    lse = torch.full((b, g.heads, g.queries), float("-inf"), dtype=work, device=v.device)
    values = keep_tokens(v, g.kept).to(work)
    for part in sequences(g, keys):
        length = part.k.stop - part.k.start
        kh, vh = key.values[:, :, part.padded_k : part.padded_k + length], values[:, :, part.k]
        for chunk in _chunks(part, b * g.heads * length) if length else []:
            seen = visible(g, part, chunk, v.device)
            at = slice(part.q.start + chunk.start, part.q.start + chunk.stop)
            padded = slice(part.padded_q + chunk.start, part.padded_q + chunk.stop)
            s = _scores(query.values[:, :, padded], kh, factor, seen)
            lse[:, :, at] = torch.logsumexp(s, -1)
            p = _probabilities(s, lse[:, :, at]).to(v.dtype).to(work)
            out[:, :, at] = torch.matmul(_by_group(p, groups), vh).view(b, g.heads, -1, e).to(v.dtype)
    return out, lse


def _score_operands(
    views: Views, rows: AttentionRows, g: Geometry, groups: tuple[int, int], work: torch.dtype
) -> tuple[_Operand, _Operand]:
    b, key_heads = groups
    query = _rowwise(views.query, rows.scores_query, (b, g.heads, _length(views.query, b * g.heads)), g.head_size, work)
    key = _rowwise(views.key, rows.scores_key, (b, key_heads, _length(views.key, b * key_heads)), g.head_size, work)
    return query, key


def _length(parts: Parts, heads: int) -> int:
    """Padded tokens of an operand along the head dimension."""
    codes = parts[0]
    return codes.shape[2] if parts[1] is None else codes.shape[0] // heads


def _gradient_operands(
    views: Views, rows: AttentionRows, g: Geometry, groups: tuple[int, int], work: torch.dtype
) -> tuple[_Operand, _Operand]:
    """K and Q as dQ and dK read them."""
    b, key_heads = groups
    d, found = g.head_size, []
    for tokens, row, token_spec, row_spec, heads in (
        (views.key_tokens, views.key, rows.dquery_key, rows.scores_key, key_heads),
        (views.query_tokens, views.query, rows.dkey_query, rows.scores_query, g.heads),
    ):
        shape = (b, heads, _length(row, b * heads))
        if tokens is None:
            found.append(_rowwise(row, row_spec, shape, d, work))
        else:
            found.append(_tokenwise(tokens, token_spec, shape, d, work))
    return found[0], found[1]


def ds_bound(do: Tensor, v: Tensor, delta: Tensor) -> Tensor:
    """fp32 [b, h]: no magnitude of dS = P (dO V^T - delta) of a head exceeds it.

    Cauchy-Schwarz: max over i of norm(dO_i) max_j norm(V_j) + abs(delta_i). Norms in float64, so that squares neither
    overflow nor vanish; NaN and infinity come through.

    Args:
        do: [b, h, q, e].
        v: [b, g, k, e], zeros at padding.
        delta: [b, h, q].
    """
    largest = v.double().square().sum(-1).sqrt().amax(-1)  # [b, g]
    norms = do.double().square().sum(-1).sqrt()
    each = norms * largest.repeat_interleave(do.shape[1] // v.shape[1], 1)[..., None] + delta.double().abs()
    return each.amax(-1).float()


def quantize_ds(ds: Tensor, spec: QuantSpec, bound: Tensor, bits: Tensor | None) -> Tensor:
    """dS as code x block scale, fp32, the last dimension padded to whole blocks; the factor bound / constant is left.

    Args:
        ds: [b, h, rows, columns], blocks along columns.
        spec: nvfp4, blocks of 1 x 16, scale "to-6" or "to-4".
        bound: fp32 [b, h], stands where `quantize` has the tensor's own maximum.
        bits: int32 [b, h, rows, columns padded], for a stochastic spec.
    """
    blocks = torch.nn.functional.pad(ds.float(), (0, -ds.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    amax = bound[..., None, None]
    scales = nvfp4_scales(nvfp4_ideal_scale(blocks.abs().amax(-1), amax, spec), amax, spec)
    scaled = blocks * scales.multiplier[..., None]
    codes = encode_nearest(scaled, E2M1) if bits is None else encode_stochastic(scaled, E2M1, bits.view(scaled.shape))
    return (E2M1.decode(codes) * scales.values[..., None]).flatten(-2)


def _ds_bits(
    spec: QuantSpec, key: Tensor | None, heads: tuple[int, int], rows: range, of: int, columns: range
) -> Tensor | None:
    """Random bits of part of a dS matrix [b, h, of, columns]; its logical rows are (b h of) in order."""
    if not spec.stochastic:
        return None
    if key is None:
        raise ValueError("stochastic rounding of dS needs a key, received none; pass seed and offset")
    head = torch.arange(heads[0] * heads[1], dtype=torch.int64, device=key.device)[:, None] * of
    index = (head + torch.arange(rows.start, rows.stop, device=key.device)).reshape(-1)
    width = -(-len(columns) // BLOCK) * BLOCK
    return random_bits(key, index, width, columns.start).view(*heads, len(rows), width)


class _Gradient(NamedTuple):
    """What every chunk of the backward pass reads."""

    query: _Operand
    key: _Operand
    key_tokens: _Operand
    query_tokens: _Operand
    values: Tensor  # [b, g, k, e]
    do: Tensor  # [b, h, q, e]
    delta: Tensor  # [b, h, q]
    lse: Tensor
    bound: Tensor  # fp32 [b, h]
    factor: Tensor | float
    keys: Tensor | None  # int64 [6, 2]
    dtype: torch.dtype


def backward_reference(
    do: Tensor,
    views: Views,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: AttentionRows,
    geometry: Geometry,
    keys: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ [b, h, q, d], dK [b, g, k, d], dV [b, g, k, e] in v's dtype, and the bound of dS, fp32 [b, h].

    Args:
        do: [b, h, q, e].
        views: of forward, with what products along tokens read.
        v, out, lse: of forward.
        rows, geometry: of forward.
        keys: int64 [6, 2], (seed, offset) of every operand; needed where dS is rounded stochastically.
    """
    g, work = geometry, torch.float64 if v.dtype == torch.float64 else torch.float32
    b, groups, length, _ = v.shape
    query, key = _score_operands(views, rows, g, (b, groups), work)
    key_tokens, query_tokens = _gradient_operands(views, rows, g, (b, groups), work)
    values, wide = keep_tokens(v, g.kept).to(work), do.to(work)
    delta = (wide * out.to(work)).sum(-1)
    context = _Gradient(
        query, key, key_tokens, query_tokens, values, wide, delta, lse, ds_bound(do, values, delta),
        _times(g.scale, query.factor, key.factor), keys, v.dtype,
    )  # fmt: skip
    dq = torch.zeros(b, g.heads, g.queries, g.head_size, dtype=work, device=v.device)
    dk = torch.zeros(b, groups, length, g.head_size, dtype=work, device=v.device)
    dv = torch.zeros(v.shape, dtype=work, device=v.device)
    for part in sequences(g, length):
        here = part.k.stop - part.k.start
        for chunk in _chunks(part, b * g.heads * here) if here else []:
            _backward_chunk(context, rows, g, part, chunk, (dq, dk, dv))
    return dq.to(v.dtype), dk.to(v.dtype), dv.to(v.dtype), context.bound


def _backward_chunk(
    x: _Gradient, rows: AttentionRows, g: Geometry, part: Sequence, chunk: range, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add what the queries of one chunk give to dQ, dK and dV."""
    dq, dk, dv = into
    groups = dk.shape[1]
    length = part.k.stop - part.k.start
    at = slice(part.q.start + chunk.start, part.q.start + chunk.stop)
    padded = slice(part.padded_q + chunk.start, part.padded_q + chunk.stop)
    padded_k = slice(part.padded_k, part.padded_k + length)
    s = _scores(x.query.values[:, :, padded], x.key.values[:, :, padded_k], x.factor,
                visible(g, part, chunk, dq.device))  # fmt: skip
    p, do = _probabilities(s, x.lse[:, :, at]), x.do[:, :, at]
    dv[:, :, part.k] += torch.matmul(_by_group(p.to(x.dtype).to(do.dtype), groups).mT, _by_group(do, groups))
    dp = torch.matmul(_by_group(do, groups), x.values[:, :, part.k].mT).view(p.shape)
    ds = p * (dp - x.delta[:, :, at, None])
    dq[:, :, at] = _dquery(ds, x, rows, g, part, chunk, x.key_tokens.values[:, :, padded_k])
    dk[:, :, part.k] += _dkey(ds, x, rows, g, part, chunk, x.query_tokens.values[:, :, padded])


def _dquery(
    ds: Tensor, x: _Gradient, rows: AttentionRows, g: Geometry, part: Sequence, chunk: range, kt: Tensor
) -> Tensor:
    """dQ [b, h, c, d] of a chunk: scale Q(dS) K, dS quantized along keys."""
    (b, h, c, length), spec = ds.shape, rows.dquery_grad
    if spec is None:
        left, factor = ds.to(x.dtype).to(ds.dtype), _times(g.scale, x.key_tokens.factor)
    else:
        at = range(part.q.start + chunk.start, part.q.start + chunk.stop)
        key = None if x.keys is None else x.keys[2]
        bits = _ds_bits(spec, key, (b, h), at, g.queries, range(length))
        left = quantize_ds(ds, spec, x.bound, bits)[..., :length].to(ds.dtype)
        scale = true_divide(x.bound, spec.constant).to(ds.dtype)[..., None, None]
        factor = _times(g.scale, scale, x.key_tokens.factor)
    return torch.matmul(_by_group(left, kt.shape[1]), kt).view(b, h, c, -1) * factor


def _dkey(
    ds: Tensor, x: _Gradient, rows: AttentionRows, g: Geometry, part: Sequence, chunk: range, qt: Tensor
) -> Tensor:
    """What a chunk adds to dK [b, g, k, d]: scale Q(dS)^T Q, dS quantized along queries, heads of a group summed."""
    c, spec = ds.shape[2], rows.dkey_grad
    if spec is None:
        left, factor = ds.to(x.dtype).to(ds.dtype).mT, _times(g.scale, x.query_tokens.factor)
    else:
        at = range(part.k.start, part.k.stop)
        key = None if x.keys is None else x.keys[4]
        bits = _ds_bits(spec, key, (ds.shape[0], ds.shape[1]), at, x.values.shape[2], chunk)
        left = quantize_ds(ds.mT, spec, x.bound, bits)[..., :c].to(ds.dtype)
        scale = true_divide(x.bound, spec.constant).to(ds.dtype)[..., None, None]
        factor = _times(g.scale, scale, x.query_tokens.factor)
    each = torch.matmul(left, qt) * factor  # [b, h, k, d]
    return each.unflatten(1, (x.values.shape[1], -1)).sum(2)
