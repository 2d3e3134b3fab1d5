"""Attention's backward kernels for Hopper, in Gluon: dQ by a walk over keys, dK and dV by one over queries.

The arithmetic, order of sums and random bits are those of `attention_backward_triton`, so results are the same to the
bit; warps are specialized as in `attention_hopper_forward_triton`. In each group S and dP of the next step run on the
tensor cores while dS of this one is quantized. Causal, as many queries as keys, head size 128, stochastic rounding.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc,attr-defined,no-any-return"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quatrain.kernels.attention_block_triton import LOG2E, ds_scale, scaling, score_factor, tensor_scale
from quatrain.kernels.attention_hopper_forward_triton import begin_barriers, load_tile, show_barriers, store_rows, sums
from quatrain.kernels.triton_math import key_state, multiplier, pair_hash, row_state


@gluon.jit
def _pair_layout(M: gl.constexpr, N: gl.constexpr, L: gl.constexpr):
    """A tensor whose layout is that of one number for two adjacent columns of layout L."""
    even, odd = gl.split(gl.full([M, N], 0, gl.int32, L).reshape([M, N // 2, 2]))
    return even


@gluon.jit
def _drawn_pairs(scaled, words, like, twice):
    """Magnitudes in [0, 6] rounded to E2M1 with random bits, times the block scale, signs of `like`: exact BF16.

    As `_drawn` and `_signed_pairs`, two elements at once: 64 p + magnitude, its carry added, is exact in BF16, so its
    upper half is taken as it is. words: one for both elements, the first one's bits low; dp2a adds that half.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 p0, p1, b0, b1, v, p, s, z;
        mov.b32 z, 0x80008000;
        max.f32 p0, $1, 0f3F800000;
        max.f32 p1, $2, 0f3F800000;
        and.b32 p0, p0, 0x7F800000;
        and.b32 p1, p1, 0x7F800000;
        fma.rn.f32 b0, p0, 0f42800000, $1;
        fma.rn.f32 b1, p1, 0f42800000, $2;
        dp2a.lo.u32.u32 b0, $3, 1, b0;
        shr.u32 s, $3, 16;
        add.u32 b1, b1, s;
        prmt.b32 v, b0, b1, 0x7632;
        prmt.b32 p, p0, p1, 0x7632;
        mov.b32 s, 0xC280C280;
        fma.rn.bf16x2 v, p, s, v;
        prmt.b32 s, $5, $6, 0x7632;
        lop3.b32 v, v, s, 0x80008000, 0xf8;
        fma.rn.bf16x2 $0, v, $7, z;
        }""",
        "=r,f,f,r,r,r,r,r,r", [scaled, words, like, twice], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _quantized(ds, start, middle, pair, ideal_factor, decode, Q: gl.constexpr):
    """`quantize_ds` with stochastic rounding; start, middle: [M, 1], pair: [1, N / 2]."""
    M: gl.constexpr = ds.shape[0]
    N: gl.constexpr = ds.shape[1]
    x = ds.reshape([M, N // 16, 16])
    L: gl.constexpr = x.type.layout
    scale = ds_scale(gl.max(gl.abs(x), axis=2).expand_dims(2), ideal_factor, Q, 90)
    scaled = gl.abs(x) * multiplier(scale, decode, True, 90)
    if not Q[1]:  # below a scale that was rounded up 6 is exceeded by an ulp at most
        scaled = gl.minimum(scaled, 6.0)
    word = pair_hash(start, middle, pair) ^ -1
    bits = scale.to(gl.int32, bitcast=True)
    twice = gl.broadcast(bits | ((bits >> 16) & 0xFFFF), scaled)[0]
    words = gl.convert_layout(gl.join(word, word).reshape([M, N // 16, 16]), L, assert_trivial=True)
    return _drawn_pairs(scaled, words, x.to(gl.int32, bitcast=True), twice).reshape([M, N])


@gluon.jit
def _random_state(key_ptr, row, M: gl.constexpr, C: gl.constexpr, SL: gl.constexpr):
    """Words of M rows from `row` on, [M, 1], and the coordinates of C / 2 pairs of columns, [1, C / 2]."""
    like = _pair_layout(M, C, SL)
    P: gl.constexpr = like.type.layout
    word0, word1 = key_state(key_ptr)
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, P))
    start, middle = row_state(word0, word1, (row + rows).to(gl.int32))
    pairs = gl.arange(0, C // 2, layout=gl.SliceLayout(0, P)).expand_dims(0)
    return start.expand_dims(1), middle.expand_dims(1), pairs


@gluon.jit
def _query_ds(s, dp, factor, base, delta, n, first, keys, UNDER_WAY: gl.constexpr, MASKED: gl.constexpr,
              M: gl.constexpr, C: gl.constexpr, SL: gl.constexpr):  # fmt: skip
    """dS from S and dP as they come; UNDER_WAY: products begun after dP."""
    s = warpgroup_mma_wait(num_outstanding=UNDER_WAY + 1, deps=[s])
    p = gl.exp2(gl.fma(s, factor, base))
    dp = warpgroup_mma_wait(num_outstanding=UNDER_WAY, deps=[dp])
    ds = p * (dp - delta)
    if MASKED:
        query = first + gl.arange(0, M, layout=gl.SliceLayout(1, SL)).expand_dims(1)
        key = n * C + gl.arange(0, C, layout=gl.SliceLayout(0, SL)).expand_dims(0)
        ds = gl.where((query >= key) & (key < keys), ds, 0.0)
    return ds


@gluon.jit
def _query_steps(ds, acc, q, do, base, delta, start, middle, pairs, k_s, kt_s, v_s, full, empty, factor, ideal, decode,
                 first, begin, end, total, keys, Q: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
                 M: gl.constexpr, C: gl.constexpr, D: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """Steps begin to end: dS of the step comes in, that of the following one (with MASKED masked) goes out.

    All products are waited for before the back edge: with any under way over it ptxas runs wgmma one by one.
    """
    SL: gl.constexpr = sums(C, W)
    zeros = gl.zeros([M, C], gl.float32, SL)
    for n in range(begin, end):
        following = n + 1
        at = following % STAGES
        mbarrier.wait(full.index(at), (following // STAGES) & 1, pred=following < total)
        s = warpgroup_mma(q, k_s.index(at).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma(do, v_s.index(at).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
        operand = _quantized(ds, start, middle, n * (C // 2) + pairs, ideal, decode, Q)
        operand = gl.convert_layout(operand, gl.DotOperandLayout(0, sums(D, W), 2))
        acc = warpgroup_mma(operand, kt_s.index(n % STAGES).permute([1, 0]), acc, is_async=True)
        ds = _query_ds(s, dp, factor, base, delta, following, first, keys, 1, MASKED, M, C, SL)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(empty.index(n % STAGES), count=1)
    return ds, acc


@gluon.jit
def _query_group(q_s, do_s, held, k_s, kt_s, v_s, full, empty, base_ptr, delta_ptr, bound_ptr, amax_q_ptr, amax_k_ptr,
                 amax_ptr, key_ptr, dq_ptr, head, first, total, queries, stride, FACTORS: gl.constexpr,
                 Q: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr, C: gl.constexpr,
                 D: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """One group: dQ of M queries; Q and dO stay in registers."""
    SL: gl.constexpr = sums(C, W)
    DL: gl.constexpr = sums(D, W)
    A: gl.constexpr = gl.DotOperandLayout(0, SL, 2)
    first += PART * M
    row = first + gl.arange(0, M, layout=gl.SliceLayout(1, SL))
    base = gl.load(base_ptr + row, mask=row < queries, other=float("-inf")).expand_dims(1)
    delta = gl.load(delta_ptr + row, mask=row < queries, other=0.0).expand_dims(1)
    factor, own = score_factor(amax_q_ptr, amax_k_ptr, FACTORS) * LOG2E, tensor_scale(amax_ptr, FACTORS[3])
    bound = gl.load(bound_ptr + head)
    ideal, decode = scaling(bound, Q)
    own = gl.div_rn(bound, Q[4]) * own
    start, middle, pairs = _random_state(key_ptr, head.to(gl.int64) * queries + first, M, C, SL)
    mbarrier.wait(held, 0)
    do = do_s.index(PART).reshape([M, D]).load(A)
    q = q_s.index(PART).reshape([M, D]).load(A)
    mbarrier.wait(full.index(0), 0)
    zeros = gl.zeros([M, C], gl.float32, SL)
    acc = gl.zeros([M, D], gl.float32, DL)
    s = warpgroup_mma(q, k_s.index(0).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v_s.index(0).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
    whole = gl.minimum(first, queries) // C
    end = gl.minimum((gl.minimum(first + M, queries) + C - 1) // C, total)
    ds = _query_ds(s, dp, factor, base, delta, 0, first, queries, 0, True, M, C, SL)
    turn = gl.maximum(whole - 1, 0)
    ds, acc = _query_steps(ds, acc, q, do, base, delta, start, middle, pairs, k_s, kt_s, v_s, full, empty, factor,
                           ideal, decode, first, 0, turn, total, queries, Q, False, STAGES, M, C, D, W)  # fmt: skip
    ds, acc = _query_steps(ds, acc, q, do, base, delta, start, middle, pairs, k_s, kt_s, v_s, full, empty, factor,
                           ideal, decode, first, turn, end, total, queries, Q, True, STAGES, M, C, D, W)  # fmt: skip
    store_rows(dq_ptr, acc * (own * FACTORS[2]), first, queries, stride, M, D, DL)


@gluon.jit
def _query_loads(k_d, kt_d, v_d, k_s, kt_s, v_s, full, empty, batch, group, begin_kt, total, STAGES: gl.constexpr,
                 C: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """The loading warp: K, V and K along tokens of every step, as the ring is read."""
    for n in range(0, total):
        s = n % STAGES
        mbarrier.wait(empty.index(s), ((n // STAGES) & 1) ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, 3 * C * D * 2)
        load_tile(k_d, [batch, group, n * C, 0], bar, k_s.index(s))
        load_tile(v_d, [batch, group, n * C, 0], bar, v_s.index(s))
        load_tile(kt_d, [0, begin_kt + n * C], bar, kt_s.index(s))


@gluon.jit
def hopper_query_kernel(
    q_d, k_d, kt_d, v_d, do_d, base_ptr, delta_ptr, bound_ptr, amax_q_ptr, amax_k_ptr, amax_ptr, key_ptr, dq_ptr,
    heads, groups, queries, padded, wide, dq_b, dq_h, dq_t, FACTORS: gl.constexpr, Q: gl.constexpr,
    STAGES: gl.constexpr, M: gl.constexpr, C: gl.constexpr, D: gl.constexpr, W: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ of 2 M queries of one head, by two groups of W warps; C keys are a step.

    Descriptors: BF16 [b, heads or groups, tokens, D]; kt_d: K as dS K reads it, [D, b groups padded].
    base, delta: fp32 [b heads, wide]. Q: as `scaling` takes it.
    """
    head = gl.program_id(1)
    batch, inner = head // heads, head % heads
    group = inner // (heads // groups)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * 2 * M  # a causal tile's work grows with its place
    begin_kt = (batch * groups + group) * padded
    total = (gl.minimum(first + 2 * M, queries) + C - 1) // C
    at = head.to(gl.int64) * wide
    dq_ptr += batch.to(gl.int64) * dq_b + inner.to(gl.int64) * dq_h
    q_s = gl.allocate_shared_memory(q_d.dtype, [2, 1, 1, M, D], q_d.layout)
    do_s = gl.allocate_shared_memory(q_d.dtype, [2, 1, 1, M, D], do_d.layout)
    k_s = gl.allocate_shared_memory(q_d.dtype, [STAGES, 1, 1, C, D], k_d.layout)
    v_s = gl.allocate_shared_memory(q_d.dtype, [STAGES, 1, 1, C, D], v_d.layout)
    kt_s = gl.allocate_shared_memory(q_d.dtype, [STAGES, D, C], kt_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    begin_barriers(full, 1, STAGES)
    begin_barriers(empty, 2, STAGES)
    mbarrier.init(held, count=1)
    show_barriers()
    mbarrier.expect(held, 4 * M * D * 2)
    for i in gl.static_range(2):
        load_tile(q_d, [batch, inner, first + i * M, 0], held, q_s.index(i))
        load_tile(do_d, [batch, inner, first + i * M, 0], held, do_s.index(i))
    gl.warp_specialize([
        (_query_group, (q_s, do_s, held, k_s, kt_s, v_s, full, empty, base_ptr + at, delta_ptr + at, bound_ptr,
                        amax_q_ptr, amax_k_ptr, amax_ptr, key_ptr, dq_ptr, head, first, total, queries, dq_t, FACTORS,
                        Q, 0, STAGES, M, C, D, W)),
        (_query_group, (q_s, do_s, held, k_s, kt_s, v_s, full, empty, base_ptr + at, delta_ptr + at, bound_ptr,
                        amax_q_ptr, amax_k_ptr, amax_ptr, key_ptr, dq_ptr, head, first, total, queries, dq_t, FACTORS,
                        Q, 1, STAGES, M, C, D, W)),
        (_query_loads, (k_d, kt_d, v_d, k_s, kt_s, v_s, full, empty, batch, group, begin_kt, total, STAGES, C, D)),
    ], [W, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit
def _key_probabilities(s, factor, base_s, at, query0, first, MASKED: gl.constexpr, M: gl.constexpr, C: gl.constexpr,
                       SL: gl.constexpr):  # fmt: skip
    """P [M keys, C queries]; queries beyond the last have a base of -inf."""
    p = gl.exp2(gl.fma(s, factor, base_s.index(at).load(SL)))
    if MASKED:
        key = first + gl.arange(0, M, layout=gl.SliceLayout(1, SL)).expand_dims(1)
        query = query0 + gl.arange(0, C, layout=gl.SliceLayout(0, SL)).expand_dims(0)
        p = gl.where(query >= key, p, 0.0)
    return p


@gluon.jit
def _key_steps(p, ds, dk, dv, k, v, start, middle, pairs, q_s, qt_s, do_s, base_s, delta_s, full, empty, factor, ideal,
               decode, first, skipped, begin, end, steps, Q: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
               M: gl.constexpr, C: gl.constexpr, D: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """Steps begin to end: P (an operand) and dS of the step come in, those of the following one go out."""
    SL: gl.constexpr = sums(C, W)
    A: gl.constexpr = gl.DotOperandLayout(0, sums(D, W), 2)
    zeros = gl.zeros([M, C], gl.float32, SL)
    for n in range(begin, end):
        following = n + 1
        at, now = following % STAGES, n % STAGES
        mbarrier.wait(full.index(at), (following // STAGES) & 1, pred=following < steps)
        dv = warpgroup_mma(p, do_s.index(now).reshape([C, D]), dv, is_async=True)
        s = warpgroup_mma(k, q_s.index(at).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do_s.index(at).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
        operand = _quantized(ds, start, middle, (skipped + n) * (C // 2) + pairs, ideal, decode, Q)
        operand = gl.convert_layout(operand, A)
        dk = warpgroup_mma(operand, qt_s.index(now).permute([1, 0]), dk, is_async=True)
        s, dv = warpgroup_mma_wait(num_outstanding=2, deps=[s, dv])
        wide = _key_probabilities(s, factor, base_s, at, (skipped + following) * C, first, MASKED, M, C, SL)
        p = gl.convert_layout(wide.to(gl.bfloat16), A)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=[dp])
        ds = wide * (dp - delta_s.index(at).load(SL))
        dk = warpgroup_mma_wait(num_outstanding=0, deps=[dk])
        mbarrier.arrive(empty.index(now), count=1)
    return p, ds, dk, dv


@gluon.jit
def _plus_rows(tile, ptr, first, limit, stride, M: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """tile + rows first to limit of fp32 [., D]."""
    row = (first + gl.arange(0, M, layout=gl.SliceLayout(1, L))).expand_dims(1)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L)).expand_dims(0)
    return tile + gl.load(ptr + row.to(gl.int64) * stride + column, mask=(row < limit) & (column < D), other=0.0)


@gluon.jit
def _key_group(k_s, v_s, held, q_s, qt_s, do_s, base_s, delta_s, full, empty, bound_ptr, amax_q_ptr, amax_k_ptr,
               amax_ptr, key_ptr, dk_ptr, dv_ptr, head, first, skipped, steps, keys, dk_t, dv_t,
               FACTORS: gl.constexpr, Q: gl.constexpr, ADD: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
               M: gl.constexpr, C: gl.constexpr, D: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """One group: what a head of queries gives to dK and dV of M keys; V stays in registers.

    skipped: steps of queries that see none of the program's keys.
    """
    SL: gl.constexpr = sums(C, W)
    DL: gl.constexpr = sums(D, W)
    first += PART * M
    factor, own = score_factor(amax_q_ptr, amax_k_ptr, FACTORS) * LOG2E, tensor_scale(amax_ptr, FACTORS[3])
    bound = gl.load(bound_ptr + head)
    ideal, decode = scaling(bound, Q)
    own = gl.div_rn(bound, Q[4]) * own
    start, middle, pairs = _random_state(key_ptr, head.to(gl.int64) * keys + first, M, C, SL)
    begin = gl.minimum(PART * M // C, steps)
    for i in gl.static_range(PART * M // C):  # the second group's keys are not seen by the first steps' queries
        mbarrier.arrive(empty.index(i), count=1)
    mbarrier.wait(held, 0)
    k = k_s.index(PART).reshape([M, D])
    v = v_s.index(PART).reshape([M, D]).load(gl.DotOperandLayout(0, SL, 2))
    now = begin % STAGES
    mbarrier.wait(full.index(now), (begin // STAGES) & 1, pred=begin < steps)
    zeros = gl.zeros([M, C], gl.float32, SL)
    dk = gl.zeros([M, D], gl.float32, DL)
    dv = gl.zeros([M, D], gl.float32, DL)
    s = warpgroup_mma(k, q_s.index(now).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do_s.index(now).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
    s, dp = warpgroup_mma_wait(num_outstanding=0, deps=[s, dp])
    exact = _key_probabilities(s, factor, base_s, now, (skipped + begin) * C, first, True, M, C, SL)
    p = gl.convert_layout(exact.to(gl.bfloat16), gl.DotOperandLayout(0, DL, 2))
    ds = exact * (dp - delta_s.index(now).load(SL))
    turn = gl.minimum(begin + M // C - 1, steps)
    p, ds, dk, dv = _key_steps(p, ds, dk, dv, k, v, start, middle, pairs, q_s, qt_s, do_s, base_s, delta_s, full,
                               empty, factor, ideal, decode, first, skipped, begin, turn, steps, Q, True, STAGES, M, C,
                               D, W)  # fmt: skip
    p, ds, dk, dv = _key_steps(p, ds, dk, dv, k, v, start, middle, pairs, q_s, qt_s, do_s, base_s, delta_s, full,
                               empty, factor, ideal, decode, first, skipped, turn, steps, steps, Q, False, STAGES, M,
                               C, D, W)  # fmt: skip
    dk *= own * FACTORS[2]
    if ADD:
        dk = _plus_rows(dk, dk_ptr, first, keys, dk_t, M, D, DL)
        dv = _plus_rows(dv, dv_ptr, first, keys, dv_t, M, D, DL)
    store_rows(dk_ptr, dk, first, keys, dk_t, M, D, DL)
    store_rows(dv_ptr, dv, first, keys, dv_t, M, D, DL)


@gluon.jit
def _key_loads(q_d, qt_d, do_d, numbers_d, q_s, qt_s, do_s, base_s, delta_s, full, empty, batch, inner, head, begin_qt,
               count, skipped, steps, STAGES: gl.constexpr, C: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """The loading warp: Q, dO, Q along tokens, base and delta of every step, as the ring is read."""
    for n in range(0, steps):
        s = n % STAGES
        mbarrier.wait(empty.index(s), ((n // STAGES) & 1) ^ 1)
        query = (skipped + n) * C
        bar = full.index(s)
        mbarrier.expect(bar, 3 * C * D * 2 + 2 * C * 4)
        load_tile(q_d, [batch, inner, query, 0], bar, q_s.index(s))
        load_tile(numbers_d, [head, query], bar, base_s.index(s))
        load_tile(do_d, [batch, inner, query, 0], bar, do_s.index(s))
        load_tile(numbers_d, [count + head, query], bar, delta_s.index(s))
        load_tile(qt_d, [0, begin_qt + query], bar, qt_s.index(s))


@gluon.jit(do_not_specialize=["turn"])
def hopper_key_kernel(
    q_d, k_d, qt_d, v_d, do_d, numbers_d, bound_ptr, amax_q_ptr, amax_k_ptr, amax_ptr, key_ptr, dk_ptr, dv_ptr, turn,
    heads, groups, keys, padded, count, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, FACTORS: gl.constexpr, Q: gl.constexpr,
    ADD: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr, C: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """What one query head of each group, its `turn`th, gives to dK and dV of 2 M keys; C queries are a step.

    numbers_d: fp32 [2 count, tokens], base of all count = b heads heads and then delta; -inf and 0 where there is no
    query, up to a multiple of C. qt_d: Q as dS^T Q reads it, [D, b heads padded]. ADD: to what dk and dv hold already.
    """
    batch, group = gl.program_id(1) // groups, gl.program_id(1) % groups
    inner = group * (heads // groups) + turn
    head = batch * heads + inner
    first = gl.program_id(0) * 2 * M
    skipped = first // C
    steps = (keys + C - 1) // C - skipped
    dk_ptr += batch.to(gl.int64) * dk_b + group.to(gl.int64) * dk_h
    dv_ptr += batch.to(gl.int64) * dv_b + group.to(gl.int64) * dv_h
    k_s = gl.allocate_shared_memory(q_d.dtype, [2, 1, 1, M, D], k_d.layout)
    v_s = gl.allocate_shared_memory(q_d.dtype, [2, 1, 1, M, D], v_d.layout)
    q_s = gl.allocate_shared_memory(q_d.dtype, [STAGES, 1, 1, C, D], q_d.layout)
    do_s = gl.allocate_shared_memory(q_d.dtype, [STAGES, 1, 1, C, D], do_d.layout)
    qt_s = gl.allocate_shared_memory(q_d.dtype, [STAGES, D, C], qt_d.layout)
    base_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, C], numbers_d.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, C], numbers_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    begin_barriers(full, 1, STAGES)
    begin_barriers(empty, 2, STAGES)
    mbarrier.init(held, count=1)
    show_barriers()
    mbarrier.expect(held, 4 * M * D * 2)
    for i in gl.static_range(2):
        load_tile(k_d, [batch, group, first + i * M, 0], held, k_s.index(i))
        load_tile(v_d, [batch, group, first + i * M, 0], held, v_s.index(i))
    gl.warp_specialize([
        (_key_group, (k_s, v_s, held, q_s, qt_s, do_s, base_s, delta_s, full, empty, bound_ptr, amax_q_ptr,
                      amax_k_ptr, amax_ptr, key_ptr, dk_ptr, dv_ptr, head, first, skipped, steps, keys, dk_t, dv_t,
                      FACTORS, Q, ADD, 0, STAGES, M, C, D, W)),
        (_key_group, (k_s, v_s, held, q_s, qt_s, do_s, base_s, delta_s, full, empty, bound_ptr, amax_q_ptr,
                      amax_k_ptr, amax_ptr, key_ptr, dk_ptr, dv_ptr, head, first, skipped, steps, keys, dk_t, dv_t,
                      FACTORS, Q, ADD, 1, STAGES, M, C, D, W)),
        (_key_loads, (q_d, qt_d, do_d, numbers_d, q_s, qt_s, do_s, base_s, delta_s, full, empty, batch, inner, head,
                      head * padded, count, skipped, steps, STAGES, C, D)),
    ], [W, 1], [REGISTERS, 24])  # fmt: skip
