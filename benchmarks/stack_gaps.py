"""Loss gaps of recipes for linears and of the full stack on a 76 M Llama, paired over seeds; resumes where it stopped.

Every recipe is set against bf16 (AdamW); recipes that update by Root against root as well, since Root alone changes the
loss by more than four bits do; and those with a split against the same split in BF16 (bf16-split, root-split), since
factors with learning rates of their own may change it too. Splits are realigned every `--every` steps, several times a
run, where the recipes' 2,048 would be later than a run of minutes ends. From the same runs: what a realignment does to
the loss.

    python benchmarks/stack_gaps.py --set data.path=TEXT --set train.device=cuda [--seeds 0 1 2] [--workers 6]
    python benchmarks/stack_gaps.py --only bf16 nvfp4 --seeds 0 --out runs/stack      # a part, collected later
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gaps
import realign
import records
import torch
from rich.console import Console

from quatrain.recipe import load_recipe
from quatrain.report import write_report
from quatrain.train import Comparison, RunConfig, compare, load_run
from quatrain.train.comparison import Row, paired_gap

HERE = Path(__file__).parent
SEEDS = list(range(11))  # 0 to 3 and 4 to 11 were listed before they were run; there was no time to finish 11
ARMS = ["bf16", "root", "nvfp4-plain", "nvfp4", "nvfp4-lora-svd", "full-stack", "bf16-split", "root-split"]
SPLIT = ("nvfp4-lora-svd", "full-stack", "bf16-split", "root-split")
# (recipe, reference): the gaps that are told, beside each recipe's to bf16.
PAIRS = [
    ("full-stack", "root"), ("full-stack", "root-split"), ("nvfp4-lora-svd", "bf16-split"),
    ("nvfp4-lora-svd", "nvfp4"), ("nvfp4", "nvfp4-plain"),
]  # fmt: skip
PAPER = {  # percent, Full-Stack FP4: a 3 B Transformer on 64 B tokens
    "nvfp4": "1.40 (linears alone)",
    "nvfp4-lora-svd": "0.61 (linears alone)",
    "full-stack": "0.838",
}


def main() -> None:
    """Train what is missing, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=HERE / "stack.toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--only", nargs="+", default=ARMS, choices=ARMS, help="recipes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `quatrain train`")
    parser.add_argument("--every", type=int, default=150, help="steps between realignments of splits")
    parser.add_argument("--workers", type=int, default=1, help="runs at once, each in a process of its own")
    parser.add_argument("--out", type=Path, default=Path("runs/stack"))
    parser.add_argument("--record", default="stack_gaps", help="name of the record; empty for none")
    options = parser.parse_args()
    config = load_run(options.run, options.set)
    recipes = {name: recipe_of(name, options.every, options.out) for name in options.only}
    if options.workers > 1:
        train_apart(options)
    found = compare(config, list(recipes.values()), seeds=options.seeds, out=options.out, progress=options.workers < 2)
    Console(width=160).print(found.table())
    if options.record:
        write_report(found.folders, options.out / "report.html", baseline=options.only[0])
        rows = [*gap_rows(found, config), *seam_rows(found, options.every, config)]
        place = records.place("cuda") if torch.cuda.is_available() else {}
        facts = {"tokens": found.tokens, "every": options.every, "run": options.set}
        print(records.write(options.record, options.seeds, rows, **facts, **place))


def recipe_of(name: str, every: int, out: Path) -> str:
    """A name of the library; of a recipe with a split, the path of a copy that is realigned more often."""
    if name not in SPLIT:
        return name
    path = out / "recipes" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = load_recipe("nvfp4-lora-svd" if name.endswith("-split") else name).to_toml()
    if name.endswith("-split"):
        kept = [line for line in text.splitlines() if not line.startswith(("name", "fprop", "dgrad", "wgrad"))]
        text = "\n".join(
            [f'name = "{name}"', *kept, *(["[optimizer]", 'name = "root"'] if name == "root-split" else [])]
        )
    changed = text.replace("every = 2048", f"every = {every}")
    if changed == text and every != 2048:
        raise ValueError(f"{name} is expected to realign every 2048 steps, received\n{text}\ncorrect this script")
    if not path.exists() or path.read_text() != changed:
        path.write_text(changed)
    return str(path)


def train_apart(options: argparse.Namespace) -> None:
    """One process a run, `workers` at once, seed by seed; each leaves a finished run for the comparison to collect."""

    def one(job: tuple[int, str]) -> None:
        seed, name = job
        command = [sys.executable, __file__, "--run", str(options.run), "--seeds", str(seed), "--only", name]
        command += ["--every", str(options.every), "--out", str(options.out), "--record", ""]
        command += [text for value in options.set for text in ("--set", value)]
        with (options.out / f"{name}-seed{seed}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)

    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(one, itertools.product(options.seeds, reversed(options.only))))  # the longest begin first


def gap_rows(found: Comparison, config: RunConfig) -> list[dict[str, Any]]:
    """Each recipe's gap to bf16, then those of PAIRS."""
    by_name = {row.recipe: row for row in found.rows}
    work = f"{config.model.preset or config.model.path}, {found.tokens:,} tokens, validation loss against"
    rows = []
    for name, row in by_name.items():
        if row is not found.rows[0]:
            own = gaps.record(row, found) | {"work": f"{work} {found.rows[0].recipe}, paired over seeds"}
            own["key"] = f"stack_{own['key']}"
            rows.append(own | ({"paper_percent": PAPER[name]} if name in PAPER else {}))
    for name, other in PAIRS:
        if name in by_name and other in by_name:
            rows.append(pair_row(by_name[name], by_name[other], found, f"{work} {other}, paired over seeds"))
    return rows


def pair_row(row: Row, other: Row, found: Comparison, work: str) -> dict[str, Any]:
    """The gap of one recipe to another one than the comparison's first."""
    whole = not (row.diverged or other.diverged)
    losses = [[run["val_loss"] for run in each.runs] for each in (row, other)] if whole else None
    changed = Row(row.recipe, row.folders, row.runs, paired_gap(*losses) if losses else None)
    own = gaps.record(changed, found)
    key = f"stack_gap_{row.recipe}_to_{other.recipe}_percent".replace("-", "_")
    return own | {"key": key, "work": work, "peer": gaps.rounded(other.mean("val_loss"))}


def seam_rows(found: Comparison, every: int, config: RunConfig) -> list[dict[str, Any]]:
    """What realignments did to the loss: each seed's, and of the mean over seeds.

    Recipes without a split are the control: nothing happens at those steps of theirs.
    """
    rows = []
    for row in found.rows:
        if row.diverged:
            continue
        losses = [realign.losses_of(found.out / folder) for folder in row.folders]
        first, last = realign.constant_part(config, int(row.runs[0]["steps"]))
        mean = {step: statistics.fmean(run[step] for run in losses) for step in losses[0]}
        for label, curve in [*((f"seed{s}", c) for s, c in zip(found.seeds, losses, strict=True)), ("mean", mean)]:
            what = "realign" if row.recipe in SPLIT else "no_realign"
            key = f"{what}_{row.recipe}_{label}_loss_step".replace("-", "_")
            try:
                rows.append({"key": key, **realign.seam(curve, every, first, last)})
            except ValueError as short:  # the gaps count all the same
                print(f"{key} left out: {short}")
    return rows


if __name__ == "__main__":
    main()
