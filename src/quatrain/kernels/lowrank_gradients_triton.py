"""Triton kernel that puts the gradients of a low-rank branch's factors together, in one launch for both.

    dL2 = beta G L1^T (given without beta)        dL1 = R + beta (d^T z) Q1^T

R comes out of the Wgrad product beside dW, d^T z [r, r] of the narrow operands; see `lowrank`.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2
from quatrain.kernels.quantize_triton import architecture
from quatrain.kernels.triton_math import round_to, widen

_TILE = 64  # columns of dL1, and rows of dL2, of one program
_WARPS = 4


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, ARCH: tl.constexpr):
    """fp32 as DTYPE, to nearest."""
    if DTYPE == tl.bfloat16:
        out = round_to(x, tl.bfloat16, ARCH).to(tl.bfloat16)
    else:
        out = x
    return out


@triton.jit
def _dot(a, b, ARCH: tl.constexpr):
    """BF16 a @ b, summed in fp32; the interpreter would multiply bits."""
    return tl.dot(widen(a, ARCH), widen(b, ARCH)) if ARCH == 0 else tl.dot(a, b)


@triton.jit
def factor_gradients_kernel(
    given_ptr,  # fp32 [n, r], G L1^T
    rest_ptr,  # fp32 or BF16 [r, k], R
    small_ptr,  # fp32 [r, r], d^T z
    basis_ptr,  # BF16 [r, k], Q1^T
    left_ptr,  # [n, r], dL2
    right_ptr,  # [r, k], dL1
    n, k, rank, given_stride, rest_stride, beta, ARCH: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of columns of dL1, or one of rows of dL2."""
    i = tl.arange(0, RANK)
    tiles = tl.cdiv(k, TILE)
    if tl.program_id(0) < tiles:
        j = tl.arange(0, RANK)[None, :]
        small = tl.load(small_ptr + i[:, None] * rank + j, mask=(i[:, None] < rank) & (j < rank), other=0.0)
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)[None, :]
        inside = (i[:, None] < rank) & (column < k)
        basis = tl.load(basis_ptr + i[:, None] * k + column, mask=inside, other=0.0)
        upper = round_to(small, tl.bfloat16, ARCH)  # two BF16 numbers hold sixteen bits of it
        lower = round_to(small - upper, tl.bfloat16, ARCH)
        exact = _dot(upper.to(tl.bfloat16), basis, ARCH) + _dot(lower.to(tl.bfloat16), basis, ARCH)
        rest = widen(tl.load(rest_ptr + i[:, None] * rest_stride + column, mask=inside, other=0.0), ARCH)
        value = _rounded(rest + exact * beta, right_ptr.dtype.element_ty, ARCH)
        tl.store(right_ptr + i[:, None] * k + column, value, mask=inside)
    else:
        row = (tl.program_id(0) - tiles) * TILE + tl.arange(0, TILE)[:, None]
        there = (row < n) & (i[None, :] < rank)
        given = tl.load(given_ptr + row * given_stride + i[None, :], mask=there, other=0.0)
        scaled = _rounded(given * beta, left_ptr.dtype.element_ty, ARCH)
        tl.store(left_ptr + row * rank + i[None, :], scaled, mask=there)


def factor_gradients(
    given: Tensor, rest: Tensor, small: Tensor, basis: Tensor, beta: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dL2 [N, r] and dL1 [r, K].

    Args:
        given: fp32 [N, r], last stride 1: G L1^T.
        rest: fp32 or BF16 [r, K], last stride 1: dL1's part outside the subspace.
        small: fp32 [r, r], contiguous: d^T z.
        basis: BF16 [r, K], contiguous: Q1^T.
        beta: what the branch is multiplied by; `rest` has it already.
        out_dtype: of both; float32 or bfloat16.
    """
    (n, rank), k = given.shape, basis.shape[1]
    left = torch.empty(n, rank, dtype=out_dtype, device=given.device)
    right = torch.empty(rank, k, dtype=out_dtype, device=given.device)
    launch(
        factor_gradients_kernel, (ceil_div(k, _TILE) + ceil_div(n, _TILE),), given, rest, small, basis, left, right,
        n, k, rank, given.stride(0), rest.stride(0), beta, architecture(given.device.index),
        max(16, next_power_of_2(rank)), _TILE,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return left, right
