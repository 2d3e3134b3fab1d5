"""Recipes side by side: the same data, initialization and seeds, one run after the other, and the loss gaps.

A gap is 100 * (loss / first recipe's loss - 1), paired by seed and then averaged; with two seeds or more it comes with
the 95 % interval of Student's t. A gap whose interval holds zero is not resolved, and is called so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quatrain.nn import NonFiniteError
from quatrain.recipe import load_recipe
from quatrain.train.config import RunConfig, replace_in
from quatrain.train.loop import train
from quatrain.train.records import write_json

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
        table = Table(title=f"{self.tokens:,} tokens, {_count(len(self.seeds), 'seed')}", caption=self._footnote())
        table.add_column("recipe", no_wrap=True)
        for name in ("loss", "gap %", "BF16 fwd", "tok/s", "B/act.", "MACs"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.recipe,
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

    Args:
        config: the run; its recipe, seed and folder are replaced.
        recipes: names or paths; the first is the reference.
        seeds: each recipe is trained with each of them; initial weights and data order are the seed's alone.
        out: gets one folder `<recipe>-seed<k>` a run.
        progress: show each run, and the table at the end (on standard output).
        restart: remove each run that is there first.

    Raises:
        ValueError: no or repeated recipes or seeds, an unknown recipe, or a folder that holds another run.
        KeyboardInterrupt: after Ctrl-C; the same call resumes.
    """
    names = _names(recipes)
    _distinct("seeds", seeds)
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in seeds:  # seed by seed, so that a comparison cut short has whole pairs
        for recipe, name in zip(recipes, names, strict=True):
            run = replace_in(config, recipe=recipe, out=str(out / _folder(name, seed)), train__seed=seed)
            try:
                summaries[name].append(train(run, progress=progress, restart=restart))
            except NonFiniteError as error:  # a result too; the other recipes go on
                summaries[name].append({"seed": seed, "error": str(error)})
    rows = _rows(summaries, seeds)
    comparison = Comparison(out, tuple(seeds), config.total_steps * config.tokens_per_step, rows)
    write_json(out / COMPARISON, comparison.to_json())
    if progress:
        Console().print(comparison.table())
    return comparison


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
    percent = tuple(100.0 * (loss / base - 1.0) for loss, base in zip(losses, reference, strict=True))
    n = len(percent)
    mean = math.fsum(percent) / n
    if n < 2:
        return Gap(percent, mean, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in percent) / (n - 1))
    return Gap(percent, mean, t_quantile(n - 1) * deviation / math.sqrt(n))


def t_quantile(freedom: int, level: float = 0.95) -> float:
    """The t with P(|T| < t) = `level` for Student's T with `freedom` degrees of freedom, by bisection.

    The distribution is Abramowitz and Stegun 26.7.3 and 26.7.4, exact for whole degrees of freedom.
    """
    low, high = 0.0, 1.0
    while _t_inside(high, freedom) < level:
        high *= 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _t_inside(middle, freedom) < level else (low, middle)
    return 0.5 * (low + high)


def _t_inside(t: float, freedom: int) -> float:
    """P(|T| < t)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2.0 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))


def _names(recipes: Sequence[str]) -> list[str]:
    """The recipes' own names, all loaded before the first run starts."""
    names = [load_recipe(recipe).name for recipe in recipes]
    _distinct("recipes", names)
    return names


def _distinct(what: str, values: Sequence[object]) -> None:
    if not values:
        raise ValueError(f"a comparison needs {what}, got none; name at least one")
    if len(set(values)) < len(values):
        raise ValueError(f"every one of a comparison's {what} must be named once, got {list(values)}; drop the repeats")


def _folder(recipe: str, seed: int) -> str:
    return f"{recipe}-seed{seed}"


def _show_gap(row: Row) -> str:
    if row.diverged:
        return "diverged, seed " + ", ".join(map(str, row.diverged))
    if row.gap is None:
        return "-"
    if row.gap.half_width is None:
        return f"{row.gap.mean:+.2f}"
    return f"{'' if row.gap.resolved else '~'}{row.gap.mean:+.2f} ± {row.gap.half_width:.2f}"


def _show(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
