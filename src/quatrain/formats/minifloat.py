"""Small floating-point numbers: E2M1, E4M3, E5M2 and the exponent-only E8M0.

A minifloat is pure data: how many exponent and mantissa bits, the bias, the largest finite value, and which
codes are special. Its grid is enumerated from those, so that tests can walk through every code.
Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0); OCP 8-bit Floating Point v1.0 (E4M3, E5M2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class MiniFloat:
    """One element or scale format; ties always go to the even code."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    maximum: float  # largest finite value
    dtype: torch.dtype | None  # torch's own dtype where one exists and can be cast to
    signed: bool = True

    @property
    def bits(self) -> int:
        """Width of one code in bits."""
        return self.exponent_bits + self.mantissa_bits + int(self.signed)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; below it the step no longer shrinks."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value (2 for E2M1, 8 for E4M3)."""
        return _floor_log2(self.maximum)

    def values(self) -> Tensor:
        """Value of every code, fp32 [2**bits]; NaN and infinity where the code says so."""
        if self.name == "e8m0":
            return decode_e8m0(torch.arange(256, dtype=torch.uint8))
        return torch.tensor(_grid(self), dtype=torch.float32)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (uint8, or torch's own dtype) of any shape to fp32 values of that shape."""
        if self.dtype is not None:
            return (codes.view(self.dtype) if codes.dtype == torch.uint8 else codes).float()
        if self is E8M0:
            return decode_e8m0(codes)
        return self.values().to(codes.device)[codes.long()]


def _floor_log2(value: float) -> int:
    return int(torch.frexp(torch.tensor(value, dtype=torch.float64)).exponent) - 1


def _grid(fmt: MiniFloat) -> tuple[float, ...]:
    magnitudes = []
    for code in range(1 << (fmt.exponent_bits + fmt.mantissa_bits)):
        exponent, mantissa = code >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
        normal = exponent > 0
        fraction = mantissa / (1 << fmt.mantissa_bits) + (1.0 if normal else 0.0)
        value = fraction * 2.0 ** (max(exponent, 1) - fmt.bias)
        if value > fmt.maximum:  # E4M3 has one NaN code above 448; E5M2 has an infinity and three NaNs
            value = float("inf") if fmt.name == "e5m2" and mantissa == 0 else float("nan")
        magnitudes.append(value)
    return (*magnitudes, *(-m for m in magnitudes))


def decode_e8m0(codes: Tensor) -> Tensor:
    """Power-of-two scales, uint8 to fp32: 2**(code - 127); 255 is NaN, 0 is the fp32 subnormal 2**-127."""
    wide = codes.to(torch.int32)
    bits = torch.where(wide == 0, torch.full_like(wide, 0x00400000), wide << 23)
    bits = torch.where(wide == 255, torch.full_like(wide, 0x7FC00000), bits)
    return bits.view(torch.float32)


def true_divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, correctly rounded on every device: on GPUs torch multiplies by the reciprocal of a Python number."""
    return x / x.new_full((1,), divisor)


E2M1 = MiniFloat("e2m1", 2, 1, 1, 6.0, None)
E4M3 = MiniFloat("e4m3", 4, 3, 7, 448.0, torch.float8_e4m3fn)
E5M2 = MiniFloat("e5m2", 5, 2, 15, 57344.0, torch.float8_e5m2)
E8M0 = MiniFloat("e8m0", 8, 0, 127, 2.0**127, None, signed=False)
