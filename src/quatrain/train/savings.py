"""What the linears of a model keep between forward and backward, per element of their inputs (definitions 18)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quatrain.nn import QuantLinear


def linear_bytes_per_element(model: nn.Module, loss_fn: Callable[[], Tensor]) -> float:
    """Bytes that the linears' autograd nodes hold after one training forward, over the elements that entered them.

    A BF16 linear holds its input, 2 bytes an element; one with a 4-bit Wgrad operand about 0.56. Weights, whether as
    parameters, as the copies that autocast makes or as codes, do not count; a storage counts once.

    Args:
        model: holds plain or converted linears.
        loss_fn: runs the model's forward and returns a loss.

    Returns:
        The quotient; 0.0 for a model without linears.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    held: dict[int, int] = {}  # sizes, not tensors: the graph holds `pack` below, and would then never be freed
    elements: list[int] = []
    with contextlib.ExitStack() as stack:
        for linear in linears:
            stack.enter_context(_watched(linear, held, elements))
        loss = loss_fn()
    for linear in linears:
        for codes in linear.weight_code_tensors() if isinstance(linear, QuantLinear) else ():
            held.pop(_place(codes), None)
    total = sum(held.values())
    del loss  # not earlier: its graph keeps the storages apart
    return total / sum(elements) if elements else 0.0


@contextlib.contextmanager
def _watched(linear: nn.Linear, held: dict[int, int], elements: list[int]) -> Iterator[None]:
    """Note what `linear` saves (`held`, by storage) and how much enters it (`elements`) in every forward inside."""
    inside = contextlib.ExitStack()

    def pack(tensor: Tensor) -> Tensor:
        if not _is_weight(tensor, linear.weight):
            held[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that its own node holds, hooks and all, would be a cycle

    def enter(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        elements.append(inputs[0].numel())
        inside.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))

    def leave(*_: object) -> None:
        inside.close()

    hooks = [linear.register_forward_pre_hook(enter), linear.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_weight(tensor: Tensor, weight: Tensor) -> bool:
    """Whether `tensor` is the weight itself, or a cast of it, as it is or transposed."""
    if not tensor.is_floating_point():
        return False
    views = [view for view in (weight.detach(), weight.detach().t()) if view.shape == tensor.shape]
    return any(torch.equal(tensor, view.to(tensor.dtype)) for view in views)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
