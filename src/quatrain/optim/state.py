"""Optimizer state on disk: put back to the bit, or refused before anything is changed.

PyTorch's `Optimizer.load_state_dict` casts floating-point state to the parameter's dtype, which would make BF16 of
E4M3 scales and fp32 moments, and matches parameters by position alone. Here every tensor keeps its dtype, names are
matched where both sides have them, and whatever does not fit is named in the error.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file as write_safetensors
from torch import Tensor
from torch.optim import Optimizer

from quatrain.files import move_into_place, temporary_beside
from quatrain.optim.routing import canonical, labels_of, names_of

FORMAT = "quatrain-optimizer-1"

Expected = Callable[[str | None, Tensor, Mapping[str, Any]], Mapping[str, Tensor]]


def load_exact(optimizer: Optimizer, state_dict: dict[str, Any], expected: Expected, fixed: Iterable[str]) -> None:
    """`Optimizer.load_state_dict` without its casts: hooks run, groups are replaced, tensors keep their dtype.

    Args:
        optimizer: changed only once everything has been found to fit.
        state_dict: as `state_dict()` returns it; its tensors are copied to the parameters' devices.
        expected: (name or None, parameter, saved group) -> key -> a tensor of the shape and dtype it must have, on
            "meta" or, where it is not to go to the parameter's device, on its own.
        fixed: group options that must be equal on both sides.

    Raises:
        ValueError: other groups, names, options, keys, shapes or dtypes; each is named.
    """
    state_dict = state_dict.copy()
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    groups = copy.deepcopy(state_dict["param_groups"])
    owners = _owners(optimizer, groups, fixed)
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, entries in state_dict["state"].items():
        if key not in owners:
            raise ValueError(f"every state must belong to a parameter of a group, received one of {key!r}; save anew")
        if not entries:
            continue
        label, name, parameter, index = owners[key]
        wanted = expected(name, parameter, groups[index])
        _check_entries(label, entries, wanted)
        state[parameter] = {entry: _copied(entries[entry], like, parameter.device) for entry, like in wanted.items()}
    for mine, group in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = mine["params"]
        for option, value in mine.items():
            if isinstance(value, Tensor) and isinstance(group.get(option), Tensor):
                group[option] = group[option].to(value.device)  # a file says no device
        group.pop("param_names", None)
        if "param_names" in mine:
            group["param_names"] = mine["param_names"]
    optimizer.__setstate__({"state": state, "param_groups": groups})
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the storages that hold the state now; a storage shared by several tensors counts once."""
    storages: dict[tuple[Any, int], int] = {}
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, Tensor):
                storage = getattr(value, "to_local", lambda value=value: value)().untyped_storage()
                storages[value.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def without_float8(state: Mapping[Any, Mapping[str, Any]]) -> defaultdict[Any, dict[str, Any]]:
    """The state with E4M3 tensors, which pickle cannot write, as bytes of the same memory."""
    return _viewed(state, torch.float8_e4m3fn, torch.uint8)


def with_float8(state: Mapping[Any, Mapping[str, Any]]) -> defaultdict[Any, dict[str, Any]]:
    """The inverse of `without_float8`: block scales are E4M3 again."""
    return _viewed(state, torch.uint8, torch.float8_e4m3fn)


def save_file(optimizer: Optimizer, path: str | Path) -> None:
    """Write the whole state as one safetensors file: no pickle, every dtype as it is, whole or not at all.

    Tensors are named "<parameter>/<key>", parameters by their name or, without names, by their position; the groups'
    options are JSON in the file's metadata.

    Raises:
        ValueError: two parameters of one name, or an option that JSON cannot hold.
        OSError: the file cannot be written.
    """
    saved = optimizer.state_dict()
    labels = _unique(_file_labels(optimizer))
    tensors = {
        f"{labels[index]}/{key}": value.detach().cpu().contiguous().clone()  # clocks are shared, files hold no aliases
        for index, entries in saved["state"].items()
        for key, value in entries.items()
    }
    groups = [
        {"names": [labels[index] for index in group["params"]], "options": _to_json(group)}
        for group in saved["param_groups"]
    ]
    metadata = {"format": FORMAT, "optimizer": type(optimizer).__name__, "groups": json.dumps(groups)}
    with temporary_beside(Path(path)) as file:
        write_safetensors(tensors, file.name, metadata)
        move_into_place(file, Path(path))


def load_file(optimizer: Optimizer, path: str | Path) -> None:
    """Put back what `save_file` wrote, through `optimizer.load_state_dict`.

    Parameters are matched by name within their group, in any order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut short, not of `save_file`, of another optimizer class, or does not fit.
    """
    metadata, tensors = _read(Path(path))
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} must be a file of quatrain.optim.save_file; received other contents; save it anew")
    if metadata["optimizer"] != type(optimizer).__name__:
        raise ValueError(f"{path} holds the state of {metadata['optimizer']}, this is {type(optimizer).__name__}")
    groups = json.loads(metadata["groups"])
    index = {name: position for position, name in enumerate(name for group in groups for name in group["names"])}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        state.setdefault(index[name], {})[entry] = tensor
    named = all("param_names" in group for group in optimizer.param_groups)
    saved = [
        _from_json(group["options"])
        | {"params": [index[name] for name in group["names"]]}
        | ({"param_names": group["names"]} if named else {})
        for group in groups
    ]
    optimizer.load_state_dict({"state": state, "param_groups": saved})


def _owners(
    optimizer: Optimizer, groups: list[dict[str, Any]], fixed: Iterable[str]
) -> dict[Any, tuple[str, str | None, Tensor, int]]:
    """Key of the state dict -> (label, name, parameter, group index), checked."""
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the state has {len(groups)} parameter groups, this optimizer {len(optimizer.param_groups)}; "
            "build the groups that were saved"
        )
    labels = iter(zip(labels_of(optimizer.param_groups), names_of(optimizer.param_groups), strict=True))
    owners: dict[Any, tuple[str, str | None, Tensor, int]] = {}
    for index, (mine, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        if len(mine["params"]) != len(saved["params"]):
            raise ValueError(
                f"group {index} of the state has {len(saved['params'])} parameters, this optimizer's has "
                f"{len(mine['params'])}; build the groups that were saved"
            )
        _check_options(index, mine, saved, fixed)
        order = _order(index, mine, saved)
        for position in order:
            label, (_, name, parameter) = next(labels)
            owners[saved["params"][position]] = (label, name, parameter, index)
    return owners


def _order(index: int, mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[int]:
    """Where each parameter of a group is in the saved group: by name where both have names, else by position."""
    if "param_names" not in mine or "param_names" not in saved:
        return list(range(len(mine["params"])))
    wanted, given = ([canonical(name) for name in group["param_names"]] for group in (mine, saved))
    missing, unexpected = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"group {index} of the state belongs to other parameters: missing {_few(missing)}, unexpected "
            f'{_few(unexpected)}; to match by position instead, remove "param_names" from the saved groups'
        )
    places = {name: position for position, name in enumerate(given)}
    return [places[name] for name in wanted]


def _check_options(index: int, mine: Mapping[str, Any], saved: Mapping[str, Any], fixed: Iterable[str]) -> None:
    for option in fixed:
        if option not in saved:
            raise ValueError(
                f'group {index} of the state has no option "{option}": it was saved by another optimizer; '
                "quatrain.optim.load_torch_state converts the state of torch.optim.AdamW"
            )
        if _tuples(saved[option]) != _tuples(mine[option]):
            raise ValueError(
                f"group {index} was saved with {option}={saved[option]!r}, this optimizer has {option}="
                f"{mine[option]!r}; construct it with {option}={saved[option]!r}, or go through to_torch and from_torch"
            )


def _check_entries(label: str, entries: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(set(wanted) - set(entries)), sorted(set(entries) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"the state of {label} does not fit: missing {_few(missing)}, unexpected {_few(unexpected)}; construct the "
            "optimizer with the options, names and parameter dtypes of the one that was saved"
        )
    for key, tensor in wanted.items():
        given = entries[key]
        if not isinstance(given, Tensor) or given.shape != tensor.shape or given.dtype != tensor.dtype:
            received = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(
                f"{key} of {label} must be {tensor.dtype} {tuple(tensor.shape)}, received {received}; "
                "load it into the model, and with the options, that it was saved with"
            )


def _viewed(
    state: Mapping[Any, Mapping[str, Any]], given: torch.dtype, wanted: torch.dtype
) -> defaultdict[Any, dict[str, Any]]:
    """The same memory with every "..._scales" tensor of one dtype seen as the other."""
    seen: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for parameter, entries in state.items():
        seen[parameter] = {
            key: value.view(wanted) if key.endswith("_scales") and value.dtype == given else value
            for key, value in entries.items()
        }
    return seen


def _copied(value: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """In the memory layout that a step expects: files hold rows, a parameter may be channels-last or transposed."""
    return torch.empty_like(like, device=device if like.is_meta else like.device).copy_(value.detach())


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"


def _file_labels(optimizer: Optimizer) -> list[str]:
    return [str(i) if name is None else name for i, (_, name, _) in enumerate(names_of(optimizer.param_groups))]


def _unique(labels: list[str]) -> list[str]:
    if len(set(labels)) != len(labels):
        twice = sorted({label for label in labels if labels.count(label) > 1})
        raise ValueError(f"parameters in one file need names of their own, received twice: {_few(twice)}; rename them")
    return labels


def _to_json(group: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, Tensor):
            value = {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
        try:
            options[key] = json.loads(json.dumps(value))
        except TypeError as error:
            raise ValueError(
                f"option {key} of a group is {type(value).__name__}, which a safetensors file cannot hold; "
                "remove it from the group or use state_dict()"
            ) from error
    return options


def _from_json(options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, dict) and set(value) == {"tensor", "dtype"}:
            value = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        values[key] = _tuples(value)
    return values


def _tuples(value: Any) -> Any:
    """Lists, which JSON makes of tuples, as tuples, at any depth."""
    return tuple(_tuples(entry) for entry in value) if isinstance(value, list | tuple) else value


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a file of quatrain.optim.save_file")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); take another copy") from error
