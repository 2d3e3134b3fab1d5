"""Loss gaps of every recipe that quantizes linears on the demo's model, paired over seeds; resumes where it stopped.

python benchmarks/gaps.py [--seeds 0 1 2] [--tokens 114688]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import records
from rich.console import Console

from quatrain.recipe import load_recipe, recipe_names
from quatrain.report import write_report
from quatrain.train import Comparison, compare, load_run
from quatrain.train.comparison import Row

ROOT = Path(__file__).parents[1]
SEEDS = [0, 1, 2]  # listed before any of them was run


def main() -> None:
    """Train, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--tokens", type=int, default=114_688)
    parser.add_argument("--out", type=Path, default=Path("runs/gaps"))
    options = parser.parse_args()
    names = ["bf16", *(n for n in recipe_names() if load_recipe(n).quantizes)]
    config = load_run(ROOT / "examples" / "demo.toml", [f"train.tokens={options.tokens}"])
    found = compare(config, names, seeds=options.seeds, out=options.out)
    write_report(found.folders, options.out / "report.html", baseline="bf16")
    Console(width=200).print(found.table())
    rows = [record(row, found) for row in found.rows[1:]]
    print(records.write("gaps", options.seeds, rows, tokens=found.tokens))


def record(row: Row, found: Comparison) -> dict[str, Any]:
    """One recipe's row; where a run of it or of bf16 diverged there is no gap, and the seeds are named."""
    gap, lost = row.gap, sorted({*row.diverged, *found.rows[0].diverged})
    return {
        "key": f"gap_{row.recipe.replace('-', '_')}_percent",
        "work": f"tiny-hybrid, {found.tokens:,} tokens, validation loss against bf16, paired over seeds",
        "ours": rounded(row.mean("val_loss")),
        "peer": rounded(found.rows[0].mean("val_loss")),
        "unit": "nats per token; key is the gap in percent",
        "median": rounded(gap.mean, 3) if gap else None,
        "min": rounded(min(gap.percent), 3) if gap else None,
        "max": rounded(max(gap.percent), 3) if gap else None,
        "repeats": len(found.seeds),
        "diverged": lost,
        "per_seed": [rounded(p, 3) for p in gap.percent] if gap else [],
        "interval_half_width": rounded(gap.half_width, 3) if gap else None,
        "resolved": gap.resolved if gap else None,
        "fingerprint": row.runs[0].get("fingerprint"),
        "quantized_mac_share": rounded(row.mean("quantized_mac_share")),
        "saved_bytes_per_element": rounded(row.mean("saved_bytes_per_element")),
    }


def rounded(value: float | None, digits: int = 4) -> float | None:
    """`value` to some digits; None where there is none."""
    return None if value is None or math.isnan(value) else round(value, digits)


if __name__ == "__main__":
    main()
