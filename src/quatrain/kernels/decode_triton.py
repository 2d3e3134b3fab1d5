"""Triton twin of decoding: packed codes and block scales to code x block scale, and the device functions it is made of.

A thread holds octets: eight consecutive codes, one int32 word of E2M1 or two of E4M3.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc,var-annotated"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2
from quatrain.kernels.quantize_triton import architecture
from quatrain.kernels.triton_math import e4m3_value, round_pair

_ROWS, _OCTETS = 4, 128  # the largest tile
_WIDTH = 8 * _OCTETS


@triton.jit
def e8m0_value(code):
    """fp32 value of E8M0 codes (int32): 0 is the subnormal 2**-127, 255 is NaN."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_values(word):
    """The eight fp32 values of a word: the bits move to fp32's fields, and 2**126 brings the biases in line."""
    values = ()
    for j in tl.static_range(8):
        bits = ((word << (28 - 4 * j)) >> 6) & -2118123520  # 0x81C00000
        values = values + (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37,)
    return values


@triton.jit
def e4m3_values(word):
    """The four fp32 values of a word of E4M3 codes, likewise with 2**120."""
    values = ()
    for j in tl.static_range(4):
        bits = ((word << (24 - 8 * j)) >> 4) & -2014314496  # 0x87F00000
        value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        values = values + (tl.where((bits & 0x07F00000) == 0x07F00000, float("nan"), value),)
    return values


@triton.jit
def _join4(a, b, c, d):
    """[R, W, 4] of four tensors [R, W]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], a.shape[1], 4])


@triton.jit
def store_all(out_ptr, place, inside, values, MASK: tl.constexpr):
    """A tuple of numbers, one after another from `place` on, at most 16 bytes at once."""
    if len(values) == 1:
        store(out_ptr + place, values[0], inside, MASK)
    elif len(values) == 2:
        pointers = out_ptr + place[:, :, None] + tl.arange(0, 2)[None, None, :]
        store(pointers, tl.join(values[0], values[1]), inside[:, :, None], MASK)
    else:
        COUNT: tl.constexpr = len(values)
        for i in tl.static_range(0, COUNT, 4):
            pointers = out_ptr + (place + i)[:, :, None] + tl.arange(0, 4)[None, None, :]
            four = _join4(values[i], values[i + 1], values[i + 2], values[i + 3])
            store(pointers, four, inside[:, :, None], MASK)


@triton.jit
def bf16_words(values, scale, ARCH: tl.constexpr):
    """Values times the scale, rounded to BF16, two a word."""
    COUNT: tl.constexpr = len(values)
    words = ()
    for i in tl.static_range(0, COUNT, 2):
        words = words + (round_pair(values[i] * scale, values[i + 1] * scale, ARCH),)
    return words


@triton.jit
def store(pointers, values, inside, MASK: tl.constexpr):
    """Store, all of it unless MASK."""
    if MASK:
        tl.store(pointers, values, mask=inside)
    else:
        tl.store(pointers, values)


@triton.jit
def _load(pointers, inside, MASK: tl.constexpr):
    return tl.load(pointers, mask=inside, other=0) if MASK else tl.load(pointers)


@triton.jit
def _load_parts(
    codes_ptr, scales_ptr, row, octet, rows, octets, blocks, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OCTETS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Words of codes and stored scales of the octets [1, OCTETS] of one row."""
    inside = (row < rows) & (octet < octets)
    place = row.to(tl.int64) * octets + octet
    block = (row // BLOCK_ROWS).to(tl.int64) * blocks + octet // BLOCK_OCTETS
    stored = _load(scales_ptr + block, inside, MASK)
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        parts = (_load(codes_ptr + place, inside, MASK), stored)
    else:
        pointers = codes_ptr + (place * 2)[:, :, None] + tl.arange(0, 2)[None, None, :]
        low, high = tl.split(_load(pointers, inside[:, :, None], MASK))
        parts = (low, high, stored)
    return parts


@triton.jit
def _scale_value(stored, FORMAT: tl.constexpr):
    if FORMAT == "nvfp4":
        code = stored.to(tl.int32)
        scale = tl.where(code == 0x7F, float("nan"), e4m3_value(code))
    elif FORMAT == "fp8":
        scale = stored
    else:
        scale = e8m0_value(stored.to(tl.int32))
    return scale


@triton.jit
def decode_kernel(
    codes_ptr, scales_ptr, out_ptr, clear_ptr, rows, octets, room, blocks, groups, heads, tokens, FORMAT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OCTETS: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr, ROWS: tl.constexpr,
    OCTETS: tl.constexpr, SIZE: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS, OCTETS] of codes [rows, octets] and scales [rows / BLOCK_ROWS, blocks]; an octet for each thread.

    From one row of the result to the next it is as far as `room` octets. All loads come before the first store, so that
    they are under way together.
    SIZE: a row holds whole tokens of [b, heads, tokens, 8 SIZE], which are written as [b, tokens, heads, 8 SIZE]; or 0.
    CLEAR: numbers that the first program sets to zero, a power of two; or 0.
    """
    if CLEAR > 0:  # noqa: SIM102 (decided when compiling: no range may have size 0)
        if tl.program_id(0) == 0:
            tl.store(clear_ptr + tl.arange(0, CLEAR), tl.zeros([CLEAR], tl.float32))
    first = tl.zeros([1, 1], tl.int32) + tl.program_id(0) // groups * ROWS
    octet = (tl.program_id(0) % groups * OCTETS + tl.arange(0, OCTETS))[None, :]
    parts = ()
    for i in tl.static_range(ROWS):
        parts = parts + (
            _load_parts(
                codes_ptr, scales_ptr, first + i, octet, rows, octets, blocks, FORMAT, BLOCK_ROWS, BLOCK_OCTETS, MASK
            ),
        )  # fmt: skip
    for i in tl.static_range(ROWS):
        row = first + i
        part = parts[i]
        scale = _scale_value(part[len(part) - 1], FORMAT)
        values = e2m1_values(part[0]) if len(part) == 2 else e4m3_values(part[0]) + e4m3_values(part[1])
        inside = (row < rows) & (octet < octets)
        place = row.to(tl.int64) * room + octet
        if SIZE > 0:
            token = row * (octets // SIZE)
            head = token // tokens
            token += octet // SIZE - head * tokens
            batch = head // heads
            line = (batch.to(tl.int64) * tokens + token) * heads + (head - batch * heads)
            place = line * SIZE + octet % SIZE
        if out_ptr.dtype.element_ty == tl.float32:
            store_all(out_ptr, place * 8, inside, scaled(values, scale), MASK)
        else:
            store_all(out_ptr, place * 4, inside, bf16_words(values, scale, ARCH), MASK)


@triton.jit
def scaled(values, scale):
    """Every value of a tuple times the scale."""
    COUNT: tl.constexpr = len(values)
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (values[i] * scale,)
    return out


def decode(
    codes: Tensor, scales: Tensor, spec: QuantSpec, dtype: torch.dtype = torch.bfloat16, heads: int = 0,
    tokens: int = 0, out: Tensor | None = None, clear: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Code x block scale, the bits of `QTensor.block_values(dtype)`.

    Args:
        codes: uint8 [R, K / 2] (4-bit elements) or float8_e4m3fn [R, K]; K counts whole blocks.
        scales: [R / b, K / b'] for blocks of b x b'.
        spec: how they were made.
        dtype: of the result, bfloat16 or float32.
        heads, tokens: rows are those of [b, heads, tokens], tokens a multiple of 16, and are written in the order of
            [b, tokens, heads] (NVFP4, K a power of two up to 1,024); 0 for rows as they are.
        out: [R, K] of that dtype to write to, any multiple of 8 elements from one row to the next.
        clear: fp32 [n], n a power of two, set to zero by the same launch for a kernel after it.

    Returns:
        [R, K].

    Raises:
        ValueError: another dtype, or shapes that do not belong together.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"decoding gives bfloat16 or float32, received {dtype}; decode to float32 and cast")
    (rows, length), (block_rows, block_columns) = codes.shape, spec.block_shape
    length *= 2 if spec.block_format.packed else 1
    if scales.shape != (rows // block_rows, length // block_columns) or rows % block_rows or length % block_columns:
        raise ValueError(
            f"codes {tuple(codes.shape)} of {spec.format} in {block_rows}x{block_columns} blocks need scales "
            f"[{rows / block_rows:g}, {length / block_columns:g}], received {tuple(scales.shape)}; "
            "pass both as quantize made them"
        )
    given = out is not None
    out = torch.empty(rows, length, dtype=dtype, device=codes.device) if out is None else out
    if given and (out.shape != (rows, length) or out.dtype != dtype or out.stride(1) != 1 or out.stride(0) % 8):
        raise ValueError(
            f"out must be {dtype} [{rows}, {length}] with rows a multiple of 8 elements apart, received {out.dtype} "
            f"{tuple(out.shape)} with strides {out.stride()}; leave it out for a tensor of its own"
        )
    if out.numel() == 0:
        if clear is not None:
            clear.zero_()
    else:
        codes, scales, shown = codes.contiguous(), scales.contiguous(), out
        alone = not given and block_rows == 1
        if alone and length < _WIDTH and out.numel() % _WIDTH == 0 and _WIDTH % block_columns == 0:
            # Narrow matrices would leave most threads idle; blocks within rows know no row ends.
            codes, scales, shown = (x.view(out.numel() // _WIDTH, -1) for x in (codes, scales, out))
        _launch(codes, scales, shown, spec, (heads, tokens, length // 8 if heads else 0), clear)
    return out


def _launch(
    codes: Tensor, scales: Tensor, out: Tensor, spec: QuantSpec, moved: tuple[int, int, int], clear: Tensor | None
) -> None:
    (rows, length), (block_rows, block_columns) = out.shape, spec.block_shape
    octets = length // 8
    tile = min(_OCTETS, next_power_of_2(octets))
    groups = ceil_div(octets, tile)
    launch(
        decode_kernel, (ceil_div(rows, _ROWS) * groups,), codes.view(torch.int32),
        scales if spec.format == "fp8" else scales.view(torch.uint8),
        out.view(torch.int32) if out.dtype == torch.bfloat16 else out,
        out if clear is None else clear, rows, octets, out.stride(0) // 8,
        length // block_columns, groups, *moved[:2], spec.format, block_rows, block_columns // 8,
        bool(rows % _ROWS or octets % tile), architecture(out.device.index), _ROWS, tile, moved[2],
        0 if clear is None else clear.numel(),
        num_warps=max(1, tile // 32), enable_fp_fusion=False,
    )  # fmt: skip
