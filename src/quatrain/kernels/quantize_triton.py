"""Triton twin of quantization, host side: which kernel runs, with which constants, on which grid."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import triton
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels import nvfp4_triton
from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2

Parts = tuple[Tensor, Tensor | None, Tensor]
_RULES = {"to-6": 0, "to-4": 1, "four-over-six": 2}
_ERRORS = {"mse": 0, "mae": 1, "absmax": 2}
_ROW_TILE = 32  # blocks of one step along rows: one for each thread of a warp
_REPEATS = 8  # steps of one program along rows, at most
_GROUPS, _TILE = 4, 64  # a tile of 64 rows and 64 columns: two blocks each way for each thread of four warps
_DOWN = 4  # tiles that one program walks down, at most
_AMAX_GROUPS = 8
_LONGEST = 16_000_000  # rows or columns: a grid's second dimension ends at 65,535


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in its interpreter."""
    return not isinstance(nvfp4_triton.rows_kernel, triton.runtime.JITFunction)


@functools.cache
def architecture(device: int | None) -> int:
    """Compute capability times ten; 0 in the interpreter."""
    if interpreted():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_fast(x: Tensor, spec: QuantSpec) -> bool:
    """Whether the kernels of `nvfp4_triton` serve this spec, dtype and shape (their grids have two dimensions)."""
    return (
        max(x.shape) < _LONGEST
        and spec.format == "nvfp4"
        and spec.block_shape == (1, 16)
        and spec.scale in _RULES
        and (spec.hadamard is None or spec.hadamard.size == 16)
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


@functools.lru_cache(maxsize=1024)
def constants(spec: QuantSpec) -> tuple[float | int, ...]:
    """What the kernels call Q: rule, error, scales round up, target, 1 / target, constant, 1 / constant, stochastic."""
    target, constant = np.float32(spec.element_max), np.float32(spec.constant)
    return (
        _RULES[spec.scale or "to-6"],
        _ERRORS[spec.error],
        int(spec.scale_rounding == "up"),
        float(target),
        float(np.float32(1) / target),
        float(constant),
        float(np.float32(1) / constant),
        int(spec.stochastic),
    )


@functools.lru_cache(maxsize=1024)
def signs(spec: QuantSpec | None) -> int:
    """Signs of the transform as a bit mask (1 is -1); -1 without one."""
    if spec is None or spec.hadamard is None:
        return -1
    return sum(1 << i for i, sign in enumerate(spec.hadamard.sign_vector()) if sign < 0)


def amaxes(x: Tensor, row: QuantSpec | None, column: QuantSpec | None) -> Tensor:
    """fp32 [2]: the largest magnitude of x [M, K] under the row spec's transform and of x.t() under the column spec's.

    One read of x. NaN and infinity come through.
    """
    out = torch.zeros(2, dtype=torch.int32, device=x.device)
    rows, columns = x.shape
    if x.numel():
        count, down = _tile(rows, _AMAX_GROUPS)
        even = columns % _TILE == 0 and rows % (16 * count * down) == 0
        grid = (ceil_div(columns, _TILE), ceil_div(rows, 16 * count * down))
        launch(
            nvfp4_triton.amax_kernel, grid, x, out, rows, columns, x.stride(0), signs(row), signs(column), _in_words(x),
            even, architecture(x.device.index), count, _TILE, down, row is not None, column is not None,
            num_warps=count, enable_fp_fusion=False,
        )  # fmt: skip
    return out.view(torch.float32)


def quantize_pair(
    x: Tensor,
    row: QuantSpec | None,
    column: QuantSpec | None,
    row_key: Tensor | None = None,
    column_key: Tensor | None = None,
    amax: Tensor | None = None,
    decoded: tuple[bool, bool] = (False, False),
) -> tuple[Parts | None, Parts | None]:
    """Quantize x along its rows, its transpose along x's columns, or both from one read of x.

    Args:
        x: [M, K], last stride 1.
        row: spec of x; None for columns alone.
        column: spec of x.t(); None for rows alone.
        row_key: int64 [2], for a stochastic row spec.
        column_key: the same for the column spec.
        amax: fp32 [2] as from `amaxes`, which runs when it is None.
        decoded: for rows and columns: BF16 code x block scale in place of codes (then there are no scales), [M, K']
            for rows and, where they were, [M', K] for columns; K' and M' count whole blocks.

    Returns:
        (codes, scales, amax) of each, as `quantize_parts` lays them out; None where nothing was asked.
    """
    amax = amaxes(x, row, column) if amax is None else amax
    row_parts = None if row is None else _empty(x.shape[0], x.shape[1], amax[:1], decoded[0], x.device)
    column_parts = None if column is None else _empty(x.shape[1], x.shape[0], amax[1:], decoded[1], x.device)
    if column_parts is not None and decoded[1]:
        column_parts = (column_parts[0].view(-1, x.shape[1]), None, amax[1:])
    if x.numel() == 0:
        return row_parts, column_parts
    if column is None and row is not None and row_parts is not None:
        _launch_rows(x, row, row_key, row_parts, decoded[0])
    elif column is not None and column_parts is not None:
        _launch_tiles(x, row, column, row_key, column_key, row_parts, column_parts, decoded)
    return row_parts, column_parts


def _empty(rows: int, columns: int, amax: Tensor, decoded: bool, device: torch.device) -> Parts:
    blocks = -(-columns // 16)
    if decoded:
        return torch.empty(rows, blocks * 16, dtype=torch.bfloat16, device=device), None, amax
    codes = torch.empty(rows, blocks * 8, dtype=torch.uint8, device=device)
    return codes, torch.empty(rows, blocks, dtype=torch.float8_e4m3fn, device=device), amax


def _pointers(parts: Parts | None, x: Tensor, words: bool = True) -> tuple[Tensor, Tensor]:
    """Codes (as int32 words, or the BF16 they are) and scales as bytes; x stands for what is not there."""
    if parts is None:
        return x, x
    codes, scales, _ = parts
    return codes.view(torch.int32) if words else codes, x if scales is None else scales.view(torch.uint8)


def _in_words(x: Tensor) -> bool:
    """Whether every block of a row is eight aligned words of two BF16 numbers."""
    aligned = x.shape[1] % 16 == 0 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0
    return x.dtype == torch.bfloat16 and aligned


def _launch_rows(x: Tensor, spec: QuantSpec, key: Tensor | None, parts: Parts, decoded: bool) -> None:
    rows, columns = x.shape
    blocks = ceil_div(columns, 16)
    tile = min(_ROW_TILE, next_power_of_2(blocks))
    tile_rows = _ROW_TILE // tile
    repeats = min(_REPEATS, ceil_div(blocks, tile))
    even = columns % 16 == 0 and blocks % (tile * repeats) == 0 and rows % tile_rows == 0
    grid = (ceil_div(rows, tile_rows), ceil_div(blocks, tile * repeats))
    codes, scales = _pointers(parts, x)
    launch(
        nvfp4_triton.rows_kernel, grid, x, codes, scales, parts[2], _key(spec, key, x), rows, columns,
        x.stride(0), signs(spec), constants(spec), decoded, _in_words(x), even, architecture(x.device.index),
        tile_rows, tile, repeats,
        num_warps=1, enable_fp_fusion=False, maxnreg=_row_registers(spec, decoded, x),
    )  # fmt: skip


def _row_registers(spec: QuantSpec, decoded: bool, x: Tensor) -> int | None:
    """Registers of a thread, as measured on Hopper, where more warps than the compiler plans for run faster."""
    if architecture(x.device.index) >= 100:
        return None
    if spec.scale == "four-over-six":
        return 80
    return 48 if spec.stochastic and not decoded else None


def _launch_tiles(
    x: Tensor, row: QuantSpec | None, column: QuantSpec, row_key: Tensor | None, column_key: Tensor | None,
    row_parts: Parts | None, column_parts: Parts, decoded: tuple[bool, bool],
) -> None:  # fmt: skip
    rows, columns = x.shape
    count, down = _tile(rows, _GROUPS)
    even = columns % _TILE == 0 and rows % (16 * count * down) == 0
    grid = (ceil_div(columns, _TILE), ceil_div(rows, 16 * count * down))
    arch = architecture(x.device.index)
    row_spec, row_amax = (column, column_parts[2]) if row is None or row_parts is None else (row, row_parts[2])
    launch(
        nvfp4_triton.tiles_kernel, grid, x, *_pointers(row_parts, x), row_amax,
        _key(row_spec, row_key, x) if row is not None else x,
        *_pointers(column_parts, x, not decoded[1]), column_parts[2], _key(column, column_key, x),
        rows, columns, x.stride(0), signs(row), constants(row_spec), decoded[0], _in_words(x),
        signs(column), constants(column), decoded[1], even, arch,
        count, _TILE, down, row is not None, num_warps=count, enable_fp_fusion=False,
        maxnreg=None if "four-over-six" in (column.scale, row_spec.scale) or arch >= 100 else 80,
    )  # fmt: skip


def _tile(rows: int, groups: int) -> tuple[int, int]:
    """Groups of sixteen rows in one tile, at most `groups`, and tiles that a program walks down."""
    available = ceil_div(rows, 16)
    count = min(groups, next_power_of_2(available))
    return count, min(_DOWN, ceil_div(available, count))


def _key(spec: QuantSpec, key: Tensor | None, x: Tensor) -> Tensor:
    if spec.stochastic and key is None:
        raise ValueError("stochastic rounding needs a key, received none; pass seed and offset")
    return x if key is None else key


def flat(x: Tensor) -> Tensor:
    """[..., K] as a matrix [M, K] whose last stride is 1, without a copy where that is possible."""
    matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[1] <= 1 else matrix.contiguous()


def quantize_matrix(x: Tensor, spec: QuantSpec, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, amax) of a matrix [M, K] of any strides along its rows, by the kernel that serves its spec."""
    parts: Parts | None
    if not is_fast(x, spec):
        from quatrain.kernels.blocks_triton import quantize_blocks

        parts = quantize_blocks(x, spec, key)
    elif x.stride(1) != 1 and x.stride(0) == 1:
        parts = quantize_pair(x.t(), None, spec, None, key)[1]
    else:
        parts = quantize_pair(flat(x), spec, None, key)[0]
    if parts is None or parts[1] is None:
        raise ValueError("a packed operand has codes and scales; ask for it without decoding")
    return parts[0], parts[1], parts[2]
