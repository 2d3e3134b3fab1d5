"""What a realignment of low-rank splits does to the training loss, against the same difference at other steps.

The difference is the mean loss of the 20 steps after a step less that of the 20 before. Ten other steps are drawn from
the constant part of the schedule, away from realignments, by a seed. A realignment is seamless when its difference lies
within two standard deviations of theirs.

    python benchmarks/realign.py [--every 150] [--set train.device=cuda] [--out runs/realign]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import records
import torch

from quatrain.recipe import load_recipe
from quatrain.train import load_run, train

ROOT = Path(__file__).parents[1]
SPAN, OTHERS, SEED = 20, 10, 0  # steps on either side, steps compared with, their seed


def main() -> None:
    """Train with each treatment of the optimizer's moments, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "examples" / "optimizers.toml")
    parser.add_argument("--every", type=int, default=150, help="steps between realignments")
    parser.add_argument("--states", nargs="+", default=["rotate", "reset"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `quatrain train`")
    parser.add_argument("--out", type=Path, default=Path("runs/realign"))
    parser.add_argument("--record", default="realign", help="name of the record")
    options = parser.parse_args()
    rows = [row for state in options.states for row in measured(state, options)]
    for row in rows:
        print(f"{row['key']:40s} {row['median']:+.2f} standard deviations (each: {row['each']})")
    place = records.place("cuda") if torch.cuda.is_available() else {}
    print(records.write(options.record, SEED, rows, every=options.every, run=options.set, **place))


def measured(state: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train once; the rows of one state."""
    text = load_recipe("nvfp4-lora-svd").to_toml()
    text = text.replace("every = 2048", f"every = {options.every}").replace('state = "rotate"', f'state = "{state}"')
    recipe = load_recipe(text)
    config = load_run(options.run, [*options.set, "train.log_every=1", f"out={options.out / state}"])
    summary = train(config, recipe=recipe)
    lines = (options.out / state / "metrics.jsonl").read_text().splitlines()
    losses = {row["step"]: row["loss"] for line in lines if "loss" in (row := json.loads(line))}
    warmup, decay = config.schedule.warmup, config.schedule.decay
    first, last = int(warmup * summary["steps"]) + SPAN, int((1 - decay) * summary["steps"]) - SPAN
    row = seam(losses, options.every, first, last)
    facts = {"steps": summary["steps"], "realigned": summary["realigned"], "fingerprint": recipe.fingerprint()}
    return [row | {"key": f"realign_{state}_loss_step", **facts, "realign_seconds": summary["realign_seconds"]}]


def seam(losses: dict[int, float], every: int, first: int, last: int) -> dict[str, Any]:
    """How far the differences at realignments lie from those at other steps, in standard deviations of the latter.

    Args:
        losses: by step; a realignment comes after the steps that `every` divides.
        every: steps between realignments.
        first, last: steps considered.

    Raises:
        ValueError: too few steps to draw from.
    """

    def difference(step: int) -> float:
        after, before = ([losses[step + d] for d in span] for span in (range(1, SPAN + 1), range(1 - SPAN, 1)))
        return statistics.fmean(after) - statistics.fmean(before)

    at = [step for step in range(first, last + 1) if step % every == 0]
    away = [step for step in range(first, last + 1) if min(step % every, every - step % every) > SPAN]
    if not at or len(away) < OTHERS:
        raise ValueError(
            f"a realignment and {OTHERS} steps away from any are needed between steps {first} and {last}, received "
            f"{len(at)} and {len(away)}; train longer or realign at another interval"
        )
    others = [difference(step) for step in sorted(random.Random(SEED).sample(away, OTHERS))]
    mean, deviation = statistics.fmean(others), statistics.stdev(others)
    each = [(difference(step) - mean) / deviation for step in at]
    return {
        "work": f"loss of {SPAN} steps after a realignment less {SPAN} before, over the same at {OTHERS} other steps",
        "unit": "standard deviations",
        "ours": round(statistics.fmean(map(difference, at)), 5),
        "peer": round(mean, 5),
        "standard_deviation": round(deviation, 5),
        "median": round(statistics.median(each), 3),
        "min": round(min(each), 3),
        "max": round(max(each), 3),
        "each": [round(z, 2) for z in each],
        "repeats": len(each),
        "met": max(map(abs, each)) <= 2.0,
    }


if __name__ == "__main__":
    main()
