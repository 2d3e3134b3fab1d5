"""The arithmetic of a comparison: recipes as groups of seeds, paired loss gaps, 95 % intervals (definitions 22).

A gap is 100 * (loss / baseline loss - 1), taken between two runs of the same seed at the same step; only then is it
averaged over seeds. Gaps use `val_loss`, the loss with the recipe's own forward (definitions 21).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quatrain.report.collect import Run, ValidationPoint, finite, read_runs
from quatrain.statistics import gap_percent, mean_interval


@dataclass(frozen=True)
class Group:
    """The runs of one recipe, sorted by seed; `index` is its place on the page and picks its colour."""

    label: str
    index: int
    runs: tuple[Run, ...]

    @property
    def full(self) -> tuple[Run, ...]:
        """The runs whose last validation is the latest of the group: the ones that may be averaged."""
        latest = max((run.last.step for run in self.runs if run.last), default=None)
        return tuple(run for run in self.runs if run.last and run.last.step == latest)

    @property
    def summary(self) -> dict[str, Any]:
        """The first finished run's summary, empty where none has finished."""
        return next((dict(run.summary) for run in self.runs if run.finished), {})


@dataclass(frozen=True)
class Gap:
    """The gap to the baseline in percent at `step`; `low` and `high` bound the 95 % interval of two or more seeds.

    `values` holds (seed, percent) of the pairs that count, `diverged` the seeds of which a run of the pair diverged
    (then there is no mean), `left_out` the seeds whose pair ends before `step`, `partial` whether `step` is not the end
    of all runs used.
    """

    step: int
    values: tuple[tuple[int, float], ...]
    mean: float | None
    low: float | None
    high: float | None
    diverged: tuple[int, ...]
    left_out: tuple[int, ...]
    partial: bool

    @property
    def resolved(self) -> bool | None:
        """Whether the interval excludes zero; None where there is no interval."""
        return None if self.low is None or self.high is None else not self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class Row:
    """One recipe of the headline table: means over `seeds`, losses in nats per token, gaps in percent."""

    recipe: str
    fingerprint: str | None
    seeds: tuple[int, ...]
    unfinished: tuple[int, ...]
    step: int
    tokens: int
    val_loss: float | None
    val_loss_bf16: float | None
    baseline: str
    gap_percent: float | None
    gap_interval: tuple[float, float] | None
    gap_seeds: tuple[int, ...]
    gap_step: int | None
    gap_partial: bool
    resolved: bool | None
    diverged: tuple[int, ...]
    tokens_per_s: float | None
    saved_bytes_per_element: float | None
    quantized_mac_share: float | None


def group_runs(runs: Sequence[Run], baseline: str | None = None) -> list[Group]:
    """Gather runs by recipe in order of appearance, the baseline first; one name with two contents gives two groups.

    Raises ValueError for a `baseline` that is not among them, and for two runs of one recipe and seed.
    """
    contents = {run.recipe_toml.strip(): _fingerprint(run) for run in runs if _fingerprint(run)}
    gathered: dict[tuple[str, str], list[Run]] = {}
    for run in runs:  # a run without a fingerprint yet belongs to the finished ones with the same text
        text = run.recipe_toml.strip()
        content = _fingerprint(run) or contents.get(text) or hashlib.sha256(text.encode()).hexdigest()
        gathered.setdefault((run.recipe, content), []).append(run)
    names = [name for name, _ in gathered]
    labelled = [
        (name if names.count(name) == 1 else f"{name} ({content[:8]})", sorted(members, key=lambda r: r.seed))
        for (name, content), members in gathered.items()
    ]
    for label, members in labelled:
        _refuse_twins(label, members)
    labels = [label for label, _ in labelled]
    if baseline is not None and baseline not in labels:
        raise ValueError(
            f"baseline must be one of the recipes in the run folders; got {baseline!r}; choose from {', '.join(labels)}"
        )
    labelled.sort(key=lambda pair: pair[0] != baseline if baseline is not None else False)
    return [Group(label, index, tuple(members)) for index, (label, members) in enumerate(labelled)]


def _fingerprint(run: Run) -> str:
    value = run.summary.get("fingerprint")
    return value if isinstance(value, str) else ""


def _refuse_twins(label: str, members: list[Run]) -> None:
    for a, b in zip(members, members[1:], strict=False):
        if a.seed == b.seed:
            raise ValueError(
                f"a recipe must have one run a seed, as gaps are paired by seed; got two runs of {label} with seed "
                f"{a.seed}: {a.folder} and {b.folder}; leave one out"
            )


def pair(run: Run, base: Run) -> list[tuple[ValidationPoint, float]]:
    """The gap of `run` to `base` in percent (NaN if either loss is not finite) at each step that both validated."""
    other = {point.step: point.loss for point in base.validation}
    return [(p, gap_percent(p.loss, other[p.step])) for p in run.validation if p.step in other]


def pairs(group: Group, base: Group) -> dict[int, list[tuple[ValidationPoint, float]]]:
    """`pair` for every seed that both recipes ran and validated at a common step."""
    others = {run.seed: run for run in base.runs}
    found = {run.seed: pair(run, others[run.seed]) for run in group.runs if run.seed in others}
    return {seed: points for seed, points in found.items() if points}


def full_pairs(group: Group, base: Group) -> dict[int, list[tuple[ValidationPoint, float]]]:
    """Those of `pairs` that reach the latest common step: the ones that may be averaged."""
    found = pairs(group, base)
    latest = max((points[-1][0].step for points in found.values()), default=None)
    return {seed: points for seed, points in found.items() if points[-1][0].step == latest}


def final_gap(group: Group, base: Group) -> Gap | None:
    """The gap at the latest step common to the pairs; None for the baseline itself and where no seed is paired."""
    used = full_pairs(group, base)
    if group.index == base.index or not used:
        return None
    ends = {seed: points[-1][1] for seed, points in used.items()}
    step = next(iter(used.values()))[-1][0].step
    lost = {seed for seed, value in ends.items() if not math.isfinite(value)}
    lost |= {run.seed for run in base.runs if run.diverged} | {run.seed for run in group.runs if run.diverged}
    diverged = tuple(run.seed for run in group.runs if run.seed in lost)
    values = tuple((seed, value) for seed, value in ends.items() if seed not in lost)
    mean, half = (None, None) if diverged else mean_interval([value for _, value in values])
    involved = [run for run in (*group.runs, *base.runs) if run.seed in used]
    return Gap(
        step=step,
        values=values,
        mean=mean,
        low=None if mean is None or half is None else mean - half,
        high=None if mean is None or half is None else mean + half,
        diverged=diverged,
        left_out=tuple(run.seed for run in group.runs if run.seed not in used and run.seed not in lost),
        partial=any(not run.finished or run.seen[0] > step for run in involved),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None where there are no values or one of them is missing or not finite."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _speed(run: Run) -> float | None:
    """Training tokens a second: the summary's, or the median of what was logged so far."""
    logged = sorted(p.tokens_per_s for p in run.train if p.tokens_per_s is not None)
    return finite(run.summary.get("tokens_per_s")) or (logged[len(logged) // 2] if logged else None)


def make_row(group: Group, base: Group) -> Row:
    """The headline numbers of one recipe against `base`."""
    full, gap = group.full, final_gap(group, base)
    ends = [run.last for run in full if run.last]
    fixed = group.summary
    diverged = tuple(run.seed for run in group.runs if run.diverged)
    speeds = [speed for speed in map(_speed, group.runs) if speed is not None]
    reached = max((run.seen for run in group.runs), default=(0, 0))
    return Row(
        recipe=group.label,
        fingerprint=next((found for run in group.runs if (found := _fingerprint(run))), None),
        seeds=tuple(run.seed for run in group.runs),
        unfinished=tuple(run.seed for run in group.runs if not run.finished and not run.diverged),
        step=ends[0].step if ends else reached[0],
        tokens=ends[0].tokens if ends else reached[1],
        val_loss=None if diverged else _mean([end.loss for end in ends]),
        val_loss_bf16=None if diverged else _mean([end.loss_bf16 for end in ends]),
        baseline=base.label,
        gap_percent=gap.mean if gap else None,
        gap_interval=(gap.low, gap.high) if gap and gap.low is not None and gap.high is not None else None,
        gap_seeds=tuple(seed for seed, _ in gap.values) if gap else (),
        gap_step=gap.step if gap else None,
        gap_partial=gap.partial if gap else False,
        resolved=gap.resolved if gap else None,
        diverged=diverged,
        tokens_per_s=_mean(speeds),
        saved_bytes_per_element=finite(fixed.get("saved_bytes_per_element")),
        quantized_mac_share=finite(fixed.get("quantized_mac_share")),
    )


def summarise(run_folders: Sequence[Path], *, baseline: str | None = None) -> list[dict[str, Any]]:
    """One dict a recipe (the fields of `Row`), the baseline first: what the headline table shows.

    Losses are means over the seeds that reached the recipe's latest validation; gaps are paired by seed, in percent of
    the baseline's loss, with a 95 % t interval for two or more seeds; `resolved` is False where it holds zero. The
    baseline is the first folder's recipe unless named. Raises ValueError and FileNotFoundError as `write_report`.
    """
    groups = group_runs(read_runs(run_folders), baseline)
    return [asdict(make_row(group, groups[0])) for group in groups]
