"""Triton kernels of a linear with a low-rank branch: operands less their part in a subspace, quantized from one read.

x [rows, columns], U [rows, r] (x times an orthonormal basis) and the basis [r, columns], all BF16, give
x' = x - U basis, a product of BF16 accumulated in fp32, subtracted in fp32 and rounded once to BF16. It never reaches
memory: both kernels form it in registers from one tile of x. The branch's narrow operands go beside the decoded ones
they are multiplied with, divided by the tensor scales that their product will be multiplied by.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2
from quatrain.kernels.lowrank_branch_triton import (
    larger_halves,
    largest_column,
    largest_row,
    load_basis,
    load_rows,
    place_columns,
    place_of,
    projected,
)
from quatrain.kernels.nvfp4_block_triton import butterfly, elements, widened
from quatrain.kernels.nvfp4_triton import (
    is_safe,
    load_columns,
    quantize_rows,
    raise_largest,
    tensor_scales,
)
from quatrain.kernels.quantize_triton import architecture, constants, signs
from quatrain.kernels.triton_math import key_state, round_to, row_state

# Warps, adjacent columns of a thread, and tiles of 64 rows that one program walks down, at most.
_AMAX_TILING = (4, 4, 8)
_TILING = (4, 2, 8)
_NARROW_GROUPS = 4
_FACTOR_TILE = 64  # columns of a factor that one program copies

Scale = tuple[Tensor, float]  # amax fp32 [1] of an operand and the constant of its spec


@triton.jit
def _narrowed(t, ARCH: tl.constexpr):
    """fp32 numbers that BF16 holds, as BF16."""
    if ARCH == 0:
        return (t.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return t.to(tl.bfloat16)


@triton.jit
def _largest(
    x_ptr, u_ptr, basis, first, rows, columns, stride, u_stride, rank, SIGNS: tl.constexpr, EVEN: tl.constexpr,
    ARCH: tl.constexpr, RANK: tl.constexpr, WARPS: tl.constexpr, V: tl.constexpr, REPEATS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Largest magnitudes of x, two BF16 numbers in a word, and of x' after its transform, as bits.

    Programs begin with the last rows: the product that made U has just read them, they are cached.
    """
    by_row = tl.zeros([4, 8, WARPS, V // 2], tl.int32)
    by_column = tl.zeros([4, 8, WARPS, V], tl.float32)
    strip = tl.num_programs(1) - 1 - tl.program_id(1)
    for step in range(REPEATS):
        start = (strip * REPEATS + step) * 4
        xs = load_rows(x_ptr, first, start, rows, columns, stride, EVEN, ARCH, WARPS, V)
        words = projected(xs, u_ptr, basis, start, rows, u_stride, rank, RANK, WARPS, V, ARCH)
        by_row = larger_halves(by_row, largest_row(xs, ARCH), ARCH)
        largest = largest_column(elements(words), SIGNS, EXACT)
        by_column = tl.maximum(by_column, largest, propagate_nan=tl.PropagateNan.ALL)
    return by_row, by_column


@triton.jit
def projected_amax_kernel(
    x_ptr, u_ptr, basis_ptr, out_ptr, rows, columns, stride, u_stride, rank, SIGNS: tl.constexpr, EVEN: tl.constexpr,
    ARCH: tl.constexpr, RANK: tl.constexpr, WARPS: tl.constexpr, V: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of x (out[0]) and of x' along its columns, after their transform (out[1])."""
    first = tl.program_id(0) * (8 * WARPS * V)
    basis = load_basis(basis_ptr, first, columns, rank, RANK, WARPS, V)
    by_row, by_column = _largest(
        x_ptr, u_ptr, basis, first, rows, columns, stride, u_stride, rank, SIGNS, EVEN, ARCH, RANK, WARPS, V, REPEATS,
        False,
    )  # fmt: skip
    if SIGNS >= 0:
        infinite = tl.max(by_column.to(tl.int32, bitcast=True) & 0x7FFFFFFF) == 0x7F800000
        if infinite:
            by_row, by_column = _largest(
                x_ptr, u_ptr, basis, first, rows, columns, stride, u_stride, rank, SIGNS, EVEN, ARCH, RANK, WARPS, V,
                REPEATS, True,
            )  # fmt: skip
    halves = tl.maximum(by_row & 0x7FFF0000, by_row << 16)  # neither has its sign set
    out_ptr = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)  # bits of fp32, ordered like the magnitudes
    raise_largest(out_ptr, halves.to(tl.float32, bitcast=True), tl.bfloat16, -1, ARCH)
    raise_largest(out_ptr + 1, by_column, tl.bfloat16, SIGNS, ARCH)


@triton.jit
def _walk(
    x_ptr, u_ptr, basis_ptr, row_codes_ptr, row_scales_ptr, row_amax, row_key_ptr, codes_ptr, scales_ptr, amax,
    key_ptr, rows, columns, stride, u_stride, rank, row_room, room, ROW_Q: tl.constexpr, SIGNS: tl.constexpr,
    Q: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, SAFE: tl.constexpr, ARCH: tl.constexpr,
    RANK: tl.constexpr, WARPS: tl.constexpr, V: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    tensor, row_tensor = tensor_scales(amax, Q), tensor_scales(row_amax, ROW_Q)
    TILE: tl.constexpr = 8 * WARPS * V
    blocks = tl.cdiv(columns, 16)
    place = tl.program_id(0) * TILE
    basis = load_basis(basis_ptr, place, columns, rank, RANK, WARPS, V)
    column, _ = place_of(place, 0, WARPS, V, ARCH)
    start, middle = column, column
    if Q[7]:
        first, second = key_state(key_ptr)
        start, middle = row_state(first, second, column)
    index = tl.arange(0, 4 * TILE)
    block = tl.program_id(0) * (TILE // 16) + index % (TILE // 16)
    row_first, row_second = tl.program_id(0), tl.program_id(0)
    if ROW_Q[7]:
        row_first, row_second = key_state(row_key_ptr)
    for step in range(REPEATS):
        first_group = (tl.program_id(1) * REPEATS + step) * 4
        xs = load_rows(x_ptr, place, first_group, rows, columns, stride, EVEN, ARCH, WARPS, V)
        words = projected(xs, u_ptr, basis, first_group, rows, u_stride, rank, RANK, WARPS, V, ARCH)
        place_columns(
            words, codes_ptr, scales_ptr, tensor, start, middle, place, first_group, rows, columns, room, SIGNS, Q,
            DECODED, EVEN, SAFE, ARCH, WARPS, V,
        )  # fmt: skip
        row = first_group * 16 + index // (TILE // 16)
        row_start, row_middle = row, row
        if ROW_Q[7]:
            row_start, row_middle = row_state(row_first, row_second, row)
        quantize_rows(
            x_ptr, row_codes_ptr, row_scales_ptr, row_tensor, row_start, row_middle, row, block, rows, columns, stride,
            blocks, row_room, -1, ROW_Q, True, True, EVEN, SAFE, ARCH,
        )  # fmt: skip


@triton.jit
def projected_kernel(
    x_ptr, u_ptr, basis_ptr, row_codes_ptr, amax_ptr, row_key_ptr, codes_ptr, scales_ptr, key_ptr, rows, columns,
    stride, u_stride, rank, row_room, room, ROW_Q: tl.constexpr, SIGNS: tl.constexpr, Q: tl.constexpr,
    DECODED: tl.constexpr, EVEN: tl.constexpr, ARCH: tl.constexpr, RANK: tl.constexpr, WARPS: tl.constexpr,
    V: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Quantize x along its rows, decoded, and x' along its columns; a program walks down REPEATS tiles."""
    row_amax, amax = tl.load(amax_ptr), tl.load(amax_ptr + 1)
    if is_safe(amax) & is_safe(row_amax):
        _walk(
            x_ptr, u_ptr, basis_ptr, row_codes_ptr, codes_ptr, row_amax, row_key_ptr, codes_ptr, scales_ptr, amax,
            key_ptr, rows, columns, stride, u_stride, rank, row_room, room, ROW_Q, SIGNS, Q, DECODED, EVEN, True,
            ARCH, RANK, WARPS, V, REPEATS,
        )  # fmt: skip
    else:
        _walk(
            x_ptr, u_ptr, basis_ptr, row_codes_ptr, codes_ptr, row_amax, row_key_ptr, codes_ptr, scales_ptr, amax,
            key_ptr, rows, columns, stride, u_stride, rank, row_room, room, ROW_Q, SIGNS, Q, DECODED, EVEN, False,
            ARCH, RANK, WARPS, V, REPEATS,
        )  # fmt: skip


@triton.jit
def _tensor_scale(amax_ptr, constant):
    """amax / constant; 1 for a tensor of zeros, whose codes are zeros under any scale."""
    amax = tl.load(amax_ptr)
    return tl.where(amax == 0.0, 1.0, tl.div_rn(amax, constant))


@triton.jit
def _inverse(scale, beta):
    factor = tl.div_rn(beta, scale)
    return tl.where(factor > 1.2676506002282294e30, 1.2676506002282294e30, factor)  # 2**100; NaN stays


@triton.jit
def _place_operand(
    u_ptr, rows_ptr, columns_ptr, row_amax_ptr, weight_amax_ptr, column_amax_ptr, kept_amax_ptr, factors_ptr, rows,
    rank, u_stride, rows_stride, columns_stride, beta, row_constant, weight_constant, column_constant, kept_constant,
    SIGNS: tl.constexpr, COLUMNS: tl.constexpr, ARCH: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row_scale = _tensor_scale(row_amax_ptr, row_constant)
    alpha = row_scale * _tensor_scale(weight_amax_ptr, weight_constant)
    factor = _inverse(alpha, beta)
    column_factor = factor
    if COLUMNS:
        column_scale = _tensor_scale(column_amax_ptr, column_constant)
        column_factor = _inverse(column_scale, beta)
    if tl.program_id(0) == 0:
        tl.store(factors_ptr, alpha)
        tl.store(factors_ptr + 1, 0.0)
        if COLUMNS:
            tl.store(factors_ptr + 2, column_scale * _tensor_scale(kept_amax_ptr, kept_constant))
            tl.store(factors_ptr + 3, 0.0)
    k = tl.arange(0, RANK)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    us = widened(load_columns(u_ptr, group, k, rows, rank, u_stride, False), ARCH)
    within = (k < rank)[None, :]
    for i in tl.static_range(16):
        row = group * 16 + i
        place = row.to(tl.int64)[:, None] * rows_stride + k[None, :]
        value = _narrowed(round_to(us[i] * factor, tl.bfloat16, ARCH), ARCH)
        tl.store(rows_ptr + place, value, mask=(row < rows)[:, None] & within)
    if COLUMNS:
        inside = (group * 16 < rows)[:, None] & within
        if SIGNS >= 0:
            us = butterfly(us, SIGNS)
            column_factor = column_factor * 0.25
        for i in tl.static_range(16):
            place = (group * 16 + i).to(tl.int64)[:, None] * columns_stride + k[None, :]
            value = _narrowed(round_to(us[i] * column_factor, tl.bfloat16, ARCH), ARCH)
            tl.store(columns_ptr + place, value, mask=inside)


@triton.jit
def _place_factor(
    factor_ptr, out_ptr, first, columns, rank, out_stride, out_rank_stride, RANK: tl.constexpr, TILE: tl.constexpr
):
    """Columns of a factor [rank, columns] from `first` on to where they are read; either stride may be the 1."""
    k, column = tl.arange(0, RANK)[:, None], (first + tl.arange(0, TILE))[None, :]
    inside = (k < rank) & (column < columns)
    values = tl.load(factor_ptr + k * columns + column, mask=inside)
    tl.store(out_ptr + (column.to(tl.int64) * out_stride + k.to(tl.int64) * out_rank_stride), values, mask=inside)


@triton.jit
def narrow_kernel(
    u_ptr, rows_ptr, columns_ptr, row_amax_ptr, weight_amax_ptr, column_amax_ptr, kept_amax_ptr, factors_ptr,
    factor_ptr, placed_ptr, rows, rank, u_stride, rows_stride, columns_stride, factor_columns, placed_stride,
    placed_rank_stride, beta, row_constant, weight_constant, column_constant, kept_constant, SIGNS: tl.constexpr,
    COLUMNS: tl.constexpr, ARCH: tl.constexpr, RANK: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The branch's operand beside decoded ones, and what products are multiplied by: alpha and 0, as cuBLASLt reads.

    Beside rows: U beta / alpha, alpha the scales of rows and weight. With COLUMNS beside columns too: U transformed as
    they are, times beta over their own scale; then a second alpha, of columns and kept operand. Programs after those
    copy a factor of the branch beside the decoded weight.
    """
    copying = tl.program_id(0) - tl.maximum(tl.cdiv(rows, 16 * GROUPS), 1)
    if copying < 0:
        _place_operand(
            u_ptr, rows_ptr, columns_ptr, row_amax_ptr, weight_amax_ptr, column_amax_ptr, kept_amax_ptr, factors_ptr,
            rows, rank, u_stride, rows_stride, columns_stride, beta, row_constant, weight_constant, column_constant,
            kept_constant, SIGNS, COLUMNS, ARCH, RANK, GROUPS,
        )  # fmt: skip
    else:
        _place_factor(
            factor_ptr, placed_ptr, copying * TILE, factor_columns, rank, placed_stride, placed_rank_stride, RANK, TILE
        )


def _basis_rank(basis: Tensor) -> int:
    return max(16, next_power_of_2(basis.shape[0]))


def _grid(rows: int, columns: int, tiling: tuple[int, int, int]) -> tuple[tuple[int, int], int, bool]:
    """Launch grid, tiles of a program, and whether they cover the tensor exactly."""
    warps, wide, most = tiling
    tile, down = 8 * warps * wide, min(most, ceil_div(rows, 64))
    even = columns % tile == 0 and rows % (64 * down) == 0
    return (ceil_div(columns, tile), ceil_div(rows, 64 * down)), down, even


def projected_amaxes(x: Tensor, u: Tensor, basis: Tensor, column: QuantSpec, zeros: Tensor | None = None) -> Tensor:
    """fp32 [2]: the largest magnitude of x, and of the transpose of x - u basis under the column spec's transform.

    Args:
        x: BF16 [M, K], K even, last stride 1, rows aligned to 4 bytes.
        u: BF16 [M, r], last stride 1.
        basis: BF16 [r, K], contiguous.
        column: spec of the transpose.
        zeros: fp32 [2] of zeros to write to, where a kernel before this one has made them; None for zeros of its own.
    """
    out = torch.zeros(2, dtype=torch.float32, device=x.device) if zeros is None else zeros
    if x.numel():
        (rows, columns), rank = x.shape, basis.shape[0]
        grid, down, even = _grid(rows, columns, _AMAX_TILING)
        arch = architecture(x.device.index)
        launch(
            projected_amax_kernel, grid, x, u, basis, out, rows, columns, x.stride(0), u.stride(0), rank,
            signs(column), even, arch, _basis_rank(basis), *_AMAX_TILING[:2], down,
            num_warps=_AMAX_TILING[0], enable_fp_fusion=False, maxnreg=_amax_registers(arch, rank),
        )  # fmt: skip
    return out


def quantize_projected(
    x: Tensor, u: Tensor, basis: Tensor, specs: tuple[QuantSpec, QuantSpec],
    keys: tuple[Tensor | None, Tensor | None], decoded: Tensor, columns: tuple[Tensor, Tensor | None], amax: Tensor,
) -> None:  # fmt: skip
    """Quantize x along its rows and x - u basis along its columns, from one read.

    Args:
        x: BF16 [M, K], K a multiple of 16, rows aligned to 16 bytes.
        u: BF16 [M, r], last stride 1.
        basis: BF16 [r, K], contiguous.
        specs: of x and of the transpose, 1x16 NVFP4; the first without a transform.
        keys: int64 [2] of a stochastic spec.
        decoded: BF16 [M, >= K], written with code x block scale of x in its first K columns.
        columns: packed codes uint8 [K, M' / 2] and scales E4M3 [K, M' / 16] of the transpose; or BF16 [M', >= K], the
            decoded values where they were, and None. M' is M rounded up to 16.
        amax: fp32 [2], from `projected_amaxes`.
    """
    if x.numel() == 0:
        return
    (rows, width), rank = x.shape, basis.shape[0]
    arch = architecture(x.device.index)
    grid, down, even = _grid(rows, width, _TILING)
    codes, scales = columns
    in_place = scales is None
    launch(
        projected_kernel, grid, x, u, basis, decoded.view(torch.int32), amax, x if keys[0] is None else keys[0],
        codes if in_place else codes.view(torch.int32), x if scales is None else scales.view(torch.uint8),
        x if keys[1] is None else keys[1], rows, width, x.stride(0), u.stride(0), rank, decoded.stride(0) // 16,
        codes.stride(0) if in_place else width, constants(specs[0]), signs(specs[1]), constants(specs[1]), in_place,
        even, arch, _basis_rank(basis), *_TILING[:2], down,
        num_warps=_TILING[0], enable_fp_fusion=False, maxnreg=_registers(specs, arch),
    )  # fmt: skip


def _amax_registers(arch: int, rank: int) -> int | None:
    """Four programs on a multiprocessor; of wide bases its shared memory holds fewer."""
    return None if arch >= 100 or rank > 64 else 128


@functools.lru_cache(maxsize=64)
def _registers(specs: tuple[QuantSpec, QuantSpec], arch: int) -> int | None:
    return None if arch >= 100 or "four-over-six" in (specs[0].scale, specs[1].scale) else 128


def place_narrow(
    u: Tensor, beta: float, rows: Tensor, scales: tuple[Scale, Scale], factor: tuple[Tensor, Tensor],
    columns: tuple[Tensor, QuantSpec, Scale, Scale] | None = None,
) -> Tensor:  # fmt: skip
    """Write both of the branch's operands beside decoded ones; returns (alpha, 0) of their product for cuBLASLt.

    Args:
        u: BF16 [M, r], last stride 1.
        beta: what the branch is multiplied by.
        rows: BF16 [M, r], any stride of rows: u beta / alpha.
        scales: of what `rows` stands beside and of the other operand; alpha is their product.
        factor: BF16 [>= r, n], contiguous, whose first r rows are copied, and where they go: BF16 [r, n], any strides.
        columns: BF16 [M', r], any stride of rows, the spec by whose transform u is turned along M, and the scales of
            what it stands beside and of the other operand.

    Returns:
        fp32 [2], with `columns` [4].
    """
    (tokens, rank), device = u.shape, u.device
    factors = torch.empty(2 if columns is None else 4, dtype=torch.float32, device=device)
    (row_amax, row_constant), (weight_amax, weight_constant) = scales
    beside, spec, (amax, constant), (kept_amax, kept_constant) = columns or (rows, None, *scales)
    groups = ceil_div(tokens, 16)
    count = min(_NARROW_GROUPS, next_power_of_2(groups))
    source, placed = factor
    grid = max(1, ceil_div(groups, count)) + ceil_div(source.shape[1], _FACTOR_TILE)
    launch(
        narrow_kernel, (grid,), u, rows, beside, row_amax, weight_amax, amax, kept_amax, factors, source, placed,
        tokens, rank, u.stride(0), rows.stride(0), beside.stride(0), source.shape[1], placed.stride(1),
        placed.stride(0), beta, row_constant, weight_constant, constant, kept_constant, signs(spec),
        columns is not None, architecture(device.index), max(16, next_power_of_2(rank)), count, _FACTOR_TILE,
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return factors
