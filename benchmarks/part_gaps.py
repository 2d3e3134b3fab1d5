"""Loss gaps of single parts in four bits, each to its own reference, paired over seeds; resumes where it stopped.

AdamW with NVFP4 moments to AdamW with fp32 ones, Root with NVFP4 products to Root with BF16 ones, attention in NVFP4 to
attention in BF16 (torch's, the default of transformers). Nothing else differs in a pair. A bound holds when the upper
end of the mean gap's 95 % interval lies under it.

    python benchmarks/part_gaps.py [--pairs attention] [--seeds 0 1 2] [--workers 8] [--set train.device=cuda]
    python benchmarks/part_gaps.py --join first.json more.json --record optim_gaps_adamw   # seeds added later: one gap
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gaps
import records
import torch
from rich.console import Console

from quatrain.report import write_report
from quatrain.statistics import mean_interval
from quatrain.train import RunConfig, compare, load_run

ROOT = Path(__file__).parents[1]
SEEDS = [0, 1, 2, 3, 4, 5, 6, 7]  # listed before any of them was run


class Pair(NamedTuple):
    """A reference, the recipes measured against it, the largest gap in percent, and the record of the figures."""

    reference: str
    recipes: tuple[str, ...]
    bound: float
    record: str


PAIRS = {
    "adamw": Pair("bf16", ("adamw-nvfp4",), 0.3, "optim_gaps"),
    "root": Pair("root", ("root-nvfp4", "root-nvfp4-split"), 0.5, "optim_gaps"),
    "attention": Pair("bf16", ("nvfp4-attention",), 0.3, "attention_gaps"),
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
    parser.add_argument("--out", type=Path, default=Path("runs/part-gaps"))
    parser.add_argument("--record", help="name of one record for all pairs, empty for none; default: each pair's own")
    parser.add_argument("--join", type=Path, nargs="+", help="records of other seeds of one pair; trains nothing")
    options = parser.parse_args()
    if options.join:
        print(write_joined(options.join, options.record or options.join[0].stem))
        return
    overrides = [f"train.tokens={options.tokens}", *options.set]
    config = load_run(options.run, overrides)
    if options.workers > 1:
        train_apart(options)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.pairs:
        record = PAIRS[name].record if options.record is None else options.record
        found.setdefault(record, []).extend(pair_rows(name, config, options))
    model = config.model.preset or config.model.path
    place = records.place("cuda") if torch.cuda.is_available() else {}
    for record, rows in found.items() if options.record != "" else ():
        more = {"tokens": options.tokens, "model": model, "run": overrides, **place}
        print(records.write(record, options.seeds, rows, **more))


def pair_rows(name: str, config: RunConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what is missing of a pair, and its rows."""
    pair, out = PAIRS[name], options.out / name
    found = compare(config, [pair.reference, *pair.recipes], seeds=options.seeds, out=out)
    write_report(found.folders, out / "report.html", baseline=pair.reference)
    Console(width=160).print(found.table())
    return [bounded(gaps.record(row, found), config, pair) for row in found.rows[1:]]


def write_joined(paths: list[Path], name: str) -> Path:
    """One record in place of several."""
    path = records.RESULTS / f"{name}.json"
    path.write_text(json.dumps(join([json.loads(part.read_text()) for part in paths]), indent=1) + "\n")
    return path


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of all the seeds of records that differ in nothing else; each keeps its commit and date in `parts`.

    Raises:
        ValueError: they differ in more than the seeds, share a seed, or hold a pair that diverged.
    """
    facts = [[{k: part[k] for k in ("tokens", "model", "run", "device")}, *_pairs(part)] for part in parts]
    seeds = [seed for part in parts for seed in part["seed"]]
    lost = [row["key"] for part in parts for row in part["rows"] if row["diverged"]]
    if any(found != facts[0] for found in facts) or len({*seeds}) < len(seeds) or lost:
        raise ValueError(
            f"records are joined over seeds of one and the same work, none twice and none diverged; received {facts}, "
            f"seeds {seeds}, diverged {lost}; give records of the same run"
        )
    rows = [_joined([part["rows"][i] for part in parts]) for i in range(len(parts[0]["rows"]))]
    sources = [{k: part[k] for k in ("commit", "date", "seed")} for part in parts]
    return parts[-1] | {"seed": seeds, "parts": sources, "rows": rows}


def _pairs(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(row["key"], row["work"], row["fingerprint"]) for row in record["rows"]]


def _joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    percent = [gap for row in rows for gap in row["per_seed"]]
    mean, half = mean_interval(percent)
    upper = None if half is None else round(mean + half, 3)
    losses = {
        side: round(sum(row[side] * row["repeats"] for row in rows) / len(percent), 4) for side in ("ours", "peer")
    }
    return (
        rows[0]
        | losses
        | {
            "median": round(mean, 3),
            "min": min(percent),
            "max": max(percent),
            "repeats": len(percent),
            "per_seed": percent,
            "interval_half_width": None if half is None else round(half, 3),
            "resolved": half is not None and abs(mean) > half,
            "upper_percent": upper,
            "met": upper is not None and upper < rows[0]["bound_percent"],
        }
    )


def bounded(row: dict[str, Any], config: RunConfig, pair: Pair) -> dict[str, Any]:
    """The row with its bound and whether it holds: the interval's upper end lies under it."""
    half = row["interval_half_width"]
    upper = None if half is None or row["median"] is None else round(row["median"] + half, 3)
    work = f"{config.model.preset or config.model.path}, {config.train.tokens:,} tokens, validation loss against "
    return row | {
        "key": row["key"].replace("gap_", f"{pair.record.removesuffix('s')}_"),
        "work": f"{work}{pair.reference}, paired over seeds",
        "bound_percent": pair.bound,
        "upper_percent": upper,
        "met": upper is not None and upper < pair.bound,
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
