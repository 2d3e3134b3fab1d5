"""Loss gaps of every recipe in the library on the demo's model, paired over seeds; resumes where it stopped.

python benchmarks/gaps.py [--seeds 0 1 2] [--tokens 114688]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import records

from quatrain.recipe import recipe_names
from quatrain.report import write_report
from quatrain.train import compare, load_run

ROOT = Path(__file__).parents[1]
SEEDS = [0, 1, 2]  # listed before any of them was run


def main() -> None:
    """Train, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--tokens", type=int, default=114_688)
    parser.add_argument("--out", type=Path, default=Path("runs/gaps"))
    options = parser.parse_args()
    names = ["bf16", *(n for n in recipe_names() if n not in ("bf16", "nvfp4-12b"))]  # 12b: block counts for 62 blocks
    config = load_run(ROOT / "examples" / "demo.toml", [f"train.tokens={options.tokens}"])
    found = compare(config, names, seeds=options.seeds, out=options.out)
    write_report(found.folders, options.out / "report.html", baseline="bf16")
    rows = []
    for row in found.rows[1:]:
        if row.gap is None:
            continue
        rows.append(
            {
                "key": f"gap_{row.recipe.replace('-', '_')}_percent",
                "work": f"tiny-hybrid, {found.tokens:,} tokens, validation loss against bf16, paired over seeds",
                "ours": round(row.mean("val_loss"), 4),
                "peer": round(found.rows[0].mean("val_loss"), 4),
                "unit": "nats per token; key is the gap in percent",
                "median": round(row.gap.mean, 3),
                "min": round(min(row.gap.percent), 3),
                "max": round(max(row.gap.percent), 3),
                "repeats": len(options.seeds),
                "per_seed": [round(p, 3) for p in row.gap.percent],
                "interval_half_width": round(row.gap.half_width, 3) if row.gap.half_width is not None else None,
                "resolved": row.gap.resolved,
                "fingerprint": row.runs[0].get("fingerprint"),
                "quantized_mac_share": round(row.mean("quantized_mac_share"), 4),
                "saved_bytes_per_element": round(row.mean("saved_bytes_per_element"), 4),
            }
        )
    print(records.write("gaps", options.seeds, rows, tokens=found.tokens))


if __name__ == "__main__":
    main()
