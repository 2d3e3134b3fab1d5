"""Triton twin of `newton_schulz.clip_threshold`: an order statistic of a sample of each matrix, by radix selection.

The bits of magnitudes are ordered as they are. Three digits of the wanted one are found in turn, each from counts that
many programs add to: a single program of a matrix would hold 65,536 numbers, more than its registers.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.kernels.launch_triton import ceil_div, launch
from quatrain.kernels.newton_schulz import _sample_stride
from quatrain.kernels.quantize_triton import architecture
from quatrain.kernels.triton_math import widen

_BLOCK = 1024  # numbers that a program counts


@triton.jit
def _selected(counts_ptr, rank, DIGITS: tl.constexpr):
    """The first DIGITS digits of the number of that rank, and its rank among those that share them."""
    found = rank * 0
    for digit in tl.static_range(DIGITS):
        value = tl.arange(0, 2048 if digit == 0 else 1024)
        below = tl.cumsum(tl.load(counts_ptr + digit * 2048 + value), 0)
        at = tl.sum((below < rank).to(tl.int32), 0)
        rank -= tl.sum(tl.where(value == at - 1, below, 0), 0)
        found = found * (2048 if digit == 0 else 1024) + at
    return found, rank


@triton.jit
def digit_kernel(
    x_ptr,  # [k, rows, columns] in memory
    counts_ptr,  # int32 [k, 3, 2048], zeros at first
    rows,
    columns,
    stride,
    count,
    rank,
    DIGIT: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,  # more elements than 32 bits count: divisions take three times as long
    ARCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How often each value of a digit occurs, among magnitudes of a strided sample that share those before it.

    The bits of magnitudes are ordered as they are: a digit of eleven bits and two of ten.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.where(i < count, i, 0)
    if WIDE:
        place = place.to(tl.int64)
    place = place * stride
    if TALL:  # the sample walks along rows of the transpose
        place = (place % rows) * columns + place // rows
    matrix = tl.program_id(1).to(tl.int64)
    bits = widen(tl.load(x_ptr + matrix * rows * columns + place), ARCH).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    found, _ = _selected(counts_ptr + matrix * 6144, rank, DIGIT)
    SHIFT: tl.constexpr = 20 - 10 * DIGIT
    WIDTH: tl.constexpr = 2048 if DIGIT == 0 else 1024
    here = counts_ptr + matrix * 6144 + DIGIT * 2048 + ((bits >> SHIFT) & (WIDTH - 1))
    tl.atomic_add(here, 1, mask=(i < count) & ((bits >> SHIFT) // WIDTH == found), sem="relaxed")


@triton.jit
def threshold_kernel(counts_ptr, out_ptr, rank):
    """Of one matrix, the magnitude of that rank, fp32 [k]; infinite for 0."""
    matrix = tl.program_id(0).to(tl.int64)
    found, _ = _selected(counts_ptr + matrix * 6144, rank, 3)
    value = found.to(tl.float32, bitcast=True)
    tl.store(out_ptr + matrix, tl.where(value == 0.0, float("inf"), value))


def clip_threshold(matrices: Tensor, quantile: float) -> Tensor:
    """fp32 [k] of [k, R, C] contiguous, in either orientation; see `newton_schulz.clip_threshold`."""
    if not 0.0 < quantile <= 1.0:
        raise ValueError(f"clip is a quantile in (0, 1], as 0.99, or None; received {quantile!r}")
    count, rows, columns = matrices.shape
    size = rows * columns
    stride = _sample_stride(size, max(rows, columns))
    sample = ceil_div(size, stride)
    rank = max(1, math.ceil(quantile * sample))
    arch = architecture(matrices.device.index)
    counts = torch.zeros(count, 3, 2048, dtype=torch.int32, device=matrices.device)
    for digit in range(3):
        launch(
            digit_kernel, (ceil_div(sample, _BLOCK), count), matrices, counts, rows, columns, stride, sample,
            rank, digit, rows > columns, size + stride >= 1 << 31, arch, _BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    threshold = torch.empty(count, dtype=torch.float32, device=matrices.device)
    launch(threshold_kernel, (count,), counts, threshold, rank, num_warps=4, enable_fp_fusion=False)
    return threshold
