"""NVFP4 moments in Triton: the arithmetic of `moments.py`, a thread owning whole blocks."""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import struct

import triton
import triton.language as tl

from quatrain.kernels.dither import LINES
from quatrain.kernels.halves_triton import (
    butterfly,
    line_halves,
    max_halves,
    min_halves,
    mul_halves,
    pack_halves,
    unpack_block,
    unpack_halves,
)
from quatrain.kernels.moments import FINE, MAGIC, NEAREST_TABLE, ONE, SPREAD, STOCHASTIC_TABLE
from quatrain.kernels.triton_math import mix32

ABSOLUTE = tl.constexpr(0x7FFF7FFF)
HIGH_BITS = tl.constexpr(0x7F800000)
ONE_BITS, MAGIC_NUMBER = tl.constexpr(ONE), tl.constexpr(MAGIC)
SHIFT = tl.constexpr(0x4B400000 - (ONE >> 11))  # from bits of a number near 1 to those of MAGIC plus parts of an octave
PART, OFFSET = tl.constexpr(1.0 / FINE), tl.constexpr(-MAGIC / FINE)
CONSTANT_NIBBLES = tl.constexpr((0x64006400 * 0x1111) % (1 << 32) - (1 << 32))  # what 1024 + code leaves beside codes


def _table_words(table: tuple[int, ...]) -> tuple[int, ...]:
    """Entries 0 to 7 and 8 to 15 as four int32 words for byte permutation.

    A nibble of 8 or more repeats the sign of the byte that its lower bits name. So every element gets, besides its
    entry from one half, -1 where the entry at the same place of the other half is negative: entries allow for that.
    """
    halves: tuple[list[int], list[int]] = ([], [])
    for low, high in zip(table[:8], table[8:], strict=True):
        candidates = ((low + b, high + a, a, b) for a in (0, 1) for b in (0, 1))
        first, second = next((x, y) for x, y, a, b in candidates if (x < 0) == bool(a) and (y < 0) == bool(b))
        halves[0].append(first)
        halves[1].append(second)
    data = bytes(value & 0xFF for half in halves for value in half)
    return tuple(int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, 16, 4))


def _half_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<e", value), "little")


NEAREST, NEAREST_WORDS = tl.constexpr(NEAREST_TABLE), tl.constexpr(_table_words(NEAREST_TABLE))
STOCHASTIC, STOCHASTIC_WORDS = tl.constexpr(STOCHASTIC_TABLE), tl.constexpr(_table_words(STOCHASTIC_TABLE))
SLOPES, ENDS = tl.constexpr(tuple(slope for slope, _ in LINES)), tl.constexpr(tuple(8.0 + end for _, end in LINES))
SLOPE_BITS, END_BITS = (tl.constexpr(tuple(_half_bits(value) for value in values.value)) for values in (SLOPES, ENDS))
BENDS = tl.constexpr(len(LINES))
MULTIPLIERS = tl.constexpr(tuple(c - (1 << 32) if c >= 1 << 31 else c for c in SPREAD))


@triton.jit
def _nearest_code(x, ARCH: tl.constexpr):
    """Scaled magnitudes to 1024 + code: the smallest of three lines over E2M1's values, ties to the even code."""
    below = min_halves(
        line_halves(x, 2.0, 1024.0, 0x4000, 0x6400, ARCH), line_halves(x, 1.0, 1026.0, 0x3C00, 0x6402, ARCH), ARCH
    )
    return min_halves(below, line_halves(x, 0.5, 1028.0, 0x3800, 0x6404, ARCH), ARCH)


@triton.jit
def _drawn_code(x, draw, BENT: tl.constexpr, ARCH: tl.constexpr):
    """The same in units of 2**-7; seven random bits carry where the fraction is larger. The code alone."""
    below = min_halves(
        line_halves(x, 2.0, 8.0, 0x4000, 0x4800, ARCH), line_halves(x, 1.0, 10.0, 0x3C00, 0x4900, ARCH), ARCH
    )
    place = min_halves(below, line_halves(x, 0.5, 12.0, 0x3800, 0x4A00, ARCH), ARCH)
    if BENT:
        for i in tl.static_range(BENDS):
            place = min_halves(place, line_halves(x, SLOPES[i], ENDS[i], SLOPE_BITS[i], END_BITS[i], ARCH), ARCH)
    return ((place + (draw & 0x007F007F)) >> 7) & 0x00070007


@triton.jit
def code_block(low, high):
    """E2M1 values times 2**-14 of two words of codes: their bits are subnormal and small half-precision numbers."""
    out = ()
    for h in tl.static_range(2):
        word = high if h == 1 else low
        for k in tl.static_range(4):
            magnitude = (word >> 3) if k == 3 else (word << (9 - 4 * k))
            sign = word << (12 - 4 * k)
            out = out + ((magnitude & 0x0E000E00) | (sign & -2147450880),)
    return out


@triton.jit
def decoded(low, high, ARCH: tl.constexpr):
    """The inverse transform of two words of codes, without signs and factors: sixteen fp32 in units of 2**-15.

    They are sums of sixteen integers of at most 12, exact at every step.
    """
    return unpack_block(butterfly(code_block(low, high), ARCH), ARCH)


@triton.jit
def reciprocal(x, ARCH: tl.constexpr):
    """1 / x for x from 2**-100 to 2**126: a Newton step rounds the approximate reciprocal correctly."""
    if ARCH == 0:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 r, e;
        rcp.approx.ftz.f32 r, $1;
        fma.rn.f32 e, $1, r, 0fBF800000;
        neg.f32 e, e;
        fma.rn.f32 $0, r, e, r;
        }""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def square_root(x, ARCH: tl.constexpr):
    """sqrt(x) for x of at least 2**-100, correctly rounded; NaN for infinity."""
    if ARCH == 0:
        return tl.sqrt_rn(x)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 y, s, h, r;
        rsqrt.approx.ftz.f32 y, $1;
        mul.rn.f32 s, $1, y;
        mul.rn.f32 h, y, 0f3F000000;
        neg.f32 r, s;
        fma.rn.f32 r, r, s, $1;
        fma.rn.f32 $0, r, h, s;
        }""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _exchange(x, OFFSET: tl.constexpr, ARCH: tl.constexpr):
    """x of the lane whose number differs by OFFSET; an element for each thread."""
    if ARCH == 0:
        return tl.gather(x, tl.arange(0, x.shape[0]) ^ OFFSET, 0)
    return tl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=f,f,r", [x, tl.full(x.shape, OFFSET, tl.int32)], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def tile_sum(x, PER_TILE: tl.constexpr, ARCH: tl.constexpr):
    """Sums over the blocks of each tile, in every one of them, pairwise."""
    if PER_TILE >= 16:
        x = x + _exchange(x, 8, ARCH)
    if PER_TILE >= 8:
        x = x + _exchange(x, 4, ARCH)
    if PER_TILE >= 4:
        x = x + _exchange(x, 2, ARCH)
    if PER_TILE >= 2:
        x = x + _exchange(x, 1, ARCH)
    return x


@triton.jit
def power_of(x, EXPONENT: tl.constexpr):
    """2**EXPONENT times the power of two at or below a positive number."""
    return ((x.to(tl.int32, bitcast=True) & HIGH_BITS) + EXPONENT * 8388608).to(tl.float32, bitcast=True)


@triton.jit
def power_near(x):
    """`moments.power_near`."""
    return ((x.to(tl.int32, bitcast=True) + 0x400000) & HIGH_BITS).to(tl.float32, bitcast=True)


@triton.jit
def logarithm(x, low, high):
    """`moments.octaves` of a number whose bits are kept between two."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True), low), high)
    shifted = ((bits >> 11) + SHIFT).to(tl.float32, bitcast=True)
    return tl.fma(shifted, PART, OFFSET)  # exact


@triton.jit
def ratio_of(y, unit):
    """`moments.ratios` of y times a unit in parts of an octave, whose product is exact."""
    return (tl.fma(y, unit, MAGIC_NUMBER).to(tl.int32, bitcast=True) * 2048 + ONE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def nearest_power(x, EXPONENT: tl.constexpr):
    """2**EXPONENT over the power of two at or below a positive number."""
    TOP: tl.constexpr = ((254 + EXPONENT) * 8388608 + 2147483648) % 4294967296 - 2147483648  # as a signed word
    return (TOP - (x.to(tl.int32, bitcast=True) & HIGH_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def read_units(byte, amax):
    """Value of code 1.0 from the scale's byte (int32) and the row's amax."""
    code = byte & 0x7F
    row = (amax.to(tl.int32, bitcast=True) & HIGH_BITS) - 11 * 8388608
    exponent = code - (byte >> 7) * 112 - 56
    unit = ((exponent << 20) + row).to(tl.float32, bitcast=True)
    unit = tl.where(code == 0, 0.0, unit)
    return tl.where(code == 127, float("nan"), unit)


@triton.jit
def row_power(largest):
    """Bits of the row's scale from those of its largest unit, and its amax."""
    row = tl.where(largest == 0, 0, (largest & HIGH_BITS) - 7 * 8388608)
    return row, row.to(tl.float32, bitcast=True) * 2688.0


@triton.jit
def scale_byte(short, row):
    """The scale's byte from the upper 12 bits of a unit and the bits of its row's scale."""
    code = short - (row >> 20) + 56
    byte = tl.where(code >= 8, code, tl.where(code >= -104, code + 240, 0))
    byte = tl.where(short == 0, 0, byte)
    return tl.where(short >= 0x7F8, 127, byte).to(tl.uint8)


@triton.jit
def _four_bits(x, UP: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True)
    carry = 0xFFFFF if UP else 0x7FFFF + ((bits >> 20) & 1)
    return ((bits + carry) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def _nibbles(w0, w1, w2, w3):
    """Eight nibbles of four words that hold 1024 + n twice, as half-precision bits."""
    return ((w3 * 16 + w2) * 16 + w1) * 16 + w0 - CONSTANT_NIBBLES


@triton.jit
def _looked_up(low, high, DRAWN: tl.constexpr, ARCH: tl.constexpr):
    """Sum of the table's entries for sixteen indices, the nibbles of two words."""
    TABLE: tl.constexpr = STOCHASTIC if DRAWN else NEAREST
    WORDS: tl.constexpr = STOCHASTIC_WORDS if DRAWN else NEAREST_WORDS
    if ARCH == 0:
        total = tl.zeros(low.shape, tl.int32)
        for i in tl.static_range(16):
            index = ((high if i >= 8 else low) >> (4 * (i % 8))) & 0xF
            for j in tl.static_range(16):
                total += tl.where(index == j, TABLE[j], 0)
        return total
    shape: tl.constexpr = low.shape
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, e, f, g, h, t;
        xor.b32 c, $1, 0x88888888;
        xor.b32 d, $2, 0x88888888;
        shr.u32 e, $1, 16;
        shr.u32 f, $2, 16;
        shr.u32 g, c, 16;
        shr.u32 h, d, 16;
        prmt.b32 a, $3, $4, $1;
        prmt.b32 b, $5, $6, c;
        dp4a.s32.s32 t, a, 0x01010101, 0;
        dp4a.s32.s32 t, b, 0x01010101, t;
        prmt.b32 a, $3, $4, $2;
        prmt.b32 b, $5, $6, d;
        dp4a.s32.s32 t, a, 0x01010101, t;
        dp4a.s32.s32 t, b, 0x01010101, t;
        prmt.b32 a, $3, $4, e;
        prmt.b32 b, $5, $6, g;
        dp4a.s32.s32 t, a, 0x01010101, t;
        dp4a.s32.s32 t, b, 0x01010101, t;
        prmt.b32 a, $3, $4, f;
        prmt.b32 b, $5, $6, h;
        dp4a.s32.s32 t, a, 0x01010101, t;
        dp4a.s32.s32 $0, b, 0x01010101, t;
        }""",
        "=r,r,r,r,r,r,r",
        [low, high, tl.full(shape, WORDS[0], tl.int32), tl.full(shape, WORDS[1], tl.int32),
         tl.full(shape, WORDS[2], tl.int32), tl.full(shape, WORDS[3], tl.int32)],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def encode(words, draws, DRAWN: tl.constexpr, BENT: tl.constexpr, ARCH: tl.constexpr):
    """Rotated blocks to two words of codes, the value of code 1.0, and whether all was finite.

    draws: eight words of two draws each (their low seven bits), where DRAWN; scales are rounded up then. BENT: places
    of `dither.LINES`.
    """
    magnitudes = ()
    for i in tl.static_range(8):
        magnitudes = magnitudes + (words[i] & ABSOLUTE,)
    largest = magnitudes[0]
    for i in tl.static_range(1, 8):
        largest = max_halves(largest, magnitudes[i], ARCH)
    low, high = unpack_halves(largest, ARCH)
    top = tl.maximum(low, high)
    finite = (low <= 65504.0) & (high <= 65504.0)
    alive = finite & (top >= 0.0001220703125)
    top = tl.where(alive, top, 1.0)
    to6, to4 = _four_bits(top * 0.1666666716337204, DRAWN), _four_bits(top * 0.25, DRAWN)
    inverse = reciprocal(to6, ARCH)
    inverse = pack_halves(inverse, inverse, ARCH)
    index = ()
    for i in tl.static_range(8):
        index = index + (line_halves(mul_halves(magnitudes[i], inverse, ARCH), 2.0, 1024.0, 0x4000, 0x6400, ARCH),)
    four = _looked_up(
        _nibbles(index[0], index[1], index[2], index[3]), _nibbles(index[4], index[5], index[6], index[7]),
        DRAWN, ARCH,
    ) < 0  # fmt: skip
    unit = tl.where(four, to4, to6)
    inverse = reciprocal(unit, ARCH)
    inverse = pack_halves(inverse, inverse, ARCH)
    codes = ()
    for i in tl.static_range(8):
        x = mul_halves(magnitudes[i], inverse, ARCH)
        sign = (words[i] >> 12) & 0x00080008
        if DRAWN:
            code = _drawn_code(x, draws[i], BENT, ARCH)
        else:
            code = _nearest_code(x, ARCH)
        codes = codes + (code | sign,)
    first, second = _joined(codes[0], codes[1], codes[2], codes[3]), _joined(codes[4], codes[5], codes[6], codes[7])
    if not DRAWN:
        first, second = first - CONSTANT_NIBBLES, second - CONSTANT_NIBBLES
    return tl.where(alive, first, 0), tl.where(alive, second, 0), tl.where(alive, unit, 0.0), finite


@triton.jit
def _joined(w0, w1, w2, w3):
    return ((w3 * 16 + w2) * 16 + w1) * 16 + w0


@triton.jit
def row_words(first, second, tensor_id, row):
    """Two words of each row of a tensor from those of seed and step."""
    first = mix32(first ^ tensor_id)
    second = second + tensor_id * -2048144789  # 0x85EBCA6B
    return mix32(first ^ row), mix32(second + row * -1640531527)


@triton.jit
def spread(base):
    """Eight words of two draws of 16 bits, made of a block's hash."""
    words = ()
    for j in tl.static_range(8):
        word = base * MULTIPLIERS[j]
        words = words + (word ^ ((word >> 16) & 0xFFFF),)
    return words


@triton.jit
def again(word, ARCH: tl.constexpr):
    """The same word, unknown to the compiler: what is made of it is made anew instead of kept in registers."""
    if ARCH == 0:
        return word
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=False, pack=1)
