"""Named coefficient sets of the Newton-Schulz iteration, and the check that a set must pass before FP4 may use it.

The table is `coefficients.toml`, keyed by rows m and aspect ratio n / m of the wide matrix: the spectrum of a momentum
at unit Frobenius norm depends on both. A shape takes the nearest entry in (log2 m, log2 n/m).
Sources: Jordan 2024 (`jordan`), arXiv 2511.20626 (`root`), arXiv 2505.16932 (`polar-express`); `fitted` and `hybrid`
are this library's own.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from quatrain.kernels.newton_schulz import Triple
from quatrain.toml import format_value, unknown_key

SETS = ("jordan", "root", "polar-express", "fitted", "hybrid")
FP4_SETS = ("fitted", "hybrid")
INFLATION = 1.08
LARGEST = 1.25
_ENTRY_KEYS = ("rows", "ratio", "operands", "split", "coefficients", "loss", "largest")

Coefficients = str | Path | Sequence[float] | Sequence[Sequence[float]]


@dataclass(frozen=True)
class Entry:
    """One line of a table: the triples for matrices of about this shape.

    Attributes:
        rows: m, the smaller dimension.
        ratio: n / m, at least 1.
        operands: "bf16" or "nvfp4": what the products' operands are.
        split: "none" or "diagonal".
        coefficients: one triple for every step, or a schedule.
    """

    rows: int
    ratio: float
    operands: str
    split: str
    coefficients: tuple[Triple, ...]


@dataclass(frozen=True)
class Range:
    """What `check_range` found.

    Attributes:
        largest: value of any intermediate.
        smallest: value of any intermediate.
        passes: all of them in [0, 1.25].
    """

    largest: float
    smallest: float
    passes: bool


def check_range(schedule: Sequence[Triple]) -> Range:
    """Push a dense grid of [0, 1] through the steps, each singular value inflated by 8 % before every step.

    The inflation stands for quantization noise. An unchecked set may have holes between the singular values it was
    fitted on: compositions that reach 1e14 there have been seen to pass every other test.
    """
    grid = torch.cat([torch.linspace(0.0, 1.0, 65_537), torch.logspace(-8, 0, 16_385)]).double()
    extremes = []
    for a, b, c in schedule:
        grid = grid * INFLATION
        square = grid * grid
        grid = grid * (a + square * (b + square * c))
        extremes.append(torch.stack(torch.aminmax(grid)))
    smallest, largest = torch.stack(extremes).unbind(1)
    passes = bool((smallest >= -1e-12).all() and (largest <= LARGEST).all())  # NaN and infinity pass neither
    return Range(float(largest.max()), float(smallest.min()), passes)


def steps_of(triples: Sequence[Triple], steps: int, name: str = "") -> tuple[Triple, ...]:
    """One triple for every step.

    A single triple repeats. `hybrid` ends with its damped steps, so it repeats its first step or loses some in front;
    another schedule repeats its last step or loses some at the end, as its authors do (arXiv 2505.16932).
    """
    given = tuple(triples)
    if name == "hybrid":
        return given[:1] * (steps - len(given)) + given[-steps:]
    return given[:steps] + given[-1:] * (steps - len(given))


def coefficients_for(
    coefficients: Coefficients, rows: int, columns: int, *, steps: int, operands: str, split: str | None
) -> tuple[Triple, ...]:
    """The triples of an iteration on matrices of one shape.

    Args:
        coefficients: a set's name, the path of a table (`.toml`, as `quatrain fit-coefficients` writes it), one
            triple, or one triple for each step.
        rows: of the matrix, either way round.
        columns: likewise.
        steps: of the iteration, at least 1.
        operands: "bf16", or the format of quantized ones ("nvfp4").
        split: None or "diagonal".

    Returns:
        `steps` triples.

    Raises:
        ValueError: no such set, a number of triples that is neither 1 nor `steps`, or quantized operands with a set
            that would diverge.
    """
    if steps < 1:
        raise ValueError(f"ns_steps is at least 1, received {steps}")
    if operands == "mxfp4" and split is None:
        raise ValueError(
            'mxfp4 operands are too noisy for the plain iteration, which diverges; use split="diagonal", or '
            'operands="nvfp4"'
        )
    if not isinstance(coefficients, str | Path):
        return _explicit(coefficients, steps, operands)
    name = str(coefficients)
    if name.endswith(".toml"):
        table = load_table(name)
        if "fitted" not in table:
            raise ValueError(f"{name} holds no [[fitted]] entry; write it with quatrain fit-coefficients")
        schedule = steps_of(_nearest(table["fitted"], rows, columns, operands, split), steps)
        return schedule if operands == "bf16" else _checked(schedule, f"the entry of {name}")
    if name not in SETS:
        raise ValueError(f"no coefficient set {name!r}; there are {', '.join(SETS)}, or give triples or a .toml file")
    if operands != "bf16" and name not in FP4_SETS:
        raise ValueError(
            f'coefficients="{name}" are for BF16 operands: with quantized ones ({operands}) noise pushes '
            'singular values to where the polynomials grow; use coefficients="fitted" or "hybrid"'
        )
    schedule = steps_of(_nearest(_shipped()[name], rows, columns, operands, split), steps, name)
    return schedule if operands == "bf16" else _checked(schedule, f"{steps} steps of {name}")


def _explicit(coefficients: Sequence[Any], steps: int, operands: str) -> tuple[Triple, ...]:
    triples = _triples(coefficients if isinstance(coefficients[0], Sequence) else [coefficients], "coefficients")
    if len(triples) not in (1, steps):
        raise ValueError(
            f"coefficients are one (a, b, c) or one for each of {steps} steps, received {len(triples)}; "
            "give as many as ns_steps"
        )
    schedule = steps_of(triples, steps)
    return schedule if operands == "bf16" else _checked(schedule, "these coefficients")


def _checked(schedule: tuple[Triple, ...], what: str) -> tuple[Triple, ...]:
    found = check_range(schedule)
    if not found.passes:
        raise ValueError(
            f"coefficients for quantized operands must keep [0, 1], inflated by 8 % each step, in [0, {LARGEST}]; "
            f'{what} reach [{found.smallest:.3g}, {found.largest:.3g}]; use coefficients="fitted" or "hybrid", or fit '
            "some with quatrain fit-coefficients"
        )
    return schedule


def load_table(path: str | Path) -> dict[str, tuple[Entry, ...]]:
    """A table's entries by set.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no TOML, or an entry is not of the form described at `Entry`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no coefficient table at {path}; write one with quatrain fit-coefficients")
    return parse_table(Path(path).read_text(encoding="utf-8"), str(path))


def parse_table(text: str, where: str) -> dict[str, tuple[Entry, ...]]:
    """The same from text; `where` names it in errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not valid TOML: {error}") from error
    unknown = sorted(set(data) - set(SETS))
    if unknown:
        raise ValueError(f"{where}: {unknown_key(unknown[0], SETS)}")
    return {name: tuple(_entry(row, f"{where}, [[{name}]]") for row in rows) for name, rows in data.items()}


def format_entry(name: str, entry: Entry, **facts: float) -> str:
    """An entry as the TOML that `parse_table` reads; `facts` are its loss and its largest intermediate."""
    lines = [f"[[{name}]]"] + [f"{key} = {format_value(getattr(entry, key))}" for key in _ENTRY_KEYS[:5]]
    return "\n".join([*lines, *(f"{key} = {value:.4g}" for key, value in facts.items())]) + "\n"


def _entry(row: Mapping[str, Any], where: str) -> Entry:
    unknown = sorted(set(row) - set(_ENTRY_KEYS))
    if unknown:
        raise ValueError(f"{where}: {unknown_key(unknown[0], _ENTRY_KEYS)}")
    rows, ratio, operands, split = (row.get(key) for key in _ENTRY_KEYS[:4])
    if not isinstance(rows, int) or rows < 1 or not isinstance(ratio, int | float) or ratio < 1:
        raise ValueError(f"{where}: rows and ratio must be numbers of at least 1, received {rows!r} and {ratio!r}")
    if operands not in ("bf16", "nvfp4") or split not in ("none", "diagonal"):
        raise ValueError(
            f'{where}: operands is "bf16" or "nvfp4" and split "none" or "diagonal", received {operands!r}, {split!r}'
        )
    return Entry(rows, float(ratio), operands, split, _triples(row.get("coefficients", ()), where))


def _triples(rows: Sequence[Any], where: str) -> tuple[Triple, ...]:
    try:
        triples = tuple((float(a), float(b), float(c)) for a, b, c in rows)
    except (TypeError, ValueError):
        triples = ()
    if not triples or not all(math.isfinite(number) for triple in triples for number in triple):
        raise ValueError(f"{where}: coefficients are triples of finite numbers (a, b, c), received {rows!r}")
    return triples


@cache
def _shipped() -> dict[str, tuple[Entry, ...]]:
    text = (resources.files("quatrain.optim") / "coefficients.toml").read_text(encoding="utf-8")
    return parse_table(text, "coefficients.toml")


def shipped_entries() -> dict[str, tuple[Entry, ...]]:
    """The table that comes with the library, by set."""
    return dict(_shipped())


def _nearest(entries: Sequence[Entry], rows: int, columns: int, operands: str, split: str | None) -> tuple[Triple, ...]:
    """The entry for these operands nearest in (log2 m, log2 n/m); ties go to the earlier one."""
    small, large = max(1, min(rows, columns)), max(1, rows, columns)
    kind = "bf16" if operands == "bf16" else "nvfp4"
    # Entries for NVFP4 serve every set of quantized operands, and BF16 ones where there is nothing better.
    for wanted in ((kind, split or "none"), (kind, "none"), ("nvfp4", split or "none"), ("bf16", "none")):
        found = [e for e in entries if (e.operands, e.split) == wanted]
        if found:
            break
    else:
        raise ValueError(f"the coefficient table has no entry for operands {operands} and split {split}; fit some")

    def distance(entry: Entry) -> float:
        return abs(math.log2(small / entry.rows)) + abs(math.log2(large / small / entry.ratio))

    return min(found, key=distance).coefficients
