"""AdamW with both moments in NVFP4: the contract, and the step in plain PyTorch, which defines every bit.

A step reads parameter, gradient and moments once and writes them once. All of it is fp32, each product and sum rounded
by itself, in the order that is written here; `moments.py` says how moments are kept.
Sources: arXiv 1711.05101 (AdamW), Full-Stack FP4 (Ding et al., 2026) for the pipeline. The bound on |m| / sqrt(v), the
deadband, the logarithm, the first moment's relation to it, its dither, and the energy-matched mean are
this project's own and left out with `faithful`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quatrain.kernels.dispatch import choose
from quatrain.kernels.masters import join_master, round_bfloat16, split_master
from quatrain.kernels.moment_codec import (
    decode,
    decode_moments,
    encode_first,
    encode_moments,
    encode_second,
    pad,
    real_elements,
)
from quatrain.kernels.moments import (
    SCALED,
    V_FLOOR,
    Layout,
    MomentSpec,
    across,
    along,
    block_hashes,
    element_draws,
    empty_state,
    layout,
    square_root,
)

__all__ = [
    "SCALARS",
    "Item",
    "MomentSpec",
    "adamw_step",
    "decode_moments",
    "empty_state",
    "encode_moments",
    "join_master",
    "round_bfloat16",
    "split_master",
]

# What the fp32 vector `scalars` of a step holds: the learning rate, 1 - lr * weight decay, lr / (1 - beta1^t),
# 1 / sqrt(1 - beta2^t), eps, beta1, 1 - beta1, beta2, 1 - beta2, and 1 / kappa of |m| <= kappa sqrt(v), 0 for none.
SCALARS = ("lr", "decay", "size", "root", "eps", "beta1", "rest1", "beta2", "rest2", "bound")
_STATE = ("m_codes", "m_scales", "m_amax", "v_codes", "v_scales", "v_amax", "v_mean")
_ELEMENTS = 1 << 17  # handled at once: some ten temporaries of that size fit in a cache


@dataclass
class Item:
    """One tensor of a step.

    Attributes:
        parameter: [R, K] row-major, fp32 or BF16; written.
        gradient: [R, K] row-major, fp32 or BF16.
        state: as from `empty_state`, and for a BF16 parameter `master` fp32 [R, K] or `correction` int8 [R, K], as the
            spec's master says; written.
        tensor_id: a word of the random bits' key; no two tensors of an optimizer share one.
    """

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    tensor_id: int


def adamw_step(items: list[Item], scalars: Tensor, counter: Tensor, spec: MomentSpec, backend: str = "auto") -> None:
    """One AdamW step on every item, in place.

    A gradient that is NaN or infinite (or so large that sqrt(v) leaves fp32) makes its weight NaN, with it at least
    the weights of its block of 16 and at most those of its tile, and stays in the moments.

    Args:
        items: the tensors, all on one device.
        scalars: fp32 [10], see `SCALARS`, on that device.
        counter: int64 [2], seed and step, on that device. What a state holds, unless it is empty, was written by the
            same seed and tensor id one step before: with that key the first moment is decoded.
        spec: how the moments are kept.
        backend: "auto", "reference" or "triton".

    Raises:
        ValueError: a backend that cannot serve this device, or an item that is not of the form above.
    """
    if not items:
        return
    for item in items:
        _check(item, spec)
    device = items[0].parameter.device
    if choose(device, backend, lambda: "it has no AdamW").backend in ("triton", "blackwell"):
        from quatrain.kernels import adamw_triton

        adamw_triton.step(items, scalars, counter, spec)
        return
    for item in items:
        _step(item, scalars, counter, spec)


def _check(item: Item, spec: MomentSpec) -> None:
    parameter, gradient = item.parameter, item.gradient
    if parameter.dim() != 2 or gradient.shape != parameter.shape:
        raise ValueError(
            f"parameter and gradient must be matrices of one shape, received {list(parameter.shape)} and "
            f"{list(gradient.shape)}; flatten trailing dimensions"
        )
    narrow = parameter.dtype == torch.bfloat16
    if not narrow and parameter.dtype != torch.float32:
        raise ValueError(
            f"the parameter must be fp32 or BF16, received {parameter.dtype}; cast it, or keep fp32 moments"
        )
    if gradient.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the gradient must be fp32 or BF16, received {gradient.dtype}; cast it to fp32")
    if not narrow and spec.master != "fp32":
        raise ValueError(f'master="{spec.master}" is for BF16 parameters, received an fp32 one; use master="fp32"')
    wanted = {"fp32": "master", "bf16+int8": "correction"}.get(spec.master) if narrow else None
    names = (*_STATE, wanted) if wanted else _STATE
    missing = [name for name in names if name not in item.state]
    if missing:
        raise ValueError(f"the item needs a state with {', '.join(missing)}, received {sorted(item.state)}; add it")
    tensors = [parameter, gradient, *(item.state[name] for name in names)]
    if not all(tensor.is_contiguous() and tensor.device == parameter.device for tensor in tensors):
        raise ValueError(
            "parameter, gradient and state must be row-major and on one device, received "
            f"{[(list(t.stride()), str(t.device)) for t in tensors]}; make them contiguous"
        )


@dataclass(frozen=True)
class _Numbers:
    """What a step makes of `scalars`: fp32 tensors of one element."""

    decay: Tensor
    size: Tensor  # lr sqrt(c2) / c1, over the unit of s
    eps: Tensor  # eps sqrt(c2), in the unit of s
    beta1: Tensor
    rest1: Tensor
    beta2: Tensor
    gradient: Tensor  # sqrt(1 - beta2) over the unit of s
    bound: Tensor


def _numbers(scalars: Tensor, spec: MomentSpec) -> _Numbers:
    _, decay, size, root, eps, beta1, rest1, beta2, rest2, bound = scalars.unbind()
    gradient = square_root(rest2) * SCALED
    size, eps = (size / root) * SCALED, (eps / root) * SCALED
    bound = torch.zeros_like(bound) if spec.faithful else bound * SCALED
    return _Numbers(decay, size, eps, beta1, rest1, beta2, gradient, bound)


def _step(item: Item, scalars: Tensor, counter: Tensor, spec: MomentSpec) -> None:
    rows, columns = item.parameter.shape
    if rows == 0:
        return
    form, numbers = layout(rows, columns, spec), _numbers(scalars, spec)
    count = max(1, _ELEMENTS // form.padded)
    for start in range(0, rows, count):
        index = torch.arange(start, min(start + count, rows), dtype=torch.int64, device=scalars.device)
        keys = (counter, _before(counter))
        hashes, before = (block_hashes(key, item.tensor_id, index, form.blocks) for key in keys)
        part = slice(start, start + len(index))
        state = {name: item.state[name][part] for name in _STATE}
        _step_rows(item, part, state, (hashes, before), replace(form, rows=len(index)), numbers, spec)


def _before(counter: Tensor) -> Tensor:
    """Seed and step of the step before."""
    return torch.stack([counter[0], counter[1] - 1])


def _step_rows(
    item: Item,
    part: slice,
    state: dict[str, Tensor],
    keys: tuple[Tensor, Tensor],
    form: Layout,
    n: _Numbers,
    spec: MomentSpec,
) -> None:
    hashes, before = keys
    gradient = across(pad(item.gradient[part].float(), form))
    draws = element_draws(hashes)
    m, s = decode(state, n.beta1, gradient, element_draws(before), form, spec)
    m.add_(gradient * n.rest1)
    v = s.square_().mul_(n.beta2).add_((gradient * n.gradient).square_()).clamp_(min=V_FLOOR)
    real = real_elements(form, v.device)
    if real is not None:
        v.mul_(real)
    s = square_root(v)
    finite, ratio = encode_second(state, s, v, real, hashes, form, spec)
    lost = encode_first(state, m, ratio, form, draws, spec)
    finite = finite.repeat_interleave(form.tile // 16) & ~lost
    size = torch.where(finite, n.size, torch.full_like(n.size, math.nan))
    inverse = torch.maximum(s, m.abs() * n.bound).add_(n.eps).reciprocal_()
    weight = across(pad(_read_weight(item, part, spec), form))
    weight = (weight * n.decay).sub_((m * size).mul_(inverse))
    _write_weight(item, part, weight, draws, form, spec)


def _read_weight(item: Item, part: slice, spec: MomentSpec) -> Tensor:
    parameter = item.parameter[part]
    if parameter.dtype == torch.float32 or spec.master == "bf16-sr":
        return parameter.float()
    if spec.master == "bf16+int8":
        return join_master(parameter, item.state["correction"].view(item.parameter.shape)[part])
    master = item.state["master"].view(item.parameter.shape)[part]
    # A parameter that is no longer its master's rounding was written by someone else: it counts.
    return torch.where(master.to(torch.bfloat16) == parameter, master, parameter.float())


def _write_weight(item: Item, part: slice, weight: Tensor, draws: Tensor, form: Layout, spec: MomentSpec) -> None:
    parameter = item.parameter[part]
    if parameter.dtype == torch.bfloat16 and spec.master == "bf16-sr":
        parameter.copy_(along(round_bfloat16(weight, draws), form.rows)[:, : form.columns])
        return
    weight = along(weight, form.rows)[:, : form.columns]
    if parameter.dtype == torch.bfloat16 and spec.master == "bf16+int8":
        narrow, correction = split_master(weight)
        parameter.copy_(narrow)
        item.state["correction"].view(item.parameter.shape)[part] = correction
        return
    parameter.copy_(weight)
    if parameter.dtype == torch.bfloat16:
        item.state["master"].view(item.parameter.shape)[part] = weight
