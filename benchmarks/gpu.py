"""All GPU benchmarks in one go, and the record they add up to: benchmarks/results/gpu_<device>.json.

Each section is a script of its own, run in a process of its own and ended when its time is over; what it had measured
by then counts. A section that is run again replaces its keys in the record and leaves the others.

    PYTHONPATH=src python benchmarks/gpu.py --out runs/gpu --commit $(git rev-parse HEAD)
    python benchmarks/gpu.py --merge runs/gpu          # no GPU: only put the sections of a folder into the record
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measure
import records
from measure import BARS, Row, line, with_bar

FOLDER = Path(__file__).parent
LIMITS = {  # seconds
    "quantize": 170.0, "linear": 150.0, "lowrank": 90.0, "model": 420.0, "hybrid": 180.0, "optim": 240.0,
    "attention": 150.0, "stack": 300.0,
}  # fmt: skip
SHORTEST = 15.0  # a section is not started with less than this
Record = dict[str, Any]


def run_section(name: str, out: Path, commit: str | None, limit: float, more: list[str]) -> str:
    """Run one script for at most `limit` seconds; how it ended, in words."""
    script = FOLDER / f"gpu_{name}.py"
    if not script.exists():
        return f"there is no {script.name}"
    command = [sys.executable, str(script), "--out", str(out), *(["--commit", commit] if commit else []), *more]
    process = subprocess.Popen(command, start_new_session=True)  # so that its own children end with it
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"ended after {limit:.0f} s"
    return "done" if code == 0 else f"ended with code {code}"


def sections(folder: Path) -> list[Record]:
    """What the scripts left in a folder, in the order of LIMITS; trials with other sizes are left out."""
    paths = [folder / f"gpu_{name}.json" for name in LIMITS]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    return [section for section in found if not section.get("trial")]


def merged(record: Record | None, found: list[Record]) -> Record:
    """The record with the rows of newer sections in place of its own.

    Each row says at which commit and when it was measured; the head of the record is that of the newest section.

    Raises:
        ValueError: figures of another device.
    """
    old = record or {"rows": [], "failed": {}}
    rows: dict[str, Row] = {row["key"]: row for row in old["rows"]}
    failed: dict[str, str] = dict(old["failed"])
    head = {name: value for name, value in old.items() if name not in ("rows", "failed", "missing")}
    for section in found:
        if head.get("device", section["device"]) != section["device"]:
            raise ValueError(
                f"a record holds one device, received {section['device']!r} for {head['device']!r}; "
                "give --record another path"
            )
        head |= {name: value for name, value in section.items() if name not in ("rows", "failed", "more", "trial")}
        stamp = {"commit": section.get("commit"), "date": section.get("date")}
        measured = {row["key"]: with_bar(row) | stamp for row in section["rows"]}
        rows |= measured
        failed = {k: why for k, why in (failed | section.get("failed", {})).items() if k not in measured}
    order = {key: place for place, key in enumerate(BARS)}
    listed = sorted(rows.values(), key=lambda row: (order.get(row["key"], len(order)), row["key"]))
    return head | {"rows": listed, "failed": failed, "missing": [key for key in BARS if key not in rows]}


def default_record(device: str) -> Path:
    """Where figures of a device are kept: "NVIDIA H200" -> results/gpu_h200.json."""
    name = re.sub(r"[^a-z0-9]+", "_", device.lower().replace("nvidia", "")).strip("_")
    return records.RESULTS / f"gpu_{name}.json"


def write_record(folder: Path, path: Path | None) -> Record | None:
    """Merge a folder's sections into the record; None if there are none."""
    found = sections(folder)
    if not found:
        return None
    path = path or default_record(found[-1]["device"])
    old = json.loads(path.read_text()) if path.exists() else None
    record = merged(old, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(record['rows'])} rows in {path}")
    return record


def table(record: Record) -> str:
    """Every row as text, then what failed and what is missing."""
    lines = [line(row) for row in record["rows"]]
    lines += [f"{key:38} FAILED {why[:100]}" for key, why in record["failed"].items()]
    return "\n".join([*lines, *(f"{key:38} not measured" for key in record["missing"] if key not in record["failed"])])


def main() -> None:
    """Run, merge, print."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--sections", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for all of it")
    parser.add_argument("--profile", action="store_true", help="passed to gpu_model.py")
    parser.add_argument("--merge", type=Path, help="run nothing, merge this folder's sections into the record")
    parser.add_argument("--record", type=Path, help="default: benchmarks/results/gpu_<device>.json")
    options = parser.parse_args()
    folder = options.merge or options.out
    ends = {}
    deadline = time.monotonic() + options.budget
    for name in options.sections if options.merge is None else ():
        left = deadline - time.monotonic()
        more = ["--profile"] if options.profile and name == "model" else []
        print(f"== {name}: at most {min(left, LIMITS[name]):.0f} s", flush=True)
        enough = left >= SHORTEST
        ends[name] = run_section(name, folder, options.commit, min(left, LIMITS[name]), more) if enough else "no time"
    record = write_record(folder, options.record)
    print("\n".join(f"== {name}: {how}" for name, how in ends.items()))
    print(table(record) if record else f"nothing was measured in {folder}")


if __name__ == "__main__":
    main()
