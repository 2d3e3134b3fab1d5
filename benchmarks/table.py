"""Write results/summary.json (flat: key -> number) and the tables between the markers of README.md.

python benchmarks/table.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"


def load(name: str) -> dict[str, Any]:
    """One record."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def summary() -> dict[str, float]:
    """Every key of every record."""
    files = sorted(p for p in RESULTS.glob("*.json") if p.name != "summary.json")
    return {row["key"]: row["median"] for path in files for row in json.loads(path.read_text())["rows"]}


def speed_table() -> str:
    """CPU quantization against the peer."""
    record = load("quantize_cpu")
    lines = ["| work | quatrain, M elements/s | peer | ratio (range) |", "|---|---|---|---|"]
    for row in record["rows"]:
        lines.append(
            f"| {row['work']} | {row['ours']} | {row['peer']} | **{row['median']}x** ({row['min']}-{row['max']}) |"
        )
    source = "[record](benchmarks/results/quantize_cpu.json)"
    return "\n".join([*lines, "", f"Peer: {record['peer']}; {record['device']}; {source}."])


def gap_table() -> str:
    """Loss gaps to BF16."""
    record = load("gaps")
    lines = [
        "| recipe | gap to BF16, % (95 % interval) | each seed | saved bytes per activation element | MACs quantized |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        name = row["key"].removeprefix("gap_").removesuffix("_percent").replace("_", "-")
        half = row["interval_half_width"]
        gap = f"{row['median']:+.2f}" + (f" ± {half:.2f}" if half is not None else " (one seed)")
        gap += "" if row["resolved"] else ", not resolved"
        seeds = ", ".join(f"{p:+.2f}" for p in row["per_seed"])
        share = f"{row['quantized_mac_share']:.1%}"
        lines.append(f"| `{name}` | {gap} | {seeds} | {row['saved_bytes_per_element']:.2f} | {share} |")
    facts = f"{record['tokens']:,} tokens, seeds {record['seed']}, {record['device']}"
    return "\n".join([*lines, "", f"{facts}; [record](benchmarks/results/gaps.json)."])


def filled(text: str) -> str:
    """The README's text with its tables made anew."""
    for name, make in (("speed", speed_table), ("gaps", gap_table)):
        begin, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"README.md must hold the markers {begin} and {end}")
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{make()}\n{end}{rest.split(end, 1)[1]}"
    return text


def main() -> None:
    """Write, or with --check say whether anything would change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the README or the summary is out of date")
    check = parser.parse_args().check
    flat = json.dumps(summary(), indent=1) + "\n"
    readme = filled(README.read_text())
    stored = RESULTS / "summary.json"
    if check:
        same = stored.exists() and stored.read_text() == flat and README.read_text() == readme
        sys.exit(0 if same else 1)
    stored.write_text(flat)
    README.write_text(readme)


if __name__ == "__main__":
    main()
