"""Operands and products that the autograd functions of a linear share.

Legend: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quatrain.kernels.matmul import gemm_parts
from quatrain.kernels.operands import quantize_both
from quatrain.nn.weights import Parts, Specs, serves_both_ways


def operands(
    x: Tensor, specs: Specs, row: int | None, column: int | None, keys: Tensor, decoded: tuple[bool, bool]
) -> tuple[Parts, Parts]:
    """Operand `row` of x and operand `column` of its transpose, quantized together.

    An operand whose row is missing is the tensor itself (the column one x, not transposed), one not asked for is None.
    """
    row_spec = None if row is None else specs[row]
    column_spec = None if column is None else specs[column]
    pair = quantize_both(
        x, row_spec, column_spec, drawn_key(specs, row, keys), drawn_key(specs, column, keys),
        (decoded[0] and row_spec is not None, decoded[1] and column_spec is not None),
    )  # fmt: skip
    plain: Parts = (x, None, None)
    nothing: Parts = (None, None, None)
    first = nothing if row is None else pair[0] or plain
    second = nothing if column is None else pair[1] or plain
    return first, second


def drawn_key(specs: Specs, operand: int | None, keys: Tensor) -> Tensor | None:
    """int64 [2], seed and clock of an operand, where its row draws; else None."""
    spec = None if operand is None else specs[operand]
    if operand is None or spec is None or '"stochastic' not in spec:
        return None
    return keys[operand]


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if one of them is, else fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def dgrad(dy: Parts, w: Parts, specs: Specs, shape: tuple[int, int], dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """dX [T, K] = dY W; codes of square blocks serve from their rows, others were made from the transpose.

    Args:
        dy: operand dgrad.grad.
        w: operand dgrad.weight, the master itself without its row (then cast to `dtype`).
        specs: the six rows.
        shape: (T, K).
        dtype: compute dtype.
        out: of the result.
    """
    spec = specs[3]
    if spec is None:
        return gemm_parts(dy, specs[2], (w[0].to(dtype), None, None), None, shape, out, None, True)
    return gemm_parts(dy, specs[2], w, spec, shape, out, None, serves_both_ways(spec))


def wgrad(dyt: Parts, kept: Parts, specs: Specs, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """dW [N, K] = dY^T X, leaving the product in fp32 (float64 if the operands are) before the master's dtype."""
    wide = torch.float64 if dyt[0].dtype == torch.float64 or kept[0].dtype == torch.float64 else torch.float32
    if kept[0].is_cuda and dtype in (torch.bfloat16, torch.float16):
        wide = dtype  # the same number without a pass over it: the scaled accumulator is rounded once
    return gemm_parts(dyt, specs[4], kept, specs[5], shape, wide, None, specs[5] is None).to(dtype)


def product(a: Tensor, b: Tensor, out: torch.dtype, rows: bool = False) -> Tensor:
    """a [M, L] @ b [N, L]^T, or @ b [L, N] with `rows`; accumulated in fp32 and rounded once to `out`."""
    columns = b.shape[1] if rows else b.shape[0]
    return gemm_parts((a, None, None), None, (b, None, None), None, (a.shape[0], columns), out, None, rows)
