"""How numbers are made: quantize, multiply, and the compiled twins that give the same bits faster."""

from quatrain.kernels.matmul import matmul
from quatrain.kernels.quantize import quantize

__all__ = ["matmul", "quantize"]
