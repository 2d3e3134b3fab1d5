"""A tile of x' = x - U basis in registers, each thread holding whole groups of sixteen rows: no exchange in between.

The product is formed transposed, basis^T U^T, with rows and columns of the tile in an order of our own. An accumulator
of matrix instructions leaves lane l with rows 2 (l % 4) and the next of every eight, and with columns l / 4 of
every eight; so the tile's row 8 j + 2 q + b is made row 2 j + b of group q, and columns that one thread has are made
neighbours. Lane l then owns the groups q = l % 4 of V adjacent columns, which it loads and stores as V adjacent
numbers: x, its part in the subspace, the transform and the blocks of the transpose all live in one thread.

Tensors of a tile are [4, 8, WARPS, V]: four groups of 16 rows, column (8 w + c) V + v. Where accumulators are laid out
otherwise the compiler moves the product through shared memory, and the bits are the same.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.nvfp4_block_triton import (
    block_of_words,
    block_scales,
    butterfly,
    code_words,
    decoded_words,
    elements,
    transformed,
)
from quatrain.kernels.nvfp4_triton import largest_of, store
from quatrain.kernels.triton_math import round_pair, widen


@triton.jit
def _unordered(index, ARCH: tl.constexpr):
    """The same numbers, not known to be consecutive.

    Accesses then stay with the threads that have the values; the compiler would give neighbours in memory to one
    thread, and send every row of a tile to it.
    """
    if ARCH == 0:
        return index
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def place_of(first, group, WARPS: tl.constexpr, V: tl.constexpr, ARCH: tl.constexpr):
    """Columns [1, 8, WARPS, V] and groups of rows [4, 1, 1, 1] of a tile from column `first` and group `group` on."""
    c, w = _unordered(tl.arange(0, 8), ARCH)[None, :, None, None], tl.arange(0, WARPS)[None, None, :, None]
    q, v = _unordered(tl.arange(0, 4), ARCH)[:, None, None, None], tl.arange(0, V)[None, None, None, :]
    return first + (w * 8 + c) * V + v, group + q


@triton.jit
def load_basis(basis_ptr, first, columns, rank, RANK: tl.constexpr, WARPS: tl.constexpr, V: tl.constexpr):
    """The basis' columns from `first` on in the tile's order, [8 WARPS V, RANK], zero outside."""
    m, k = tl.arange(0, 8 * WARPS * V), tl.arange(0, RANK)[None, :]
    v = m // (16 * WARPS) * 2 + m // 8 % 2
    column = (first + (m // 16 % WARPS * 8 + m % 8) * V + v)[:, None]
    return tl.load(basis_ptr + (k * columns + column), mask=(k < rank) & (column < columns), other=0.0)


@triton.jit
def load_rows(
    x_ptr, first, first_group, rows, columns, stride, EVEN: tl.constexpr, ARCH: tl.constexpr, WARPS: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """Row i of each group, zero outside: sixteen int32 tensors [4, 8, WARPS, V / 2], two columns in a word."""
    pair, group = place_of(first // 2, first_group, WARPS, V // 2, ARCH)
    step = (stride // 2).to(tl.int64)
    top = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + ((group * 16).to(tl.int64) * step + pair)
    words = ()
    for i in tl.static_range(16):
        if EVEN:
            word = tl.load(top + i * step)
        else:
            word = tl.load(top + i * step, mask=(group * 16 + i < rows) & (pair * 2 < columns), other=0)
        words = words + (word,)
    return words


@triton.jit
def _row(word):
    """A row [4, 8, WARPS, V] in fp32 from words of two columns."""
    low, high = (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), [4, 8, word.shape[2], 2 * word.shape[3]])


@triton.jit
def larger_halves(a, b, ARCH: tl.constexpr):
    """A word of two BF16 magnitudes raised to those of a second word's two numbers; NaN wins."""
    if ARCH == 0:
        b = b & 0x7FFF7FFF  # as integers ordered like magnitudes, NaN above infinity
        return tl.maximum(a & -65536, b & -65536) | tl.maximum(a & 0xFFFF, b & 0xFFFF)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 b; abs.bf16x2 b, $2; max.NaN.bf16x2 $0, $1, b; }",
        "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def largest_row(words, ARCH: tl.constexpr):
    """Largest magnitude of sixteen rows, two columns in a word; NaN if there is one."""
    largest = words[0] & 0x7FFF7FFF
    for i in tl.static_range(1, 16):
        largest = larger_halves(largest, words[i], ARCH)
    return largest


@triton.jit
def largest_column(xs, SIGNS: tl.constexpr, EXACT: tl.constexpr):
    """Largest magnitude of sixteen rows after their transform without its factor.

    Of a + b and a - b, the last stage, the larger magnitude is |a| + |b|, rounding being the same both ways. Where both
    are infinite a NaN is lost: an infinite result must be formed again, EXACT.
    """
    if SIGNS < 0:
        return largest_of(xs)
    if EXACT:
        return largest_of(butterfly(xs, SIGNS))
    ys = butterfly(xs, SIGNS, 3)
    largest = tl.abs(ys[0]) + tl.abs(ys[8])
    for i in tl.static_range(1, 8):
        largest = tl.maximum(largest, tl.abs(ys[i]) + tl.abs(ys[i + 8]), propagate_nan=tl.PropagateNan.ALL)
    return largest


@triton.jit
def _rows16(t, WARPS: tl.constexpr, V: tl.constexpr):
    """A product [8 WARPS V, 64] in the tile's order as sixteen tensors [4, 8, WARPS, V]."""
    t = tl.permute(tl.reshape(t, [V // 2, WARPS, 2, 8, 8, 4, 2]), (5, 3, 1, 0, 2, 4, 6))
    parts = (tl.reshape(t, [4, 8, WARPS, V, 8, 2]),)
    for stage in tl.static_range(4):
        evens = ()
        odds = ()
        for i in tl.static_range(1 << stage):
            even, odd = tl.split(parts[i])
            if stage < 3:
                even = tl.reshape(even, [4, 8, WARPS, V, 4 >> stage, 2])
                odd = tl.reshape(odd, [4, 8, WARPS, V, 4 >> stage, 2])
            evens = evens + (even,)
            odds = odds + (odd,)
        parts = evens + odds  # the bit of the row's number that was split goes on top of those before it
    out = ()
    for i in tl.static_range(16):
        out = out + (tl.reshape(parts[i], [4, 8, WARPS, V]),)
    return out


@triton.jit
def projected(
    xs, u_ptr, basis, group, rows, u_stride, rank, RANK: tl.constexpr, WARPS: tl.constexpr, V: tl.constexpr,
    ARCH: tl.constexpr,
):  # fmt: skip
    """x' in BF16 of a tile whose rows `load_rows` gave: eight words of two rows each, the first one low."""
    n, k = tl.arange(0, 64), tl.arange(0, RANK)[None, :]
    row = (group * 16 + (n // 2 % 4) * 16 + n // 8 * 2 + n % 2)[:, None]
    u = tl.load(u_ptr + (row.to(tl.int64) * u_stride + k), mask=(row < rows) & (k < rank), other=0.0)
    if ARCH == 0:
        taken = tl.dot(widen(basis, ARCH), tl.trans(widen(u, ARCH)))
    else:
        taken = tl.dot(basis, tl.trans(u))
    parts = _rows16(taken, WARPS, V)
    words = ()
    for i in tl.static_range(8):
        low, high = _row(xs[2 * i]) - parts[2 * i], _row(xs[2 * i + 1]) - parts[2 * i + 1]
        words = words + (round_pair(low, high, ARCH),)
    return words


@triton.jit
def place_columns(
    words, codes_ptr, scales_ptr, tensor, start, middle, first, first_group, rows, columns, room,
    SIGNS: tl.constexpr, Q: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, SAFE: tl.constexpr,
    ARCH: tl.constexpr, WARPS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A tile's groups of sixteen rows to the transpose's codes int32 [columns, 2 groups] and scales [columns, groups].

    Decoded, they stay where they are: BF16 [16 groups, columns], `room` elements from one row to the next.
    """
    amax, encode, decode = tensor
    column, group = place_of(first, first_group, WARPS, V, ARCH)
    groups = tl.cdiv(rows, 16)
    if SIGNS >= 0:
        magnitudes, signed = transformed(elements(words), SIGNS, tl.bfloat16, ARCH)
    else:
        magnitudes, signed = block_of_words(words)
    code, scale, m = block_scales(magnitudes, signed, amax, encode, decode, Q, SAFE, ARCH)
    inside = (group < groups) & (column < columns)
    if DECODED:
        pairs = decoded_words(magnitudes, signed, m, scale, start, middle, group * 8, Q, ARCH)
        top = codes_ptr + ((group * 16).to(tl.int64) * room + column)
        step = room.to(tl.int64)
        for i in tl.static_range(16):
            out = top + i * step
            bits = ((pairs[i // 2] >> 16) if i % 2 == 1 else pairs[i // 2]).to(tl.int16)
            store(out, bits.to(tl.bfloat16, bitcast=True), inside, EVEN)
    else:
        low, high = code_words(magnitudes, signed, m, amax, start, middle, group * 8, Q, SAFE, ARCH)
        place = column.to(tl.int64) * groups + group
        out = codes_ptr + (tl.expand_dims(place * 2, 4) + tl.arange(0, 2)[None, None, None, None, :])
        store(out, tl.join(low, high), tl.expand_dims(inside, 4), EVEN)
        store(scales_ptr + place, code.to(tl.uint8), inside, EVEN)
