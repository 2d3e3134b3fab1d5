"""The arithmetic of NVFP4's 1x16 blocks in Triton: transform, scales, codes.

A block is a tuple of tensors, one for each of its sixteen elements (or two elements in each of eight words): along rows
they are [blocks], along columns [groups, columns], a group being sixteen rows. So a thread owns whole blocks, nothing
is exchanged between threads, and both directions share this.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.triton_math import (
    block_scale,
    divide_by_constant,
    draws,
    e2m1_code,
    e2m1_code_nearest,
    e2m1_code_stochastic,
    e2m1_four_drawn,
    e2m1_nearest,
    e2m1_pair,
    e2m1_pair_values,
    e2m1_stochastic,
    half_word,
    largest_halves,
    multiplier,
    pair_hash,
    round_pair,
    round_to,
    scaled_eighth,
    sign_nibbles,
    third_bytes,
    tree_sum,
    widen,
    without_eights,
)

# Q, the constants of a spec: rule, error, scales round up, target, 1 / target, constant, 1 / constant, stochastic
# (1: portable bits, 2: the stochastic conversion of sm_100a).
# SAFE: amax is neither so small nor so large that a product, quotient or remainder could leave the range of fp32.
# A block is (magnitudes, signed): sixteen fp32 magnitudes, and for their signs eight words of two BF16 each, or, in
# another dtype, the sixteen elements themselves.


@triton.jit
def block_of_words(words):
    """The block of eight words of two BF16 numbers."""
    magnitudes = ()
    for i in tl.static_range(8):
        bits = words[i] & 0x7FFF7FFF
        magnitudes = magnitudes + (
            (bits << 16).to(tl.float32, bitcast=True),
            (bits & -65536).to(tl.float32, bitcast=True),
        )
    return magnitudes, words


@triton.jit
def block_of(xs):
    """The block of sixteen fp32 elements."""
    magnitudes = ()
    for i in tl.static_range(16):
        magnitudes = magnitudes + (tl.abs(xs[i]),)
    return magnitudes, xs


@triton.jit
def _maximum(xs):
    largest = xs[0]
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, xs[i])
    return largest


@triton.jit
def _block_max(magnitudes, signed, ARCH: tl.constexpr):
    if len(signed) == 16:
        largest = _maximum(magnitudes)
    else:
        halves = signed[0] & 0x7FFF7FFF
        for i in tl.static_range(1, 8):
            halves = largest_halves(halves, signed[i] & 0x7FFF7FFF, ARCH)
        low, high = (halves << 16).to(tl.float32, bitcast=True), (halves & -65536).to(tl.float32, bitcast=True)
        largest = tl.maximum(low, high)
    return largest


@triton.jit
def _rounded(magnitudes, m, ARCH: tl.constexpr):
    """Scaled magnitudes and their nearest E2M1 values (as fp32), not yet clipped to 6."""
    scaled = ()
    values = ()
    for i in tl.static_range(16):
        scaled = scaled + (magnitudes[i] * m,)
    if ARCH >= 100:
        for i in tl.static_range(8):
            even, odd = e2m1_pair_values(scaled[2 * i], scaled[2 * i + 1])
            values = values + (even, odd)
    else:
        for i in tl.static_range(16):
            values = values + (e2m1_nearest(scaled[i]),)
    return scaled, values


@triton.jit
def _exact_error(magnitudes, m, scale, amax, Q: tl.constexpr, SAFE: tl.constexpr):
    """Error of each block to the bit: ((value * scale) * amax) / constant less the input, summed as a tree."""
    terms = ()
    for i in tl.static_range(16):
        product = e2m1_nearest(tl.minimum(magnitudes[i] * m, 6.0)) * scale * amax
        decoded = divide_by_constant(product, Q[5], Q[6]) if SAFE else tl.div_rn(product, Q[5])
        difference = decoded - magnitudes[i]
        terms = terms + (difference * difference if Q[1] == 0 else tl.abs(difference),)
    return _maximum(terms) if Q[1] == 2 else tree_sum(terms)


@triton.jit
def _quick_error(scaled, values, scale, Q: tl.constexpr):
    """The same to a few parts in 2**15, in units of the block's own scale: no decoding, sums contracted."""
    total = tl.abs(values[0] - scaled[0])
    if Q[1] == 0:
        total = total * total
    for i in tl.static_range(1, 16):
        difference = values[i] - scaled[i]
        if Q[1] == 0:
            total = tl.fma(difference, difference, total)
        elif Q[1] == 1:
            total = total + tl.abs(difference)
        else:
            total = tl.maximum(total, tl.abs(difference))
    return total * scale * scale if Q[1] == 0 else total * scale


@triton.jit
def _four_is_better(magnitudes, m, scale, m4, scale4, amax, Q: tl.constexpr, SAFE: tl.constexpr, ARCH: tl.constexpr):
    """Whether a block's error is smaller when its maximum becomes 4.

    Quick errors decide unless some block of the program is too close to call: then the exact ones are formed.
    """
    scaled, values = _rounded(magnitudes, m, ARCH)
    scaled4, values4 = _rounded(magnitudes, m4, ARCH)
    if SAFE:
        error, error4 = _quick_error(scaled, values, scale, Q), _quick_error(scaled4, values4, scale4, Q)
        better = error4 < error
        # A scale that is subnormal may clip elements, and differ from the other by any factor. Otherwise 2**-14 of the
        # errors covers their rounding, and 2**-16 steps of the larger scale those that are nearly zero.
        step = tl.maximum(scale, scale4)
        slack = (error + error4) * 0.000061035156 + (step * step if Q[1] == 0 else step) * 0.000015258789
        close = (tl.abs(error - error4) < slack) | (scale < 0.015625)
        if tl.max(close.to(tl.int32)) > 0:
            error = _exact_error(magnitudes, m, scale, amax, Q, True)
            better = _exact_error(magnitudes, m4, scale4, amax, Q, True) < error
    else:
        error = _exact_error(magnitudes, m, scale, amax, Q, False)
        better = _exact_error(magnitudes, m4, scale4, amax, Q, False) < error
    return better


@triton.jit
def block_scales(magnitudes, signed, amax, encode, decode, Q: tl.constexpr, SAFE: tl.constexpr, ARCH: tl.constexpr):
    """Code (int32) and value of each block's scale, and what its elements are multiplied by before rounding."""
    largest = _block_max(magnitudes, signed, ARCH)
    if Q[0] == 0:
        ideal = largest * (encode * Q[4])
    else:
        ideal = (divide_by_constant(largest, Q[3], Q[4]) if SAFE else tl.div_rn(largest, Q[3])) * encode
    code, scale = block_scale(ideal, Q[2], ARCH)
    m = multiplier(scale, decode, SAFE, ARCH)
    if Q[0] == 2:
        code4, scale4 = block_scale(ideal * 1.5, Q[2], ARCH)
        m4 = multiplier(scale4, decode, SAFE, ARCH)
        better = _four_is_better(magnitudes, m, scale, m4, scale4, amax, Q, SAFE, ARCH)
        code = tl.where(better, code4, code)
        scale = tl.where(better, scale4, scale)
        m = tl.where(better, m4, m)
    if not SAFE:
        code, scale = tl.where(amax != amax, 0x7F, code), tl.where(amax != amax, amax, scale)
    return code, scale, m


@triton.jit
def _value(magnitude, m, start, middle, pair, HIGH: tl.constexpr, Q: tl.constexpr, ARCH: tl.constexpr):
    """E2M1 magnitude (as fp32) of one element of each block."""
    scaled = tl.minimum(magnitude * m, 6.0)
    if Q[7]:
        return e2m1_stochastic(scaled, draws(pair_hash(start, middle, pair), HIGH, ARCH), ARCH)
    return e2m1_nearest(scaled)


@triton.jit
def _magnitude_word(
    magnitudes, m, start, middle, pair, HALF: tl.constexpr, Q: tl.constexpr, SAFE: tl.constexpr, ARCH: tl.constexpr
):
    """Codes, without signs, of the first or second eight elements of each block."""
    eighth_m = m * 0.125
    if SAFE and Q[7] == 0:
        word = tl.zeros(m.shape, tl.int32)
        for j in tl.static_range(7, -1, -1):
            word = word * 16 + e2m1_code_nearest(scaled_eighth(magnitudes[8 * HALF + j], eighth_m, ARCH))
        # Less what the bits beside the codes add up to, 0x11111111 times UNITS' modulo 2**32.
        word = without_eights(word - 1061158912)
    elif SAFE:
        codes = ()
        for j in tl.static_range(8):
            r = half_word(pair_hash(start, middle, pair + (8 * HALF + j) // 2), j % 2 == 1)
            eighth = scaled_eighth(magnitudes[8 * HALF + j], eighth_m, ARCH)
            codes = codes + (e2m1_code_stochastic(eighth, r, ARCH),)
        word = third_bytes(codes[0], codes[1], codes[2], codes[3], codes[4], codes[5], codes[6], codes[7], ARCH)
        word = without_eights(word)
    else:
        word = tl.zeros(m.shape, tl.int32)
        for j in tl.static_range(7, -1, -1):
            place = pair + (8 * HALF + j) // 2
            word = word * 16 + e2m1_code(_value(magnitudes[8 * HALF + j], m, start, middle, place, j % 2 == 1, Q, ARCH))
    return word


@triton.jit
def _sign_word(signed, HALF: tl.constexpr, ARCH: tl.constexpr):
    """Signs of the first or second eight elements of each block, where their codes have them."""
    if len(signed) == 8:
        word = sign_nibbles(signed[4 * HALF], signed[4 * HALF + 1], signed[4 * HALF + 2], signed[4 * HALF + 3], ARCH)
    else:
        word = tl.zeros(signed[0].shape, tl.int32)
        for j in tl.static_range(7, -1, -1):
            word = word * 16 + ((signed[8 * HALF + j].to(tl.int32, bitcast=True) >> 28) & 8)
    return word


@triton.jit
def _signed_value(magnitudes, signed, m, ELEMENT: tl.constexpr):
    """Element ELEMENT of each block with its sign, scaled."""
    if len(signed) == 16:
        value = signed[ELEMENT]
    elif ELEMENT % 2 == 1:
        value = (signed[ELEMENT // 2] & -65536).to(tl.float32, bitcast=True)
    else:
        value = (signed[ELEMENT // 2] << 16).to(tl.float32, bitcast=True)
    return value * m


@triton.jit
def _native_word(magnitudes, signed, m, start, middle, pair, HALF: tl.constexpr, Q: tl.constexpr):
    """Codes with signs by Blackwell's own conversions."""
    word = tl.zeros(m.shape, tl.int32)
    if Q[7] == 2:
        for i in tl.static_range(2):
            four = e2m1_four_drawn(
                _signed_value(magnitudes, signed, m, 8 * HALF + 4 * i),
                _signed_value(magnitudes, signed, m, 8 * HALF + 4 * i + 1),
                _signed_value(magnitudes, signed, m, 8 * HALF + 4 * i + 2),
                _signed_value(magnitudes, signed, m, 8 * HALF + 4 * i + 3),
                pair_hash(start, middle, pair + 2 * HALF + i),
            )
            word = word | (four << (16 * i))
    else:
        for i in tl.static_range(4):
            two = e2m1_pair(
                _signed_value(magnitudes, signed, m, 8 * HALF + 2 * i),
                _signed_value(magnitudes, signed, m, 8 * HALF + 2 * i + 1),
            )
            word = word | (two << (8 * i))
    return word


@triton.jit
def code_words(
    magnitudes, signed, m, amax, start, middle, pair, Q: tl.constexpr, SAFE: tl.constexpr, ARCH: tl.constexpr
):
    """Sixteen codes of each block as two int32 words, the first element in the lowest nibble."""
    out = ()
    for half in tl.static_range(2):
        if ARCH >= 100 and Q[7] != 1:
            word = _native_word(magnitudes, signed, m, start, middle, pair, half, Q)
        else:
            word = _magnitude_word(magnitudes, m, start, middle, pair, half, Q, SAFE, ARCH)
            word = word | _sign_word(signed, half, ARCH)
        if not SAFE:
            word = tl.where(amax != amax, 0x77777777, word)
        out = out + (word,)
    return out


@triton.jit
def _upper_halves(low, high, ARCH: tl.constexpr):
    """The upper halves of two words in one; those of `high` stay where they are, and its lower half is zero."""
    if ARCH == 0:
        return ((low >> 16) & 0xFFFF) | high
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def decoded_words(magnitudes, signed, m, scale, start, middle, pair, Q: tl.constexpr, ARCH: tl.constexpr):
    """Code x block scale with its sign, exact in BF16: eight words of two."""
    out = ()
    for i in tl.static_range(8):
        low = _value(magnitudes[2 * i], m, start, middle, pair + i, False, Q, ARCH)
        high = _value(magnitudes[2 * i + 1], m, start, middle, pair + i, True, Q, ARCH)
        low, high = (low * scale).to(tl.int32, bitcast=True), (high * scale).to(tl.int32, bitcast=True)
        word = _upper_halves(low, high, ARCH)
        if len(signed) == 8:
            signs = signed[i] & -2147450880
        else:
            negative = signed[2 * i].to(tl.int32, bitcast=True) & -2147483648
            signs = ((negative >> 16) & 0x8000) | (signed[2 * i + 1].to(tl.int32, bitcast=True) & -2147483648)
        out = out + (word | signs,)
    return out


@triton.jit
def butterfly(xs, SIGNS: tl.constexpr, STAGES: tl.constexpr = 4):
    """Hadamard transform without its factor: signs (a bit mask), then h = 1, 2, 4, 8; or the first STAGES of these."""
    ys = ()
    for i in tl.static_range(16):
        ys = ys + (xs[i] * -1.0 if (SIGNS >> i) & 1 else xs[i],)
    for stage in tl.static_range(STAGES):
        xs = ys
        ys = ()
        for i in tl.static_range(16):
            if (i >> stage) & 1:
                ys = ys + (xs[i - (1 << stage)] - xs[i],)
            else:
                ys = ys + (xs[i] + xs[i + (1 << stage)],)
    return ys


@triton.jit
def transformed(xs, SIGNS: tl.constexpr, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """The block after its Hadamard transform, each element rounded once to the input's dtype."""
    ys = butterfly(xs, SIGNS)
    if DTYPE == tl.bfloat16:
        words = ()
        for i in tl.static_range(8):
            words = words + (round_pair(ys[2 * i] * 0.25, ys[2 * i + 1] * 0.25, ARCH),)
        magnitudes, signed = block_of_words(words)
    else:
        out = ()
        for i in tl.static_range(16):
            out = out + (round_to(ys[i] * 0.25, DTYPE, ARCH),)
        magnitudes, signed = block_of(out)
    return magnitudes, signed


@triton.jit
def elements(words):
    """The sixteen fp32 elements of eight words of two BF16 numbers."""
    xs = ()
    for i in tl.static_range(8):
        xs = xs + ((words[i] << 16).to(tl.float32, bitcast=True), (words[i] & -65536).to(tl.float32, bitcast=True))
    return xs


@triton.jit
def widened(xs, ARCH: tl.constexpr):
    """Sixteen tensors as fp32."""
    out = ()
    for i in tl.static_range(16):
        out = out + (widen(xs[i], ARCH),)
    return out


@triton.jit
def paired(xs):
    """Eight words of sixteen BF16 tensors."""
    words = ()
    for i in tl.static_range(8):
        low = xs[2 * i].to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = words + (low | (xs[2 * i + 1].to(tl.int16, bitcast=True).to(tl.int32) << 16),)
    return words
