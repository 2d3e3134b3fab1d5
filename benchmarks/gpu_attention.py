"""Mixed-precision attention, forward and backward, against flash attention in the same run; cuDNN's beside it.

The recipe's rows (Q K^T and both products of dS in NVFP4, keys smoothed, dS stochastic); BF16, causal, q, k and v take
gradients. Everything is eager, quantization included.

    PYTHONPATH=src python benchmarks/gpu_attention.py --out runs/gpu
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator

import measure
import torch
from gpu_optim import allocated, fixed, peak, reset_peak
from measure import Recorder, Row, alternating, host_ms, ratio_row, significant
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import quatrain as qt
from quatrain.nn import attention_keys, quantized_attention
from quatrain.telemetry import saved_bytes

SHAPES = {"4k": (4, 16, 4096, 128), "16k": (1, 32, 16384, 128)}  # batch, heads, tokens, head size
SEED = 0
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def peer(kind: SDPBackend) -> Attention:
    """torch's attention with one backend and no other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def ours(device: str) -> Attention:
    """The library's, on its Triton twin; a CPU, to try the script, has the reference."""
    keys = attention_keys(SEED, 0, torch.device(device))
    rows, backend = qt.load_recipe("nvfp4-attention").attention, "triton" if device == "cuda" else "reference"
    return functools.partial(quantized_attention, rows=rows, is_causal=True, keys=keys, backend=backend)


class Side:
    """One attention with inputs of its own and the gradient of its output."""

    def __init__(self, attend: Attention, inputs: list[Tensor], do: Tensor) -> None:
        self.attend, self.do = attend, do
        self.leaves = [x.detach().clone().requires_grad_() for x in inputs]
        self.projection = nn.Linear(do.shape[1] * do.shape[3], 16, bias=False, device=do.device, dtype=do.dtype)
        self.out: Tensor | None = None

    def forward(self) -> Tensor:
        """O, with what backward needs."""
        return self.attend(*self.leaves)

    def projected(self) -> Tensor:
        """O through a linear over all heads, as in a model: it keeps O too, as [batch, tokens, heads x size]."""
        projected: Tensor = self.projection(self.forward().transpose(1, 2).flatten(2))
        return projected

    def step(self) -> None:
        """Forward and backward."""
        self.forward().backward(self.do)

    def backward(self) -> None:
        """Backward alone, again and again on one forward."""
        if self.out is None:
            self.out = self.forward()
        self.out.backward(self.do, retain_graph=True)

    def works(self) -> bool:
        """Whether a step runs; cuDNN's is not in every build."""
        try:
            self.step()
        except RuntimeError as error:
            print(f"  left out: {str(error).splitlines()[0]}")
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Gradients and the kept graph to None."""
        self.out = None
        for leaf in self.leaves:
            leaf.grad = None

    def extra_bytes(self) -> int:
        """The step's peak beyond what was there before it."""
        self.forget()
        self.step()  # whatever is made once
        self.forget()
        gc.collect()
        reset_peak()
        held = allocated()
        self.step()
        found = peak() - held
        self.forget()
        return found


class Bench:
    """One shape: ours, flash and cuDNN; with `in_model` in the layout that projections give, [b, t, h, d] in memory."""

    def __init__(self, name: str, shape: tuple[int, int, int, int], device: str, in_model: bool = False) -> None:
        generator = torch.Generator(device).manual_seed(SEED)
        make = functools.partial(torch.randn, shape, generator=generator, device=device, dtype=torch.bfloat16)
        *inputs, do = (make() for _ in range(4))
        if in_model:
            *inputs, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*inputs, do))
        self.sides = {"ours": Side(ours(device), inputs, do), "flash": Side(peer(FLASH), inputs, do)}
        cudnn = Side(peer(CUDNN), inputs, do)
        if device == "cuda" and cudnn.works():
            self.sides["cudnn"] = cudnn
        self.key = f"attention_{name}{'_in_model' if in_model else ''}"
        self.work = "attention {}, B{} H{} T{} D{}, causal, bf16".format("{}", *shape)
        self.work += ", laid out as in a model" if in_model else ""
        self.elements, self.rows = inputs[0].numel(), inputs[0].numel() // shape[3]

    def times(self, call: str) -> dict[str, measure.Times]:
        """Of one method of every side, in turn."""
        for side in self.sides.values():
            side.forget()
        leaves = [leaf for side in self.sides.values() for leaf in side.leaves]
        return alternating({name: getattr(side, call) for name, side in self.sides.items()}, leaves)

    def both_ways(self) -> Iterator[Row]:
        """The key: forward and backward over flash's, with cuDNN's time beside it."""
        found, work = self.times("step"), self.work.format("forward + backward")
        row = ratio_row(f"{self.key}_vs_flash", work, found["ours"], found["flash"], "SDPA flash", slowdown=True)
        hosts = {name: host_ms(side.step, side.leaves) for name, side in self.sides.items()}
        yield row | {"host_ms": hosts, "differences": self.differences()}
        if "cudnn" in found:
            key = f"{self.key}_vs_cudnn"
            yield ratio_row(key, work, found["ours"], found["cudnn"], "SDPA cuDNN", slowdown=True)

    def differences(self) -> dict[str, float]:
        """Relative differences of ours to flash's, so that a fast but broken step is seen in the record."""
        found = []
        for name in ("ours", "flash"):
            side = self.sides[name]
            side.forget()
            out = side.forward()
            out.backward(self.sides["flash"].do)
            found.append([out.detach(), *(leaf.grad for leaf in side.leaves)])
        pairs = zip(("O", "dQ", "dK", "dV"), *found, strict=True)
        return {name: significant(float((a.float() - b.float()).norm() / b.float().norm())) for name, a, b in pairs}

    def one_way(self) -> Iterator[Row]:
        """Forward alone, what backward needs included; and backward alone."""
        for call in ("forward", "backward"):
            found, work = self.times(call), self.work.format(f"{call} alone")
            key = f"{self.key}_{call}_vs_flash"
            yield ratio_row(key, work, found["ours"], found["flash"], "SDPA flash", slowdown=True)

    def memory(self) -> Iterator[Row]:
        """Peak of a step beyond its inputs, over flash's; a CPU tells none."""
        mine, others = (self.sides[name].extra_bytes() for name in ("ours", "flash"))
        if not others:
            return
        key = "attention_peak_vs_flash" if self.key == "attention_4k" else f"{self.key}_peak_vs_flash"
        work = f"{self.work.format('forward + backward')}: peak beyond the inputs"
        row = fixed(key, work, mine / 2**20, others / 2**20, "SDPA flash", "MiB; key is the ratio")
        yield row | dict.fromkeys(("median", "min", "max"), significant(mine / others))

    def saved(self) -> Iterator[Row]:
        """Bytes that the graph holds of Q, K, V and O for each element of one of them; both sides also hold L."""
        sides = [self.sides[name] for name in ("ours", "flash")]
        held = [saved_bytes(side.forward)["bytes"] for side in sides]
        work = f"{self.work.format('forward')}: bytes kept of Q, K, V and O"
        yield self.saved_row("attention_saved_bytes_per_element", work, held)

    def saved_in_model(self) -> Iterator[Row]:
        """The same with what an output projection keeps of O: nothing more where O lies as it is read."""
        sides = [self.sides[name] for name in ("ours", "flash")]
        held = [saved_bytes(side.projected, side.projection)["bytes"] for side in sides]
        work = f"{self.work.format('forward and output projection')}: bytes kept of Q, K, V and O"
        yield self.saved_row("attention_saved_bytes_in_model", work, held)

    def saved_row(self, key: str, work: str, held: list[int]) -> Row:
        """Bytes an element of a head, less L."""
        sums = 4 * self.rows  # L: fp32, one a query
        mine, others = ((h - sums) / self.elements for h in held)
        row = fixed(key, work, mine, others, "SDPA flash", "bytes per element of a head")
        return row | {"with_softmax_sums": [significant(h / self.elements) for h in held]}


def measure_plain(bench: Bench, recorder: Recorder) -> None:
    """What is measured in the plain layout beside the time of a step."""
    first = bench.key == "attention_4k"
    if first:
        recorder.run(("attention_saved_bytes_per_element",), bench.saved)
    recorder.run(("attention_peak_vs_flash" if first else f"{bench.key}_peak_vs_flash",), bench.memory)
    recorder.run((f"{bench.key}_forward_vs_flash", f"{bench.key}_backward_vs_flash"), bench.one_way)


def main() -> None:
    """Measure, print and record."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--shrink", type=int, default=1, help="divide heads and tokens, to try the script")
    options = parser.parse_args()
    recorder = Recorder(options.out / "gpu_attention.json", options.commit, SEED, trial=options.shrink != 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, in_model in [*((name, False) for name in options.shapes), ("4k", True)]:
        batch, heads, tokens, size = SHAPES[name]
        shape = (batch, max(heads // options.shrink, 2), tokens // options.shrink, size)
        bench = Bench(name, shape, device, in_model)
        recorder.run((f"{bench.key}_vs_flash",), bench.both_ways)
        if in_model:
            recorder.run(("attention_saved_bytes_in_model",), bench.saved_in_model)
        else:
            measure_plain(bench, recorder)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    print(recorder.summary())


if __name__ == "__main__":
    main()
