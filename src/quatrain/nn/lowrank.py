"""Low-rank arithmetic of a split weight: orthonormal bases, the split itself, and what a change of basis does.

All of it runs outside compiled graphs, a few times in a run or once for each version of a weight, in float64 wherever
a factor takes part, so that results depend neither on the order of summation of fp32 nor on a conditioning check.
Source: Full-Stack FP4 (Ding et al., 2026), LoRA-SVD; randomized SVD: arXiv 0909.4061.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quatrain.nn.nonfinite import NonFiniteError

OVERSAMPLE = 8
POWER_PASSES = 2
_SHIFT = 1e-12  # of the Gram matrix's mean diagonal: far above float64's rounding, so Cholesky cannot fail
_SMALLEST = 1e-6  # of the largest singular value: directions below it start with a zero column in L2
_FLOOR = 0.1  # of the mean, under rotated second moments


@dataclass(frozen=True)
class Factors:
    """L2 [N, r], L1 [r, K] and what is left of W, W_res [N, K]; W = W_res + beta L2 L1."""

    left: Tensor
    right: Tensor
    residual: Tensor


def cholesky_qr(a: Tensor) -> Tensor:
    """An orthonormal basis of the columns of a, by two passes of shifted Cholesky-QR in float64.

    Args:
        a: [..., n, r], any floating dtype.

    Returns:
        float64 [..., n, r]. A zero column stays zero, so a zero matrix gives the projector 0, not a random one.
    """
    q = a.double()
    for _ in range(2):
        gram = q.mT @ q
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(_SHIFT * diagonal.mean(-1, keepdim=True).clamp(min=1e-200))
        upper = torch.linalg.cholesky_ex(gram, upper=True).L
        q = torch.linalg.solve_triangular(upper, q, upper=True, left=False)
    return q


def principal_rows(w: Tensor, rank: int, seed: int, start: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Truncated SVD by a randomized sketch and power passes; the same bits on every process.

    Args:
        w: [N, K].
        rank: r.
        seed: of the sketch, drawn on the CPU.
        start: [K, r'], directions to begin with beside the random ones.

    Returns:
        u float64 [N, r], s float64 [r] (descending), v float64 [K, r]; columns of u and v beyond the rank of w are
        orthonormal on the side of v and zero on the side of u.
    """
    w = w.double()
    probe = gaussian(w.shape[1], rank + OVERSAMPLE if start is None else OVERSAMPLE, seed, w.device)
    sketch = probe if start is None else torch.cat([start.double(), probe], dim=1)
    q = cholesky_qr(w @ sketch)
    for _ in range(POWER_PASSES):
        q = cholesky_qr(w @ cholesky_qr(w.t() @ q))
    b = q.t() @ w
    values, vectors = _eigh(b @ b.t())
    s = values[:rank].clamp(min=0.0).sqrt()
    solid = s > _SMALLEST * s[:1].clamp(min=1e-200)
    safe = torch.where(solid, s, torch.ones_like(s))
    v = torch.where(solid, b.t() @ vectors[:, :rank] / safe, torch.zeros_like(s))
    u = torch.where(solid, q @ vectors[:, :rank], torch.zeros_like(s))
    if not bool(solid.all()):  # fill v up with directions orthogonal to those that are there
        spare = gaussian(w.shape[1], rank, seed + 1, w.device)
        spare = cholesky_qr(spare - v @ (v.t() @ spare))
        v = torch.where(solid, v, spare)
    return u, torch.where(solid, s, torch.zeros_like(s)), v


def principal_directions(sketch: Tensor, probe: Tensor, rank: int) -> Tensor:
    """The principal directions of X from Y = X^T X Omega (Nystrom).

    Args:
        sketch: Y [K, k].
        probe: Omega [K, k], k >= rank.
        rank: r.

    Returns:
        float64 [K, r], orthonormal columns.
    """
    y, omega = sketch.double(), probe.double()
    values, vectors = _eigh(omega.t() @ y)
    keep = values > 1e-10 * values[:1].clamp(min=1e-200)
    scale = torch.where(keep, values, torch.ones_like(values)).rsqrt() * keep
    f = y @ (vectors * scale)
    _, top = _eigh(f.t() @ f)
    return cholesky_qr(f @ top[:, :rank])


def split_by_weight(w: Tensor, rank: int, beta: float, seed: int, start: Tensor | None = None) -> Factors:
    """W = W_res + beta L2 L1 with L2 L1 its principal part, balanced: L2 = U (S / beta)^1/2, L1 = (S / beta)^1/2 V^T.

    Where S is 0 the row of L1 is a unit direction of the mean size of the others (1 if there are none) and the column
    of L2 is 0, so a zero-initialized layer stays zero and can learn.
    """
    u, s, v = principal_rows(w, rank, seed, start)
    root = (s / beta).sqrt()
    there = root > 0
    mean = root.sum() / there.sum().clamp(min=1)
    size = torch.where(there, root, torch.where(mean > 0, mean, torch.ones_like(mean)))
    return _factors(w, u * root, (v * size).t(), beta)


def split_by_directions(w: Tensor, directions: Tensor, beta: float) -> Factors:
    """The same with L1 spanning given orthonormal directions V [K, r]: L2 L1 = W V V^T, factors of equal norm."""
    left = w.double() @ directions.double() / beta
    size = (left.norm() / directions.shape[1] ** 0.5).sqrt()
    size = torch.where(size > 0, size, torch.ones_like(size))
    return _factors(w, left / size, (directions.double() * size).t(), beta)


def merged(residual: Tensor, left: Tensor, right: Tensor, beta: float) -> Tensor:
    """W_res + beta L2 L1 in float64."""
    return residual.double() + beta * (left.double() @ right.double())


def transport(old: Tensor, new: Tensor) -> Tensor:
    """T [r, r] with new ~ old T in the sense of least squares, for bases [n, r] that need not be orthonormal."""
    old, new = old.double(), new.double()
    gram = old.t() @ old
    gram.diagonal().add_(_SHIFT * gram.diagonal().mean().clamp(min=1e-200))
    chol = torch.linalg.cholesky_ex(gram).L
    return torch.cholesky_solve(old.t() @ new, chol)


def rotate_linear(moment: Tensor, change: Tensor) -> Tensor:
    """A first moment [n, r] of a factor, whose gradient is M B for a basis B: after B -> B T it is `moment` T."""
    return (moment.double() @ change).to(moment.dtype)


def rotate_square(moment: Tensor, change: Tensor) -> Tensor:
    """A second moment [n, r] under the same change: squared overlaps, at least 0.1 of their mean."""
    rotated = moment.double() @ change.square()
    return rotated.clamp(min=_FLOOR * float(rotated.mean())).to(moment.dtype)


def gaussian(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """float64 [rows, columns] of standard normals, drawn on the CPU from a seed of their own."""
    generator = torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(device)


def _factors(w: Tensor, left: Tensor, right: Tensor, beta: float) -> Factors:
    # Factors that BF16 holds exactly: then master and BF16 products see one and the same split.
    left, right = left.to(torch.bfloat16).to(w.dtype), right.to(torch.bfloat16).to(w.dtype)
    return Factors(left, right.contiguous(), (w.double() - beta * (left.double() @ right.double())).to(w.dtype))


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and vectors of a small symmetric matrix; on the CPU, whose bits all devices share.

    Raises:
        NonFiniteError: a NaN or an infinity, which what the matrix was made of then holds too.
    """
    small = matrix.cpu()
    if not bool(small.isfinite().all()):
        raise NonFiniteError(
            "a weight that is split must be finite, received NaN or infinity; in training, resume from the last "
            "checkpoint with a lower learning rate; of a model just loaded, its file is damaged: load it again"
        )
    values, vectors = torch.linalg.eigh((small + small.t()) / 2)
    return values.flip(0).to(matrix.device), vectors.flip(1).to(matrix.device)
