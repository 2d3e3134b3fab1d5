"""AdamW with both moments in NVFP4: the contract, and the step in plain PyTorch, which defines every bit.

A step reads parameter, gradient and moments once and writes them once. All of it is fp32, each product and sum rounded
by itself, in the order that is written here; `moments.py` says how moments are kept.
Sources: arXiv 1711.05101 (AdamW), Full-Stack FP4 (Ding et al., 2026) for the pipeline. The bound on |m| / sqrt(v), the
deadband, the logarithm, the first moment's relation to it and the energy-matched mean are this project's own and left
out with `faithful`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quatrain.formats import FLT_MAX
from quatrain.kernels.dispatch import choose
from quatrain.kernels.masters import join_master, round_bfloat16, split_master
from quatrain.kernels.moments import (
    DEAD_M,
    DEAD_S,
    HELD_S,
    NEAREST_TABLE,
    SCALED,
    SMALLEST_M,
    STOCHASTIC_TABLE,
    V_FLOOR,
    Layout,
    MomentSpec,
    across,
    along,
    block_hashes,
    butterfly,
    doubled,
    element_draws,
    empty_state,
    encode_blocks,
    layout,
    nearest_power,
    octaves,
    pack_along,
    power_near,
    ratios,
    read_units,
    signs,
    square_root,
    tile_sums,
    unpack_across,
    write_units,
)
from quatrain.kernels.scaling import tree_sum

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
        counter: int64 [2], seed and step, on that device.
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
        hashes = block_hashes(counter, item.tensor_id, index, form.blocks)
        part = slice(start, start + len(index))
        state = {name: item.state[name][part] for name in _STATE}
        _step_rows(item, part, state, hashes, replace(form, rows=len(index)), numbers, spec)


def _step_rows(
    item: Item, part: slice, state: dict[str, Tensor], hashes: Tensor, form: Layout, n: _Numbers, spec: MomentSpec
) -> None:
    gradient = across(_pad(item.gradient[part].float(), form))
    draws = element_draws(hashes)
    m, s = _decode(state, n.beta1, gradient, form, spec)
    m.add_(gradient * n.rest1)
    v = s.square_().mul_(n.beta2).add_((gradient * n.gradient).square_()).clamp_(min=V_FLOOR)
    real = _real(form, v.device)
    if real is not None:
        v.mul_(real)
    s = square_root(v)
    finite, ratio = _encode_second(state, s, v, real, hashes, form, spec)
    lost = _encode_first(state, m, ratio, form, draws & 0x7F)
    finite = finite.repeat_interleave(form.tile // 16) & ~lost
    size = torch.where(finite, n.size, torch.full_like(n.size, math.nan))
    inverse = torch.maximum(s, m.abs() * n.bound).add_(n.eps).reciprocal_()
    weight = across(_pad(_read_weight(item, part, spec), form))
    weight = (weight * n.decay).sub_((m * size).mul_(inverse))
    _write_weight(item, part, weight, draws, form, spec)


def _decode(
    state: dict[str, Tensor], beta1: Tensor | float, gradient: Tensor, form: Layout, spec: MomentSpec
) -> tuple[Tensor, Tensor]:
    """beta1 * m and s, fp32 [16, N], after the deadband.

    A coordinate whose gradient is always zero would take up noise of its neighbours from the rotations, and drift.
    Where the gradient is zero, that of a neighbour is not, and both moments are no more than rounding noise, m becomes
    zero and s is held below the noise's reach. One that was active lately has an s far above it and is left alone.
    """
    m = butterfly(doubled(unpack_across(state["m_codes"]))) * signs(gradient.device)
    rest = butterfly(doubled(unpack_across(state["v_codes"])))
    unit = read_units(state["v_scales"], state["v_amax"]) * 0.125
    m_unit = read_units(state["m_scales"], state["m_amax"]) * 0.125 * beta1
    mean = (state["v_mean"].float() * SCALED).flatten().repeat_interleave(form.tile // 16)
    if spec.faithful:
        return m.mul_(m_unit), rest.mul_(unit * SCALED).add_(mean)
    ratio = ratios(rest.mul_(unit))
    m_unit = power_near(ratio) * m_unit
    silent = gradient == 0.0
    if bool(silent.any()):
        beside = (gradient != 0.0).any(dim=0)
        dead = silent & beside & (ratio <= DEAD_S) & (m.abs() <= 8.0 * DEAD_M)
        ratio = torch.where(dead, ratio.clamp(max=HELD_S), ratio)
        m = m.masked_fill(dead, 0.0)
    return m.mul_(m_unit), ratio.mul_(mean)


def _encode_second(
    state: dict[str, Tensor], s: Tensor, v: Tensor, real: Tensor | None, hashes: Tensor, form: Layout, spec: MomentSpec
) -> tuple[Tensor, Tensor | None]:
    """Store s; returns where tiles are finite, bool [tiles], and s over its tile's mean as decoded, unless faithful."""
    mean = tile_sums(tree_sum(s, 0), form.tile) * _inverse_counts(form, s.device)
    if spec.faithful:
        ratio, units, codes = None, *_differences(s, mean, real, form)
    else:
        units, codes = _logarithms(s, mean, real, form)
        ratio = ratios(butterfly(doubled(codes)).mul_(units * 0.125))
        squares = ratio.square() if real is None else ratio.square().mul_(real)
        # The mean with which the decoded tile has the sum of squares of v.
        mean = square_root(tile_sums(tree_sum(v, 0), form.tile) / tile_sums(tree_sum(squares, 0), form.tile))
    finite = mean.abs() <= FLT_MAX  # False for NaN
    mean = torch.where(finite, mean, torch.full_like(mean, math.nan)) * (1.0 / SCALED)
    if spec.faithful:
        state["v_mean"].copy_(mean.view(form.rows, -1))
    else:
        bits = (hashes[:: form.tile // 16] >> 16).to(torch.int32)
        state["v_mean"].copy_(round_bfloat16(mean, bits).view(form.rows, -1))
    state["v_codes"].copy_(pack_along(codes, form.rows))
    write_units(units, state["v_scales"], state["v_amax"])
    return finite, ratio


def _logarithms(s: Tensor, mean: Tensor, real: Tensor | None, form: Layout) -> tuple[Tensor, Tensor]:
    """Units (in octaves) and codes of s over its tile's mean; zeros where that is not finite."""
    whole = mean <= FLT_MAX
    inverse = torch.where(whole, mean.reciprocal(), torch.zeros_like(mean))
    whole, inverse = (x.repeat_interleave(form.tile // 16) for x in (whole, inverse))
    rest = octaves(s * inverse, whole)
    if real is not None:
        rest.mul_(real)
    encoded = encode_blocks(butterfly(rest.half()), NEAREST_TABLE, None, up=False)
    return encoded.units * 0.25, encoded.codes


def _differences(s: Tensor, mean: Tensor, real: Tensor | None, form: Layout) -> tuple[Tensor, Tensor]:
    """Units and codes of s minus its tile's mean."""
    per_tile = form.tile // 16
    power = nearest_power(mean, 0)
    spread = power.repeat_interleave(per_tile)
    rest = s * spread - (mean * power).repeat_interleave(per_tile)
    if real is not None:
        rest.mul_(real)
    encoded = encode_blocks(butterfly(rest.half()), NEAREST_TABLE, None, up=False)
    units = encoded.units * 0.25 / spread * (1.0 / SCALED)
    return torch.where(encoded.finite, units, torch.full_like(units, math.nan)), encoded.codes


def _encode_first(
    state: dict[str, Tensor], m: Tensor, ratio: Tensor | None, form: Layout, draws: Tensor | None
) -> Tensor:
    """Store m, relative to the power of two of `ratio`; returns which blocks are lost, bool [N]."""
    if ratio is not None:
        m = m * nearest_power(power_near(ratio), 0)
    largest = (m.view(torch.int32) & 0x7FFFFFFF).amax(dim=0).clamp_(min=SMALLEST_M)
    power = nearest_power(largest.view(torch.float32), 10)  # below 2048
    turned = butterfly((m * (signs(m.device) * power)).half())
    encoded = encode_blocks(turned, STOCHASTIC_TABLE if draws is not None else NEAREST_TABLE, draws, up=True)
    units = torch.where(encoded.finite, encoded.units * 0.25 / power, torch.full_like(power, math.nan))
    state["m_codes"].copy_(pack_along(encoded.codes, form.rows))
    write_units(units, state["m_scales"], state["m_amax"])
    return ~encoded.finite


def _real(form: Layout, device: torch.device) -> Tensor | None:
    """1 for elements, 0 for padding, fp32 [16, N]; None where nothing is padded."""
    if form.columns == form.padded:
        return None
    row = (torch.arange(form.padded, device=device) < form.columns).float()
    return across(row.expand(form.rows, -1))


def _inverse_counts(form: Layout, device: torch.device) -> Tensor:
    """1 / elements of each tile, fp32 [tiles]."""
    first = torch.arange(0, form.padded, form.tile, device=device)
    return (form.columns - first).clamp(max=form.tile).float().reciprocal().repeat(form.rows)


def _pad(x: Tensor, form: Layout) -> Tensor:
    return x if form.columns == form.padded else torch.nn.functional.pad(x, (0, form.padded - form.columns))


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


def decode_moments(state: dict[str, Tensor], rows: int, columns: int, spec: MomentSpec) -> tuple[Tensor, Tensor]:
    """The moments as a step reads them.

    Returns:
        m and v, fp32 [R, K].
    """
    form = layout(rows, columns, spec)
    anything = torch.ones((), device=state["v_mean"].device)  # no gradient is zero: no deadband
    m, s = _decode(state, 1.0, anything, form, spec)
    s.mul_(1.0 / SCALED)
    m, v = (along(x, rows)[:, :columns].contiguous() for x in (m, s.square_()))
    return m, v


def encode_moments(
    m: Tensor, v: Tensor, state: dict[str, Tensor], spec: MomentSpec, counter: Tensor | None = None, tensor_id: int = 0
) -> None:
    """Write moments into a state, in place.

    Args:
        m: first moment, fp32 [R, K].
        v: second moment, fp32 [R, K], not negative.
        state: as from `empty_state`.
        spec: how the moments are kept.
        counter: int64 [2], seed and step: round m stochastically; None: to nearest.
        tensor_id: a word of the random bits' key.
    """
    rows, columns = m.shape
    if rows == 0:
        return
    form = layout(rows, columns, spec)
    key = torch.zeros(2, dtype=torch.int64, device=m.device) if counter is None else counter
    hashes = block_hashes(key, tensor_id, torch.arange(rows, device=m.device), form.blocks)
    real = _real(form, m.device)
    m, v = across(_pad(m, form)), across(_pad(v, form)) * (SCALED * SCALED)
    v = v.clamp_(min=V_FLOOR) if real is None else v.clamp_(min=V_FLOOR).mul_(real)
    _, ratio = _encode_second(state, square_root(v), v, real, hashes, form, spec)
    _encode_first(state, m, ratio, form, None if counter is None else element_draws(hashes) & 0x7F)
