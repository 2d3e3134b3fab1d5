"""FP4 products on the tensor cores of Blackwell, through torch.nn.functional.scaled_mm.

It has never run on such hardware: tests check the arguments it hands over, not what the cores answer.
Both operands must be contracted along their stored rows, since the cores read 4-bit codes in no other order.
Source: torch's scaled_mm documentation; the tile order of scales is in `quatrain.formats.swizzle_scales`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quatrain.formats import QTensor, swizzle_scales

_CODES_PER_ROW = 32  # 16 bytes: what the cores load at once
_COLUMNS = 16


@dataclass(frozen=True)
class _Engine:
    """How the cores take one format."""

    recipe: str  # of the block scales
    capabilities: tuple[int, ...]  # majors that multiply it


_ENGINES = {"nvfp4": _Engine("BlockWise1x16", (10, 12)), "mxfp4": _Engine("BlockWise1x32", (10,))}


def device_obstacle(device: torch.device, format_name: str = "nvfp4") -> str | None:
    """Why the FP4 cores cannot be used on `device`, or None."""
    majors = " or ".join(f"{major}.x" for major in _ENGINES[format_name].capabilities)
    need = f"{format_name} products need a Blackwell GPU (compute capability {majors})"
    if device.type != "cuda":
        return f"{need}, received operands on {device}"
    if torch.version.hip is not None:
        return f"{need}, this is a ROCm build of torch"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _ENGINES[format_name].capabilities:
        return f"{need}, {torch.cuda.get_device_name(device)} has {major}.{minor}"
    if not hasattr(functional, "scaled_mm") or not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no scaled_mm for FP4; install 2.11 or newer"
    return None


def obstacle(
    a: object,
    b: object,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    b_rows_contracted: bool,
    device: torch.device,
    columns: int,
) -> str | None:
    """Why this product cannot run on the FP4 cores, or None.

    Arguments as in `quatrain.kernels.matmul.gemm`; columns: of the result.
    """
    if not isinstance(a, QTensor) or not isinstance(b, QTensor):
        return "both operands must be packed codes"
    if a.spec.format not in _ENGINES or b.spec.format != a.spec.format:
        return f"the FP4 cores multiply {' and '.join(_ENGINES)}, received {a.spec.format} and {b.spec.format}"
    reason = device_obstacle(device, a.spec.format)
    if reason is not None:
        return reason
    if b_rows_contracted:
        return "the FP4 cores contract stored rows only, and b is to be contracted along its columns"
    length = a.padded_length
    if length % _CODES_PER_ROW or columns % _COLUMNS or length == 0:
        return (
            f"the contracted length must be a multiple of {_CODES_PER_ROW} and the columns of {_COLUMNS}, "
            f"received {length} and {columns}"
        )
    if out_dtype not in (torch.bfloat16, torch.float32):
        return f"the result must be bfloat16 or float32, received {out_dtype}"
    if bias is not None and out_dtype != torch.bfloat16:
        return "a bias needs a bfloat16 result"
    return None


def matmul(a: QTensor, b: QTensor, shape: tuple[int, int], out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """a @ b.T + bias on the FP4 cores; `obstacle` must have found nothing.

    Args:
        a: [..., K] nvfp4 or mxfp4.
        b: [N, K], the same format.
        shape: (M, N) of the result.
        out_dtype: bfloat16 or float32.
        bias: [N], taken in `out_dtype`.
    """
    left, left_scales = _codes(a, shape[0]), _scales(a, shape[0])
    right, right_scales = _codes(b, shape[1]), _scales(b, shape[1])
    if shape[0] == 0:
        return torch.empty(shape, dtype=out_dtype, device=left.device)
    recipes = [getattr(functional.ScalingType, _ENGINES[a.spec.format].recipe)]
    swizzles = [functional.SwizzleType.SWIZZLE_32_4_4]
    if a.spec.block_format.tensor_scale:
        recipes.append(functional.ScalingType.TensorWise)
        swizzles.append(functional.SwizzleType.NO_SWIZZLE)
    return functional.scaled_mm(
        left,
        right.t(),
        left_scales,
        recipes,
        right_scales,
        recipes,
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        bias=None if bias is None else bias.to(out_dtype),
        output_dtype=out_dtype,
    )


def _codes(q: QTensor, rows: int) -> Tensor:
    """[rows, K/2] of the packed dtype that torch has for pairs of E2M1; padding rows are left out."""
    codes = q.codes.unsqueeze(0) if q.codes.dim() == 1 else q.codes.flatten(0, -2)
    return codes[:rows].contiguous().view(torch.float4_e2m1fn_x2)


def _scales(q: QTensor, rows: int) -> list[Tensor]:
    """Block scales in the cores' tile order, one for each row; then the tensor scale of a format that has one."""
    scales = q.scales.unsqueeze(0) if q.scales.dim() == 1 else q.scales.flatten(0, -2)
    block_rows = q.spec.block_shape[0]
    if block_rows > 1:
        scales = scales.view(torch.uint8).repeat_interleave(block_rows, dim=0).view(scales.dtype)
    block = swizzle_scales(scales[:rows])
    if q.spec.block_format.tensor_scale:
        return [block, q.tensor_scale]
    return [block.view(torch.float8_e8m0fnu)]
