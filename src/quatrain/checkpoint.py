"""Checkpoints of a training run: one folder a step, whole or not there, resumed bit for bit.

A checkpoint is `step-00000100/` with `model.safetensors` (plain keys, so that transformers loads the folder as a plain
model), `optimizer.safetensors` (the optimizer's state by parameter name, torch's generators and the rounding clock)
and `state.json` (what the trainer hands in, and the size and sha256 of every other file). It is written into a
temporary folder beside its place, every file is synced to disk, and one rename makes it appear. Whatever kills the
process, `latest` finds the newest whole one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from quatrain.files import sync_folder
from quatrain.nn import dense_state_dict, exact_splits, load_dense, load_exact_splits, rng_state, set_rng_state

FORMAT = 1
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

# The names of the safetensors format; FP8 and E8M0 states are kept as uint8 by whoever owns them.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: its folder, the number of optimizer steps done, and the state given to `save`."""

    folder: Path
    step: int
    state: Mapping[str, Any]


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    state: Mapping[str, Any],
    assets: Mapping[str, bytes] | None = None,
    keep: int = 2,
    on_event: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Write the checkpoint of `step` under `root`, atomically, then prune older ones.

    Args:
        root: the folder that holds the checkpoints; made if it is missing.
        step: optimizer steps done.
        model: its state_dict is written with plain keys; of tied tensors the first name is kept.
        optimizer: every tensor of its state is written as it is, without a cast.
        state: JSON values that come back from `latest`.
        assets: further files of the folder, name to bytes (a model's config.json, a tokenizer).
        keep: how many checkpoints stay, this one counted.
        on_event: called with "before-temporary", "mid-file", "before-fsync", "before-rename" and "after-rename" as
            the write passes these points.

    Raises:
        OSError: the disk is full or the folder cannot be written; earlier checkpoints are as they were.
        ValueError: a name or a tensor that a checkpoint cannot hold.
    """
    event = on_event or (lambda _: None)
    temporary = root / f".tmp-{step:08d}-{os.getpid()}"
    with _removed_on_error(temporary, step):
        event("before-temporary")
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        writer = _Writer(temporary, event)
        writer.write(MODEL, *_safetensors(_model_tensors(model), {"format": "pt"}))
        writer.write(OPTIMIZER, *_safetensors(_resume_tensors(model, optimizer), {}))
        for name, content in (assets or {}).items():
            writer.write(name, len(content), [content])
        manifest = _state_json(step, state, writer.files)
        writer.write(STATE, len(manifest), [manifest])
        target = _publish(temporary, root, step, event)
        _prune(root, step, keep)
    return Checkpoint(target, step, dict(state))


def latest(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint under `root`, None where there is none at all; a broken one gives a warning.

    Raises:
        ValueError: there are checkpoints and all are broken, or the newest is of a newer version of this library.
    """
    folders = sorted(_steps(root), key=_step_of, reverse=True)
    for folder in folders:
        try:
            return read(folder)
        except _BrokenError as error:
            warnings.warn(f"checkpoint {folder} is passed over: {error}", RuntimeWarning, stacklevel=2)
    if folders:
        raise ValueError(
            f"none of the {len(folders)} checkpoints in {root} is whole; put one back from a copy, or begin anew with "
            "--restart, which removes them"
        )
    return None


def read(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, every file checked against its recorded size and sha256.

    Raises:
        ValueError: a file is missing, cut short or changed, or the format is newer than this library.
    """
    body = _read_state(folder)
    for name, entry in body["files"].items():
        path = folder / name
        if not path.is_file():
            raise _BrokenError(f"{name} is missing; take an earlier checkpoint")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise _BrokenError(f"{name} has {size} bytes, {entry['bytes']} were written; take an earlier checkpoint")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != entry["sha256"]:
            raise _BrokenError(f"{name} was changed after it was written (its sha256 differs); take an earlier one")
    return Checkpoint(folder, int(body["step"]), body["state"])


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put weights, optimizer state, torch's generators and the rounding clock back, in place.

    Raises:
        ValueError: keys, shapes or dtypes differ from the model's; each is named.
    """
    load_weights(checkpoint.folder, model)
    tensors = _load_file(checkpoint.folder / OPTIMIZER)
    load_exact_splits(model, {k.removeprefix("split/"): v for k, v in tensors.items() if k.startswith("split/")})
    _load_optimizer({k: v for k, v in tensors.items() if k.startswith("state/")}, model, optimizer)
    set_rng_state(model, tensors["rng/clock"])
    torch.set_rng_state(tensors["rng/cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"rng/cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"rng/cuda.{index}"], index)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Copy `model.safetensors` of `folder` into the model, strictly; tied tensors are filled through their first name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: missing or unexpected keys, other shapes or dtypes; each is named.
    """
    path = folder / MODEL
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a folder step-N of a run's checkpoints")
    _copy_strictly(str(path), _load_file(path), tensors := _model_tensors(model))
    load_dense(model, tensors)


class _BrokenError(ValueError):
    """A checkpoint that is not whole."""


@contextmanager
def _removed_on_error(temporary: Path, step: int) -> Iterator[None]:
    """Remove `temporary` where the disk fails, and say what became of the checkpoint."""
    try:
        yield
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            error.errno,
            f"the checkpoint of step {step} could not be written to {temporary.parent} ({error.strerror or error}); "
            "earlier checkpoints are as they were; free space or choose another folder, then run again",
        ) from error


class _Writer:
    """Writes files into one folder, syncs each to disk and keeps the size and sha256 of each."""

    def __init__(self, folder: Path, event: Callable[[str], None]) -> None:
        self.folder = folder
        self.event = event
        self.files: dict[str, dict[str, Any]] = {}

    def write(self, name: str, size: int, chunks: Iterable[bytes | memoryview]) -> None:
        """One file of `size` bytes."""
        if name in self.files or Path(name).name != name:
            raise ValueError(f"a checkpoint's file needs a plain name of its own, got {name!r}; choose another")
        digest = hashlib.sha256()
        with (self.folder / name).open("wb") as file:
            for part in self._pause_midway(size, chunks, file):
                file.write(part)
                digest.update(part)
            self.event("before-fsync")
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = {"bytes": size, "sha256": digest.hexdigest()}

    def _pause_midway(
        self, size: int, chunks: Iterable[bytes | memoryview], file: BinaryIO
    ) -> Iterator[bytes | memoryview]:
        """The chunks, with the event "mid-file" at the moment half of the bytes are with the operating system."""
        left = size // 2
        for chunk in chunks:
            if 0 <= left < len(chunk):
                yield chunk[:left]
                file.flush()
                self.event("mid-file")
                yield chunk[left:]
            else:
                yield chunk
            left -= len(chunk)


def _safetensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[int, Iterator[bytes | memoryview]]:
    """The safetensors file, its size and its bytes one tensor at a time: no second copy of a model is ever in memory.

    Format: the header's length (8 bytes, little-endian), the header in JSON, then the tensors back to back.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # widest first: all stay aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors cannot hold; view it as uint8 first")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return len(start) + offset, itertools.chain([start], (_bytes(tensors[name]) for name in order))


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The plain model's state_dict, of tied tensors (the same bytes under several names) only the first."""
    seen: set[tuple[Any, ...]] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in dense_state_dict(model).items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor
    return tensors


def _resume_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as "state/<parameter>/<key>", split weights as "split/...", generators as "rng/..."."""
    tensors = {"rng/clock": rng_state(model), "rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, generator in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"rng/cuda.{index}"] = generator
    tensors |= {f"split/{name}": tensor for name, tensor in exact_splits(model).items()}
    for name, parameter in _optimized(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise ValueError(f"the optimizer's {key} of {name} is {type(value).__name__}; only tensors are kept")
            tensors[f"state/{name}/{key}"] = value
    return tensors


def _load_optimizer(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set the state directly: torch's own load_state_dict casts every tensor to its parameter's dtype."""
    state: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, key = path.removeprefix("state/").rsplit("/", 1)
        state.setdefault(name, {})[key] = tensor
    parameters = dict(_optimized(model, optimizer))
    unknown = sorted(set(state) - set(parameters))
    missing = sorted(set(parameters) - set(state)) if state else []
    if unknown or missing:
        raise ValueError(
            "the checkpoint's optimizer state belongs to another model: "
            f"missing {missing or 'none'}, unexpected {unknown or 'none'}; build the model the run was started with"
        )
    on_device = {id(p): g.get("fused") or g.get("capturable") for g in optimizer.param_groups for p in g["params"]}
    for name, entries in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: value.clone() if key == "step" and not on_device[id(parameter)] else value.to(parameter.device)
            for key, value in entries.items()
        }


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return ((name, parameter) for name, parameter in model.named_parameters() if id(parameter) in members)


def _copy_strictly(source: str, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"{source} does not fit the model: missing {missing or 'none'}, unexpected {unexpected or 'none'}; "
            "build the model from the config.json beside it"
        )
    for name, tensor in wanted.items():
        if given[name].shape != tensor.shape or given[name].dtype != tensor.dtype:
            raise ValueError(
                f"{source} does not fit the model: {name} is {given[name].dtype} {tuple(given[name].shape)}, "
                f"the model's is {tensor.dtype} {tuple(tensor.shape)}; build the model from the config.json beside it"
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(given[name])


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); take an earlier checkpoint") from error


def _state_json(step: int, state: Mapping[str, Any], files: Mapping[str, Any]) -> bytes:
    body = {"format": FORMAT, "step": step, "torch": torch.__version__, "files": dict(files), "state": dict(state)}
    body = json.loads(json.dumps(body, allow_nan=False))  # what a reader will see: string keys, lists for tuples
    return json.dumps(body | {"sha256": _digest(body)}, indent=1).encode()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        body = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _BrokenError(f"{STATE} cannot be read ({error}); take an earlier checkpoint") from error
    version = body.get("format") if isinstance(body, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(
            f"{folder} has checkpoint format {version}, this version of quatrain reads up to {FORMAT}; upgrade quatrain"
        )
    if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
        raise _BrokenError(f"{STATE} was changed after it was written; take an earlier checkpoint")
    return body


def _steps(root: Path) -> list[Path]:
    return [p for p in root.glob("step-*") if p.is_dir() and p.name.removeprefix("step-").isdigit()]


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _publish(temporary: Path, root: Path, step: int, event: Callable[[str], None]) -> Path:
    """Make the written folder appear under its name, in one rename."""
    target = root / f"step-{step:08d}"
    sync_folder(temporary)
    event("before-rename")
    if target.exists():  # a broken one, which `latest` passed over
        target.rename(root / f".tmp-replaced-{step:08d}-{os.getpid()}")
    temporary.rename(target)
    event("after-rename")
    sync_folder(root)
    return target


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` up to `step`; a rename first, so that no step-N is ever half removed."""
    older = sorted((p for p in _steps(root) if _step_of(p) <= step), key=_step_of, reverse=True)
    for folder in older[max(keep, 1) :]:
        hidden = root / f".tmp-pruned-{folder.name}-{os.getpid()}"
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
