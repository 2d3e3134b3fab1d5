"""AdamW with NVFP4 moments in Triton: one kernel reads and writes every tensor once.

A thread owns whole blocks of 16, a program one stretch of a row (or several short rows). A block's codes do not depend
on the rest of its row, so all but its scales is written at once; those follow when the row's largest is known.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.kernels.adamw import Item
from quatrain.kernels.adamw_block_triton import numbers, step_blocks
from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2
from quatrain.kernels.moments import CHUNK, MomentSpec, layout
from quatrain.kernels.moments_triton import row_power, row_words, scale_byte
from quatrain.kernels.quantize_triton import architecture
from quatrain.kernels.triton_math import key_state

_REGISTERS = (96, 160)  # of a thread, before and from Blackwell, where fewer would spill: 20 or 12 warps at once
_Lines = tuple[tuple[int, ...], ...]
_PLAIN, _MASTER, _CORRECTION, _DRAWN = 0, 1, 2, 3  # how weights are kept: fp32 or not at all, and the three masters


@triton.jit
def _address(table_ptr, item, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table_ptr + item * 12 + FIELD).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _finish(shorts, v: tl.constexpr, scales, amaxes, at, row_at, inside, first, ROWS: tl.constexpr):
    """Scales of a moment, from the upper bits of the units of whole rows [ROWS, blocks]."""
    short = shorts & 0xFFFF if v else shorts >> 16
    largest = tl.max(tl.where(short >= 0x7F8, 0, short), 1, keep_dims=True)
    row, amax = row_power(largest << 20)
    tl.store(scales + at, scale_byte(short, row), mask=inside)
    tl.store(amaxes + row_at, amax, mask=first)


@triton.jit
def adamw_kernel(
    table_ptr, map_ptr, scalars_ptr, counter_ptr, columns, blocks, chunks,
    PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, MASTER: tl.constexpr, PER_TILE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FAITHFUL: tl.constexpr, ARCH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """One step of some rows of one item: ROWS rows at once, or a stretch of one row in STEPS steps of LANES blocks."""
    item = tl.load(map_ptr + tl.program_id(0) * 3).to(tl.int64)
    row0, chunk = tl.load(map_ptr + tl.program_id(0) * 3 + 1), tl.load(map_ptr + tl.program_id(0) * 3 + 2)
    rows, tensor_id = tl.load(table_ptr + item * 12 + 10).to(tl.int32), tl.load(table_ptr + item * 12 + 11).to(tl.int32)
    WIDTH: tl.constexpr = LANES // ROWS
    lane = tl.arange(0, LANES)
    row = row0 + lane // WIDTH
    block0 = chunk * 4096
    end = tl.minimum(blocks, block0 + 4096)
    m_scales, v_scales = _address(table_ptr, item, 3, tl.uint8, True), _address(table_ptr, item, 6, tl.uint8, True)
    m_amax, v_amax = _address(table_ptr, item, 4, tl.float32, True), _address(table_ptr, item, 7, tl.float32, True)
    row_at = row.to(tl.int64) * chunks + chunk
    addresses = (
        _address(table_ptr, item, 0, PARAMETER, EVEN), _address(table_ptr, item, 1, GRADIENT, EVEN),
        _address(table_ptr, item, 2, tl.int32, True), m_scales, tl.load(m_amax + row_at, mask=row < rows, other=0.0),
        _address(table_ptr, item, 5, tl.int32, True), v_scales, tl.load(v_amax + row_at, mask=row < rows, other=0.0),
        _address(table_ptr, item, 8, tl.bfloat16, True),
        _address(table_ptr, item, 9, tl.float32 if MASTER == 1 else tl.int8, EVEN),
    )  # fmt: skip
    n = numbers(scalars_ptr, FAITHFUL)
    first, second = key_state(counter_ptr)
    before, beside = key_state(counter_ptr, -1)
    keys = (row_words(first, second, tensor_id, row), row_words(before, beside, tensor_id, row))
    if STEPS == 1:
        block = block0 + lane % WIDTH
        shorts = step_blocks(
            addresses, n, keys, row, block, blocks, columns, (row < rows) & (block < end),
            MASTER, PER_TILE, EVEN, FULL, FAITHFUL, ARCH,
        )  # fmt: skip
        shorts = tl.reshape(shorts, [ROWS, WIDTH])
    else:
        step_index = tl.arange(0, STEPS)[:, None]
        shorts = tl.zeros([STEPS, LANES], tl.int32)
        for step in range(tl.cdiv(end - block0, LANES)):
            block = block0 + step * LANES + lane
            found = step_blocks(
                addresses, n, keys, row, block, blocks, columns, block < end,
                MASTER, PER_TILE, EVEN, FULL, FAITHFUL, ARCH,
            )  # fmt: skip
            shorts = tl.where(step_index == step, found[None, :], shorts)
        shorts = tl.reshape(shorts, [1, STEPS * LANES])
    COUNT: tl.constexpr = WIDTH if STEPS == 1 else STEPS * LANES
    final_row = (row0 + tl.arange(0, ROWS))[:, None]
    final_block = (block0 + tl.arange(0, COUNT))[None, :]
    at = final_row.to(tl.int64) * blocks + final_block
    inside = (final_row < rows) & (final_block < end)
    row_at = final_row.to(tl.int64) * chunks + chunk
    _finish(shorts, False, m_scales, m_amax, at, row_at, inside, final_row < rows, ROWS)
    _finish(shorts, True, v_scales, v_amax, at, row_at, inside, final_row < rows, ROWS)


_LINE = ("a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9", "a10", "a11")


@triton.jit(do_not_specialize=_LINE)
def line_kernel(table_ptr, item, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11):
    """An item's line of the table from twelve arguments."""
    line = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11)
    for i in tl.static_range(12):
        tl.store(table_ptr + item * 12 + i, line[i])


def step(items: list[Item], scalars: Tensor, counter: Tensor, spec: MomentSpec) -> None:
    """One AdamW step on every item, in place: a launch for each width, dtype and alignment. See `adamw_step`.

    Raises:
        ValueError: a state that does not start at a multiple of 16 bytes.
    """
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for item in items:
        parameter, gradient = item.parameter, item.gradient
        if parameter.numel() == 0:
            continue
        master = _master(parameter, spec)
        words = _words(item, master)
        even = parameter.shape[1] % 16 == 0 and not any(word % 16 for word in (*words[:2], words[9]))
        key = (parameter.shape[1], parameter.dtype, gradient.dtype, master, even)
        groups.setdefault(key, []).append(words)
    for (columns, parameter_dtype, gradient_dtype, master, even), members in groups.items():
        _launch(columns, (parameter_dtype, gradient_dtype), master, even, tuple(members), scalars, counter, spec)


def _master(parameter: Tensor, spec: MomentSpec) -> int:
    if parameter.dtype == torch.float32:
        return _PLAIN
    return {"fp32": _MASTER, "bf16+int8": _CORRECTION, "bf16-sr": _DRAWN}[spec.master]


def _words(item: Item, master: int) -> tuple[int, ...]:
    """An item's line in the table: ten addresses, rows, id."""
    state = item.state
    names = ("m_codes", "m_scales", "m_amax", "v_codes", "v_scales", "v_amax", "v_mean")
    addresses = [state[name].data_ptr() for name in names]
    if any(address % 16 for address in addresses):
        raise ValueError("the state's tensors must start at multiples of 16 bytes, received others; clone them")
    extra = {_MASTER: "master", _CORRECTION: "correction"}.get(master)
    last = state[extra].data_ptr() if extra else 0
    number = item.tensor_id & 0xFFFFFFFF
    return (item.parameter.data_ptr(), item.gradient.data_ptr(), *addresses, last, item.parameter.shape[0], number)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def _launch(
    columns: int, dtypes: tuple[torch.dtype, torch.dtype], master: int, even: bool, members: _Lines, scalars: Tensor,
    counter: Tensor, spec: MomentSpec,
) -> None:  # fmt: skip
    form = layout(1, columns, spec)
    lanes, rows, steps = _geometry(form.blocks)
    chunks = form.chunks
    places = _places(scalars.device, tuple(words[10] for words in members), rows, chunks)
    table = _table(scalars.device, members)
    arch = architecture(scalars.device.index)
    launch(
        adamw_kernel, (places.shape[0],), table, places, scalars, counter, columns, form.blocks, chunks,
        _TYPES[dtypes[0]], _TYPES[dtypes[1]], master, form.tile // 16, even, columns == form.padded, spec.faithful,
        arch, lanes, rows, steps,
        num_warps=lanes // 32, maxnreg=_REGISTERS[arch >= 100], enable_fp_fusion=False,
    )  # fmt: skip


def _geometry(blocks: int) -> tuple[int, int, int]:
    """Threads of a program, rows it takes at once, steps in which it walks along a row."""
    width = next_power_of_2(min(blocks, CHUNK // 16))
    if width <= 32:
        return 32, 32 // width, 1
    lanes = 32 if width <= 128 else 128 if width <= 1024 else 256
    return lanes, 1, width // lanes


@functools.lru_cache(maxsize=1024)
def _places(device: torch.device, rows: tuple[int, ...], at_once: int, chunks: int) -> Tensor:
    """What each program does, int32 [programs, 3]: item, first row, stretch of the row."""
    parts = []
    for item, count in enumerate(rows):
        first = torch.arange(0, count, at_once, dtype=torch.int32).repeat_interleave(chunks)
        chunk = torch.arange(chunks, dtype=torch.int32).repeat(ceil_div(count, at_once))
        parts.append(torch.stack([torch.full_like(first, item), first, chunk], dim=1))
    return torch.cat(parts).to(device)


def _table(device: torch.device, members: _Lines) -> Tensor:
    """The items' lines on the device, int64 [items, 12], without waiting for it."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return _uploaded(device, members)[0]
    # A graph repeats the copy from wherever the lines lay: they travel as arguments of kernels instead.
    table = torch.empty(len(members), len(_LINE), dtype=torch.int64, device=device)
    for index, words in enumerate(members):
        line_kernel[(1,)](table, index, *words, num_warps=1)
    return table


@functools.lru_cache(maxsize=256)
def _uploaded(device: torch.device, members: _Lines) -> tuple[Tensor, Tensor]:
    host = torch.tensor(members, dtype=torch.int64)
    if device.type != "cuda":
        return host, host
    pinned = host.pin_memory()
    return pinned.to(device, non_blocking=True), pinned
