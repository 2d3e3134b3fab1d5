"""Triton kernels that lay out what is packed, dense and padded, and find its largest magnitude in the same pass.

Keys are smoothed on the way: each sequence's mean key is subtracted.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.kernels.attention_layout import Geometry, padded_tokens
from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2
from quatrain.kernels.quantize_triton import architecture
from quatrain.kernels.triton_math import round_to, widen

_ROWS, _CHUNK = 32, 256  # tokens of a tile, and those that one program sums


@triton.jit
def _tile(k_ptr, kept_ptr, first, keys, k_t, D: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr,
          BD: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """fp32 [ROWS, BD] of keys, zeros at padding and outside, and where they are kept."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = row < keys
    if KEPT:
        inside = inside & (tl.load(kept_ptr + row, mask=inside, other=0) != 0)
    pointers = k_ptr + row[:, None].to(tl.int64) * k_t + column[None, :]
    return widen(tl.load(pointers, mask=inside[:, None] & (column < D)[None, :], other=0.0), ARCH), inside


@triton.jit
def sums_kernel(k_ptr, kept_ptr, sums_ptr, groups, keys, k_b, k_h, k_t, D: tl.constexpr, KEPT: tl.constexpr,
                ROWS: tl.constexpr, CHUNK: tl.constexpr, BD: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """float64 sums [b g, chunks, D] of kept keys, where sums of BF16 numbers are exact in all but name."""
    head, chunk = tl.program_id(1), tl.program_id(0)
    batch = head // groups
    k_ptr += batch.to(tl.int64) * k_b + (head % groups).to(tl.int64) * k_h
    total = tl.zeros([ROWS, BD], tl.float64)
    for i in tl.static_range(CHUNK // ROWS):
        first = chunk * CHUNK + i * ROWS
        k, _ = _tile(k_ptr, kept_ptr + batch * keys, first, keys, k_t, D, KEPT, ROWS, BD, ARCH)
        total += k.to(tl.float64)
    column = tl.arange(0, BD)
    place = (head.to(tl.int64) * tl.num_programs(0) + chunk) * D + column
    tl.store(sums_ptr + place, tl.sum(total, 0), mask=column < D)


@triton.jit
def center_kernel(
    k_ptr, kept_ptr, sums_ptr, counts_ptr, out_ptr, amax_ptr, groups, keys, padded, chunks, k_b, k_h, k_t,
    D: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BD: tl.constexpr, ARCH: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """K [b, g, padded, D], with MEAN less its mean and rounded, zeros at padding; amax (int32 bits, twice) raised."""
    head = tl.program_id(1)
    batch = head // groups
    k_ptr += batch.to(tl.int64) * k_b + (head % groups).to(tl.int64) * k_h
    column = tl.arange(0, BD)
    mean = tl.zeros([BD], tl.float32)
    if MEAN:
        total = tl.zeros([BD], tl.float64)
        for chunk in range(chunks):
            place = (head.to(tl.int64) * chunks + chunk) * D + column
            total += tl.load(sums_ptr + place, mask=column < D, other=0.0)
        count = tl.maximum(tl.load(counts_ptr + batch), 1) if KEPT else keys
        mean = (total / count.to(tl.float64)).to(tl.float32)
    top = tl.zeros([ROWS, BD], tl.int32)
    for i in tl.static_range(CHUNK // ROWS):
        first = tl.program_id(0) * CHUNK + i * ROWS
        k, inside = _tile(k_ptr, kept_ptr + batch * keys, first, keys, k_t, D, KEPT, ROWS, BD, ARCH)
        left = k
        if MEAN:
            left = round_to(tl.where(inside[:, None], k - mean[None, :], 0.0), out_ptr.dtype.element_ty, ARCH)
        top = tl.maximum(top, tl.where((column < D)[None, :], left.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
        row = first + tl.arange(0, ROWS)
        place = (head.to(tl.int64) * padded + row)[:, None] * D + column[None, :]
        tl.store(
            out_ptr + place, left.to(out_ptr.dtype.element_ty), mask=(row < padded)[:, None] & (column < D)[None, :]
        )
    largest = tl.max(tl.max(top, 1), 0)
    tl.atomic_max(amax_ptr, largest)
    tl.atomic_max(amax_ptr + 1, largest)


def center_keys(k: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Smoothed keys, padded, and their largest magnitude: fp32 [2], along d and along tokens.

    Args:
        k: [b, g, k, d] in bfloat16, float16 or float32, a batch (no packed sequences).
        geometry: says which keys are kept.

    Returns:
        [b, g, k', d] in k's dtype and [2]; NaN and infinity come through.
    """
    b, groups, keys, d = k.shape
    k = k if k.stride(3) == 1 else k.contiguous()
    chunks, wide = ceil_div(keys, _CHUNK), next_power_of_2(d)
    sums = torch.empty(b * groups, chunks, d, dtype=torch.float64, device=k.device)
    kept, counts = k, k
    if geometry.kept is not None:
        kept, counts = geometry.kept.contiguous().view(torch.uint8), geometry.kept.sum(1)
    options = (d, geometry.kept is not None, _ROWS, _CHUNK, wide, architecture(k.device.index))
    launch(
        sums_kernel, (chunks, b * groups), k, kept, sums, groups, keys, *k.stride()[:3], *options, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return _centered(k, (kept, sums, counts), options, True)


def dense_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [b, h, t, d] of any strides dense and padded, [b, h, t', d], and its largest magnitude as of `center_keys`.

    What projections give lies as [b, t, h, d]; this costs one read where a copy and a search for the maximum cost two.
    """
    x = x if x.stride(3) == 1 else x.contiguous()
    options = (x.shape[3], False, _ROWS, _CHUNK, next_power_of_2(x.shape[3]), architecture(x.device.index))
    return _centered(x, (x, x, x), options, False)


def _centered(
    k: Tensor, others: tuple[Tensor, Tensor, Tensor], options: tuple[int, ...], mean: bool
) -> tuple[Tensor, Tensor]:
    """others: kept keys, sums and counts."""
    b, groups, keys, d = k.shape
    padded = padded_tokens(keys, None)
    out = torch.empty(b, groups, padded, d, dtype=k.dtype, device=k.device)
    amax = torch.zeros(2, dtype=torch.int32, device=k.device)
    launch(
        center_kernel, (ceil_div(padded, _CHUNK), b * groups), k, *others, out, amax, groups, keys, padded,
        ceil_div(keys, _CHUNK), *k.stride()[:3], *options, mean, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out, amax.view(torch.float32)
