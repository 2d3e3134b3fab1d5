"""What the products of a split linear read beside its codes, made once for each version of the weight.

Like the codes it hangs on the tensor that carries the module's seeds, and is one opaque operation to compilers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from quatrain.nn.lowrank import cholesky_qr, principal_rows
from quatrain.nn.weights import keeps_nothing, same_sample, sample, without_branch

_SEED = 0x5EED  # of the sketch by which a dense weight is split: the same at each step, so nothing need be stored
_AT_ONCE = 16  # linears of one shape: a few float64 copies of their factors are alive


def split_factors(
    weight: Tensor,
    factors: tuple[Tensor | None, Tensor | None],
    seeds: Tensor,
    generation: Tensor,
    dtype: torch.dtype,
    rank: int,
    with_residual: bool,
) -> list[Tensor]:
    """[L1; Q1^T] [2 r, K] and [L2^T; Q2^T] [2 r, N] in the compute dtype; for a dense weight perhaps W_res too.

    Both of one side in one matrix, so that one product reads an activation for both; `narrow_parts` takes them apart.

    Args:
        weight: [N, K]; W_res beside `factors`, else the dense W, which is split here: L1 = Q1^T, L2 = W Q1.
        factors: L2 and L1, or None twice.
        seeds: of the module; carries the cache.
        generation: int64 [1] on the CPU; a change makes cached values stale.
        dtype: compute dtype.
        rank: r.
        with_residual: of a dense weight, append W_res [N, K], for products that read it unquantized.
    """
    left, right = (None if f is None else f.detach() for f in factors)
    args = (weight.detach(), left, right, seeds, generation, dtype, rank, with_residual)
    if torch.compiler.is_compiling():
        return _factors_op(*args)
    sources = (weight,) if factors[0] is None else factors
    if any(s is not None and keeps_nothing(s) for s in sources):  # as given: once detached, all are leaves
        return _make(args[0], left, right, dtype, rank, with_residual)
    return _cached(*args)


def _cached(
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    seeds: Tensor,
    generation: Tensor,
    dtype: torch.dtype,
    rank: int,
    with_residual: bool,
) -> list[Tensor]:
    sources = [weight] if left is None or right is None else [left, right]
    if weight.is_meta or any(keeps_nothing(source) for source in sources):
        return _make(weight, left, right, dtype, rank, with_residual)
    stamp = _stamp(sources, generation, dtype, with_residual)
    cached = getattr(seeds, "split_factors", None)
    if cached is None or cached[0] != stamp or not all(map(same_sample, cached[1], sources)):
        cached = (stamp, _samples(sources), _make(weight, left, right, dtype, rank, with_residual))
        seeds.split_factors = cached  # type: ignore[attr-defined]
    found: list[Tensor] = cached[2]
    return found


def refresh_factors(members: Iterable[tuple[Tensor, Tensor, Tensor]], generation: Tensor) -> None:
    """Make the factors of many linears anew at once: those that hold factors of an older version, on a GPU.

    A linear alone takes some fifty launches for it; here those of one shape share them.

    Args:
        members: L2, L1 and seeds of each.
        generation: as in `split_factors`.
    """
    groups: dict[tuple[torch.Size, torch.Size, torch.device, torch.dtype], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for left, right, seeds in members:
        cached = getattr(seeds, "split_factors", None)
        plain = type(left) is nn.Parameter and left.is_cuda  # a sharded factor is made where its module runs
        if plain and cached is not None and not keeps_nothing(left):
            groups.setdefault((left.shape, right.shape, left.device, cached[0][2]), []).append((left, right, seeds))
    for (*_, dtype), group in groups.items():
        for first in range(0, len(group), _AT_ONCE):
            _refresh(group[first : first + _AT_ONCE], generation, dtype)


@torch.no_grad()
def _refresh(group: list[tuple[Tensor, Tensor, Tensor]], generation: Tensor, dtype: torch.dtype) -> None:
    lefts, rights = (torch.stack([member[i].detach() for member in group]).to(dtype) for i in (0, 1))
    inward = torch.cat([rights, cholesky_qr(rights.mT).to(dtype).mT], dim=1)
    outward = torch.cat([lefts.mT, cholesky_qr(lefts).to(dtype).mT], dim=1)
    for i, (left, right, seeds) in enumerate(group):
        seeds.split_factors = (  # type: ignore[attr-defined]
            _stamp([left, right], generation, dtype, False), _samples([left, right]), [inward[i], outward[i]],
        )  # fmt: skip


def _stamp(
    sources: list[Tensor], generation: Tensor, dtype: torch.dtype, with_residual: bool
) -> tuple[tuple[tuple[int, int], ...], int, torch.dtype, bool]:
    """What factors were made of."""
    return tuple((s.data_ptr(), s._version) for s in sources), int(generation), dtype, with_residual


def _samples(sources: list[Tensor]) -> list[Tensor | None]:
    return [sample(source) for source in sources]


def _make(
    weight: Tensor, left: Tensor | None, right: Tensor | None, dtype: torch.dtype, rank: int, with_residual: bool
) -> list[Tensor]:
    if left is not None and right is not None:
        left, right = left.to(dtype), right.to(dtype)
        return [_stacked(right, cholesky_qr(right.t())), _stacked(left.t(), cholesky_qr(left))]
    q1 = principal_rows(weight, rank, _SEED)[2].to(dtype)
    left = (weight.double() @ q1.double()).to(dtype)
    found = [_stacked(q1.t(), q1), _stacked(left.t(), cholesky_qr(left))]
    return [*found, without_branch(weight, left, q1.t()).to(dtype)] if with_residual else found


def _stacked(factor: Tensor, basis: Tensor) -> Tensor:
    return torch.cat([factor, basis.to(factor.dtype).t()])


def narrow_parts(inward: Tensor, outward: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L2 [N, r], L1 [r, K], Q1 [K, r] and Q2 [N, r] as views of what `split_factors` returns."""
    rank = inward.shape[0] // 2
    return outward[:rank].t(), inward[:rank], inward[rank:].t(), outward[rank:].t()


@torch.library.custom_op("quatrain::split_factors", mutates_args=())
def _factors_op(
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    seeds: Tensor,
    generation: Tensor,
    dtype: torch.dtype,
    rank: int,
    with_residual: bool,
) -> list[Tensor]:
    # Copies: the graph owns what it gets and may write over it.
    found = _cached(weight, left, right, seeds, generation, dtype, rank, with_residual)
    return [tensor.clone() for tensor in found]


@_factors_op.register_fake
def _(
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    seeds: Tensor,
    generation: Tensor,
    dtype: torch.dtype,
    rank: int,
    with_residual: bool,
) -> list[Tensor]:
    n, k = weight.shape
    shapes = [(2 * rank, k), (2 * rank, n)] + ([(n, k)] if with_residual and left is None else [])
    return [weight.new_empty(shape, dtype=dtype) for shape in shapes]
