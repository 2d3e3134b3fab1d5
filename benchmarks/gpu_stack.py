"""Step time and peak memory of the full stack and of its parts against BF16, on the model of the loss gaps.

Steps of `quatrain train` on random tokens (time and memory do not depend on them): fp32 weights under BF16 autocast,
gradient clipping, the recipe's own optimizer, eager. Each variant in a process of its own with the GPU to itself.

    PYTHONPATH=src python benchmarks/gpu_stack.py --out runs/gpu [--presets nemotron-1.2b] [--variants full-stack]
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import measure
import torch
from gpu_model import GIB, MARK, step_times
from measure import Recorder, Row, significant, wait
from torch import Tensor
from torch.nn import functional as F

from quatrain.models import build
from quatrain.recipe import apply, load_recipe
from quatrain.train import load_run
from quatrain.train.optimizer import make_optimizer

VARIANTS = ("bf16", "root", "nvfp4", "nvfp4-attention", "adamw-nvfp4", "root-nvfp4", "nvfp4-lora-svd", "full-stack")
SHAPES = {"llama-76m": (32, 512), "nemotron-1.2b": (2, 2048)}  # batch and length: that of stack_gaps; mostly weights
SEED = 0


def train(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one variant in this process."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    recipe = load_recipe(variant)
    run = load_run(measure.records.RESULTS.parent / "stack.toml", [f"recipe={variant}"])
    model = build(options.presets[0], seed=SEED).to(device)
    report = apply(model, recipe, seed=SEED)
    optimizer = make_optimizer(model, run, device, recipe.optimizer)
    generator = torch.Generator(device).manual_seed(SEED)
    size = model.config.vocab_size
    tokens = torch.randint(size, (options.batch, options.length + 1), generator=generator, device=device)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    model.train()
    first = float(step())
    for _ in range(options.warmup):
        step()
    wait()
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = step_times(step, options.steps)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "fingerprint": recipe.fingerprint(),
        "quantized_mac_share": significant(report.quantized_mac_share),
        "losses": [first, float(step())],
        "ms": [significant(t) for t in times],
        "step_ms": significant(median(times)),
        "peak_gib": peak and significant(peak / GIB),
        "between_steps_gib": cuda and significant(before / GIB),
        "weights_gib": significant(weights / GIB),
        "state_bytes_per_parameter": significant(state_bytes(optimizer) / sum(p.numel() for p in model.parameters())),
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in the optimizer's state."""
    held = {id(t): t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)}
    return sum(t.numel() * t.element_size() for t in held.values())


def one_variant(preset: str, variant: str, options: argparse.Namespace, runs: dict[str, Any]) -> Iterator[Row]:
    """Measure one variant in a process of its own; its rows against bf16.

    Raises:
        RuntimeError: it failed.
    """
    batch, length = options.batch or SHAPES[preset][0], options.length or SHAPES[preset][1]
    command = [sys.executable, __file__, "--worker", variant, "--out", str(options.out), "--presets", preset]
    command += ["--batch", str(batch), "--length", str(length)]
    command += ["--steps", str(options.steps), "--warmup", str(options.warmup)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=240
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not found:
        raise RuntimeError(f"{variant} ended with code {done.returncode}: {done.stdout[-2000:]}")
    runs[f"{preset} {variant}"] = json.loads(found[-1].removeprefix(MARK))
    ours, peer = runs[f"{preset} {variant}"], runs[f"{preset} bf16"]
    if ours is not peer:
        work = f"full step, {preset}, batch {batch} x {length}, recipe {variant}, eager"
        yield compared(key_of("step", preset, variant), work, "ms", ours, peer, "step_ms")
        if ours["peak_gib"]:
            yield compared(key_of("peak", preset, variant), f"peak memory, {work}", "GiB", ours, peer, "peak_gib")


def key_of(what: str, preset: str, variant: str) -> str:
    """Of a row."""
    return re.sub("[^a-z0-9]", "_", f"stack_{what}_{preset}_{variant}_vs_bf16")


def compared(key: str, work: str, unit: str, ours: dict[str, Any], peer: dict[str, Any], figure: str) -> Row:
    """A row of one figure of two variants."""
    ratio = ours[figure] / peer[figure]
    low, high = (min(ours["ms"]), max(ours["ms"])) if unit == "ms" else (ours[figure], ours[figure])
    return {
        "key": key,
        "work": work,
        "ours": ours[figure],
        "peer": peer[figure],
        "peer_name": "recipe bf16 (AdamW)",
        "unit": f"{unit}; key is the ratio",
        "median": significant(ratio),
        "min": significant(low / peer[figure]),
        "max": significant(high / peer[figure]),
        "repeats": len(ours["ms"]) if unit == "ms" else 1,
    }


def main() -> None:
    """Measure, print and record."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--presets", nargs="+", default=list(SHAPES))
    parser.add_argument("--batch", type=int, help="another one, to try the script")
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(MARK + json.dumps(train(options.worker, options)))
        return
    trial = bool(options.batch or options.length) or not set(options.presets) <= set(SHAPES)
    recorder = Recorder(options.out / "gpu_stack.json", options.commit, SEED, trial=trial)
    runs = recorder.more.setdefault("runs", {})
    for preset in options.presets:
        for variant in ["bf16", *(v for v in options.variants if v != "bf16")]:
            keys = (key_of("step", preset, variant), key_of("peak", preset, variant))
            if f"{preset} {variant}" not in runs:
                recorder.run(keys, functools.partial(one_variant, preset, variant, options, runs))
    print(recorder.summary())


if __name__ == "__main__":
    main()
