"""The only place where a backend is chosen.

`auto` may choose; a backend named explicitly is honoured or refused, never swapped.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

BACKENDS = ("auto", "reference", "cpu", "triton", "blackwell")


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and why."""

    backend: str
    reason: str


def choose(device: torch.device, requested: str, cpu_available: Callable[[], str | None]) -> Choice:
    """Pick the quantization backend for a tensor on `device`.

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
    if requested != "auto":
        obstacle = _obstacle(requested, device, cpu_available)
        if obstacle is not None:
            raise ValueError(f'backend="{requested}" cannot run here: {obstacle}; use backend="auto" or "reference"')
        return Choice(requested, "requested")
    if device.type == "cpu":
        obstacle = cpu_available()
        return Choice("cpu", "compiled CPU twin") if obstacle is None else Choice("reference", obstacle)
    if blackwell_obstacle(device) is None:
        return Choice("blackwell", "Triton kernels with this GPU's FP4 conversions (never run on such hardware)")
    obstacle = triton_obstacle(device)
    if obstacle is None:
        return Choice("triton", "Triton kernels, conversions in software")
    return Choice("reference", f"plain PyTorch operations on {device.type}: {obstacle}")


def _obstacle(backend: str, device: torch.device, cpu_available: Callable[[], str | None]) -> str | None:
    if backend == "cpu":
        return cpu_available() if device.type == "cpu" else f"it needs a tensor on the CPU, received one on {device}"
    return triton_obstacle(device) if backend == "triton" else blackwell_obstacle(device)


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels cannot serve tensors on `device`, or None. On the CPU only its interpreter can."""
    if not _triton_found():
        return "the triton package cannot be found"
    if device.type == "cpu":
        from quatrain.kernels.quantize_triton import interpreted

        return None if interpreted() else "it needs a tensor on a CUDA device, received one on cpu"
    if device.type != "cuda":
        return f"it needs a tensor on a CUDA device, received one on {device}"
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU, this is a ROCm build of torch"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    return None


def blackwell_obstacle(device: torch.device) -> str | None:
    """Why `device` has no FP4 conversion instructions for the kernels to use, or None."""
    if device.type != "cuda":
        return f"it needs a tensor on a CUDA device, received one on {device}"
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU, this is a ROCm build of torch"
    major, _ = torch.cuda.get_device_capability(device)
    if major < 10:
        return f"it needs compute capability 10.0 or more, {torch.cuda.get_device_name(device)} has {major}.x"
    return triton_obstacle(device)


@functools.cache
def _triton_found() -> bool:
    return importlib.util.find_spec("triton") is not None
