"""Matrix products of quantized operands: a @ b.T over the quantized dimension.

Exact emulation: code x block scale has at most 6 significant bits, so the decoded operands are exact; they are
multiplied with fp32 accumulation and the tensor scales are applied to the accumulator in fp32, as an FP4 tensor core
does. Only the order of accumulation differs.
Source: arXiv 2509.25149 section 2 and appendix B.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quatrain.formats import QTensor, QuantSpec
from quatrain.kernels import quantize_cpu

Operand = QTensor | Tensor


def matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a @ b.T, contracting the padded quantized dimension.

    Args:
        a: [..., K] values.
        b: [N, K] values.
        out_dtype: one rounding of alpha x the fp32 accumulator.

    Returns:
        [..., N], dense.

    Raises:
        ValueError: the operands differ in format, transform or padded length, or `b` is no matrix.
    """
    check_pair(a, b)
    if len(b.shape) != 2:
        raise ValueError(f"matmul needs b to be a matrix [N, K], received shape {tuple(b.shape)}")
    rows = math.prod(a.shape[:-1])
    return gemm(a, b, (rows, b.shape[0]), out_dtype).reshape(*a.shape[:-1], b.shape[0])


def check_pair(a: QTensor, b: QTensor) -> None:
    """Raise ValueError unless the two can be contracted block by block."""
    for what, left, right in (
        ("format", a.spec.format, b.spec.format),
        ("transform", a.spec.transform, b.spec.transform),
        ("padded length of the contracted dimension", a.padded_length, b.padded_length),
    ):
        if left != right:
            raise ValueError(f"matmul needs operands of one {what}, received {left} and {right}; quantize both alike")


def gemm(
    a: Operand,
    b: Operand,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    b_rows_contracted: bool = False,
) -> Tensor:
    """a @ b.T (or a @ b) + bias of quantized or plain operands, rounded once to `out_dtype`.

    Args:
        a: [M, K].
        b: [N, K], or [K, N] with `b_rows_contracted` (a weight whose square blocks serve both ways).
        shape: (M, N) of the result: block padding of the rows is cropped.
        out_dtype: of the result; a plain float64 operand makes the product run in float64.
        bias: [N], added to the scaled accumulator before the rounding.
        b_rows_contracted: contract b's rows instead of its columns.
    """
    with torch.autocast(a.codes.device.type if isinstance(a, QTensor) else a.device.type, enabled=False):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return _plain(a, b if b_rows_contracted else b.t(), bias, out_dtype)
        left, right = _decoded(a), _decoded(b)
        left, right = _same_length(left, right if b_rows_contracted else right.t())
        out = (left @ right)[: shape[0], : shape[1]]
        alpha = _alpha(a, b)
        out = out if alpha is None else out.mul_(alpha)
        return (out if bias is None else out.add_(bias.to(out.dtype))).to(out_dtype)


def _plain(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Plain product of a [M, K] and b [K, N]; 16-bit operands accumulate to fp32 when fp32 is asked for."""
    if bias is not None:
        return torch.addmm(bias.to(a.dtype), a, b).to(out_dtype)  # one rounding, as in nn.Linear
    if out_dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        if a.is_cuda:
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()
    return (a @ b).to(out_dtype)


def _decoded(operand: Operand) -> Tensor:
    """fp32 (float64 for a plain float64 tensor) values without the tensor scale, two-dimensional."""
    if isinstance(operand, Tensor):
        return operand if operand.dtype == torch.float64 else operand.float()
    values = block_values(operand)
    return values.unsqueeze(0) if values.dim() == 1 else values.flatten(0, -2)


def block_values(q: QTensor) -> Tensor:
    """`QTensor.block_values` in fp32 by the fastest way here."""
    if q.codes.device.type == "cpu" and quantize_cpu.obstacle() is None:
        return quantize_cpu.decode(q.codes, q.scales, q.spec)
    return q.block_values()


def _same_length(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """left [M, K], right [K, N] with the contracted dimension zero-padded to the longer of the two; one dtype."""
    length = max(left.shape[1], right.shape[0])
    if left.shape[1] < length:
        left = torch.nn.functional.pad(left, (0, length - left.shape[1]))
    if right.shape[0] < length:
        right = torch.nn.functional.pad(right, (0, 0, 0, length - right.shape[0]))
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype), right.to(dtype)


def _alpha(a: Operand, b: Operand) -> Tensor | None:
    scales = [q.tensor_scale for q in (a, b) if isinstance(q, QTensor) and q.spec.block_format.tensor_scale]
    if not scales:
        return None
    return scales[0] if len(scales) == 1 else scales[0] * scales[1]


Parts = tuple[Tensor, Tensor | None, Tensor | None]  # codes, scales, amax of an operand; or a plain tensor alone


def gemm_parts(
    a: Parts,
    a_spec: str | None,
    b: Parts,
    b_spec: str | None,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    b_rows_contracted: bool = False,
) -> Tensor:
    """`gemm` on bare tensors and spec texts: what autograd functions call; one opaque operation to compilers."""
    if torch.compiler.is_compiling() or a[0].is_meta or isinstance(a[0], FakeTensor):
        return _gemm_op(*a, a_spec, *b, b_spec, bias, shape[0], shape[1], b_rows_contracted, out_dtype)
    left, right = _operand(a, a_spec), _operand(b, b_spec)
    return gemm(left, right, shape, out_dtype, bias=bias, b_rows_contracted=b_rows_contracted)


def _operand(parts: Parts, spec: str | None) -> Operand:
    codes, scales, amax = parts
    if spec is None or scales is None or amax is None:
        return codes
    resolved = QuantSpec.from_json(spec)
    length = codes.shape[-1] * (2 if resolved.block_format.packed else 1)
    return QTensor(codes, scales, amax, torch.Size((codes.shape[0], length)), resolved)


@torch.library.custom_op("quatrain::gemm", mutates_args=())
def _gemm_op(
    a: Tensor,
    a_scales: Tensor | None,
    a_amax: Tensor | None,
    a_spec: str | None,
    b: Tensor,
    b_scales: Tensor | None,
    b_amax: Tensor | None,
    b_spec: str | None,
    bias: Tensor | None,
    rows: int,
    columns: int,
    b_rows_contracted: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    left, right = _operand((a, a_scales, a_amax), a_spec), _operand((b, b_scales, b_amax), b_spec)
    out = gemm(left, right, (rows, columns), out_dtype, bias=bias, b_rows_contracted=b_rows_contracted)
    return out.contiguous()


@_gemm_op.register_fake
def _(
    a: Tensor,
    a_scales: Tensor | None,
    a_amax: Tensor | None,
    a_spec: str | None,
    b: Tensor,
    b_scales: Tensor | None,
    b_amax: Tensor | None,
    b_spec: str | None,
    bias: Tensor | None,
    rows: int,
    columns: int,
    b_rows_contracted: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((rows, columns), dtype=out_dtype)
