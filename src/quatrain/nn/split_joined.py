"""A low-rank split on GPUs that emulate FP4: forward and backward with the branch inside the quantized products.

The same numbers as `quatrain.nn.split_function` up to the order of sums and one more rounding of the branch's narrow
operands; `quatrain.kernels.lowrank` says which. One opaque operation each to compilers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels import lowrank
from quatrain.kernels.quantize import empty_parts
from quatrain.nn.products import drawn_key
from quatrain.nn.weights import Parts, Specs

_BETWEEN = "\n"  # specs in one text, as an opaque operation takes them


def _text(specs: Specs) -> str:
    return _BETWEEN.join(spec or "" for spec in specs)


def joined_forward(
    x: Tensor, bias: Tensor | None, keys: Tensor, specs: Specs, beta: float, weight: Parts, inward: Tensor,
    outward: Tensor,
) -> tuple[Tensor, Tensor, Parts, Tensor]:  # fmt: skip
    """Y [T, N], X [L1^T | Q1] [T, 2 r], codes of X' along its columns, amax of X; see `lowrank.forward`."""
    args = (x, *weight, inward, outward, beta, _text(specs), drawn_key(specs, 0, keys), drawn_key(specs, 5, keys))
    run = _forward_op if torch.compiler.is_compiling() else _forward
    y, u, codes, scales, amax_kept, amax = run(*args, bias)
    return y, u, (codes, scales, amax_kept), amax


def joined_backward(
    dy: Tensor, keys: Tensor, specs: Specs, beta: float, kept: Parts, weight: Parts, u: Tensor, inward: Tensor,
    outward: Tensor, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dX, dW_res, dL2, dL1 and the amaxes of dY and dY'; see `lowrank.backward`."""
    both = drawn_key(specs, 2, keys), drawn_key(specs, 4, keys)
    wide = out_dtype if out_dtype in (torch.float32, torch.bfloat16) else torch.float32
    args = (dy, *kept, *weight, u, inward, outward, beta, _text(specs), *both, wide)
    run = _backward_op if torch.compiler.is_compiling() else _backward
    dx, dw, dleft, dright, amax = run(*args)
    return dx, dw, dleft, dright, amax


def _forward(
    x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor, inward: Tensor, outward: Tensor, beta: float,
    specs: str, key: Tensor | None, kept_key: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    branch = lowrank.Branch(inward, outward, beta)
    y, u, kept, seen = lowrank.forward(
        x, (codes, scales, amax), branch, tuple(specs.split(_BETWEEN)), key, kept_key, bias
    )
    return y, u, *kept, seen


def _backward(
    dy: Tensor, kept_codes: Tensor, kept_scales: Tensor, kept_amax: Tensor, codes: Tensor, scales: Tensor,
    amax: Tensor, u: Tensor, inward: Tensor, outward: Tensor, beta: float, specs: str, key: Tensor | None,
    column_key: Tensor | None, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    branch, kept = lowrank.Branch(inward, outward, beta), (kept_codes, kept_scales, kept_amax)
    weight, both = (codes, scales, amax), (key, column_key)
    return lowrank.backward(dy, kept, weight, u, branch, tuple(specs.split(_BETWEEN)), both, out_dtype)


@torch.library.custom_op("quatrain::lowrank_forward", mutates_args=())
def _forward_op(
    x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor, inward: Tensor, outward: Tensor, beta: float,
    specs: str, key: Tensor | None, kept_key: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    found = _forward(x, codes, scales, amax, inward, outward, beta, specs, key, kept_key, bias)
    return (*found[:4], found[4].clone(), found[5].clone())  # two amaxes may not share their storage


@_forward_op.register_fake
def _(
    x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor, inward: Tensor, outward: Tensor, beta: float,
    specs: str, key: Tensor | None, kept_key: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kept = empty_parts(x.t(), QuantSpec.from_json(specs.split(_BETWEEN)[5]))
    y = x.new_empty(x.shape[0], outward.shape[1])
    return y, x.new_empty(x.shape[0], inward.shape[0]), *kept, amax.new_empty(1)


@torch.library.custom_op("quatrain::lowrank_backward", mutates_args=())
def _backward_op(
    dy: Tensor, kept_codes: Tensor, kept_scales: Tensor, kept_amax: Tensor, codes: Tensor, scales: Tensor,
    amax: Tensor, u: Tensor, inward: Tensor, outward: Tensor, beta: float, specs: str, key: Tensor | None,
    column_key: Tensor | None, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    weight, kept = (codes, scales, amax), (kept_codes, kept_scales, kept_amax)
    return _backward(dy, *kept, *weight, u, inward, outward, beta, specs, key, column_key, out_dtype)


@_backward_op.register_fake
def _(
    dy: Tensor, kept_codes: Tensor, kept_scales: Tensor, kept_amax: Tensor, codes: Tensor, scales: Tensor,
    amax: Tensor, u: Tensor, inward: Tensor, outward: Tensor, beta: float, specs: str, key: Tensor | None,
    column_key: Tensor | None, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (double, k), n = inward.shape, dy.shape[1]
    dw, left, right = (dy.new_empty(s, dtype=out_dtype) for s in ((n, k), (n, double // 2), (double // 2, k)))
    return dy.new_empty(dy.shape[0], k), dw, left, right, dy.new_empty(2, dtype=torch.float32)
