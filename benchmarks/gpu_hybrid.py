"""Full training steps of a 90 M Nemotron-H-shaped hybrid: our Mamba-2 scan against transformers' own, compiled.

`M-M-M-M*-M-M-M-`, hidden 768, 24 x 64 Mamba heads, state 128, one group, 12 / 4 attention heads, vocabulary 32,000
untied; the FFN is as wide as makes 90 M parameters (1,152; with --vocab 8192 it is 4,608). fp32 weights under BF16
autocast, forward with labels, backward, fused AdamW, zero_grad; one batch again and again. Every variant is a process
of its own; they compile side by side, then take turns on the GPU.

    PYTHONPATH=src python benchmarks/gpu_hybrid.py --out runs/gpu
    PYTHONPATH=src python benchmarks/gpu_hybrid.py --out runs/gpu --no-stock --chunks 64 128 256 --profile
    PYTHONPATH=src python benchmarks/gpu_hybrid.py --tiny --eager           # on a CPU, to try the script
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import measure
import torch
from gpu_model import step_times, training_step, write_profile
from measure import Recorder, Row, significant, wait
from torch import Tensor, nn

from quatrain.models.mamba import SsdMixer, use_ssd_scan

KEY = "hybrid_90m_tokens_per_s"
SEED = 0
GIB = 2**30
PARAMETERS = 90e6
Run = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model and its batch."""

    pattern: str = "M-M-M-M*-M-M-M-"
    hidden: int = 768
    heads: int = 24
    state: int = 128
    groups: int = 1
    vocab: int = 32_000
    ffn: int | None = None  # None: what makes PARAMETERS
    batch: int = 16
    length: int = 1024

    def words(self, ffn: int) -> str:
        """Short, for a row."""
        return (
            f"{self.pattern}, hidden {self.hidden}, {self.heads} x 64 Mamba heads, state {self.state}, "
            f"{self.groups} group(s), FFN {ffn}, vocabulary {self.vocab}, batch {self.batch} x {self.length}"
        )


TINY = Shape("M*-", 64, 2, 16, 1, 128, 96, 2, 70)


def model_of(shape: Shape, ffn: int, device: str) -> nn.Module:
    """Transformers' model in fp32 on the device, from a fixed seed."""
    from transformers import AutoModelForCausalLM, NemotronHConfig

    config = NemotronHConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=ffn,
        hybrid_override_pattern=shape.pattern, mlp_hidden_act="relu2", num_attention_heads=shape.hidden // 64,
        num_key_value_heads=max(shape.hidden // 192, 1), head_dim=64, mamba_num_heads=shape.heads, mamba_head_dim=64,
        ssm_state_size=shape.state, n_groups=shape.groups, conv_kernel=4, chunk_size=128, tie_word_embeddings=False,
        use_cache=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(SEED)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def parameters(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(p.numel() for p in model.parameters())


def ffn_of(shape: Shape) -> int:
    """The FFN's width, a multiple of 128, that brings the model nearest to PARAMETERS."""
    if shape.ffn is not None:
        return shape.ffn
    per_unit = 2 * shape.hidden * shape.pattern.count("-")
    others = parameters(model_of(shape, 128, "meta")) - 128 * per_unit
    return max(round((PARAMETERS - others) / per_unit / 128), 1) * 128


def prepared(variant: str, shape: Shape, eager: bool) -> tuple[Callable[[], Tensor], Run]:
    """One full training step of a variant ("stock", "ours", or "ours-" and a chunk), warm, and what is known of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ffn = ffn_of(shape)
    model = model_of(shape, ffn, device)
    facts: Run = {"variant": variant, "parameters": parameters(model), "ffn": ffn}
    if variant != "stock":
        facts["mixers"] = len(use_ssd_scan(model))
        for module in model.modules():
            if isinstance(module, SsdMixer) and variant != "ours":
                module.scan_chunk = int(variant.removeprefix("ours-"))
    run = model if eager else torch.compile(model, fullgraph=variant != "stock")
    step = training_step(model, run, shape, device)
    begin = time.perf_counter()
    facts["losses"] = [float(step()) for _ in range(3)]
    facts["first_steps_s"] = significant(time.perf_counter() - begin)
    facts["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    return step, facts


def worker(options: argparse.Namespace, shape: Shape) -> None:
    """Prepare a variant, say so, then time some steps for every line read. Speaks JSON, a line each."""
    step, facts = prepared(options.worker, shape, options.eager)
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        step()  # after a pause
        wait()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        times = step_times(step, int(line))
        peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None
        print(json.dumps({"ms": times, "peak_gib": peak and significant(peak)}), flush=True)
    if options.profile and torch.cuda.is_available():
        sys.stdout = sys.stderr
        write_profile(step, options.out / "gpu_hybrid_profile.txt", options.worker)


class Variant:
    """A worker process, ended when its time is over; what it says beside its figures goes to a file."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.log = options.out / f"gpu_hybrid_{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker", name, *sys.argv[1:]],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self.timer = threading.Timer(options.timeout, self.process.kill)
        self.timer.start()

    def says(self) -> Run:
        """The next line of figures.

        Raises:
            RuntimeError: the process ended instead; the text has the end of what it said.
        """
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            said = self.log.read_text().strip().splitlines()[-12:]
            raise RuntimeError(f"{self.name} failed or took too long: " + "\n".join(said))
        return json.loads(line)

    def steps(self, count: int) -> Run:
        """Milliseconds of `count` steps, and the peak memory in GiB."""
        if self.process.stdin is None:
            raise RuntimeError(f"{self.name} has no input")
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self.says()

    def close(self) -> None:
        """End it in good order."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        self.process.wait()
        self.timer.cancel()


def measured(options: argparse.Namespace) -> dict[str, Run]:
    """Every variant that worked: its facts and its times, round by round in turn."""
    names = [*([] if options.no_stock else ["stock"]), "ours", *(f"ours-{chunk}" for chunk in options.chunks)]
    workers = [Variant(name, options) for name in names]
    runs: dict[str, Run] = {}
    for each in workers:
        try:
            runs[each.name] = each.says() | {"ms": []}
        except RuntimeError as error:
            print(error)
    for _ in range(options.rounds):
        for each in workers:
            if each.name in runs:
                found = each.steps(options.stock_steps if each.name == "stock" else options.steps)
                runs[each.name]["ms"] += found["ms"]
                runs[each.name]["peak_gib"] = found["peak_gib"]
    for each in workers:
        each.close()
    return runs


def rows(runs: dict[str, Run], shape: Shape) -> Iterator[Row]:
    """Tokens per second of each of our variants beside transformers' own."""
    tokens = shape.batch * shape.length * 1e3
    for run in runs.values():
        run["ms"] = [significant(t) for t in run["ms"]]
        run |= {"step_ms": significant(median(run["ms"])), "tokens_per_s": significant(tokens / median(run["ms"]))}
        print(json.dumps({name: value for name, value in run.items() if name != "ms"}), flush=True)
    stock = runs.pop("stock", None)
    if not runs:
        raise RuntimeError("no variant of ours ran; the logs beside the record say why")
    for name, run in runs.items():
        yield run | {
            "key": KEY + name.removeprefix("ours").replace("-", "_chunk_"),
            "work": f"full step, {shape.words(run['ffn'])}",
            "ours": run["tokens_per_s"],
            "peer": stock and stock["tokens_per_s"],
            "peer_name": "transformers' own scan, compiled",
            "unit": "tokens/s",
            "median": run["tokens_per_s"],
            "min": significant(tokens / max(run["ms"])),
            "max": significant(tokens / min(run["ms"])),
            "repeats": len(run["ms"]),
            "ratio": stock and significant(run["tokens_per_s"] / stock["tokens_per_s"]),
            "peer_run": stock,
        }


def main() -> None:
    """Measure, print and record; or be the process of one variant."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--chunks", nargs="*", type=int, default=[], help="chunk sizes beside the device's own")
    parser.add_argument("--no-stock", action="store_true", help="leave transformers' own scan out")
    parser.add_argument("--steps", type=int, default=10, help="steps of one round")
    parser.add_argument("--stock-steps", type=int, default=3, help="the same for transformers' own scan")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=165.0, help="seconds for one variant, compiling included")
    parser.add_argument("--groups", type=int, default=1, help="groups of B and C (a trial if not 1)")
    parser.add_argument("--vocab", type=int, default=32_000, help="vocabulary (a trial if not 32,000)")
    parser.add_argument("--eager", action="store_true", help="do not compile (a trial)")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to try the script (a trial)")
    parser.add_argument("--profile", action="store_true", help="write the slowest kernels to gpu_hybrid_profile.txt")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = TINY if options.tiny else dataclasses.replace(Shape(), groups=options.groups, vocab=options.vocab)
    if options.worker is not None:
        worker(options, shape)
        return
    trial = options.eager or shape != Shape()
    recorder = Recorder(options.out / "gpu_hybrid.json", options.commit, SEED, trial=trial)
    recorder.more["shape"] = dataclasses.asdict(shape)
    recorder.rows = {}
    recorder.run((KEY,), lambda: rows(measured(options), shape))
    print(recorder.summary())


if __name__ == "__main__":
    main()
