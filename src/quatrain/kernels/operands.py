"""Two quantized operands of one matrix, along its rows and along its columns, from one read where a kernel does that.

A linear layer needs both of X (Fprop now, Wgrad later) and of dY (Dgrad and Wgrad). Where products are emulated an
operand that is used at once is never packed: it is written decoded, as its GEMM reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quatrain.formats import QTensor, QuantSpec
from quatrain.kernels.dispatch import blackwell_obstacle, triton_obstacle
from quatrain.kernels.quantize import empty_parts, quantize_parts

Parts = tuple[Tensor, Tensor | None, Tensor]  # codes, scales, amax; or decoded BF16 values, None, amax
Pair = tuple[Parts | None, Parts | None]


def decodes_at_once(device: torch.device, spec: QuantSpec | None) -> bool:
    """Whether an operand that is used at once is better written decoded on this device."""
    if spec is None or spec.format == "fp8" or device.type != "cuda":
        return False
    return triton_obstacle(device) is None and blackwell_obstacle(device) is not None


def quantize_both(
    x: Tensor,
    row: str | None,
    column: str | None,
    row_key: Tensor | None,
    column_key: Tensor | None,
    decoded: tuple[bool, bool] = (False, False),
    amax: Tensor | None = None,
) -> Pair:
    """Operands of x [M, K] along its rows and of x.t() along x's columns; one opaque operation to compilers.

    Args:
        x: [M, K].
        row: `QuantSpec.to_json` text for x, or None.
        column: the same for x.t().
        row_key: int64 [2], for a stochastic row spec.
        column_key: the same for the column spec.
        decoded: BF16 code x block scale [M', K'] (for columns [K', M'], perhaps the transpose of memory) in place of
            codes and scales.
        amax: fp32 [2], the largest magnitudes of x and x.t() under their transforms, where they are known already;
            only outside compiled code.

    Returns:
        Parts of both, None where no spec was given.
    """
    if row is None and column is None:
        return None, None
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        flat = _both_op(x, row, column, row_key, column_key, *decoded)
    else:
        flat = _both(x, row, column, row_key, column_key, *decoded, amax=amax)
    return _unflatten(flat, row is not None, column is not None, decoded)


def _unflatten(flat: list[Tensor], row: bool, column: bool, decoded: tuple[bool, bool]) -> Pair:
    parts = list(flat)
    first = _take(parts, decoded[0]) if row else None
    second = _take(parts, decoded[1]) if column else None
    if second is not None and decoded[1]:
        second = (second[0].t(), None, second[2])
    return first, second


def _take(flat: list[Tensor], decoded: bool) -> Parts:
    codes = flat.pop(0)
    return codes, None if decoded else flat.pop(0), flat.pop(0)


def _both(
    x: Tensor,
    row: str | None,
    column: str | None,
    row_key: Tensor | None,
    column_key: Tensor | None,
    row_decoded: bool,
    column_decoded: bool,
    amax: Tensor | None = None,
) -> list[Tensor]:
    """A flat list: (codes, scales, amax) or (values, amax) of each operand; column values as [M', K]."""
    row_spec = None if row is None else QuantSpec.from_json(row)
    column_spec = None if column is None else QuantSpec.from_json(column)
    if x.is_cuda and triton_obstacle(x.device) is None and x.dtype != torch.float64:
        from quatrain.kernels.quantize_triton import flat, is_fast, quantize_pair

        if all(spec is None or is_fast(x, spec) for spec in (row_spec, column_spec)):
            decoded = (row_decoded, column_decoded)
            first, second = quantize_pair(flat(x), row_spec, column_spec, row_key, column_key, amax, decoded)
            return _flatten(first) + _flatten(second)
    out: list[Tensor] = []
    for matrix, spec, key, at_once in (
        (x, row_spec, row_key, row_decoded),
        (x.t(), column_spec, column_key, column_decoded),
    ):
        if spec is not None:
            if at_once:
                values, amax = _decoded(matrix, spec, key)
                out += [values.t().contiguous() if matrix is not x else values, amax]
            else:
                out += quantize_parts(matrix, spec.to_json(), key)
    return out


def _decoded(matrix: Tensor, spec: QuantSpec, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """BF16 code x block scale of a matrix, and its amax."""
    if matrix.is_cuda and triton_obstacle(matrix.device) is None and matrix.dtype != torch.float64:
        from quatrain.kernels.blocks_triton import quantize_blocks

        values, _, amax = quantize_blocks(matrix, spec, key, decoded=True)
        return values, amax
    codes, scales, amax = quantize_parts(matrix, spec.to_json(), key)
    return QTensor(codes, scales, amax, matrix.shape, spec).block_values(torch.bfloat16), amax


def _flatten(parts: Parts | None) -> list[Tensor]:
    return [] if parts is None else [part for part in parts if part is not None]


@torch.library.custom_op("quatrain::quantize_both", mutates_args=())
def _both_op(
    x: Tensor,
    row: str | None,
    column: str | None,
    row_key: Tensor | None,
    column_key: Tensor | None,
    row_decoded: bool,
    column_decoded: bool,
) -> list[Tensor]:
    # An output of a graph may not share storage with another: each amax is its own.
    flat = _both(x, row, column, row_key, column_key, row_decoded, column_decoded)
    return [part.clone() if part.numel() == 1 else part for part in flat]


@_both_op.register_fake
def _(
    x: Tensor,
    row: str | None,
    column: str | None,
    row_key: Tensor | None,
    column_key: Tensor | None,
    row_decoded: bool,
    column_decoded: bool,
) -> list[Tensor]:
    out = []
    for matrix, spec, decoded in ((x, row, row_decoded), (x.t(), column, column_decoded)):
        if spec is None:
            continue
        codes, scales, amax = empty_parts(matrix, QuantSpec.from_json(spec))
        if decoded:
            length = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
            shape = (length, codes.shape[0]) if matrix is not x else (codes.shape[0], length)
            out += [x.new_empty(shape, dtype=torch.bfloat16), amax]
        else:
            out += [codes, scales, amax]
    return out


def quantize_cast(x: Tensor, spec: str, key: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_parts(x.to(dtype), ...)` of a matrix x, in one read where a kernel rounds as it loads."""
    resolved = QuantSpec.from_json(spec)
    if x.is_cuda and x.dtype != dtype and torch.float64 not in (x.dtype, dtype) and triton_obstacle(x.device) is None:
        from quatrain.kernels.blocks_triton import quantize_blocks

        codes, scales, amax = quantize_blocks(x, resolved, key, cast=dtype)
        if scales is not None:
            return codes, scales, amax
    return quantize_parts(x.to(dtype), spec, key)
