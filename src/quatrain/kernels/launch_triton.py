"""Launching Triton kernels without paying for their argument analysis each time.

Triton looks at every argument of every launch to find the compiled kernel, about a tenth of a millisecond for kernels
with twenty constants: as long as they run. Here one key, made of what that analysis depends on, finds it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor


def ceil_div(n: int, d: int) -> int:
    """n / d rounded up (triton.cdiv is a traced function, and slow outside kernels)."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << max(n - 1, 0).bit_length()


_PLAIN = frozenset((int, float, bool, tuple, type(None)))  # what stands for itself


class _Plan:
    """The compiled kernel of one set of dtypes, alignments, numbers, constants and options."""

    compiled: Any = None


@functools.lru_cache(maxsize=65536)
def _plan(key: tuple[Any, ...]) -> _Plan:
    return _Plan()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run `kernel` over `grid` on the device of its first argument.

    Args:
        kernel: a Triton kernel, compiled or interpreted.
        grid: up to three sizes.
        arguments: every parameter of the kernel, in order, constants included; the first is a tensor or a descriptor.
        options: num_warps and the like.
    """
    device = getattr(arguments[0], "base", arguments[0]).device  # a descriptor has its tensor in there
    if device.type != "cuda" or not isinstance(kernel, triton.runtime.JITFunction):
        kernel[grid](*arguments, **options)  # the interpreter, on CPU tensors
        return
    facts = [
        a if type(a) in _PLAIN else (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else _fact(a)
        for a in arguments
    ]
    plan = _plan((id(kernel), device.index, *facts, *options.items()))
    if device.index == torch.cuda.current_device():
        _run(plan, kernel, grid, arguments, options)
    else:
        with torch.cuda.device(device):
            _run(plan, kernel, grid, arguments, options)


def _fact(argument: Any) -> Any:
    """What a compiled kernel depends on, of arguments other than tensors."""
    if type(argument).__name__ == "TensorDescriptor":  # Triton's or Gluon's, whose layout its block implies
        return argument.base.dtype, *argument.block_shape
    return argument


def _run(plan: _Plan, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    if plan.compiled is None:
        plan.compiled = kernel[grid](*arguments, **options)  # compiles, and launches
    else:
        plan.compiled[(*grid, 1, 1)[:3]](*arguments)
