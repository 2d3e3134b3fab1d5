"""Between torch.optim.AdamW and quatrain.optim.AdamW, both ways.

From torch: exp_avg and exp_avg_sq are encoded once, as a step would. Relative errors (Frobenius norm) are 9 to 11 % of
exp_avg and 1 to 7 % of sqrt(exp_avg_sq), more where neighbouring elements differ by orders of magnitude;
`conversion_error` measures them. To torch: the decoded values, exact in fp32; they are what the next step would have
used. FP32-state tensors convert without error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quatrain.optim.adamw import AdamW, new_state
from quatrain.optim.packed import encode_packed
from quatrain.optim.routing import labels_of, names_of, tensor_id

_TORCH_ONLY = ("amsgrad", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
_PLACES = ("params", "param_names")
_OURS = ("state", "master", "embeddings", "tile", "faithful", "seed", "capturable")


def from_torch(
    source: torch.optim.Optimizer, names: Iterable[tuple[str, Tensor]] | None = None, **options: Any
) -> AdamW:
    """A quatrain AdamW over the same parameters and groups that goes on from the moments of a torch.optim.AdamW.

    Args:
        source: torch.optim.AdamW (or Adam without weight decay); it is not changed.
        names: `model.named_parameters()`, where `source` was made without names.
        options: state, master, embeddings, tile, faithful, seed, backend.

    Raises:
        ValueError: amsgrad, coupled weight decay, or a state that is not AdamW's.
    """
    known = {id(parameter): name for name, parameter in names or ()}
    groups = []
    for group in source.param_groups:
        own = group.get("param_names") or [known.get(id(p)) for p in group["params"]]
        members: list[Any] = list(group["params"])
        if all(name is not None for name in own):
            members = list(zip(own, members, strict=True))
        elif names is not None:
            raise ValueError("names must name every parameter of the optimizer, received some without; give them all")
        groups.append({"params": members} | _options(group))
    optimizer = AdamW(groups, **options)
    load_torch_state(optimizer, source.state_dict())
    return optimizer


def load_torch_state(optimizer: AdamW, state_dict: Mapping[str, Any]) -> None:
    """Fill the moments of `optimizer` from the `state_dict()` of a torch.optim.AdamW, by position.

    lr, betas, eps, weight_decay and maximize of the groups are taken over; how the state is kept stays as it is.

    Raises:
        ValueError: other groups, amsgrad, coupled weight decay, or a state that is not AdamW's; nothing is changed.
    """
    groups = list(state_dict["param_groups"])
    mine = optimizer.param_groups
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in mine]:
        raise ValueError(
            f"the state has groups of {[len(g['params']) for g in groups]} parameters, this optimizer of "
            f"{[len(g['params']) for g in mine]}; build the groups that were saved"
        )
    keys = [key for group in groups for key in group["params"]]
    labels = labels_of(mine)
    found, numbers = {}, {}
    for key, label, (index, name, parameter) in zip(keys, labels, names_of(mine), strict=True):
        entries = state_dict["state"].get(key)
        if entries:
            _check_entries(label, parameter, entries)
            found[parameter] = (index, name, entries)
            numbers[parameter] = tensor_id(label)
    options = [_options(group) for group in groups]
    for group, values in zip(mine, options, strict=True):
        group.update(values)
    optimizer.state.clear()
    for parameter, (index, name, entries) in found.items():
        optimizer.state[parameter] = _converted(name, parameter, mine[index], entries, numbers[parameter])


def to_torch(optimizer: AdamW) -> torch.optim.AdamW:
    """A torch.optim.AdamW over the same parameters and groups that goes on from the decoded moments.

    Its moments are in the parameters' dtypes, as torch's are; a master of a BF16 parameter is left behind.
    """
    groups = []
    for group in optimizer.param_groups:
        members = list(zip(group["param_names"], group["params"], strict=True)) if "param_names" in group else None
        options = {key: value for key, value in group.items() if key not in (*_PLACES, *_OURS)}
        groups.append({"params": members or list(group["params"])} | options)
    target = torch.optim.AdamW(groups)
    for _, _, parameter in names_of(optimizer.param_groups):
        if optimizer.state.get(parameter):
            exp_avg, exp_avg_sq = optimizer.moments(parameter)
            target.state[parameter] = {
                "step": optimizer.state[parameter]["step"].to("cpu", torch.float32, copy=True),
                "exp_avg": exp_avg.to(parameter.dtype),
                "exp_avg_sq": exp_avg_sq.to(parameter.dtype),
            }
    return target


def conversion_error(optimizer: AdamW, source: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Relative Frobenius errors of exp_avg and of sqrt(exp_avg_sq), by tensor, against a torch.optim.AdamW.

    Both must be over the same parameters.
    """
    errors = {}
    for label, (_, _, parameter) in zip(
        labels_of(optimizer.param_groups), names_of(optimizer.param_groups), strict=True
    ):
        wanted = source.state.get(parameter)
        if wanted and optimizer.state.get(parameter):
            exp_avg, exp_avg_sq = optimizer.moments(parameter)
            errors[label] = (
                _relative(exp_avg, wanted["exp_avg"].float()),
                _relative(exp_avg_sq.sqrt(), wanted["exp_avg_sq"].float().sqrt()),
            )
    return errors


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """lr, betas and whatever else a scheduler keeps in a group of torch's, without what only torch reads."""
    if group.get("amsgrad"):
        raise ValueError(
            "amsgrad must be False, received True: its running maximum is not kept; stay with torch's AdamW"
        )
    if not group.get("decoupled_weight_decay", True) and group["weight_decay"] != 0:
        raise ValueError("weight decay must be decoupled, received Adam's; convert an AdamW, or set weight_decay to 0")
    return {key: value for key, value in group.items() if key not in (*_PLACES, *_TORCH_ONLY)}


def _check_entries(label: str, parameter: Tensor, entries: Mapping[str, Any]) -> None:
    for key in ("step", "exp_avg", "exp_avg_sq"):
        if key not in entries:
            raise ValueError(f"the state of {label} must be AdamW's, received one without {key}; give torch's AdamW")
    for key in ("exp_avg", "exp_avg_sq"):
        if entries[key].shape != parameter.shape:
            raise ValueError(
                f"{key} of {label} must have the shape {tuple(parameter.shape)}, received {tuple(entries[key].shape)}; "
                "build the model that was saved"
            )


def _converted(
    name: str | None, parameter: Tensor, group: Mapping[str, Any], entries: Mapping[str, Any], number: int
) -> dict[str, Any]:
    state = new_state(name, parameter, group, parameter.device, number)
    if "m_codes" in state:
        step = int(entries["step"])
        beta1, beta2 = group["betas"]
        powers = torch.tensor([beta1**step, beta2**step], dtype=torch.float64, device=parameter.device)
        state |= {"step": torch.tensor(step, device=parameter.device), "powers": powers}
        encode_packed(parameter, (entries["exp_avg"], entries["exp_avg_sq"]), state, group)
        return state
    state["step"].fill_(float(entries["step"]))
    for key in ("exp_avg", "exp_avg_sq"):
        state[key].copy_(entries[key])
    return state


def _relative(value: Tensor, wanted: Tensor) -> float:
    size = wanted.norm()
    return float((value - wanted).norm() / size) if size > 0 else float(value.norm())
