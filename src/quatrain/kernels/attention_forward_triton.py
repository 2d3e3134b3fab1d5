"""Triton kernel of attention's forward pass: softmax in one walk over the keys, no [queries, keys] tensor in memory."""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.attention_block_triton import (
    LN2,
    LOG2E,
    extent,
    key_range,
    product,
    product_plus,
    score_factor,
    seen,
    to_dtype,
)
from quatrain.kernels.attention_native_triton import opaque_zeros, packed_rows, scaled_product


@triton.jit
def load_tile(ptr, first, limit, stride, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Rows first to first + ROWS of [limit, size], COLUMNS >= size of them, zeros outside.

    WHOLE: no row lies outside.
    """
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    pointers = ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    FULL: tl.constexpr = size == COLUMNS
    if WHOLE and FULL:
        tile = tl.load(pointers)
    elif WHOLE:
        tile = tl.load(pointers, mask=(column < size)[None, :], other=0.0)
    elif FULL:
        tile = tl.load(pointers, mask=(row < limit)[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=(row < limit)[:, None] & (column < size)[None, :], other=0.0)
    return tile


@triton.jit
def rows_of(source, batch, head, first, limit, stride, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
            WHOLE: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Tokens first to first + ROWS of a head: by a descriptor of [batch, heads, tokens, size], or from a pointer."""
    if TMA:
        tile = tl.reshape(source.load([batch, head, first, 0]), [ROWS, COLUMNS])
    else:
        tile = load_tile(source, first, limit, stride, size, ROWS, COLUMNS, WHOLE)
    return tile


@triton.jit
def moved(source, offset, TMA: tl.constexpr):
    """A pointer moved to a head's first token; a descriptor stays."""
    return source if TMA else source + offset


@triton.jit
def score_source(ptr, scales_ptr, row, stride, TMA: tl.constexpr):
    """Where a head's Q or K begins, `row` rows on: (values,), or (codes, scales) where there are scales."""
    if scales_ptr is None:
        source = (moved(ptr, row * stride, TMA),)
    else:
        source = (ptr + row * stride, scales_ptr + row * (stride // 8))
    return source


@triton.jit
def score_rows(source, batch, head, first, limit, stride, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               WHOLE: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """`rows_of` of a `score_source`: (values,) or (codes, scales)."""
    if len(source) == 2:
        tile = packed_rows(source, first, limit, stride, size, ROWS, COLUMNS, WHOLE)
    else:
        tile = (rows_of(source[0], batch, head, first, limit, stride, size, ROWS, COLUMNS, WHOLE, TMA),)
    return tile


@triton.jit
def score_product(a, b, ARCH: tl.constexpr):
    """a b^T of two tiles of `score_rows`."""
    if len(a) == 2:
        out = scaled_product(a, b, opaque_zeros(a[0].shape[0], b[0].shape[0]), ARCH)
    else:
        out = product(a[0], tl.trans(b[0]), ARCH)
    return out


@triton.jit
def store_tile(ptr, tile, first, limit, stride, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ARCH: tl.constexpr):
    """The inverse, rounded to the pointer's dtype."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    pointers = ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    inside = (row < limit)[:, None] & (column < size)[None, :]
    tl.store(pointers, to_dtype(tile, ptr.dtype.element_ty, ARCH), mask=inside)


@triton.jit
def extra_mask(inside, mask_ptr, kept_ptr, query, key, queries, keys, mask_q, RULES: tl.constexpr):
    """What a mask [queries, keys / 32] in bits or kept keys [keys] leave of `inside`."""
    if RULES[3]:
        inside = inside & (tl.load(kept_ptr + key, mask=key < keys, other=0) != 0)
    if RULES[4]:
        there = (query < queries) & (key < keys)
        word = tl.load(mask_ptr + query.to(tl.int64) * mask_q + key // 32, mask=there, other=0)
        inside = inside & (((word >> (key % 32)) & 1) != 0)
    return inside


@triton.jit
def _walk(
    acc, top, total, q, k_from, v_ptr, kept_ptr, mask_ptr, factor, batch, group, first, begin, end, queries, keys,
    shift, k_t, v_t, mask_q, D: tl.constexpr, E: tl.constexpr, RULES: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """Tiles of keys from begin to end; MASKED where a query may not see one of them."""
    for n in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        k = score_rows(k_from, batch, group, n, keys, k_t, D, COLUMNS, BD, not MASKED, TMA)
        s = score_product(q, k, ARCH)
        query, key = (first + tl.arange(0, ROWS))[:, None], (n + tl.arange(0, COLUMNS))[None, :]
        if MASKED:
            inside = seen(query, key, shift, queries, keys, RULES[0], RULES[2])
            inside = extra_mask(inside, mask_ptr, kept_ptr, query, key, queries, keys, mask_q, RULES)
            s = tl.where(inside, s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1) * factor)
        base = tl.where(raised == float("-inf"), 0.0, raised)
        p = tl.math.exp2(tl.fma(s, factor, -base[:, None]))
        if MASKED:
            p = tl.where(inside, p, 0.0)  # a factor of 0 makes NaN of -inf
        keep = tl.math.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
        v = rows_of(v_ptr, batch, group, n, keys, v_t, E, COLUMNS, BE, not MASKED, TMA)
        if RULES[3]:
            v = tl.where((tl.load(kept_ptr + n + tl.arange(0, COLUMNS), mask=n + tl.arange(0, COLUMNS) < keys,
                                  other=0) != 0)[:, None], v, 0.0)  # fmt: skip
        acc = product_plus(to_dtype(p, v.dtype, ARCH), v, acc * keep[:, None], ARCH)
        top = raised
    return acc, top, total


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, q_scales_ptr, k_scales_ptr, out_ptr, lse_ptr, amax_q_ptr, amax_k_ptr, kept_ptr, mask_ptr,
    starts_q_ptr, starts_k_ptr, heads, groups, queries, keys, padded_q, padded_k, q_t, k_t, v_b, v_h, v_t, o_b, o_h,
    o_t, mask_b, mask_h, mask_q,
    FACTORS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, RULES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """O and L of one tile of queries of one head.

    q, k: [b h padded_q, D] and [b g padded_k, D] of row strides q_t and k_t, decoded; where there are scales
    packed, strides in bytes. FACTORS: as `score_factor` takes them.
    RULES: (causal, bottom right, window, kept keys given, mask given, sequences packed).
    """
    head = tl.program_id(1)
    batch, group = head // heads, head % heads // (heads // groups)
    begin_q, here_q, first_padded_q = extent(starts_q_ptr, queries, tl.program_id(2), RULES[5])
    begin_k, here_k, first_padded_k = extent(starts_k_ptr, keys, tl.program_id(2), RULES[5])
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # a causal tile's work grows with its place
    if first < here_q:
        shift = here_k - here_q if RULES[1] else 0
        q_from = score_source(q_ptr, q_scales_ptr, head.to(tl.int64) * padded_q + first_padded_q, q_t, TMA)
        key_row = (batch * groups + group).to(tl.int64) * padded_k + first_padded_k
        k_from = score_source(k_ptr, k_scales_ptr, key_row, k_t, TMA)
        v_ptr = moved(v_ptr, batch.to(tl.int64) * v_b + group.to(tl.int64) * v_h + begin_k.to(tl.int64) * v_t, TMA)
        out_ptr += batch.to(tl.int64) * o_b + (head % heads).to(tl.int64) * o_h + begin_q.to(tl.int64) * o_t
        kept_ptr += batch * keys
        mask_ptr += batch.to(tl.int64) * mask_b + (head % heads).to(tl.int64) * mask_h
        factor = score_factor(amax_q_ptr, amax_k_ptr, FACTORS) * LOG2E
        begin, whole, until, end = key_range(
            first, here_q, here_k, shift, RULES[0], RULES[2], RULES[3] or RULES[4], ROWS, COLUMNS
        )
        q = score_rows(q_from, batch, head % heads, first, here_q, q_t, D, ROWS, BD, False, TMA)
        acc = tl.zeros([ROWS, BE], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if RULES[2]:
            acc, top, total = _walk(
                acc, top, total, q, k_from, v_ptr, kept_ptr, mask_ptr, factor, batch, group, first, begin, whole,
                here_q,
                here_k, shift, k_t, v_t, mask_q, D, E, RULES, True, ROWS, COLUMNS, BD, BE, STAGES, TMA, ARCH,
            )  # fmt: skip
        acc, top, total = _walk(
            acc, top, total, q, k_from, v_ptr, kept_ptr, mask_ptr, factor, batch, group, first, whole, until, here_q,
            here_k, shift, k_t, v_t, mask_q, D, E, RULES, False, ROWS, COLUMNS, BD, BE, STAGES, TMA, ARCH,
        )  # fmt: skip
        acc, top, total = _walk(
            acc, top, total, q, k_from, v_ptr, kept_ptr, mask_ptr, factor, batch, group, first, until, end, here_q,
            here_k, shift, k_t, v_t, mask_q, D, E, RULES, True, ROWS, COLUMNS, BD, BE, STAGES, TMA, ARCH,
        )  # fmt: skip
        store_tile(out_ptr, acc / _nonzero(total)[:, None], first, here_q, o_t, E, ROWS, BE, ARCH)
        lse = tl.where(total == 0.0, float("-inf"), (top + tl.math.log2(_nonzero(total))) * LN2)
        row = first + tl.arange(0, ROWS)
        tl.store(lse_ptr + head.to(tl.int64) * queries + begin_q + row, lse, mask=row < here_q)


@triton.jit
def _nonzero(total):
    return tl.where(total == 0.0, 1.0, total)
