"""Rounding onto a minifloat's grid: to nearest even, and stochastically with counter-based random bits.

The random bits are a pure function of (seed, offset, row, column), `row` and `column` being coordinates in the
logical, unpadded operand; so they do not depend on padding, device, backend or call order. The generator is part of
the definition of the bits and never changes; tests hold its vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quatrain.formats import E2M1, MiniFloat

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def encode_nearest(values: Tensor, fmt: MiniFloat) -> Tensor:
    """fp32 values of any shape to codes: nearest, ties to the even code, saturating at the maximum.

    A negative value that rounds to zero keeps its sign (code 8 in E2M1). NaN is code 7 in E2M1, which has none, and
    0x7F in E4M3. E2M1 gives uint8, E4M3 torch's dtype.
    """
    if fmt is E2M1:
        return _encode_e2m1(values)
    # Clamp first: before torch 2.12 the eager cast made NaN of what exceeds 448. NaN itself stays NaN, positive.
    values = torch.where(values.isnan(), torch.full_like(values, float("nan")), values)
    return values.clamp(-fmt.maximum, fmt.maximum).to(fmt.dtype)


def _encode_e2m1(values: Tensor) -> Tensor:
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for boundary, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (magnitude >= boundary) if tie_goes_up else (magnitude > boundary)
    code = code | (torch.signbit(values).to(torch.uint8) << 3)
    return code.masked_fill(values.isnan(), 7)


def encode_stochastic(values: Tensor, fmt: MiniFloat, bits: Tensor) -> Tensor:
    """fp32 values to codes: up with probability equal to the distance from the lower neighbour.

    Args:
        values: fp32, any shape.
        fmt: the grid; magnitudes beyond its maximum clip (so a block maximum above it is biased).
        bits: int32 in [0, 65536), same shape. The value goes up when (bits + 1/2) / 65536 is below the fraction.
    """
    magnitude = values.abs().clamp(max=fmt.maximum)
    exponent = torch.frexp(magnitude).exponent - 1
    step = torch.ldexp(torch.ones_like(magnitude), exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits)
    position = magnitude / step  # exact: the step is a power of two
    lower = position.floor()
    up = (bits.float() + 0.5) < (position - lower) * 65536.0
    rounded = (lower + up.float()) * step
    return encode_nearest(torch.copysign(rounded, values), fmt)


def random_bits(key: Tensor, rows: int | Tensor, columns: int, first_column: int = 0) -> Tensor:
    """int32 [rows, columns] of 16 random bits each.

    Args:
        key: int64 [2], (seed, offset).
        rows: of the logical operand, leading dimensions flattened; or the coordinates of some of them, int64 [rows].
        columns: of the logical operand; one 32-bit hash serves columns 2j (low half) and 2j + 1 (high half).
        first_column: coordinate of the first of them, even.
    """
    start, middle = _row_state(key, rows)
    pairs = torch.arange((columns + 1) // 2, dtype=torch.int64, device=key.device) + first_column // 2
    word = pair_hash(start[:, None], middle[:, None], pairs[None, :])
    halves = torch.stack([word & 0xFFFF, word >> 16], dim=-1).flatten(1)
    return halves[:, :columns].to(torch.int32)


def make_key(seed: int | Tensor, offset: int | Tensor, device: torch.device) -> Tensor:
    """int64 [2] on `device` from two integers (taken modulo 2**64) or int64 tensors of one element."""
    words = []
    for word in (seed, offset):
        if isinstance(word, Tensor):
            words.append(word.reshape(1).to(device=device, dtype=torch.int64))
        else:
            words.append(torch.tensor([_signed64(word)], dtype=torch.int64, device=device))
    return torch.cat(words)


def _signed64(value: int) -> int:
    value = int(value) & 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (int64 tensors in [0, 2**32)) in which every input bit moves every output bit."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def pair_hash(start: Tensor, middle: Tensor, pair: Tensor) -> Tensor:
    """The 32 bits of one column pair: `mix32` of a Weyl step, with the row's second word added half way."""
    x = (start + pair * _GOLDEN) & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = (x + middle) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def _row_state(key: Tensor, rows: int | Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words for each row, from seed, offset and row index: int64 [rows] each."""
    low, high = key & _MASK, (key >> 32) & _MASK
    first = mix32((low[0] + _GOLDEN) & _MASK)
    second = mix32((high[0] + 0x85EBCA6B) & _MASK)
    for word in (high[0], low[1], high[1]):
        first = mix32(first ^ word)
    for word in (low[0], high[1], low[1]):
        second = mix32(second ^ word)
    row = rows if isinstance(rows, Tensor) else torch.arange(rows, dtype=torch.int64, device=key.device)
    start = mix32(first ^ row)
    middle = mix32((second + row * _GOLDEN) & _MASK)
    return start, middle
