"""Models with split linears seen from outside: dense weights, exact parts for a checkpoint, realignment by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quatrain.nn.split_linear import FACTORS, STEP, SplitLinear
from quatrain.nn.state import shared_states

_PARTS = ("weight", *FACTORS, STEP)


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict of the plain model: every split linear with its dense weight, without factors.

    Returns:
        Keys and shapes as before `apply`; merged weights are copies, everything else is the state_dict's own.
    """
    state: dict[str, Any] = model.state_dict()
    merged: dict[int, Tensor] = {}  # a module that is used in several places has several names
    for name, module in _split(model, everywhere=True):
        if id(module) not in merged:
            merged[id(module)] = module.merged_weight()
        state[f"{name}weight"] = merged[id(module)]
        for part in (*FACTORS, STEP):
            state.pop(f"{name}{part}")
    return state


@torch.no_grad()
def load_dense(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Split linears take the dense weights of a plain model's state_dict, splitting them anew.

    Args:
        model: holds split linears; everything else in it is left as it is.
        state: must hold "<module>.weight" of each.
    """
    for name, module in _split(model):
        module.resplit(state[f"{name}weight"].to(module.weight.device), fresh=True)


def exact_splits(model: nn.Module) -> dict[str, Tensor]:
    """weight, lowrank_left, lowrank_right and lowrank_step of every split linear as they are, under state_dict keys."""
    state = model.state_dict()
    return {f"{name}{part}": state[f"{name}{part}"] for name, _ in _split(model) for part in _PARTS}


def load_exact_splits(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what `exact_splits` returned.

    Raises:
        ValueError: another set of modules.
    """
    wanted = {f"{name}{part}" for name, _ in _split(model) for part in _PARTS}
    if wanted != set(state):
        raise ValueError(
            f"the state must hold the parts of {len(wanted) // len(_PARTS)} split linears, received "
            f"{len(state) // len(_PARTS)}; convert the model with the recipe it was saved with"
        )
    for name, module in _split(model):
        module.load_state_dict({part: state[f"{name}{part}"] for part in _PARTS}, strict=False)


def realign(model: nn.Module, *optimizers: Optimizer) -> int:
    """Split every parametrized low-rank linear anew now, not at its next due step.

    Args:
        model: holds split linears.
        optimizers: whose moments of the factors follow.

    Returns:
        How many linears were realigned.
    """
    done = 0
    for state in shared_states(model):
        modules = state.splits.modules()
        state.splits.realign(modules, optimizers)
        state.generation.add_(1)
        done += len(modules)
    return done


def realign_cost(model: nn.Module) -> tuple[int, float]:
    """(linears realigned so far, seconds spent on it) since the conversion or the copy."""
    splits = [state.splits for state in shared_states(model)]
    return sum(s.count for s in splits), sum(s.seconds for s in splits)


def _split(model: nn.Module, *, everywhere: bool = False) -> Iterator[tuple[str, SplitLinear]]:
    for name, module in model.named_modules(remove_duplicate=not everywhere):
        if isinstance(module, SplitLinear) and module.split is not None and module.split.has_factors:
            yield f"{name}." if name else "", module
