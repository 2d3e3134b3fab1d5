"""The part of a quantized linear that a `split` row adds: its parameters, its forward, merging and realignment."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quatrain.kernels import lowrank
from quatrain.nn.factors import narrow_parts, split_factors
from quatrain.nn.lowrank import (
    OVERSAMPLE,
    Factors,
    cholesky_qr,
    gaussian,
    merged,
    principal_directions,
    split_by_directions,
    split_by_weight,
)
from quatrain.nn.nonfinite import NonFiniteError
from quatrain.nn.products import product, wide_dtype
from quatrain.nn.realign import sketch_input, sum_over_ranks
from quatrain.nn.shards import whole, write
from quatrain.nn.split import Split
from quatrain.nn.split_function import PROJECTED, SplitFunction, token_mean
from quatrain.nn.weights import Specs, weight_codes, without_branch

if TYPE_CHECKING:
    from quatrain.nn.linear import LinearRows
    from quatrain.nn.state import SharedState

FACTORS = ("lowrank_left", "lowrank_right")
STEP = "lowrank_step"
_JOINED_RANK = 128


class SplitLinear(nn.Linear):
    """What QuantLinear inherits; without a split row it is nn.Linear.

    A parametrized split keeps W as three parameters: `weight` is W_res [N, K], `lowrank_left` L2 [N, r],
    `lowrank_right` L1 [r, K], W = weight + beta lowrank_left lowrank_right (`merged_weight`). The state_dict holds all
    three and `lowrank_step`, the optimizer steps since the conversion, which decide when the next realignment is due;
    `dense_state_dict` gives the keys and weights of the plain model instead. Weight decay belongs on `weight` and
    `lowrank_left` only: on both factors it would act twice on their product. A split with `parametrize = false`, and
    "mean", leave parameters and keys as they were.
    """

    _rows: LinearRows
    _split: Split | None
    _shared_state: SharedState
    _index: int  # this module's line in the shared state
    _keys: Tensor  # int64 [6] on the weight's device; carries the weight's codes and the split's factors
    _step: int  # optimizer steps since the conversion
    _probe: Tensor | None  # fp32 [K, k]: where the activations' principal directions are looked for
    _sketch: Tensor  # fp32 [K, k]: X^T X probe of the step before a realignment
    _joined: bool  # whether this device has products that take the branch in
    _due: Tensor  # int64 [1] on the CPU: whether this is that step

    @property
    def operand_rows(self) -> LinearRows:
        """The rows this module was converted with."""
        return self._rows

    @property
    def split(self) -> Split | None:
        """The split this module follows; None where its shape is too small for the rank, too."""
        return self._split

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The dense W [N, K] in the weight's dtype; without a parametrized split a copy of the weight.

        Of sharded parameters all is gathered: every process must call.
        """
        if self._split is None or not self._split.has_factors:
            return whole(self.weight.detach()).clone()
        return self.merged_exact().to(self.weight.dtype)

    @torch.no_grad()
    def merged_exact(self) -> Tensor:
        """W_res + beta L2 L1 [N, K] in float64; W_res alone where there are no factors."""
        if self._split is None or not self._split.has_factors:
            return whole(self.weight.detach()).double()
        left, right = self.factors()
        return merged(whole(self.weight), whole(left), whole(right), self._split.beta)

    def is_due(self) -> bool:
        """Whether a realignment belongs after the step that was just counted."""
        return self._split is not None and realigns_at(self._split, self._step)

    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """L2 and L1.

        Raises:
            ValueError: this module has none.
        """
        left, right = (self._parameters.get(name) for name in FACTORS)
        if left is None or right is None:
            raise ValueError("the factors are of a linear with a parametrized split, received one without; check split")
        return left, right

    @torch.no_grad()
    def resplit(self, dense: Tensor, *, fresh: bool = False) -> None:
        """Take a dense W [N, K] and split it anew; parameters are written in place.

        Args:
            dense: any floating dtype.
            fresh: by the weight itself, whatever the basis, and without the old factors as a start.

        Raises:
            NonFiniteError: W holds a NaN or an infinity; nothing is written.
        """
        split = self._split
        if split is None or not split.has_factors:
            write(self.weight, dense)
            return
        try:
            parts = self._new_factors(dense.detach(), split, fresh)
        except NonFiniteError as error:
            raise NonFiniteError(f"{self._shared_state.names[self._index]}: {error}") from None
        left, right = self.factors()
        for parameter, value in ((self.weight, parts.residual), (left, parts.left), (right, parts.right)):
            write(parameter, value)

    def _new_factors(self, dense: Tensor, split: Split, fresh: bool) -> Factors:
        seed = self._seed(0 if fresh else self._step)
        if split.basis == "activation" and self._probe is not None and not fresh:
            sketch = sum_over_ranks(self._sketch)
            if bool(sketch.any()) and bool(sketch.isfinite().all()):
                return split_by_directions(dense, principal_directions(sketch, self._probe, split.rank), split.beta)
        start = None if fresh else cholesky_qr(whole(self.factors()[1].detach()).t())
        return split_by_weight(dense, split.rank, split.beta, seed, start)

    def _seed(self, step: int) -> int:
        """Of the sketch: from name and step alone, so that all data-parallel processes draw the same."""
        text = f"split\\0{self._shared_state.names[self._index]}\\0{step}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")

    def _add_factors(self) -> None:
        """Split the weight at conversion: W_res stays in `weight`, in place."""
        self._step, self._probe = 0, None
        split = self._split
        if split is None or not split.has_factors:
            return
        weight = self.weight
        n, k = weight.shape
        trains = weight.requires_grad
        # L1 stays between realignments in the one-sided mode: no gradient is ever formed for it.
        for name, shape, grad in zip(
            FACTORS, ((n, split.rank), (split.rank, k)), (trains, trains and split.mode != "onesided"), strict=True
        ):
            self.register_parameter(name, nn.Parameter(weight.new_zeros(shape), requires_grad=grad))
        if not weight.is_meta:
            self.resplit(weight.detach().clone(), fresh=True)

    def _settle_split(self, device: torch.device) -> None:
        """After a move, a copy or a load: be known to the shared state, and bring the sketch along."""
        split, shape = self._split, (self.out_features, self.in_features)
        self._joined = False
        if split is None or not split.has_factors:
            return
        if split.mode == "tangent" and split.rank <= _JOINED_RANK:
            self._joined = lowrank.serves(device, shape, self._rows.specs())
        self._shared_state.splits.add(self)
        if split.basis == "activation":
            k = self.in_features
            probe = gaussian(k, split.rank + OVERSAMPLE, self._seed(-1), device)
            self._probe = probe.float()
            self._sketch = torch.zeros_like(self._probe)
            self._due = torch.zeros(1, dtype=torch.int64)
            self._set_due()

    def _joins(self, x: Tensor) -> bool:
        """Whether the products of x can take the branch in, all gradients being wanted."""
        trains = all(p.requires_grad for p in (self.weight, *self.factors()))
        return trains and x.dtype == torch.bfloat16 and 0 < x.shape[0] < lowrank.MOST_TOKENS

    def _set_due(self) -> None:
        split = self._split
        if split is not None and self._probe is not None:
            due = realigns_at(split, self._step + 1)
            self._due.fill_(int(due))
            if due:
                self._sketch.zero_()

    def _split_forward(
        self, x: Tensor, keys: Tensor, specs: Specs, needs_dgrad: bool, seen: Tensor, zero: Tensor,
        at_once: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x [T, K] to Y [T, N] and the maxima of its operands."""
        split, state, weight = self._split, self._shared_state, self.weight
        if split is None:
            raise ValueError("a split forward needs a split row, received none; call the module itself")
        left = right = None
        factors: tuple[Tensor | None, ...] = (None,) * 3
        branch: tuple[Tensor | None, Tensor | None] = (None, None)
        dense = split.kind == "svd" and not split.parametrize
        training = torch.is_grad_enabled()
        if split.kind == "svd":
            left, right = self.factors() if split.parametrize else (None, None)
            unquantized = dense and (specs[1] is None or specs[3] is None)
            found = split_factors(weight, (left, right), self._keys, state.generation, x.dtype, split.rank, unquantized)
            factors = (*found, *(None,) * (3 - len(found)))
            branch = narrow_parts(found[0], found[1])[:2] if dense else branch
            if self._probe is not None and training and self.training:
                sketch_input(x.detach(), self._probe, self._sketch, self._due)
        codes = weight_codes(weight, self._keys, state.clock, state.generation, x.dtype, specs, needs_dgrad, branch)
        learns = any(p is not None and p.requires_grad for p in (weight, left, right))
        joined = self._joined and not state.precision and training and needs_dgrad and self._joins(x)
        plan = (split.kind, split.mode, split.beta, dense, needs_dgrad, training and learns, joined)
        y, maxima = SplitFunction.apply(
            x, weight, self.bias, left, right, keys, specs, plan, at_once, *codes, *factors, seen, zero
        )
        return y, maxima

    @torch.no_grad()
    def operand_sources(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What Fprop and Wgrad quantize of an input [T, K], and W_res [N, K], all in x's dtype; for measurements."""
        split, wide = self._split, wide_dtype(x)
        if split is None:
            return x, x, self.weight.detach().to(x.dtype)
        if split.kind == "mean":
            x = (x - token_mean(x)).to(x.dtype)
            return x, x, self.weight.detach().to(x.dtype)
        left, right, q1, _ = self._narrow(x.dtype)
        branch = (None, None) if split.parametrize else (left, right)
        weight = without_branch(self.weight.detach(), *branch).to(x.dtype)
        if split.mode not in PROJECTED:
            return x, x, weight
        return x, (x - product(product(x, q1, x.dtype, rows=True), q1, wide)).to(x.dtype), weight

    @torch.no_grad()
    def gradient_sources(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        """What Dgrad and Wgrad quantize of an output gradient [T, N]; for measurements."""
        split, wide = self._split, wide_dtype(dy)
        if split is not None and split.kind == "mean":
            dy = (dy - token_mean(dy)).to(dy.dtype)
        if split is None or split.kind == "mean" or split.mode != "tangent":
            return dy, dy
        q2 = self._narrow(dy.dtype)[3]
        return dy, (dy - product(product(dy, q2, dy.dtype, rows=True), q2, wide)).to(dy.dtype)

    def _narrow(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """L2, L1, Q1 and Q2 in `dtype`."""
        split = self._split
        if split is None:
            raise ValueError("the factors are of a linear with a split, received one without; check split")
        factors = self.factors() if split.parametrize else (None, None)
        args = (self._keys, self._shared_state.generation, dtype, split.rank, False)
        found = split_factors(self.weight, factors, *args)
        return narrow_parts(found[0], found[1])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._split is not None and self._split.has_factors:
            destination[prefix + STEP] = torch.tensor(self._step)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if self._split is not None and self._split.has_factors and prefix + STEP in state_dict:
            step = state_dict[prefix + STEP]
            self._step = self._step if step.is_meta else int(step)
            state_dict = {key: value for key, value in state_dict.items() if key != prefix + STEP}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def realigns_at(split: Split, step: int) -> bool:
    """Whether the split is realigned after that many steps; with the activations' basis also after the first."""
    return split.every > 0 and (step % split.every == 0 or (step == 1 and split.basis == "activation"))
