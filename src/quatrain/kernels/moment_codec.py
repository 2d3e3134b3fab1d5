"""How a step of AdamW decodes and encodes its NVFP4 moments, in plain PyTorch, which defines the bits.

`moments.py` says what is stored and `dither.py` how the first moment's codes are drawn. With `faithful` both follow
Full-Stack FP4 (Ding et al., 2026): differences from the tile's mean, and stochastic rounding of the first moment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quatrain.formats import FLT_MAX
from quatrain.kernels.dither import PARTS, decode_dithered, encode_dithered
from quatrain.kernels.masters import round_bfloat16
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


def decode(
    state: dict[str, Tensor], beta1: Tensor | float, gradient: Tensor, draws: Tensor, form: Layout, spec: MomentSpec
) -> tuple[Tensor, Tensor]:
    """beta1 * m and s, fp32 [16, N], after the deadband; draws: of the step that wrote them.

    A coordinate whose gradient is always zero would take up noise of its neighbours from the rotations, and drift.
    Where the gradient is zero, that of a neighbour is not, and both moments are no more than rounding noise, m becomes
    zero and s is held below the noise's reach. One that was active lately has an s far above it and is left alone.
    """
    codes, turn = unpack_across(state["m_codes"]), signs(gradient.device)
    rest = butterfly(doubled(unpack_across(state["v_codes"])))
    unit = read_units(state["v_scales"], state["v_amax"]) * 0.125
    m_unit = read_units(state["m_scales"], state["m_amax"])
    mean = (state["v_mean"].float() * SCALED).flatten().repeat_interleave(form.tile // 16)
    if spec.faithful:
        m = butterfly(doubled(codes)) * turn
        return m.mul_(m_unit * 0.125 * beta1), rest.mul_(unit * SCALED).add_(mean)
    m = butterfly(decode_dithered(codes, draws)).float().mul_(turn)
    ratio = ratios(rest.mul_(unit))
    m_unit = power_near(ratio) * (m_unit * (0.25 / PARTS) * beta1)
    silent = gradient == 0.0
    if bool(silent.any()):
        beside = (gradient != 0.0).any(dim=0)
        dead = silent & beside & (ratio <= DEAD_S) & (m.abs() <= 4.0 * PARTS * DEAD_M)
        ratio = torch.where(dead, ratio.clamp(max=HELD_S), ratio)
        m = m.masked_fill(dead, 0.0)
    return m.mul_(m_unit), ratio.mul_(mean)


def encode_second(
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


def encode_first(
    state: dict[str, Tensor], m: Tensor, ratio: Tensor | None, form: Layout, draws: Tensor | None, spec: MomentSpec
) -> Tensor:
    """Store m, relative to the power of two of `ratio`; returns which blocks are lost, bool [N]."""
    if ratio is not None:
        m = m * nearest_power(power_near(ratio), 0)
    largest = (m.view(torch.int32) & 0x7FFFFFFF).amax(dim=0).clamp_(min=SMALLEST_M)
    power = nearest_power(largest.view(torch.float32), 10)  # below 2048
    turned = butterfly((m * (signs(m.device) * power)).half())
    if draws is None:
        encoded = encode_blocks(turned, NEAREST_TABLE, None, up=True)
    elif spec.faithful:
        encoded = encode_blocks(turned, STOCHASTIC_TABLE, draws & 0x7F, up=True)
    else:
        encoded = encode_dithered(turned, draws)
    units = torch.where(encoded.finite, encoded.units * 0.25 / power, torch.full_like(power, math.nan))
    state["m_codes"].copy_(pack_along(encoded.codes, form.rows))
    write_units(units, state["m_scales"], state["m_amax"])
    return ~encoded.finite


def real_elements(form: Layout, device: torch.device) -> Tensor | None:
    """1 for elements, 0 for padding, fp32 [16, N]; None where nothing is padded."""
    if form.columns == form.padded:
        return None
    row = (torch.arange(form.padded, device=device) < form.columns).float()
    return across(row.expand(form.rows, -1))


def _inverse_counts(form: Layout, device: torch.device) -> Tensor:
    """1 / elements of each tile, fp32 [tiles]."""
    first = torch.arange(0, form.padded, form.tile, device=device)
    return (form.columns - first).clamp(max=form.tile).float().reciprocal().repeat(form.rows)


def pad(x: Tensor, form: Layout) -> Tensor:
    """[rows, K] with zeros up to whole tiles."""
    return x if form.columns == form.padded else torch.nn.functional.pad(x, (0, form.padded - form.columns))


def decode_moments(
    state: dict[str, Tensor],
    rows: int,
    columns: int,
    spec: MomentSpec,
    counter: Tensor | None = None,
    tensor_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """The moments as a step reads them.

    Args:
        state: as written by `adamw_step` or `encode_moments`.
        rows: R.
        columns: K.
        spec: how the moments are kept.
        counter: int64 [2], seed and step of whoever wrote the state; None as for `encode_moments`.
        tensor_id: the same.

    Returns:
        m and v, fp32 [R, K].
    """
    form = layout(rows, columns, spec)
    device = state["v_mean"].device
    anything = torch.ones((), device=device)  # no gradient is zero: no deadband
    hashes = block_hashes(_key(counter, device), tensor_id, torch.arange(rows, device=device), form.blocks)
    m, s = decode(state, 1.0, anything, element_draws(hashes), form, spec)
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
        counter: int64 [2], seed and step that m's random bits are drawn from, as if that step had written it; None:
            (0, 0), and with `faithful` to nearest.
        tensor_id: a word of the random bits' key.
    """
    rows, columns = m.shape
    if rows == 0:
        return
    form = layout(rows, columns, spec)
    hashes = block_hashes(_key(counter, m.device), tensor_id, torch.arange(rows, device=m.device), form.blocks)
    real = real_elements(form, m.device)
    m, v = across(pad(m, form)), across(pad(v, form)) * (SCALED * SCALED)
    v = v.clamp_(min=V_FLOOR) if real is None else v.clamp_(min=V_FLOOR).mul_(real)
    _, ratio = encode_second(state, square_root(v), v, real, hashes, form, spec)
    draws = None if spec.faithful and counter is None else element_draws(hashes)
    encode_first(state, m, ratio, form, draws, spec)


def _key(counter: Tensor | None, device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device) if counter is None else counter
