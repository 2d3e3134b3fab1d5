"""Loss gaps of optimizers in four bits, each to its own reference, paired over seeds; resumes where it stopped.

AdamW with NVFP4 moments to AdamW with fp32 ones, Root with NVFP4 products to Root with BF16 ones. A bound holds when
the upper end of the mean gap's 95 % interval lies under it.

    python benchmarks/optim_gaps.py [--tokens 4096000] [--seeds 0 1 2] [--workers 8] [--set train.device=cuda]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gaps
import records
import torch
from rich.console import Console

from quatrain.report import write_report
from quatrain.train import RunConfig, compare, load_run

ROOT = Path(__file__).parents[1]
SEEDS = [0, 1, 2, 3, 4, 5, 6, 7]  # listed before any of them was run
PAIRS = {  # key: (reference, recipes, largest gap in percent)
    "adamw": ("bf16", ("adamw-nvfp4",), 0.3),
    "root": ("root", ("root-nvfp4", "root-nvfp4-split"), 0.5),
}


def main() -> None:
    """Train, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "examples" / "optimizers.toml")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--tokens", type=int, default=4_096_000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `quatrain train`")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--workers", type=int, default=1, help="seeds trained at once, each in a process of its own")
    parser.add_argument("--out", type=Path, default=Path("runs/optim-gaps"))
    parser.add_argument("--record", default="optim_gaps", help="name of the record; empty for none")
    options = parser.parse_args()
    overrides = [f"train.tokens={options.tokens}", *options.set]
    config = load_run(options.run, overrides)
    if options.workers > 1:
        train_apart(options)
    rows = [row for pair in options.pairs for row in pair_rows(pair, config, options)]
    if options.record:
        model = config.model.preset or config.model.path
        place = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
        more = {"tokens": options.tokens, "model": model, "run": overrides, **place}
        print(records.write(options.record, options.seeds, rows, **more))


def pair_rows(pair: str, config: RunConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what is missing of a pair, and its rows."""
    reference, recipes, bound = PAIRS[pair]
    out = options.out / pair
    found = compare(config, [reference, *recipes], seeds=options.seeds, out=out)
    write_report(found.folders, out / "report.html", baseline=reference)
    Console(width=160).print(found.table())
    return [bounded(gaps.record(row, found), config, reference, bound) for row in found.rows[1:]]


def bounded(row: dict[str, Any], config: RunConfig, reference: str, bound: float) -> dict[str, Any]:
    """The row with its bound and whether it holds: the interval's upper end lies under it."""
    half = row["interval_half_width"]
    upper = None if half is None or row["median"] is None else round(row["median"] + half, 3)
    work = f"{config.model.preset or config.model.path}, {config.train.tokens:,} tokens, validation loss against "
    return row | {
        "key": row["key"].replace("gap_", "optim_gap_"),
        "work": f"{work}{reference}, paired over seeds",
        "bound_percent": bound,
        "upper_percent": upper,
        "met": upper is not None and upper < bound,
    }


def train_apart(options: argparse.Namespace) -> None:
    """One process a seed, `workers` at once; each leaves finished runs for the comparison to collect."""
    Path(options.out).mkdir(parents=True, exist_ok=True)

    def one(seed: int) -> int:
        command = [sys.executable, __file__, "--run", str(options.run), "--seeds", str(seed), "--out", str(options.out)]
        command += ["--tokens", str(options.tokens), "--record", "", "--pairs", *options.pairs]
        command += [text for value in options.set for text in ("--set", value)]
        with (options.out / f"seed{seed}.log").open("w") as log:
            return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode

    with ThreadPoolExecutor(options.workers) as pool:
        codes = list(pool.map(one, options.seeds))
    failed = [seed for seed, code in zip(options.seeds, codes, strict=True) if code]
    if failed:
        print(f"seeds {failed} ended early, see {options.out}/seed<k>.log; trained again here", file=sys.stderr)


if __name__ == "__main__":
    main()
