"""Measurement records: one JSON file a benchmark, rows of {key, work, ours, peer, unit, median, min, max, repeats}."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "numpy", "safetensors", "transformers", "tokenizers", "quatrain")


def device_name() -> str:
    """The processor (or GPU) the figures were made on."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def place(device: str) -> dict[str, str]:
    """What a record's header says where the figures were made on a GPU."""
    return {"device": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}


def commit() -> str | None:
    """The commit that is checked out, "+changes" appended if files differ from it; None outside a checkout."""
    head = _git("rev-parse", "HEAD")
    return f"{head}+changes" if head and _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or None


def installed(name: str) -> str | None:
    """The version of a package; None if it is not there, or runs from its sources."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def header(seed: int | list[int]) -> dict[str, Any]:
    """Device, driver, versions, commit, date and seed."""
    return {
        "device": device_name(),
        "driver": torch.version.cuda,
        "versions": {name: version for name in PACKAGES if (version := installed(name))},
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def write(name: str, seed: int | list[int], rows: list[dict[str, Any]], **more: Any) -> Path:
    """Write results/<name>.json and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(header(seed) | more | {"rows": rows}, indent=1) + "\n")
    return path
