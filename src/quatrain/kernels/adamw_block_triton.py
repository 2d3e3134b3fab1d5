"""One AdamW step of one block of every thread: loads, the update, both moments encoded, stores."""

# mypy: disable-error-code="no-untyped-def,assignment,misc,attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.formats.transform import FIXED_SIGNS
from quatrain.kernels.dither import PARTS
from quatrain.kernels.dither_triton import decoded_dithered
from quatrain.kernels.halves_triton import block_of, butterfly, upper_pair
from quatrain.kernels.moments import DEAD_M, DEAD_S, HELD_S, OCTAVES, ONE, SMALLEST_M
from quatrain.kernels.moments_triton import (
    again,
    decoded,
    encode,
    logarithm,
    nearest_power,
    power_near,
    power_of,
    ratio_of,
    read_units,
    reciprocal,
    spread,
    square_root,
    tile_sum,
)
from quatrain.kernels.triton_math import join4, pair_hash, split4, tree_sum, widen

SIGNS = tl.constexpr(sum(1 << i for i, sign in enumerate(FIXED_SIGNS) if sign < 0))
REACH_S, HELD, REACH_M = tl.constexpr(DEAD_S), tl.constexpr(HELD_S), tl.constexpr(4.0 * PARTS * DEAD_M)
M_PART = tl.constexpr(0.25 / PARTS)
ONE_BITS, LEAST_BITS = tl.constexpr(ONE), tl.constexpr(SMALLEST_M)
LEAST_RATIO, LARGEST_RATIO = tl.constexpr(ONE + OCTAVES[0] * 8388608), tl.constexpr(ONE + OCTAVES[1] * 8388608)


@triton.jit
def _load16(pointer, place, inside, left, EVEN: tl.constexpr, ARCH: tl.constexpr):
    """Sixteen fp32 elements of each block from `place`; zero beyond `left` of them."""
    if EVEN and pointer.dtype.element_ty == tl.bfloat16:
        words = ()
        word_ptr = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(2):
            at = word_ptr + (place // 2)[:, None] + (tl.arange(0, 4)[None, :] + 4 * i)
            words = words + split4(tl.load(at, mask=inside[:, None], other=0))
        xs = ()
        for i in tl.static_range(8):
            xs = xs + ((words[i] << 16).to(tl.float32, bitcast=True), (words[i] & -65536).to(tl.float32, bitcast=True))
    else:
        xs = ()
        for i in tl.static_range(4):
            quad = tl.arange(0, 4)[None, :] + 4 * i
            mask = inside[:, None]
            if not EVEN:
                mask = mask & (quad < left[:, None])
            xs = xs + split4(widen(tl.load(pointer + place[:, None] + quad, mask=mask, other=0.0), ARCH))
    return xs


@triton.jit
def _store16(pointer, place, xs, inside, left, EVEN: tl.constexpr):
    """Sixteen elements of each block, of the pointer's dtype or int32 words that are cast to it."""
    for i in tl.static_range(4):
        quad = tl.arange(0, 4)[None, :] + 4 * i
        mask = inside[:, None]
        if not EVEN:
            mask = mask & (quad < left[:, None])
        four = join4(xs[4 * i], xs[4 * i + 1], xs[4 * i + 2], xs[4 * i + 3])
        tl.store(pointer + place[:, None] + quad, four.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _store16_upper(pointer, place, xs, inside, left, EVEN: tl.constexpr, ARCH: tl.constexpr):
    """The upper halves of sixteen int32 tensors, as BF16."""
    if EVEN:
        word_ptr = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
        for i in tl.static_range(2):
            ws = ()
            for j in tl.static_range(4):
                a, b = xs[8 * i + 2 * j], xs[8 * i + 2 * j + 1]
                ws = ws + (upper_pair(a, b, ARCH),)
            at = word_ptr + (place // 2)[:, None] + (tl.arange(0, 4)[None, :] + 4 * i)
            tl.store(at, join4(ws[0], ws[1], ws[2], ws[3]), mask=inside[:, None])
    else:
        short = pointer.to(tl.pointer_type(tl.int16), bitcast=True)
        ys = ()
        for i in tl.static_range(16):
            ys = ys + (xs[i] >> 16,)
        _store16(short, place, ys, inside, left, EVEN)


@triton.jit
def _codes(pointer, place, inside):
    """Two words of codes of each block."""
    return tl.split(tl.load(pointer + (place * 2)[:, None] + tl.arange(0, 2)[None, :], mask=inside[:, None], other=0))


@triton.jit
def numbers(scalars_ptr, FAITHFUL: tl.constexpr):
    """`quatrain.kernels.adamw._numbers`."""
    decay, size, root = tl.load(scalars_ptr + 1), tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    eps, beta1, rest1 = tl.load(scalars_ptr + 4), tl.load(scalars_ptr + 5), tl.load(scalars_ptr + 6)
    beta2, rest2, bound = tl.load(scalars_ptr + 7), tl.load(scalars_ptr + 8), tl.load(scalars_ptr + 9)
    gradient = tl.sqrt_rn(rest2) * 65536.0
    size, eps = tl.div_rn(size, root) * 65536.0, tl.div_rn(eps, root) * 65536.0
    if FAITHFUL:
        bound = 0.0
    return decay, size, eps, beta1, rest1, beta2, gradient, bound * 65536.0


@triton.jit
def _any_zero(gs):
    """Whether some product of four elements vanishes, in any block of the program: one of them is zero or tiny."""
    found = gs[0] != gs[0]
    for i in tl.static_range(4):
        found = found | (gs[4 * i] * gs[4 * i + 1] * (gs[4 * i + 2] * gs[4 * i + 3]) == 0.0)
    return tl.max(found.to(tl.int32), 0) > 0


@triton.jit
def _kept(m_ys, ratios, gs):
    """The first moment's sums and s over its mean after the deadband."""
    beside = gs[0] != 0.0
    for i in tl.static_range(1, 16):
        beside = beside | (gs[i] != 0.0)
    ms = ()
    out = ()
    for i in tl.static_range(16):
        silent = (gs[i] == 0.0) & beside
        dead = silent & (ratios[i] <= REACH_S) & (tl.abs(m_ys[i]) <= REACH_M)
        ms = ms + (tl.where(dead, 0.0, m_ys[i]),)
        out = out + (tl.where(dead, tl.minimum(ratios[i], HELD), ratios[i]),)
    return ms, out


@triton.jit
def _second_moment(ss, gs, real, n, EVEN: tl.constexpr, ARCH: tl.constexpr):
    """v and its root, from s and g."""
    vs = ()
    roots = ()
    for i in tl.static_range(16):
        g = gs[i] * n[6]
        v = (ss[i] * ss[i]) * n[5] + g * g
        v = tl.maximum(v, 7.888609052210118e-31, propagate_nan=tl.PropagateNan.ALL)
        root = square_root(v, ARCH)
        if not EVEN:
            v, root = v * real[i], root * real[i]
        vs = vs + (v,)
        roots = roots + (root,)
    return vs, roots


@triton.jit
def _first_moment(ys, ratios, gs, unit, n, FAITHFUL: tl.constexpr):
    """m from the sums of the old one, the value of their unit (times beta1), and g."""
    ms = ()
    for i in tl.static_range(16):
        own = unit
        if not FAITHFUL:
            own = power_near(ratios[i]) * unit
        ms = ms + (ys[i] * (-own if (SIGNS >> i) & 1 else own) + gs[i] * n[4],)
    return ms


@triton.jit
def _relative(ms, ratios):
    """m over the power of two near the decoded s over its tile's mean."""
    out = ()
    for i in tl.static_range(16):
        out = out + (ms[i] * nearest_power(power_near(ratios[i]), 0),)
    return out


@triton.jit
def _largest(xs):
    """Largest magnitude, or what stands for less; NaN does not matter."""
    largest = tl.abs(xs[0])
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, tl.abs(xs[i]))
    return tl.maximum(largest.to(tl.int32, bitcast=True), LEAST_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _rotated(xs, power, ARCH: tl.constexpr):
    scaled = ()
    for i in tl.static_range(16):
        scaled = scaled + (xs[i] * (-power if (SIGNS >> i) & 1 else power),)
    return butterfly(block_of(scaled, ARCH), ARCH)


@triton.jit
def _remainder(roots, mean, power, real, EVEN: tl.constexpr, ARCH: tl.constexpr):
    """The rotated rest of s over its tile's mean, in the mean's own power of two."""
    offset = -(mean * power)
    xs = ()
    for i in tl.static_range(16):
        x = tl.fma(roots[i], power, offset)  # the product is exact
        if not EVEN:
            x = x * real[i]
        xs = xs + (x,)
    return butterfly(block_of(xs, ARCH), ARCH)


@triton.jit
def _logarithms(roots, inverse, whole, real, EVEN: tl.constexpr, ARCH: tl.constexpr):
    """The rotated logarithms of s over its tile's mean; zeros where that is not finite."""
    low, high = tl.where(whole, LEAST_RATIO, ONE_BITS), tl.where(whole, LARGEST_RATIO, ONE_BITS)
    xs = ()
    for i in tl.static_range(16):
        x = logarithm(roots[i] * inverse, low, high)
        if not EVEN:
            x = x * real[i]
        xs = xs + (x,)
    return butterfly(block_of(xs, ARCH), ARCH)


@triton.jit
def _ratios(low, high, unit, ARCH: tl.constexpr):
    """s over its tile's mean, from two words of codes and the value of code 1.0 in octaves."""
    ys = decoded(low, high, ARCH)
    ratios = ()
    for i in tl.static_range(16):
        ratios = ratios + (ratio_of(ys[i], unit * 16777216.0),)
    return ratios


@triton.jit
def _matched(ratios, energy, live, real, EVEN: tl.constexpr, PER_TILE: tl.constexpr, ARCH: tl.constexpr):
    """The mean with which the decoded tile has the sum of squares of v."""
    squares = ()
    for i in tl.static_range(16):
        x = ratios[i] * ratios[i]
        if not EVEN:
            x = x * real[i]
        squares = squares + (x,)
    total = tile_sum(tl.where(live, tree_sum(squares), 0.0), PER_TILE, ARCH)
    return tl.sqrt_rn(tl.div_rn(tile_sum(energy, PER_TILE, ARCH), tl.where(live, total, 1.0)))


@triton.jit
def _store_mean(pointer, mean, finite, base, place, inside, FAITHFUL: tl.constexpr):
    bits = (mean * 0.0000152587890625).to(tl.int32, bitcast=True)
    if FAITHFUL:
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
    else:
        bits = bits + ((base >> 16) & 0xFFFF)
    short = tl.where(finite, bits >> 16, 0x7FC0).to(tl.int16)
    tl.store(pointer.to(tl.pointer_type(tl.int16), bitcast=True) + place, short, mask=inside)


@triton.jit
def _read_weights(parameter, extra, place, inside, left, MASTER: tl.constexpr, EVEN: tl.constexpr, ARCH: tl.constexpr):
    """fp32 weights, from the parameter and what its master keeps beside it."""
    ws = _load16(parameter, place, inside, left, EVEN, ARCH)
    if MASTER == 1:
        masters = _load16(extra, place, inside, left, EVEN, ARCH)
        out = ()
        for i in tl.static_range(16):
            bits = masters[i].to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            same = rounded == ws[i].to(tl.int32, bitcast=True)
            out = out + (tl.where(same, masters[i], ws[i]),)
        ws = out
    if MASTER == 2:
        corrections = _load16(extra, place, inside, left, EVEN, ARCH)
        out = ()
        for i in tl.static_range(16):
            bits = ws[i].to(tl.int32, bitcast=True) + corrections[i].to(tl.int32) * 256
            out = out + (bits.to(tl.float32, bitcast=True),)
        ws = out
    return ws


@triton.jit
def _write_weights(
    parameter, extra, place, ws, base, inside, left, MASTER: tl.constexpr, EVEN: tl.constexpr, ARCH: tl.constexpr
):
    if parameter.dtype.element_ty == tl.float32:
        _store16(parameter, place, ws, inside, left, EVEN)
    else:
        if MASTER == 1:
            _store16(extra, place, ws, inside, left, EVEN)
        draws = spread(again(base, ARCH)) if MASTER == 3 else ()
        out = ()
        low = ()
        for i in tl.static_range(16):
            # NaN is positive here, and the largest: made smaller, it cannot carry into the sign.
            bits = tl.minimum(ws[i].to(tl.int32, bitcast=True), 0x7FC00000)
            if MASTER == 1:
                bits = bits + 0x7FFF + ((bits >> 16) & 1)
            elif MASTER == 2:
                bits = bits + 0x80
                low = low + (((((bits >> 8) & 0xFF) ^ 0x80) - 0x80).to(tl.int8),)
                bits = bits + 0x8000
            else:
                word = draws[4 * (i // 8) + i % 4]
                bits = bits + (((word >> 16) & 0xFFFF) if i % 8 >= 4 else word & 0xFFFF)
            out = out + (bits,)
        _store16_upper(parameter, place, out, inside, left, EVEN, ARCH)
        if MASTER == 2:
            _store16(extra, place, low, inside, left, EVEN)


@triton.jit
def step_blocks(
    addresses, n, keys, row, block, blocks, columns, inside,
    MASTER: tl.constexpr, PER_TILE: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, FAITHFUL: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """The step of one block of every thread; returns the upper 12 bits of its units, m's high.

    keys: two words of each row for this step, and for the one before, which wrote the moments.
    """
    parameter, gradient, m_codes, m_scales, m_amax, v_codes, v_scales, v_amax, v_mean, extra = addresses
    left = columns - block * 16
    place = row.to(tl.int64) * columns + block * 16
    at = row.to(tl.int64) * blocks + block
    tile_at = row.to(tl.int64) * (blocks // PER_TILE) + block // PER_TILE
    live = inside if FULL else inside & (left > 0)
    gs = _load16(gradient, place, live, left, EVEN, ARCH)
    v_unit = read_units(tl.load(v_scales + at, mask=inside, other=0).to(tl.int32), v_amax)
    m_unit = read_units(tl.load(m_scales + at, mask=inside, other=0).to(tl.int32), m_amax)
    mean = tl.load(v_mean.to(tl.pointer_type(tl.int16), bitcast=True) + tile_at, mask=inside, other=0).to(tl.int32)
    mean = (mean << 16).to(tl.float32, bitcast=True) * 65536.0
    low, high = _codes(v_codes, at, inside)
    m_low, m_high = _codes(m_codes, at, inside)
    ss = ()
    if FAITHFUL:
        ys = decoded(m_low, m_high, ARCH)
        m_unit = m_unit * 0.125 * n[3] * 32768.0
        ratios = ys
        rest = decoded(low, high, ARCH)
        for i in tl.static_range(16):
            ss = ss + (tl.fma(rest[i], v_unit * 268435456.0, mean),)  # the product is exact
    else:
        before = pair_hash(keys[1][0], keys[1][1], block)
        ys = decoded_dithered(m_low, m_high, spread(before), ARCH)
        m_unit = m_unit * M_PART * n[3]
        ratios = _ratios(low, high, v_unit, ARCH)
        if _any_zero(gs):
            ys, ratios = _kept(ys, ratios, gs)
        for i in tl.static_range(16):
            ss = ss + (ratios[i] * mean,)
    ms = _first_moment(ys, ratios, gs, m_unit, n, FAITHFUL)
    real = ()
    if not EVEN:
        for i in tl.static_range(16):
            real = real + ((left > i).to(tl.float32),)
    vs, roots = _second_moment(ss, gs, real, n, EVEN, ARCH)
    if FULL:
        share = 1.0 / (PER_TILE * 16)
    else:
        count = tl.minimum(columns - (block // PER_TILE) * (PER_TILE * 16), PER_TILE * 16)
        share = tl.div_rn(1.0, count.to(tl.float32))
    total, energy = tl.where(live, tree_sum(roots), 0.0), tl.where(live, tree_sum(vs), 0.0)
    mean = tile_sum(total, PER_TILE, ARCH) * share
    base = pair_hash(keys[0][0], keys[0][1], block)
    if FAITHFUL:
        words = _remainder(roots, mean, tl.where(live, nearest_power(mean, 0), 0.0), real, EVEN, ARCH)
        low, high, v_unit, whole = encode(words, (), False, False, ARCH)
        v_unit = tl.where(whole, v_unit * power_of(mean, -2) * 0.0000152587890625, float("nan"))
        moments = ms
    else:
        whole = live & (mean <= 3.4028234663852886e38)
        inverse = reciprocal(tl.where(whole, mean, 1.0), ARCH)
        words = _logarithms(roots, inverse, whole, real, EVEN, ARCH)
        low, high, v_unit, whole = encode(words, (), False, False, ARCH)
        v_unit = v_unit * 0.25
        ratios = _ratios(low, high, v_unit, ARCH)
        mean = _matched(ratios, energy, live, real, EVEN, PER_TILE, ARCH)
        moments = _relative(ms, ratios)
    tl.store(v_codes + (at * 2)[:, None] + tl.arange(0, 2)[None, :], tl.join(low, high), mask=inside[:, None])
    finite = tl.abs(mean) <= 3.4028234663852886e38
    _store_mean(v_mean, mean, finite, base, tile_at, inside & (block % PER_TILE == 0), FAITHFUL)
    v_short = tl.where(whole, v_unit.to(tl.int32, bitcast=True) >> 20, 0x7FC)
    largest = _largest(moments)
    words = _rotated(moments, nearest_power(largest, 10), ARCH)
    low, high, m_unit, whole = encode(words, spread(again(base, ARCH)), True, not FAITHFUL, ARCH)
    tl.store(m_codes + (at * 2)[:, None] + tl.arange(0, 2)[None, :], tl.join(low, high), mask=inside[:, None])
    m_unit = m_unit * power_of(largest, -12)
    m_short = tl.where(whole, m_unit.to(tl.int32, bitcast=True) >> 20, 0x7FC)
    size = tl.where(whole & finite, n[1], float("nan"))
    ws = _read_weights(parameter, extra, place, live, left, MASTER, EVEN, ARCH)
    out = ()
    for i in tl.static_range(16):
        bottom = tl.maximum(roots[i], tl.abs(ms[i]) * n[7]) + n[2]
        out = out + (ws[i] * n[0] - (ms[i] * size) * reciprocal(bottom, ARCH),)
    _write_weights(parameter, extra, place, out, base, live, left, MASTER, EVEN, ARCH)
    return tl.where(inside, (m_short << 16) | v_short, 0)
