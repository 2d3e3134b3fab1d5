"""Errors of quantized attention on what a trained model's attention reads, against exact attention in float64.

Q, K, V and dO are recorded in every attention of a model on held-out text; where none is given, a Llama of three layers
is trained first (three minutes on a CPU). Bounds: in BF16 no error is above 1.05 times that of the same split in fp32
arithmetic; every error of the recipe is below that with keys not smoothed; and, as a control, dO V^T in FP4 raises the
error of dQ at least 1.3 times.

    python benchmarks/attention_error.py [--model FOLDER | --preset NAME] [--device cuda] [--backend triton]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import records
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, LlamaConfig

import quatrain as qt
from quatrain import checkpoint
from quatrain.data import DataConfig, prepare
from quatrain.nn import AttentionRows, attention_keys, quantized_attention
from quatrain.train import load_run, train
from quatrain.train.config import ModelConfig
from quatrain.train.process import quiet_transformers

ROOT = Path(__file__).parents[1]
SEED = 0
OUTPUTS = ("O", "dQ", "dK", "dV")
BIAS = 2.0  # standard deviations of K
VALUES, GRADS, SQUARE = qt.QuantSpec("nvfp4"), qt.QuantSpec("nvfp4"), qt.QuantSpec("nvfp4", block=(16, 16))
FOUR_OVER_SIX = qt.QuantSpec("nvfp4", scale="four-over-six")
THREE_LAYERS = {  # the size that `Variant.expected` is of
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.06,
}  # fmt: skip
Figures = tuple[float | None, ...]  # of OUTPUTS
Tensors = tuple[Tensor, ...]


class Case(NamedTuple):
    """One causal attention, BF16: q and do [b, h, t, d], k and v [b, g, t, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    def biased(self) -> Case:
        """The same with a random constant vector added to the keys of each head."""
        generator = torch.Generator().manual_seed(SEED)
        shift = torch.randn(1, self.k.shape[1], 1, self.k.shape[3], generator=generator).to(self.k.device)
        return self._replace(k=(self.k.float() + BIAS * self.k.float().std() * shift).bfloat16())


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        words: what it is.
        rows: what the library runs; None for what it never quantizes, which `simulated` computes.
        biased: whether the keys get a bias.
        expected: errors in a simulation made before this code was: 3 layers, heads of 64, 128 tokens.
        products: of `simulated`, those in FP4 beside the split's.
    """

    words: str
    rows: AttentionRows | None = None
    biased: bool = False
    expected: Figures = (None,) * 4
    products: tuple[str, ...] = ()


def split(values: qt.QuantSpec, **more: Any) -> AttentionRows:
    """Scores and both products of dS in NVFP4, everything rounded to nearest."""
    return AttentionRows(values, values, GRADS, values, GRADS, values, **more)


RECIPE = qt.load_recipe("nvfp4-attention").attention
UNSMOOTHED = replace(RECIPE, smooth=False)
VARIANTS = {
    "scores": Variant("Q K^T alone", AttentionRows(VALUES, VALUES, smooth=False), False, (0.074, 0.187, 0.187, 0.086)),
    "split": Variant("the split, nearest", split(VALUES, smooth=False), False, (0.074, 0.200, 0.196, 0.086)),
    "smooth": Variant("+ smoothed keys", split(VALUES), False, (0.072, 0.193, 0.194, 0.085)),
    "46": Variant("+ four-over-six", split(FOUR_OVER_SIX), False, (0.063, 0.177, 0.178, 0.074)),
    "recipe": Variant("+ dS stochastic: the recipe", RECIPE),
    "recipe_unsmoothed": Variant("the recipe, keys not smoothed", UNSMOOTHED),
    "biased_split": Variant("biased keys: the split", split(VALUES, smooth=False), True, (0.116, 0.407, 0.284, 0.140)),
    "biased_smooth": Variant("biased keys: + smoothed", split(VALUES), True, (0.072, 0.193, 0.194, 0.085)),
    "biased_recipe": Variant("biased keys: the recipe", RECIPE, True),
    "biased_unsmoothed": Variant("biased keys: the recipe, not smoothed", UNSMOOTHED, True),
    "view_decoded": Variant(
        "tokens from what S reads (view C)", split(VALUES, views="decoded"), False, (None, 0.224, 0.216, None)
    ),
    "view_square": Variant("one packing, 16 x 16 (view A)", split(SQUARE), False, (None, 0.228, 0.236, None)),
    "simulated": Variant("simulated: smoothed split", None, False, (0.072, 0.193, 0.194, 0.085)),
    "pv": Variant("simulated: P V in FP4 too", None, False, (0.118, 0.228, 0.220, 0.094), ("pv",)),
    "dov": Variant("simulated: dO V^T in FP4 too", None, False, (0.072, 0.339, 0.299, 0.085), ("dov",)),
    "all": Variant("simulated: both", None, False, (0.118, 0.390, 0.334, 0.094), ("pv", "dov")),
}


class Found(NamedTuple):
    """One variant's errors, a list of OUTPUTS for each attention: in BF16 as trained, and in fp32 all through."""

    bf16: list[list[float]]
    fp32: list[list[float]]

    @property
    def errors(self) -> list[float]:
        """Means over the attentions; of fp32 where nothing ran in BF16."""
        return mean(self.bf16 or self.fp32)


def mean(errors: list[list[float]]) -> list[float]:
    """Over the attentions, of each output."""
    return [math.fsum(column) / len(errors) for column in zip(*errors, strict=True)]


class _Recorder(TorchFunctionMode):
    """Keeps the operands of every scaled_dot_product_attention, and the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensors] = []
        self.gradients: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self._keep(out, len(self.operands), *args, **(kwargs or {}))
        return out

    def _keep(self, out: Tensor, index: int, q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> None:
        scale = rules.get("scale") or 1 / math.sqrt(q.shape[3])
        if rules.get("attn_mask") is not None or not rules.get("is_causal") or scale != 1 / math.sqrt(q.shape[3]):
            raise ValueError(f"only causal attention scaled by 1 / sqrt(d) is recorded, received {rules}")
        self.operands.append(tuple(x.detach().bfloat16() for x in (q, k, v)))
        out.register_hook(lambda gradient: self.gradients.update({index: gradient.bfloat16()}))


def record_cases(model: nn.Module, batch: Tensor) -> list[Case]:
    """What each attention of a model reads and gets back, in the order of the layers, for token ids [b, t + 1]."""
    model.train()
    model.zero_grad()
    with _Recorder() as recorder:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).backward()
    return [Case(*x, recorder.gradients[i]) for i, x in enumerate(recorder.operands)]


def gradients(out: Tensor, inputs: Tensors, do: Tensor) -> Tensors:
    """O and the gradients of the inputs."""
    return out.detach(), *torch.autograd.grad(out, inputs, do.to(out.dtype))


def exact(x: Case) -> Tensors:
    """O, dQ, dK, dV in float64."""
    q, k, v = (t.double().requires_grad_() for t in x[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return gradients(out, (q, k, v), x.do)


def quantized(x: Case, rows: AttentionRows, dtype: torch.dtype, backend: str) -> Tensors:
    """The same from the library, on the recorded values in a dtype of choice."""
    q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in x[:3])
    keys = attention_keys(SEED, 0, q.device)
    return gradients(quantized_attention(q, k, v, rows, is_causal=True, keys=keys, backend=backend), (q, k, v), x.do)


def simulated(x: Case, products: tuple[str, ...] = ()) -> Tensors:
    """The same from whole matrices in fp32: the smoothed split with decoded operands, and more products in FP4.

    Args:
        products: "pv" for P V (and P^T dO of the same P), "dov" for dO V^T.
    """
    q, k, v, do = (t.float() for t in x)
    group, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[3])
    k, v = (t.repeat_interleave(group, 1) for t in (k - k.mean(2, keepdim=True), v))
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    p = (rounded(q) @ rounded(k).mT * scale).masked_fill(later, -torch.inf).softmax(-1)
    left, right = (rounded(p), rounded(v.mT).mT) if "pv" in products else (p, v)
    out = left @ right
    dp = rounded(do) @ rounded(v).mT if "dov" in products else do @ v.mT
    ds = p * (dp - (do * out).sum(-1, keepdim=True))
    dq = rounded(ds) @ rounded(k.mT).mT * scale
    dk = rounded(ds.mT) @ rounded(q.mT).mT * scale
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, left.mT @ do))
    return out, dq, dk, dv


def rounded(x: Tensor) -> Tensor:
    """What the last dimension of x becomes in NVFP4."""
    return qt.quantize(x, VALUES).dequantize().to(x.dtype)


def relative_errors(found: Tensors, wanted: Tensors) -> list[float]:
    """norm(a - b) / norm(b) of each of OUTPUTS."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def measure(variant: Variant, pairs: list[tuple[Case, Tensors]], backend: str) -> Found:
    """Errors of a variant against what is exact for each attention."""
    bf16, fp32 = [], []
    for x, wanted in pairs:
        if variant.rows is None:
            fp32.append(relative_errors(simulated(x, variant.products), wanted))
            continue
        bf16.append(relative_errors(quantized(x, variant.rows, torch.bfloat16, backend), wanted))
        fp32.append(relative_errors(quantized(x, variant.rows, torch.float32, "reference"), wanted))
    return Found(bf16, fp32)


def measure_all(cases: list[Case], backend: str) -> dict[str, Found]:
    """Every variant, each named as it ends: on a GPU the first time compiles thirty kernels, for minutes."""
    known = {biased: [(x, exact(x)) for x in (case.biased() if biased else case for case in cases)]
             for biased in (False, True)}  # fmt: skip
    found = {}
    for name, variant in VARIANTS.items():
        begin = time.perf_counter()
        found[name] = measure(variant, known[variant.biased], backend)
        print(f"  {name}: {time.perf_counter() - begin:.1f} s", flush=True)
    return found


def ratios(a: list[float], b: list[float]) -> list[float]:
    """Errors over errors."""
    return [x / y for x, y in zip(a, b, strict=True)]


def bounds(found: dict[str, Found], prefix: str) -> list[dict[str, Any]]:
    """The rows that have a bound."""
    ran = {name: f for name, f in found.items() if f.bf16}
    against_fp32 = {name: max(ratios(f.errors, mean(f.fp32))) for name, f in ran.items()}
    single = max(r for f in ran.values() for a, b in zip(f.bf16, f.fp32, strict=True) for r in ratios(a, b))
    recorded = ratios(found["recipe"].errors, found["recipe_unsmoothed"].errors)
    biased = ratios(found["biased_recipe"].errors, found["biased_unsmoothed"].errors)
    control = ratios(found["dov"].errors, found["simulated"].errors)[1]
    each = [b[1] / a[1] for a, b in zip(found["simulated"].fp32, found["dov"].fp32, strict=True)]
    return [
        bounded(f"{prefix}_vs_fp32", "largest error in BF16 over that of the same split in fp32",
                max(against_fp32.values()), "at most", 1.05)
        | {"of": max(against_fp32, key=lambda n: against_fp32[n]), "largest_of_one_attention": digits(single)},
        bounded(f"{prefix}_vs_unsmoothed", "largest error of the recipe over the unsmoothed one's",
                max(recorded), "under", 1.0) | {"ratios": named(recorded)},
        bounded(f"{prefix}_biased_vs_unsmoothed", "the same with biased keys", max(biased), "under", 1.0)
        | {"ratios": named(biased)},
        bounded(f"{prefix}_dov_control", "dQ's error with dO V^T in FP4 over that without", control, "at least", 1.3)
        | {"each_attention": [digits(r) for r in each]},
    ]  # fmt: skip


def bounded(key: str, work: str, value: float, direction: str, bound: float) -> dict[str, Any]:
    """A row of one ratio with its bound."""
    met = {"at most": value <= bound, "under": value < bound, "at least": value >= bound}[direction]
    single = dict.fromkeys(("median", "min", "max"), digits(value))
    head = {"key": key, "work": work, "ours": digits(value), "peer": bound, "unit": "ratio of relative errors"}
    return head | single | {"repeats": 1, "direction": direction, "bound": bound, "met": met}


def error_row(name: str, found: Found, prefix: str) -> dict[str, Any]:
    """One variant's row; its key is dQ's error."""
    variant, ours, single = VARIANTS[name], digits(found.errors[1]), [digits(e[1]) for e in found.bf16 or found.fp32]
    figures = {"bf16": named(mean(found.bf16)), "fp32": named(mean(found.fp32)), "expected": named(variant.expected)}
    return {
        "key": f"{prefix}_{name}",
        "work": f"{variant.words}: relative error of dQ, mean over attentions",
        "ours": ours,
        "peer": digits(mean(found.fp32)[1]),
        "unit": "relative error; peer is the same split in fp32",
        "median": ours,
        "min": min(single),
        "max": max(single),
        "repeats": len(single),
        "errors": {kind: value for kind, value in figures.items() if value},
    }


def digits(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def named(values: Figures | list[float]) -> dict[str, float]:
    """Figures by the name of their output; without those that are not known."""
    pairs = zip(OUTPUTS, values, strict=False)
    return {name: digits(value) for name, value in pairs if value is not None}


def show(found: dict[str, Found], rows: list[dict[str, Any]], title: str) -> list[Table]:
    """Every variant's errors, then the bounds."""
    errors = Table(title=title, caption="BF16 (same split in fp32) expected: of a simulation with another toy model")
    errors.add_column("")
    for output in OUTPUTS:
        errors.add_column(output, no_wrap=True)
    for name, figures in found.items():
        ours = [f"{e:.4f} " for e in mean(figures.bf16)] or [""] * 4
        known = ["" if e is None else f" {e:.3f}" for e in VARIANTS[name].expected]
        cells = [f"{a}({b:.4f}){c}" for a, b, c in zip(ours, mean(figures.fp32), known, strict=True)]
        errors.add_row(VARIANTS[name].words, *cells)
    met = Table("bound", "ratio", "", "")
    for row in rows:
        verdict = "met" if row["met"] else "missed"
        met.add_row(row["work"], f"{row['ours']:g}", f"{row['direction']} {row['bound']:g}", verdict)
    return [errors, met]


def trained_model(options: argparse.Namespace) -> Path:
    """The folder of weights: what was given, or the last checkpoint of a run that is made where it is missing."""
    folder: Path = options.model or options.out / (options.preset or "three-layers")
    if options.model is None:
        run = [f"train.tokens={options.tokens}", "validation.every=0", f"out={folder}"]
        config = load_run(ROOT / "examples" / "demo.toml", run)
        shape = options.out / "three-layers-config"
        if options.preset is None:
            LlamaConfig(**THREE_LAYERS).save_pretrained(shape)
        model = ModelConfig(preset=options.preset) if options.preset else ModelConfig(path=str(shape))
        train(replace(config, model=model))
    return weights(folder)


def weights(folder: Path) -> Path:
    """The last checkpoint of a run's folder; any other folder itself."""
    found = checkpoint.latest(folder / "checkpoints")
    return folder if found is None else found.folder


def recorded_cases(options: argparse.Namespace) -> list[Case]:
    """Q, K, V and dO of the model on held-out text."""
    folder = trained_model(options)
    data = DataConfig(
        options.text, str(folder), sequence_length=options.length, max_bytes=4_000_000, validation_fraction=0.05
    )
    batch = prepare(data).val.batch(0, options.batch)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float32, local_files_only=True
    )
    return record_cases(model.to(options.device), batch.to(options.device))


def main() -> None:
    """Record, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a run's folder, or any transformers model with its tokenizer")
    parser.add_argument("--preset", help="train this model in place of the one of three layers")
    parser.add_argument("--tokens", type=int, default=409_600, help="that it is trained on, with the demo's settings")
    parser.add_argument("--out", type=Path, default=Path("runs/attention-error"), help="folder of these runs")
    parser.add_argument("--text", default="stdlib", help="data.path, as of `quatrain train`")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto", help="of the BF16 side; fp32 is always the reference")
    parser.add_argument("--record", default="attention_error", help="of the record and its keys; empty for none")
    options = parser.parse_args()
    with quiet_transformers():
        cases = recorded_cases(options)
    found = measure_all(cases, options.backend)
    rows = bounds(found, options.record)
    shape = "B{} H{} T{} D{}".format(*cases[0].q.shape)
    title = f"{len(cases)} attentions, {shape}, backend {options.backend} on {options.device}"
    console = Console(width=160)
    for table in show(found, rows, title):
        console.print(table)
    if options.record:
        rows += [error_row(name, figures, options.record) for name, figures in found.items()]
        own = f"{options.preset or 'Llama of three layers'}, {options.tokens:,} tokens"
        model = own if options.model is None else f"{options.model.name}, {weights(options.model).name}"
        more = {"model": model, "shape": shape, "backend": options.backend, **records.place(options.device)}
        print(records.write(options.record, SEED, rows, **more))


if __name__ == "__main__":
    main()
