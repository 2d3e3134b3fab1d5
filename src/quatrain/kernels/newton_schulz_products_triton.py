"""The three products of a Newton-Schulz step in Triton, for batches of matrices whose sides are multiples of a tile.

A product whose result is symmetric is formed on and below the diagonal only and mirrored. A program stores its tile in
BF16 and, after a barrier, reads it back from the cache to quantize it along rows and columns: no pass of its own over
the matrix, and while one program of a multiprocessor does arithmetic, another one multiplies.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.newton_schulz_block_triton import columns_of_tile, rows_of_tile
from quatrain.kernels.triton_math import round_to, widen


@triton.jit
def _operand(x, ARCH: tl.constexpr):
    """What `tl.dot` takes: the interpreter would multiply the bits of BF16 numbers."""
    return widen(x, ARCH) if ARCH == 0 else x


@triton.jit
def _bf16(x, ARCH: tl.constexpr):
    """fp32 rounded to BF16."""
    return round_to(x, tl.bfloat16, ARCH).to(tl.bfloat16) if ARCH == 0 else x.to(tl.bfloat16)


@triton.jit
def _triangle(index):
    """Row and column of a tile on or below the diagonal, counted along rows."""
    i = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > index, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= index, i + 1, i)
    return i, index - i * (i + 1) // 2


@triton.jit
def _finish(
    total, row, column, on_diagonal, out, gram, diagonal, polynomial, b, c, m, POLYNOMIAL: tl.constexpr,
    SPLIT: tl.constexpr, QUANTIZED: tl.constexpr, ARCH: tl.constexpr,
):  # fmt: skip
    """Rows of a tile from its sums to what is stored, and without QUANTIZED its mirror image; all of one matrix."""
    at = row[:, None] * m + column[None, :]
    first = tl.min(column, 0)
    crossed = (row >= first) & (row < first + column.shape[0])  # rows that meet the diagonal inside this tile
    if SPLIT:
        d, e = tl.zeros((row.shape[0],), tl.float32), tl.zeros((column.shape[0],), tl.float32)
        if POLYNOMIAL:
            d, e = tl.load(diagonal + row), tl.load(diagonal + column)
        if on_diagonal:
            found = tl.sum(tl.where(row[:, None] == column[None, :], total, 0.0), 1)
            if POLYNOMIAL:
                tl.store(polynomial + row, d * b + (d * d + found) * c, mask=crossed)
            else:
                tl.store(diagonal + row, found, mask=crossed)
    if POLYNOMIAL:
        stored = widen(tl.load(gram + at), ARCH)
        if SPLIT:
            total = ((d[:, None] + e[None, :]) * stored + total) * c + stored * b
        else:
            total = stored * b + total * c
        tl.debug_barrier()  # out may be gram
    rounded = _bf16(total, ARCH)
    tl.store(out + at, rounded)
    if SPLIT:
        tl.debug_barrier()
        if on_diagonal:
            tl.store(out + (row * m + row), tl.zeros((row.shape[0],), tl.bfloat16), mask=crossed)
    if not QUANTIZED:  # noqa: SIM102 (decided when compiling)
        if not on_diagonal:
            tl.store(out + (column[:, None] * m + row[None, :]), tl.trans(rounded))


@triton.jit
def _symmetric_tile(
    x, out, gram, diagonal, polynomial, first_row, first_column, on_diagonal, b, c, m, length,
    POLYNOMIAL: tl.constexpr, SPLIT: tl.constexpr, QUANTIZED: tl.constexpr, ARCH: tl.constexpr, ROWS: tl.constexpr,
    HALVES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """ROWS x TILE of x x^T, or of the polynomial, of one matrix. HALVES: finished one half after the other."""
    HEIGHT: tl.constexpr = ROWS // 2 if HALVES else ROWS
    row, column, k = first_row + tl.arange(0, HEIGHT), first_column + tl.arange(0, TILE), tl.arange(0, STEP)
    left, right = x + (row[:, None] * length + k[None, :]), x + (column[:, None] * length + k[None, :])
    total, lower = tl.zeros((HEIGHT, TILE), tl.float32), tl.zeros((HEIGHT, TILE), tl.float32)
    for _ in range(0, length, STEP):
        shared = tl.trans(_operand(tl.load(right), ARCH))
        total = tl.dot(_operand(tl.load(left), ARCH), shared, total)
        if HALVES:
            lower = tl.dot(_operand(tl.load(left + HEIGHT * length), ARCH), shared, lower)
        left += STEP
        right += STEP
    _finish(total, row, column, on_diagonal, out, gram, diagonal, polynomial, b, c, m, POLYNOMIAL, SPLIT, QUANTIZED,
            ARCH)  # fmt: skip
    if HALVES:
        _finish(lower, row + HEIGHT, column, on_diagonal, out, gram, diagonal, polynomial, b, c, m, POLYNOMIAL, SPLIT,
                QUANTIZED, ARCH)  # fmt: skip


@triton.jit
def symmetric_kernel(
    x_ptr,  # BF16 [k, m, length], the operand
    out_ptr,  # BF16 [k, m, m]; with NVFP4 operands only tiles on and below the diagonal are written
    operand_ptr,  # BF16 [k, m, m], what the next product reads, with NVFP4 operands
    gram_ptr,  # BF16 [k, m, m], A, for the polynomial; may be out_ptr
    diagonal_ptr,  # fp32 [k, m], diagonal of A
    polynomial_ptr,  # fp32 [k, m], diagonal of the polynomial
    b,
    c,
    m,
    length,
    whole,  # tiles that one program each forms, with PARTED
    POLYNOMIAL: tl.constexpr,
    SPLIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    Q: tl.constexpr,
    ARCH: tl.constexpr,
    TILE: tl.constexpr,
    TALL: tl.constexpr,  # rows of a tile over its columns; 1 with QUANTIZED
    HALVES: tl.constexpr,  # upper and lower rows of a tall tile are finished one after the other: fewer registers
    PARTED: tl.constexpr,  # tiles after `whole` are divided among TALL programs
    STEP: tl.constexpr,
    LANES: tl.constexpr,
):
    """One tile of X X^T, or of b A + c A A^T; its mirror image; the operand that both become."""
    ROWS: tl.constexpr = TILE * TALL
    index = tl.program_id(0)
    part = 0
    if PARTED:
        beyond = tl.maximum(index - whole, 0)
        index = tl.minimum(index, whole) + beyond // TALL
        part = beyond % TALL
    side = m // ROWS
    tiles = TALL * side * (side + 1) // 2
    batch = (index // tiles).to(tl.int64)
    i, square = _triangle(index % tiles // TALL)  # of blocks of ROWS x ROWS
    j = square * TALL + index % TALL
    x, out, gram = x_ptr + batch * m * length, out_ptr + batch * m * m, gram_ptr + batch * m * m
    diagonal, polynomial = diagonal_ptr + batch * m, polynomial_ptr + batch * m
    if PARTED and tl.program_id(0) >= whole:
        _symmetric_tile(x, out, gram, diagonal, polynomial, i * ROWS + part * TILE, j * TILE, i == square, b, c, m,
                        length, POLYNOMIAL, SPLIT, QUANTIZED, ARCH, TILE, False, TILE, STEP)  # fmt: skip
    else:
        _symmetric_tile(x, out, gram, diagonal, polynomial, i * ROWS, j * TILE, i == square, b, c, m, length,
                        POLYNOMIAL, SPLIT, QUANTIZED, ARCH, ROWS, HALVES, TILE, STEP)  # fmt: skip
    if QUANTIZED:
        tl.debug_barrier()
        here = i * TILE * m + j * TILE
        operand = operand_ptr + batch * m * m
        rows_of_tile(out + here, operand + here, m, TILE, TILE, LANES, Q, ARCH)
        if i != j:
            mirrored = j * TILE * m + i * TILE
            columns_of_tile(out + here, operand + mirrored, m, m, True, TILE, TILE, LANES, Q, ARCH)


@triton.jit
def update_kernel(
    b_ptr,  # BF16 [k, m, m], the operand B
    columns_ptr,  # BF16 [k, m, n], X quantized along columns
    x_ptr,  # BF16 [k, m, n]
    out_ptr,  # BF16 [k, m, n], the new X; may be x_ptr where that is not columns_ptr
    rows_out_ptr,  # BF16 [k, m, n], the new X quantized along rows
    columns_out_ptr,  # and along columns
    diagonal_ptr,  # fp32 [k, m], diagonal of B
    a,
    m,
    n,
    SPLIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    Q: tl.constexpr,
    ARCH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """One tile of a X + B X, and the operands that it becomes."""
    tiles_m, tiles_n = m // TILE_M, n // TILE_N
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    index = tl.program_id(0) % (tiles_m * tiles_n)
    group = index // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = index % (GROUP * tiles_n)
    i, j = group * GROUP + within % height, within // height
    row, column = i * TILE_M + tl.arange(0, TILE_M), j * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, STEP)
    left = b_ptr + batch * m * m + (row[:, None] * m + k[None, :])
    right = columns_ptr + batch * m * n + (k[:, None] * n + column[None, :])
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for _ in range(0, m, STEP):
        total = tl.dot(_operand(tl.load(left), ARCH), _operand(tl.load(right), ARCH), total)
        left += STEP
        right += STEP * n
    at = batch * m * n + (row[:, None] * n + column[None, :])
    x = widen(tl.load(x_ptr + at), ARCH)
    if SPLIT:
        total = (tl.load(diagonal_ptr + batch * m + row) + a)[:, None] * x + total
    else:
        total = x * a + total
    tl.debug_barrier()
    tl.store(out_ptr + at, _bf16(total, ARCH))
    if QUANTIZED:
        tl.debug_barrier()
        here = batch * m * n + (i * TILE_M * n + j * TILE_N)
        rows_of_tile(out_ptr + here, rows_out_ptr + here, n, TILE_M, TILE_N, LANES, Q, ARCH)
        columns_of_tile(out_ptr + here, columns_out_ptr + here, n, n, False, TILE_M, TILE_N, LANES, Q, ARCH)


@triton.jit
def operands_kernel(
    x_ptr,  # BF16 [k m, n]
    product_ptr,  # fp32 [k m, n]: B X, with ADD
    rows_out_ptr,  # BF16 [k m, n]
    columns_out_ptr,  # BF16 [k m, n]
    diagonal_ptr,  # fp32 [k m]
    a,
    n,
    ADD: tl.constexpr,
    QUANTIZED: tl.constexpr,
    COLUMNS: tl.constexpr,
    Q: tl.constexpr,
    ARCH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANES: tl.constexpr,
):
    """One tile of X quantized along rows, and along columns with COLUMNS; with ADD, (a + d) X + product becomes X."""
    tiles_n = n // TILE_N
    i, j = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    here = i.to(tl.int64) * TILE_M * n + j * TILE_N
    if ADD:
        row = tl.arange(0, TILE_M)
        at = here + (row[:, None] * n + tl.arange(0, TILE_N)[None, :])
        scale = tl.load(diagonal_ptr + i.to(tl.int64) * TILE_M + row) + a
        total = scale[:, None] * widen(tl.load(x_ptr + at), ARCH) + tl.load(product_ptr + at)
        tl.debug_barrier()
        tl.store(x_ptr + at, _bf16(total, ARCH))
        tl.debug_barrier()
    if QUANTIZED:
        rows_of_tile(x_ptr + here, rows_out_ptr + here, n, TILE_M, TILE_N, LANES, Q, ARCH)
        if COLUMNS:
            columns_of_tile(x_ptr + here, columns_out_ptr + here, n, n, False, TILE_M, TILE_N, LANES, Q, ARCH)
