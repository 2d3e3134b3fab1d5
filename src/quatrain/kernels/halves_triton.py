"""Pairs of half-precision numbers in one word: two sums, products or minima for each instruction.

A block of sixteen is a tuple of eight words: word 4 h + k holds elements 8 h + k (low) and 8 h + k + 4 (high), as the
nibbles k and k + 4 of a word of codes lie. In the interpreter, where `ARCH` is 0, each number is handled by itself.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _halves(word):
    """The two numbers of a word as fp32; for the interpreter."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, ((word >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high):
    """A word of two fp32 numbers, each rounded to half precision; for the interpreter."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pack_halves(low, high, ARCH: tl.constexpr):
    """Two fp32 numbers, rounded to half precision, in one word."""
    if ARCH == 0:
        return _word(low, high)
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def unpack_halves(word, ARCH: tl.constexpr):
    """The two numbers of a word as fp32."""
    if ARCH == 0:
        low, high = _halves(word)
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=f,=f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return low, high


@triton.jit
def upper_pair(a, b, ARCH: tl.constexpr):
    """The upper halves of two words as one: a's below, b's above."""
    if ARCH == 0:
        return ((a >> 16) & 0xFFFF) | (b & -65536)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def unpack_block(words, ARCH: tl.constexpr):
    """The sixteen numbers of a block, in order, as fp32."""
    xs = ()
    for h in tl.static_range(2):
        a0, b0 = unpack_halves(words[4 * h], ARCH)
        a1, b1 = unpack_halves(words[4 * h + 1], ARCH)
        a2, b2 = unpack_halves(words[4 * h + 2], ARCH)
        a3, b3 = unpack_halves(words[4 * h + 3], ARCH)
        xs = xs + (a0, a1, a2, a3, b0, b1, b2, b3)
    return xs


@triton.jit
def add_halves(a, b, ARCH: tl.constexpr):
    """Sums of the two pairs, each rounded."""
    if ARCH == 0:
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        return _word(a0 + b0, a1 + b1)
    return tl.inline_asm_elementwise("add.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def sub_halves(a, b, ARCH: tl.constexpr):
    """Differences of the two pairs, each rounded."""
    if ARCH == 0:
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        return _word(a0 - b0, a1 - b1)
    return tl.inline_asm_elementwise("sub.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def mul_halves(a, b, ARCH: tl.constexpr):
    """Products of the two pairs, each rounded."""
    if ARCH == 0:
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        return _word(a0 * b0, a1 * b1)
    return tl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def min_halves(a, b, ARCH: tl.constexpr):
    """Minima of the two pairs."""
    if ARCH == 0:
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        return _word(tl.minimum(a0, b0), tl.minimum(a1, b1))
    return tl.inline_asm_elementwise("min.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def max_halves(a, b, ARCH: tl.constexpr):
    """Maxima of the two pairs; a number that is NaN loses."""
    if ARCH == 0:
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        return _word(tl.maximum(a0, b0), tl.maximum(a1, b1))
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _across(word, ARCH: tl.constexpr):
    """(low + high, low - high)."""
    if ARCH == 0:
        low, high = _halves(word)
        return _word(low + high, low - high)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 l, h; .reg .b32 a, b;
        mov.b32 {l, h}, $1;
        mov.b32 a, {l, l};
        mov.b32 b, {h, h};
        fma.rn.f16x2 $0, b, $2, a;
        }""",
        "=r,r,r", [word, tl.full(word.shape, -1140835328, tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def line_halves(
    x, FACTOR: tl.constexpr, ADD: tl.constexpr, FACTOR_BITS: tl.constexpr, ADD_BITS: tl.constexpr, ARCH: tl.constexpr
):
    """FACTOR * x + ADD, rounded once (exact in fp32, or far from where it matters); BITS: in half precision."""
    if ARCH == 0:
        low, high = _halves(x)
        return _word(low * FACTOR + ADD, high * FACTOR + ADD)
    factor, add = tl.full(x.shape, FACTOR_BITS * 65537, tl.int32), tl.full(x.shape, ADD_BITS * 65537, tl.int32)
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, factor, add], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _stage(words, STEP: tl.constexpr, ARCH: tl.constexpr):
    out = ()
    for i in tl.static_range(8):
        if (i // STEP) % 2 == 1:
            out = out + (sub_halves(words[i - STEP], words[i], ARCH),)
        else:
            out = out + (add_halves(words[i], words[i + STEP], ARCH),)
    return out


@triton.jit
def butterfly(words, ARCH: tl.constexpr):
    """Hadamard sums of a block, h = 1, 2, 4, 8, each rounded to half precision."""
    words = _stage(_stage(words, 1, ARCH), 2, ARCH)
    out = ()
    for i in tl.static_range(8):
        out = out + (_across(words[i], ARCH),)
    return _stage(out, 4, ARCH)


@triton.jit
def block_of(xs, ARCH: tl.constexpr):
    """Words of sixteen fp32 elements, rounded to half precision."""
    out = ()
    for h in tl.static_range(2):
        for k in tl.static_range(4):
            out = out + (pack_halves(xs[8 * h + k], xs[8 * h + k + 4], ARCH),)
    return out
