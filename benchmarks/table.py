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


def load(name: str) -> dict[str, Any] | None:
    """One record; None before it was made."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def summary() -> dict[str, float]:
    """Every key of every record."""
    files = sorted(p for p in RESULTS.glob("*.json") if p.name != "summary.json")
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    return {row["key"]: row["median"] for row in rows if row["median"] is not None}  # None: a run diverged


def speed_table() -> str:
    """CPU quantization against the peer."""
    record = load("quantize_cpu")
    if record is None:
        return "Not measured yet: `make bench`."
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
    if record is None:
        return "Not measured yet: `make gaps`."
    lines = [
        "| recipe | gap to BF16, % (95 % interval) | each seed | saved bytes per activation element | MACs quantized |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        name = row["key"].removeprefix("gap_").removesuffix("_percent").replace("_", "-")
        seeds = ", ".join(f"{p:+.2f}" for p in row["per_seed"]) or "-"
        share, saved = shown(row["quantized_mac_share"], ".1%"), shown(row["saved_bytes_per_element"], ".2f")
        lines.append(f"| `{name}` | {gap_cell(row)} | {seeds} | {saved} | {share} |")
    facts = f"{record['tokens']:,} tokens, seeds {record['seed']}, {record['device']}"
    return "\n".join([*lines, "", f"{facts}; [record](benchmarks/results/gaps.json)."])


def stack_table() -> str:
    """Loss gaps of the stack's parts, to BF16 and to each other."""
    record = load("stack_gaps")
    if record is None:
        return "Not measured yet: `python benchmarks/stack_gaps.py --set data.path=TEXT` on a GPU."
    lines = [
        "| recipe | loss | against | gap, % (95 % interval) | seeds, from lowest to highest | the paper, % |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if row["key"].startswith("stack_gap_"):
            name = row["key"].removeprefix("stack_gap_").removesuffix("_percent").replace("_", "-")
            name, _, other = name.partition("-to-")
            seeds = f"{min(row['per_seed']):+.2f} to {max(row['per_seed']):+.2f}" if row["per_seed"] else "-"
            paper = row.get("paper_percent", "")
            name, other = (f"`{n}`".replace("-split`", "`, split") for n in (name, other or "bf16"))
            lines.append(f"| {name} | {row['ours']} | {other} | {gap_cell(row)} | {seeds} | {paper} |")
    seeds = record["seed"]
    facts = f"{record['tokens']:,} tokens, seeds {min(seeds)} to {max(seeds)}, {record['device']}, "
    facts += "commits " + " and ".join(commit[:9] for commit in (*record.get("parts", {}), record["commit"]))
    return "\n".join([*lines, "", f"{facts}; [record](benchmarks/results/stack_gaps.json)."])


def gap_cell(row: dict[str, Any]) -> str:
    """The gap with its interval, or why there is none."""
    if row["median"] is None:
        return f"a run diverged (seed {', '.join(map(str, row['diverged']))})"
    half = row["interval_half_width"]
    if half is None:
        return f"{row['median']:+.2f} (one seed)"
    return f"{row['median']:+.2f} ± {half:.2f}{'' if row['resolved'] else ', not resolved'}"


def gpu_table() -> str:
    """GPU figures with their bars, those that were missed and those not measured included."""
    record = load("gpu_h200")
    if record is None:
        return "Not measured yet: `python benchmarks/gpu.py` on a GPU."
    lines = ["| work | quatrain | peer or limit | ratio | bar | |", "|---|---|---|---|---|---|"]
    rows = [row for row in record["rows"] if row["bar"] is not None]
    for row in rows:
        unit = row["unit"].split(";")[0]
        peer = "-" if row["peer"] is None else f"{number(row['peer'])} {unit} ({row.get('peer_name', 'peer')})"
        ours, bar = f"{number(row['ours'])} {unit}", f"{row['direction']} {number(row['bar'])}"
        lines.append(f"| {row['work']} | {ours} | {peer} | {gpu_ratio(row)} | {bar} | {verdict(row)} |")
    missing = [f"Not measured: {', '.join(record['missing'])}."] if record["missing"] else []
    commits = sorted({str(row["commit"])[:9] for row in rows})
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    facts = f"{record['device']}, driver {record['driver']}; {versions}; commit {', '.join(commits)}"
    return "\n".join([*lines, "", *missing, f"{facts}; [record](benchmarks/results/gpu_h200.json)."])


def gpu_ratio(row: dict[str, Any]) -> str:
    """The key with its range where it is a ratio, else ours over the peer's."""
    if "key is the ratio" in row["unit"]:
        spread = "" if row["min"] == row["max"] else f" ({row['min']:.3g}-{row['max']:.3g})"
        return f"**{row['median']:.3g}x**{spread}"
    return f"{row['ours'] / row['peer']:.2f}x" if row["peer"] else "-"


def verdict(row: dict[str, Any]) -> str:
    """Whether the bar of a row is met, in words; nothing for a row without a bar."""
    if row.get("bar") is None:
        return ""
    sign = 1 if row["direction"] == "at least" else -1
    if row["stretch"] is not None and sign * row["median"] >= sign * row["stretch"]:
        return f"met, and the stretch of {number(row['stretch'])}"
    return "met" if sign * row["median"] >= sign * row["bar"] else "missed"


def number(value: float) -> str:
    """Up to four significant digits; thousands with commas."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def shown(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "-" if value is None else format(value, form)


def filled(text: str) -> str:
    """The README's text with its tables made anew."""
    for name, make in (("speed", speed_table), ("gpu", gpu_table), ("gaps", gap_table), ("stack", stack_table)):
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
        known = stored.read_text() if stored.exists() else json.dumps({}, indent=1) + "\n"
        same = known == flat and README.read_text() == readme
        sys.exit(0 if same else 1)
    RESULTS.mkdir(exist_ok=True)
    stored.write_text(flat)
    README.write_text(readme)


if __name__ == "__main__":
    main()
