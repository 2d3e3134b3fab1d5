"""A quantized linear with a low-rank split against the same linear without: eager and from a CUDA graph.

Recipe nvfp4-lora-svd (rank 32) against nvfp4, nothing kept: the same six rows. bf16 weights without bias; the input
takes a gradient, weight and factors theirs. Weight codes, factors and their bases are kept between calls, as between
the micro-batches of one optimizer step; the `fresh_weight` row makes them anew at each call, on both sides.

    PYTHONPATH=src python benchmarks/gpu_lowrank.py --out runs/gpu
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from unittest import mock

import measure
import torch
from gpu_linear import LAUNCH_BOUND, SEED, TOKENS, Side
from measure import Recorder, Row, alternating, host_ms, ratio_row, significant, wait
from torch import nn

import quatrain as qt
from quatrain.nn.state import shared_states
from quatrain.recipe import Keep
from quatrain.telemetry import saved_bytes

WIDTH = 4096
KEY = "lora_svd_linear_vs_plain"
REALIGNMENTS = 5
LINEARS = 16


class Bench:
    """Both linears and their rows."""

    def __init__(self, tokens: int, width: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(SEED)
        make = functools.partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
        x, dy = make(tokens, width), make(tokens, width)
        self.ours, self.plain = (self.side(x, dy, name) for name in ("nvfp4-lora-svd", "nvfp4"))
        self.work = f"linear forward + backward, tokens x in x out = {tokens}x{width}x{width}, recipe nvfp4-lora-svd"

    @staticmethod
    def side(x: torch.Tensor, dy: torch.Tensor, name: str) -> Side:
        """One linear under a recipe of which nothing is kept in BF16; its factors take gradients as well."""
        side = Side(x, dy, dataclasses.replace(qt.load_recipe(name), keep=Keep()))
        side.leaves = [side.x, *side.model.parameters()]
        return side

    def row(self, suffix: str, how: str, ours: Callable[[], None], plain: Callable[[], None], own_leaves: bool) -> Row:
        """Both in turn. A graph's replay writes into gradients of its own (`own_leaves` false)."""
        leaves = [*self.ours.leaves, *self.plain.leaves] if own_leaves else []
        found = alternating({"ours": ours, "plain": plain}, leaves=leaves)
        work = f"{self.work}, {how}"
        return ratio_row(KEY + suffix, work, found["ours"], found["plain"], "recipe nvfp4", slowdown=True)

    def eager(self) -> Iterator[Row]:
        """The key: eager on both sides, with the host's time beside it."""
        row = self.row("", "eager", self.ours.step, self.plain.step, own_leaves=True)
        sides = {"ours": self.ours, "plain": self.plain}
        hosts = {name: host_ms(side.step, side.leaves) for name, side in sides.items()}
        bound = any(ms > LAUNCH_BOUND * row[name] for name, ms in zip(("ours", "peer"), hosts.values(), strict=True))
        yield row | {"host_ms": hosts, "launch_bound": bound, "gradient_errors": self.gradient_errors()}
        how = "eager, weight and factors quantized and orthonormalized at each call"
        yield self.row("_fresh_weight", how, self.ours.fresh_step, self.plain.fresh_step, own_leaves=True)

    def gradient_errors(self) -> dict[str, float]:
        """Relative errors against the exact gradients of the merged weight, so that a broken step is seen."""
        ours, module = self.ours, self.ours.model[0]
        ours.forget_gradients()
        ours.step()
        dense, left, right = (t.detach().float() for t in (module.merged_weight(), *module.factors()))
        g = ours.dy.float().t() @ ours.x.detach().float()
        wanted = {"input": ours.dy.float() @ dense, "left": g @ right.t(), "right": left.t() @ g}
        got = (ours.x.grad, *(factor.grad for factor in module.factors()))
        pairs = zip(wanted.items(), got, strict=True)
        return {name: significant(float((a.float() - b).norm() / b.norm())) for (name, b), a in pairs}

    def graph(self) -> Iterator[Row]:
        """Both replayed from a CUDA graph: the device's time alone, then with weight codes and factors made anew."""
        with (
            mock.patch.multiple("quatrain.nn.weights", keeps_nothing=kept),
            mock.patch.multiple("quatrain.nn.factors", keeps_nothing=kept),
        ):  # a graph made otherwise quantizes the weight it finds
            how = "CUDA graph, weight codes and factors kept"
            yield self.row("_graph", how, self.ours.replay(), self.plain.replay(), own_leaves=False)
        yield self.row(
            "_graph_fresh_weight",
            "CUDA graph, weight and factors made anew at each call",
            self.ours.replay(fresh=True),
            self.plain.replay(fresh=True),
            own_leaves=False,
        )

    def saved(self) -> Iterator[Row]:
        """Bytes that the graph holds between forward and backward, over input elements."""
        held = [saved_bytes(lambda s=s: s.model(s.x).sum(), s.model)["bytes"] for s in (self.ours, self.plain)]
        ours, plain = (significant(h / self.ours.x.numel()) for h in held)
        work = f"{self.work}: bytes kept for backward"
        yield figure("lora_svd_saved_bytes", work, ours, plain, "bytes per input element")

    def realign(self) -> Iterator[Row]:
        """One realignment with the moments of an optimizer."""
        optimizer = torch.optim.AdamW(self.ours.model.parameters(), lr=0.0)
        self.ours.forget_gradients()
        self.ours.step()
        optimizer.step()
        times = []
        for _ in range(REALIGNMENTS + 1):
            wait()
            begin = time.perf_counter()
            qt.realign(self.ours.model, optimizer)
            wait()
            times.append((time.perf_counter() - begin) * 1e3)
        shape = "x".join(map(str, self.ours.model[0].weight.shape))
        work = f"realignment of a split weight {shape}, rank 32, moments of AdamW included"
        yield figure("lora_svd_realign_ms", work, significant(statistics.median(times[1:])), None, "ms")

    def factors(self) -> Iterator[Row]:
        """What each linear costs once a step: bases of the factors, made together for linears of one shape."""
        weight = self.ours.model[0].weight
        model = nn.Sequential(*(nn.Linear(*weight.shape, bias=False, device=weight.device) for _ in range(LINEARS)))
        qt.apply(model.to(weight.dtype), dataclasses.replace(qt.load_recipe("nvfp4-lora-svd"), keep=Keep()))
        model(self.ours.x[:64])  # factors are made for a dtype that has been asked for
        state = shared_states(model)[0]
        times = []
        for _ in range(REALIGNMENTS + 1):
            wait()
            begin = time.perf_counter()
            state.splits.refresh(state.generation)
            wait()
            times.append((time.perf_counter() - begin) * 1e3 / LINEARS)
        work = f"bases of the factors of a linear, once a step, {LINEARS} linears together"
        yield figure("lora_svd_factors_ms", work, significant(statistics.median(times[1:])), None, "ms a linear")


def kept(weight: torch.Tensor) -> bool:
    """In place of `keeps_nothing`."""
    return False


def figure(key: str, work: str, ours: float, peer: float | None, unit: str) -> Row:
    """A row of one number."""
    fixed = {"median": ours, "min": ours, "max": ours, "repeats": 1}
    return {"key": key, "work": work, "ours": ours, "peer": peer, "peer_name": "recipe nvfp4", "unit": unit} | fixed


def main() -> None:
    """Measure, print and record."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--shrink", type=int, default=1, help="divide both widths, to try the script")
    parser.add_argument("--eager-only", action="store_true", help="no CUDA graphs")
    options = parser.parse_args()
    trial = (options.tokens, options.shrink) != (TOKENS, 1)
    recorder = Recorder(options.out / "gpu_lowrank.json", options.commit, SEED, trial=trial)
    cuda = torch.cuda.is_available()
    bench = Bench(options.tokens, WIDTH // options.shrink, "cuda" if cuda else "cpu")
    recorder.run(("lora_svd_saved_bytes",), bench.saved)
    recorder.run((KEY, f"{KEY}_fresh_weight"), bench.eager)
    recorder.run(("lora_svd_realign_ms",), bench.realign)
    recorder.run(("lora_svd_factors_ms",), bench.factors)
    if cuda and not options.eager_only:
        recorder.run((f"{KEY}_graph", f"{KEY}_graph_fresh_weight"), bench.graph)
    print(recorder.summary())


if __name__ == "__main__":
    main()
