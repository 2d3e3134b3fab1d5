"""A quantized linear, forward and backward, against BF16 `nn.Linear`: eager, compiled and from a CUDA graph.

The NVFP4 recipe with all four ingredients and nothing kept; bf16 weights without bias; the input takes a gradient.
Weight codes are kept between calls, as between the micro-batches of one optimizer step; the `fresh_weight` rows make
them anew at each call.

    PYTHONPATH=src python benchmarks/gpu_linear.py --out runs/gpu
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator

import measure
import torch
from measure import Recorder, Row, alternating, host_ms, ratio_row, significant
from torch import Tensor, nn

import quatrain as qt
from quatrain.recipe import Keep
from quatrain.telemetry import saved_bytes

TOKENS = 16384
SHAPES = {"4096": (4096, 4096), "14336": (4096, 14336)}  # in, out
SEED = 0
LAUNCH_BOUND = 0.9  # above this share of the device's time the host's time may show in the figure


class Side:
    """One linear with its input and the gradient of its output."""

    def __init__(self, x: Tensor, dy: Tensor, recipe: qt.Recipe | None) -> None:
        torch.manual_seed(SEED)
        linear = nn.Linear(x.shape[1], dy.shape[1], bias=False, device=x.device, dtype=x.dtype)
        self.model = nn.Sequential(linear)
        if recipe is not None:
            qt.apply(self.model, recipe)
        self.x, self.dy = x.detach().clone().requires_grad_(), dy
        self.leaves = [self.x, linear.weight]

    def step(self, model: Callable[[Tensor], Tensor] | None = None) -> None:
        """Forward and backward."""
        (model or self.model)(self.x).backward(self.dy)

    def fresh_step(self) -> None:
        """The same with the weight quantized anew, as after an optimizer step."""
        qt.drop_weight_codes(self.model)
        self.step()

    def forget_gradients(self) -> None:
        """Gradients to None."""
        for leaf in self.leaves:
            leaf.grad = None

    def compiled(self) -> Callable[[], None]:
        """The step through torch.compile, in one graph."""
        return functools.partial(self.step, torch.compile(self.model, fullgraph=True, dynamic=False))

    def replay(self, fresh: bool = False) -> Callable[[], None]:
        """The step captured in a CUDA graph; with `fresh` the graph quantizes the weight too."""
        step = self.fresh_step if fresh else self.step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.forget_gradients()
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self.forget_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


class Bench:
    """One shape: both sides and their rows."""

    def __init__(self, name: str, tokens: int, shape: tuple[int, int], device: str) -> None:
        generator = torch.Generator(device).manual_seed(SEED)
        make = functools.partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
        x, dy = make(tokens, shape[0]), make(tokens, shape[1])
        recipe = dataclasses.replace(qt.load_recipe("nvfp4"), keep=Keep())
        self.ours, self.peer = Side(x, dy, recipe), Side(x, dy, None)
        self.key = f"linear_{name}_vs_bf16"
        self.work = f"linear forward + backward, tokens x in x out = {tokens}x{shape[0]}x{shape[1]}, recipe nvfp4"
        self.checked: dict[str, float] = {}

    def row(self, suffix: str, how: str, ours: Callable[[], None], peer: Callable[[], None], own_leaves: bool) -> Row:
        """Both in turn. A graph's replay writes into gradients of its own (`own_leaves` false)."""
        leaves = [*self.ours.leaves, *self.peer.leaves] if own_leaves else []
        found = alternating({"ours": ours, "peer": peer}, leaves=leaves)
        work = f"{self.work}, {how}"
        return ratio_row(self.key + suffix, work, found["ours"], found["peer"], "BF16 nn.Linear", slowdown=True)

    def eager(self) -> Iterator[Row]:
        """The key: eager on both sides, with the host's time beside it."""
        row = self.row("", "eager", self.ours.step, self.peer.step, own_leaves=True)
        sides = {"ours": self.ours, "peer": self.peer}
        hosts = {name: host_ms(side.step, side.leaves) for name, side in sides.items()}
        bound = hosts["ours"] > LAUNCH_BOUND * row["ours"] or hosts["peer"] > LAUNCH_BOUND * row["peer"]
        yield row | {"host_ms": hosts, "launch_bound": bound, "gradient_errors": self.gradient_errors()}
        row = self.row(
            "_fresh_weight", "eager, weight quantized at each call", self.ours.fresh_step, self.peer.step, True
        )
        yield row

    def gradient_errors(self) -> dict[str, float]:
        """Relative error of our gradients against BF16's, so that a fast but broken step is seen in the record."""
        for side in (self.ours, self.peer):
            side.forget_gradients()
            side.step()
        pairs = zip(("input", "weight"), self.ours.leaves, self.peer.leaves, strict=True)
        return {name: significant(float((a.grad - b.grad).norm() / b.grad.norm())) for name, a, b in pairs}

    def graph(self) -> Iterator[Row]:
        """Both replayed from a CUDA graph."""
        peer = self.peer.replay()
        yield self.row("_graph", "CUDA graph", self.ours.replay(), peer, own_leaves=False)
        how = "CUDA graph, weight quantized at each call"
        yield self.row("_graph_fresh_weight", how, self.ours.replay(fresh=True), peer, own_leaves=False)

    def compiled(self) -> Iterator[Row]:
        """Both through torch.compile."""
        torch._dynamo.reset()
        ours, peer = self.ours.compiled(), self.peer.compiled()
        yield self.row("_compiled", "torch.compile", ours, peer, own_leaves=True)

    def saved(self) -> Iterator[Row]:
        """Bytes that the graph holds between forward and backward, over input elements."""
        held = [saved_bytes(lambda s=s: s.model(s.x).sum(), s.model)["bytes"] for s in (self.ours, self.peer)]
        ours, peer = (significant(h / self.ours.x.numel()) for h in held)
        fixed = {"median": ours, "min": ours, "max": ours, "repeats": 1}
        yield {
            "key": "linear_saved_bytes",
            "work": f"{self.work}: bytes kept for backward",
            "ours": ours,
            "peer": peer,
            "peer_name": "BF16 nn.Linear",
            "unit": "bytes per input element",
        } | fixed


def main() -> None:
    """Measure, print and record."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--shrink", type=int, default=1, help="divide both widths, to try the script")
    parser.add_argument("--eager-only", action="store_true", help="no CUDA graphs, nothing compiled")
    options = parser.parse_args()
    trial = (options.tokens, options.shrink) != (TOKENS, 1)
    recorder = Recorder(options.out / "gpu_linear.json", options.commit, SEED, trial=trial)
    cuda = torch.cuda.is_available()
    for name in options.shapes:
        widths = (SHAPES[name][0] // options.shrink, SHAPES[name][1] // options.shrink)
        bench = Bench(name, options.tokens, widths, "cuda" if cuda else "cpu")
        if name == "4096":
            recorder.run(("linear_saved_bytes",), bench.saved)
        recorder.run((bench.key, f"{bench.key}_fresh_weight"), bench.eager)
        if cuda and not options.eager_only:
            recorder.run((f"{bench.key}_graph", f"{bench.key}_graph_fresh_weight"), bench.graph)
        if not options.eager_only:
            recorder.run((f"{bench.key}_compiled",), bench.compiled)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    print(recorder.summary())


if __name__ == "__main__":
    main()
