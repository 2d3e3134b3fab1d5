"""Tensors whose moments are plain fp32 or BF16: torch's own AdamW arithmetic, fused where the device has it.

Where parameter or moments are narrower than fp32, the update runs on fp32 values, a slice at a time, and what is kept
is rounded afterwards: BF16 moments and, without a master, BF16 weights stochastically. (To nearest, a second moment
at beta2 = 0.999 stands still in BF16: its increments are below half a unit.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from quatrain.kernels.adamw import join_master, round_bfloat16, split_master
from quatrain.kernels.rounding import random_bits
from quatrain.optim.clock import key_of

State = dict[str, Any]
Words = tuple[int, int, Tensor, int]  # seed, tensor id, step, slice: what random bits depend on
Item = tuple[int, Tensor, State]  # tensor id, parameter, state

FUSED = ("cpu", "cuda")  # devices with torch's fused AdamW
SLICE = 1 << 22  # elements updated at once where fp32 copies are needed: bounds the memory they take
_STREAMS, _WEIGHT = 4, 2  # random streams of one tensor and step: exp_avg, exp_avg_sq, weight


def empty_plain(parameter: Tensor, moments: str, master: str, device: torch.device) -> State:
    """The state of one tensor before its first step.

    Args:
        parameter: any shape and memory format.
        moments: "fp32", "bf16" or "fp64".
        master: "fp32", "bf16+int8" or "bf16-sr"; of BF16 and FP16 parameters only.
        device: the parameter's, or "meta" for shapes and dtypes alone.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[moments]
    steps_on = device if device.type in (*FUSED, "meta") else torch.device("cpu")
    state: State = {
        "step": torch.zeros((), dtype=torch.float32, device=steps_on),  # as torch's, counted in fp32
        "exp_avg": torch.zeros_like(parameter, dtype=dtype, device=device),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, device=device),
    }
    return state | empty_master(parameter, master, device)


def empty_master(parameter: Tensor, master: str, device: torch.device) -> State:
    """What a BF16 or FP16 parameter keeps beside itself, made from its present value."""
    if parameter.dtype not in (torch.bfloat16, torch.float16) or master == "bf16-sr":
        return {}
    if master == "fp32":
        return {"master": parameter.detach().to(device=device, dtype=torch.float32, copy=True)}
    return {"correction": torch.zeros_like(parameter, dtype=torch.int8, device=device)}


def step_plain(items: list[Item], group: Mapping[str, Any]) -> None:
    """One AdamW step in place; every parameter has a gradient."""
    direct = [(p, state) for _, p, state in items if p.dtype == state["exp_avg"].dtype and p.dtype != torch.bfloat16]
    if direct:
        _update(
            [p for p, _ in direct],
            [gradient_of(p).to(p.dtype) for p, _ in direct],
            *([state[key] for _, state in direct] for key in ("exp_avg", "exp_avg_sq", "step")),
            group=group,
        )
    for tensor_id, parameter, state in items:
        if parameter.dtype != state["exp_avg"].dtype or parameter.dtype == torch.bfloat16:
            _step_narrow(tensor_id, parameter, state, group)


def _step_narrow(tensor_id: int, parameter: Tensor, state: State, group: Mapping[str, Any]) -> None:
    step = state["step"]
    tensors = {"parameter": parameter.detach(), "gradient": gradient_of(parameter)}
    tensors |= {key: value for key, value in state.items() if key != "step"}
    now = step
    for index, part in enumerate(_slices(tensors)):
        now = step.clone()
        weight = wide_weight(part)
        moments = [part[key].float() for key in ("exp_avg", "exp_avg_sq")]  # the same tensor where it is fp32
        _update([weight], [part["gradient"].float()], [moments[0]], [moments[1]], [now], group=group)
        words = (group["seed"], tensor_id, now, index)
        for stream, key in enumerate(("exp_avg", "exp_avg_sq")):
            if part[key].dtype == torch.bfloat16:
                part[key].copy_(_stochastic(moments[stream], words, stream))
        keep_weight(weight, part, words)
    step.copy_(now)


def wide_weight(part: Mapping[str, Tensor]) -> Tensor:
    """The fp32 weight. A parameter that is no longer its master's rounding was written by someone else: it counts."""
    parameter = part["parameter"]
    if "master" in part:
        same = part["master"].to(parameter.dtype) == parameter
        return torch.where(same, part["master"], parameter.float())
    if "correction" in part:
        return join_master(parameter, part["correction"])
    return parameter.float()


def keep_weight(weight: Tensor, part: Mapping[str, Tensor], words: Words) -> None:
    """Write an fp32 weight into "parameter" and its "master" or "correction"; `words` key the random bits."""
    parameter = part["parameter"]
    if "master" in part:
        part["master"].copy_(weight)
        parameter.copy_(weight)
    elif "correction" in part:
        low, correction = split_master(weight)
        parameter.copy_(low)
        part["correction"].copy_(correction)
    elif parameter.dtype == torch.bfloat16:
        parameter.copy_(_stochastic(weight, words, _WEIGHT))
    else:
        parameter.copy_(weight)


def weight_keys(words: Sequence[Words], seeds: Tensor) -> Tensor:
    """int64 [k, 2] that the random bits of k weights' rounding are drawn from; seeds int64 [k]: their `seed_word`s."""
    steps = torch.stack([step for _, _, step, _ in words]).to(torch.int64)
    return torch.stack([seeds, steps * _STREAMS + _WEIGHT], dim=1)


def seed_word(words: Words) -> int:
    """What of a key does not count steps."""
    seed, tensor_id, _, index = words
    return ((seed * 0x9E3779B97F4A7C15) ^ (tensor_id << 32) ^ index) & 0x7FFFFFFFFFFFFFFF


def _draw_key(words: Words, stream: int) -> Tensor:
    return key_of(seed_word(words), words[2].to(torch.int64) * _STREAMS + stream)


def _stochastic(values: Tensor, words: Words, stream: int) -> Tensor:
    """fp32 to BF16, up with probability equal to the distance from the lower neighbour."""
    columns = 1024
    rows = -(-values.numel() // columns)
    bits = random_bits(_draw_key(words, stream), rows, columns).reshape(-1)[: values.numel()]
    return round_bfloat16(values, bits.reshape(values.shape))


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a step's closure returns, evaluated with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    if parameter.grad is None:
        raise ValueError("a parameter that steps needs a gradient, received None; leave it out")
    return parameter.grad.detach()


def _slices(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The same elements of all tensors, `SLICE` at a time where all are contiguous, else everything at once."""
    size = tensors["parameter"].numel()
    if size <= SLICE or not all(tensor.is_contiguous() for tensor in tensors.values()):
        yield dict(tensors)
        return
    flat = {key: tensor.view(-1) for key, tensor in tensors.items()}
    for start in range(0, size, SLICE):
        yield {key: tensor[start : start + SLICE] for key, tensor in flat.items()}


def _update(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    group: Mapping[str, Any],
) -> None:
    """torch's AdamW on tensors of equal dtypes, in place, `steps` counted on."""
    adamw(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=all(weight.device.type in FUSED for weight in weights),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
