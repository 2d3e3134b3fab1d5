"""What the Triton kernels of attention share: which tiles a tile sees, and dS quantized where it is made.

A program holds one tile of queries (or keys) and walks over tiles of keys (or queries). Most tiles need no mask at all:
`key_range` and `query_range` give the first tile, the first and last that are seen whole, and the end.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.triton_math import (
    EXPONENT,
    e2m1_nearest,
    e4m3_code,
    e4m3_value,
    half_word,
    multiplier,
    pair_hash,
    round_to,
    widen,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def extent(starts_ptr, tokens, sequence, PACKED: tl.constexpr):
    """First token of a sequence, its length, and where it begins in padded views."""
    if PACKED:
        begin = tl.load(starts_ptr + sequence).to(tl.int32)
        length = tl.load(starts_ptr + sequence + 1).to(tl.int32) - begin
        padded = 16 * (begin // 16 + sequence)
    else:
        begin = 0
        length = tokens
        padded = 0
    return begin, length, padded


@triton.jit
def key_range(
    first, queries, keys, shift, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """(begin, whole, end of whole, end) of the keys that queries first to first + ROWS see."""
    place = first + shift
    last = tl.minimum(first + ROWS, queries) - 1 + shift
    begin, end, whole, until = 0, keys, 0, keys
    if CAUSAL:
        end = tl.minimum(keys, last + 1)
        until = tl.minimum(until, place + 1)
        if WINDOW:
            begin = tl.maximum(0, place - WINDOW + 1)
            whole = tl.maximum(0, last - WINDOW + 1)
    elif WINDOW:
        begin, end = tl.maximum(0, place - WINDOW), tl.minimum(keys, last + WINDOW + 1)
        whole, until = tl.maximum(0, last - WINDOW), tl.minimum(until, place + WINDOW + 1)
    return _tiles(begin, whole, until, end, MASKED, COLUMNS)


@triton.jit
def query_range(
    first, queries, keys, shift, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same of the queries that see keys first to first + ROWS."""
    last = tl.minimum(first + ROWS, keys) - 1
    begin, end, whole, until = 0, queries, 0, queries
    if CAUSAL:
        begin, whole = tl.maximum(0, first - shift), tl.maximum(0, last - shift)
        if WINDOW:
            end = tl.minimum(queries, last + WINDOW - shift)
            until = tl.minimum(until, first + WINDOW - shift)
    elif WINDOW:
        begin, end = tl.maximum(0, first - WINDOW - shift), tl.minimum(queries, last + WINDOW - shift + 1)
        whole, until = tl.maximum(0, last - WINDOW - shift), tl.minimum(until, first + WINDOW - shift + 1)
    return _tiles(begin, whole, until, end, MASKED, COLUMNS)


@triton.jit
def _tiles(begin, whole, until, end, MASKED: tl.constexpr, COLUMNS: tl.constexpr):
    """Whole tiles lie between multiples of COLUMNS; with MASKED there are none."""
    begin = begin // COLUMNS * COLUMNS
    end = tl.maximum(end, begin)
    whole = tl.minimum((whole + COLUMNS - 1) // COLUMNS * COLUMNS, (end + COLUMNS - 1) // COLUMNS * COLUMNS)
    until = tl.maximum(until // COLUMNS * COLUMNS, whole)
    if MASKED:
        until = whole
    return begin, whole, until, end


@triton.jit
def seen(query, key, shift, queries, keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys of a tile its queries see; both broadcast against each other."""
    inside = (query < queries) & (key < keys)
    behind = query + shift - key
    if CAUSAL:
        inside = inside & (behind >= 0)
        if WINDOW:
            inside = inside & (behind < WINDOW)
    elif WINDOW:
        inside = inside & (behind <= WINDOW) & (behind >= -WINDOW)
    return inside


@triton.jit
def _e4m3_up(ideal, ARCH: tl.constexpr):
    """The smallest E4M3 value that is not below an ideal scale in [0, 448].

    Normal numbers round up on their bits, subnormal ones on a grid of 2**-9; the other of the two is never larger.
    """
    if ARCH == 0:
        return e4m3_value(e4m3_code(ideal, True))
    normal = ((ideal.to(tl.int32, bitcast=True) + 0xFFFFF) & -0x100000).to(tl.float32, bitcast=True)
    small = tl.inline_asm_elementwise(
        "{ .reg .f32 t; add.rp.f32 t, $1, 0f46800000; sub.rn.f32 $0, t, 0f46800000; }",  # 2**14
        "=f,f", [ideal], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return tl.maximum(normal, small)


@triton.jit
def _e4m3_nearest(ideal, ARCH: tl.constexpr):
    if ARCH >= 89:
        return ideal.to(tl.float8e4nv).to(tl.float32)
    return e4m3_value(e4m3_code(ideal, False))


@triton.jit
def scaling(bound, Q: tl.constexpr):
    """(what block maxima are multiplied by, 1 / encode) of a tensor scale whose maximum is `bound`.

    Q: (to-6, scales round up, target, 1 / target, constant, stochastic).
    """
    encode = tl.minimum(tl.div_rn(Q[4], bound), 3.4028234663852886e38)
    encode = tl.where((bound == 0.0) | (encode == 0.0) | (bound == float("inf")), 1.0, encode)
    return (encode * Q[3] if Q[0] else encode), tl.div_rn(1.0, encode)


@triton.jit
def _drawn(scaled, words, ARCH: tl.constexpr):
    """Magnitudes in [0, 6] to a neighbouring E2M1 value, with the bits `words` (16 of them inverted, 65535 - r).

    Adding 64 p leaves the sixteen bits below E2M1's step at the end of the mantissa, and what is added to them carries
    where the fraction, rounded to so many bits, exceeds r.
    """
    raised = tl.maximum(scaled, 1.0).to(tl.int32, bitcast=True)
    p = (raised & EXPONENT).to(tl.float32, bitcast=True)
    carried = (tl.fma(p, 64.0, scaled).to(tl.int32, bitcast=True) + words) & -65536
    return tl.fma(p, -64.0, carried.to(tl.float32, bitcast=True))


@triton.jit
def _signed(rounded, scale, like, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """rounded x scale with the sign of `like`, exact in DTYPE; two at once where that is BF16."""
    if ARCH == 0 or DTYPE != tl.bfloat16:
        sign = like.to(tl.int32, bitcast=True) & -2147483648
        value = ((rounded * scale).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        operand = to_dtype(value, DTYPE, ARCH)
    else:
        bits = scale.to(tl.int32, bitcast=True)
        twice = bits | ((bits >> 16) & 0xFFFF)
        operand = _signed_pairs(rounded, tl.broadcast_to(twice, rounded.shape), like.to(tl.int32, bitcast=True))
    return operand


@triton.jit
def _signed_pairs(rounded, twice, like):
    """The same for BF16, two elements at once; twice: the scale's BF16 bits in both halves of a word."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 v, s, z;
        mov.b32 z, 0x80008000;
        cvt.rn.bf16x2.f32 v, $2, $1;
        prmt.b32 s, $3, $4, 0x7632;
        lop3.b32 v, v, s, 0x80008000, 0xf8;
        fma.rn.bf16x2 $0, v, $5, z;
        }""",
        "=r,r,r,r,r,r,r", [rounded, like, twice],
        dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def ds_scale(top, ideal_factor, Q: tl.constexpr, ARCH: tl.constexpr):
    """Block scales (fp32 values of E4M3) of blocks whose largest magnitudes are `top`."""
    ideal = top * ideal_factor if Q[0] else tl.div_rn(top, Q[2]) * ideal_factor
    ideal = tl.minimum(ideal, 448.0)
    return _e4m3_up(ideal, ARCH) if Q[1] else _e4m3_nearest(ideal, ARCH)


@triton.jit
def quantize_ds(ds, start, middle, pair, ideal_factor, decode, Q: tl.constexpr, DTYPE: tl.constexpr,
                ARCH: tl.constexpr):  # fmt: skip
    """dS [M, N] as code x block scale in DTYPE; arguments as of `rounded_ds`."""
    rounded, scale, x = rounded_ds(ds, start, middle, pair, ideal_factor, decode, Q, ARCH)
    return tl.reshape(_signed(rounded, scale, x, DTYPE, ARCH), ds.shape)


@triton.jit
def rounded_ds(ds, start, middle, pair, ideal_factor, decode, Q: tl.constexpr, ARCH: tl.constexpr):
    """Blocks of 16 along N of dS [M, N]: E2M1 magnitudes [M, N / 16, 16], scales [M, N / 16, 1], dS as blocks.

    start, middle: words of the rows' random state [M, 1]; pair: half the first column's coordinate.
    """
    M: tl.constexpr = ds.shape[0]
    N: tl.constexpr = ds.shape[1]
    x = tl.reshape(ds, [M, N // 16, 16])
    scale = ds_scale(tl.max(tl.abs(x), axis=2, keep_dims=True), ideal_factor, Q, ARCH)
    scaled = tl.abs(x) * multiplier(scale, decode, True, ARCH)
    if not Q[1]:  # below a scale that was rounded up 6 is exceeded by an ulp at most
        scaled = tl.minimum(scaled, 6.0)
    if Q[5]:
        word = pair_hash(start, middle, pair + tl.arange(0, N // 2)[None, :]) ^ -1
        words = tl.join(half_word(word, False), half_word(word, True))
        rounded = _drawn(scaled, tl.reshape(words, [M, N // 16, 16]), ARCH)
    else:
        rounded = e2m1_nearest(scaled)
    return rounded, scale, x


@triton.jit
def tensor_scale(amax_ptr, CONSTANT: tl.constexpr):
    """amax / constant; 1 for an operand that is not quantized (constant 0)."""
    return 1.0 if CONSTANT == 0.0 else tl.div_rn(tl.load(amax_ptr), CONSTANT)


@triton.jit
def score_factor(amax_q_ptr, amax_k_ptr, FACTORS: tl.constexpr):
    """What q k^T is multiplied by: both tensor scales, and then the scale. FACTORS: (constant of q, of k, scale)."""
    return tensor_scale(amax_q_ptr, FACTORS[0]) * tensor_scale(amax_k_ptr, FACTORS[1]) * FACTORS[2]


@triton.jit
def held(x, SIZE: tl.constexpr):
    """x in registers: as the result of an exact product with the identity, no copy of it stays in shared memory."""
    index = tl.arange(0, SIZE)
    identity = (index[:, None] == index[None, :]).to(x.dtype)
    return tl.dot(x, identity).to(x.dtype)


@triton.jit
def product(a, b, ARCH: tl.constexpr):
    """a b in fp32; the interpreter would multiply the bits of BF16 numbers."""
    return tl.dot(widen(a, ARCH), widen(b, ARCH)) if ARCH == 0 else tl.dot(a, b)


@triton.jit
def product_plus(a, b, c, ARCH: tl.constexpr):
    """a b + c."""
    return tl.dot(widen(a, ARCH), widen(b, ARCH), c) if ARCH == 0 else tl.dot(a, b, c)


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """fp32 rounded to nearest even (the interpreter's own cast to BF16 truncates)."""
    return round_to(x, DTYPE, ARCH).to(DTYPE)
