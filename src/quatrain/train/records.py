"""A run's folder: the resolved run and recipe, metrics line by line, the summary; and what a rerun may do with it."""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from quatrain.files import is_signed, named, replace_file, signed
from quatrain.recipe import Recipe, load_recipe
from quatrain.train.config import RunConfig, load_run
from quatrain.train.tables import flatten

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
RUN = "run.toml"
RECIPE = "recipe.toml"
CHECKPOINTS = "checkpoints"

_PACKAGES = ("quatrain", "transformers", "tokenizers", "safetensors", "numpy")
# Where a run lies is not what it computes; the recipe counts by its fingerprint, not by the name it was called by.
_FREE_KEYS = ("out", "recipe", "data.cache", "train.log_every", "checkpoint.keep")
# What the command and a comparison take from a summary.
_FIGURES: dict[str, type | tuple[type, ...]] = {"recipe": str, "tokens": int} | dict.fromkeys(
    ("val_loss_first", "val_loss", "val_loss_bf16", "tokens_per_s", "saved_bytes_per_element", "quantized_mac_share"),
    (int, float),
)

T = TypeVar("T")


class Metrics:
    """metrics.jsonl: one JSON object a line, flushed as it is written; only one process at a time may hold it.

    Raises:
        ValueError: another process is training in this folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel, however the process ends
        except OSError as error:
            self._file.close()
            raise ValueError(
                f"another process is training in {path.parent}; wait for it, or choose another out"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        with named(self._path):
            self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def sync(self) -> None:
        """Force what was written to disk; called before a checkpoint, which must never be ahead of its records."""
        os.fsync(self._file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Every whole record."""
        self._file.seek(0)
        return [record for _, record in _records(self._file)]

    def rewind(self, step: int) -> None:
        """Cut off what a run that resumes at `step` will write again, and a line that was torn by a kill.

        A phase that begins at `step` is recorded after the checkpoint of `step`, and so is a divergence; all else
        before it.
        """
        end = 0
        self._file.seek(0)
        for position, record in _records(self._file):
            if record["step"] + (record["kind"] in ("phase", "diverged")) > step:
                break
            end = position
        self._file.truncate(end)

    def close(self) -> None:
        """Release the folder."""
        self._file.close()


def _records(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset of the line's end in bytes, record) up to the first line that is not whole."""
    position = 0
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("kind"), str)
        if not whole or type(record.get("step")) is not int:
            return
        position += len(line)
        yield position, record


def open_folder(out: Path, config: RunConfig, recipe: Recipe, *, restart: bool = False) -> Metrics:
    """Make or reopen a run's folder and take hold of its metrics.

    Args:
        out: the folder.
        config: the run; its resolved form must be the one already there, if one is.
        recipe: the recipe, likewise.
        restart: remove what an earlier run left in the folder first.

    Raises:
        ValueError: the folder holds another run (the differing keys are named) or files that no run wrote, or a process
            trains in it.
    """
    check_folder(out, config, recipe, restart=restart)
    out.mkdir(parents=True, exist_ok=True)
    metrics = Metrics(out / METRICS)
    try:
        if restart:
            _forget(out)
        for name, text in ((RUN, config.to_toml()), (RECIPE, recipe.to_toml())):
            if is_signed(out / name) or not (out / name).exists():
                replace_file(out / name, signed(text))
    except BaseException:
        metrics.close()
        raise
    return metrics


def check_folder(out: Path, config: RunConfig, recipe: Recipe, *, restart: bool = False) -> None:
    """That this run may begin or go on in `out`; nothing is written.

    Raises:
        ValueError: as `open_folder`.
    """
    above = next(folder for folder in (out, *out.parents) if os.path.lexists(folder))  # noqa: PTH110 (see data.sources)
    if not above.is_dir():
        raise ValueError(f"out must be a folder, and {out} cannot be one, as {above} is none; choose another out")
    _refuse_strangers(out, config, recipe)
    differing = [] if restart or not _begun(out) else _differences(out, config, recipe)
    if differing:
        raise ValueError(
            f"{out} holds another run; it differs in {', '.join(differing)}; choose another out, "
            "or remove the old run with --restart"
        )


def read_summary(out: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None before its end.

    Raises:
        ValueError: the file is no summary, or one from which figures are missing.
    """
    path = out / SUMMARY
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        summary = None
    known = summary if isinstance(summary, dict) else {}
    wrong = [key for key, kind in _FIGURES.items() if not isinstance(known.get(key), kind)]
    if wrong:
        raise ValueError(
            f"{path} is no summary of a run: {', '.join(wrong)} cannot be read; put the file back, or remove it to "
            "have it written again from the last checkpoint"
        )
    return known


def failure(out: Path) -> str | None:
    """Why the run in `out` ended in a NaN or an infinity; None where it did not, or was taken up again since."""
    records = _stored(out)
    return str(records[-1].get("error")) if records and records[-1]["kind"] == "diverged" else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all; a NaN or an infinity is refused."""
    replace_file(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def versions() -> dict[str, str]:
    """The versions of Python and of every package that can change a number."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The git commit of this library's source, "+changes" appended if files differ; None outside a checkout."""
    source = Path(__file__).resolve()
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    head = _git(source.parent, "rev-parse", "HEAD")
    changes = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if head and changes else head


def now() -> str:
    """Date and time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _stored(out: Path) -> list[dict[str, Any]]:
    path = out / METRICS
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [record for _, record in _records(file)]


def _refuse_strangers(out: Path, config: RunConfig, recipe: Recipe) -> None:
    """Raise if the folder holds files under a run's names that no run wrote: they would be overwritten or removed.

    A run signs its files; one of before that is known by its records, or by files that this run would write again.
    """
    if is_signed(out / RUN) or _stored(out):
        return
    same = {RUN: config.to_toml(), RECIPE: recipe.to_toml()}
    names = [name for name in (RUN, RECIPE, SUMMARY, METRICS) if (out / name).exists() and not is_signed(out / name)]
    strange = [n for n in names if n not in same or (out / n).read_bytes() != same[n].encode()]
    if strange == [METRICS] and not (out / METRICS).stat().st_size:
        return
    if strange:
        raise ValueError(
            f"{out} holds {' and '.join(n for n in strange)}, and no run that quatrain wrote; to keep your files, "
            "choose another out"
        )


def _begun(out: Path) -> bool:
    """Whether there is anything of a run to lose; one that failed before its first record left only its settings."""
    return bool(_stored(out)) or (out / SUMMARY).exists() or any((out / CHECKPOINTS).glob("step-*"))


def _forget(out: Path) -> None:
    """Remove what a run writes and nothing else; the summary first, so that a kill leaves no finished run behind."""
    (out / SUMMARY).unlink(missing_ok=True)
    for pattern in ("step-*", ".tmp-*"):
        for folder in (out / CHECKPOINTS).glob(pattern):
            shutil.rmtree(folder)
    os.truncate(out / METRICS, 0)
    for name in (RUN, RECIPE):
        (out / name).unlink(missing_ok=True)


def _differences(out: Path, config: RunConfig, recipe: Recipe) -> list[str]:
    """The dotted keys in which the folder's run and recipe differ from these, each as `key (old -> new)`.

    Of two recipes with different names only these and the fingerprints.
    """
    found = []
    if (out / RUN).is_file():
        found += _compare(_read(out / RUN, _resolved), tomllib.loads(config.to_toml()), "")
    if (out / RECIPE).is_file():
        old = _read(out / RECIPE, load_recipe)
        if old.fingerprint() != recipe.fingerprint() and old.name != recipe.name:
            found.append(f"recipe ({old.name} {old.fingerprint()} -> {recipe.name} {recipe.fingerprint()})")
        elif old.fingerprint() != recipe.fingerprint():
            found += _compare(tomllib.loads(old.to_toml()), tomllib.loads(recipe.to_toml()), "recipe.") or ["recipe"]
    return found


def _read(path: Path, parse: Callable[[str], T]) -> T:
    """What `parse` makes of the file of an earlier run."""
    try:
        return parse(path.read_text(encoding="utf-8-sig") + "\n")  # the line break says: this is no path
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}, which an earlier run wrote, cannot be read ({error}); put it back, choose another out, or begin "
            "anew with --restart"
        ) from error


def _resolved(text: str) -> dict[str, Any]:
    """The stored run as this version reads it, so that a key that is new since then counts with its default."""
    try:
        return tomllib.loads(load_run(text).to_toml())
    except ValueError:
        return tomllib.loads(text)


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> list[str]:
    before, after = flatten(old), flatten(new)
    keys = [key for key in before | after if prefix or key not in _FREE_KEYS]
    return [
        f"{prefix}{key} ({_show(before, key)} -> {_show(after, key)})"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _show(table: Mapping[str, Any], key: str) -> str:
    return json.dumps(table[key]) if key in table else "absent"
