"""Whole tensors out of sharded ones and back: FSDP2 keeps parameters and moments as DTensors between steps."""

from __future__ import annotations

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a DTensor, gathered; then every process of its mesh must call."""
    gather = getattr(tensor, "full_tensor", None)  # by its method: some builds lack torch.distributed
    found: Tensor = tensor if gather is None else gather()
    return found


def write(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into `target`; into a DTensor the first process's value, so that all shards are of one."""
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(target, DTensor):
            value = distribute_tensor(value.to(target.dtype).contiguous(), target.device_mesh, target.placements)
    target.copy_(value)
