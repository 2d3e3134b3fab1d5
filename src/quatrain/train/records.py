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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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
_FREE_KEYS = ("out", "recipe", "data.cache")


class Metrics:
    """metrics.jsonl: one JSON object a line, flushed as it is written; only one process at a time may hold it.

    Raises:
        ValueError: another process is training in this folder.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+", encoding="utf-8", newline="\n")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel, however the process ends
        except OSError as error:
            self._file.close()
            raise ValueError(
                f"another process is training in {path.parent}; wait for it, or choose another out"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Force what was written to disk; called before a checkpoint, which must never be ahead of its records."""
        os.fsync(self._file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Every whole record."""
        return [record for _, record in self._lines()]

    def rewind(self, step: int) -> None:
        """Cut off what a run that resumes at `step` will write again, and a line that was torn by a kill.

        A phase that begins at `step` is recorded after the checkpoint of `step`, everything else before it.
        """
        end = 0
        for position, record in self._lines():
            if record["step"] + (record["kind"] == "phase") > step:
                break
            end = position
        self._file.truncate(end)

    def clear(self) -> None:
        """Forget everything."""
        self._file.truncate(0)

    def close(self) -> None:
        """Release the folder."""
        self._file.close()

    def _lines(self) -> list[tuple[int, dict[str, Any]]]:
        """(offset of the line's end in bytes, record) up to the first line that is not whole."""
        self._file.flush()
        self._file.seek(0)
        lines, position = [], 0
        for line in self._file:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not line.endswith("\n") or not isinstance(record, dict) or not {"kind", "step"} <= set(record):
                break
            position += len(line.encode())
            lines.append((position, record))
        self._file.seek(0, os.SEEK_END)
        return lines


def open_folder(out: Path, config: RunConfig, recipe: Recipe, *, restart: bool = False) -> Metrics:
    """Make or reopen a run's folder and take hold of its metrics.

    Args:
        out: the folder.
        config: the run; its resolved form must be the one already there, if one is.
        recipe: the recipe, likewise.
        restart: remove what an earlier run left in the folder first.

    Raises:
        ValueError: the folder holds another run (the differing keys are named), or a process trains in it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"out must be a folder, and {out} cannot be one ({error}); choose another out") from error
    metrics = Metrics(out / METRICS)
    try:
        if restart:
            _forget(out, metrics)
        differing = _differences(out, config, recipe) if _begun(out, metrics) else []
        if differing:
            raise ValueError(
                f"{out} holds another run; it differs in {', '.join(differing)}; choose another out, "
                "or remove the old run with --restart"
            )
        write_text(out / RECIPE, recipe.to_toml())
        write_text(out / RUN, config.to_toml())
    except BaseException:
        metrics.close()
        raise
    return metrics


def read_summary(out: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None before its end."""
    path = out / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


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


def _begun(out: Path, metrics: Metrics) -> bool:
    """Whether there is anything of a run to lose; one that failed before its first record left only its settings."""
    return bool(metrics.read()) or (out / SUMMARY).exists() or any((out / CHECKPOINTS).glob("step-*"))


def _forget(out: Path, metrics: Metrics) -> None:
    """Remove what a run writes and nothing else; the summary first, so that a kill leaves no finished run behind."""
    for name in (SUMMARY, RUN, RECIPE):
        (out / name).unlink(missing_ok=True)
    for pattern in ("step-*", ".tmp-*"):
        for folder in (out / CHECKPOINTS).glob(pattern):
            shutil.rmtree(folder)
    metrics.clear()


def _differences(out: Path, config: RunConfig, recipe: Recipe) -> list[str]:
    """The dotted keys in which the folder's run and recipe differ from these, each as `key (old -> new)`."""
    found = []
    if (out / RUN).is_file():
        found += _compare(_resolved((out / RUN).read_text(encoding="utf-8")), tomllib.loads(config.to_toml()), "")
    if (out / RECIPE).is_file():
        text = (out / RECIPE).read_text(encoding="utf-8")
        old = load_recipe(text)
        if old.fingerprint() != recipe.fingerprint():
            found += _compare(tomllib.loads(old.to_toml()), tomllib.loads(recipe.to_toml()), "recipe.") or ["recipe"]
    return found


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
