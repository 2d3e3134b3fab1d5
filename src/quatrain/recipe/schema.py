"""Recipes: short tables of data that say which operands are quantized, how, what stays in BF16 and when that changes.

The empty recipe is BF16; a recipe lists departures only. Everything is frozen, strict about unknown keys, and
round-trips through TOML.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from quatrain.files import expand
from quatrain.formats import QuantSpec
from quatrain.nn import ATTENTION_OPERANDS, OPERANDS, AttentionRows, LinearRows, Split
from quatrain.recipe.attention_rows import ATTENTION_KEYS, attention_from_dict, attention_to_dict, flat_rows
from quatrain.recipe.optimizer import OptimizerRows, optimizer_from_dict
from quatrain.toml import format_value

_SHOWN = re.compile(r"\ufeff?(\S+)  [0-9a-f]{16}\n")  # how the text of `quatrain recipe show` begins


@dataclass(frozen=True)
class Keep:
    """Which linears stay in BF16. Rules add up.

    Attributes:
        last_share: smallest number of whole blocks from the end that hold this share of the blocks' linear
            multiply-accumulates (at least one block).
        first_blocks, last_blocks: that many blocks from either end.
        head: the output head; a head tied to the embedding always stays.
        blocks: name of the block list where it is not the longest nn.ModuleList that holds linears.
        names: patterns (`*` crosses dots) of module names.
    """

    last_share: float = 0.0
    first_blocks: int = 0
    last_blocks: int = 0
    head: bool = True
    blocks: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.last_share < 1.0:
            raise ValueError(f"keep.last_share must lie in [0, 1), received {self.last_share}")
        object.__setattr__(self, "last_share", float(self.last_share))  # 0 and 0.0 are one recipe
        for name in ("first_blocks", "last_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"keep.{name} must not be negative, received {getattr(self, name)}")

    @property
    def counts_blocks(self) -> bool:
        """Whether a rule needs to know the model's blocks."""
        return bool(self.last_share or self.first_blocks or self.last_blocks)


@dataclass(frozen=True)
class Phase:
    """A switch of precision during a run.

    Attributes:
        at: fraction of the run's tokens, in [0, 1); or
        step: a step number (run files only).
        bf16: "forward" runs forward GEMMs in BF16, "both" forward and backward.
    """

    at: float | None = None
    step: int | None = None
    bf16: str = "both"

    def __post_init__(self) -> None:
        if (self.at is None) == (self.step is None):
            raise ValueError(f"a phase needs either a fraction or a step, received at={self.at} and step={self.step}")
        if self.at is not None and not 0.0 <= self.at < 1.0:
            raise ValueError(f"phase.at must be a fraction of the run in [0, 1), received {self.at}")
        if self.step is not None and self.step < 0:
            raise ValueError(f"phase.at.step must not be negative, received {self.step}")
        if self.bf16 not in ("forward", "both"):
            raise ValueError(f'phase.bf16 must be "forward" or "both", received {self.bf16!r}')


@dataclass(frozen=True)
class Recipe:
    """A named set of departures from BF16 training."""

    name: str = "bf16"
    description: str = ""
    source: str = ""
    linear: LinearRows = field(default_factory=LinearRows)
    keep: Keep = field(default_factory=Keep)
    phases: tuple[Phase, ...] = ()
    optimizer: OptimizerRows = field(default_factory=OptimizerRows)
    attention: AttentionRows = field(default_factory=AttentionRows)

    @property
    def quantizes(self) -> bool:
        """Whether any row of linears, operand or split, is present."""
        return self.linear.departs

    def to_dict(self) -> dict[str, Any]:
        """Plain nested data with every default filled in; absent rows are absent."""
        rows = {n: r.to_dict() for n, r in zip(OPERANDS, self.linear.rows, strict=True) if r is not None}
        rows |= {"split": self.linear.split.to_dict()} if self.linear.split is not None else {}
        keep = {f.name: getattr(self.keep, f.name) for f in fields(Keep)}
        keep["names"] = list(self.keep.names)
        if keep["blocks"] is None:
            keep.pop("blocks")
        optimizer, attention = self.optimizer.to_dict(), attention_to_dict(self.attention)
        return {
            "name": self.name,
            "description": self.description,
            "source": self.source,
            "linear": {**rows, "keep": keep} if self.quantizes else {},
            **({"attention": attention} if attention else {}),
            **({"optimizer": optimizer} if optimizer else {}),
            "phase": [_phase_to_dict(p) for p in self.phases],
        }

    def to_toml(self) -> str:
        """The resolved recipe as TOML text; `load_recipe` gives an equal recipe back."""
        data = self.to_dict()
        lines = [f"{key} = {format_value(data[key])}" for key in ("name", "description", "source")]
        if data["linear"]:
            keep = data["linear"].pop("keep")
            lines += ["", "[linear]", *(f"{name} = {format_value(row)}" for name, row in data["linear"].items())]
            lines += ["", "[linear.keep]", *(f"{key} = {format_value(value)}" for key, value in keep.items())]
        for table in ("attention", "optimizer"):
            if data.get(table):
                lines += ["", f"[{table}]", *(f"{key} = {format_value(v)}" for key, v in data[table].items())]
        for phase in data["phase"]:
            lines += ["", "[[phase]]", *(f"{key} = {format_value(value)}" for key, value in phase.items())]
        return "\n".join(lines) + "\n"

    def fingerprint(self) -> str:
        """16 hexadecimal digits of what decides the numbers; name, description and source do not count."""
        data = self.to_dict()
        for key in ("name", "description", "source"):
            data.pop(key)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def recipe_names() -> list[str]:
    """Names in the library, sorted."""
    return sorted(p.name.removesuffix(".toml") for p in _library().iterdir() if p.name.endswith(".toml"))


def load_recipe(source: str | Path | Recipe) -> Recipe:
    """A recipe from the library's name, a path to a .toml file, or TOML text (the empty text is BF16).

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: an unknown name or key (the valid ones are listed), broken TOML, an illegal value.
    """
    if isinstance(source, Recipe):
        return source
    text, where = _read(source)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        shown = _SHOWN.match(text)
        hint = f"; `quatrain recipe show {shown[1]} --resolved` writes a recipe as TOML" if shown else ""
        raise ValueError(f"{where} must be TOML, received text that does not parse: {error}{hint}") from error
    if where.endswith(".toml"):
        data.setdefault("name", Path(where).stem)
    try:
        return _recipe_from_dict(data)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _library() -> Any:
    return resources.files("quatrain.recipe") / "library"


def _read(source: str | Path) -> tuple[str, str]:
    if isinstance(source, Path) or (source.endswith(".toml") and "\n" not in source):
        path = expand(source, "the recipe")
        if not path.is_file():
            raise FileNotFoundError(f"no recipe file at {path}")
        try:
            return path.read_text(encoding="utf-8-sig"), str(path)  # editors on Windows put a mark in front
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8 text, received bytes that are not ({error.reason})") from error
    if source == "" or "\n" in source or "=" in source:
        return source, "recipe text"
    names = recipe_names()
    if source not in names:
        near = difflib.get_close_matches(source, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no recipe named {source!r} in the library ({', '.join(names)}){hint}")
    return (_library() / f"{source}.toml").read_text(), f"recipe {source}"


def check_keys(data: dict[str, Any], valid: tuple[str, ...], where: str) -> None:
    """Raise ValueError for the first key that is not valid, listing those that are."""
    for key in data:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown key {key!r} in {where}; valid keys: {', '.join(valid)}{hint}")


def _recipe_from_dict(data: dict[str, Any]) -> Recipe:
    check_keys(data, ("name", "description", "source", "linear", "attention", "optimizer", "phase"), "the recipe")
    for key in ("name", "description", "source"):
        if not isinstance(data.get(key, ""), str):
            raise ValueError(f"{key} must be text, received {data[key]!r}")
    linear = dict(_table(data.get("linear", {}), "linear"))
    keep = _keep_from_dict(_table(linear.pop("keep", {}), "linear.keep"))
    rows = _rows_from_dict(linear)
    optimizer = dict(_table(data.get("optimizer", {}), "optimizer"))
    check_keys(optimizer, tuple(f.name for f in fields(OptimizerRows)), "[optimizer]")
    optimizer_rows = optimizer_from_dict(optimizer)
    attention = flat_rows(_table(data.get("attention", {}), "attention"), ATTENTION_OPERANDS)
    check_keys(attention, ATTENTION_KEYS, "[attention]")
    attention_rows = attention_from_dict(attention, _spec)
    plain = not rows.departs and not optimizer_rows.to_dict() and not attention_rows.quantizes
    default_name = "bf16" if plain else "unnamed"
    if not isinstance(data.get("phase", []), list):
        raise ValueError(f"phases are written as [[phase]] tables, received phase = {data['phase']!r}")
    phases = tuple(phase_from_dict(p, allow_step=False) for p in data.get("phase", []))
    return Recipe(
        data.get("name", default_name), data.get("description", ""), data.get("source", ""), rows, keep, phases,
        optimizer_rows, attention_rows,
    )  # fmt: skip


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"[{where}] must be a table, received {value!r}")
    return value


def _rows_from_dict(linear: dict[str, Any]) -> LinearRows:
    flat = flat_rows(linear, OPERANDS)
    check_keys(flat, (*OPERANDS, "split", "keep"), "[linear]")
    split = Split.from_dict(flat.pop("split")) if "split" in flat else None
    specs = {name.replace(".", "_"): _spec(row, name) for name, row in flat.items()}
    return LinearRows(**specs, split=split)


def _spec(row: Any, name: str) -> QuantSpec:
    row = {"format": row} if isinstance(row, str) else _table(row, name)
    try:
        return QuantSpec.from_dict(row)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _keep_from_dict(data: dict[str, Any]) -> Keep:
    check_keys(data, tuple(f.name for f in fields(Keep)), "[linear.keep]")
    kinds: dict[str, Any] = {"last_share": (int, float), "first_blocks": int, "last_blocks": int}
    kinds |= {"head": bool, "blocks": str}
    for key, kind in kinds.items():
        value = data.get(key)
        if value is not None and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise ValueError(f"keep.{key} must be a {getattr(kind, '__name__', 'number')}, received {value!r}")
    names = data.get("names", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"keep.names must be a list of patterns, received {names!r}")
    return Keep(**{**data, "names": tuple(names)})


def phase_from_dict(data: Any, *, allow_step: bool) -> Phase:
    """A phase from its table; `at = { step = N }` only where `allow_step` (run files).

    Raises:
        ValueError: unknown key, missing `at`, or a step in a recipe.
    """
    data = _table(data, "phase")
    check_keys(data, ("at", "bf16"), "[[phase]]")
    at = data.get("at")
    bf16 = data.get("bf16", "both")
    if isinstance(at, dict):
        check_keys(at, ("step",), "[[phase]] at")
        if not allow_step:
            raise ValueError(
                "phase.at must be a fraction of the run in a recipe, received a step; put it in the run file"
            )
        return Phase(None, at.get("step"), bf16)
    if isinstance(at, bool) or not isinstance(at, (int, float)):
        raise ValueError(f"phase.at must be a fraction of the run (or {{ step = N }} in a run file), received {at!r}")
    return Phase(float(at), None, bf16)


def _phase_to_dict(phase: Phase) -> dict[str, Any]:
    return {"at": phase.at if phase.step is None else {"step": phase.step}, "bf16": phase.bf16}
