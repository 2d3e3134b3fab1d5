"""Step counters on the device, one for all tensors that have stepped together.

A tensor whose gradient is None at some step falls behind the others, and its bias correction with it; so the count
belongs to the tensor. As nearly all tensors share one history, they share one clock, and a step of a group forms its
scalars once. Two tensors that part get two clocks; equal ones are merged again when a state has been loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


class Clocks:
    """Hands clocks to states: "step" int64 [] and "powers" float64 [2], beta1^t and beta2^t as running products."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def prepare(self, active: list[State], holders: list[State]) -> None:
        """Make the states that are about to step share clocks with each other only.

        Args:
            active: states of one group that step now; those without a clock get one.
            holders: every state of the group, `active` included.

        Raises:
            ValueError: that would need new clocks while a CUDA graph is captured.
        """
        if any("step" in state and id(state["step"]) not in self._known for state in holders):
            self._merge([state for state in holders if "step" in state])
        fresh: dict[torch.device, State] = {}
        for state in active:
            if "step" not in state:
                device = state["m_codes"].device
                if device not in fresh:
                    fresh[device] = self._remember(new_clock(device))
                state.update(fresh[device])
        stepping = _by_clock(active)
        everyone = stepping if holders is active else _by_clock(holders)
        for key, members in stepping.items():
            if len(members) < len(everyone[key]):
                refuse_in_capture("a step in which some gradients are None that were not before")
                clock = self._remember({name: members[0][name].clone() for name in ("step", "powers")})
                for state in members:
                    state.update(clock)

    def part(self, states: list[State]) -> None:
        """Give states that move to a group of their own clocks apart from those of the group they leave.

        Raises:
            ValueError: while a CUDA graph is captured.
        """
        for members in _by_clock(states).values():
            refuse_in_capture("moving a parameter to another group")
            clock = self._remember({name: members[0][name].clone() for name in ("step", "powers")})
            for state in members:
                state.update(clock)

    def _merge(self, holders: list[State]) -> None:
        """One clock for all states whose clocks show the same; the values are read back once."""
        refuse_in_capture("the first step after loading a state")
        first: dict[tuple[Any, ...], State] = {}
        for state in holders:
            value = (state["step"].device, int(state["step"]), *state["powers"].tolist())
            clock = first.setdefault(value, {name: state[name] for name in ("step", "powers")})
            state.update(clock)
        for clock in first.values():
            self._remember(clock)

    def _remember(self, clock: State) -> State:
        self._known[id(clock["step"])] = clock["step"]
        return clock


def new_clock(device: torch.device) -> State:
    """A clock at step 0."""
    return {
        "step": torch.zeros((), dtype=torch.int64, device=device),
        "powers": torch.ones(2, dtype=torch.float64, device=device),
    }


def advance(clock: Mapping[str, Tensor], beta1: float, beta2: float) -> None:
    """One step further. A product and no power: powers differ between CPU and GPU in the last bit."""
    clock["step"].add_(1)
    clock["powers"][0].mul_(beta1)
    clock["powers"][1].mul_(beta2)


def key_of(word: int, step: Tensor) -> Tensor:
    """int64 [2] that random bits are drawn from: a number (filled in, not copied from the host) and a count."""
    return torch.stack([torch.full_like(step, word), step])


def refuse_in_capture(what: str) -> None:
    """Raise while a CUDA graph is captured: a tensor made there would be made anew at every replay."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{what} cannot be captured in a CUDA graph; run one such step before the capture")


def _by_clock(states: Iterable[State]) -> dict[int, list[State]]:
    found: dict[int, list[State]] = {}
    for state in states:
        if "step" in state:
            found.setdefault(id(state["step"]), []).append(state)
    return found
