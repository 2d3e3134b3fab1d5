"""The page's sentences: what runs of this size can and cannot tell, and what is odd about the given ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quatrain.report.collect import Run, finite, section
from quatrain.report.gaps import Group, Row, final_gap
from quatrain.report.markup import listing, magnitude

_SETTINGS = (
    "model",
    "data",
    "train",
    "optimizer",
    "schedule",
    "validation",
)  # tables of run.toml that make a comparison
_FREE = {"train.seed", "train.log_every", "train.threads", "train.device", "data.cache"}  # those that do not


def caveats(groups: Sequence[Group], rows: Sequence[Row]) -> str:
    """The plain paragraphs on what runs of this size can and cannot tell."""
    parameters = next((found for group in groups if (found := finite(group.summary.get("parameters")))), None)
    size = f"{magnitude(parameters)} parameters, " if parameters else ""
    tokens = max(row.tokens for row in rows)
    said = [
        f"At this size ({size}{tokens:,} tokens) a run shows whether a recipe trains at all, in which layers and "
        "operands it loses precision, and roughly how large its gap is <em>here</em>. It does not show which recipe is "
        "best for a large model: gaps change with the size of the model and with the number of tokens."
    ]
    if len(rows) > 1:
        said.append(
            "Runs are paired: with one seed, all recipes start from the same weights and see the same data in the same "
            "order. The gap is taken seed by seed, in percent of the reference’s validation loss, with the recipe’s "
            "own forward; the interval is Student’s 95 % interval over the seeds."
        )
    return "".join(f"<p>{line}</p>" for line in said + _resolution(rows))


def _resolution(rows: Sequence[Row]) -> list[str]:
    """What the intervals say, and no more than that."""
    others, base = rows[1:], escape(rows[0].recipe)
    inside = [row.recipe for row in others if row.resolved is False]
    outside = [row.recipe for row in others if row.resolved]
    single = [row.recipe for row in others if row.gap_percent is not None and row.resolved is None]
    said = []
    if inside:
        said.append(
            f"<b>Not resolved:</b> {listing(inside)}. The 95 % interval of the gap contains zero, so these runs cannot "
            f"tell {'this recipe' if len(inside) == 1 else 'any of them'} from {base}; that takes more seeds or tokens."
        )
    if outside:
        said.append(
            f"<b>Interval excludes zero:</b> {listing(outside)}. The recipe differs from {base} in this setting; that "
            "says nothing about other sizes."
        )
    if single:
        said.append(
            f"<b>One seed:</b> {listing(single)}. With a single seed the noise is unknown. One seed at a size like "
            "this carries a noise of half a percent or more, so a gap of that order means nothing by itself."
        )
    if len(others) > 1:
        said.append(
            "<b>No order among the recipes is claimed.</b> Each is compared with the reference alone; two recipes "
            "whose gaps differ by less than their intervals are not told apart."
        )
    return said


def notes(groups: Sequence[Group], rows: Sequence[Row]) -> str:
    """A list of what is odd: unfinished runs, damaged files, seeds left out, settings that differ; or nothing."""
    runs = [run for group in groups for run in group.runs]
    found = [line for group in groups for run in group.runs for line in _run_notes(group, run)]
    found += [line for group, row in zip(groups, rows, strict=True) for line in _gap_notes(group, row, groups[0])]
    found += [
        f"Runs differ in <code>{escape(key)}</code> ({listing(values)}): their gaps are not those of recipes alone."
        for key, values in differing(runs)
    ]
    return '<ul class="notes">' + "".join(f"<li>{line}</li>" for line in found) + "</ul>" if found else ""


def _run_notes(group: Group, run: Run) -> list[str]:
    name = f"<b>{escape(group.label)}, seed {run.seed}</b>"
    step, tokens = run.seen
    going = [f"{name}: unfinished, {tokens:,} tokens so far (step {step}); shown as far as it goes."]
    if run.failure:
        going = [f"{name}: diverged, {escape(run.failure)}. Shown up to there."]
    return ([] if run.finished else going) + [f"{name}: {escape(note)}." for note in run.notes]


def _gap_notes(group: Group, row: Row, base: Group) -> list[str]:
    name, other, gap = f"<b>{escape(group.label)}</b>", escape(base.label), final_gap(group, base)
    found = []
    if row.diverged:
        found.append(
            f"{name}: seed {listing(row.diverged)} diverged (a loss or an operand was not finite); no mean is given, "
            "since one over the other seeds would flatter."
        )
    early = [run.seed for run in group.runs if group.full and run not in group.full and not run.diverged]
    if early:
        found.append(f"{name}: seed {listing(early)} ended early and is in no mean.")
    unpaired = [seed for seed in gap.left_out if seed not in early] if gap else []
    if gap and unpaired:
        found.append(
            f"{name}: seed {listing(unpaired)} left out of the gap: no run of {other} with that seed "
            f"reaches step {gap.step}."
        )
    if gap is None and group.index != base.index:
        found.append(f"{name}: no gap, as it shares no seed and validation step with {other}.")
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def differing(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings, recipe and seed aside, in which the run files differ: (dotted key, values)."""
    tables = [_flat({name: section(run.config, name) for name in _SETTINGS}) for run in runs if run.config]
    found = []
    for key in sorted({key for table in tables for key in table} - _FREE):
        values = list(dict.fromkeys(str(table.get(key, "not set")) for table in tables))
        if len(values) > 1:
            found.append((key, values))
    return found
