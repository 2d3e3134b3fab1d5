"""Quantize: backends agree bit for bit, any shape works, edges are defined, bad input says so."""

import dataclasses

import pytest
import torch

import quatrain as qt
from quatrain.formats import unpack
from quatrain.kernels import quantize_cpu
from quatrain.kernels.quantize import empty_parts, supported_specs
from quatrain.kernels.scaling import SEARCH_MULTIPLIERS

S = qt.QuantSpec


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    outliers = randn(37, 144)
    outliers[torch.rand(37, 144, generator=g) < 0.01] *= 100
    return {
        "gauss bf16, ragged": randn(33, 77).bfloat16(),
        "gauss fp16": randn(16, 160).half(),
        "all magnitudes": randn(48, 256) * torch.logspace(-40, 30, 48)[:, None],
        "subnormal scales": randn(48, 256) * torch.logspace(-9, 0, 48)[:, None],
        "outliers": outliers,
        "zeros": torch.zeros(5, 32),
        "negative zeros": -torch.zeros(5, 32),
        "one row": randn(40),
        "three dimensions": randn(3, 5, 48),
        "ties": (torch.arange(-64, 64) / 8.0).repeat(16, 1).bfloat16(),
        "float64": randn(4, 32).double(),
    }


@pytest.mark.parametrize("name", inputs())
def test_cpu_twin_is_bitwise_equal(name: str) -> None:
    assert quantize_cpu.obstacle() is None
    x = inputs()[name]
    for spec in supported_specs() if name in ("gauss bf16, ragged", "subnormal scales") else supported_specs()[::3]:
        for transform in (
            (None, qt.Hadamard(16)) if spec.rounding != "nearest" else (None, qt.Hadamard(4), qt.Hadamard(128, None))
        ):
            try:
                full = dataclasses.replace(spec, transform=transform)
            except ValueError:
                continue
            a = qt.quantize(x, full, seed=3, offset=2**40 + 5, backend="reference")
            b = qt.quantize(x, full, seed=3, offset=2**40 + 5, backend="cpu")
            for part in ("codes", "scales", "amax"):
                left, right = getattr(a, part), getattr(b, part)
                assert left.shape == right.shape and left.dtype == right.dtype
                assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), (full, part)
            assert torch.equal(quantize_cpu.decode(b.codes, b.scales, full), a.block_values()), full


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_cpu_twin_does_not_depend_on_threads(threads: int) -> None:
    x = torch.randn(257, 512)
    spec = S(scale="four-over-six", rounding="stochastic")
    before = torch.get_num_threads()
    expected = qt.quantize(x, spec, backend="reference")
    try:
        torch.set_num_threads(threads)
        assert torch.equal(qt.quantize(x, spec, backend="cpu").codes, expected.codes)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "spec", [S(), S(block=(16, 16)), S("mxfp4"), S("fp8", (128, 128)), S(transform=qt.Hadamard(64))]
)
def test_any_shape_and_stride(spec: S, backend: str) -> None:
    bound = 0.16
    for rows in (*range(1, 34), 127, 128, 129):
        x = torch.randn(rows, 200)
        q = qt.quantize(x, spec, backend=backend)
        assert float((q.dequantize(inverse=True) - x).norm() / x.norm()) < bound, rows
    x = torch.randn(40, 6, 90).transpose(0, 2)[::2]
    assert torch.equal(
        qt.quantize(x, spec, backend=backend).codes.view(torch.uint8),
        qt.quantize(x.contiguous(), spec, backend=backend).codes.view(torch.uint8),
    )
    broadcast = torch.randn(1, 64).expand(32, 64)
    assert qt.quantize(broadcast, spec, backend=backend).dequantize(inverse=True).shape == (32, 64)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("spec", supported_specs()[::5])
def test_nothing_in_nothing_out(spec: S, backend: str) -> None:
    for shape in ((0, 64), (3, 0, 64), (0,), (5, 0)):
        q = qt.quantize(torch.empty(shape), spec, backend=backend)
        assert q.dequantize().shape == shape and q.amax.item() == 0


def test_dim_moves_last() -> None:
    x = torch.randn(40, 24)
    q, t = qt.quantize(x, "nvfp4", dim=0), qt.quantize(x.t(), "nvfp4")
    assert q.shape == (24, 40) and torch.equal(q.codes, t.codes) and torch.equal(q.dequantize(), t.dequantize())
    assert qt.quantize(torch.randn(2, 48, 5), "nvfp4", dim=1).shape == (2, 5, 48)


def test_shapes_and_dtypes_of_the_parts() -> None:
    q = qt.quantize(torch.randn(2, 3, 48), "nvfp4")
    assert q.codes.shape == (2, 3, 24) and q.codes.dtype == torch.uint8
    assert q.scales.shape == (2, 3, 3) and q.scales.dtype == torch.float8_e4m3fn
    assert q.amax.shape == (1,) and q.amax.dtype == torch.float32
    q = qt.quantize(torch.randn(30, 48), S(block=(16, 16)))
    assert q.codes.shape == (32, 24) and q.scales.shape == (2, 3)
    q = qt.quantize(torch.randn(4, 64), "mxfp4")
    assert q.scales.dtype == torch.uint8 and q.scales.shape == (4, 2)
    q = qt.quantize(torch.randn(4, 300), "fp8")
    assert q.codes.dtype == torch.float8_e4m3fn and q.codes.shape == (4, 384)
    assert q.scales.dtype == torch.float32 and q.scales.shape == (4, 3)


@pytest.mark.parametrize("spec", supported_specs())
def test_padding_changes_no_real_element(spec: S) -> None:
    x = torch.randn(40, 50)
    wide = torch.zeros(48, 400)
    wide[:40, :50] = x
    a, b = qt.quantize(x, spec, seed=1), qt.quantize(wide, spec, seed=1)
    assert torch.equal(a.amax, b.amax)
    assert torch.equal(a.dequantize(), b.dequantize()[:40, :50])


def test_square_blocks_transpose_exactly() -> None:
    w = torch.randn(64, 96)
    for scale in ("to-6", "four-over-six", "search"):
        a, b = (qt.quantize(t, S(block=(16, 16), scale=scale, error="absmax")) for t in (w, w.t()))
        assert torch.equal(unpack(a.codes).t(), unpack(b.codes))
        assert torch.equal(a.scales.view(torch.uint8).t(), b.scales.view(torch.uint8))


def test_relative_errors_of_gaussian_data() -> None:
    """Figures measured elsewhere for 1024 x 1024 N(0, 1), to half a percent of their value."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3))
    expected = {
        S(): 0.0952, S(block=(16, 16)): 0.1114, S(rounding="stochastic"): 0.137, S("mxfp4", scale="floor"): 0.1149,
        S("mxfp4", scale="ceil"): 0.1442, S("mxfp4", scale="even"): 0.1119, S("mxfp4"): 0.1155,
    }  # fmt: skip
    for spec, error in expected.items():
        ours = float((qt.quantize(x, spec).dequantize() - x).norm() / x.norm())
        assert abs(ours / error - 1) < 0.01, (spec, ours)
    base = (qt.quantize(x, S()).dequantize() - x).square().sum()
    ratio = lambda spec: float((qt.quantize(x, spec).dequantize() - x).square().sum() / base)  # noqa: E731
    assert abs(ratio(S(scale="four-over-six")) - 0.836) < 0.01
    assert abs(ratio(S(scale="search")) - 0.730) < 0.01


@pytest.mark.parametrize("amax,codes", [(1, [125] * 4), (3, [126, 127, 126, 126]), (3.01, [126, 127, 126, 127]),
                                        (3.5, [126, 127, 127, 127]), (4, [127] * 4), (5, [127, 128, 127, 127]),
                                        (6, [127, 128, 127, 127]), (6.01, [127, 128, 127, 128]),
                                        (7, [127, 128, 128, 128]), (8, [128] * 4)])  # fmt: skip
def test_mx_scale_rules(amax: float, codes: list[int]) -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = -amax
    for rule, code in zip(("floor", "ceil", "even", "rceil"), codes, strict=True):
        assert qt.quantize(x, S("mxfp4", scale=rule)).scales.item() == code, rule


def test_mx_extremes() -> None:
    for value, rule, code in ((1e-45, "rceil", 0), (1e-45, "floor", 0), (3.4e38, "floor", 252), (2e38, "ceil", 253)):
        q = qt.quantize(torch.full((1, 32), value), S("mxfp4", scale=rule))
        assert q.scales.item() == code and q.dequantize().isfinite().all()
    x = torch.tensor([k * 2.0**-9 for k in range(8)] + [448.0] + [0.0] * 23)
    assert torch.equal(qt.quantize(x, "mxfp8").dequantize(), x)  # subnormal elements keep their step


def test_fp8_scales() -> None:
    x = torch.zeros(1, 256)
    x[0, 0] = 3.0
    q = qt.quantize(x, "fp8")
    assert q.scales.tolist() == [[3.0 / 448, 1.0]] or torch.equal(q.scales, torch.tensor([[3.0, 448.0]]) / 448)
    assert qt.quantize(x, S("fp8", scale="pow2")).scales[0, 0] == 2.0**-7
    q = qt.quantize(torch.full((1, 128), 1e-44), "fp8")
    assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_zero_scale(backend: str) -> None:
    x = torch.cat([torch.full((16,), -1e-7), torch.ones(16)])
    q = qt.quantize(x, "nvfp4", backend=backend)
    assert q.scales.float().tolist() == [0.0, 448.0] and q.codes[:8].tolist() == [0xFF] * 8
    assert q.dequantize()[:16].abs().max() == 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_scale_rounding_up_never_clips(backend: str) -> None:
    x = torch.randn(64, 256)
    up = qt.quantize(x, S(scale_rounding="up"), backend=backend)
    ideal = x.abs().view(64, 16, 16).amax(-1) / 6 / up.tensor_scale
    assert (up.scales.float() * (1 + 1e-6) >= ideal).all()
    nearest = qt.quantize(x, S(), backend=backend)
    step = up.scales.view(torch.uint8).int() - nearest.scales.view(torch.uint8).int()
    assert set(step.unique().tolist()) == {0, 1}


def test_codes_are_the_nearest_under_the_stored_scale() -> None:
    x = torch.randn(32, 64)
    for spec in (S(), S(scale="four-over-six"), S(scale="search"), S("mxfp4")):
        q = qt.quantize(x, spec)
        unit = q.scale_values() * q.tensor_scale
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        best = (x.abs()[..., None] - grid * unit[..., None]).abs().amin(-1)
        assert torch.allclose((q.dequantize() - x).abs(), best, atol=1e-6)


def test_four_over_six_picks_the_smaller_error_and_search_beats_it() -> None:
    x = torch.randn(64, 128)

    def errors(spec: S) -> torch.Tensor:
        return (qt.quantize(x, spec).dequantize() - x).view(64, 8, 16).square().sum(-1)

    both = errors(S(scale="four-over-six"))
    assert (both <= errors(S(scale_max=256)) + 1e-6).all()
    search = errors(S(scale="search"))
    for m in (0, 4, 20):
        assert len(SEARCH_MULTIPLIERS) == 21 and SEARCH_MULTIPLIERS[m] == torch.tensor(0.8 + 0.05 * m).item()
    assert (search <= errors(S()) + 1e-6).all()


def test_choice_comes_from_nearest_rounding_under_stochastic() -> None:
    x = torch.randn(64, 128)
    for scale in ("four-over-six", "search"):
        near, drawn = (qt.quantize(x, S(scale=scale, rounding=r), seed=4) for r in ("nearest", "stochastic"))
        assert torch.equal(near.scales.view(torch.uint8), drawn.scales.view(torch.uint8))
        assert not torch.equal(near.codes, drawn.codes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", [S(), S(block=(16, 16)), S("mxfp4"), S("mxfp8"), S("fp8"), S("fp8", scale="pow2"),
                                  S(transform="hadamard"), S(scale="four-over-six")])  # fmt: skip
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_non_finite_never_passes_in_silence(spec: S, value: float, backend: str) -> None:
    x = torch.randn(32, 256)
    x[3, 5] = value
    with pytest.raises(ValueError, match=r"received NaN or infinity \(1 of 8192 elements\)"):
        qt.quantize(x, spec, backend=backend)
    deferred = qt.quantize(x, spec, nonfinite="defer", backend=backend)
    assert not torch.isfinite(deferred.amax).any()
    assert not torch.isfinite(deferred.dequantize()[3, 5])
    clipped = qt.quantize(x, spec, nonfinite="saturate", backend=backend)
    finite = x[torch.isfinite(x)]
    replaced = 0.0 if value != value else finite.abs().max() * (1 if value > 0 else -1)
    x[3, 5] = replaced
    assert torch.equal(clipped.codes.view(torch.uint8), qt.quantize(x, spec, backend=backend).codes.view(torch.uint8))


def test_eight_bit_floats_are_inputs_too() -> None:
    x = torch.randn(8, 64)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        small = x.to(dtype)
        assert torch.equal(qt.quantize(small, "nvfp4").codes, qt.quantize(small.float(), "nvfp4").codes)


def test_all_infinite_saturates_to_zero() -> None:
    assert qt.quantize(torch.full((16,), float("inf")), "nvfp4", nonfinite="saturate").dequantize().abs().max() == 0


def test_bad_arguments() -> None:
    x = torch.randn(4, 16)
    with pytest.raises(ValueError, match="0-d tensor"):
        qt.quantize(torch.tensor(1.0), "nvfp4")
    with pytest.raises(ValueError, match=r"floating dtype, received torch.int64"):
        qt.quantize(torch.arange(16), "nvfp4")
    with pytest.raises(ValueError, match="takes a torch tensor, received ndarray"):
        qt.quantize(x.numpy(), "nvfp4")
    with pytest.raises(ValueError, match="nonfinite must be one of"):
        qt.quantize(x, "nvfp4", nonfinite="ignore")
    with pytest.raises(ValueError, match="backend must be one of"):
        qt.quantize(x, "nvfp4", backend="fast")


def test_named_backend_is_honoured_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_cpu, "obstacle", lambda: "no C++ compiler here")
    x = torch.randn(4, 16)
    with pytest.raises(ValueError, match="cannot run here: no C\\+\\+ compiler here"):
        qt.quantize(x, "nvfp4", backend="cpu")
    assert qt.quantize(x, "nvfp4").codes.shape == (4, 8)  # auto falls back to the reference
    with pytest.raises(ValueError, match="needs a tensor on the CPU"):
        qt.quantize(x.to("meta"), "nvfp4", backend="cpu", nonfinite="defer")


def test_meta_tensors_give_shapes() -> None:
    q = qt.quantize(torch.randn(6, 40, device="meta"), "nvfp4", nonfinite="defer")
    assert q.codes.shape == (6, 24) and q.codes.is_meta


def test_empty_parts_matches_what_is_made() -> None:
    x = torch.randn(2, 5, 70)
    for spec in supported_specs():
        for made, empty in zip(
            (lambda q: (q.codes, q.scales, q.amax))(qt.quantize(x, spec)), empty_parts(x, spec), strict=True
        ):
            assert made.shape == empty.shape and made.dtype == empty.dtype


def test_tiny_values_next_to_a_large_one_are_reported_as_lost() -> None:
    x = torch.full((1, 64), 1e-6)
    x[0, 0] = 1.0
    assert (qt.quantize(x, "nvfp4").dequantize() == 0).float().mean() > 0.9


def test_input_is_never_modified_and_graph_is_left() -> None:
    x = torch.randn(8, 33, requires_grad=True)
    before = x.detach().clone()
    q = qt.quantize(x, S(rounding="stochastic", transform="hadamard"))
    assert torch.equal(x, before) and not q.dequantize().requires_grad


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_custom_operation_keeps_its_promises(backend: str) -> None:
    """Shapes, dtypes and strides of the fake agree with the real ones, for transposed inputs too."""
    for spec in (S(), S(block=(16, 16), rounding="stochastic"), S("fp8", transform="hadamard"), S("mxfp4")):
        key = torch.tensor([1, 2]) if spec.stochastic else None
        for x in (torch.randn(48, 40), torch.randn(40, 48).t(), torch.randn(3, 16, 5).transpose(0, 1)):
            torch.library.opcheck(torch.ops.quatrain.quantize.default, (x, spec.to_json(), key, backend))


def test_padding_rows_and_signs_agree_between_backends() -> None:
    x = torch.randn(3, 32)
    for signs in ((-1, 1) * 8, None, "fixed"):
        h = qt.Hadamard(16, signs)
        for spec in (S(block=(16, 16), transform=h), S("mxfp4", (32, 32), transform=h)):
            a, b = (qt.quantize(x, spec, backend=k) for k in ("reference", "cpu"))
            assert torch.equal(a.codes, b.codes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_backends_agree_on_deferred_non_finite_input(value: float) -> None:
    x = torch.randn(32, 256)
    x[3, 5] = value
    for spec in supported_specs():
        a, b = (qt.quantize(x, spec, nonfinite="defer", backend=k) for k in ("reference", "cpu"))
        for part in ("codes", "scales"):
            assert torch.equal(getattr(a, part).view(torch.uint8), getattr(b, part).view(torch.uint8)), (spec, part)
        assert torch.equal(a.amax.isnan(), b.amax.isnan())


def test_overflow_inside_says_so() -> None:
    with pytest.raises(ValueError, match="overflow there"):
        qt.quantize(torch.full((1, 16), 60000.0).half(), S(transform=qt.Hadamard(16, None)))
    with pytest.raises(ValueError, match="overflow there"):
        qt.quantize(torch.full((1, 16), 1e300, dtype=torch.float64), "nvfp4", nonfinite="saturate")


def test_quantize_inside_a_compiled_function() -> None:
    torch._dynamo.reset()
    spec = S(scale="four-over-six")

    def roundtrip(x: torch.Tensor) -> torch.Tensor:
        return qt.quantize(x, spec, nonfinite="defer").dequantize()

    x = torch.randn(16, 64)
    assert torch.equal(torch.compile(roundtrip, backend="aot_eager", fullgraph=True)(x), roundtrip(x))
