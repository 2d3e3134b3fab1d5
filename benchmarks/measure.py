"""What the GPU benchmarks share: bars, timing in alternating rounds, rows, and a record that grows row by row."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import records
import torch
from table import verdict
from torch import Tensor

Row = dict[str, Any]
Call = Callable[[], Any]

BARS: dict[str, tuple[str, float, float | None]] = {  # key: (direction, bar, stretch), in the order of the table
    "quantize_rn_tbps": ("at least", 3.4, 3.8),
    "quantize_sr_tbps": ("at least", 2.9, 3.5),
    "quantize_46_tbps": ("at least", 2.0, 2.6),
    "quantize_rowcol_tbps": ("at least", 2.6, 3.2),
    "quantize_vs_torchao": ("at least", 4.5, 6.0),
    "quantize_46_over_rn": ("at most", 1.7, 1.35),
    "quantize_46_vs_fouroversix": ("at least", 6.0, 9.0),
    "quantize_sr_rht_vs_fouroversix": ("at least", 6.0, 9.0),
    "linear_4096_vs_bf16": ("at most", 1.20, 1.12),
    "linear_14336_vs_bf16": ("at most", 1.15, 1.08),
    "linear_saved_bytes": ("at most", 0.60, 0.5625),
    "lora_svd_linear_vs_plain": ("at most", 1.15, None),
    "lora_svd_saved_bytes": ("at most", 0.5938, None),
    "model_1b_step_vs_bf16": ("at most", 1.25, 1.12),
    "model_1b_peak_memory_vs_bf16": ("at most", 0.85, None),
    "hybrid_90m_tokens_per_s": ("at least", 200_000, 260_000),
    "adamw_fp32_vs_torch_fused": ("at most", 0.75, 0.5),
    "adamw_bf16_vs_torch_fused": ("at most", 1.05, 0.7),
    "adamw_vs_bnb8bit": ("at least", 5.0, 8.0),
    "adamw_state_bytes_per_param": ("at most", 1.16, 1.141),
    "adamw_peak_bytes_per_param": ("at most", 1.25, 1.16),
    "root_bf16_vs_torch_muon": ("at most", 0.75, 0.6),
    "root_nvfp4_vs_torch_muon": ("at most", 1.0, 0.75),
    "attention_4k_vs_flash": ("at most", 1.0, 0.8),
    "attention_16k_vs_flash": ("at most", 1.0, None),
    "attention_peak_vs_flash": ("at most", 1.0, None),
    "attention_saved_bytes_per_element": ("at most", 6.25, None),
}
PACKAGES = ("torch", "triton", "transformers", "numpy", "torchao", "fouroversix", "bitsandbytes")
ROUNDS = 5


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the median over rounds, the shortest and longest single call, each round's median."""

    median: float
    shortest: float
    longest: float
    rounds: tuple[float, ...]


def alternating(calls: dict[str, Call], leaves: Iterable[Tensor] = ()) -> dict[str, Times]:
    """Time several calls in turn, round by round, so that drift of the clocks meets all of them.

    Args:
        calls: name -> what to time, ROUNDS times; a round is one `triton.testing.do_bench`, which clears the L2 cache.
        leaves: tensors whose gradient is None before each call.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(one_round(call, list(leaves)))
    return {
        name: Times(
            statistics.median(r[0] for r in each),
            min(r[1] for r in each),
            max(r[2] for r in each),
            tuple(r[0] for r in each),
        )
        for name, each in found.items()
    }


def one_round(call: Call, leaves: list[Tensor]) -> list[float]:
    """[median, shortest, longest] milliseconds of many calls; on a CPU, to try the scripts, of three."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        return do_bench(call, warmup=10, rep=60, grad_to_none=leaves or None, quantiles=[0.5, 0.0, 1.0])
    found = []
    for _ in range(3):
        for leaf in leaves:
            leaf.grad = None
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(found), min(found), max(found)]


def graph_ms(call: Call) -> float | None:
    """Milliseconds of one call replayed from a CUDA graph: the device's time without the host's. None on a CPU."""
    if not torch.cuda.is_available():
        return None
    from triton.testing import do_bench_cudagraph

    try:
        return significant(do_bench_cudagraph(call, rep=20, return_mode="median"))
    except RuntimeError as error:  # a call that cannot be captured still has its ordinary time
        print(f"  not captured in a graph: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return None


def host_ms(call: Call, leaves: Iterable[Tensor] = (), calls: int = 10) -> float:
    """Milliseconds that the host needs to enqueue one call."""
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        for leaf in leaves:
            leaf.grad = None
        call()
    spent = (time.perf_counter() - begin) / calls * 1e3
    wait()
    return significant(spent)


def wait() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def significant(value: float, digits: int = 4) -> float:
    """`value` to some significant digits."""
    return float(f"{value:.{digits}g}")


def rate_row(key: str, work: str, moved: int, ours: Times, copy: Times, copied: int) -> Row:
    """A row in TB/s of bytes in and out, beside the device copy of the same rounds."""
    rates = [moved / t / 1e9 for t in ours.rounds]
    limit = copied / copy.median / 1e9
    rate = moved / ours.median / 1e9
    return {
        "key": key,
        "work": work,
        "ours": significant(rate),
        "peer": significant(limit),
        "peer_name": "device copy",
        "unit": "TB/s",
        "median": significant(rate),
        "min": significant(min(rates)),
        "max": significant(max(rates)),
        "repeats": len(rates),
        "ratio": significant(rate / limit),
        "ms": times_json(ours),
        "bytes": moved,
    }


def ratio_row(key: str, work: str, ours: Times, peer: Times, peer_name: str, *, slowdown: bool) -> Row:
    """A row whose key is a ratio of times: the peer's over ours, or with `slowdown` ours over the peer's."""
    over, under = (ours, peer) if slowdown else (peer, ours)
    ratios = [a / b for a, b in zip(over.rounds, under.rounds, strict=True)]
    return {
        "key": key,
        "work": work,
        "ours": significant(ours.median),
        "peer": significant(peer.median),
        "peer_name": peer_name,
        "unit": "ms; key is the ratio",
        "median": significant(over.median / under.median),
        "min": significant(min(ratios)),
        "max": significant(max(ratios)),
        "repeats": len(ratios),
        "ms": times_json(ours),
        "peer_ms": times_json(peer),
    }


def times_json(times: Times) -> dict[str, float]:
    """Median, shortest and longest call."""
    found = {"median": times.median, "shortest": times.shortest, "longest": times.longest}
    return {name: significant(value) for name, value in found.items()}


def with_bar(row: Row) -> Row:
    """The row with its bar, where its key has one."""
    direction, bar, stretch = BARS.get(row["key"], (None, None, None))
    return row | {"direction": direction, "bar": bar, "stretch": stretch}


def header(commit: str | None, seed: int) -> dict[str, Any]:
    """Device, driver, versions, commit, date and seed, as in every record."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else records.device_name(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "versions": {name: version for name in PACKAGES if (version := records.installed(name))},
        "commit": commit or records.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def driver() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


class Recorder:
    """The rows of one section in one JSON file, written anew after each, so that nothing measured is lost.

    A file that an earlier call of the same commit left is continued. A trial, with other sizes than the keys stand for,
    says so and never enters a record.
    """

    def __init__(self, path: Path, commit: str | None, seed: int = 0, *, trial: bool = False) -> None:
        self.path = path
        self.header = header(commit, seed) | {"trial": trial}
        self.more: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}
        self.failed: dict[str, str] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._continue(json.loads(path.read_text()))

    def _continue(self, old: dict[str, Any]) -> None:
        same = all(old.get(name) == self.header[name] for name in ("commit", "device", "versions", "trial"))
        if same and self.header["commit"]:
            self.rows = {row["key"]: row for row in old["rows"]}
            self.more = old.get("more", {})

    def run(self, keys: tuple[str, ...], make: Callable[[], Iterable[Row]]) -> None:
        """Measure and store; a failure is stored too and ends nothing. Keys that are there already are left alone."""
        if all(key in self.rows for key in keys):
            print(f"{keys[0]}: measured already")
            return
        begin = time.perf_counter()
        try:
            for row in make():
                self.rows[row["key"]] = with_bar(row)
                self.failed.pop(row["key"], None)
                print(f"  {line(self.rows[row['key']])}", flush=True)
        except Exception as error:  # whatever a peer or a kernel throws, the next row still counts
            traceback.print_exc()
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            self.failed |= {key: reason[:300] for key in keys if key not in self.rows}
        print(f"{keys[0]}: {time.perf_counter() - begin:.1f} s", flush=True)
        self.write()

    def write(self) -> None:
        """Write the file whole or not at all."""
        data = self.header | {"rows": list(self.rows.values()), "failed": self.failed, "more": self.more}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(self.path)

    def summary(self) -> str:
        """A short table of everything that is stored."""
        lines = [line(row) for row in self.rows.values()]
        return "\n".join([*lines, *(f"{key:34} FAILED {reason[:90]}" for key, reason in self.failed.items())])


def line(row: Row) -> str:
    """One row as text."""
    bar = f"{row['direction']} {row['bar']:g}: {verdict(row)}" if row.get("bar") is not None else ""
    peer = "-" if row["peer"] is None else f"{row['peer']:g}"
    figures = f"{row['ours']:g} against {peer} {row['unit'].split(';')[0]} ({row.get('peer_name', 'peer')})"
    return f"{row['key']:38} {row['median']:<9g} {figures}  {bar}"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What each of the scripts takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the JSON files")
    parser.add_argument("--commit", help="what is measured; default: what is checked out")
    return parser
