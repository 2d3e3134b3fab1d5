"""Quantization on a GPU: bytes moved against the device copy, and times against torchao 0.18 and fouroversix 1.0.5.

Both peers are used where they are installed (fouroversix: built with SKIP_CUDA_BUILD=1, its Triton backend); where one
is not, its rows are reported as failed and the others are measured.

    PYTHONPATH=src python benchmarks/gpu_quantize.py --out runs/gpu
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import measure
import torch
from measure import Call, Recorder, Row, alternating, graph_ms, rate_row, ratio_row
from torch import Tensor

import quatrain as qt
from quatrain.kernels.quantize import quantize_parts
from quatrain.kernels.rounding import make_key

SIZE = 16384
TORCHAO_SIZE = 8192
SEED = 0
NEAREST = qt.QuantSpec()
STOCHASTIC = qt.QuantSpec(rounding="stochastic")
FOUR_OVER_SIX = {error: qt.QuantSpec(scale="four-over-six", error=error) for error in ("mse", "mae")}
TRANSFORMED = qt.QuantSpec(transform="hadamard")
TRANSFORMED_STOCHASTIC = qt.QuantSpec(transform="hadamard", rounding="stochastic")
SQUARE = qt.QuantSpec(block=(16, 16))


class Bench:
    """Inputs and the works; a spec pair is (row, column), the second of the transpose."""

    def __init__(self, size: int = SIZE, torchao_size: int = TORCHAO_SIZE, device: str = "cuda") -> None:
        self.size, self.torchao_size, self.device = size, torchao_size, torch.device(device)
        self.key = make_key(SEED, 0, self.device)
        self.pair = importlib.import_module("quatrain.kernels.quantize_triton").quantize_pair

    @functools.cached_property
    def x(self) -> Tensor:
        """bf16 N(0, 1), [size, size]."""
        return self._normal(self.size)

    @functools.cached_property
    def small(self) -> Tensor:
        """The same at torchao's size."""
        return self._normal(self.torchao_size)

    @functools.cached_property
    def target(self) -> Tensor:
        """Where the device copy goes."""
        return torch.empty_like(self.x)

    def _normal(self, size: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(SEED)
        return torch.randn(size, size, generator=generator, device=self.device, dtype=torch.bfloat16)

    def ours(
        self,
        x: Tensor,
        row: qt.QuantSpec | None,
        column: qt.QuantSpec | None = None,
        amax: Tensor | None = None,
        decoded: tuple[bool, bool] = (False, False),
    ) -> Call:
        """Our call."""
        row_key = self.key if row is not None and row.stochastic else None
        column_key = self.key if column is not None and column.stochastic else None
        return lambda: self.pair(x, row, column, row_key, column_key, amax=amax, decoded=decoded)

    def dispatched(self, x: Tensor, spec: qt.QuantSpec) -> Call:
        """Our call for kinds that the paired kernels do not serve: as the library itself calls it, amax included."""
        return functools.partial(quantize_parts, x, spec.to_json(), None)

    def amax(self, x: Tensor, row: qt.QuantSpec | None, column: qt.QuantSpec | None = None) -> Tensor:
        """fp32 [2] of both operands, by our own pass."""
        parts = self.ours(x, row, column)()
        found = [part[2].reshape(1) for part in parts if part is not None]
        return torch.cat(found if len(found) == 2 else found * 2)

    def rate(
        self,
        key: str,
        work: str,
        row: qt.QuantSpec | None,
        column: qt.QuantSpec | None = None,
        decoded: tuple[bool, bool] = (False, False),
    ) -> Row:
        """Bytes read and written a second, the amax given."""
        call = self.ours(self.x, row, column, self.amax(self.x, row, column), decoded)
        moved = self.x.nbytes + sum(t.nbytes for part in call() if part is not None for t in part[:2] if t is not None)
        found = alternating({"ours": call, "copy": lambda: self.target.copy_(self.x)})
        replayed = graph_ms(call)
        result = rate_row(key, f"{work}, {self.shape}", moved, found["ours"], found["copy"], 2 * self.x.nbytes)
        return result | {"graph_tbps": replayed and measure.significant(moved / replayed / 1e9)}

    @property
    def shape(self) -> str:
        """The shape in words."""
        return f"{self.size}x{self.size} bf16"

    def nearest(self) -> Iterator[Row]:
        """1x16 to nearest, packed; and decoded to BF16, what an emulated product reads."""
        yield self.rate("quantize_rn_tbps", "NVFP4 1x16 nearest, packed", NEAREST)
        yield self.rate("quantize_rn_decoded_tbps", "NVFP4 1x16 nearest, decoded to bf16", NEAREST, None, (True, False))

    def stochastic(self) -> Iterator[Row]:
        """1x16 stochastic, packed."""
        yield self.rate("quantize_sr_tbps", "NVFP4 1x16 stochastic, packed", STOCHASTIC)

    def four_over_six(self) -> Iterator[Row]:
        """Four-over-six by both errors; the key is the slower of the two."""
        found = [
            self.rate(f"quantize_46_{error}_tbps", f"NVFP4 four-over-six by {error.upper()}, packed", spec)
            for error, spec in FOUR_OVER_SIX.items()
        ]
        yield from found
        slower = min(found, key=lambda row: row["median"])
        yield slower | {"key": "quantize_46_tbps", "work": f"{slower['work']} (the slower of MSE and MAE)"}

    def both_ways(self) -> Iterator[Row]:
        """Rows as they are and columns after the Hadamard transform, from one read."""
        work = "NVFP4 rows nearest and columns Hadamard nearest from one read, both packed"
        yield self.rate("quantize_rowcol_tbps", work, NEAREST, TRANSFORMED)
        work = "the same with stochastic rounding (a gradient)"
        yield self.rate("quantize_rowcol_sr_tbps", work, STOCHASTIC, TRANSFORMED_STOCHASTIC)
        work = "the same, nearest, both decoded to bf16"
        yield self.rate("quantize_rowcol_decoded_tbps", work, NEAREST, TRANSFORMED, (True, True))

    def over_nearest(self) -> Iterator[Row]:
        """Kernel time of four-over-six over that of plain nearest; the key is the larger of both errors."""
        calls = {"nearest": self.ours(self.x, NEAREST, amax=self.amax(self.x, NEAREST))}
        calls |= {e: self.ours(self.x, s, amax=self.amax(self.x, s)) for e, s in FOUR_OVER_SIX.items()}
        times = alternating(calls)
        found = []
        for error in FOUR_OVER_SIX:
            work = f"four-over-six by {error.upper()} over plain nearest, amax given, {self.shape}"
            key, peer = f"quantize_46_{error}_over_rn", times["nearest"]
            found.append(ratio_row(key, work, times[error], peer, "plain nearest, ours", slowdown=True))
        yield from found
        slower = max(found, key=lambda row: row["median"])
        yield slower | {"key": "quantize_46_over_rn", "work": f"{slower['work']} (the slower of MSE and MAE)"}

    def public_call(self) -> Iterator[Row]:
        """`quatrain.quantize` as a user calls it, amax pass included, no check of finiteness."""
        call = functools.partial(qt.quantize, self.x, NEAREST, nonfinite="defer")
        result = call()
        moved = self.x.nbytes + result.codes.nbytes + result.scales.nbytes
        found = alternating({"ours": call, "copy": lambda: self.target.copy_(self.x)})
        work = f"quatrain.quantize, NVFP4 1x16 nearest, amax included, {self.shape} (the second read is not counted)"
        yield rate_row("quantize_public_tbps", work, moved, found["ours"], found["copy"], 2 * self.x.nbytes)

    def against(self, key: str, work: str, ours: Call, peer: Call, peer_name: str) -> Row:
        """Both in turn; with the times of CUDA graphs, free of what the host spends."""
        found = alternating({"ours": ours, "peer": peer})
        replayed = {"ours": graph_ms(ours), "peer": graph_ms(peer)}
        return ratio_row(key, work, found["ours"], found["peer"], peer_name, slowdown=False) | {"graph_ms": replayed}

    def torchao(self) -> Iterator[Row]:
        """Two-level NVFP4 with the tensor scale given, compiled."""
        peer = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor").nvfp4_quantize
        compiled = torch.compile(peer, dynamic=False)
        amax = self.amax(self.small, NEAREST)
        tensor_scale = (amax[0] / 2688.0).clone()  # 0-d, what its per_tensor_scale means: amax / (448 * 6)
        yield self.against(
            "quantize_vs_torchao",
            f"NVFP4 1x16 nearest, two-level, amax given, {self.torchao_size}x{self.torchao_size} bf16",
            self.ours(self.small, NEAREST, amax=amax),
            lambda: compiled(self.small, 16, tensor_scale),
            "torchao 0.18, compiled",
        )

    def torchao_mx(self) -> Iterator[Row]:
        """MXFP4 with floor scales, compiled."""
        to_mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor").to_mx
        compiled = torch.compile(to_mx, dynamic=False)
        spec = qt.QuantSpec("mxfp4", scale="floor")
        yield self.against(
            "quantize_mxfp4_vs_torchao",
            f"MXFP4 1x32 floor, {self.torchao_size}x{self.torchao_size} bf16 (ours with an amax pass)",
            self.dispatched(self.small, spec),
            lambda: compiled(self.small, torch.float4_e2m1fn_x2, 32),
            "torchao 0.18, compiled",
        )

    def fouroversix(self, key: str, work: str, row: Any, column: Any, **config: Any) -> Iterator[Row]:
        """One configuration of its Triton backend, the amax pass included on both sides."""
        peer = fouroversix_quantize()
        chosen = peer.QuantizationConfig(backend="triton", **config)
        theirs = functools.partial(peer.quantize_to_fp4, self.x, chosen)
        ours = self.dispatched(self.x, row) if row is SQUARE else self.ours(self.x, row, column)
        work = f"NVFP4 {work}, amax included, {self.shape}"
        result = self.against(key, work, ours, theirs, "fouroversix 1.0.5, Triton")
        if config.get("round_style") != "stochastic":  # their draws are others
            made = ours()
            codes = made[0] if row is SQUARE else next(part for part in made if part is not None)[0]
            result["codes_equal_share"] = float((theirs().values.view(torch.uint8) == codes).float().mean())
        yield result


def fouroversix_quantize() -> types.ModuleType:
    """Its quantize package alone: the top of the package would import two language models of transformers."""
    if "fouroversix" not in sys.modules:
        found = importlib.util.find_spec("fouroversix")
        if found is None:
            raise ModuleNotFoundError("fouroversix is not installed: SKIP_CUDA_BUILD=1 pip install fouroversix==1.0.5")
        shell = types.ModuleType("fouroversix")
        shell.__path__ = list(found.submodule_search_locations or [])
        sys.modules["fouroversix"] = shell
    return importlib.import_module("fouroversix.quantize")


def works(bench: Bench) -> dict[tuple[str, ...], Any]:
    """Keys -> what makes their rows; ours first."""
    found: dict[tuple[str, ...], Any] = {
        ("quantize_rn_tbps", "quantize_rn_decoded_tbps"): bench.nearest,
        ("quantize_sr_tbps",): bench.stochastic,
        ("quantize_46_tbps",): bench.four_over_six,
        ("quantize_rowcol_tbps", "quantize_rowcol_sr_tbps", "quantize_rowcol_decoded_tbps"): bench.both_ways,
        ("quantize_46_over_rn",): bench.over_nearest,
        ("quantize_vs_torchao",): bench.torchao,
    }
    peers: dict[str, tuple[Any, ...]] = {
        "46": ("four-over-six by MSE", FOUR_OVER_SIX["mse"], None, {"scale_rule": "mse"}),
        "sr_rht": (
            "transposed, Hadamard, stochastic",
            None,
            TRANSFORMED_STOCHASTIC,
            {"scale_rule": "static_6", "transpose": True, "rht": True, "round_style": "stochastic"},
        ),
        "rn": ("1x16 nearest", NEAREST, None, {"scale_rule": "static_6"}),
        "sr": ("1x16 stochastic", STOCHASTIC, None, {"scale_rule": "static_6", "round_style": "stochastic"}),
        "2d": ("16x16 nearest", SQUARE, None, {"scale_rule": "static_6", "block_scale_2d": True}),
        "rht": ("transposed, Hadamard", None, TRANSFORMED, {"scale_rule": "static_6", "transpose": True, "rht": True}),
    }
    for name, (work, row, column, config) in peers.items():
        key = f"quantize_{name}_vs_fouroversix"
        found[(key,)] = functools.partial(bench.fouroversix, key, work, row, column, **config)
    return found | {("quantize_public_tbps",): bench.public_call, ("quantize_mxfp4_vs_torchao",): bench.torchao_mx}


def main() -> None:
    """Measure, print and record."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--torchao-size", type=int, default=TORCHAO_SIZE)
    parser.add_argument("--only", nargs="*", default=[], help="keys; default: all")
    options = parser.parse_args()
    trial = (options.size, options.torchao_size) != (SIZE, TORCHAO_SIZE)
    recorder = Recorder(options.out / "gpu_quantize.json", options.commit, SEED, trial=trial)
    bench = Bench(options.size, options.torchao_size, "cuda" if torch.cuda.is_available() else "cpu")
    for keys, make in works(bench).items():
        if not options.only or set(keys) & set(options.only):
            recorder.run(keys, make)
    print(recorder.summary())


if __name__ == "__main__":
    main()
