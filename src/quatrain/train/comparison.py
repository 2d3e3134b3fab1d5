"""Recipes side by side: the same data, initialization and seeds, one run after the other, and the loss gaps.

A gap is 100 * (loss / first recipe's loss - 1), paired by seed and then averaged; with two seeds or more it comes with
the 95 % interval of Student's t. A gap whose interval holds zero is not resolved, and is called so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from quatrain.files import expand
from quatrain.nn import NonFiniteError
from quatrain.recipe import Recipe, load_recipe
from quatrain.statistics import gap_percent, mean_interval
from quatrain.train import records
from quatrain.train.config import RunConfig, replace_in
from quatrain.train.loop import train
from quatrain.train.parts import rehearse

COMPARISON = "comparison.json"
_FIGURES = (
    "seed", "steps", "tokens", "val_loss_first", "val_loss", "val_loss_bf16", "tokens_per_s", "wall_s", "saved_bytes",
    "saved_bytes_per_element", "quantized_mac_share", "parameters", "fingerprint", "commit", "date", "device",
)  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """The gap of a recipe to the first one.

    Args:
        percent: one value a seed, in the order of the seeds.
        mean: their mean.
        half_width: of the mean's 95 % interval; None with one seed.
    """

    percent: tuple[float, ...]
    mean: float
    half_width: float | None

    @property
    def resolved(self) -> bool | None:
        """Whether the interval excludes zero; None with one seed."""
        return None if self.half_width is None else abs(self.mean) > self.half_width


@dataclass(frozen=True)
class Row:
    """One recipe.

    Args:
        recipe: its name.
        folders: of its runs, in the order of the seeds, inside the comparison's folder.
        runs: their summaries; of a run that met a NaN or an infinity only "seed" and "error".
        gap: to the first recipe; None for that one itself, and where a run of either has no final loss.
    """

    recipe: str
    folders: tuple[str, ...]
    runs: tuple[dict[str, Any], ...]
    gap: Gap | None

    @property
    def diverged(self) -> tuple[int, ...]:
        """The seeds whose run ended in a NaN or an infinity."""
        return tuple(run["seed"] for run in self.runs if "error" in run)

    def mean(self, key: str) -> float:
        """Mean of one figure over the seeds; NaN if one of them diverged."""
        return math.nan if self.diverged else math.fsum(run[key] for run in self.runs) / len(self.runs)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: one row a recipe, the first being the reference.

    Args:
        out: folder of the runs and of comparison.json.
        seeds: the seeds every recipe was trained with.
        tokens: of each run.
        rows: the recipes.
    """

    out: Path
    seeds: tuple[int, ...]
    tokens: int
    rows: tuple[Row, ...]

    @property
    def folders(self) -> list[Path]:
        """Every run's folder."""
        return [self.out / folder for row in self.rows for folder in row.folders]

    def to_json(self) -> dict[str, Any]:
        """The content of comparison.json."""
        return {
            "reference": self.rows[0].recipe,
            "seeds": list(self.seeds),
            "tokens": self.tokens,
            "recipes": [
                {
                    "recipe": row.recipe,
                    "gap": row.gap and asdict(row.gap) | {"resolved": row.gap.resolved},
                    "runs": [
                        {"folder": folder} | {key: run[key] for key in (*_FIGURES, "error") if key in run}
                        for folder, run in zip(row.folders, row.runs, strict=True)
                    ],
                }
                for row in self.rows
            ],
        }

    def table(self) -> Table:
        """The rows for a terminal; every figure is the mean over seeds."""
        title = f"{self.tokens:,} tokens, {_count(len(self.seeds), 'seed')}"
        table = Table(title=title, caption=Text(self._footnote(), style="table.caption"))
        table.add_column("recipe", overflow="fold")
        for name in ("loss", "gap %", "BF16 fwd", "tok/s", "B/act.", "MACs"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                Text(row.recipe),  # a name is no markup
                _show(row.mean("val_loss"), ".4f"),
                _show_gap(row),
                _show(row.mean("val_loss_bf16"), ".4f"),
                _show(row.mean("tokens_per_s"), ",.0f"),
                _show(row.mean("saved_bytes_per_element"), ".2f"),
                _show(row.mean("quantized_mac_share"), ".0%"),
            )
        return table

    def _footnote(self) -> str:
        words = [
            f"loss: validation; gap: to {self.rows[0].recipe}; BF16 fwd: the same weights with forward in BF16;",
            "B/act.: bytes saved per activation element of a linear; MACs: share of the blocks' linears quantized.",
        ]
        if len(self.seeds) < 2:
            words.append("One seed: its noise is unknown, so no order between recipes can be read from it.")
        elif any(row.gap and not row.gap.resolved for row in self.rows):
            words.append(f"~ not resolved at {self.tokens:,} tokens: the 95 % interval holds zero.")
        words += [
            f"Diverged: {row.recipe}, seed {', '.join(map(str, row.diverged))}." for row in self.rows if row.diverged
        ]
        return " ".join(words)


def compare(
    config: RunConfig,
    recipes: Sequence[str],
    *,
    seeds: Sequence[int],
    out: Path,
    progress: bool = True,
    restart: bool = False,
) -> Comparison:
    """Train every recipe with every seed under `out`, resuming what is there, and write comparison.json.

    What can be known to fail is refused before the first run begins. A run that diverged is a result and is not trained
    again.

    Args:
        config: the run; its recipe, seed and folder are replaced.
        recipes: names or paths; the first is the reference.
        seeds: each recipe is trained with each of them; initial weights and data order are the seed's alone.
        out: gets one folder `<recipe>-seed<k>` a run.
        progress: show each run on standard error.
        restart: remove each run that is there first.

    Raises:
        ValueError: no or repeated recipes or seeds, an unknown recipe or one that does not fit the model or the run, a
            name that makes no folder, or a folder that holds another run.
        KeyboardInterrupt: after Ctrl-C; the same call resumes.
    """
    out = expand(out, "out")
    runs = _plan(config, recipes, seeds, out)
    _check(runs, out, restart=restart)
    summaries: dict[str, list[dict[str, Any]]] = {recipe.name: [] for recipe, _ in runs}
    for recipe, run in runs:
        error = None if restart else records.failure(Path(run.out))
        try:
            summary = {} if error else train(run, recipe=recipe, progress=progress, restart=restart)
        except NonFiniteError as failure:  # a result too; the other recipes go on
            error = str(failure)
        summaries[recipe.name].append({"seed": run.train.seed, "error": error} if error else summary)
    rows = _rows(summaries, seeds)
    comparison = Comparison(out, tuple(seeds), config.total_steps * config.tokens_per_step, rows)
    records.write_json(out / COMPARISON, comparison.to_json())
    return comparison


def _plan(config: RunConfig, recipes: Sequence[str], seeds: Sequence[int], out: Path) -> list[tuple[Recipe, RunConfig]]:
    """Every run with its recipe, loaded once; seed by seed, so that a comparison cut short has whole pairs."""
    loaded = [load_recipe(recipe) for recipe in recipes]
    names = [recipe.name for recipe in loaded]
    _distinct("recipes", names)
    _distinct("seeds", seeds)
    for name in names:
        if not re.fullmatch("[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"a recipe's name becomes a folder of the comparison, so it is of letters, digits, '.', '_' and '-'; "
                f"got {name!r}; change the recipe's name"
            )
    return [
        (recipe, replace_in(config, recipe=source, out=str(out / _folder(recipe.name, seed)), train__seed=seed))
        for seed in seeds
        for source, recipe in zip(recipes, loaded, strict=True)
    ]


def _check(runs: Sequence[tuple[Recipe, RunConfig]], out: Path, *, restart: bool) -> None:
    """Raise now what would otherwise be raised hours into the comparison."""
    if any((out / name).exists() for name in (records.METRICS, records.SUMMARY)):
        raise ValueError(f"{out} is the folder of a run itself; choose another out for the comparison")
    for recipe, run in runs:
        run.phases_of(recipe)
        records.check_folder(Path(run.out), run, recipe, restart=restart)
        if not restart:
            records.read_summary(Path(run.out))
    for recipe, run in runs[: len({recipe.name for recipe, _ in runs})]:
        rehearse(run, recipe)


def _rows(summaries: dict[str, list[dict[str, Any]]], seeds: Sequence[int]) -> tuple[Row, ...]:
    reference = next(iter(summaries.values()))
    rows = []
    for name, runs in summaries.items():
        whole = runs is not reference and not any("error" in run for run in (*runs, *reference))
        gap = paired_gap([run["val_loss"] for run in runs], [run["val_loss"] for run in reference]) if whole else None
        rows.append(Row(name, tuple(_folder(name, seed) for seed in seeds), tuple(runs), gap))
    return tuple(rows)


def paired_gap(losses: Sequence[float], reference: Sequence[float]) -> Gap:
    """The gap in percent of `losses` to `reference`, both in the order of the seeds (definitions 22).

    Raises:
        ValueError: the two are empty or not of one length.
    """
    if len(losses) != len(reference) or not losses:
        raise ValueError(
            f"a gap pairs losses seed by seed, got {len(losses)} and {len(reference)}; give both for each seed"
        )
    percent = tuple(gap_percent(loss, base) for loss, base in zip(losses, reference, strict=True))
    return Gap(percent, *mean_interval(percent))


def _distinct(what: str, values: Sequence[object]) -> None:
    if not values:
        raise ValueError(f"a comparison needs {what}, got none; name at least one")
    if len(set(values)) < len(values):
        raise ValueError(f"every one of a comparison's {what} must be named once, got {list(values)}; drop the repeats")


def _folder(recipe: str, seed: int) -> str:
    return f"{recipe}-seed{seed}"


def _show_gap(row: Row) -> str:
    if row.diverged:
        return "diverged"
    if row.gap is None:
        return "-"
    if row.gap.half_width is None:
        return f"{row.gap.mean:+.2f}"
    return f"{'' if row.gap.resolved else '~'}{row.gap.mean:+.2f} ± {row.gap.half_width:.2f}"


def _show(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
