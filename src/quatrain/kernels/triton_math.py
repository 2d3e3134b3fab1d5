"""Device functions that every Triton twin is made of: rounding to E2M1 and E4M3, random bits, block scales.

Each gives the bits of the plain PyTorch reference. `ARCH` is 0 in Triton's interpreter (no inline assembly there, and
casts to small floats are wrong, so everything is plain arithmetic), else the compute capability times ten.
Kernels built on these must be launched with `enable_fp_fusion=False`: a contracted multiply-add rounds once less.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
EXPONENT = tl.constexpr(0x7F800000)
HALF_STEPS = tl.constexpr(6291456.0)  # 1.5 * 2**22: adding p times this rounds to multiples of p / 2, above and below 0
UNITS = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding this rounds to integers, left in the lowest bits


@triton.jit
def reciprocal(x, ARCH: tl.constexpr):
    """1 / x, correctly rounded, subnormals kept."""
    if ARCH == 0:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fma_up(a, b: tl.constexpr, c):
    """a * b + c rounded towards plus infinity."""
    return tl.inline_asm_elementwise(
        "fma.rp.f32 $0, $1, $2, $3;", "=f,f,f,f",
        [a, tl.full(a.shape, b, tl.float32), c],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _binade(magnitude):
    """The power of two at or below a magnitude in [0, 8), at least 1: E2M1's step there is half of it."""
    raised = tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True)
    return (raised & EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_nearest(magnitude):
    """Magnitudes in [0, 6] to the nearest E2M1 value, ties to the even code: one addition rounds at the right bit."""
    p = _binade(magnitude)
    return tl.fma(p, -HALF_STEPS, tl.fma(p, HALF_STEPS, magnitude))


@triton.jit
def e2m1_stochastic(magnitude, draw, ARCH: tl.constexpr):
    """Magnitudes in [0, 6] to a neighbouring E2M1 value: up where (r + 1/2) / 65536 is below the fraction.

    draw: (r + 1/2) * 2**-17, so that p * draw is that share of a step. The difference below is exact wherever its
    sign or the nearest integer matters, so rounding it up gives the neighbour.
    """
    p = _binade(magnitude)
    shifted = tl.fma(draw * -1.0, p, magnitude)  # -p would be 0 - p, an addition
    if ARCH == 0:
        return tl.ceil(shifted * (2.0 / p)) * (p * 0.5) + 0.0
    return tl.fma(p, -HALF_STEPS, _fma_up(p, HALF_STEPS, shifted))


@triton.jit
def e2m1_code(value):
    """int32 code of an E2M1 magnitude given as fp32: 2**-126 moves its subnormals onto those of fp32."""
    return (value * 1.1754943508222875e-38).to(tl.int32, bitcast=True) >> 22


@triton.jit
def scaled_eighth(magnitude, m, ARCH: tl.constexpr):
    """min(magnitude * m / 8, 1), one rounding: what `e2m1_code_nearest` and `e2m1_code_stochastic` take."""
    if ARCH == 0:
        return tl.minimum(magnitude * m, 1.0)
    return tl.inline_asm_elementwise(
        "mul.rn.sat.f32 $0, $1, $2;", "=f,f,f", [magnitude, m], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def e2m1_code_nearest(eighth):
    """An eighth of a magnitude, at most 1, to its code, in the lowest bits of the bits of UNITS + code; 8 for 7.

    Over its eight values E2M1's code is the smallest of three lines, 2a, a + 2 and a / 2 + 4; rounding is monotonic, so
    each line is rounded as it is formed, once, and ties go to the even code.
    """
    below = tl.minimum(tl.fma(eighth, 16.0, UNITS), tl.fma(eighth, 8.0, UNITS + 2.0))
    return tl.minimum(below, tl.fma(eighth, 4.0, UNITS + 4.0)).to(tl.int32, bitcast=True)


@triton.jit
def e2m1_code_stochastic(eighth, r, ARCH: tl.constexpr):
    """The same, up where (r + 1/2) / 65536 is below the fraction: the code in bits 16 to 19.

    The lines are formed in units of 2**-16, rounded to nearest with ties down (slopes a hair below a power of two turn
    ties aside and nothing else), and 2**16 - 1 added; less r that carries into the code exactly where
    ceil(65536 fraction - 1/2) exceeds r.
    """
    if ARCH == 0:
        below = tl.minimum(tl.ceil(eighth * 1048576.0 - 0.5), tl.ceil(eighth * 524288.0 - 0.5) + 131072.0)
        line = tl.minimum(below, tl.ceil(eighth * 262144.0 - 0.5) + 262144.0)
        bits = line.to(tl.int32) + (0x4B400000 + 65535)
    else:
        below = tl.minimum(
            tl.fma(eighth, 1048575.9375, 12648447.0), tl.fma(eighth, 524287.96875, 12648447.0 + 131072.0)
        )
        bits = tl.minimum(below, tl.fma(eighth, 262143.984375, 12648447.0 + 262144.0)).to(tl.int32, bitcast=True)
    return bits - r


@triton.jit
def third_bytes(t0, t1, t2, t3, t4, t5, t6, t7, ARCH: tl.constexpr):
    """Eight codes from bits 16 to 19 of eight words, as the nibbles of one."""
    if ARCH == 0:
        word = ((t7 >> 16) & 0xF) * 16 + ((t6 >> 16) & 0xF)
        word = word * 256 + (((t5 >> 16) & 0xF) * 16 + ((t4 >> 16) & 0xF))
        word = word * 256 + (((t3 >> 16) & 0xF) * 16 + ((t2 >> 16) & 0xF))
        return word * 256 + (((t1 >> 16) & 0xF) * 16 + ((t0 >> 16) & 0xF))
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, e, o;
        prmt.b32 a, $1, $3, 0x0062;
        prmt.b32 b, $5, $7, 0x0062;
        prmt.b32 c, $2, $4, 0x0062;
        prmt.b32 d, $6, $8, 0x0062;
        prmt.b32 e, a, b, 0x5410;
        prmt.b32 o, c, d, 0x5410;
        and.b32 e, e, 0x0f0f0f0f;
        and.b32 o, o, 0x0f0f0f0f;
        mad.lo.u32 $0, o, 16, e;
        }""",
        "=r,r,r,r,r,r,r,r,r", [t0, t1, t2, t3, t4, t5, t6, t7], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def without_eights(word):
    """Codes 8 of a word of eight magnitudes become 7: what saturation at 8 instead of 6 leaves."""
    return word - ((word >> 3) & 0x11111111)


@triton.jit
def e2m1_pair(even, odd):
    """Two signed values to a byte of two codes by Blackwell's own conversion: nearest even, saturating."""
    return tl.inline_asm_elementwise(
        "{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }",
        "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_pair_values(even, odd):
    """Two signed values rounded to E2M1 and back by Blackwell's own conversions."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 pair; .reg .b32 halves; .reg .b16 low, high;
        cvt.rn.satfinite.e2m1x2.f32 pair, $3, $2;
        cvt.rn.f16x2.e2m1x2 halves, pair;
        mov.b32 {low, high}, halves;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }""",
        "=f,=f,f,f", [even, odd], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_four_drawn(a, b, c, d, word):
    """Four signed values to four codes (16 bits) by the stochastic conversion of sm_100a and sm_103a.

    Eight random bits each: not the bits of the portable rounding.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b16 four; cvt.rs.satfinite.e2m1x4.f32 four, {$4, $3, $2, $1}, $5; cvt.u32.u16 $0, four; }",
        "=r,f,f,f,f,r", [a, b, c, d, word], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sign_nibbles(w0, w1, w2, w3, ARCH: tl.constexpr):
    """Signs of eight 16-bit floats, two in each word, as the top bits of eight nibbles."""
    if ARCH == 0:
        out = (w0 >> 12) & 0x8 | (w0 >> 24) & 0x80 | (w1 >> 4) & 0x800 | (w1 >> 16) & 0x8000
        out |= (w2 << 4) & 0x80000 | (w2 >> 8) & 0x800000 | (w3 << 12) & 0x8000000
        return out | w3 & -2147483648
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, e, o;
        prmt.b32 a, $1, $2, 0xfbd9;
        prmt.b32 b, $3, $4, 0xfbd9;
        prmt.b32 e, a, b, 0x5410;
        prmt.b32 o, a, b, 0x7632;
        and.b32 e, e, 0x08080808;
        and.b32 o, o, 0x80808080;
        or.b32 $0, e, o;
        }""",
        "=r,r,r,r,r", [w0, w1, w2, w3], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def draws(word, HIGH: tl.constexpr, ARCH: tl.constexpr = 0):
    """(r + 1/2) * 2**-17 from the low or high 16 bits r of a word."""
    if ARCH == 0 or HIGH:
        bits = half_word(word, HIGH) | 0x42800000
    else:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x4280, 0x5410;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    return bits.to(tl.float32, bitcast=True) - 63.999996185302734  # 2**6 + r 2**-17, less 2**6 - 2**-18


@triton.jit
def half_word(word, HIGH: tl.constexpr):
    """The low or high 16 bits of a word."""
    return _logical_shift(word, 16) if HIGH else word & 0xFFFF


@triton.jit
def largest_halves(a, b, ARCH: tl.constexpr):
    """Elementwise maximum of two words of two non-negative BF16 numbers each; one that is NaN loses."""
    if ARCH == 0:
        high = tl.maximum(a & -65536, b & -65536)
        return high | tl.maximum(a & 0xFFFF, b & 0xFFFF)
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def round_pair(even, odd, ARCH: tl.constexpr):
    """Two fp32 numbers rounded to BF16, nearest even, in one word, the first one low."""
    if ARCH == 0:
        low = round_to(even, tl.bfloat16, ARCH).to(tl.int32, bitcast=True)
        return ((low >> 16) & 0xFFFF) | round_to(odd, tl.bfloat16, ARCH).to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _logical_shift(x, BITS: tl.constexpr):
    return (x.to(tl.uint32, bitcast=True) >> BITS).to(tl.int32, bitcast=True)


@triton.jit
def mix32(x):
    """`quatrain.kernels.rounding.mix32` on int32 words."""
    x = (x ^ _logical_shift(x, 16)) * 0x21F0AAAD
    x = (x ^ _logical_shift(x, 15)) * 0x735A2D97
    return x ^ _logical_shift(x, 15)


@triton.jit
def pair_hash(start, middle, pair):
    """`quatrain.kernels.rounding.pair_hash`: 32 bits for columns 2 * pair and 2 * pair + 1."""
    x = start + pair * -1640531527  # 0x9E3779B9 as a signed word
    x = (x ^ _logical_shift(x, 16)) * 0x21F0AAAD + middle
    x = (x ^ _logical_shift(x, 15)) * 0x735A2D97
    return x ^ _logical_shift(x, 15)


@triton.jit
def key_state(key_ptr, ADD: tl.constexpr = 0):
    """Two int32 words from (seed, offset + ADD), int64 [2]."""
    seed, offset = tl.load(key_ptr), tl.load(key_ptr + 1) + ADD
    low0, low1 = seed.to(tl.int32), offset.to(tl.int32)
    high0, high1 = (seed >> 32).to(tl.int32), (offset >> 32).to(tl.int32)
    first = mix32(low0 + -1640531527)
    first = mix32(mix32(mix32(first ^ high0) ^ low1) ^ high1)
    second = mix32(high0 + -2048144789)  # 0x85EBCA6B
    second = mix32(mix32(mix32(second ^ low0) ^ high1) ^ low1)
    return first, second


@triton.jit
def row_state(first, second, row):
    """Two int32 words of each operand row (int32)."""
    return mix32(first ^ row), mix32(second + row * -1640531527)


@triton.jit
def e4m3_value(code):
    """fp32 value of non-negative E4M3 codes (int32, below 127)."""
    normal = ((code + 960) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def e4m3_code(value, UP: tl.constexpr):
    """int32 E4M3 codes of fp32 in [0, 448]: nearest even, or up to the next."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (value + 16384.0).to(tl.int32, bitcast=True) & 0xF  # the last bit of 2**14 is the subnormal step 2**-9
    code = tl.where(value < 0.015625, small, normal)
    if UP:
        code += (e4m3_value(code) < value).to(tl.int32)
    return code


@triton.jit
def block_scale(ideal, UP: tl.constexpr, ARCH: tl.constexpr):
    """(code int32, value fp32) of the E4M3 block scale for an ideal one, at most 448."""
    ideal = tl.minimum(ideal, 448.0)
    if ARCH >= 89 and not UP:
        stored = ideal.to(tl.float8e4nv)
        return stored.to(tl.uint8, bitcast=True).to(tl.int32), stored.to(tl.float32)
    code = e4m3_code(ideal, UP)
    return code, e4m3_value(code)


@triton.jit
def multiplier(scale, decode, SAFE: tl.constexpr, ARCH: tl.constexpr):
    """What elements are multiplied by before rounding: 1 / (scale * decode), at most FLT_MAX.

    SAFE: the product is zero or far from fp32's limits. One Newton step then rounds the approximate reciprocal
    correctly, and gives NaN for zero, which the minimum drops.
    """
    if SAFE and ARCH > 0:
        inverse = tl.inline_asm_elementwise(
            """{
            .reg .f32 r, e;
            rcp.approx.ftz.f32 r, $1;
            fma.rn.f32 e, $1, r, 0fBF800000;
            neg.f32 e, e;
            fma.rn.f32 $0, r, e, r;
            }""",
            "=f,f", [scale * decode], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        inverse = reciprocal(scale * decode, ARCH)
    return tl.minimum(inverse, FLT_MAX)


@triton.jit
def encode_scale(amax, CONSTANT: tl.constexpr):
    """constant / amax, at most FLT_MAX; 1 for a zero or infinite amax."""
    encode = tl.minimum(tl.div_rn(CONSTANT, amax), FLT_MAX)
    return tl.where((amax == 0.0) | (encode == 0.0) | (amax == float("inf")), 1.0, encode)


@triton.jit
def divide_by_constant(x, CONSTANT: tl.constexpr, INVERSE: tl.constexpr):
    """x / CONSTANT correctly rounded, INVERSE being fp32(1 / CONSTANT), where nothing under- or overflows.

    A remainder corrects the product with the reciprocal; a test walks through every mantissa for every constant.
    """
    quotient = x * INVERSE
    return tl.fma(tl.fma(quotient, -CONSTANT, x), INVERSE, quotient)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """fp32 rounded to nearest even in DTYPE, as fp32."""
    if DTYPE == tl.float32:
        return x
    if DTYPE == tl.bfloat16 and ARCH == 0:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def widen(x, ARCH: tl.constexpr):
    """A floating tensor as fp32; the interpreter flushes subnormal BF16 when it casts."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def tree_sum(terms):
    """Sum of sixteen tensors, pairwise as the reference sums: 8 + 8, 4 + 4, 2 + 2, 1 + 1."""
    for level in tl.static_range(4):
        sums = ()
        for i in tl.static_range(8 >> level):
            sums = sums + (terms[i] + terms[i + (8 >> level)],)
        terms = sums
    return terms[0]


@triton.jit
def split4(t):
    """The four columns of [N, 4]."""
    even, odd = tl.split(tl.reshape(t, [t.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return (a, b, c, d)


@triton.jit
def join4(a, b, c, d):
    """[N, 4] of four columns."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], 4])
