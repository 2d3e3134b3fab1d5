"""GPU parts of `matmul` in Triton: the product of FP8 blocks, and the scale of a product in one launch.

FP8 scales are fp32 numbers, so code x scale fits no 16-bit dtype. Codes do: each 128 of them are multiplied as BF16
with fp32 accumulation, and the partial product takes both scales in fp32 before it is added up.
Source: DeepSeek-V3 report section 3.3.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.kernels.launch_triton import ceil_div, launch

_BLOCK = 128  # the format's; every block of the contraction has one scale for each row and each column
_TILE_M, _TILE_N, _STEP, _WARPS = 128, 64, 64, 8  # the largest that keeps both accumulators in registers, SM80 to SM120
_GROUP = 8  # tiles that share columns of b run side by side, so that b comes from the cache


@triton.jit
def _e4m3(codes):
    """uint8 E4M3 codes in fp32: the bits move to fp32's fields, and 2**120 brings the exponents' biases into line."""
    wide = codes.to(tl.int32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def fp8_kernel(
    a_ptr,  # uint8 [M, K]
    a_scale_ptr,  # fp32 [M / A_BLOCK, K / 128]
    b_ptr,  # uint8, N and K by strides
    b_scale_ptr,  # fp32, N / B_BLOCK and K / 128 by strides
    bias_ptr,  # [N]
    out_ptr,  # [M, N]
    rows,
    columns,
    blocks,  # K / 128
    b_stride_n,
    b_stride_k,
    b_scale_stride_n,
    b_scale_stride_k,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of the result; rows and columns past the end are read again and not written."""
    tiles_n = tl.cdiv(columns, TILE_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    height = tl.minimum(tl.cdiv(rows, TILE_M) - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    row = (group * GROUP + within % height) * TILE_M + tl.arange(0, TILE_M)
    column = (within // height) * TILE_N + tl.arange(0, TILE_N)
    m, n = tl.minimum(row, rows - 1).to(tl.int64), tl.minimum(column, columns - 1).to(tl.int64)
    k = tl.arange(0, STEP)
    a_tile = a_ptr + m[:, None] * (blocks * 128) + k[None, :]
    b_tile = b_ptr + n[None, :] * b_stride_n + k[:, None].to(tl.int64) * b_stride_k
    a_scale = a_scale_ptr + (m // A_BLOCK) * blocks
    b_scale = b_scale_ptr + (n // B_BLOCK) * b_scale_stride_n
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for _ in range(blocks):
        partial = tl.zeros((TILE_M, TILE_N), tl.float32)
        for _ in tl.static_range(128 // STEP):  # a whole block of decoded operands would not fit the registers
            partial = tl.dot(_e4m3(tl.load(a_tile)).to(OPERAND), _e4m3(tl.load(b_tile)).to(OPERAND), partial)
            a_tile += STEP
            b_tile += STEP * b_stride_k
        total += partial * tl.load(a_scale)[:, None] * tl.load(b_scale)[None, :]
        a_scale += 1
        b_scale += b_scale_stride_k
    if HAS_BIAS:
        total += tl.load(bias_ptr + n).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_ptr + m[:, None] * columns + n[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def fp8_matmul(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    b_rows_contracted: bool = False,
) -> Tensor:
    """a @ b.T (or a @ b) + bias of FP8 codes with fp32 block scales.

    Args:
        a: float8_e4m3fn [M, K], K a multiple of 128.
        a_scales: fp32 [M, K / 128], or [M / 128, K / 128].
        b: float8_e4m3fn [N, K], or [K, N] with `b_rows_contracted`, which needs square blocks.
        b_scales: fp32 [N, K / 128] or [N / 128, K / 128]; [K / 128, N / 128] with `b_rows_contracted`.
        shape: (M, N) of the result; padding rows are left out.
        out_dtype: float16, bfloat16 or float32.
        bias: [N], taken in `out_dtype`.
        b_rows_contracted: contract b's rows instead of its columns.

    Raises:
        ValueError: contracted lengths that differ or are no multiple of 128.
    """
    length = b.shape[0] if b_rows_contracted else b.shape[1]
    if a.shape[1] != length or length % _BLOCK:
        raise ValueError(
            f"FP8 products contract one multiple of {_BLOCK}, received {a.shape[1]} and {length}; quantize both alike"
        )
    out = torch.empty(shape, dtype=out_dtype, device=a.device)
    bias = None if bias is None else bias.to(out_dtype).contiguous()
    if 0 in shape or length == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    parts = (a.contiguous(), a_scales.contiguous(), b.contiguous(), b_scales.contiguous())
    with torch.cuda.device(a.device if a.is_cuda else -1):
        _launch(*parts, bias, out, b_rows_contracted)
    return out


def _launch(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, out: Tensor, b_rows_contracted: bool
) -> None:
    """Run `fp8_kernel` over row-major tensors."""
    n, k = (1, 0) if b_rows_contracted else (0, 1)
    fp8_kernel[(ceil_div(out.shape[0], _TILE_M) * ceil_div(out.shape[1], _TILE_N),)](
        a.view(torch.uint8),
        a_scales,
        b.view(torch.uint8),
        b_scales,
        out if bias is None else bias,
        out,
        *out.shape,
        a.shape[1] // _BLOCK,
        b.stride(n),
        b.stride(k),
        b_scales.stride(n),
        b_scales.stride(k),
        A_BLOCK=1 if a_scales.shape[0] == a.shape[0] else _BLOCK,
        B_BLOCK=1 if not b_rows_contracted and b_scales.shape[0] == b.shape[0] else _BLOCK,
        HAS_BIAS=bias is not None,
        OPERAND=tl.bfloat16 if a.is_cuda else tl.float32,  # the interpreter multiplies the bits of BF16 numbers
        TILE_M=_TILE_M,
        TILE_N=_TILE_N,
        STEP=_STEP,
        GROUP=_GROUP,
        num_warps=_WARPS,
    )


@triton.jit
def factors_kernel(a_ptr, b_ptr, out_ptr, a_constant, b_constant, TWO: tl.constexpr):
    """alpha = (amax / constant) of one operand or the product of two, each operation rounded; then the zero."""
    alpha = tl.div_rn(tl.load(a_ptr), a_constant)
    if TWO:
        alpha *= tl.div_rn(tl.load(b_ptr), b_constant)
    tl.store(out_ptr, alpha)
    tl.store(out_ptr + 1, 0.0)


def factors(scales: list[tuple[Tensor, float]]) -> Tensor:
    """fp32 [2]: alpha and the 0 that cuBLASLt reads as beta, in one launch.

    Args:
        scales: (amax fp32 [1], constant) of the one or two operands that have a tensor scale.
    """
    (a, a_constant), (b, b_constant) = scales[0], scales[-1]
    out = torch.empty(2, dtype=torch.float32, device=a.device)
    launch(factors_kernel, (1,), a, b, out, a_constant, b_constant, len(scales) == 2, num_warps=1)
    return out
