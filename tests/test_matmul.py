"""Products of quantized operands: exact up to accumulation order, padded length contracted, mismatches refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import quatrain as qt
from quatrain.formats import unpack, unswizzle_scales
from quatrain.kernels import native, quantize_cpu
from quatrain.kernels.matmul import Decoded, _emulated, _Product, _working_dtype, gemm, gemm_parts

S = qt.QuantSpec
PAIRS = [
    (S(), S(block=(16, 16))), (S(scale="four-over-six"), S()), (S("mxfp4"), S("mxfp4", (32, 32))),
    (S("mxfp8"), S("mxfp8")), (S("fp8"), S("fp8", (128, 128))),
    (S(transform="hadamard", rounding="stochastic"), S(transform="hadamard")),
]  # fmt: skip


@pytest.mark.parametrize(("a_spec", "b_spec"), PAIRS)
@pytest.mark.parametrize("sizes", [(64, 48, 256), (7, 5, 27), (1, 1, 16), (0, 4, 32), (33, 40, 300)])
def test_equals_float64_of_decoded_operands(a_spec: S, b_spec: S, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = torch.randn(m, k), torch.randn(n, k)
    qa, qb = qt.quantize(a, a_spec), qt.quantize(b, b_spec)
    out = qt.matmul(qa, qb, out_dtype=torch.float32)
    exact = qa.dequantize(torch.float64) @ qb.dequantize(torch.float64).t()
    assert out.shape == (m, n)
    assert (out - exact).norm() <= 1e-5 * exact.norm()
    if m * n > 100 and a_spec.bits_per_element > 8:  # FP8 is close to the plain product itself
        assert (out - a @ b.t()).norm() < 0.06 * (a @ b.t()).norm()


def test_transformed_ragged_operands_contract_their_padding() -> None:
    """Cropping both operands from 32 back to 27 before the product would cost 30 % here."""
    a, b = torch.randn(64, 27), torch.randn(48, 27)
    spec = S("mxfp8", transform=qt.Hadamard(32))
    out = qt.matmul(qt.quantize(a, spec), qt.quantize(b, spec), out_dtype=torch.float32)
    assert (out - a @ b.t()).norm() < 0.06 * (a @ b.t()).norm()


def test_leading_dimensions_and_output_dtype() -> None:
    a, b = qt.quantize(torch.randn(2, 3, 64), "nvfp4"), qt.quantize(torch.randn(24, 64), S(block=(16, 16)))
    out = qt.matmul(a, b)
    assert out.shape == (2, 3, 24) and out.dtype == torch.bfloat16
    assert torch.equal(out, qt.matmul(a, b, out_dtype=torch.float32).bfloat16())  # one rounding at the end


@pytest.mark.parametrize(
    ("a_spec", "b_spec", "what"),
    [
        (S(), S("mxfp4"), "one format"),
        (S(), S(transform="hadamard"), "one transform"),
        (S(transform=qt.Hadamard(16)), S(transform=qt.Hadamard(16, None)), "one transform"),
        (S(transform=qt.Hadamard(16)), S(transform=qt.Hadamard(64)), "one transform"),
    ],
)
def test_mismatches_raise(a_spec: S, b_spec: S, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        qt.matmul(qt.quantize(torch.randn(4, 64), a_spec), qt.quantize(torch.randn(4, 64), b_spec))


def test_lengths_and_ranks_raise() -> None:
    a = qt.quantize(torch.randn(4, 64), "nvfp4")
    with pytest.raises(ValueError, match="padded length.*64 and 80"):
        qt.matmul(a, qt.quantize(torch.randn(4, 70), "nvfp4"))
    with pytest.raises(ValueError, match=r"matrix \[N, K\], received shape \(2, 2, 64\)"):
        qt.matmul(a, qt.quantize(torch.randn(2, 2, 64), "nvfp4"))


def test_mixed_product_with_a_plain_operand() -> None:
    a, b = torch.randn(7, 27), torch.randn(9, 27)
    q = qt.quantize(b, S())
    out = gemm(a, q, (7, 9), torch.float32)
    assert torch.allclose(out, a @ q.dequantize().t(), atol=1e-5)
    w = qt.quantize(torch.randn(27, 40), S(block=(16, 16)))
    assert torch.allclose(gemm(a, w, (7, 40), torch.float32, b_rows_contracted=True), a @ w.dequantize(), atol=1e-5)


def test_autocast_does_not_reach_inside() -> None:
    a, b = qt.quantize(torch.randn(64, 256), "nvfp4"), qt.quantize(torch.randn(64, 256), "nvfp4")
    plain = qt.matmul(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(qt.matmul(a, b, out_dtype=torch.float32), plain)


def test_scales_reach_the_result() -> None:
    a, b = torch.randn(8, 64), torch.randn(8, 64)
    one = qt.matmul(qt.quantize(a, "nvfp4"), qt.quantize(b, "nvfp4"), torch.float32)
    forty = qt.matmul(qt.quantize(a * 32, "nvfp4"), qt.quantize(b, "nvfp4"), torch.float32)
    assert torch.equal(forty, one * 32)


FAKE = ("test_faketensor",)  # the other checks multiply FP8 scales, which torch cannot


def test_custom_operation_keeps_its_promises() -> None:
    a, b = qt.quantize(torch.randn(40, 64), "nvfp4"), qt.quantize(torch.randn(24, 64), "nvfp4")
    text = S().to_json()
    parts = (a.codes, a.scales, a.amax, text, b.codes, b.scales, b.amax, text, torch.randn(24), 40, 24, False)
    torch.library.opcheck(torch.ops.quatrain.gemm.default, (*parts, torch.bfloat16), test_utils=FAKE)
    x, w = torch.randn(64, 40).t(), torch.randn(64, 24).t()
    plain = (x, None, None, None, w, None, None, None, None, 40, 24, False, torch.float32)
    torch.library.opcheck(torch.ops.quatrain.gemm.default, plain, test_utils=FAKE)


NARROW = [pair for pair in PAIRS if pair[0].format != "fp8"]


def decoded(q: qt.QTensor, *, transposed: bool = False) -> Decoded:
    values = q.block_values(torch.bfloat16)
    return Decoded(values.t().contiguous().t() if transposed else values, q.amax, q.spec)


@pytest.mark.parametrize(("a_spec", "b_spec"), NARROW)
def test_decoded_operands_multiply_as_the_packed_ones(a_spec: S, b_spec: S) -> None:
    m, n, k = 33, 40, 300
    a, b = qt.quantize(torch.randn(m, k), a_spec), qt.quantize(torch.randn(n, k), b_spec)
    want = qt.matmul(a, b, torch.float32)
    for left in (a, decoded(a), decoded(a, transposed=True)):
        for right in (b, decoded(b), decoded(b, transposed=True)):
            assert torch.allclose(gemm(left, right, (m, n), torch.float32), want, rtol=1e-5, atol=1e-5 * want.std())
    flipped = Decoded(b.block_values(torch.bfloat16).t(), b.amax, b.spec)
    out = gemm(decoded(a), flipped, (m, n), torch.float32, b_rows_contracted=True)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-5 * want.std())
    parts = (a.block_values(torch.bfloat16), None, a.amax), (b.block_values(torch.bfloat16), None, b.amax)
    out = gemm_parts(parts[0], a_spec.to_json(), parts[1], b_spec.to_json(), (m, n), torch.float32)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-5 * want.std())


@pytest.mark.parametrize(("a_spec", "b_spec"), NARROW)
def test_16_bits_hold_every_decoded_operand(a_spec: S, b_spec: S) -> None:
    """What the tensor cores are given loses nothing, over the widths that gradients have."""
    spread = torch.logspace(-12, 3, 64)[:, None]
    a, b = qt.quantize(torch.randn(64, 96) * spread, a_spec), qt.quantize(torch.randn(48, 96), b_spec)
    product = _Product(a, b, (64, 48), torch.float32, torch.randn(48), False, a.codes.device)
    dtype = _working_dtype(product)
    assert dtype == torch.bfloat16
    assert torch.equal(_emulated(product, dtype), _emulated(product, torch.float32))


def test_the_narrowest_exact_dtype() -> None:
    def working(a: Any, b: Any) -> torch.dtype:
        return _working_dtype(_Product(a, b, (4, 4), torch.float32, None, False, torch.device("cpu")))

    x = torch.randn(4, 128)
    q = {name: qt.quantize(x, name) for name in ("nvfp4", "mxfp4", "mxfp8", "fp8")}
    assert [working(v, v) for v in q.values()] == [torch.bfloat16] * 3 + [torch.float32]
    assert working(q["nvfp4"], x.half()) == torch.float16 and working(q["mxfp4"], x.half()) == torch.float32
    assert working(x.bfloat16(), q["mxfp8"]) == torch.bfloat16 and working(x, q["nvfp4"]) == torch.float32
    assert working(decoded(q["nvfp4"]), q["nvfp4"]) == torch.bfloat16
    assert working(x.double(), q["nvfp4"]) == torch.float64


def test_bias_is_taken_in_the_dtype_of_the_result() -> None:
    a, b, bias = qt.quantize(torch.randn(8, 64), "nvfp4"), qt.quantize(torch.randn(24, 64), "nvfp4"), torch.randn(24)
    wide = qt.matmul(a, b, torch.float32)
    assert torch.equal(gemm(a, b, (8, 24), torch.float32, bias=bias), wide + bias)
    rounded = (wide + bias.bfloat16().float()).bfloat16()
    assert torch.equal(gemm(a, b, (8, 24), torch.bfloat16, bias=bias), rounded)


def test_backends_are_honoured_or_refused() -> None:
    a, b = qt.quantize(torch.randn(8, 64), "nvfp4"), qt.quantize(torch.randn(16, 64), "nvfp4")
    want = qt.matmul(a, b, torch.float32)
    assert torch.equal(qt.matmul(a, b, torch.float32, "reference"), want)
    if quantize_cpu.obstacle() is None:
        assert torch.equal(qt.matmul(a, b, torch.float32, backend="cpu"), want)
    with pytest.raises(
        ValueError, match="backend must be one of auto, reference, cpu, triton, blackwell, received 'x'"
    ):
        qt.matmul(a, b, backend="x")
    with pytest.raises(ValueError, match='backend="triton" cannot run here: it needs operands on a CUDA device'):
        qt.matmul(a, b, backend="triton")
    with pytest.raises(ValueError, match=r"need a Blackwell GPU \(compute capability 10.x or 12.x\), received .* cpu"):
        qt.matmul(a, b, backend="blackwell")
    with pytest.raises(ValueError, match="both operands must be packed codes"):
        gemm(decoded(a), b, (8, 16), torch.float32, backend="blackwell")


def test_the_compiled_backend_is_refused_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_cpu, "obstacle", lambda: "no C++ compiler")
    a = qt.quantize(torch.randn(8, 64), "nvfp4")
    assert qt.matmul(a, a).shape == (8, 8)
    with pytest.raises(ValueError, match='backend="cpu" cannot run here: no C'):
        qt.matmul(a, a, backend="cpu")


class Cores:
    """Stands in for torch's scaled_mm: takes the arguments apart again, as the cores would, and multiplies."""

    def __init__(self, format_name: str) -> None:
        self.spec, self.calls = S(format_name), 0

    def __call__(self, a: torch.Tensor, b: torch.Tensor, *scaling: Any, **rest: Any) -> torch.Tensor:
        self.calls += 1
        a_scales, a_recipes, b_scales, b_recipes = scaling
        kinds, swizzles = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
        two_level = self.spec.format == "nvfp4"
        recipes = [kinds.BlockWise1x16, kinds.TensorWise] if two_level else [kinds.BlockWise1x32]
        tiles = [swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE][: len(recipes)]
        assert a_recipes == b_recipes == recipes and rest["swizzle_a"] == rest["swizzle_b"] == tiles
        assert a.dtype == b.dtype == torch.float4_e2m1fn_x2 and a.is_contiguous() and b.t().is_contiguous()
        left, right = self.values(a, a_scales), self.values(b.t(), b_scales)
        out = left @ right.t()
        if two_level:
            out *= a_scales[1] * b_scales[1]
        bias = rest["bias"]
        assert bias is None or bias.dtype == rest["output_dtype"] == torch.bfloat16
        return (out if bias is None else out + bias).to(rest["output_dtype"])

    def values(self, codes: torch.Tensor, scales: list[torch.Tensor]) -> torch.Tensor:
        packed = codes.view(torch.uint8)
        (rows, half), size = packed.shape, self.spec.block_shape[1]
        assert scales[0].dtype == (torch.float8_e4m3fn if size == 16 else torch.float8_e8m0fnu)
        flat = unswizzle_scales(scales[0].view(torch.uint8), (rows, 2 * half // size))
        block = flat.view(torch.float8_e4m3fn) if size == 16 else flat
        fmt = self.spec.block_format
        return fmt.element.decode(unpack(packed)) * fmt.scale.decode(block).repeat_interleave(size, dim=1)


@pytest.mark.parametrize(
    ("a_spec", "b_spec"),
    [(S(), S(block=(16, 16))), (S(block=(16, 16)), S()), (S("mxfp4"), S("mxfp4", (32, 32))), (S("mxfp4"), S("mxfp4"))],
)
def test_what_the_fp4_cores_are_given(monkeypatch: pytest.MonkeyPatch, a_spec: S, b_spec: S) -> None:
    cores = Cores(a_spec.format)
    monkeypatch.setattr(native, "device_obstacle", lambda device, name="nvfp4": None)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", cores)
    for shape, n in (((33, 64), 48), ((2, 5, 288), 160), ((0, 64), 16)):
        a, b = qt.quantize(torch.randn(shape), a_spec), qt.quantize(torch.randn(n, shape[-1]), b_spec)
        want = qt.matmul(a, b, torch.float32, backend="reference")
        assert torch.allclose(qt.matmul(a, b, torch.float32, backend="blackwell"), want, rtol=1e-4, atol=1e-4)
        assert torch.equal(qt.matmul(a, b, torch.float32), qt.matmul(a, b, torch.float32, backend="blackwell"))
    assert cores.calls == 6  # none for the empty product
    bias = torch.randn(160)
    a = qt.quantize(torch.randn(10, 288), a_spec)
    b = qt.quantize(torch.randn(160, 288), b_spec)
    out = gemm(a, b, (10, 160), torch.bfloat16, bias=bias, backend="blackwell")
    want = gemm(a, b, (10, 160), torch.bfloat16, bias=bias, backend="reference")
    assert (out - want).norm() < 1e-2 * want.norm()


def test_what_the_fp4_cores_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "device_obstacle", lambda device, name="nvfp4": None)
    w = qt.quantize(torch.randn(64, 48), S(block=(16, 16)))
    a, b = qt.quantize(torch.randn(8, 64), "nvfp4"), qt.quantize(torch.randn(48, 64), "nvfp4")
    for arguments, reason in (
        ((a, w, (8, 48), torch.bfloat16, None, True), "contract stored rows only"),
        ((a, b, (8, 48), torch.float16, None, False), "bfloat16 or float32, received torch.float16"),
        ((a, b, (8, 48), torch.float32, torch.ones(48), False), "a bias needs a bfloat16 result"),
        ((qt.quantize(torch.randn(8, 48), "nvfp4"), w, (8, 64), torch.float32, None, False), "multiple of 32"),
        ((qt.quantize(torch.randn(8, 64), "mxfp8"),) * 2 + ((8, 8), torch.float32, None, False), "received mxfp8"),
    ):
        x, y, shape, dtype, bias, rows = arguments
        want = gemm(x, y, shape, dtype, bias=bias, b_rows_contracted=rows)  # auto emulates
        assert want.shape == shape
        with pytest.raises(ValueError, match=reason):
            gemm(x, y, shape, dtype, bias=bias, b_rows_contracted=rows, backend="blackwell")


def test_custom_operation_takes_decoded_operands() -> None:
    a, b = (qt.quantize(torch.randn(n, 64), "nvfp4") for n in (40, 24))
    values = a.block_values(torch.bfloat16).t().contiguous().t(), b.block_values(torch.bfloat16)
    text = S().to_json()
    parts = (values[0], None, a.amax, text, values[1], None, b.amax, text, None, 40, 24, False, torch.bfloat16)
    torch.library.opcheck(torch.ops.quatrain.gemm.default, parts, test_utils=("test_schema", "test_faketensor"))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        parts = (left, None, a.amax), (right, None, b.amax)
        return gemm_parts(parts[0], text, parts[1], text, (40, 24), torch.bfloat16) + 1

    assert torch.equal(compiled(*values), qt.matmul(a, b) + 1)


INTERPRETED = """
import torch, quatrain as qt
from quatrain.formats import true_divide
from quatrain.kernels.matmul import gemm
from quatrain.kernels.matmul_triton import factors, fp8_matmul
torch.set_num_threads(1)
torch.manual_seed(0)
S = qt.QuantSpec
for m, n, k in ((33, 77, 300), (7, 5, 27), (1, 130, 128), (130, 70, 256)):
    for a_block, b_block, rows in (((1, 128), (1, 128), False), ((1, 128), (128, 128), False),
                                   ((1, 128), (128, 128), True), ((128, 128), (1, 128), False)):
        a = qt.quantize(torch.randn(m, k), S("fp8", a_block))
        b = qt.quantize(torch.randn(k, n) if rows else torch.randn(n, k), S("fp8", b_block))
        bias, codes = torch.randn(n), (a.codes, a.scales, b.codes, b.scales)
        want = gemm(a, b, (m, n), torch.float32, bias=bias, b_rows_contracted=rows)
        out = fp8_matmul(*codes, (m, n), torch.float32, bias, b_rows_contracted=rows)
        assert (out - want).norm() <= 1e-6 * want.norm(), (m, n, k, a_block, b_block, rows)
        out = fp8_matmul(*codes, (m, n), torch.bfloat16, b_rows_contracted=rows)  # the interpreter cuts to BF16
        assert (out - (want - bias)).norm() <= 1e-2 * want.norm()
codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
a = torch.cat([codes.view(torch.uint8)[:, None], torch.zeros(256, 127, dtype=torch.uint8)], 1)
one = torch.cat([torch.tensor([[0x38]], dtype=torch.uint8), torch.zeros(1, 127, dtype=torch.uint8)], 1)
e4m3 = torch.float8_e4m3fn
out = fp8_matmul(a.view(e4m3), torch.ones(256, 1), one.view(e4m3), torch.ones(1, 1), (256, 1), torch.float32)
assert torch.equal(out[:, 0].nan_to_num(nan=-1.0), codes.float().nan_to_num(nan=-1.0))
for x, y in ((1.7, 3.3), (1e-30, 7e5), (123.4, 0.001)):
    x, y = torch.tensor([x]), torch.tensor([y])
    for c, d in ((2688.0, 2688.0), (1536.0, 448 * 6 * 16 / 17)):
        both = factors([(x, c), (y, d)])
        assert both.tolist() == [float(true_divide(x, c) * true_divide(y, d)), 0.0]
        assert factors([(x, c)]).tolist() == [float(true_divide(x, c)), 0.0]
print("done")
"""


def test_triton_products_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize(("a_spec", "b_spec"), PAIRS)
    @pytest.mark.parametrize("sizes", [(64, 48, 256), (7, 5, 27), (1, 1, 16), (0, 4, 32), (33, 40, 300)])
    def test_equals_float64_of_decoded_operands(self, a_spec: S, b_spec: S, sizes: tuple[int, int, int]) -> None:
        m, n, k = sizes
        a, b = (qt.quantize(torch.randn(rows, k), spec).to("cuda") for rows, spec in ((m, a_spec), (n, b_spec)))
        exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
        for backend in ("auto", "triton", "reference"):
            out = qt.matmul(a, b, torch.float32, backend)
            assert (out - exact).norm() <= 1e-5 * exact.norm(), backend
        assert (qt.matmul(a, b) - exact).norm() <= 4e-3 * exact.norm()
        if a_spec.format != "fp8":
            out = gemm(decoded(a, transposed=True), decoded(b), (m, n), torch.float32)
            assert (out - exact).norm() <= 1e-5 * exact.norm()

    def test_refusals(self) -> None:
        a = qt.quantize(torch.randn(32, 64, device="cuda"), "nvfp4")
        with pytest.raises(ValueError, match='backend="cpu" cannot run here: it needs CPU operands'):
            qt.matmul(a, a, backend="cpu")
        if torch.cuda.get_device_capability()[0] < 10:
            with pytest.raises(ValueError, match="need a Blackwell GPU"):
                qt.matmul(a, a, backend="blackwell")

    def test_compiled_under_graphs(self) -> None:
        torch._dynamo.reset()
        a, b, text = *(qt.quantize(torch.randn(n, 64, device="cuda"), "nvfp4") for n in (48, 32)), S().to_json()

        def both(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            codes = (a.codes, a.scales, a.amax), (b.codes, b.scales, b.amax)
            wide = gemm_parts(codes[0], text, codes[1], text, (48, 32), torch.float32)
            parts = (left, None, a.amax), (right, None, b.amax)
            return wide + gemm_parts(parts[0], text, parts[1], text, (48, 32), torch.bfloat16)

        values = a.block_values(torch.bfloat16), b.block_values(torch.bfloat16)
        compiled = torch.compile(both, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            out = compiled(*values).clone()
        assert torch.equal(out, both(*values))


def test_rocm_builds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm GPU answers capability 9.x or 12.x, and has no PTX."""
    from quatrain.kernels import dispatch, native

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    device = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert dispatch.choose(device, "auto", lambda: None).backend == "reference"
    assert "ROCm" in (native.device_obstacle(device) or "")


def test_columns_that_the_fp4_cores_cannot_make_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of 16x16 blocks hides 40 columns behind 48, and the result is cropped to 40."""
    from quatrain.kernels import native

    monkeypatch.setattr(native, "device_obstacle", lambda *_: None)
    a, b = qt.quantize(torch.randn(32, 64), "nvfp4"), qt.quantize(torch.randn(40, 64), qt.QuantSpec(block=(16, 16)))
    for columns, fits in ((48, True), (40, False)):
        why = native.obstacle(a, b, torch.bfloat16, None, False, torch.device("cuda"), columns)
        assert (why is None) == fits
