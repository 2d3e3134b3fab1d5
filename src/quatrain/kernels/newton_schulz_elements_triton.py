"""What surrounds Newton-Schulz in Triton: momentum, norm, the first X, and the update of weights.

Each reads every tensor once. Up to eight tensors of one shape go through a launch, as arguments of their own: no table
has to reach the device first, and a CUDA graph may hold the launch.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.kernels.launch_triton import ceil_div, launch
from quatrain.kernels.newton_schulz_block_triton import columns_of_tile, rows_of_tile
from quatrain.kernels.quantize_triton import architecture
from quatrain.kernels.triton_math import half_word, key_state, pair_hash, round_to, row_state, widen

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernels read
_GROUP = 8  # tensors of one launch
_BLOCK = 4096  # elements that a program of `momentum_kernel` takes


@triton.jit
def _pick(item, p0, p1, p2, p3, p4, p5, p6, p7, ALIGNED: tl.constexpr):
    """One pointer of eight."""
    address = p0.to(tl.int64)
    address = tl.where(item == 1, p1.to(tl.int64), address)
    address = tl.where(item == 2, p2.to(tl.int64), address)
    address = tl.where(item == 3, p3.to(tl.int64), address)
    address = tl.where(item == 4, p4.to(tl.int64), address)
    address = tl.where(item == 5, p5.to(tl.int64), address)
    address = tl.where(item == 6, p6.to(tl.int64), address)
    address = tl.where(item == 7, p7.to(tl.int64), address)
    pointer = address.to(p0.dtype)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """fp32 in another dtype, rounded to nearest even."""
    return round_to(x, DTYPE, ARCH).to(DTYPE) if ARCH == 0 else x.to(DTYPE)


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=inside, other=0)


@triton.jit
def _save(pointers, values, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def momentum_kernel(
    g0, g1, g2, g3, g4, g5, g6, g7,  # gradients
    b0, b1, b2, b3, b4, b5, b6, b7,  # momentum, changed in place
    out_ptr,  # fp32 [tensors, size]
    size,
    share,  # 1 - momentum
    NESTEROV: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr, ARCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of one tensor; the grid is blocks by tensors."""
    item = tl.program_id(1)
    grad_ptr = _pick(item, g0, g1, g2, g3, g4, g5, g6, g7, ALIGNED)
    buffer_ptr = _pick(item, b0, b1, b2, b3, b4, b5, b6, b7, ALIGNED)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out = out_ptr + item.to(tl.int64) * size + at
    inside = at < size
    g, old = widen(_load(grad_ptr + at, inside, EVEN), ARCH), widen(_load(buffer_ptr + at, inside, EVEN), ARCH)
    new = old + (g - old) * share
    update = new + (g - new) * share if NESTEROV else new
    _save(buffer_ptr + at, _rounded(new, b0.dtype.element_ty, ARCH), inside, EVEN)
    _save(out, update, inside, EVEN)


@triton.jit
def norm_kernel(
    x_ptr,  # [k, size]
    threshold_ptr,  # fp32 [k]
    peaks_ptr,  # int32 [k, programs]
    sums_ptr,  # float64 [k, programs]
    size,
    CLIP: tl.constexpr,
    ARCH: tl.constexpr,
    BLOCK: tl.constexpr,
    REPEATS: tl.constexpr,
):
    """The largest magnitude (its bits: NaN is above all numbers) and the sum of squares after clipping, of a stretch.

    Squares are exact in float64, and in its range.
    """
    base = x_ptr + tl.program_id(1).to(tl.int64) * size
    start = tl.program_id(0).to(tl.int64) * (BLOCK * REPEATS) + tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    if CLIP:
        threshold = tl.load(threshold_ptr + tl.program_id(1))
    for repeat in range(REPEATS):
        at = start + repeat * BLOCK
        x = tl.abs(widen(tl.load(base + at, mask=at < size, other=0.0), ARCH))
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True))
        if CLIP:
            x = tl.minimum(x, threshold)
        wide = x.to(tl.float64)
        total += wide * wide
    place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(peaks_ptr + place, tl.max(largest, 0))
    tl.store(sums_ptr + place, tl.sum(total, 0))


@triton.jit
def _divided(x, peak, norm, threshold, CLIP: tl.constexpr):
    """x / peak, clipped, / norm."""
    x = tl.div_rn(x, peak)
    if CLIP:
        x = tl.where(tl.abs(x) > threshold, tl.where(x > 0.0, threshold, -threshold), x)
    return tl.div_rn(x, norm)


@triton.jit
def start_kernel(
    source_ptr,  # [k, rows, columns] in memory
    threshold_ptr, peaks_ptr, sums_ptr,  # as `norm_kernel` has them
    x_ptr,  # BF16 [k, m, n], m and n multiples of the tile
    rows_out_ptr,  # BF16 [k, m, n], X quantized along rows
    columns_out_ptr,  # and along columns
    rows, columns, m, n, programs,
    CLIP: tl.constexpr, TALL: tl.constexpr, EVEN: tl.constexpr, QUANTIZED: tl.constexpr, Q: tl.constexpr,
    ARCH: tl.constexpr, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One tile of the first X, and the operands that it becomes."""
    tiles_n = n // TILE_N
    batch, index = tl.program_id(1), tl.program_id(0)
    part = tl.arange(0, PARTS)
    peak = tl.max(tl.load(peaks_ptr + batch * programs + part, mask=part < programs, other=0), 0)
    total = tl.sum(tl.load(sums_ptr + batch * programs + part, mask=part < programs, other=0.0), 0)
    peak = peak.to(tl.float32, bitcast=True)
    bad = (peak != peak) | (peak == float("inf"))
    peak = tl.where(peak == 0.0, 1.0, peak)
    norm = (tl.sqrt(total) / peak.to(tl.float64)).to(tl.float32)
    norm = tl.where(bad, float("nan"), tl.where(norm == 0.0, 1.0, norm))
    threshold = 0.0
    if CLIP:
        threshold = tl.div_rn(tl.load(threshold_ptr + batch), peak)
    i, j = index // tiles_n * TILE_M, index % tiles_n * TILE_N
    row, column = i + tl.arange(0, TILE_M), j + tl.arange(0, TILE_N)
    base = source_ptr + batch.to(tl.int64) * rows * columns
    if TALL:
        place = base + (column[:, None].to(tl.int64) * columns + row[None, :])
        inside = (column < rows)[:, None] & (row < columns)[None, :]
    else:
        place = base + (row[:, None].to(tl.int64) * columns + column[None, :])
        inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = _divided(widen(_load(place, inside, EVEN), ARCH), peak, norm, threshold, CLIP)
    x = _rounded(x, tl.bfloat16, ARCH)
    if TALL:
        x = tl.trans(x)
    here = batch.to(tl.int64) * m * n + (i.to(tl.int64) * n + j)
    tl.store(x_ptr + here + (tl.arange(0, TILE_M)[:, None] * n + tl.arange(0, TILE_N)[None, :]), x)
    if QUANTIZED:
        tl.debug_barrier()
        rows_of_tile(x_ptr + here, rows_out_ptr + here, n, TILE_M, TILE_N, LANES, Q, ARCH)
        columns_of_tile(x_ptr + here, columns_out_ptr + here, n, n, False, TILE_M, TILE_N, LANES, Q, ARCH)


@triton.jit
def _drawn(new, key_ptr, row, column, columns, WHOLE: tl.constexpr):
    """fp32 rounded to BF16, up (in magnitude) where 16 random bits carry; bits go with places in rows of 1024."""
    first, second = key_state(key_ptr)
    if WHOLE:  # 1024 divides the columns, and the tile lies in one such row for each of its own
        line = row * (columns // 1024) + tl.min(column, 1, keep_dims=True) // 1024
        place = column % 1024
    else:
        at = row.to(tl.int64) * columns + column
        line, place = (at // 1024).to(tl.int32), (at % 1024).to(tl.int32)
    start, middle = row_state(first, second, line)
    word = pair_hash(start, middle, place // 2)
    draw = tl.where(place % 2 == 0, half_word(word, False), half_word(word, True))
    bits = (new.to(tl.int32, bitcast=True) + draw) & -65536
    return tl.where(new == new, bits.to(tl.float32, bitcast=True), new)


@triton.jit
def weights_kernel(
    w0, w1, w2, w3, w4, w5, w6, w7,  # weights [rows, columns], changed in place
    h0, h1, h2, h3, h4, h5, h6, h7,  # what is kept beside them: fp32 masters, or int8 corrections
    key_ptr,  # int64 [tensors, 2], for drawn weights
    update_ptr,  # by strides
    keep_ptr, step_ptr,  # fp32 [1]
    rows, columns, batch_stride, row_stride, column_stride,
    KEPT: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, ARCH: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One tile of w <- keep w - step update; the grid is tiles by tensors.

    KEPT is 0 for nothing beside the weight; 1 for a master, which counts where the weight still is its rounding; 2 for
    a correction, the weight's next eight bits; 3 for stochastic rounding.
    """
    item = tl.program_id(1)
    weight_ptr = _pick(item, w0, w1, w2, w3, w4, w5, w6, w7, ALIGNED)
    kept_ptr = _pick(item, h0, h1, h2, h3, h4, h5, h6, h7, ALIGNED)
    tiles_n = tl.cdiv(columns, TILE_N)
    i, j = tl.program_id(0) // tiles_n * TILE_M, tl.program_id(0) % tiles_n * TILE_N
    row, column = (i + tl.arange(0, TILE_M))[:, None], (j + tl.arange(0, TILE_N))[None, :]
    inside = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    place = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    source = update_ptr + item.to(tl.int64) * batch_stride + place
    w = widen(_load(weight_ptr + at, inside, EVEN), ARCH)
    update = widen(_load(source, inside, EVEN), ARCH)
    if KEPT == 1:
        master = _load(kept_ptr + at, inside, EVEN)
        w = tl.where(round_to(master, w0.dtype.element_ty, ARCH) == w, master, w)
    elif KEPT == 2:
        joined = (w.to(tl.int32, bitcast=True) >> 8) + _load(kept_ptr + at, inside, EVEN).to(tl.int32)
        w = (joined << 8).to(tl.float32, bitcast=True)
    new = w * tl.load(keep_ptr) - update * tl.load(step_ptr)
    if KEPT == 2:
        bits = (new.to(tl.int32, bitcast=True) + 0x80) >> 8
        narrow = (bits + 0x80) >> 8
        bad = new != new
        _save(kept_ptr + at, tl.where(bad, 0, bits - (narrow << 8)).to(tl.int8), inside, EVEN)
        new = tl.where(bad, new, (narrow << 16).to(tl.float32, bitcast=True))
    elif KEPT == 3:
        new = _drawn(new, key_ptr + item * 2, row, column, columns, WHOLE)
    _save(weight_ptr + at, _rounded(new, w0.dtype.element_ty, ARCH), inside, EVEN)
    if KEPT == 1:
        _save(kept_ptr + at, new, inside, EVEN)


def momentum_updates(grads: Sequence[Tensor], buffers: Sequence[Tensor], momentum: float, nesterov: bool) -> Tensor:
    """See `newton_schulz.momentum_updates`."""
    first = grads[0]
    updates = torch.empty((len(grads), *first.shape), dtype=torch.float32, device=first.device)
    pairs = list(zip(grads, buffers, strict=True))
    size = first.numel()
    for start, chunk in _chunks([(g.dtype, b.dtype) for g, b in pairs]):
        some = pairs[start : start + chunk]
        if not _served([t for pair in some for t in pair]):
            for out, (grad, buffer) in zip(updates[start : start + chunk], some, strict=True):
                _momentum(out, grad, buffer, momentum, nesterov)
            continue
        tensors = [g.contiguous() for g, _ in some], [b for _, b in some]
        even = size % _BLOCK == 0
        launch(
            momentum_kernel, (ceil_div(size, _BLOCK), chunk), *_eight(tensors[0]), *_eight(tensors[1]),
            updates[start:], size, 1.0 - momentum, nesterov, even, _aligned([*tensors[0], *tensors[1]]),
            architecture(first.device.index), _BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return updates


def _momentum(out: Tensor, grad: Tensor, buffer: Tensor, momentum: float, nesterov: bool) -> None:
    """The reference's arithmetic, for dtypes and layouts that the kernel does not take."""
    g = grad.to(torch.promote_types(grad.dtype, torch.float32))
    old = buffer.to(g.dtype)
    new = old + (g - old) * (1.0 - momentum)
    buffer.copy_(new)
    out.copy_(new + (g - new) * (1.0 - momentum) if nesterov else new)


def apply_updates(
    parameters: Sequence[Tensor], updates: Tensor, keep: float | Tensor, step: float | Tensor,
    kept: Sequence[Tensor] | None = None, keys: Tensor | None = None,
) -> None:  # fmt: skip
    """parameter <- keep parameter - step update, in fp32, rounded once; in place.

    Args:
        parameters: k tensors [R, C].
        updates: [k, R, C] of any strides.
        keep: what decay leaves.
        step: learning rate.
        kept: what stands beside k BF16 parameters, changed too: fp32 masters [R, C], or int8 corrections as of
            `split_master`. A parameter that no longer is its master's rounding was written by someone else, and counts.
        keys: int64 [k, 2]: BF16 parameters are rounded stochastically, with `random_bits` of rows of 1024.

    Raises:
        ValueError: parameters with something beside them that are not contiguous BF16 tensors.
    """
    rows, columns = updates.shape[1:]
    mode = 3 if keys is not None else 0 if kept is None else 1 if kept[0].dtype == torch.float32 else 2
    sizes = [_scalar(value, updates.device) for value in (keep, step)]
    for start, chunk in _chunks([(p.dtype,) for p in parameters]):
        some, beside = parameters[start : start + chunk], (kept or parameters)[start : start + chunk]
        found = updates[start : start + chunk]
        if updates.dtype not in DTYPES or not _served(some):
            if mode:
                raise ValueError("BF16 parameters must be contiguous, received others; give copies of them")
            _apply(some, found, keep, step)
            continue
        tile = (64, 64) if updates.stride(2) != 1 else (16, 256)
        even = rows % tile[0] == 0 and columns % tile[1] == 0
        launch(
            weights_kernel, (ceil_div(rows, tile[0]) * ceil_div(columns, tile[1]), chunk), *_eight(some),
            *_eight(beside), found if keys is None else keys[start:], found, *sizes, rows, columns, *updates.stride(),
            mode, even, columns % 1024 == 0, _aligned([*some, *beside]), architecture(updates.device.index), *tile,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _apply(parameters: Sequence[Tensor], updates: Tensor, keep: float | Tensor, step: float | Tensor) -> None:
    """The reference's arithmetic, for dtypes and layouts that the kernel does not take."""
    for parameter, update in zip(parameters, updates, strict=True):
        wide = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
        parameter.copy_(wide * keep - update.to(wide.dtype) * step)


def _chunks(kinds: list[Any]) -> list[tuple[int, int]]:
    """(first, count) of neighbours of one kind, eight at most."""
    found: list[tuple[int, int]] = []
    for index, kind in enumerate(kinds):
        if found and found[-1][1] < _GROUP and kinds[found[-1][0]] == kind:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return found


def _served(tensors: Sequence[Tensor]) -> bool:
    return all(t.dtype in DTYPES and t.is_contiguous() for t in tensors)


def _aligned(tensors: Sequence[Tensor]) -> bool:
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def _eight(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [*tensors, *[tensors[0]] * (_GROUP - len(tensors))]


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """fp32 [1] on the device, without waiting for it where the value is a number or there already."""
    if isinstance(value, Tensor):
        return value.reshape(1).to(device=device, dtype=torch.float32)
    return torch.full((1,), value, dtype=torch.float32, device=device)
