"""Full training steps of a 1.1 B Llama-shaped model: NVFP4 against BF16, compiled and eager, with peak memory.

transformers' Llama (sdpa), fp32 weights under BF16 autocast, fused AdamW, one batch again and again, no checkpointing.
Each variant runs in a process of its own, BF16 first. The last two of 16 blocks and the head stay in BF16.

    PYTHONPATH=src python benchmarks/gpu_model.py --out runs/gpu [--profile]
    PYTHONPATH=src python benchmarks/gpu_model.py --layers 2 --steps 3 --variants bf16-eager nvfp4-eager
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import measure
import torch
from measure import Recorder, Row, significant, wait
from torch import Tensor, nn

import quatrain as qt
from quatrain.recipe import Keep

VARIANTS = ("bf16-compiled", "nvfp4-compiled", "bf16-eager", "nvfp4-eager")
SEED = 0
LOSSES = 3
MARK = "RESULT "
GIB = 2**30
PROFILED_STEPS = 2
SHOWN = ("step_ms", "tokens_per_s", "peak_gib", "losses", "first_steps_s", "graph_breaks")
Run = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model and its batch; the defaults are the 1,138 M model of the issue's table."""

    layers: int = 16
    hidden: int = 2048
    ffn: int = 8192
    heads: int = 16
    kv_heads: int = 8
    vocab: int = 32_000
    batch: int = 8
    length: int = 2048

    def words(self) -> str:
        """Short, for a row."""
        return f"Llama-shaped, {self.layers} layers, hidden {self.hidden}, batch {self.batch} x {self.length}"


TINY = Shape(layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=128, batch=2, length=32)


def build(shape: Shape, device: str) -> nn.Module:
    """The model in fp32 on the device, from a fixed seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.length,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        return LlamaForCausalLM(config).float().train()


def convert(model: nn.Module, recipe: str, layers: int) -> Run:
    """Apply the recipe with the last eighth of the blocks kept (2 of 16); what of the model it converted."""
    if recipe == "bf16":
        return {}
    chosen = dataclasses.replace(qt.load_recipe(recipe), keep=Keep(last_blocks=layers // 8))
    report = qt.apply(model, chosen)
    return {
        "quantized_mac_share": significant(report.quantized_mac_share),
        "quantized_mac_share_with_head": significant(report.quantized_mac_share_with_head),
        "linears": list(report.linears),
        "fingerprint": chosen.fingerprint(),
    }


def training_step(model: nn.Module, run: Any, shape: Any, device: str) -> Callable[[], Tensor]:
    """A closure that runs one full step on the fixed batch, through `run`, and returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    generator = torch.Generator(device).manual_seed(SEED)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), generator=generator, device=device)

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def step_times(step: Callable[[], Tensor], count: int) -> list[float]:
    """Milliseconds of each of `count` steps, waiting once at the end."""
    if not torch.cuda.is_available():
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            step()
            found.append((time.perf_counter() - begin) * 1e3)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def train(variant: str, shape: Shape, steps: int, warmup: int, profile: Path | None) -> Run:
    """Run one variant in this process."""
    recipe, mode = variant.split("-")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(shape, device)
    facts = {"parameters": sum(p.numel() for p in model.parameters()), **convert(model, recipe, shape.layers)}
    step = training_step(model, torch.compile(model) if mode == "compiled" else model, shape, device)
    begin = time.perf_counter()
    losses = [float(step()) for _ in range(LOSSES)]
    facts["first_steps_s"] = significant(time.perf_counter() - begin)
    facts["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values()) if mode == "compiled" else None
    for _ in range(warmup):
        step()
    wait()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = step_times(step, steps)
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    if profile is not None and device == "cuda":
        write_profile(step, profile, variant)
    return facts | {
        "losses": losses,
        "last_loss": float(step()),
        "ms": [significant(t) for t in times],
        "step_ms": significant(median(times)),
        "tokens_per_s": significant(shape.batch * shape.length / median(times) * 1e3),
        "peak_gib": peak and significant(peak),
    }


def write_profile(step: Callable[[], Tensor], path: Path, variant: str) -> None:
    """Append the kernels that take longest to `path`, and print them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    text = kernel_table([(e.key, e.count, e.self_device_time_total) for e in profiled.key_averages()], variant)
    with path.open("a") as file:
        file.write(text + "\n\n")
    print(text)


def kernel_table(kernels: list[tuple[str, int, float]], variant: str, top: int = 25) -> str:
    """The kernels (name, calls, microseconds of PROFILED_STEPS steps) that take longest, per step."""
    total = sum(us for _, _, us in kernels) / PROFILED_STEPS / 1e3
    lines = [f"{variant}: {total:.2f} ms of kernels a step", f"{'ms':>8} {'%':>5} {'calls':>6}  kernel"]
    for name, calls, us in sorted(kernels, key=lambda k: -k[2])[:top]:
        ms = us / PROFILED_STEPS / 1e3
        lines.append(f"{ms:8.3f} {100 * ms / max(total, 1e-9):5.1f} {calls / PROFILED_STEPS:6g}  {name[:110]}")
    return "\n".join(lines)


def run_apart(variant: str, options: argparse.Namespace) -> Run:
    """One variant in a process of its own, so that its memory is its own.

    Raises:
        RuntimeError: it failed or took too long; the text has the end of what it said.
    """
    command = [sys.executable, __file__, "--worker", variant, "--out", str(options.out)]
    command += ["--steps", str(options.steps), "--warmup", str(options.warmup)]
    command += ["--layers", str(options.layers)] if options.layers else []
    command += ["--tiny"] if options.tiny else []
    command += ["--profile"] if options.profile else []
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=options.timeout
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{variant} took longer than {options.timeout} s") from error
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    said = [line for line in done.stdout.splitlines() if not line.startswith(MARK)]
    print("\n".join(said[-60:]))
    if done.returncode or not found:
        raise RuntimeError(f"{variant} ended with code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return json.loads(found[-1].removeprefix(MARK))


def rows(mode: str, shape: Shape, runs: dict[str, Run]) -> Iterator[Row]:
    """Step time and peak memory of NVFP4 over BF16, once both variants of this mode have run."""
    peer, ours = runs.get(f"bf16-{mode}"), runs.get(f"nvfp4-{mode}")
    if peer is None or ours is None:
        return
    suffix = "" if mode == "compiled" else f"_{mode}"
    work, named = f"full step, {shape.words()}, {mode}", {"peer_name": f"BF16, {mode}"}
    facts = {name: value for name, value in ours.items() if name not in ("ms", "step_ms", "peak_gib")}
    step = {
        "key": f"model_1b_step_vs_bf16{suffix}",
        "work": f"{work}, {ours['quantized_mac_share']:.1%} of the blocks' linear MACs in NVFP4",
        "ours": ours["step_ms"],
        "peer": peer["step_ms"],
        "unit": "ms; key is the ratio",
        "median": significant(ours["step_ms"] / peer["step_ms"]),
        "min": significant(min(ours["ms"]) / peer["step_ms"]),
        "max": significant(max(ours["ms"]) / peer["step_ms"]),
        "repeats": len(ours["ms"]),
        "peer_losses": peer["losses"],
        "peer_tokens_per_s": peer["tokens_per_s"],
    }
    yield facts | named | step
    if ours["peak_gib"] and peer["peak_gib"]:
        ratio = significant(ours["peak_gib"] / peer["peak_gib"])
        fixed = {"median": ratio, "min": ratio, "max": ratio, "repeats": 1}
        yield (
            named
            | fixed
            | {
                "key": f"model_1b_peak_memory_vs_bf16{suffix}",
                "work": f"peak memory, {work}",
                "ours": ours["peak_gib"],
                "peer": peer["peak_gib"],
                "unit": "GiB; key is the ratio",
            }
        )


def all_variants(options: argparse.Namespace, shape: Shape) -> Recorder:
    """Run what is missing, variant by variant."""
    recorder = Recorder(options.out / "gpu_model.json", options.commit, SEED, trial=shape != Shape())
    if recorder.more.get("shape") != dataclasses.asdict(shape):
        recorder.more, recorder.rows = {"shape": dataclasses.asdict(shape), "runs": {}}, {}
    runs = recorder.more["runs"]
    for variant in options.variants:
        mode = variant.split("-")[1]
        suffix = "" if mode == "compiled" else "_eager"
        keys = (f"model_1b_step_vs_bf16{suffix}", f"model_1b_peak_memory_vs_bf16{suffix}")
        recorder.run(keys, functools.partial(one_variant, variant, options, shape, runs))
    return recorder


def one_variant(variant: str, options: argparse.Namespace, shape: Shape, runs: dict[str, Run]) -> Iterator[Row]:
    """Run one variant and give the rows that it completes."""
    if variant not in runs:
        print(f"{variant} ...", flush=True)
        runs[variant] = run_apart(variant, options)
        print(f"{variant}: {json.dumps({k: runs[variant][k] for k in SHOWN})}", flush=True)
    yield from rows(variant.split("-")[1], shape, runs)


def main() -> None:
    """Measure, print and record; or be the process of one variant."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--layers", type=int, help="another depth than 16, to try the script")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to try the script")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3, help="steps after the first three, before the clock starts")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one variant")
    parser.add_argument("--profile", action="store_true", help="write the slowest kernels to gpu_model_profile.txt")
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = TINY if options.tiny else Shape()
    shape = dataclasses.replace(shape, layers=options.layers or shape.layers)
    if options.worker is None:
        print(all_variants(options, shape).summary())
        return
    profile = options.out / "gpu_model_profile.txt" if options.profile else None
    print(MARK + json.dumps(train(options.worker, shape, options.steps, options.warmup, profile)))


if __name__ == "__main__":
    main()
