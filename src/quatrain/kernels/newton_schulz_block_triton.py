"""NVFP4 operands of Newton-Schulz in Triton: what a program does to a tile that it, or the one before, has written.

The tensor scale is a constant power of two, so decoded values are exact products and errors are exact differences:
both candidates of four-over-six are compared to the bit at less than the price of an estimate. A thread owns whole
blocks of sixteen; along columns two neighbouring ones, as BF16 numbers come in words of two.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.triton_math import (
    block_scale,
    divide_by_constant,
    e2m1_nearest,
    e2m1_pair_values,
    multiplier,
    tree_sum,
)

# Q, the constants of a spec: rule, error, scales round up, target, 1 / target, ... as `quantize_triton.constants`.
_ENCODE = tl.constexpr(1024.0)  # 1 / TENSOR_SCALE
_DECODE = tl.constexpr(0.0009765625)  # TENSOR_SCALE
_SIGNS = tl.constexpr(-2147450880)  # of two BF16 numbers in a word


@triton.jit
def _maximum(xs):
    """Of sixteen tensors."""
    for level in tl.static_range(4):
        larger = ()
        for i in tl.static_range(8 >> level):
            larger = larger + (tl.maximum(xs[i], xs[i + (8 >> level)]),)
        xs = larger
    return xs[0]


@triton.jit
def _candidate(xs, ideal, Q: tl.constexpr, ARCH: tl.constexpr):
    """E2M1 values of sixteen magnitudes (as fp32) and what decodes them, for one block scale before E4M3."""
    scale = block_scale(ideal, Q[2], ARCH)[1]
    m = multiplier(scale, _DECODE, True, ARCH)
    values = ()
    if ARCH >= 100:
        for i in tl.static_range(8):
            values = values + e2m1_pair_values(xs[2 * i] * m, xs[2 * i + 1] * m)
    else:
        for i in tl.static_range(16):
            values = values + (e2m1_nearest(tl.minimum(xs[i] * m, 6.0)),)
    return values, scale * _DECODE


@triton.jit
def _error(xs, values, step, Q: tl.constexpr):
    """Error of each block to the bit: a decoded value is exact, so its difference is rounded once."""
    terms = ()
    minus = step * -1.0
    for i in tl.static_range(16):
        difference = tl.fma(values[i], minus, xs[i])
        terms = terms + (difference * difference if Q[1] == 0 else tl.abs(difference),)
    return _maximum(terms) if Q[1] == 2 else tree_sum(terms)


@triton.jit
def decoded(xs, Q: tl.constexpr, ARCH: tl.constexpr):
    """Sixteen magnitudes of each block (fp32), quantized and decoded, exact in BF16; NaN where the largest is."""
    largest = _maximum(xs)
    if Q[0] == 0:
        ideal = largest * (_ENCODE * Q[4])
    else:
        ideal = divide_by_constant(largest, Q[3], Q[4]) * _ENCODE
    values, step = _candidate(xs, ideal, Q, ARCH)
    if Q[0] == 2:
        values4, step4 = _candidate(xs, ideal * 1.5, Q, ARCH)
        better = _error(xs, values4, step4, Q) < _error(xs, values, step, Q)
        chosen = ()
        for i in tl.static_range(16):
            chosen = chosen + (tl.where(better, values4[i], values[i]),)
        values = chosen
        step = tl.where(better, step4, step)
    step = tl.where(largest == largest, step, float("nan"))
    out = ()
    for i in tl.static_range(16):
        out = out + (values[i] * step,)
    return out


@triton.jit
def _low(word):
    """Magnitude of the first number of a word of two."""
    return ((word & 0x7FFF) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    """Magnitude of the second number of a word of two."""
    return (word & 0x7FFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _word(low, high, signs):
    """Two magnitudes (fp32, exact in BF16) with the signs of another word."""
    low, high = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -65536) | (signs & _SIGNS)


@triton.jit
def _pair(first, second):
    """The first numbers of two words in one, and the second ones."""
    return (first & 0xFFFF) | (second << 16), ((first >> 16) & 0xFFFF) | (second & -65536)


@triton.jit
def _load8(pointers):
    """Eight consecutive words of each place, as a tuple."""
    words = ()
    for i in tl.static_range(2):
        four = tl.load(pointers[:, None] + (tl.arange(0, 4)[None, :] + 4 * i))
        even, odd = tl.split(tl.reshape(four, [four.shape[0], 2, 2]))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        words = words + (w0, w1, w2, w3)
    return words


@triton.jit
def _store8(pointers, words):
    """Eight words to consecutive places."""
    for i in tl.static_range(2):
        even = tl.join(words[4 * i], words[4 * i + 2])
        four = tl.join(even, tl.join(words[4 * i + 1], words[4 * i + 3]))
        four = tl.reshape(four, [words[0].shape[0], 4])
        tl.store(pointers[:, None] + (tl.arange(0, 4)[None, :] + 4 * i), four)


@triton.jit
def rows_of_tile(
    x_ptr, out_ptr, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, Q: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """Quantize a tile along its rows.

    x_ptr, out_ptr: its first element, BF16, in two matrices of rows `stride` (even) apart; 4-byte aligned.
    LANES: blocks at once.
    """
    WIDTH: tl.constexpr = COLUMNS // 16
    lane = tl.arange(0, LANES)
    source = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    target = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words_apart = stride // 2
    for first in range(0, ROWS * WIDTH, LANES):
        block = first + lane
        place = (block // WIDTH) * words_apart + (block % WIDTH) * 8
        words = _load8(source + place)
        xs = ()
        for i in tl.static_range(8):
            xs = xs + (_low(words[i]), _high(words[i]))
        values = decoded(xs, Q, ARCH)
        out = ()
        for i in tl.static_range(8):
            out = out + (_word(values[2 * i], values[2 * i + 1], words[i]),)
        _store8(target + place, out)


@triton.jit
def columns_of_tile(
    x_ptr, out_ptr, stride, out_stride, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LANES: tl.constexpr, Q: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Quantize a tile along its columns, into a tile of the same layout or of the transpose.

    x_ptr, out_ptr: its first element, BF16, in two matrices of rows `stride` and `out_stride` (even) apart.
    LANES: pairs of blocks at once.
    """
    WIDTH: tl.constexpr = COLUMNS // 2
    lane = tl.arange(0, LANES)
    source = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    target = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words_apart, out_apart = stride // 2, out_stride // 2
    for first in range(0, (ROWS // 16) * WIDTH, LANES):
        group, pair = (first + lane) // WIDTH, (first + lane) % WIDTH
        words = ()
        for i in tl.static_range(16):
            words = words + (tl.load(source + ((group * 16 + i) * words_apart + pair)),)
        xs = ()
        for i in tl.static_range(16):
            xs = xs + (_low(words[i]),)
        first_column = decoded(xs, Q, ARCH)
        xs = ()
        for i in tl.static_range(16):
            xs = xs + (_high(words[i]),)
        second_column = decoded(xs, Q, ARCH)
        out = ()
        for i in tl.static_range(16):
            out = out + (_word(first_column[i], second_column[i], words[i]),)
        if TRANSPOSED:
            upper = ()
            lower = ()
            for i in tl.static_range(8):
                a, b = _pair(out[2 * i], out[2 * i + 1])
                upper = upper + (a,)
                lower = lower + (b,)
            _store8(target + ((pair * 2) * out_apart + group * 8), upper)
            _store8(target + ((pair * 2 + 1) * out_apart + group * 8), lower)
        else:
            for i in tl.static_range(16):
                tl.store(target + ((group * 16 + i) * out_apart + pair), out[i])
