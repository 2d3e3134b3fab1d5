"""Triton kernels for NVFP4 in 1x16 blocks: amax, and quantization along rows, along columns, or both from one read."""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.nvfp4_block_triton import (
    block_of,
    block_of_words,
    block_scales,
    butterfly,
    code_words,
    decoded_words,
    elements,
    paired,
    transformed,
    widened,
)
from quatrain.kernels.triton_math import encode_scale, join4, key_state, round_to, row_state, split4, widen


@triton.jit
def _load_row_words(x_ptr, place, inside, EVEN: tl.constexpr):
    """Eight words of two BF16 numbers for each block, from the place of its first element."""
    word_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words = ()
    for i in tl.static_range(2):
        pointers = word_ptr + (place // 2)[:, None] + (tl.arange(0, 4)[None, :] + 4 * i)
        words = words + split4(tl.load(pointers) if EVEN else tl.load(pointers, mask=inside[:, None], other=0))
    return words


@triton.jit
def _load_rows(x_ptr, place, inside, column, columns, ARCH: tl.constexpr):
    """Sixteen fp32 elements of each block, zero outside the tensor; any dtype and alignment."""
    xs = ()
    for i in tl.static_range(4):
        quad = tl.arange(0, 4)[None, :] + 4 * i
        mask = inside[:, None] & (column[:, None] + quad < columns)
        xs = xs + split4(widen(tl.load(x_ptr + place[:, None] + quad, mask=mask, other=0.0), ARCH))
    return xs


@triton.jit
def load_columns(x_ptr, group, column, rows, columns, stride, EVEN: tl.constexpr):
    """Sixteen tensors [groups, columns], row i of each group, zero outside the tensor, in the input's dtype."""
    out = ()
    for i in tl.static_range(16):
        row = group * 16 + i
        pointers = x_ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
        if EVEN:
            x = tl.load(pointers)
        else:
            x = tl.load(pointers, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
        out = out + (x,)
    return out


@triton.jit
def store(pointers, values, inside, EVEN: tl.constexpr):
    """Without a mask where a tile is whole."""
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def quantize_rows(
    x_ptr, codes_ptr, scales_ptr, tensor, start, middle, row, block, rows, columns, stride, blocks, room,
    SIGNS: tl.constexpr, Q: tl.constexpr, DECODED: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    SAFE: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Blocks (row, block) of x [rows, columns] to int32 codes [rows, 2 blocks] (or BF16 pairs) and scales.

    From one row of the codes to the next it is as far as `room` blocks.
    """
    amax, encode, decode = tensor
    inside = (row < rows) & (block < blocks)
    source = row.to(tl.int64) * stride + block * 16
    if WORDS:
        words = _load_row_words(x_ptr, source, inside, EVEN)
        if SIGNS >= 0:
            magnitudes, signed = transformed(elements(words), SIGNS, tl.bfloat16, ARCH)
        else:
            magnitudes, signed = block_of_words(words)
    else:
        xs = _load_rows(x_ptr, source, inside, block * 16, columns, ARCH)
        if SIGNS >= 0:
            magnitudes, signed = transformed(xs, SIGNS, x_ptr.dtype.element_ty, ARCH)
        else:
            magnitudes, signed = block_of(xs)
    code, scale, m = block_scales(magnitudes, signed, amax, encode, decode, Q, SAFE, ARCH)
    place = row.to(tl.int64) * room + block
    if DECODED:
        pairs = decoded_words(magnitudes, signed, m, scale, start, middle, block * 8, Q, ARCH)
        for i in tl.static_range(2):
            out = codes_ptr + (place * 8 + 4 * i)[:, None] + tl.arange(0, 4)[None, :]
            four = join4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3])
            store(out, four, inside[:, None], EVEN)
    else:
        low, high = code_words(magnitudes, signed, m, amax, start, middle, block * 8, Q, SAFE, ARCH)
        out = codes_ptr + (place * 2)[:, None] + tl.arange(0, 2)[None, :]
        store(out, tl.join(low, high), inside[:, None], EVEN)
        store(scales_ptr + place, code.to(tl.uint8), inside, EVEN)


@triton.jit
def quantize_columns(
    xs, codes_ptr, scales_ptr, tensor, start, middle, first_group, column, rows, columns, room,
    SIGNS: tl.constexpr, Q: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, SAFE: tl.constexpr,
    ARCH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Groups of sixteen rows to the transpose's codes int32 [columns, 2 groups] and scales [columns, groups].

    xs: row i of each group, sixteen tensors [groups, columns]. Decoded, they stay where they are: BF16
    [16 groups, columns], `room` elements from one row to the next.
    """
    amax, encode, decode = tensor
    DTYPE: tl.constexpr = xs[0].dtype
    group = first_group + tl.arange(0, GROUPS)
    if SIGNS >= 0:
        magnitudes, signed = transformed(widened(xs, ARCH), SIGNS, DTYPE, ARCH)
    elif DTYPE == tl.bfloat16:
        magnitudes, signed = block_of_words(paired(xs))
    else:
        magnitudes, signed = block_of(widened(xs, ARCH))
    code, scale, m = block_scales(magnitudes, signed, amax, encode, decode, Q, SAFE, ARCH)
    groups = tl.cdiv(rows, 16)
    pair = (group * 8)[:, None]
    start, middle = start[None, :], middle[None, :]
    if DECODED:
        inside = (group < groups)[:, None] & (column < columns)[None, :]
        pairs = decoded_words(magnitudes, signed, m, scale, start, middle, pair, Q, ARCH)
        for i in tl.static_range(16):
            out = codes_ptr + (group * 16 + i).to(tl.int64)[:, None] * room + column[None, :]
            bits = ((pairs[i // 2] >> 16) if i % 2 == 1 else pairs[i // 2]).to(tl.int16)
            store(out, bits.to(tl.bfloat16, bitcast=True), inside, EVEN)
    else:
        low, high = code_words(magnitudes, signed, m, amax, start, middle, pair, Q, SAFE, ARCH)
        words = tl.reshape(tl.permute(tl.join(low, high), (1, 0, 2)), [column.shape[0], 2 * GROUPS])
        word = first_group * 2 + tl.arange(0, 2 * GROUPS)
        out = codes_ptr + column.to(tl.int64)[:, None] * (groups * 2) + word[None, :]
        store(out, words, (column < columns)[:, None] & (word < groups * 2)[None, :], EVEN)
        out = scales_ptr + column.to(tl.int64)[:, None] * groups + group[None, :]
        store(out, tl.trans(code).to(tl.uint8), (column < columns)[:, None] & (group < groups)[None, :], EVEN)


@triton.jit
def tensor_scales(amax, Q: tl.constexpr):
    """amax, encode scale and decode scale of a tensor."""
    encode = encode_scale(amax, Q[5])
    return amax, encode, tl.div_rn(1.0, encode)


@triton.jit
def is_safe(amax):
    """Whether no product, quotient or remainder can leave the range of fp32."""
    return (amax > 1e-25) & (amax < 1e34)


@triton.jit
def _walk_rows(
    x_ptr, codes_ptr, scales_ptr, amax, key_ptr, rows, columns, stride,
    SIGNS: tl.constexpr, Q: tl.constexpr, DECODED: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    SAFE: tl.constexpr, ARCH: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_BLOCKS: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    tensor = tensor_scales(amax, Q)
    blocks = tl.cdiv(columns, 16)
    index = tl.arange(0, TILE_ROWS * TILE_BLOCKS)
    row = tl.program_id(0) * TILE_ROWS + index // TILE_BLOCKS
    start, middle = row, row
    if Q[7]:
        first, second = key_state(key_ptr)
        start, middle = row_state(first, second, row)
    for step in range(REPEATS):
        block = (tl.program_id(1) * REPEATS + step) * TILE_BLOCKS + index % TILE_BLOCKS
        quantize_rows(
            x_ptr, codes_ptr, scales_ptr, tensor, start, middle, row, block, rows, columns, stride, blocks, blocks,
            SIGNS, Q, DECODED, WORDS, EVEN, SAFE, ARCH,
        )  # fmt: skip


@triton.jit
def rows_kernel(
    x_ptr, codes_ptr, scales_ptr, amax_ptr, key_ptr, rows, columns, stride,
    SIGNS: tl.constexpr, Q: tl.constexpr, DECODED: tl.constexpr, WORDS: tl.constexpr, EVEN: tl.constexpr,
    ARCH: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_BLOCKS: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Quantize along rows: a program walks through REPEATS tiles of TILE_ROWS rows and TILE_BLOCKS blocks."""
    amax = tl.load(amax_ptr)
    if is_safe(amax):
        _walk_rows(
            x_ptr, codes_ptr, scales_ptr, amax, key_ptr, rows, columns, stride,
            SIGNS, Q, DECODED, WORDS, EVEN, True, ARCH, TILE_ROWS, TILE_BLOCKS, REPEATS,
        )  # fmt: skip
    else:
        _walk_rows(
            x_ptr, codes_ptr, scales_ptr, amax, key_ptr, rows, columns, stride,
            SIGNS, Q, DECODED, WORDS, EVEN, False, ARCH, TILE_ROWS, TILE_BLOCKS, REPEATS,
        )  # fmt: skip


@triton.jit
def _walk_tiles(
    x_ptr, row_codes_ptr, row_scales_ptr, row_amax, row_key_ptr, codes_ptr, scales_ptr, amax, key_ptr,
    rows, columns, stride, ROW_SIGNS: tl.constexpr, ROW_Q: tl.constexpr, ROW_DECODED: tl.constexpr,
    WORDS: tl.constexpr, SIGNS: tl.constexpr, Q: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr,
    SAFE: tl.constexpr, ARCH: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, REPEATS: tl.constexpr,
    BOTH: tl.constexpr,
):  # fmt: skip
    tensor, row_tensor = tensor_scales(amax, Q), tensor_scales(row_amax, ROW_Q)
    blocks = tl.cdiv(columns, 16)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    start, middle = column, column
    if Q[7]:
        first, second = key_state(key_ptr)
        start, middle = row_state(first, second, column)
    index = tl.arange(0, GROUPS * TILE)
    block = tl.program_id(0) * (TILE // 16) + index % (TILE // 16)
    row_first, row_second = tl.program_id(0), tl.program_id(0)
    if BOTH and ROW_Q[7]:
        row_first, row_second = key_state(row_key_ptr)
    for step in range(REPEATS):
        group = (tl.program_id(1) * REPEATS + step) * GROUPS
        xs = load_columns(x_ptr, group + tl.arange(0, GROUPS), column, rows, columns, stride, EVEN)
        quantize_columns(
            xs, codes_ptr, scales_ptr, tensor, start, middle, group, column, rows, columns, columns,
            SIGNS, Q, DECODED, EVEN, SAFE, ARCH, GROUPS,
        )  # fmt: skip
        if BOTH:
            row = group * 16 + index // (TILE // 16)
            row_start, row_middle = row, row
            if ROW_Q[7]:
                row_start, row_middle = row_state(row_first, row_second, row)
            quantize_rows(
                x_ptr, row_codes_ptr, row_scales_ptr, row_tensor, row_start, row_middle, row, block,
                rows, columns, stride, blocks, blocks, ROW_SIGNS, ROW_Q, ROW_DECODED, WORDS, EVEN, SAFE, ARCH,
            )  # fmt: skip


@triton.jit
def tiles_kernel(
    x_ptr, row_codes_ptr, row_scales_ptr, row_amax_ptr, row_key_ptr,
    column_codes_ptr, column_scales_ptr, column_amax_ptr, column_key_ptr, rows, columns, stride,
    ROW_SIGNS: tl.constexpr, ROW_Q: tl.constexpr, ROW_DECODED: tl.constexpr, WORDS: tl.constexpr,
    SIGNS: tl.constexpr, Q: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, ARCH: tl.constexpr,
    GROUPS: tl.constexpr, TILE: tl.constexpr, REPEATS: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Quantize along columns, and with BOTH along rows too: the tile's second load is served by the cache.

    A program walks down REPEATS tiles of GROUPS groups of sixteen rows and TILE columns.
    """
    amax, row_amax = tl.load(column_amax_ptr), tl.load(row_amax_ptr)
    if is_safe(amax) & is_safe(row_amax):
        _walk_tiles(
            x_ptr, row_codes_ptr, row_scales_ptr, row_amax, row_key_ptr, column_codes_ptr, column_scales_ptr, amax,
            column_key_ptr, rows, columns, stride, ROW_SIGNS, ROW_Q, ROW_DECODED, WORDS, SIGNS, Q, DECODED, EVEN,
            True, ARCH, GROUPS, TILE, REPEATS, BOTH,
        )  # fmt: skip
    else:
        _walk_tiles(
            x_ptr, row_codes_ptr, row_scales_ptr, row_amax, row_key_ptr, column_codes_ptr, column_scales_ptr, amax,
            column_key_ptr, rows, columns, stride, ROW_SIGNS, ROW_Q, ROW_DECODED, WORDS, SIGNS, Q, DECODED, EVEN,
            False, ARCH, GROUPS, TILE, REPEATS, BOTH,
        )  # fmt: skip


@triton.jit
def largest_of(xs):
    """Largest magnitude, NaN if there is one."""
    largest = tl.abs(xs[0])
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, tl.abs(xs[i]), propagate_nan=tl.PropagateNan.ALL)
    return largest


@triton.jit
def raise_largest(out_ptr, largest, DTYPE: tl.constexpr, SIGNS: tl.constexpr, ARCH: tl.constexpr):
    """Raise a maximum kept as the bits of an fp32 number; rounding is monotonic, so the maximum is rounded alone.

    As integers the bits are ordered like the magnitudes, NaN above infinity.
    """
    bits = tl.max(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if SIGNS >= 0:
        value = round_to(bits.to(tl.float32, bitcast=True) * 0.25, DTYPE, ARCH)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(out_ptr, bits, sem="relaxed")


@triton.jit
def amax_kernel(
    x_ptr, out_ptr, rows, columns, stride, ROW_SIGNS: tl.constexpr, SIGNS: tl.constexpr,
    WORDS: tl.constexpr, EVEN: tl.constexpr, ARCH: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
    REPEATS: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of x along rows (out[0]) and of its transpose (out[1]), each after its own transform."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.arange(0, GROUPS * TILE)
    by_row = tl.zeros([GROUPS, TILE], tl.float32)
    by_column = tl.zeros([GROUPS, TILE], tl.float32)
    by_block = tl.zeros([GROUPS * TILE], tl.float32)
    for step in range(REPEATS):
        first = (tl.program_id(1) * REPEATS + step) * GROUPS
        if COLUMN or ROW_SIGNS < 0:
            group = first + tl.arange(0, GROUPS)
            xs = widened(load_columns(x_ptr, group, column, rows, columns, stride, EVEN), ARCH)
            if ROW and ROW_SIGNS < 0:
                by_row = tl.maximum(by_row, largest_of(xs), propagate_nan=tl.PropagateNan.ALL)
            if COLUMN:
                if SIGNS >= 0:
                    xs = butterfly(xs, SIGNS)
                by_column = tl.maximum(by_column, largest_of(xs), propagate_nan=tl.PropagateNan.ALL)
        if ROW and ROW_SIGNS >= 0:
            row = first * 16 + index // (TILE // 16)
            place = tl.program_id(0) * TILE + index % (TILE // 16) * 16
            inside = (row < rows) & (place < columns)
            source = row.to(tl.int64) * stride + place
            if WORDS:
                xs = elements(_load_row_words(x_ptr, source, inside, EVEN))
            else:
                xs = _load_rows(x_ptr, source, inside, place, columns, ARCH)
            by_block = tl.maximum(by_block, largest_of(butterfly(xs, ROW_SIGNS)), propagate_nan=tl.PropagateNan.ALL)
    if ROW and ROW_SIGNS < 0:
        raise_largest(out_ptr, by_row, DTYPE, -1, ARCH)
    if ROW and ROW_SIGNS >= 0:
        raise_largest(out_ptr, by_block, DTYPE, ROW_SIGNS, ARCH)
    if COLUMN:
        raise_largest(out_ptr + 1, by_column, DTYPE, SIGNS, ARCH)
