"""Device functions on tiles [rows, runs] of a tensor, a run being 8 or 32 consecutive elements of a row.

As many tensors [rows, runs] as a run has elements hold a tile, so a thread owns whole runs. Only block maxima, sums and
the later stages of a transform cross threads, as reductions over two or more runs.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc,annotation-unchecked"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.triton_math import (
    e2m1_code_nearest,
    e2m1_code_stochastic,
    e4m3_code,
    half_word,
    pair_hash,
    round_pair,
    round_to,
    scaled_eighth,
    third_bytes,
    widen,
    without_eights,
)

# Q, the constants of a spec: 0 format, 1 block rows, 2 block columns, 3 scale rule, 4 error, 5 E4M3 scales round up,
# 6 target, 7 1 / target, 8 constant, 9 stochastic, 10 size of the transform or 0, 11 its signs as a bit mask (1 is -1),
# 12 1 / sqrt(size), 13 elements of a run.
# LOAD: "rows" where elements of a row are neighbours in memory, "columns" for any other strides.
# MASK: 0 whole tiles, 1 whole octets, 2 elements.


@triton.jit
def _split4(t):
    """The four [R, W] of [R, W, 4]."""
    even, odd = tl.split(tl.reshape(t, [t.shape[0], t.shape[1], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return (a, b, c, d)


@triton.jit
def _split8(t):
    even, odd = tl.split(tl.reshape(t, [t.shape[0], t.shape[1], 4, 2]))
    a, c, e, g = _split4(even)
    b, d, f, h = _split4(odd)
    return (a, b, c, d, e, f, g, h)


@triton.jit
def _load_masked(pointers, mask, MASK: tl.constexpr):
    return tl.load(pointers, mask=mask, other=0.0) if MASK else tl.load(pointers)


@triton.jit
def _load_rows(x_ptr, row, column, rows, columns, stride, MASK: tl.constexpr, COUNT: tl.constexpr):
    """[R, W, COUNT] elements from `column` on."""
    each = column[:, :, None] + tl.arange(0, COUNT)[None, None, :]
    place = (row.to(tl.int64) * stride)[:, :, None] + each
    if MASK == 2:
        x = _load_masked(x_ptr + place, (row < rows)[:, :, None] & (each < columns), MASK)
    else:
        x = _load_masked(x_ptr + place, ((row < rows) & (column < columns))[:, :, None], MASK)
    return x


@triton.jit
def load(
    x_ptr, row, run, rows, columns, stride, column_stride, DTYPE: tl.constexpr, Q: tl.constexpr, LOAD: tl.constexpr,
    MASK: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Runs of x as a tuple of fp32 [R, W], zero outside, rounded to DTYPE; 16 bytes a load along rows."""
    LENGTH: tl.constexpr = Q[13]
    raw = ()
    if LOAD == "columns":
        for j in tl.static_range(LENGTH):
            column = run * Q[13] + j
            place = row.to(tl.int64) * stride + column.to(tl.int64) * column_stride
            raw = raw + (_load_masked(x_ptr + place, (row < rows) & (column < columns), MASK),)
    elif x_ptr.dtype.element_ty == tl.float32:
        for i in tl.static_range(0, LENGTH, 4):
            raw = raw + _split4(_load_rows(x_ptr, row, run * Q[13] + i, rows, columns, stride, MASK, 4))
    else:
        for i in tl.static_range(0, LENGTH, 8):
            raw = raw + _split8(_load_rows(x_ptr, row, run * Q[13] + i, rows, columns, stride, MASK, 8))
    xs = ()
    for j in tl.static_range(LENGTH):
        xs = xs + (widen(raw[j], ARCH),)
    return xs if x_ptr.dtype.element_ty == DTYPE else _rounded(xs, DTYPE, ARCH)


@triton.jit
def _rounded(xs, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """Each element rounded to DTYPE; two at once where an instruction does."""
    COUNT: tl.constexpr = len(xs)
    ys = ()
    if DTYPE == tl.bfloat16:
        for i in tl.static_range(0, COUNT, 2):
            word = round_pair(xs[i], xs[i + 1], ARCH)
            ys = ys + ((word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True))
    else:
        for i in tl.static_range(COUNT):
            ys = ys + (round_to(xs[i], DTYPE, ARCH),)
    return ys


@triton.jit
def signs_of(run, Q: tl.constexpr):
    """Signs of the transform, (1 or -1) for each element of a run; one number for all runs where they are alike."""
    LENGTH: tl.constexpr = Q[13]
    RUNS: tl.constexpr = Q[10] // Q[13]  # of a transform
    signs = ()
    for i in tl.static_range(LENGTH):
        if Q[10] <= Q[13]:
            sign = 1.0 - 2.0 * ((Q[11] >> i) & 1)
        else:
            sign = tl.zeros(run.shape, tl.float32) + (1.0 - 2.0 * ((Q[11] >> i) & 1))
            for j in tl.static_range(1, RUNS):
                here = run % (Q[10] // Q[13]) == j
                sign = tl.where(here, 1.0 - 2.0 * ((Q[11] >> (Q[13] * j + i)) & 1), sign)
        signs = signs + (sign,)
    return signs


@triton.jit
def _stage(xs, STAGE: tl.constexpr):
    """Sums and differences of elements 2**STAGE apart in a run."""
    COUNT: tl.constexpr = len(xs)
    ys = ()
    for i in tl.static_range(COUNT):
        y = xs[i - (1 << STAGE)] - xs[i] if (i >> STAGE) & 1 else xs[i] + xs[i + (1 << STAGE)]
        ys = ys + (y,)
    return ys


@triton.jit
def _partner(x, G: tl.constexpr):
    """The element of the run G further on, or before: the exclusive or of both leaves the other's bits."""
    bits = x.to(tl.int32, bitcast=True)
    pairs = tl.reshape(bits, [x.shape[0], x.shape[1] // (2 * G), 2, G])
    other = tl.reshape(pairs ^ tl.xor_sum(pairs, axis=2, keep_dims=True), x.shape)
    return other.to(tl.float32, bitcast=True)


@triton.jit
def _stage_across(xs, run, G: tl.constexpr):
    """Sums and differences of runs G apart."""
    COUNT: tl.constexpr = len(xs)
    ys = ()
    sign = 1.0 - 2.0 * (run // G % 2).to(tl.float32)
    for i in tl.static_range(COUNT):
        ys = ys + (tl.fma(xs[i], tl.broadcast_to(sign, xs[i].shape), _partner(xs[i], G)),)
    return ys


@triton.jit
def butterfly(xs, run, signs, Q: tl.constexpr):
    """Hadamard transform without its factor: signs, then h = 1, 2, 4, ..."""
    COUNT: tl.constexpr = len(xs)
    ys = ()
    for i in tl.static_range(COUNT):
        ys = ys + (xs[i] * signs[i],)
    for i in tl.static_range(7):
        if 2 << i <= Q[10] and 2 << i <= Q[13]:
            ys = _stage(ys, i)
        elif 2 << i <= Q[10]:
            ys = _stage_across(ys, run, (1 << i) // Q[13])
    return ys


@triton.jit
def transformed(xs, run, signs, DTYPE: tl.constexpr, Q: tl.constexpr, ARCH: tl.constexpr):
    """Runs after the transform, each element rounded once to DTYPE."""
    COUNT: tl.constexpr = len(xs)
    if Q[10]:
        ys = butterfly(xs, run, signs, Q)
        xs = ()
        for i in tl.static_range(COUNT):
            xs = xs + (ys[i] * Q[12],)
        xs = _rounded(xs, DTYPE, ARCH)
    return xs


@triton.jit
def largest_of(xs):
    """Largest magnitude of each run, as the bits of an fp32 number: ordered alike, NaN above infinity."""
    COUNT: tl.constexpr = len(xs)
    largest = tl.abs(xs[0])
    for i in tl.static_range(1, COUNT):
        largest = tl.maximum(largest, tl.abs(xs[i]), propagate_nan=tl.PropagateNan.ALL)
    return largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_max(t, Q: tl.constexpr):
    """Largest int32 of each block."""
    wide: tl.constexpr = Q[2] // Q[13]
    if wide > 1:
        t = tl.max(tl.reshape(t, [t.shape[0], t.shape[1] // wide, wide]), axis=2)
    if Q[1] > 1:
        t = tl.max(tl.reshape(t, [t.shape[0] // Q[1], Q[1], t.shape[1]]), axis=1)
    return t


@triton.jit
def spread(t, Q: tl.constexpr):
    """A number of each block [R / b, W / b'], given to all of its runs."""
    if Q[1] > 1 or Q[2] > Q[13]:
        rows: tl.constexpr = t.shape[0]
        runs: tl.constexpr = t.shape[1]
        wide = tl.broadcast_to(t[:, None, :, None], [rows, Q[1], runs, Q[2] // Q[13]])
        t = tl.reshape(wide, [rows * Q[1], runs * (Q[2] // Q[13])])
    return t


@triton.jit
def block_sum(terms, Q: tl.constexpr):
    """Sum of each block of 1x16 or 16x16: 8 + 8, 4 + 4, 2 + 2, 1 + 1 of each row, then the rows alike; runs of 8."""
    sums = ()
    for i in tl.static_range(8):
        pair = tl.reshape(terms[i], [terms[i].shape[0], terms[i].shape[1] // 2, 2])
        sums = sums + (tl.sum(pair, axis=2),)  # of two numbers: it has no order
    total = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]))
    if Q[1] == 16:
        for i in tl.static_range(4):
            halves = tl.reshape(total, [total.shape[0] // (16 >> i), 2, 8 >> i, total.shape[1]])
            total = tl.reshape(tl.sum(halves, axis=1), [total.shape[0] // 2, total.shape[1]])
    return total


@triton.jit
def raise_maximum(out_ptr, bits, DTYPE: tl.constexpr, FACTOR: tl.constexpr, ARCH: tl.constexpr):
    """Raise a maximum kept as the bits of an fp32 number; rounding is monotonic, so the maximum is rounded alone."""
    largest = tl.max(tl.max(bits, axis=1), axis=0)
    value = round_to(largest.to(tl.float32, bitcast=True) * FACTOR, DTYPE, ARCH)
    largest = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(out_ptr, tl.where(largest > 0x7F800000, 0x7FC00000, largest), sem="relaxed")


@triton.jit
def _sign_nibbles(xs, FIRST: tl.constexpr, ARCH: tl.constexpr):
    """Signs of eight elements from FIRST on, as the top bits of eight nibbles."""
    if ARCH == 0:
        word = tl.zeros(xs[0].shape, tl.uint32)
        for j in tl.static_range(8):
            word = (word >> 4) | (xs[FIRST + j].to(tl.uint32, bitcast=True) & 0x80000000)
        word = word.to(tl.int32, bitcast=True)
    else:
        word = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, e, o;
            prmt.b32 a, $1, $3, 0xfbfb;
            prmt.b32 b, $5, $7, 0xfbfb;
            prmt.b32 e, a, b, 0x5410;
            prmt.b32 a, $2, $4, 0xfbfb;
            prmt.b32 b, $6, $8, 0xfbfb;
            prmt.b32 o, a, b, 0x5410;
            and.b32 e, e, 0x08080808;
            and.b32 o, o, 0x80808080;
            or.b32 $0, e, o;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [
                xs[FIRST], xs[FIRST + 1], xs[FIRST + 2], xs[FIRST + 3],
                xs[FIRST + 4], xs[FIRST + 5], xs[FIRST + 6], xs[FIRST + 7],
            ],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return word


@triton.jit
def e2m1_word(xs, m, start, middle, pair, FIRST: tl.constexpr, Q: tl.constexpr, ARCH: tl.constexpr):
    """Codes of eight elements from FIRST on, the first in the lowest nibble; 7 throughout where m is NaN.

    pair: the column pair of element FIRST.
    """
    # A power of two takes the eighth exactly. Another multiplier may be subnormal by then; the product may be too, but
    # only where the code is 0 and stays so.
    factor = m * 0.125 if Q[0] == "mxfp4" else tl.full(m.shape, 0.125, tl.float32)
    codes = ()
    for i in tl.static_range(4):
        if Q[9]:
            drawn = pair_hash(start, middle, pair + i)
        for j in tl.static_range(2):
            magnitude = tl.abs(xs[FIRST + 2 * i + j])
            eighth = scaled_eighth(magnitude if Q[0] == "mxfp4" else magnitude * m, factor, ARCH)
            if Q[9]:
                code = e2m1_code_stochastic(eighth, half_word(drawn, j == 1), ARCH)
            else:
                code = e2m1_code_nearest(eighth)
            codes = codes + (code,)
    if Q[9]:
        word = third_bytes(codes[0], codes[1], codes[2], codes[3], codes[4], codes[5], codes[6], codes[7], ARCH)
    else:
        word = tl.zeros(xs[0].shape, tl.int32)
        for j in tl.static_range(7, -1, -1):
            word = word * 16 + codes[j]
        word = word - 1061158912  # what the bits beside the codes add up to: 0x11111111 times them, modulo 2**32
    word = without_eights(word) | _sign_nibbles(xs, FIRST, ARCH)
    return tl.where(m != m, 0x77777777, word)


@triton.jit
def _e4m3_stochastic(magnitude, r):
    """Magnitudes in [0, 448] to a neighbour on the grid: up where (r + 1/2) / 65536 is below the fraction."""
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 121)
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    position = magnitude * ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    lower = tl.floor(position)
    up = r.to(tl.float32) + 0.5 < (position - lower) * 65536.0
    return (lower + up.to(tl.float32)) * step


@triton.jit
def e4m3_word(xs, m, start, middle, pair, FIRST: tl.constexpr, Q: tl.constexpr):
    """Codes of four elements from FIRST on, the first in the lowest byte; NaN is 0x7F."""
    word = tl.zeros(xs[0].shape, tl.int32)
    for i in tl.static_range(1, -1, -1):
        if Q[9]:
            drawn = pair_hash(start, middle, pair + i)
        for j in tl.static_range(1, -1, -1):
            value = xs[FIRST + 2 * i + j] * m
            magnitude = tl.minimum(tl.abs(value), 448.0)
            if Q[9]:
                magnitude = _e4m3_stochastic(magnitude, half_word(drawn, j == 1))
            code = e4m3_code(magnitude, False) | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)
            word = (word << 8) | tl.where(value != value, 0x7F, code)
    return word
