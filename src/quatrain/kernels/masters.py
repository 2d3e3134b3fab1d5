"""What carries the precision of BF16 weights: stochastic rounding, or eight more bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def round_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 to BF16, up (in magnitude) where 16 random bits (int32, same shape) carry; NaN stays NaN."""
    rounded = ((values.view(torch.int32) + bits) >> 16).to(torch.int16).view(torch.bfloat16)
    return rounded.masked_fill(values.isnan(), math.nan)  # without asking first: a GPU would have to wait


def split_master(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 weights to a BF16 parameter and the next eight bits, int8.

    The weight is rounded to 16 significant bits; as integers, its bits are 256 times those of the parameter plus the
    correction, which lies in [-128, 127]. So together they give the weight back to 2**-16 of itself.
    """
    bits = (weight.view(torch.int32) + 0x80) >> 8
    narrow = (bits + 0x80) >> 8
    correction = (bits - (narrow << 8)).to(torch.int8)
    parameter = narrow.to(torch.int16).view(torch.bfloat16)
    lost = weight.isnan()
    return parameter.masked_fill(lost, math.nan), correction.masked_fill(lost, 0)


def join_master(parameter: Tensor, correction: Tensor) -> Tensor:
    """fp32 weights from what `split_master` gave; of a parameter that others changed, at most half a unit away."""
    bits = (parameter.view(torch.int16).to(torch.int32) << 8) + correction.to(torch.int32)
    return (bits << 8).view(torch.float32)
