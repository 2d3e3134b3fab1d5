"""What a realignment of low-rank splits does to the training loss, against the same difference at other steps.

The difference is the mean loss of the 20 steps after a step less that of the 20 before. Ten other steps are drawn by a
seed from the neighbourhood of each realignment, away from it and from its neighbours, for the loss falls ever less
steeply. A realignment is seamless when its difference lies within two standard deviations of theirs; over several
realignments about one in ten lies outside by chance, so the mean of all is told as well, in standard errors.

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
from quatrain.train import RunConfig, load_run, train

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
    row = seam(losses_of(options.out / state), options.every, *constant_part(config, summary["steps"]))
    facts = {"steps": summary["steps"], "realigned": summary["realigned"], "fingerprint": recipe.fingerprint()}
    return [row | {"key": f"realign_{state}_loss_step", **facts, "realign_seconds": summary["realign_seconds"]}]


def losses_of(folder: Path) -> dict[int, float]:
    """Training loss of a run's steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for line in lines if "loss" in (row := json.loads(line))}


def constant_part(config: RunConfig, steps: int) -> tuple[int, int]:
    """First and last step whose 20 neighbours on either side have the peak learning rate."""
    return int(config.schedule.warmup * steps) + SPAN, int((1 - config.schedule.decay) * steps) - SPAN


def seam(losses: dict[int, float], every: int, first: int, last: int) -> dict[str, Any]:
    """How far the differences at realignments lie from those at steps around each, in their standard deviations.

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

    around = {s: others_of(s, every, first, last) for s in range(first, last + 1) if s % every == 0}
    found = {step: others for step, others in around.items() if len(others) == OTHERS}
    if not found:
        raise ValueError(
            f"a realignment and {OTHERS} steps away from any are needed between steps {first} and {last}, received "
            f"{ {step: len(others) for step, others in around.items()} }; train longer or realign at another interval"
        )
    each, deviations, own, theirs = [], [], [], []
    for step, others in found.items():
        values = [difference(other) for other in others]
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        own.append(difference(step))
        theirs.append(mean)
        deviations.append(deviation)
        each.append((own[-1] - mean) / deviation)
    deviation = statistics.fmean(d * d for d in deviations) ** 0.5
    excess = statistics.fmean(own) - statistics.fmean(theirs)
    return {
        "work": f"loss of {SPAN} steps after a realignment less {SPAN} before, over the same at {OTHERS} other steps",
        "unit": "standard deviations",
        "ours": round(statistics.fmean(own), 5),
        "peer": round(statistics.fmean(theirs), 5),
        "standard_deviation": round(deviation, 5),
        "mean_in_deviations": round(excess / deviation, 3),
        "mean_in_standard_errors": round(excess / (deviation * ((1 + 1 / OTHERS) / len(found)) ** 0.5), 3),
        "median": round(statistics.median(each), 3),
        "min": round(min(each), 3),
        "max": round(max(each), 3),
        "each": [round(z, 2) for z in each],
        "inside": sum(abs(z) <= 2.0 for z in each),
        "repeats": len(each),
        "met": max(map(abs, each)) <= 2.0,
    }


def others_of(step: int, every: int, first: int, last: int) -> list[int]:
    """Up to ten steps at most one interval from a realignment, each more than 20 away from any."""
    around = range(max(first, step - every + 1), min(last, step + every - 1) + 1)
    away = [other for other in around if min(other % every, every - other % every) > SPAN]
    return sorted(random.Random(f"{SEED} {step}").sample(away, min(OTHERS, len(away))))


if __name__ == "__main__":
    main()
