"""The products of a quantized linear with a low-rank branch on GPUs that emulate FP4: branch and product are one GEMM.

    Y         = [Q(X) | h'] [Q(W) | L2]^T              h' = h beta / alpha, h = X L1^T
    dX        = [Q(dY) | d'] [Q(W) ; L1]               d' = d beta / alpha, d = dY L2
    [dW; R]   = [Q(dY')^T ; H(d)''] Q(X')              X' = X - z Q1^T, z = X Q1, dY' = dY - a Q2^T, a = dY Q2
    dL2       = beta dY^T h        dL1 = R + beta (d^T z) Q1^T

with alpha the product of both operands' tensor scales, which GEMM multiplies its fp32 accumulator by, and '' for
beta over the scale of dY'. Decoded operands are written with room for the branch's columns beside them, so the branch
costs no pass over Y or dX, and X' and dY' exist in registers only. Sums are in fp32; h, z, d and a are rounded to BF16,
h', d' and H(d)'' once more (a factor of 2**100 bounds beta / alpha: products of scales under it lose their branch).
Source: Full-Stack FP4 (Ding et al., 2026), LoRA-SVD; the arrangement is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels import cublaslt
from quatrain.kernels.operands import decodes_at_once

MOST_TOKENS = 16_000_000  # that one launch counts
Codes = tuple[Tensor, Tensor, Tensor]  # packed codes, scales, amax
_LINE = 64  # elements that rows of an operand with room beside it are multiples of: a line of memory


@dataclass(frozen=True)
class Branch:
    """The narrow factors of a linear, as the products read them.

    Attributes:
        inward: [2 r, K], L1 and Q1^T, one above the other.
        outward: [2 r, N], L2^T and Q2^T.
        beta: scales the branch.
    """

    inward: Tensor
    outward: Tensor
    beta: float = 1.0

    @property
    def rank(self) -> int:
        """Of the branch, r."""
        return self.inward.shape[0] // 2


def serves(device: torch.device, shape: tuple[int, int], specs: tuple[str | None, ...]) -> bool:
    """Whether these products run on `device`, for BF16 activations and a weight [N, K] under six operand rows."""
    rows = [None if spec is None else QuantSpec.from_json(spec) for spec in specs]
    narrow, square = [row for row in (rows[0], rows[2], rows[4], rows[5]) if row is not None], rows[1]
    if len(narrow) < 4 or square is None or specs[1] != specs[3] or shape[0] % 16 or shape[1] % 16:
        return False
    if not all(decodes_at_once(device, row) for row in narrow):
        return False
    from quatrain.kernels.quantize_triton import is_fast

    both_ways = square.format == "nvfp4" and square.block_shape[0] > 1
    plain = all(row.hadamard is None for row in (*narrow[:2], square)) and not square.stochastic
    example = torch.empty(16, max(shape), dtype=torch.bfloat16, device="meta")
    return both_ways and plain and all(is_fast(example, row) for row in narrow)


def forward(
    x: Tensor, weight: Codes, branch: Branch, specs: tuple[str | None, ...], key: Tensor | None,
    kept_key: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Codes, Tensor]:  # fmt: skip
    """Y, and what the backward pass needs.

    Args:
        x: BF16 [T, K].
        weight: codes of W_res in square blocks.
        branch: the factors, BF16.
        specs: the six rows of a linear.
        key: int64 [2], where fprop.input is stochastic.
        kept_key: the same for wgrad.input.
        bias: [N].

    Returns:
        Y [T, N] BF16; X [L1^T | Q1] BF16 [T, 2 r]; codes of X' along its columns; amax fp32 [1] of X.
    """
    from quatrain.kernels.decode_triton import decode
    from quatrain.kernels.lowrank_triton import place_narrow, projected_amaxes, quantize_projected

    x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
    (tokens, width), rank, out_width = x.shape, branch.rank, branch.outward.shape[1]
    row, column, square = (_spec(specs, i) for i in (0, 5, 1))
    amax = torch.empty(2, dtype=torch.float32, device=x.device)
    wide, w = (_with_room(rows, width + rank, x.device) for rows in (tokens, out_width))
    w_decoded, w_branch = w.split_with_sizes((width, rank), 1)
    decode(weight[0], weight[1], square, out=w_decoded, clear=amax)
    u = product(x, branch.inward.t(), torch.bfloat16)
    (h, z), basis = u.chunk(2, 1), branch.inward[rank:]
    projected_amaxes(x, z, basis, column, amax)
    blocks = -(-tokens // 16)
    codes = torch.empty(width, blocks * 8, dtype=torch.uint8, device=x.device)
    scales = torch.empty(width, blocks, dtype=torch.float8_e4m3fn, device=x.device)
    quantize_projected(x, z, basis, (row, column), (key, kept_key), wide, (codes, scales), amax)
    amax_x, amax_kept = amax.chunk(2)
    beside = ((amax_x, row.constant), (weight[2], square.constant))
    factors = place_narrow(h, branch.beta, wide[:, width:], beside, (branch.outward, w_branch.t()))
    y = _scaled(wide, w.t(), factors, torch.bfloat16, bias)
    return y, u, (codes, scales, amax_kept), amax_x


def backward(
    dy: Tensor, kept: Codes, weight: Codes, u: Tensor, branch: Branch, specs: tuple[str | None, ...],
    keys: tuple[Tensor | None, Tensor | None], out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of everything.

    Args:
        dy: BF16 [T, N].
        kept: codes of X' along its columns.
        weight: codes of W_res in square blocks.
        u: X [L1^T | Q1] BF16 [T, 2 r].
        branch: the factors, BF16.
        specs: the six rows of a linear.
        keys: int64 [2] of dgrad.grad and wgrad.grad, where they are stochastic.
        out_dtype: of dW, dL2 and dL1; float32 or bfloat16.

    Returns:
        dX [T, K] BF16; (I - P2) G (I - P1) [N, K], dL2 [N, r] and dL1 [r, K] in `out_dtype`; amax fp32 [2] of dY and
        of dY'.
    """
    from quatrain.kernels.decode_triton import decode
    from quatrain.kernels.lowrank_gradients_triton import factor_gradients
    from quatrain.kernels.lowrank_triton import place_narrow, projected_amaxes, quantize_projected

    dy = dy if dy.stride(1) == 1 and dy.stride(0) % 8 == 0 and dy.data_ptr() % 16 == 0 else dy.contiguous()
    (tokens, width), rank, in_width = dy.shape, branch.rank, branch.inward.shape[1]
    row, column, square, other = (_spec(specs, i) for i in (2, 4, 3, 5))
    amax = torch.empty(2, dtype=torch.float32, device=dy.device)
    w = torch.empty(width + rank, in_width, dtype=torch.bfloat16, device=dy.device)
    w_decoded, w_branch = w.split_with_sizes((width, rank))
    decode(weight[0], weight[1], square, out=w_decoded, clear=amax)
    v = product(dy, branch.outward.t(), torch.bfloat16)
    (d, a), (h, z), basis = v.chunk(2, 1), u.chunk(2, 1), branch.outward[rank:]
    projected_amaxes(dy, a, basis, column, amax)
    wide, tall = (_with_room(rows, width + rank, dy.device) for rows in (tokens, -(-tokens // 16) * 16))
    quantize_projected(dy, a, basis, (row, column), keys, wide, (tall, None), amax)
    amax_row, amax_column = amax.chunk(2)
    beside = ((amax_row, row.constant), (weight[2], square.constant))
    along = (tall[:, width:], column, (amax_column, column.constant), (kept[2], other.constant))
    factors = place_narrow(d, branch.beta, wide[:, width:], beside, (branch.inward, w_branch), along)
    for_dx, for_dw = factors.chunk(2)
    dx = _scaled(wide, w, for_dx, torch.bfloat16, None)
    del wide, w, w_decoded, w_branch
    found = _scaled(tall.t(), decode(kept[0], kept[1], other).t(), for_dw, out_dtype, None)
    dw, rest = found.split_with_sizes((width, rank))
    given, small = product(dy.t(), h, torch.float32), product(d.t(), z, torch.float32)
    left, right = factor_gradients(given, rest, small, branch.inward[rank:], branch.beta, out_dtype)
    return dx, dw, left, right, amax


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a @ b of matrices of one dtype, accumulated in fp32 and rounded once."""
    return _scaled(a, b, None, out_dtype, None)


def _spec(specs: tuple[str | None, ...], operand: int) -> QuantSpec:
    text = specs[operand]
    if text is None:
        raise ValueError("a joined product needs all six operand rows, received less; ask `serves` first")
    return QuantSpec.from_json(text)


def _with_room(rows: int, columns: int, device: torch.device) -> Tensor:
    """BF16 [rows, columns], from one row to the next whole lines of memory."""
    room = -(-columns // _LINE) * _LINE
    return torch.empty_strided((rows, columns), (room, 1), dtype=torch.bfloat16, device=device)


def _scaled(a: Tensor, b: Tensor, factors: Tensor | None, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """factors[0] * (a @ b) + bias, rounded once."""
    out = None
    if a.is_cuda and cublaslt.obstacle(a.device) is None:
        out = cublaslt.matmul(a, b, out_dtype if bias is None else torch.float32, factors)
    if out is None:
        wide = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
        out = wide if factors is None else wide * factors[0]
    return (out if bias is None else out + bias.to(out_dtype)).to(out_dtype)
