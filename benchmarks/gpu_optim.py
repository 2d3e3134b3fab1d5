"""Optimizer steps on a GPU: AdamW with NVFP4 moments and Root in NVFP4 against torch, bitsandbytes 0.50 and Muon.

The parameters are those of a 1,139 M model: 16 layers of four 2048 x 2048, two 8192 x 2048 and one 2048 x 8192, and an
embedding of 32000 x 2048. Every call is a whole `step()`; gradients stay the same. Memory is that of the allocator.

    PYTHONPATH=src python benchmarks/gpu_optim.py --out runs/gpu [--only adamw_fp32_vs_torch_fused]
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import measure
import records
import torch
from measure import Recorder, Row, alternating, host_ms, ratio_row, significant, wait
from torch import Tensor
from torch.optim import Optimizer

import quatrain as qt

SEED = 0
Named = list[tuple[str, Tensor]]
Make = Callable[[Named], Optimizer]


def parameters(layers: int, width: int, vocabulary: int, dtype: torch.dtype, device: str, embedding: bool) -> Named:
    """The set, named as transformers' Llama names it, with gradients of ordinary size."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (width, width)
        for name in ("gate", "up"):
            shapes[f"model.layers.{layer}.mlp.{name}_proj.weight"] = (4 * width, width)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (width, 4 * width)
    if embedding:
        shapes["model.embed_tokens.weight"] = (vocabulary, width)
    generator = torch.Generator(device).manual_seed(SEED)
    found = []
    for name, shape in shapes.items():
        draw = functools.partial(torch.randn, shape, generator=generator, device=device, dtype=dtype)
        parameter = draw().mul_(0.02).requires_grad_()
        parameter.grad = draw().mul_(1e-3)
        found.append((name, parameter))
    return found


class Bench:
    """The works, at the size given."""

    def __init__(self, layers: int, width: int, vocabulary: int, device: str) -> None:
        self.shape = (layers, width, vocabulary)
        self.device = device

    def set(self, dtype: torch.dtype, embedding: bool = True) -> Named:
        """Fresh parameters, once those of the work before are gone."""
        gc.collect()
        return parameters(*self.shape, dtype, self.device, embedding)

    def steps(self, named: Named, makers: dict[str, Make]) -> dict[str, measure.Times]:
        """Times of a step of each optimizer on the same parameters."""
        optimizers = {name: make(named) for name, make in makers.items()}
        for optimizer in optimizers.values():
            optimizer.step()
        return alternating({name: optimizer.step for name, optimizer in optimizers.items()})

    def words(self, named: Named, dtype: torch.dtype) -> str:
        """The set in words."""
        count = sum(p.numel() for _, p in named) / 1e6
        return f"{count:,.0f} M {str(dtype).removeprefix('torch.')} parameters and gradients"

    def adamw(self, dtype: torch.dtype, key: str) -> Iterator[Row]:
        """Ours over torch's fused step, and bitsandbytes' 8-bit step over ours, in one run."""
        named = self.set(dtype)
        makers: dict[str, Make] = {"ours": nvfp4_adamw, "torch": torch_adamw}
        if bitsandbytes_works(self.device):
            makers["bitsandbytes"] = bitsandbytes_adamw
        times = self.steps(named, makers)
        work = f"AdamW step, moments in NVFP4, {self.words(named, dtype)}"
        host = {"host_ms": host_ms(nvfp4_adamw(named).step)}
        yield ratio_row(key, work, times["ours"], times["torch"], "torch AdamW fused", slowdown=True) | host
        if "bitsandbytes" in times:
            name = "adamw_vs_bnb8bit" if dtype == torch.float32 else "adamw_bf16_vs_bnb8bit"
            peer = "bitsandbytes AdamW8bit"
            yield ratio_row(name, work, times["ours"], times["bitsandbytes"], peer, slowdown=False)

    def memory(self) -> Iterator[Row]:
        """Bytes of state, and of the step's peak beyond weights and gradients, for each parameter."""
        for key, embeddings in (("adamw_state_bytes_per_param", "nvfp4"), ("adamw_default_bytes_per_param", "fp32")):
            named = self.set(torch.bfloat16)
            count, held = sum(p.numel() for _, p in named), allocated()
            optimizer = qt.optim.AdamW(named, lr=1e-4, master="bf16-sr", embeddings=embeddings)
            optimizer.step()
            reset_peak()
            optimizer.step()
            extra = peak() - held
            work = f"AdamW, moments in NVFP4, embedding {embeddings}: bytes of state a parameter"
            yield fixed(key, work, optimizer.state_bytes() / count, 4.0, "torch AdamW, bf16", "bytes")
            if embeddings == "nvfp4":
                work = "the same: peak of a step beyond weights and gradients"
                yield fixed("adamw_peak_bytes_per_param", work, extra / count, None, "-", "bytes")

    def root(self) -> Iterator[Row]:
        """Root with NVFP4 operands, and ours with BF16 ones, over torch.optim.Muon on the matrices."""
        named = self.set(torch.bfloat16, embedding=False)
        makers: dict[str, Make] = {
            "root": lambda n: qt.optim.Root(n, lr=1e-3, master="bf16-sr"),
            "split": lambda n: qt.optim.Root(
                n, lr=1e-3, master="bf16-sr", coefficients="hybrid", split="diagonal", clip=None
            ),
            "bf16": lambda n: qt.optim.Root(n, lr=1e-3, master="bf16-sr", operands="bf16"),
            "muon": lambda n: qt.optim.Muon(n, lr=1e-3, master="bf16-sr"),
            "torch": lambda n: torch.optim.Muon([p for _, p in n], lr=1e-3),
        }
        times = self.steps(named, makers)
        where = self.words(named, torch.bfloat16)
        for name, key, what in (
            ("bf16", "root_bf16_vs_torch_muon", "Root step, BF16 operands"),
            ("root", "root_nvfp4_vs_torch_muon", "Root step, NVFP4 operands emulated"),
            ("split", "root_split_vs_torch_muon", "Root step, NVFP4 operands emulated, diagonal split"),
            ("muon", "muon_vs_torch_muon", "Muon step, BF16 operands"),
        ):
            yield ratio_row(key, f"{what}, {where}", times[name], times["torch"], "torch.optim.Muon", slowdown=True)

    def model(self, batches: tuple[int, ...] = (1, 8)) -> Iterator[Row]:
        """Peak memory of whole training steps in BF16 with an fp32 master: moments in NVFP4 over moments in fp32."""
        script = importlib.import_module("gpu_model")
        shape = script.Shape() if self.device == "cuda" else script.TINY
        for batch in batches:
            peaks = {}
            for state in ("fp32", "nvfp4"):
                gc.collect()
                model = script.build(shape, self.device).bfloat16()
                optimizer = qt.optim.AdamW(model.named_parameters(), lr=1e-4, state=state, embeddings=state)
                tokens = torch.zeros(batch, shape.length, dtype=torch.long, device=self.device)
                for _ in range(2):
                    reset_peak()
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                peaks[state] = peak()
                del model, optimizer
            if peaks["fp32"] == 0:
                continue  # a CPU tells no peak memory
            work = f"peak of a training step, {shape.words()}, here {batch} x {shape.length}, BF16, fp32 master, eager"
            found = {state: peaks[state] / 2**30 for state in peaks}
            unit = "GiB; key is the ratio"
            row = fixed(
                f"adamw_1b_peak_memory_batch_{batch}", work, found["nvfp4"], found["fp32"], "fp32 moments", unit
            )
            ratio = significant(found["nvfp4"] / found["fp32"])
            yield row | {"median": ratio, "min": ratio, "max": ratio}


def nvfp4_adamw(named: Named) -> Optimizer:
    """Ours, everything on, every tensor of the set in NVFP4."""
    master = "bf16-sr" if named[0][1].dtype == torch.bfloat16 else "fp32"
    return qt.optim.AdamW(named, lr=1e-4, weight_decay=0.1, embeddings="nvfp4", master=master)


def torch_adamw(named: Named) -> Optimizer:
    """torch's fused step."""
    return torch.optim.AdamW([p for _, p in named], lr=1e-4, weight_decay=0.1, fused=True)


def bitsandbytes_adamw(named: Named) -> Optimizer:
    """The 8-bit step."""
    return importlib.import_module("bitsandbytes.optim").AdamW8bit([p for _, p in named], lr=1e-4, weight_decay=0.1)


def bitsandbytes_works(device: str) -> bool:
    """Whether the peer is installed; its optimizer runs on CUDA alone."""
    return device == "cuda" and records.installed("bitsandbytes") is not None


def fixed(key: str, work: str, ours: float, peer: float | None, peer_name: str, unit: str) -> Row:
    """A row of one exact figure."""
    value = significant(ours)
    row = {"key": key, "work": work, "ours": value, "peer": peer and significant(peer), "peer_name": peer_name}
    return row | {"unit": unit, "median": value, "min": value, "max": value, "repeats": 1}


def allocated() -> int:
    """Bytes that tensors hold on the GPU; 0 on a CPU, where the script is only tried."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def reset_peak() -> None:
    """Forget the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """The largest number of bytes held since."""
    wait()
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def works(bench: Bench) -> dict[tuple[str, ...], Callable[[], Iterator[Row]]]:
    """Keys -> what makes their rows."""
    fp32, bf16 = "adamw_fp32_vs_torch_fused", "adamw_bf16_vs_torch_fused"
    return {
        (fp32, "adamw_vs_bnb8bit"): functools.partial(bench.adamw, torch.float32, fp32),
        (bf16,): functools.partial(bench.adamw, torch.bfloat16, bf16),
        ("adamw_state_bytes_per_param", "adamw_peak_bytes_per_param", "adamw_default_bytes_per_param"): bench.memory,
        ("root_bf16_vs_torch_muon", "root_nvfp4_vs_torch_muon"): bench.root,
        ("adamw_1b_peak_memory_batch_1", "adamw_1b_peak_memory_batch_8"): bench.model,
    }


def main() -> None:
    """Measure, print and record."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--layers", type=int, default=16, help="another depth, to try the script")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--only", nargs="*", default=[], help="keys; default: all")
    options = parser.parse_args()
    size: dict[str, Any] = {"layers": options.layers, "width": options.width, "vocabulary": options.vocabulary}
    trial = tuple(size.values()) != (16, 2048, 32_000)
    recorder = Recorder(options.out / "gpu_optim.json", options.commit, SEED, trial=trial)
    bench = Bench(**size, device="cuda" if torch.cuda.is_available() else "cpu")
    for keys, make in works(bench).items():
        if not options.only or set(keys) & set(options.only):
            recorder.run(keys, make)
    print(recorder.summary())


if __name__ == "__main__":
    main()
