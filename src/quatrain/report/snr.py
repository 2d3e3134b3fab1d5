"""Signal-to-noise ratios of a recipe's operands: means over seeds, medians over modules, names short enough to read."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from quatrain.report.collect import number, section
from quatrain.report.gaps import Group

OPERANDS = ("fprop.input", "fprop.weight", "dgrad.grad", "dgrad.weight", "wgrad.grad", "wgrad.input")

Table = dict[str, dict[str, float]]  # module -> operand -> dB


def mean_snr(group: Group) -> Table:
    """The mean of each module's and operand's ratio in dB, over the seeds that measured it; empty where none did."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in group.runs:
        snr = section(run.summary, "snr")
        for module in snr:
            for operand, value in section(snr, module).items():
                x = number(value)
                if operand in OPERANDS and x is not None:
                    found.setdefault((module, operand), []).append(x)
    table: Table = {}
    for (module, operand), values in found.items():
        table.setdefault(module, {})[operand] = sum(values) / len(values)
    return table


def medians(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The median over modules of each operand's ratio in dB."""
    columns = {operand: [row[operand] for row in table.values() if operand in row] for operand in OPERANDS}
    return {operand: statistics.median(values) for operand, values in columns.items() if values}


def modules_of(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The modules of all tables, by the numbers in their names (9 before 10), else as the model has them."""
    seen = {name: place for place, name in enumerate(dict.fromkeys(name for table in tables for name in table))}
    return sorted(seen, key=lambda name: (natural(re.sub(r"\D*$", "", name)), seen[name]))


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which layers.10 follows layers.9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def short_names(modules: Sequence[str]) -> list[str]:
    """Names without what all of them share: model.layers.3.mixer.up_proj becomes `3 up_proj` among its like.

    The shared prefix goes first, then each inner part that is equal in all names of equal depth; numbers and last parts
    stay. A name alone stays as it is, and names stay distinct.
    """
    parts = [name.split(".") for name in modules]
    if len(parts) < 2:
        return list(modules)
    last = min(map(len, parts)) - 1
    columns = [set(column) for column in zip(*parts, strict=False)]
    needed = [len(column) > 1 or min(column).isdigit() or i == last for i, column in enumerate(columns)]
    rest = [p[needed.index(True) :] for p in parts]
    if len(set(map(len, rest))) == 1:
        rest = [[part for part, need in zip(p, needed[needed.index(True) :], strict=True) if need] for p in rest]
    return [f"{p[0]} {'.'.join(p[1:])}" if p[0].isdigit() and len(p) > 1 else ".".join(p) for p in rest]
