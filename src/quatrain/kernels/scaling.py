"""Block scales: from the maximum of each block to the scale that is stored and the multiplier used before rounding.

Every order of fp32 operations here is part of the definition of the bits.
Sources: arXiv 2509.25149 section 2 (NVFP4), arXiv 2512.02010 (four-over-six), OCP MX v1.0 (E8M0 rules),
DeepSeek-V3 report section 3.3 (FP8).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quatrain.formats import E8M0, FLT_MAX, QuantSpec, true_divide

# Multipliers of the block scale that "search" tries, smallest first.
SEARCH_MULTIPLIERS = tuple(float(np.float32(0.8 + 0.05 * i)) for i in range(21))


@dataclass(frozen=True)
class BlockScales:
    """Scales of all blocks, fp32 or stored form, [M/b, K/b].

    Attributes:
        stored: what the QTensor keeps (E4M3, uint8 E8M0 or fp32).
        values: the same as fp32.
        multiplier: what elements are multiplied by before rounding; never infinite.
    """

    stored: Tensor
    values: Tensor
    multiplier: Tensor


def tensor_encode_scale(amax: Tensor, spec: QuantSpec) -> Tensor:
    """fp32 [1]: constant / amax, at most FLT_MAX; 1 for a zero or infinite amax."""
    encode = torch.full_like(amax, spec.constant) / amax
    encode = torch.where(encode == float("inf"), torch.full_like(amax, FLT_MAX), encode)
    return torch.where((amax == 0) | (encode == 0), torch.ones_like(amax), encode)


def nvfp4_ideal_scale(block_max: Tensor, amax: Tensor, spec: QuantSpec) -> Tensor:
    """The block scale before E4M3: plain rules multiply by encode/6 once, the others divide first."""
    encode = tensor_encode_scale(amax, spec)
    if spec.scale == "to-6":
        sixth = torch.full_like(amax, 1.0) / torch.full_like(amax, spec.element_max)
        return block_max * (encode * sixth)
    return true_divide(block_max, spec.element_max) * encode


def nvfp4_scales(ideal: Tensor, amax: Tensor, spec: QuantSpec) -> BlockScales:
    """E4M3 scales (never above 448, no lower clamp) and 1 / (scale * (1 / encode)), capped at FLT_MAX."""
    stored = _e4m3(ideal.clamp(max=448.0), spec.scale_rounding)
    values = stored.float()
    decode = 1.0 / tensor_encode_scale(amax, spec)
    multiplier = 1.0 / (values * decode)
    multiplier = torch.where(multiplier == float("inf"), torch.full_like(multiplier, FLT_MAX), multiplier)
    return BlockScales(stored, values, multiplier)


def _e4m3(value: Tensor, rounding: str) -> Tensor:
    nearest = value.to(torch.float8_e4m3fn)
    if rounding == "nearest":
        return nearest
    below = nearest.float() < value  # one code up is the next larger scale
    return (nearest.view(torch.uint8) + below.to(torch.uint8)).view(torch.float8_e4m3fn)


def mx_scales(block_max: Tensor, spec: QuantSpec) -> BlockScales:
    """E8M0 scales by "floor", "ceil", "even" or "rceil"; 255 (NaN) for a non-finite block."""
    element = spec.block_format.element
    bits = block_max.view(torch.int32)
    if spec.scale == "rceil":
        code = _round_up_exponent((block_max * (1.0 / torch.full_like(block_max, element.maximum))).view(torch.int32))
    elif spec.scale == "ceil":
        code = (bits >> 23) - element.max_exponent + ((bits & 0x7FFFFF) != 0).int()
    elif spec.scale == "even":
        half_step = 1 << (23 - element.mantissa_bits - 1)  # round the mantissa to the element's own bits first
        code = ((bits + half_step) >> 23) - element.max_exponent
    else:
        code = (bits >> 23) - element.max_exponent
    code = torch.where(torch.isfinite(block_max), code.clamp(0, 254), torch.full_like(code, 255))
    stored = code.to(torch.uint8)
    multiplier = E8M0.decode((254 - code.clamp(max=254)).to(torch.uint8))  # the exact reciprocal
    multiplier = torch.where(code == 255, torch.full_like(multiplier, float("nan")), multiplier)
    return BlockScales(stored, E8M0.decode(stored), multiplier)


def _round_up_exponent(bits: Tensor) -> Tensor:
    """Biased exponent of the smallest power of two that is not below a positive fp32 number."""
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2**-126 the exponent field is 0 and 2**-127 is mantissa 0x400000.
    return exponent + (mantissa > torch.where(exponent == 0, 0x400000, 0)).int()


def fp8_scales(block_max: Tensor, spec: QuantSpec) -> BlockScales:
    """fp32 scales amax / 448, or the next power of two above; 1 for a block of zeros."""
    scale = block_max / torch.full_like(block_max, spec.block_format.element.maximum)
    if spec.scale == "pow2":
        scale = E8M0.decode(_round_up_exponent(scale.view(torch.int32)).clamp(0, 254).to(torch.uint8))
        scale = torch.where(torch.isfinite(block_max), scale, block_max)
    scale = torch.where((scale == 0) | (block_max == 0), torch.ones_like(scale), scale)
    multiplier = 1.0 / scale
    multiplier = torch.where(multiplier == float("inf"), torch.full_like(multiplier, FLT_MAX), multiplier)
    return BlockScales(scale, scale, multiplier)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Pairwise sum over a dimension of power-of-two length: halves are added, 8 + 8, 4 + 4, 2 + 2, 1 + 1.

    The order is fixed so that every twin gives the same fp32 number.
    """
    x = x.movedim(dim, -1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def block_error(difference: Tensor, error: str) -> Tensor:
    """Error of each block from decoded minus input, fp32 [M/b, rows, K/b, columns] -> [M/b, K/b].

    "mse" sums squares, "mae" sums magnitudes (rows first, then down the rows), "absmax" takes the largest.
    """
    magnitude = difference.abs()
    if error == "absmax":
        return magnitude.amax(dim=(1, 3))
    terms = magnitude * magnitude if error == "mse" else magnitude
    return tree_sum(tree_sum(terms, 3), 1)
