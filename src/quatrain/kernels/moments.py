"""Moments of Adam kept in NVFP4: what is stored, and how it is read and written, in plain PyTorch.

A tensor flattens to a matrix [R, K]; a row is cut into tiles of T columns and blocks of 16 (K is padded with zeros to
whole tiles). The first moment is rotated (Hadamard 16, fixed signs) and rounded with a dither that is taken off again
(`dither.py`; with `faithful` stochastically). Of the second one the square root s is kept: each tile's mean in BF16
and, rotated (Hadamard 16, no signs), the rest to nearest. The rest is the logarithm of s over the mean, in octaves: an
error of so many percent for small and large ones alike, where a difference would lose the small ones beside a large
one, and divide by next to nothing. The mean that is stored is the one with which the tile's sum of squares survives the
rounding. The first moment is kept relative to the power of two near the decoded s over the mean: so what a coordinate
takes up of its neighbours' rounding has its own size.

Second-level scales are powers of two, so a block's codes do not depend on the rest of its row. E4M3's sign, which a
scale has no use for, stands for a factor of 2**-14: blocks far below the row's largest keep their precision.

Sources: Full-Stack FP4 (Ding et al., 2026) for the pipeline; arXiv 2512.02010 for the choice between 4 and 6. The
scales, the half-precision rotation, the choice by tables and the energy match are this project's own. Every order of
operations here is part of the definition of the bits. Blocks lie across, [16, N]: operations run over long rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quatrain.formats.transform import FIXED_SIGNS
from quatrain.kernels.rounding import mix32, pair_hash
from quatrain.kernels.scaling import tree_sum

MASTERS = ("fp32", "bf16+int8", "bf16-sr")
CHUNK = 65536  # columns under one second-level scale
ROW_CONSTANT = 2688.0  # 448 * 6, as in NVFP4: a row's scale is its amax / 2688
SCALED = 65536.0  # s = sqrt(v) is computed in units of 2**-16, which keeps v off the smallest fp32 numbers
V_FLOOR = 2.0**-100  # v in those units is never below this
SMALLEST_M = 27 << 23  # bits of 2**-100: a block of the first moment is scaled as if its largest were no smaller
X_FLOOR = 2.0**-13  # a rotated block whose largest magnitude, in half precision, is smaller becomes zero
HALF_MAX = 65504.0
# Bits of fp32 read as an integer grow with its logarithm, straight between powers of two: one octave is 2**23.
ONE = 0x3F800000
OCTAVES = (-4, 7)  # s over its tile's mean is kept within: at most the tile's elements, and a sixteenth
FINE = 4096.0  # parts of an octave that are told apart
MAGIC = 12582912.0  # 1.5 * 2**23: what is added to it is rounded to an integer, found in the lowest bits
# As far as rounding noise reaches: s over its tile's mean, m by units of its block. What is held lies far enough below.
DEAD_S, HELD_S, DEAD_M = 0.125, 0.0625, 8.0

# What 4 instead of 6 adds to a block's error, by 2 * magnitude / scale rounded: means over normally distributed
# blocks, in 1/200 of the squared scale. For v of the squared error, for m of the variance of stochastic rounding.
NEAREST_TABLE = (0, 8, 7, 1, 8, -18, 2, 21, 50, -42, -106, -5, 3, -12, 0, 0)
STOCHASTIC_TABLE = (6, 13, 12, 7, 7, -26, 5, 45, 61, -99, -108, -60, 16, 0, 0, 0)

# Odd multipliers that make eight words, of two draws each, of a block's hash.
SPREAD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)
_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


@dataclass(frozen=True)
class MomentSpec:
    """How the moments of a tensor are kept.

    Args:
        tile: columns that share one mean of sqrt(v): a power of two from 16 to 256 (narrower tensors use less).
        faithful: the paper's bare pipeline: differences from the mean, the first moment as it is and without a
            dither, no deadband, no energy-matched mean, means to nearest.
        master: what carries the precision of a BF16 parameter: "fp32", "bf16+int8" or "bf16-sr".

    Raises:
        ValueError: a tile or master that is not of these.
    """

    tile: int = 128
    faithful: bool = False
    master: str = "fp32"

    def __post_init__(self) -> None:
        if self.tile not in (16, 32, 64, 128, 256):
            raise ValueError(f"tile must be a power of two from 16 to 256, received {self.tile!r}; use tile=128")
        if self.master not in MASTERS:
            raise ValueError(f"master must be one of {', '.join(MASTERS)}, received {self.master!r}")


@dataclass(frozen=True)
class Layout:
    """Shape of a matrix's moments: R, K, tile T and K rounded up to whole tiles."""

    rows: int
    columns: int
    tile: int
    padded: int

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.padded // 16

    @property
    def chunks(self) -> int:
        """Second-level scales of a row."""
        return -(-self.padded // CHUNK)


def layout(rows: int, columns: int, spec: MomentSpec) -> Layout:
    """How the moments of [rows, columns] lie.

    Raises:
        ValueError: fewer than 16 columns.
    """
    if columns < 16:
        raise ValueError(
            f"NVFP4 moments need at least 16 columns, received {columns}; keep this tensor's state in fp32"
        )
    tile = min(spec.tile, 1 << (columns.bit_length() - 1))
    return Layout(rows, columns, tile, -(-columns // tile) * tile)


def empty_state(rows: int, columns: int, spec: MomentSpec, device: torch.device) -> dict[str, Tensor]:
    """Zero moments of a matrix.

    Returns:
        m_codes, v_codes uint8 [R, K'/2] (K' whole tiles, the first of two codes in the low bits); m_scales, v_scales
        E4M3 [R, K'/16]; m_amax, v_amax fp32 [R, chunks of 65,536 columns], 2688 times a power of two; v_mean BF16
        [R, K'/T].

    Raises:
        ValueError: fewer than 16 columns.
    """
    form = layout(rows, columns, spec)
    state = {"v_mean": torch.zeros(rows, form.padded // form.tile, dtype=torch.bfloat16, device=device)}
    for name in ("m", "v"):
        state[f"{name}_codes"] = torch.zeros(rows, form.padded // 2, dtype=torch.uint8, device=device)
        state[f"{name}_scales"] = torch.zeros(rows, form.blocks, dtype=torch.float8_e4m3fn, device=device)
        state[f"{name}_amax"] = torch.zeros(rows, form.chunks, dtype=torch.float32, device=device)
    return state


def butterfly(x: Tensor) -> Tensor:
    """The Hadamard sums of each column of [16, N], h = 1, 2, 4, 8, each sum rounded to x's dtype; no factor."""
    spare = torch.empty_like(x)
    source, target = x, spare
    for h in (1, 2, 4, 8):
        pairs, out = source.view(8 // h, 2, h, -1), target.view(8 // h, 2, h, -1)
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        source, target = target, (torch.empty_like(x) if h == 1 else source)
    return source


def square_root(x: Tensor) -> Tensor:
    """sqrt(x), correctly rounded: on CPUs torch's fp32 root may be the neighbour, its fp64 root's rounding is not."""
    return x.double().sqrt_().float() if x.device.type == "cpu" else x.sqrt()


def across(x: Tensor) -> Tensor:
    """[rows, K'] to [16, N]: element i of block n, blocks in row-major order."""
    return x.reshape(-1, 16).t().contiguous()


def along(x: Tensor, rows: int) -> Tensor:
    """The inverse of `across`."""
    return x.t().reshape(rows, -1)


def doubled(codes: Tensor) -> Tensor:
    """Twice the E2M1 values of codes uint8, as fp32: they are integers."""
    c = (codes & 7).view(torch.int8)
    magnitude = torch.maximum(torch.maximum(c, 2 * c - 4), 4 * c - 16)
    return (magnitude * (1 - ((codes >> 3) << 1).view(torch.int8))).float()


def unpack_across(packed: Tensor) -> Tensor:
    """Codes of rows uint8 [rows, K'/2] to [16, N], one code each."""
    pairs = packed.reshape(-1, 8).t()
    return torch.stack([pairs & 0xF, pairs >> 4], dim=1).view(16, -1)


def pack_along(codes: Tensor, rows: int) -> Tensor:
    """The inverse of `unpack_across`."""
    pairs = codes.view(8, 2, -1)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).t().reshape(rows, -1)


def read_units(scales: Tensor, amax: Tensor) -> Tensor:
    """Value of code 1.0 in each block, fp32 [N], from E4M3 [rows, K'/16] and fp32 [rows, chunks]."""
    byte = scales.view(torch.uint8).to(torch.int32)
    code = byte & 0x7F
    exponent = code - (byte >> 7) * 112 - 56
    row = (amax.view(torch.int32) & 0x7F800000) - (11 << 23)  # 2688 is 1.3125 * 2**11
    row = row.repeat_interleave(CHUNK // 16, dim=1)[:, : scales.shape[1]] if amax.shape[1] > 1 else row
    units = ((exponent << 20) + row).view(torch.float32)
    units = torch.where(code == 0, torch.zeros_like(units), units)
    return torch.where(code == 127, torch.full_like(units, math.nan), units).flatten()


def write_units(units: Tensor, scales: Tensor, amax: Tensor) -> None:
    """Store units [N], numbers of four significant bits (NaN where a block is lost), as scales and row maxima.

    The row's scale is the power of two 7 binades below the row's largest unit; NaN does not count.
    """
    bits = units.view(torch.int32).view(scales.shape)
    lost = units.isnan().view(scales.shape)
    blocks, chunks = scales.shape[1], amax.shape[1]
    whole = torch.zeros(scales.shape[0], chunks * min(CHUNK // 16, blocks), dtype=torch.int32, device=units.device)
    whole[:, :blocks] = bits.masked_fill(lost, 0)
    largest = whole.view(scales.shape[0], chunks, -1).amax(dim=2)
    row = (largest & 0x7F800000) - (7 << 23)
    row = torch.where(largest == 0, torch.zeros_like(row), row)
    amax.copy_(row.view(torch.float32) * ROW_CONSTANT)
    row = row.repeat_interleave(CHUNK // 16, dim=1)[:, :blocks] if chunks > 1 else row
    code = ((bits - row) >> 20) + 56
    byte = torch.where(code >= 8, code, torch.where(code >= -104, code + (112 + 128), torch.zeros_like(code)))
    byte = torch.where(bits == 0, torch.zeros_like(byte), byte)
    scales.view(torch.uint8).copy_(byte.masked_fill(lost, 127))


@dataclass(frozen=True)
class Encoded:
    """Blocks in four bits.

    Attributes:
        codes: uint8 [16, N].
        units: fp32 [N], the value of code 1.0 in the units of the rotated block before its factor 1/4.
        finite: bool [N]; False where an element of the block was infinite or NaN.
    """

    codes: Tensor
    units: Tensor
    finite: Tensor


def encode_blocks(
    x: Tensor,
    table: tuple[int, ...],
    draws: Tensor | None,
    *,
    up: bool,
    lines: tuple[tuple[float, float], ...] = (),
) -> Encoded:
    """Rotated blocks, half precision [16, N], to codes and units.

    Args:
        x: the blocks.
        table: which of 4 and 6, see `NEAREST_TABLE`.
        draws: int32 [16, N], 7 random bits each, for stochastic rounding; None for nearest.
        up: round scales up, so that nothing clips (the mean of stochastic rounding then has no bias).
        lines: slope and end of straight lines that a magnitude's place among the codes is to stay under.
    """
    magnitude = x.abs()
    largest = magnitude.amax(dim=0).float()
    finite = largest <= HALF_MAX  # False for NaN
    alive = finite & (largest >= X_FLOOR)
    largest = torch.where(alive, largest, torch.ones_like(largest))
    to6 = _four_bits(largest * torch.full_like(largest, 1.0 / 6.0), up=up)
    to4 = _four_bits(largest * 0.25, up=up)
    index = (magnitude * (1.0 / to6).half()).float().mul_(2.0).round_()
    four = _look_up(index, table).sum(dim=0, dtype=torch.int32) < 0
    unit = torch.where(four, to4, to6)
    scaled = (magnitude * (1.0 / unit).half()).float()
    # E2M1's code is the smallest of three lines over its eight values.
    position = torch.minimum(torch.minimum(scaled * 2.0, scaled + 2.0), scaled * 0.5 + 4.0)
    for slope, end in lines:
        position = torch.minimum(position, scaled * slope + end)
    if draws is None:
        code = position.round_().clamp_(max=7.0).to(torch.uint8)
    else:
        code = (position.mul_(128.0).round_().to(torch.int32).add_(draws) >> 7).to(torch.uint8)
    code |= (x.view(torch.int16) >> 12).to(torch.uint8) & 8
    return Encoded(code * alive, torch.where(alive, unit, torch.zeros_like(unit)), finite)


def _four_bits(value: Tensor, *, up: bool) -> Tensor:
    """fp32 to four significant bits, E4M3's precision: nearest even, or up."""
    bits = value.view(torch.int32)
    carry = 0xFFFFF if up else 0x7FFFF + ((bits >> 20) & 1)
    return ((bits + carry) & -0x100000).view(torch.float32)


def _look_up(index: Tensor, table: tuple[int, ...]) -> Tensor:
    """Table entries (int8) of an index held in fp32."""
    values = torch.tensor(table, dtype=torch.int8, device=index.device)
    return values.index_select(0, index.to(torch.int32).clamp_(0, 15).view(-1)).view(index.shape)


def octaves(ratio: Tensor, whole: Tensor) -> Tensor:
    """Logarithm of s over its tile's mean, straight between powers of two and within `OCTAVES`.

    Args:
        ratio: fp32 [16, N].
        whole: bool [N]; 0 where it is False.
    """
    low, high = (torch.where(whole, ONE + (end << 23), ONE) for end in OCTAVES)
    bits = torch.minimum(torch.maximum(ratio.view(torch.int32), low), high)
    return ((bits >> 11) - (ONE >> 11)).float() * (1.0 / FINE)


def ratios(octaves: Tensor) -> Tensor:
    """The inverse of `octaves`, to `FINE` parts of an octave; fp32."""
    return (((octaves * FINE + MAGIC).view(torch.int32) << 11) + ONE).view(torch.float32)


def power_near(ratio: Tensor) -> Tensor:
    """The power of two that a positive number is 0.75 to 1.5 times as large as: equal for what scatters around 1."""
    return ((ratio.view(torch.int32) + 0x400000) & 0x7F800000).view(torch.float32)


def nearest_power(value: Tensor, exponent: int) -> Tensor:
    """2**exponent over the power of two at or below a positive value."""
    return ((254 + exponent << 23) - (value.view(torch.int32) & 0x7F800000)).view(torch.float32)


def signs(device: torch.device) -> Tensor:
    """The first moment's signs, fp32 [16, 1]."""
    return torch.tensor(FIXED_SIGNS, dtype=torch.float32, device=device).unsqueeze(1)


def tile_sums(per_block: Tensor, tile: int) -> Tensor:
    """Sums over the blocks of each tile, pairwise: [N] to [N / (tile / 16)]."""
    return tree_sum(per_block.view(-1, tile // 16), 1)


def block_hashes(counter: Tensor, tensor_id: int, rows: Tensor, blocks: int) -> Tensor:
    """32 random bits for each block of some rows, int64 [len(rows) * blocks].

    Args:
        counter: int64 [2], seed and step.
        tensor_id: of the tensor.
        rows: int64, indices of rows.
        blocks: of one row.
    """
    low, high = counter & _MASK, (counter >> 32) & _MASK
    first, second = mix32((low[0] + _GOLDEN) & _MASK), mix32((high[0] + 0x85EBCA6B) & _MASK)
    for word in (high[0], low[1], high[1]):
        first = mix32(first ^ word)
    for word in (low[0], high[1], low[1]):
        second = mix32(second ^ word)
    first = mix32(first ^ (tensor_id & _MASK))
    second = (second + ((tensor_id * 0x85EBCA6B) & _MASK)) & _MASK
    start, middle = mix32(first ^ rows), mix32((second + rows * _GOLDEN) & _MASK)
    index = torch.arange(blocks, dtype=torch.int64, device=rows.device)
    return pair_hash(start[:, None], middle[:, None], index[None, :]).flatten()


def element_draws(hashes: Tensor) -> Tensor:
    """16 random bits for each element, int32 [16, N], of block hashes int64 [N].

    Word j of a block serves elements j and j + 4 of its first eight (j < 4) or last eight (j >= 4).
    """
    word = hashes.to(torch.int32) * torch.tensor(
        [c - (1 << 32) if c >= 1 << 31 else c for c in SPREAD], dtype=torch.int32, device=hashes.device
    ).unsqueeze(1)
    high = (word >> 16) & 0xFFFF
    return torch.stack([(word & 0xFFFF) ^ high, high], dim=1).view(2, 4, 2, -1).transpose(1, 2).reshape(16, -1)
