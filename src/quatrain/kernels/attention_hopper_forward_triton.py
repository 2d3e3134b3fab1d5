"""Attention's forward kernel for Hopper, in Gluon, and what it shares with those of the backward pass.

Warp-specialized: of nine warps one loads tiles by the tensor memory accelerator into a ring in shared memory, the
others are two groups of 64 rows each that read the same ring. Within a group the tensor cores compute the scores of the
next step while the softmax of this one is evaluated. Causal, as many queries as keys, head size 128.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc,attr-defined,no-any-return"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quatrain.kernels.attention_block_triton import LN2, LOG2E, score_factor

# Versions of Triton differ in these names.
all_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.constexpr_function
def sums(columns, warps):
    """Layout of an accumulator with so many columns, rows divided among warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.jit
def begin_barriers(bars, COUNT: gl.constexpr, STAGES: gl.constexpr):
    """Barriers of a ring that COUNT arrivals complete."""
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=COUNT)


@gluon.jit
def show_barriers():
    """Make new barriers known to the copies and to every thread."""
    fence_async_shared()
    all_threads()


@gluon.jit
def store_rows(ptr, tile, first, limit, stride, M: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """Rows first to limit of a head, tile [M, D] rounded to the pointer's dtype."""
    row = (first + gl.arange(0, M, layout=gl.SliceLayout(1, L))).expand_dims(1)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L)).expand_dims(0)
    gl.store(ptr + row.to(gl.int64) * stride + column, tile.to(ptr.dtype.element_ty), mask=(row < limit) & (column < D))


@gluon.jit
def _softmax_step(s, top, factor, n, first, keys, MASKED: gl.constexpr, M: gl.constexpr, C: gl.constexpr,
                  SL: gl.constexpr):  # fmt: skip
    """(P, the new maximum, what earlier sums are multiplied by) of scores [M, C]."""
    if MASKED:
        query = (first + gl.arange(0, M, layout=gl.SliceLayout(1, SL))).expand_dims(1)
        key = n * C + gl.arange(0, C, layout=gl.SliceLayout(0, SL)).expand_dims(0)
        inside = (query >= key) & (key < keys)
        s = gl.where(inside, s, float("-inf"))
    raised = gl.maximum(top, gl.max(s, axis=1) * factor)
    base = gl.where(raised == float("-inf"), 0.0, raised)
    p = gl.exp2(gl.fma(s, factor, -base.expand_dims(1)))
    if MASKED:
        p = gl.where(inside, p, 0.0)  # a factor of 0 makes NaN of -inf
    return p, raised, gl.exp2(top - base)


@gluon.jit
def _steps(p, acc, top, total, q, k_s, v_s, full, other, empty, factor, first, begin, end, keys, MASKED: gl.constexpr,
           STAGES: gl.constexpr, M: gl.constexpr, C: gl.constexpr, D: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """Steps begin to end: P of the step comes in, that of the following one (with MASKED masked) goes out.

    All products are waited for before the back edge: with any under way over it ptxas runs wgmma one by one.
    """
    SL: gl.constexpr = sums(C, W)
    DL: gl.constexpr = sums(D, W)
    zeros = gl.zeros([M, C], gl.float32, SL)
    for n in range(begin, end):
        following = n + 1
        at, now = following % STAGES, n % STAGES
        mbarrier.wait(full.index(at), (following // STAGES) & 1)
        s = warpgroup_mma(q, k_s.index(at).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
        mbarrier.wait(other.index(now), (n // STAGES) & 1)
        acc = warpgroup_mma(p, v_s.index(now).reshape([C, D]), acc, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=[s])
        wide, top, keep = _softmax_step(s, top, factor, following, first, keys, MASKED, M, C, SL)
        total = total * keep + gl.sum(wide, axis=1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(empty.index(now), count=1)
        p = gl.convert_layout(wide.to(gl.bfloat16), gl.DotOperandLayout(0, DL, 2))
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, DL)).expand_dims(1)
    return p, acc, top, total


@gluon.jit
def _group(q_s, held, k_s, v_s, full, other, empty, amax_q_ptr, amax_k_ptr, out_ptr, lse_ptr, first, steps, queries,
           stride, FACTORS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr, C: gl.constexpr,
           D: gl.constexpr, W: gl.constexpr):  # fmt: skip
    """One group: O and L of M queries."""
    SL: gl.constexpr = sums(C, W)
    DL: gl.constexpr = sums(D, W)
    first += PART * M
    factor = score_factor(amax_q_ptr, amax_k_ptr, FACTORS) * LOG2E
    mbarrier.wait(held, 0)
    q = q_s.index(PART).reshape([M, D]).load(gl.DotOperandLayout(0, SL, 2))
    whole = gl.minimum(first, queries) // C
    end = gl.minimum((gl.minimum(first + M, queries) + C - 1) // C, steps)
    mbarrier.wait(full.index(0), 0)
    zeros = gl.zeros([M, C], gl.float32, SL)
    acc = gl.zeros([M, D], gl.float32, DL)
    s = warpgroup_mma(q, k_s.index(0).reshape([C, D]).permute([1, 0]), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
    exact, top, keep = _softmax_step(s, top, factor, 0, first, queries, True, M, C, SL)
    total = gl.sum(exact, axis=1)
    p = gl.convert_layout(exact.to(gl.bfloat16), gl.DotOperandLayout(0, DL, 2))
    turn = gl.maximum(whole - 1, 0)
    p, acc, top, total = _steps(p, acc, top, total, q, k_s, v_s, full, other, empty, factor, first, 0, turn, queries,
                                False, STAGES, M, C, D, W)  # fmt: skip
    p, acc, top, total = _steps(p, acc, top, total, q, k_s, v_s, full, other, empty, factor, first, turn, end - 1,
                                queries, True, STAGES, M, C, D, W)  # fmt: skip
    last = (end - 1) % STAGES
    mbarrier.wait(other.index(last), ((end - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_s.index(last).reshape([C, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    some = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(some)) * LN2)
    row = first + gl.arange(0, M, layout=gl.SliceLayout(1, SL))
    gl.store(lse_ptr + row, lse, mask=row < queries)
    out = acc / gl.convert_layout(some, gl.SliceLayout(1, DL)).expand_dims(1)
    store_rows(out_ptr, out, first, queries, stride, M, D, DL)


@gluon.jit
def _loads(k_d, v_d, k_s, v_s, full, other, empty, batch, group, steps, STAGES: gl.constexpr, C: gl.constexpr,
           D: gl.constexpr):  # fmt: skip
    """The loading warp: K and V of every step, each with a barrier of its own, as the ring is read."""
    for n in range(0, steps):
        s = n % STAGES
        mbarrier.wait(empty.index(s), ((n // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), C * D * 2)
        load_tile(k_d, [batch, group, n * C, 0], full.index(s), k_s.index(s))
        mbarrier.expect(other.index(s), C * D * 2)
        load_tile(v_d, [batch, group, n * C, 0], other.index(s), v_s.index(s))


@gluon.jit
def hopper_forward_kernel(
    q_d, k_d, v_d, amax_q_ptr, amax_k_ptr, out_ptr, lse_ptr, heads, groups, queries, o_b, o_h, o_t,
    FACTORS: gl.constexpr, STAGES: gl.constexpr, M: gl.constexpr, C: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """O and L of 2 M queries of one head, by two groups of W warps; C keys are a step.

    q_d, k_d, v_d: descriptors of BF16 [b, heads or groups, tokens, D]. FACTORS: as `score_factor` takes them.
    """
    head = gl.program_id(1)
    batch, inner = head // heads, head % heads
    group = inner // (heads // groups)
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * 2 * M  # a causal tile's work grows with its place
    steps = (gl.minimum(first + 2 * M, queries) + C - 1) // C
    out_ptr += batch.to(gl.int64) * o_b + inner.to(gl.int64) * o_h
    lse_ptr += head.to(gl.int64) * queries
    q_s = gl.allocate_shared_memory(q_d.dtype, [2, 1, 1, M, D], q_d.layout)
    k_s = gl.allocate_shared_memory(q_d.dtype, [STAGES, 1, 1, C, D], k_d.layout)
    v_s = gl.allocate_shared_memory(q_d.dtype, [STAGES, 1, 1, C, D], v_d.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    other = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    held = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    begin_barriers(full, 1, STAGES)
    begin_barriers(other, 1, STAGES)
    begin_barriers(empty, 2, STAGES)
    mbarrier.init(held, count=1)
    show_barriers()
    mbarrier.expect(held, 2 * M * D * 2)
    for i in gl.static_range(2):
        load_tile(q_d, [batch, inner, first + i * M, 0], held, q_s.index(i))
    gl.warp_specialize([
        (_group, (q_s, held, k_s, v_s, full, other, empty, amax_q_ptr, amax_k_ptr, out_ptr, lse_ptr, first, steps,
                  queries, o_t, FACTORS, 0, STAGES, M, C, D, W)),
        (_group, (q_s, held, k_s, v_s, full, other, empty, amax_q_ptr, amax_k_ptr, out_ptr, lse_ptr, first, steps,
                  queries, o_t, FACTORS, 1, STAGES, M, C, D, W)),
        (_loads, (k_d, v_d, k_s, v_s, full, other, empty, batch, group, steps, STAGES, C, D)),
    ], [W, 1], [REGISTERS, 24])  # fmt: skip
