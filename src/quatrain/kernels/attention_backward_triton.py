"""Triton kernels of attention's backward pass: one walks over keys for dQ, one over queries for dK and dV.

Both make P anew from the packed scores and quantize dS in registers, along the dimension their product contracts, so
that nothing is shared between programs and nothing depends on their order.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.attention_block_triton import (
    LOG2E,
    extent,
    held,
    key_range,
    product,
    product_plus,
    quantize_ds,
    query_range,
    scaling,
    score_factor,
    seen,
    tensor_scale,
    to_dtype,
)
from quatrain.kernels.attention_forward_triton import (
    extra_mask,
    load_tile,
    moved,
    rows_of,
    score_product,
    score_rows,
    score_source,
    store_tile,
)
from quatrain.kernels.attention_native_triton import packed_ds, packed_tokens, scaled_product
from quatrain.kernels.triton_math import key_state, row_state, widen


@triton.jit
def norms_kernel(v_ptr, kept_ptr, out_ptr, groups, keys, v_b, v_h, v_t, E: tl.constexpr, KEPT: tl.constexpr,
                 ROWS: tl.constexpr, BE: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """Raise out (int32 [b g]) to the largest norm of a head's values, as fp32 bits."""
    head = tl.program_id(1)
    batch, group = head // groups, head % groups
    v_ptr += batch.to(tl.int64) * v_b + group.to(tl.int64) * v_h
    first = tl.program_id(0) * ROWS
    v = widen(load_tile(v_ptr, first, keys, v_t, E, ROWS, BE, False), ARCH).to(tl.float64)
    squares = tl.sum(v * v, 1)
    if KEPT:
        row = first + tl.arange(0, ROWS)
        squares = tl.where(tl.load(kept_ptr + batch * keys + row, mask=row < keys, other=0) != 0, squares, 0.0)
    norms = tl.sqrt(squares).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(out_ptr + head, tl.max(norms, 0))


@triton.jit
def delta_kernel(
    do_ptr, out_ptr, lse_ptr, norms_ptr, base_ptr, delta_ptr, bound_ptr, heads, groups, queries, wide, do_b, do_h,
    do_t, o_b, o_h, o_t,
    E: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO O), and the bound of a head's dS: max over rows of norm(dO) max norm(V) + abs(delta).

    base: what is added to scores in units of log2 so that exp2 gives P: -L, and -inf for a query that sees nothing.
    Rows of base and delta are `wide`, with -inf and 0 beyond the last query.
    """
    head = tl.program_id(1)
    batch, inner = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    first = tl.program_id(0) * ROWS
    do = load_tile(do_ptr + batch * do_b + inner * do_h, first, queries, do_t, E, ROWS, BE, False)
    out = load_tile(out_ptr + batch * o_b + inner * o_h, first, queries, o_t, E, ROWS, BE, False)
    delta = tl.sum(widen(do, ARCH) * widen(out, ARCH), 1)
    row = first + tl.arange(0, ROWS)
    lse = tl.load(lse_ptr + head.to(tl.int64) * queries + row, mask=row < queries, other=float("-inf"))
    at = head.to(tl.int64) * wide + row
    tl.store(base_ptr + at, tl.where(lse == float("-inf"), lse, lse * -LOG2E), mask=row < wide)
    tl.store(delta_ptr + at, delta, mask=row < wide)
    exact = widen(do, ARCH).to(tl.float64)
    norm = tl.load(norms_ptr + head // heads * groups + head % heads // (heads // groups)).to(tl.float32, bitcast=True)
    each = tl.sqrt(tl.sum(exact * exact, 1)) * norm.to(tl.float64) + tl.abs(delta).to(tl.float64)
    bits = each.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(bound_ptr + head, tl.max(bits, 0))


@triton.jit
def _probabilities(s, factor, base):
    """exp2(s factor - L), 0 where nothing is seen; `base` is -L and broadcasts."""
    return tl.math.exp2(tl.fma(s, factor, base))


@triton.jit
def _numbers(ptr, row, limit, other: tl.constexpr, WHOLE: tl.constexpr):
    """One number for each row; `other` where there is none: -inf for `base`, so that P is 0 there."""
    return tl.load(ptr + row) if WHOLE else tl.load(ptr + row, mask=row < limit, other=other)


@triton.jit
def _operand_source(ptr, scales_ptr, begin, stride, TOKENS: tl.constexpr, TMA: tl.constexpr):
    """Where a head's K or Q begins, as its product with dS reads it: (values,), or (codes, scales) along tokens."""
    if scales_ptr is None:
        source = (moved(ptr, begin.to(tl.int64) * (1 if TOKENS else stride), TMA),)
    else:
        source = (ptr + begin // 2, scales_ptr + begin // 16)
    return source


@triton.jit
def _operand(source, batch, head, begin, first, limit, stride, size: tl.constexpr, TOKENS: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """(values [ROWS, COLUMNS],) of an `_operand_source`, or (codes, scales) with tokens adjacent."""
    if len(source) == 2:
        tile = packed_tokens(source, first, limit, stride, size, ROWS, COLUMNS)
    else:
        ptr = source[0]
        tile = (_operand_tile(ptr, batch, head, begin, first, limit, stride, size, TOKENS, ROWS, COLUMNS, WHOLE, TMA),)
    return tile


@triton.jit
def _plus_ds(acc, ds, other, start, middle, pair, ideal, decode, Q: tl.constexpr, ARCH: tl.constexpr):
    """acc + dS times a tile of `_operand`, dS quantized where Q says how."""
    if len(other) == 2:
        packed = packed_ds(ds, start[:, None], middle[:, None], pair, ideal, decode, Q, ARCH)
        acc = scaled_product(packed, other, acc, ARCH)
    elif len(Q) > 0:
        values = quantize_ds(ds, start[:, None], middle[:, None], pair, ideal, decode, Q, other[0].dtype, ARCH)
        acc = product_plus(values, other[0], acc, ARCH)
    else:
        acc = product_plus(to_dtype(ds, other[0].dtype, ARCH), other[0], acc, ARCH)
    return acc


@triton.jit
def _operand_tile(ptr, batch, head, begin, first, limit, stride, size: tl.constexpr, TOKENS: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Tokens first to first + ROWS of K or Q as [ROWS, COLUMNS]; TOKENS: memory is [size, tokens], tokens adjacent.

    stride: of tokens, with TOKENS of the other dimension. begin: of the head, for a descriptor of [size, all tokens].
    """
    if not TOKENS:
        tile = rows_of(ptr, batch, head, first, limit, stride, size, ROWS, COLUMNS, WHOLE, TMA)
    elif TMA:
        tile = tl.trans(ptr.load([0, begin + first]))
    else:
        row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        pointers = ptr + column[:, None].to(tl.int64) * stride + row[None, :]
        FULL: tl.constexpr = size == COLUMNS
        if WHOLE and FULL:
            tile = tl.trans(tl.load(pointers))
        else:
            tile = tl.trans(tl.load(pointers, mask=(row < limit)[None, :] & (column < size)[:, None], other=0.0))
    return tile


@triton.jit
def _query_walk(
    acc, q, do, base, delta, start, middle, k_from, kt_from, v_ptr, kept_ptr, mask_ptr, factor, ideal, decode, batch,
    group, begin_kt, first, begin, end, queries, keys, shift, k_t, v_t, kt_t, mask_q, D: tl.constexpr,
    E: tl.constexpr, RULES: tl.constexpr,
    Q: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """What the keys from begin to end give to dQ of a tile of queries."""
    for n in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        k = score_rows(k_from, batch, group, n, keys, k_t, D, COLUMNS, BD, not MASKED, TMA)
        v = rows_of(v_ptr, batch, group, n, keys, v_t, E, COLUMNS, BE, not MASKED, TMA)
        kt = _operand(kt_from, batch, group, begin_kt, n, keys, kt_t, D, TOKENS, COLUMNS, BD, not MASKED, TMA)
        p = _probabilities(score_product(q, k, ARCH), factor, base[:, None])
        dp = product(do, tl.trans(v), ARCH)
        if MASKED:
            query, key = (first + tl.arange(0, ROWS))[:, None], (n + tl.arange(0, COLUMNS))[None, :]
            inside = seen(query, key, shift, queries, keys, RULES[0], RULES[2])
            inside = extra_mask(inside, mask_ptr, kept_ptr, query, key, queries, keys, mask_q, RULES)
            ds = tl.where(inside, p * (dp - delta[:, None]), 0.0)
        else:
            ds = p * (dp - delta[:, None])
        acc = _plus_ds(acc, ds, kt, start, middle, n // 2, ideal, decode, Q, ARCH)
    return acc


@triton.jit
def query_kernel(
    q_ptr, k_ptr, kt_ptr, v_ptr, do_ptr, q_scales_ptr, k_scales_ptr, kt_scales_ptr,
    base_ptr, delta_ptr, bound_ptr, amax_q_ptr, amax_k_ptr, amax_ptr, key_ptr, dq_ptr, kept_ptr, mask_ptr,
    starts_q_ptr, starts_k_ptr, heads, groups, queries, keys, padded_q, padded_k, q_t, k_t, kt_t,
    v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, mask_b, mask_h, mask_q,
    FACTORS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, RULES: tl.constexpr, Q: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, ARCH: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries.

    kt: K as this product reads it, with TOKENS [D, kt_t] and tokens adjacent, else like k; packed where it has scales.
    Q: as `scaling` takes it, () where dS is not quantized. Otherwise as in `forward_kernel`.
    """
    head = tl.program_id(1)
    batch, group = head // heads, head % heads // (heads // groups)
    inner = (head % heads).to(tl.int64)
    begin_q, here_q, first_padded_q = extent(starts_q_ptr, queries, tl.program_id(2), RULES[5])
    begin_k, here_k, first_padded_k = extent(starts_k_ptr, keys, tl.program_id(2), RULES[5])
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first < here_q:
        shift = here_k - here_q if RULES[1] else 0
        row = first + tl.arange(0, ROWS)
        q_from = score_source(q_ptr, q_scales_ptr, head.to(tl.int64) * padded_q + first_padded_q, q_t, TMA)
        begin_kt = (batch * groups + group) * padded_k + first_padded_k
        k_from = score_source(k_ptr, k_scales_ptr, begin_kt.to(tl.int64), k_t, TMA)
        kt_from = _operand_source(kt_ptr, kt_scales_ptr, begin_kt, kt_t, TOKENS, TMA)
        v_ptr = moved(v_ptr, batch.to(tl.int64) * v_b + group.to(tl.int64) * v_h + begin_k.to(tl.int64) * v_t, TMA)
        do_ptr = moved(do_ptr, batch.to(tl.int64) * do_b + inner * do_h + begin_q.to(tl.int64) * do_t, TMA)
        dq_ptr += batch.to(tl.int64) * dq_b + inner * dq_h + begin_q.to(tl.int64) * dq_t
        at = head.to(tl.int64) * queries + begin_q
        mask_ptr += batch.to(tl.int64) * mask_b + inner * mask_h
        q = score_rows(q_from, batch, head % heads, first, here_q, q_t, D, ROWS, BD, False, TMA)
        do = rows_of(do_ptr, batch, head % heads, first, here_q, do_t, E, ROWS, BE, False, TMA)
        if HOLD >= 1:
            do = held(do, BE)
        if HOLD == 2:
            q = (held(q[0], BD),)
        base = _numbers(base_ptr + at, row, here_q, float("-inf"), False)
        delta = _numbers(delta_ptr + at, row, here_q, 0.0, False)
        factor, own = score_factor(amax_q_ptr, amax_k_ptr, FACTORS) * LOG2E, tensor_scale(amax_ptr, FACTORS[3])
        start, middle = row, row
        ideal, decode = 1.0, 1.0
        if len(Q) > 0:
            bound = tl.load(bound_ptr + head)
            ideal, decode = scaling(bound, Q)
            own = tl.div_rn(bound, Q[4]) * own
            if Q[5]:
                word0, word1 = key_state(key_ptr)
                start, middle = row_state(word0, word1, (at + row).to(tl.int32))
        begin, whole, until, end = key_range(
            first, here_q, here_k, shift, RULES[0], RULES[2], RULES[3] or RULES[4], ROWS, COLUMNS
        )
        acc = tl.zeros([ROWS, BD], tl.float32)
        for part in tl.static_range(3):
            if part == 1 or part == 2 or RULES[2]:
                acc = _query_walk(
                    acc, q, do, base, delta, start, middle, k_from, kt_from, v_ptr, kept_ptr + batch * keys, mask_ptr,
                    factor, ideal, decode, batch, group, begin_kt, first,
                    begin if part == 0 else (whole if part == 1 else until),
                    whole if part == 0 else (until if part == 1 else end), here_q, here_k, shift, k_t, v_t, kt_t,
                    mask_q, D, E, RULES, Q, TOKENS, part != 1, ROWS, COLUMNS, BD, BE, STAGES, TMA, ARCH,
                )  # fmt: skip
        store_tile(dq_ptr, acc * (own * FACTORS[2]), first, here_q, dq_t, D, ROWS, BD, ARCH)


@triton.jit
def _key_walk(
    dk, dv, k, v, start, middle, q_from, qt_from, do_ptr, base_ptr, delta_ptr, kept_ptr, mask_ptr, factor, ideal,
    decode, batch, inner, begin_qt, first, begin, end, queries, keys, shift, q_t, do_t, qt_t, mask_q, D: tl.constexpr,
    E: tl.constexpr,
    RULES: tl.constexpr, Q: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """What the queries from begin to end of one head give to dK and dV of a tile of keys."""
    for m in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        q = score_rows(q_from, batch, inner, m, queries, q_t, D, COLUMNS, BD, not MASKED, TMA)
        do = rows_of(do_ptr, batch, inner, m, queries, do_t, E, COLUMNS, BE, not MASKED, TMA)
        qt = _operand(qt_from, batch, inner, begin_qt, m, queries, qt_t, D, TOKENS, COLUMNS, BD, not MASKED, TMA)
        column = m + tl.arange(0, COLUMNS)
        base = _numbers(base_ptr, column, queries, float("-inf"), not MASKED)
        delta = _numbers(delta_ptr, column, queries, 0.0, not MASKED)
        p = _probabilities(score_product(k, q, ARCH), factor, base[None, :])
        dp = product(v, tl.trans(do), ARCH)
        if MASKED:
            query, key = column[None, :], (first + tl.arange(0, ROWS))[:, None]
            inside = seen(query, key, shift, queries, keys, RULES[0], RULES[2])
            inside = extra_mask(inside, mask_ptr, kept_ptr, query, key, queries, keys, mask_q, RULES)
            p = tl.where(inside, p, 0.0)
        dv = product_plus(to_dtype(p, do.dtype, ARCH), do, dv, ARCH)
        ds = p * (dp - delta[None, :])
        dk = _plus_ds(dk, ds, qt, start, middle, m // 2, ideal, decode, Q, ARCH)
    return dk, dv


@triton.jit(do_not_specialize=["turn"])
def key_kernel(
    q_ptr, k_ptr, qt_ptr, v_ptr, do_ptr, q_scales_ptr, k_scales_ptr, qt_scales_ptr,
    base_ptr, delta_ptr, bound_ptr, amax_q_ptr, amax_k_ptr, amax_ptr, key_ptr, dk_ptr, dv_ptr, kept_ptr, mask_ptr,
    starts_q_ptr, starts_k_ptr, turn, heads, groups, queries, keys, padded_q,
    padded_k, q_t, k_t, qt_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, mask_b, mask_h,
    mask_q,
    FACTORS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, RULES: tl.constexpr, Q: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr, ARCH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """What one query head of each group, its `turn`th, gives to dK and dV of one tile of keys.

    qt: Q as dS^T Q reads it. ADD: to what dk and dv hold already. Otherwise as in `query_kernel`.
    """
    batch, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    inner = group * (heads // groups) + turn
    head = batch * heads + inner
    begin_q, here_q, first_padded_q = extent(starts_q_ptr, queries, tl.program_id(2), RULES[5])
    begin_k, here_k, first_padded_k = extent(starts_k_ptr, keys, tl.program_id(2), RULES[5])
    first = tl.program_id(0) * ROWS
    if first < here_k:
        shift = here_k - here_q if RULES[1] else 0
        row = first + tl.arange(0, ROWS)
        begin_qt = head * padded_q + first_padded_q
        key_row = (batch * groups + group).to(tl.int64) * padded_k + first_padded_k
        k_from = score_source(k_ptr, k_scales_ptr, key_row, k_t, TMA)
        v_ptr = moved(v_ptr, batch.to(tl.int64) * v_b + group.to(tl.int64) * v_h + begin_k.to(tl.int64) * v_t, TMA)
        q_from = score_source(q_ptr, q_scales_ptr, begin_qt.to(tl.int64), q_t, TMA)
        qt_from = _operand_source(qt_ptr, qt_scales_ptr, begin_qt, qt_t, TOKENS, TMA)
        do_at = batch.to(tl.int64) * do_b + inner.to(tl.int64) * do_h + begin_q.to(tl.int64) * do_t
        do_ptr = moved(do_ptr, do_at, TMA)
        mask_ptr += batch.to(tl.int64) * mask_b + inner.to(tl.int64) * mask_h
        k = score_rows(k_from, batch, group, first, here_k, k_t, D, ROWS, BD, False, TMA)
        v = rows_of(v_ptr, batch, group, first, here_k, v_t, E, ROWS, BE, False, TMA)
        if RULES[3]:
            kept = tl.load(kept_ptr + batch * keys + row, mask=row < here_k, other=0) != 0
            v = tl.where(kept[:, None], v, 0.0)
        factor, own = score_factor(amax_q_ptr, amax_k_ptr, FACTORS) * LOG2E, tensor_scale(amax_ptr, FACTORS[3])
        start, middle = row, row
        ideal, decode = 1.0, 1.0
        if len(Q) > 0:
            bound = tl.load(bound_ptr + head)
            ideal, decode = scaling(bound, Q)
            own = tl.div_rn(bound, Q[4]) * own
            if Q[5]:
                word0, word1 = key_state(key_ptr)
                start, middle = row_state(word0, word1, (head.to(tl.int64) * keys + begin_k + row).to(tl.int32))
        begin, whole, until, end = query_range(
            first, here_q, here_k, shift, RULES[0], RULES[2], RULES[3] or RULES[4], ROWS, COLUMNS
        )
        at = head.to(tl.int64) * queries + begin_q
        dk, dv = tl.zeros([ROWS, BD], tl.float32), tl.zeros([ROWS, BE], tl.float32)
        for part in tl.static_range(3):
            if part == 1 or part == 2 or RULES[0] or RULES[2]:
                dk, dv = _key_walk(
                    dk, dv, k, v, start, middle, q_from, qt_from, do_ptr, base_ptr + at, delta_ptr + at,
                    kept_ptr + batch * keys, mask_ptr, factor, ideal, decode, batch, inner, begin_qt, first,
                    begin if part == 0 else (whole if part == 1 else until),
                    whole if part == 0 else (until if part == 1 else end), here_q, here_k, shift, q_t, do_t, qt_t,
                    mask_q, D, E, RULES, Q, TOKENS, part != 1, ROWS, COLUMNS, BD, BE, STAGES, TMA, ARCH,
                )  # fmt: skip
        dk_ptr += batch.to(tl.int64) * dk_b + group.to(tl.int64) * dk_h + begin_k.to(tl.int64) * dk_t
        dv_ptr += batch.to(tl.int64) * dv_b + group.to(tl.int64) * dv_h + begin_k.to(tl.int64) * dv_t
        dk *= own * FACTORS[2]
        if ADD:
            dk += load_tile(dk_ptr, first, here_k, dk_t, D, ROWS, BD, False)
            dv += load_tile(dv_ptr, first, here_k, dv_t, E, ROWS, BE, False)
        store_tile(dk_ptr, dk, first, here_k, dk_t, D, ROWS, BD, ARCH)
        store_tile(dv_ptr, dv, first, here_k, dv_t, E, ROWS, BE, ARCH)
