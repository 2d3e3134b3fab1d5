"""The only place where a backend is chosen.

`auto` may choose; a backend named explicitly is honoured or refused, never swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BACKENDS = ("auto", "reference", "cpu")


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and why."""

    backend: str
    reason: str


def choose(device: torch.device, requested: str, cpu_available: Callable[[], str | None]) -> Choice:
    """Pick the backend for a tensor on `device`.

    Args:
        device: where the operand lives.
        requested: "auto" or a backend's name.
        cpu_available: returns None when the compiled CPU twin is usable, else the reason why it is not.

    Raises:
        ValueError: an unknown backend, or one that cannot serve this device on this machine.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, received {requested!r}")
    if requested == "reference":
        return Choice("reference", "requested")
    if device.type != "cpu":
        if requested == "cpu":
            raise ValueError(
                f'backend="cpu" needs a tensor on the CPU, received one on {device}; move it or use backend="reference"'
            )
        return Choice("reference", f"plain PyTorch operations on {device.type}")
    obstacle = cpu_available()
    if obstacle is None:
        return Choice("cpu", "compiled CPU twin")
    if requested == "cpu":
        raise ValueError(f'backend="cpu" cannot run here: {obstacle}; use backend="reference"')
    return Choice("reference", obstacle)
