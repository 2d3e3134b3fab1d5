"""Tensors whose moments are NVFP4 codes: from parameters of any shape to the kernels' matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quatrain.kernels.adamw import Item, MomentSpec, adamw_step, decode_moments, empty_state, encode_moments
from quatrain.optim.clock import advance, key_of
from quatrain.optim.plain import empty_master, gradient_of, wide_weight

State = dict[str, Any]


def moment_spec(parameter: Tensor, group: Mapping[str, Any]) -> MomentSpec:
    """How the kernels keep the moments of one parameter of a group; an FP32 parameter is its own master."""
    master = group["master"] if parameter.dtype == torch.bfloat16 else "fp32"
    return MomentSpec(tile=group["tile"], faithful=group["faithful"], master=master)


def empty_packed(parameter: Tensor, group: Mapping[str, Any], device: torch.device, number: int = 0) -> State:
    """Zero moments of one tensor, on its device or on "meta" for shapes and dtypes alone; without a clock.

    Whoever decodes the first moment has to know what its random bits were drawn from, so seed and number of the tensor
    belong to its state ("m_key", int64 [2]): they stay what they were at its first step, whatever its group, its name
    or its place become. On the CPU, where they are read at every step.
    """
    rows, columns = matrix_shape(parameter)
    moments = empty_state(rows, columns, moment_spec(parameter, group), device)
    moments["m_key"] = torch.tensor([group["seed"], number], dtype=torch.int64)
    return moments | empty_master(_matrix(parameter.detach()), group["master"], device)


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """(rows, columns): trailing dimensions flattened."""
    return parameter.shape[0], parameter.numel() // parameter.shape[0]


def decode_packed(parameter: Tensor, state: State, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """exp_avg and exp_avg_sq as torch would have them: fp32, in the parameter's shape."""
    rows, columns = matrix_shape(parameter)
    seed, number = state["m_key"].tolist()
    key = key_of(seed, state["step"])
    exp_avg, exp_avg_sq = decode_moments(state, rows, columns, moment_spec(parameter, group), key, number)
    signed = -exp_avg if group["maximize"] else exp_avg
    return signed.view(parameter.shape), exp_avg_sq.view(parameter.shape)


def encode_packed(parameter: Tensor, moments: tuple[Tensor, Tensor], state: State, group: Mapping[str, Any]) -> None:
    """Write exp_avg and exp_avg_sq (any dtype, the parameter's shape) into a state with a clock.

    With `faithful` to nearest, else as the step that the clock shows would have written them.
    """
    shape = matrix_shape(parameter)
    spec = moment_spec(parameter, group)
    seed, number = state["m_key"].tolist()
    key = None if spec.faithful else key_of(seed, state["step"])
    exp_avg, exp_avg_sq = (m.detach().to(parameter.device, torch.float32).reshape(shape).contiguous() for m in moments)
    encode_moments(-exp_avg if group["maximize"] else exp_avg, exp_avg_sq, state, spec, key, number)


def step_packed(items: list[tuple[Tensor, State]], group: Mapping[str, Any], backend: str) -> None:
    """One AdamW step in place; every parameter has a gradient and a clock.

    Args:
        items: parameter, state.
        group: lr, betas, eps, weight_decay, maximize and how the moments are kept.
        backend: of the kernels.
    """
    together: dict[tuple[int, int, torch.dtype], list[tuple[int, Tensor, State]]] = {}
    for parameter, state in items:
        seed, number = state["m_key"].tolist()
        together.setdefault((id(state["step"]), seed, parameter.dtype), []).append((number, parameter, state))
    vectors: dict[int, Tensor] = {}
    for (clock, seed, _), members in together.items():
        _, parameter, state = members[0]
        if clock not in vectors:
            vectors[clock] = _next_scalars(state, group)
        scalars, counter = vectors[clock], key_of(seed, state["step"])
        spec = moment_spec(parameter, group)
        in_place: list[Item] = []
        for number, parameter, state in members:
            gradient = gradient_of(parameter)
            if _is_matrix(parameter) and _is_matrix(gradient):
                in_place.append(Item(parameter, gradient, state, number))
            else:
                _step_copied(number, parameter, state, scalars, counter, spec, backend)
        adamw_step(in_place, scalars, counter, spec, backend)


def _is_matrix(tensor: Tensor) -> bool:
    """Whether the kernels can take a tensor as it is."""
    return tensor.ndim == 2 and tensor.dtype in (torch.float32, torch.bfloat16) and tensor.is_contiguous()


def _step_copied(
    tensor_id: int, parameter: Tensor, state: State, scalars: Tensor, counter: Tensor, spec: MomentSpec, backend: str
) -> None:
    """The step of a tensor that is no row-major matrix of the kernels' dtypes: on a view, or else on a copy.

    One tensor at a time, so that one copy at a time takes memory. Of FP16 the master is what the kernels write.
    """
    gradient = _matrix(gradient_of(parameter))
    gradient = gradient if gradient.dtype in (torch.float32, torch.bfloat16) else gradient.float()
    weight = _matrix(parameter.detach())
    if parameter.dtype == torch.float16:
        weight = state["master"].copy_(wide_weight({"parameter": weight, "master": state["master"]}))
    adamw_step([Item(weight, gradient, state, tensor_id)], scalars, counter, spec, backend)
    if weight.data_ptr() != parameter.data_ptr():
        parameter.copy_(weight.view(parameter.shape))


def _next_scalars(clock: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """The clock one step further, and the fp32 vector the kernels read, formed on the device in fp64.

    lr, 1 - lr wd, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t), eps, beta1, 1 - beta1, beta2, 1 - beta2, 1 / kappa.
    """
    beta1, beta2 = group["betas"]
    advance(clock, beta1, beta2)
    powers = clock["powers"]
    one = torch.ones((), dtype=torch.float64, device=powers.device)
    lr = _lr_on(group["lr"], powers.device)
    remaining = 1.0 - powers
    # Ascent is descent on -g: the moment keeps g's sign, and the step's is turned.
    size = (-lr if group["maximize"] else lr) / remaining[0]
    constants = (group["eps"], beta1, 1.0 - beta1, beta2, 1.0 - beta2, _inverse_kappa(beta1, beta2))
    head = [lr, one - lr * group["weight_decay"], size, one / remaining[1].sqrt()]
    return torch.stack([*head, *(torch.full_like(one, value) for value in constants)]).float()


def _inverse_kappa(beta1: float, beta2: float) -> float:
    """1 / kappa of the bound |m| <= kappa sqrt(v), which holds for exact AdamW at any step; 0 where there is none."""
    if beta1 * beta1 >= beta2:
        return 0.0
    return math.sqrt(1.0 - beta2) * math.sqrt(1.0 - beta1 * beta1 / beta2) / (1.0 - beta1)


def _lr_on(lr: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return lr.detach().reshape(()).to(device, torch.float64)
    return torch.full((), float(lr), dtype=torch.float64, device=device)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1).contiguous()
