"""Codes of a linear's weight: made once for each version of the weight, not for each micro-batch or recompute.

The codes hang on the small tensor that carries the module's seeds. It is the module's own, it dies with it, and it also
reaches the opaque operation that stands for all this in a compiled graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels.operands import quantize_cast
from quatrain.kernels.quantize import empty_parts

Specs = tuple[str | None, ...]  # canonical text of six rows, in the order of OPERANDS: constants to a compiler
Parts = tuple[Any, Any, Any]  # codes, scales, amax; or a plain tensor and two None
WeightCodes = tuple[Any, ...]  # two Parts: for Fprop and for Dgrad; None where not needed or shared
_NOTHING: Parts = (None, None, None)


def weight_codes(
    weight: Tensor,
    seeds: Tensor,
    clock: Tensor,
    generation: Tensor,
    dtype: torch.dtype,
    specs: Specs,
    needs_dgrad: bool,
    branch: tuple[Tensor | None, Tensor | None] = (None, None),
) -> WeightCodes:
    """Codes of a weight for Fprop and, where it cannot share them, for Dgrad.

    Args:
        weight: [N, K], the master.
        seeds: int64 [6] of the module's operands; carries the cached codes.
        clock: int64 [1], for stochastic weight rows.
        generation: int64 [1] on the CPU; a change makes cached codes stale.
        dtype: compute dtype; the weight is cast to it before quantizing.
        specs: the six rows.
        needs_dgrad: whether the input needs a gradient.
        branch: [N, r] and [r, K], functions of the weight whose product is taken off before quantizing; or None twice.
    """
    makes_dgrad = needs_dgrad and specs[3] is not None and not one_weight(specs)
    fprop, dgrad = specs[1], specs[3] if makes_dgrad else None
    if torch.compiler.is_compiling():
        flat = _weight_codes_op(weight.detach(), seeds, clock, generation, dtype, fprop, dgrad, *branch)
        return _unflatten(flat, fprop, dgrad)
    return _cached_codes(weight, seeds, clock, generation, dtype, fprop, dgrad, branch)


def cached_tensors(seeds: Tensor) -> list[Tensor]:
    """The codes, scales, amaxes and split factors that hang on a module's seeds, for accounting."""
    found = [getattr(seeds, name, None) for name in ("weight_codes", "split_factors")]
    return [t for cached in found if cached is not None for t in cached[2] if t is not None]


def one_weight(specs: Specs) -> bool:
    """Whether Dgrad reuses the weight codes of Fprop."""
    return specs[3] is not None and specs[1] == specs[3] and serves_both_ways(specs[3])


def serves_both_ways(spec: str) -> bool:
    """Whether codes of W are also codes of its transpose: square blocks, no transform, nothing drawn."""
    return '"transform"' not in spec and '"stochastic' not in spec and '"block":[1,' not in spec


def operand_key(seeds: Tensor, clock: Tensor, operand: int) -> Tensor:
    """int64 [2]: the operand's seed and the clock."""
    return torch.cat([seeds[operand : operand + 1], clock])


def keeps_nothing(weight: Tensor) -> bool:
    """Whether what is made of this weight now must be made again next time."""
    if weight.is_inference() or torch.is_inference_mode_enabled() or not weight.is_leaf:
        return True  # autograd could not save it
    # A CUDA graph replays kernels, not this function: it must quantize the weight it finds at each replay.
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _cached_codes(
    weight: Tensor,
    seeds: Tensor,
    clock: Tensor,
    generation: Tensor,
    dtype: torch.dtype,
    fprop: Any,
    dgrad: Any,
    branch: tuple[Tensor | None, Tensor | None],
) -> WeightCodes:
    if keeps_nothing(weight):
        return _make(weight, seeds, clock, dtype, fprop, dgrad, branch)
    stamp = (weight.data_ptr(), weight._version, int(generation), dtype, fprop)
    cached = getattr(seeds, "weight_codes", None)
    fresh = cached is not None and cached[0] == stamp and same_sample(cached[1], weight)
    if not fresh or cached is None:
        cached = (stamp, sample(weight), _make(weight, seeds, clock, dtype, fprop, dgrad, branch), dgrad)
    elif dgrad is not None and cached[3] != dgrad:  # the first forward needed no gradient of the input
        parts = (*cached[2][:3], *_make(weight, seeds, clock, dtype, None, dgrad, branch)[3:])
        cached = (stamp, cached[1], parts, dgrad)
    seeds.weight_codes = cached  # type: ignore[attr-defined]
    return cached[2] if dgrad is not None else (*cached[2][:3], *_NOTHING)


def _make(
    weight: Tensor,
    seeds: Tensor,
    clock: Tensor,
    dtype: torch.dtype,
    fprop: Any,
    dgrad: Any,
    branch: tuple[Tensor | None, Tensor | None],
) -> WeightCodes:
    w = without_branch(weight.detach(), *branch)
    first = _NOTHING if fprop is None else quantize_cast(w, fprop, _key_if_drawn(fprop, seeds, clock, 1), dtype)
    if dgrad is None:
        return (*first, *_NOTHING)
    w = w if serves_both_ways(dgrad) else w.t()
    return (*first, *quantize_cast(w, dgrad, _key_if_drawn(dgrad, seeds, clock, 3), dtype))


def without_branch(weight: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """W - L2 L1, formed in fp32 (float64 of float64), in the weight's dtype; W itself without factors."""
    if left is None or right is None:
        return weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    with torch.autocast(weight.device.type, enabled=False):
        return (weight.to(wide) - left.to(wide) @ right.to(wide)).to(weight.dtype)


def _key_if_drawn(spec: str, seeds: Tensor, clock: Tensor, operand: int) -> Tensor | None:
    return operand_key(seeds, clock, operand) if '"stochastic' in spec else None


def sample(weight: Tensor) -> Tensor | None:
    """A copy of a few hundred elements, to notice a write that autograd's version counter does not see (`weight.data`).

    On a GPU the comparison would wait for the device, so there is none: optimizer steps are noticed all the same, other
    writes through `.data` need `quatrain.drop_weight_codes`.
    """
    return None if weight.device.type != "cpu" or not weight.is_contiguous() else _strided(weight).clone()


def same_sample(taken: Tensor | None, weight: Tensor) -> bool:
    """Whether the weight still shows the sample that was taken of it; always true where none can be."""
    if weight.device.type != "cpu" or not weight.is_contiguous():
        return taken is None
    return taken is not None and torch.equal(taken, _strided(weight))


def _strided(weight: Tensor) -> Tensor:
    flat = weight.detach().view(-1)
    stride = max(1, flat.numel() // 256)
    while math.gcd(stride, weight.shape[-1]) > 1:  # else few columns would be seen
        stride += 1
    return flat[::stride]


def _unflatten(flat: list[Tensor], fprop: str | None, dgrad: str | None) -> WeightCodes:
    first = _NOTHING if fprop is None else tuple(flat[:3])
    return (*first, *(_NOTHING if dgrad is None else tuple(flat[-3:])))


@torch.library.custom_op("quatrain::weight_codes", mutates_args=())
def _weight_codes_op(
    weight: Tensor,
    seeds: Tensor,
    clock: Tensor,
    generation: Tensor,
    dtype: torch.dtype,
    fprop: str | None,
    dgrad: str | None,
    left: Tensor | None,
    right: Tensor | None,
) -> list[Tensor]:
    # Copies: the graph owns what it gets and may write over it.
    codes = _cached_codes(weight, seeds, clock, generation, dtype, fprop, dgrad, (left, right))
    return [part.clone() for part in codes if part is not None]


@_weight_codes_op.register_fake
def _(
    weight: Tensor,
    seeds: Tensor,
    clock: Tensor,
    generation: Tensor,
    dtype: torch.dtype,
    fprop: str | None,
    dgrad: str | None,
    left: Tensor | None,
    right: Tensor | None,
) -> list[Tensor]:
    w = weight.to(dtype)
    flat = [] if fprop is None else list(empty_parts(w, QuantSpec.from_json(fprop)))
    if dgrad is not None:
        flat += empty_parts(w if serves_both_ways(dgrad) else w.t(), QuantSpec.from_json(dgrad))
    return flat
