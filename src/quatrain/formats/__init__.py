"""What a number is: minifloats, block formats, the quantization spec and the quantized tensor. Pure data."""

from quatrain.formats.block import FORMATS, FP8, MXFP4, MXFP8, NVFP4, BlockFormat
from quatrain.formats.minifloat import E2M1, E4M3, E5M2, E8M0, FLT_MAX, MiniFloat, true_divide
from quatrain.formats.qtensor import QTensor, pack, swizzle_scales, unpack, unswizzle_scales
from quatrain.formats.spec import QuantSpec
from quatrain.formats.transform import Hadamard

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "FLT_MAX",
    "FORMATS",
    "FP8",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "BlockFormat",
    "Hadamard",
    "MiniFloat",
    "QTensor",
    "QuantSpec",
    "pack",
    "swizzle_scales",
    "true_divide",
    "unpack",
    "unswizzle_scales",
]
