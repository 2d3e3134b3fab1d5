"""The quantized linear layer: one autograd function driven by six operand rows.

    Fprop  Y  = X W^T      rows fprop.input [T, K], fprop.weight [N, K]      contracts K
    Dgrad  dX = dY W       rows dgrad.grad  [T, N], dgrad.weight [K, N]      contracts N
    Wgrad  dW = dY^T X     rows wgrad.grad  [N, T], wgrad.input  [K, T]      contracts T

A missing row leaves its operand in high precision; with no rows at all this is nn.Linear. What is kept for the
backward pass is the packed operand of Wgrad, not the activation. A `split` beside the rows takes part of the products
out of the quantizer (`quatrain.nn.split_function`).
Legend: T tokens (leading dimensions flattened), K in_features, N out_features.
Source: arXiv 2509.25149 section 3 and figure 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quatrain.formats import QuantSpec
from quatrain.kernels.matmul import gemm_parts
from quatrain.kernels.operands import decodes_at_once
from quatrain.nn.products import dgrad, operands, wgrad
from quatrain.nn.split import Split, describe_split
from quatrain.nn.split_linear import SplitLinear
from quatrain.nn.state import (
    OPERANDS,
    PRECISIONS,
    SharedState,
    compute_dtype,
    key_word,
    keys_now,
    maxima_row,
    note_maxima,
)
from quatrain.nn.weights import Parts, Specs, cached_tensors, one_weight, weight_codes


@dataclass(frozen=True)
class LinearRows:
    """The six operand rows of one linear; None leaves that operand in high precision. `split`: what goes beside them.

    Raises:
        ValueError: the two rows of one GEMM differ in format or transform, or only one of them is transformed.
    """

    fprop_input: QuantSpec | None = None
    fprop_weight: QuantSpec | None = None
    dgrad_grad: QuantSpec | None = None
    dgrad_weight: QuantSpec | None = None
    wgrad_grad: QuantSpec | None = None
    wgrad_input: QuantSpec | None = None
    split: Split | None = None

    def __post_init__(self) -> None:
        for gemm, left, right in (
            ("fprop", self.fprop_input, self.fprop_weight),
            ("dgrad", self.dgrad_grad, self.dgrad_weight),
            ("wgrad", self.wgrad_grad, self.wgrad_input),
        ):
            if left is not None and right is not None and left.format != right.format:
                raise ValueError(f"both rows of {gemm} must have one format, received {left.format} and {right.format}")
            transforms = [row.transform if row is not None else None for row in (left, right)]
            if transforms[0] != transforms[1]:
                raise ValueError(
                    f"both rows of {gemm} must carry the same transform (it cancels in the product), "
                    f"received {transforms[0]} and {transforms[1]}"
                )

    @property
    def rows(self) -> tuple[QuantSpec | None, ...]:
        """The six specs in the order of OPERANDS."""
        return tuple(getattr(self, name.replace(".", "_")) for name in OPERANDS)

    @property
    def departs(self) -> bool:
        """Whether a linear with these rows computes anything else than nn.Linear."""
        return any(self.rows) or self.split is not None

    def specs(self, precision: str | None = None) -> Specs:
        """Rows as text, less those that a BF16 phase switches off ("forward", "both")."""
        off = {None: 0, "forward": 2, "both": 6}[precision]
        return tuple(row.to_json() if row is not None and i >= off else None for i, row in enumerate(self.rows))


class QuantLinear(SplitLinear):
    """An nn.Linear whose GEMMs follow operand rows; the same object, parameters, hooks and state_dict keys as before.

    With a parametrized split row `weight` is W_res, and two parameters are added, `lowrank_left` (L2, [N, r]) and
    `lowrank_right` (L1, [r, K]), as well as the state_dict key `lowrank_step`; see `SplitLinear`.
    `convert` turns an existing nn.Linear into one; it is never constructed directly.
    """

    _specs: dict[str | None, Specs]  # by precision phase
    _key_words: tuple[int, ...]  # one 64-bit seed for each operand
    _at_once: tuple[bool, ...]  # whether the operands of X, dY and dY^T are written decoded on this device
    _zero: Tensor  # fp32 [1], for operands that are not quantized

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the compute dtype (autocast's, else the input's)."""
        state, split = self._shared_state, self._split
        specs = self._specs[state.precision]
        if not any(specs) and (split is None or not split.has_factors):
            return nn.functional.linear(input, self.weight, self.bias)
        if not input.is_floating_point():
            raise ValueError(f"a linear layer needs a floating input, received {input.dtype}; cast it first")
        if input.shape[-1] != self.in_features:
            raise ValueError(
                f"the last dimension of the input must be in_features = {self.in_features}, "
                f"received shape {tuple(input.shape)}"
            )
        dtype = compute_dtype(input)
        x = input.to(dtype).reshape(-1, self.in_features)
        training = torch.is_grad_enabled()
        keys = keys_now(self._keys, state.clock)
        needs_dgrad = training and x.requires_grad
        seen_row = state.seen[self._index]
        if split is not None:
            y, seen = self._split_forward(x, keys, specs, needs_dgrad, seen_row, self._zero, self._at_once)
        else:
            codes = weight_codes(self.weight, self._keys, state.clock, state.generation, dtype, specs, needs_dgrad)
            y, seen = _LinearFunction.apply(
                x,
                self.weight,
                self.bias,
                keys,
                specs,
                needs_dgrad,
                training and self.weight.requires_grad,
                self._at_once,
                *codes,
                seen_row,
                self._zero,
            )
        if not x.is_meta:
            note_maxima(seen_row, seen)
        return y.reshape(*input.shape[:-1], self.out_features)

    def weight_code_tensors(self) -> list[Tensor]:
        """The cached codes, scales and amax of the weight, for accounting."""
        return cached_tensors(self._keys)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantLinear:
        super()._apply(fn, recurse)
        self._settle()
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._settle()  # this may be another machine

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._settle()  # with assign=True the weight may now live elsewhere

    def _settle(self) -> None:
        """Bring what is no parameter to the weight's device (nothing is ever cast), without its cached codes."""
        device = torch.device("cpu") if self.weight.is_meta else self.weight.device
        self._keys = torch.tensor(self._key_words, dtype=torch.int64, device=device)
        self._zero = torch.zeros(1, device=device)
        self._shared_state.follow(device)
        self._settle_split(device)
        rows = self._rows
        self._at_once = tuple(decodes_at_once(device, r) for r in (rows.fprop_input, rows.dgrad_grad, rows.wgrad_grad))

    def extra_repr(self) -> str:
        """nn.Linear's line and the rows that are present."""
        present = [name for name, row in zip(OPERANDS, self._rows.rows, strict=True) if row is not None]
        split = "" if self._split is None else f", split={describe_split(self._split)}"
        return f"{super().extra_repr()}, rows=[{', '.join(present)}]{split}"


def convert(linear: nn.Linear, rows: LinearRows, state: SharedState, index: int, seed: int, rank: int) -> QuantLinear:
    """Turn an nn.Linear into a QuantLinear in place: every reference to it, shared or tied, sees the change.

    Args:
        linear: exactly an nn.Linear (a subclass has a forward of its own).
        rows: the six operand rows.
        state: shared by all modules converted together.
        index: this module's position in `state.names`.
        seed: of all random bits.
        rank: of this process, so that data-parallel ranks draw differently.

    Raises:
        ValueError: the module is converted already, or no plain nn.Linear.
    """
    if type(linear) is not nn.Linear:
        raise ValueError(f"convert takes a plain nn.Linear, received {type(linear).__name__}")
    linear.__class__ = QuantLinear
    if not isinstance(linear, QuantLinear):
        raise ValueError("the class of this module cannot be changed; build the model from plain nn.Linear modules")
    linear._rows = rows
    linear._split = None if rows.split is None else rows.split.fitted(linear.out_features, linear.in_features)
    linear._shared_state = state
    linear._index = index
    linear._specs = {precision: rows.specs(precision) for precision in PRECISIONS}
    linear._key_words = tuple(key_word(seed, rank, state.names[index], operand) for operand in OPERANDS)
    linear._add_factors()
    linear._settle()
    return linear


class _LinearFunction(torch.autograd.Function):
    """Fprop now, Dgrad and Wgrad later. Between them only packed operands are alive."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [T, K] compute dtype
        weight: Tensor,  # [N, K] master
        bias: Tensor | None,  # [N]
        keys: Tensor,  # int64 [6, 2]: each operand's seed, and the clock
        specs: Specs,
        needs_dgrad: bool,
        needs_wgrad: bool,
        at_once: tuple[bool, ...],  # operands of X, dY and dY^T are written decoded, not packed
        *rest: Any,  # weight codes: fprop and dgrad (codes, scales, amax); then seen fp32 [6] and a zero fp32 [1]
    ) -> tuple[Tensor, Tensor]:
        fprop_codes, dgrad_codes, seen_row, zero = rest[:3], rest[3:6], rest[6], rest[7]
        tokens, out_features = x.shape[0], weight.shape[0]
        # The packed operand of Wgrad is kept, or the activation itself where Wgrad is unquantized.
        x_parts, kept = operands(x, specs, 0, 5 if needs_wgrad else None, keys, (at_once[0], False))
        w_parts = fprop_codes if specs[1] else (weight.to(x.dtype), None, None)
        y = gemm_parts(x_parts, specs[0], w_parts, specs[1], (tokens, out_features), x.dtype, bias)
        dgrad_parts: Parts = (None, None, None)
        if needs_dgrad:
            dgrad_parts = (
                (weight, None, None) if specs[3] is None else fprop_codes if one_weight(specs) else dgrad_codes
            )
        # Checkpointing drops what is saved and recomputes it later, when the clock has moved on; so the keys of this
        # forward stay on the node itself. (A compiler needs to see them saved, and has no such replay.)
        compiling = torch.compiler.is_compiling()
        ctx.keys = None if compiling else keys
        ctx.save_for_backward(keys if compiling else None, *kept, *dgrad_parts)
        ctx.specs, ctx.at_once, ctx.x_dtype, ctx.weight_dtype = specs, at_once, x.dtype, weight.dtype
        ctx.shape = (tokens, x.shape[1], out_features)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        ctx.seen_row, ctx.zero = seen_row, zero
        seen = maxima_row(zero.to(x.device), {0: x_parts[2], 1: fprop_codes[2], 3: dgrad_codes[2], 5: kept[2]})
        ctx.mark_non_differentiable(seen)
        return y, seen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]  # [T, N]
        keys, *saved = ctx.saved_tensors
        keys = ctx.keys if keys is None else keys
        kept, dgrad_parts, specs = tuple(saved[:3]), tuple(saved[3:6]), ctx.specs
        tokens, in_features, out_features = ctx.shape
        dx = dw = db = None
        seen = {}
        has_dx, has_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1] and kept[0] is not None
        both = operands(dy, specs, 2 if has_dx else None, 4 if has_dw else None, keys, ctx.at_once[1:])
        if has_dx:
            seen[2] = both[0][2]
            dx = dgrad(both[0], dgrad_parts, specs, (tokens, in_features), ctx.x_dtype, ctx.x_dtype)
        if has_dw:
            dyt_parts = both[1] if specs[4] else (dy.t(), None, None)
            seen[4] = dyt_parts[2]
            dw = wgrad(dyt_parts, kept, specs, (out_features, in_features), ctx.weight_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
            db = dy.sum(0, dtype=wide).to(ctx.bias_dtype)
        if not dy.is_meta:
            note_maxima(ctx.seen_row, maxima_row(ctx.zero.to(dy.device), seen))
        return (dx, dw, db, *(None,) * 13)
