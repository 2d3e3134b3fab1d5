"""The momentum of one matrix between steps: in BF16, in fp32, or in NVFP4 codes.

NVFP4 (Hadamard transform, block scales rounded up, stochastic rounding) takes 0.5625 bytes a parameter and is
experimental: at 0.95 the average amplifies the noise of one rounding threefold, to about 40 % of the momentum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quatrain.formats import QTensor, QuantSpec
from quatrain.kernels.quantize import empty_parts, quantize_parts
from quatrain.optim.clock import key_of

State = dict[str, Any]

MOMENTUM_STATES = ("bf16", "nvfp4", "fp32")
_SPEC = QuantSpec("nvfp4", scale_rounding="up", rounding="stochastic", transform="hadamard")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PARTS = ("momentum_codes", "momentum_scales", "momentum_amax")


def empty_momentum(parameter: Tensor, kind: str, device: torch.device) -> State:
    """Zero momentum of one parameter, on its device or on "meta" for shapes and dtypes alone."""
    rows, columns = matrix_shape(parameter)
    if kind != "nvfp4":
        return {"momentum_buffer": torch.zeros(rows, columns, dtype=_DTYPES[kind], device=device)}
    parts = empty_parts(torch.empty(rows, columns, dtype=torch.float32, device=device), _SPEC)
    return {name: part.view(torch.uint8).zero_().view(part.dtype) for name, part in zip(_PARTS, parts, strict=True)}


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """(rows, columns) of a parameter with at least one element; trailing dimensions flatten."""
    return parameter.shape[0], parameter.numel() // parameter.shape[0]


def as_matrix(tensor: Tensor) -> Tensor:
    """The row-major matrix of a tensor: a view where its memory is that already, else a copy."""
    return tensor.reshape(tensor.shape[0], -1).contiguous()


def load_momentum(state: State, shape: tuple[int, int]) -> Tensor:
    """The buffer [R, C] that a step changes in place: the state's own, or the decoded codes in fp32."""
    if "momentum_buffer" in state:
        buffer: Tensor = state["momentum_buffer"]
        return buffer
    codes, scales, amax = (state[name] for name in _PARTS)
    return QTensor(codes, scales, amax, torch.Size(shape), _SPEC).dequantize(inverse=True)


def store_momentum(state: State, buffer: Tensor, seed: int, tensor_id: int) -> None:
    """Write a changed buffer back where it is no view of the state; `state["step"]` counts the draws."""
    if "momentum_buffer" in state:
        return
    key = key_of(((seed << 32) ^ tensor_id) & 0x7FFFFFFFFFFFFFFF, state["step"])
    for name, part in zip(_PARTS, quantize_parts(buffer, _SPEC.to_json(), key), strict=True):
        state[name].copy_(part)
