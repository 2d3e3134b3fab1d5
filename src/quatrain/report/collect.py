"""Read run folders (`metrics.jsonl`, `summary.json`, `recipe.toml`, `run.toml`), of finished and killed runs alike.

A report on a run that died is worth as much as one on a run that ended, so nothing that a kill can leave behind is an
error here: what cannot be read is left out and said in `Run.notes`.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quatrain.files import unsigned

MARKS = ("summary.json", "metrics.jsonl", "run.toml")  # any one of them makes a folder a run folder


@dataclass(frozen=True)
class TrainPoint:
    """One logged training step: `loss` in nats per token, `tokens` seen so far, `tokens_per_s` if it was logged."""

    step: int
    tokens: int
    loss: float
    tokens_per_s: float | None


@dataclass(frozen=True)
class ValidationPoint:
    """One validation, in nats per token: `loss` with the recipe's forward, `loss_bf16` with a BF16 forward.

    `loss` is NaN where the run wrote null or a non-finite number: the run has diverged.
    """

    step: int
    tokens: int
    loss: float
    loss_bf16: float | None


@dataclass(frozen=True)
class Run:
    """One run folder. `summary` is empty until the run has finished."""

    folder: Path
    recipe: str
    seed: int
    train: tuple[TrainPoint, ...] = ()
    validation: tuple[ValidationPoint, ...] = ()
    phases: tuple[tuple[int, str], ...] = ()  # (step, "forward" | "both")
    failure: str = ""  # why the run ended in a NaN or an infinity
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # run.toml
    recipe_toml: str = ""
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """True once the trainer has written `summary.json`."""
        return bool(self.summary)

    @property
    def diverged(self) -> bool:
        """True where the run ended in a NaN or an infinity."""
        return bool(self.failure) or (self.last is not None and not math.isfinite(self.last.loss))

    @property
    def last(self) -> ValidationPoint | None:
        """The last validation, or None where the run has not got that far."""
        return self.validation[-1] if self.validation else None

    @property
    def seen(self) -> tuple[int, int]:
        """(step, tokens) of the last record of any kind."""
        points = [(p.step, p.tokens) for p in self.train] + [(p.step, p.tokens) for p in self.validation]
        return max(points, default=(0, 0))


def number(value: Any) -> float | None:
    """`value` as a float, or None where it is no number (true and false are none). NaN and infinities pass."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def finite(value: Any) -> float | None:
    """`value` as a float, or None where it is no finite number."""
    x = number(value)
    return x if x is not None and math.isfinite(x) else None


def section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The sub-table `name` of `table`, empty where it is missing or no table."""
    value = table.get(name)
    return value if isinstance(value, Mapping) else {}


def is_run(folder: Path) -> bool:
    """Whether `folder` holds at least one of the files that a run writes."""
    return any((folder / name).is_file() for name in MARKS)


def find_runs(folder: Path) -> list[Path]:
    """`folder` itself if it holds a run, then the run folders under it by path (as `quatrain compare` writes them).

    Raises FileNotFoundError where `folder` does not exist, ValueError where it holds no run.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"a run folder must exist; got {folder}; pass the `out` folder of train or compare")
    found = sorted({p.parent for name in MARKS for p in folder.glob(f"*/{name}")})
    found = found or sorted({p.parent for name in MARKS for p in folder.glob(f"*/*/{name}")})
    if any((folder / name).is_file() for name in (MARKS[:2] if found else MARKS)):  # run.toml may be the user's own
        found = [folder, *found]
    if not found:
        raise ValueError(
            f"a run folder must hold one of {', '.join(MARKS)}; got {folder}, which holds none, nor folders that do; "
            "pass the `out` folder of train or compare"
        )
    return found


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read every folder once, in the given order.

    Raises ValueError for no folders or a folder that is no run, FileNotFoundError for one that does not exist.
    """
    unique = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if not unique:
        raise ValueError("a report needs at least one run folder; got none; pass folders that train or compare wrote")
    return [read_run(folder) for folder in unique]


def read_run(folder: Path) -> Run:
    """Read one run folder; see `read_runs` for what it raises and `Run.notes` for what it forgives."""
    if not folder.is_dir():
        raise FileNotFoundError(f"a run folder must exist; got {folder}; pass a folder that train or compare wrote")
    if not is_run(folder):
        raise ValueError(
            f"a run folder must hold one of {', '.join(MARKS)}; got {folder}, which holds none; pass a folder that "
            "train wrote, or the subfolders that compare wrote"
        )
    notes: list[str] = []
    summary = _read_json(folder / "summary.json", notes)
    config = _read_toml(folder / "run.toml", notes)
    recipe_toml = unsigned(_read_text(folder / "recipe.toml")) or str(summary.get("recipe_toml") or "")
    records = _read_lines(folder / "metrics.jsonl", notes)
    validation = _validation(records)
    closing = _closing_point(summary)
    if closing is not None and (not validation or validation[-1].step < closing.step):
        validation = (*validation, closing)
    seed = summary.get("seed", section(config, "train").get("seed", 0))
    phases = tuple((r["step"], str(r.get("bf16"))) for r in records if r.get("kind") == "phase")
    return Run(
        folder=folder,
        recipe=_recipe_name(folder, summary, config, recipe_toml),
        seed=seed if isinstance(seed, int) else 0,
        train=_train(records),
        validation=validation,
        phases=phases,
        failure=_failure(records),
        summary=summary,
        config=config,
        recipe_toml=recipe_toml,
        notes=tuple(notes),
    )


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _read_text(path)
    if not text:
        return {}
    value = _parsed(text)
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} cannot be read and was ignored")
    return {}


def _read_toml(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError):
        notes.append(f"{path.name} cannot be read and was ignored")
        return {}


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The records of a JSONL file that have a step and, but for phases and failures, a number of tokens."""
    lines = [line for line in _read_text(path).splitlines() if line.strip()]
    records, broken = [], []
    for position, line in enumerate(lines):
        value = _parsed(line)
        if isinstance(value, dict) and _is_record(value):
            records.append(value)
        else:
            broken.append(position)
    if broken == [len(lines) - 1]:
        notes.append(f"the last line of {path.name} is cut off and was ignored")
    elif broken:
        notes.append(f"{len(broken)} unreadable lines of {path.name} were ignored")
    return records


def _is_record(value: dict[str, Any]) -> bool:
    needed = ("step",) if value.get("kind") in ("phase", "diverged") else ("step", "tokens")
    return all(isinstance(value.get(key), int) and not isinstance(value.get(key), bool) for key in needed)


def _parsed(text: str) -> Any:
    """The JSON value of `text`, or None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _failure(records: list[dict[str, Any]]) -> str:
    """What the record of a divergence says, if it is the last one: a run that was taken up again has none."""
    last = records[-1] if records else {}
    return str(last.get("error") or "no reason was recorded") if last.get("kind") == "diverged" else ""


def _train(records: list[dict[str, Any]]) -> tuple[TrainPoint, ...]:
    points = {}
    for r in records:
        loss = finite(r.get("loss"))
        if r.get("kind") == "train" and loss is not None:
            points[r["step"]] = TrainPoint(r["step"], r["tokens"], loss, finite(r.get("tokens_per_s")))
    return tuple(points[step] for step in sorted(points))


def _validation(records: list[dict[str, Any]]) -> tuple[ValidationPoint, ...]:
    points = {r["step"]: _point(r["step"], r["tokens"], r) for r in records if r.get("kind") == "val"}
    return tuple(points[step] for step in sorted(points))


def _point(step: int, tokens: int, values: Mapping[str, Any]) -> ValidationPoint:
    loss = finite(values.get("val_loss"))
    return ValidationPoint(step, tokens, math.nan if loss is None else loss, finite(values.get("val_loss_bf16")))


def _closing_point(summary: Mapping[str, Any]) -> ValidationPoint | None:
    """The last validation as `summary.json` has it: stands in where `metrics.jsonl` was lost."""
    step, tokens = summary.get("steps"), summary.get("tokens")
    if not isinstance(step, int) or not isinstance(tokens, int) or "val_loss" not in summary:
        return None
    return _point(step, tokens, summary)


def _recipe_name(folder: Path, summary: Mapping[str, Any], config: Mapping[str, Any], recipe_toml: str) -> str:
    """The summary's name; before it is written, the recipe's own, else the run file's, else the folder's."""
    try:
        recipe = tomllib.loads(recipe_toml)
    except (tomllib.TOMLDecodeError, RecursionError):
        recipe = {}
    for value in (summary.get("recipe"), recipe.get("name"), config.get("recipe")):
        if isinstance(value, str) and value.strip():
            return Path(value).stem if value.endswith(".toml") else value
    return folder.name
