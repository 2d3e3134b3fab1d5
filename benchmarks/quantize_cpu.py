"""CPU quantization against the PyTorch reference of fouroversix 1.0.5, in one run.

4096 x 4096 bf16 N(0, 1), one thread, processor time of the whole public call. The peer lives in an environment of its
own (.venv-peer, made here without its CUDA build); both are called in turn, round by round.

    python benchmarks/quantize_cpu.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median

import records

ROOT = Path(__file__).parents[1]
PEER = ROOT / ".venv-peer"
SIZE = 4096
WORKS = {  # key: (our scale rule, the peer's)
    "cpu_quantize_vs_fouroversix": ("to-6", "static_6"),
    "cpu_quantize_46_vs_fouroversix": ("four-over-six", "mse"),
}
PEER_WORKER = """
import sys, time, torch
from fouroversix import QuantizationConfig, quantize_to_fp4
torch.set_num_threads(1)
x = torch.randn(%d, %d, generator=torch.Generator().manual_seed(0)).bfloat16()
for line in sys.stdin:
    config = QuantizationConfig(backend="pytorch", scale_rule=line.strip())
    begin = time.process_time()
    quantize_to_fp4(x, config)
    print(time.process_time() - begin, flush=True)
"""
OUR_WORKER = """
import sys, time, torch, quatrain as qt
torch.set_num_threads(1)
x = torch.randn(%d, %d, generator=torch.Generator().manual_seed(0)).bfloat16()
for line in sys.stdin:
    spec = qt.QuantSpec(scale=line.strip())
    begin = time.process_time()
    qt.quantize(x, spec, backend="cpu")
    print(time.process_time() - begin, flush=True)
"""


def install_peer() -> Path:
    """Python of the peer's environment, installing it the first time."""
    python = PEER / "bin" / "python"
    if not python.exists():
        venv.create(PEER, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pinned = ["-c", str(ROOT / "constraints.txt"), "torch", "numpy", "transformers"]
        subprocess.run([*pip, *pinned, "packaging", "ninja", "psutil", "wheel", "setuptools"], check=True)
        build = os.environ | {"SKIP_CUDA_BUILD": "1"}
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", "fouroversix==1.0.5"], check=True, env=build)
    return python


class Worker:
    """A process that times one call for each rule it reads."""

    def __init__(self, python: str, code: str) -> None:
        self.process = subprocess.Popen(
            [python, "-c", code % (SIZE, SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def seconds(self, rule: str) -> float:
        """Processor seconds of one call."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self.process.stdin.write(rule + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    ours, peer = Worker(sys.executable, OUR_WORKER), Worker(str(install_peer()), PEER_WORKER)
    rows = []
    for key, (our_rule, peer_rule) in WORKS.items():
        ours.seconds(our_rule), peer.seconds(peer_rule)  # warm-up
        pairs = [(ours.seconds(our_rule), peer.seconds(peer_rule)) for _ in range(repeats)]
        ratios = [p / o for o, p in pairs]
        rates = [SIZE * SIZE / median(t) / 1e6 for t in zip(*pairs, strict=True)]
        rows.append(
            {
                "key": key,
                "work": f"quantize {SIZE}x{SIZE} bf16, {our_rule}, 1 thread, processor time",
                "ours": round(rates[0], 1),
                "peer": round(rates[1], 1),
                "unit": "M elements/s; key is the ratio",
                "median": round(median(ratios), 2),
                "min": round(min(ratios), 2),
                "max": round(max(ratios), 2),
                "repeats": repeats,
            }
        )
        print(f"{key}: {median(ratios):.1f}x ({rates[0]:.0f} against {rates[1]:.1f} M elements/s)")
    print(records.write("quantize_cpu", 0, rows, peer="fouroversix 1.0.5, PyTorch backend"))


if __name__ == "__main__":
    main()
