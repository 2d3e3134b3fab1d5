"""Matrix products of quantized operands: a @ b.T over the quantized dimension.

Exact emulation: code x block scale has at most 6 significant bits, so the decoded operands are exact, in BF16 too,
where GPUs multiply them. They are multiplied with fp32 accumulation and the tensor scales are applied to the
accumulator in fp32, as an FP4 tensor core does. Only the order of accumulation differs.
Source: arXiv 2509.25149 section 2 and appendix B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quatrain.formats import QTensor, QuantSpec, true_divide
from quatrain.kernels import cublaslt, native, quantize_cpu
from quatrain.kernels.dispatch import BACKENDS, triton_obstacle

# Formats whose code x block scale is exact in a 16-bit dtype. (An mxfp8 block with a scale under 2**-124 falls into
# BF16's own subnormals: there its elements are rounded to multiples of 2**-133, as a BF16 tensor's would be.)
_EXACT = {torch.bfloat16: ("nvfp4", "mxfp4", "mxfp8"), torch.float16: ("nvfp4",)}
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Decoded:
    """A quantized operand that was never packed: code x block scale in BF16, as emulation multiplies it.

    Attributes:
        values: bfloat16 [M, K], any strides, whole blocks along K; without the tensor scale.
        amax: fp32 [1], as in QTensor.
        spec: how the values were made.
    """

    values: Tensor
    amax: Tensor
    spec: QuantSpec


Operand = QTensor | Decoded | Tensor


@dataclass(frozen=True)
class _Product:
    """One call of `gemm`."""

    a: Operand
    b: Operand
    shape: tuple[int, int]
    out_dtype: torch.dtype
    bias: Tensor | None
    b_rows_contracted: bool
    device: torch.device


def matmul(a: QTensor, b: QTensor, out_dtype: torch.dtype = torch.bfloat16, backend: str = "auto") -> Tensor:
    """a @ b.T, contracting the padded quantized dimension.

    Args:
        a: [..., K] values.
        b: [N, K] values.
        out_dtype: one rounding of alpha x the fp32 accumulator.
        backend: "auto" chooses; any other is honoured or refused. "reference" and "cpu" multiply in fp32, "triton"
            multiplies the decoded operands on the GPU's tensor cores, "blackwell" the codes on its FP4 cores.

    Returns:
        [..., N], dense.

    Raises:
        ValueError: the operands differ in format, transform or padded length, `b` is no matrix, or the backend is
            unknown or cannot serve them on this machine.
    """
    check_pair(a, b)
    if len(b.shape) != 2:
        raise ValueError(f"matmul needs b to be a matrix [N, K], received shape {tuple(b.shape)}")
    rows = math.prod(a.shape[:-1])
    return gemm(a, b, (rows, b.shape[0]), out_dtype, backend=backend).reshape(*a.shape[:-1], b.shape[0])


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
    backend: str = "auto",
) -> Tensor:
    """a @ b.T (or a @ b) + bias of quantized or plain operands, rounded once to `out_dtype`.

    Args:
        a: [M, K].
        b: [N, K], or [K, N] with `b_rows_contracted` (a weight whose square blocks serve both ways).
        shape: (M, N) of the result: block padding of the rows is cropped.
        out_dtype: of the result; a plain float64 operand makes the product run in float64.
        bias: [N], taken in `out_dtype` as nn.Linear does, added to the scaled accumulator before the rounding.
        b_rows_contracted: contract b's rows instead of its columns.
        backend: as in `matmul`; two plain operands are torch's own product.

    Raises:
        ValueError: an unknown backend, or one that cannot serve these operands on this machine.
    """
    product = _Product(a, b, shape, out_dtype, bias, b_rows_contracted, _tensor(a).device)
    with torch.autocast(product.device.type, enabled=False):
        chosen = _choose(product, backend)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return _plain(a, b if b_rows_contracted else b.t(), bias, out_dtype)
        if isinstance(a, QTensor) and isinstance(b, QTensor):
            if chosen == "blackwell":
                return native.matmul(a, b, shape, out_dtype, bias)
            if chosen == "triton" and _fp8_blocks(product):
                return _fp8(a, b, product)
        on_tensor_cores = product.device.type == "cuda" and backend != "reference"
        return _emulated(product, _working_dtype(product) if on_tensor_cores else _wide_dtype(product))


def _tensor(operand: Operand) -> Tensor:
    """The tensor that holds an operand's elements."""
    if isinstance(operand, QTensor):
        return operand.codes
    return operand.values if isinstance(operand, Decoded) else operand


def _choose(product: _Product, requested: str) -> str:
    """The name of the backend that runs."""
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, received {requested!r}")
    if requested == "auto":
        return next(name for name in ("blackwell", "triton", "cpu", "reference") if not _refusal(name, product))
    refusal = _refusal(requested, product)
    if refusal:
        raise ValueError(f'backend="{requested}" cannot run here: {refusal}; use backend="auto"')
    return requested


def _refusal(backend: str, p: _Product) -> str | None:
    """Why `backend` cannot multiply these operands here, or None."""
    if backend == "blackwell":
        return native.obstacle(p.a, p.b, p.out_dtype, p.bias, p.b_rows_contracted, p.device, p.shape[1])
    if backend == "triton":
        if p.device.type != "cuda":
            return f"it needs operands on a CUDA device, received {p.device}"
        return triton_obstacle(p.device)
    if backend == "cpu":
        return quantize_cpu.obstacle() if p.device.type == "cpu" else f"it needs CPU operands, received {p.device}"
    return None


def matmul_backends(device: torch.device) -> list[tuple[str, str, str]]:
    """What multiplies on `device`, and why: (question, answer, reason) for each line of a table."""
    lt, cores = cublaslt.obstacle(device), native.device_obstacle(device)
    if device.type != "cuda":
        twin = quantize_cpu.obstacle() if device.type == "cpu" else f"plain PyTorch operations on {device.type}"
        why = "emulated: decoded operands, fp32 products; equals FP4 cores up to accumulation order"
        return [(f"matmul on {device}", "reference" if twin else "cpu", f"{why}; {twin}" if twin else why)]
    why = "emulated: decoded operands in 16 bits, fp32 accumulation; equals FP4 cores up to accumulation order"
    if cores is None:
        why = "FP4 tensor cores where operands allow it (this path was never run on such hardware); else emulated"
    found = "triton" if triton_obstacle(device) is None else "reference"
    return [
        (f"matmul on {device}", "blackwell" if cores is None else found, why),
        ("  scale on the device", "no" if lt else "yes", lt or f"cuBLASLt {cublaslt.version()}"),
        ("  FP4 tensor cores", "no" if cores else "yes", cores or "this path was never run on such hardware"),
    ]


def _plain(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Plain product of a [M, K] and b [K, N]; 16-bit operands accumulate to fp32 when fp32 is asked for."""
    if bias is not None:
        return torch.addmm(bias.to(a.dtype), a, b).to(out_dtype)  # one rounding, as in nn.Linear
    return _wide(a, b) if out_dtype == torch.float32 else (a @ b).to(out_dtype)


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, leaving the product of 16-bit operands in fp32."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _wide_dtype(p: _Product) -> torch.dtype:
    plain = [operand.dtype for operand in (p.a, p.b) if isinstance(operand, Tensor)]
    return torch.float64 if torch.float64 in plain else torch.float32


def _working_dtype(p: _Product) -> torch.dtype:
    """The narrowest dtype that holds both operands exactly; accumulation is in fp32 either way."""
    for dtype, formats in _EXACT.items():
        if all(
            operand.spec.format in formats if isinstance(operand, QTensor) else _tensor(operand).dtype == dtype
            for operand in (p.a, p.b)
        ):
            return dtype
    return _wide_dtype(p)


def _emulated(p: _Product, dtype: torch.dtype) -> Tensor:
    """The product of operands decoded to `dtype`; alpha and bias meet the accumulator before the one rounding."""
    left, right = _values(p.a, dtype)[: p.shape[0]], _values(p.b, dtype)
    right = (right if p.b_rows_contracted else right.t())[:, : p.shape[1]]
    left, right = _same_length(left, right)
    if left.is_cuda and dtype in _NARROW and p.out_dtype in _NARROW and cublaslt.obstacle(p.device) is None:
        # Its epilogue rounds before it adds a bias: that sum is formed here, in fp32.
        scaled = cublaslt.matmul(left, right, p.out_dtype if p.bias is None else torch.float32, _factors(p))
        if scaled is not None:
            return scaled if p.bias is None else scaled.add_(p.bias.to(p.out_dtype)).to(p.out_dtype)
    alpha = _alpha(p)
    out = _wide(left, right)
    out = out if alpha is None else out.mul_(alpha)
    return (out if p.bias is None else out.add_(p.bias.to(p.out_dtype))).to(p.out_dtype)


def _values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Values in `dtype` without the tensor scale, [M, K]."""
    if not isinstance(operand, QTensor):
        return _tensor(operand).to(dtype)
    values = _decode(operand, dtype)
    return values.unsqueeze(0) if values.dim() == 1 else values.flatten(0, -2)


def _decode(q: QTensor, dtype: torch.dtype) -> Tensor:
    """`QTensor.block_values` by the fastest way here."""
    if q.codes.device.type == "cpu" and quantize_cpu.obstacle() is None:
        return quantize_cpu.decode(q.codes, q.scales, q.spec).to(dtype)
    if q.codes.is_cuda and triton_obstacle(q.codes.device) is None and dtype in (torch.bfloat16, torch.float32):
        from quatrain.kernels.decode_triton import decode

        return decode(_rows(q.codes), _rows(q.scales), q.spec, dtype)
    return q.block_values(dtype)


def _rows(t: Tensor) -> Tensor:
    """[..., C] as a matrix, also where it is empty."""
    return t.unsqueeze(0) if t.dim() == 1 else t.flatten(0, -2)


def _same_length(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """left [M, K], right [K, N] with the contracted dimension zero-padded to the longer of the two."""
    length = max(left.shape[1], right.shape[0])
    if left.shape[1] < length:
        left = torch.nn.functional.pad(left, (0, length - left.shape[1]))
    if right.shape[0] < length:
        right = torch.nn.functional.pad(right, (0, 0, 0, length - right.shape[0]))
    return left, right


def _scaled(p: _Product) -> list[tuple[Tensor, float]]:
    """(amax, constant) of the operands that have a tensor scale."""
    operands = [operand for operand in (p.a, p.b) if not isinstance(operand, Tensor)]
    return [(o.amax, o.spec.constant) for o in operands if o.spec.block_format.tensor_scale]


def _alpha(p: _Product) -> Tensor | None:
    """fp32 [1]: the product of the tensor scales, or None where neither operand has one."""
    scales = [true_divide(amax, constant) for amax, constant in _scaled(p)]
    if not scales:
        return None
    return scales[0] if len(scales) == 1 else scales[0] * scales[1]


def _factors(p: _Product) -> Tensor | None:
    """`_alpha` and a 0 beside it, as cuBLASLt reads them; in one launch where Triton is there."""
    if triton_obstacle(p.device) is None and _scaled(p):
        from quatrain.kernels.matmul_triton import factors

        return factors(_scaled(p))
    alpha = _alpha(p)
    return None if alpha is None else torch.nn.functional.pad(alpha, (0, 1))


def _fp8_blocks(p: _Product) -> bool:
    """Whether every 128 elements of the contraction share one scale for each row of a and column of b."""
    both = isinstance(p.a, QTensor) and isinstance(p.b, QTensor) and p.a.spec.format == p.b.spec.format == "fp8"
    square = isinstance(p.b, QTensor) and p.b.spec.block_shape[0] > 1
    return both and (square or not p.b_rows_contracted) and p.out_dtype in _NARROW


def _fp8(a: QTensor, b: QTensor, p: _Product) -> Tensor:
    from quatrain.kernels.matmul_triton import fp8_matmul

    parts = (_rows(a.codes), _rows(a.scales), b.codes, b.scales)
    return fp8_matmul(*parts, p.shape, p.out_dtype, p.bias, b_rows_contracted=p.b_rows_contracted)


Parts = tuple[Tensor, Tensor | None, Tensor | None]
"""An operand's (codes, scales, amax); (values, None, amax) of a Decoded one; (tensor, None, None) of a plain one."""


def gemm_parts(
    a: Parts,
    a_spec: str | None,
    b: Parts,
    b_spec: str | None,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    b_rows_contracted: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`gemm` on bare tensors and spec texts: what autograd functions call; one opaque operation to compilers."""
    if torch.compiler.is_compiling() or a[0].is_meta or isinstance(a[0], FakeTensor):
        return _gemm_op(*a, a_spec, *b, b_spec, bias, shape[0], shape[1], b_rows_contracted, out_dtype, backend)
    left, right = _operand(a, a_spec), _operand(b, b_spec)
    return gemm(left, right, shape, out_dtype, bias=bias, b_rows_contracted=b_rows_contracted, backend=backend)


def _operand(parts: Parts, spec: str | None) -> Operand:
    codes, scales, amax = parts
    if spec is None or amax is None:
        return codes
    resolved = QuantSpec.from_json(spec)
    if scales is None:
        return Decoded(codes, amax, resolved)
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
    backend: str = "auto",
) -> Tensor:
    left, right = _operand((a, a_scales, a_amax), a_spec), _operand((b, b_scales, b_amax), b_spec)
    out = gemm(left, right, (rows, columns), out_dtype, bias=bias, b_rows_contracted=b_rows_contracted, backend=backend)
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
    backend: str = "auto",
) -> Tensor:
    return a.new_empty((rows, columns), dtype=out_dtype)
