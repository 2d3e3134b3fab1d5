"""The Triton twins give the reference's bits: on a GPU where there is one, else in Triton's interpreter.

The interpreter takes a tenth of a second for each program, so there the shapes are small and the specs fewer.
"""

import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import quatrain as qt
from quatrain.kernels.quantize import quantize_parts, quantize_reference, supported_specs
from quatrain.kernels.rounding import make_key

pytest.importorskip("triton", reason="triton has no build for this platform")

from quatrain.kernels import quantize_triton  # noqa: E402
from quatrain.kernels.operands import quantize_both  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
KEY = make_key(3, 5, DEVICE)


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """NumPy, which runs the interpreter, warns of what fp32 on a GPU does in silence."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


def fast_specs() -> list[qt.QuantSpec]:
    """Every supported spec that the NVFP4 kernels serve, with and without a transform."""
    x = torch.zeros(1, 16)
    specs = [dataclasses.replace(s, transform=t) for s in supported_specs() for t in (None, "hadamard")]
    return [s for s in specs if quantize_triton.is_fast(x, s)]


def few(specs: list[qt.QuantSpec]) -> list[qt.QuantSpec]:
    """One spec for each rule, rounding, error and transform that makes the kernels differ."""
    kept = {}
    for spec in specs:
        candidates = spec.scale == "four-over-six"
        alike = (spec.scale, spec.rounding, spec.hadamard is None, spec.error, spec.scale_rounding)
        if (
            not GPU
            and candidates
            and (spec.error != "mse")
            and (spec.rounding != "nearest" or spec.hadamard is not None)
        ):
            continue
        kept.setdefault(alike, spec)
    return list(kept.values())


def inputs() -> list[torch.Tensor]:
    """Ragged, of a wide range with subnormals, and of zeros; more of them on a GPU."""
    torch.manual_seed(0)
    wide = torch.randn(17, 40) * torch.logspace(-40, 2, 17)[:, None]
    wide[3] = 0.0
    found = [wide.bfloat16()]
    if GPU:
        found += [torch.randn(4096, 4096).bfloat16(), (torch.randn(4096, 4096) ** 5).bfloat16()]
    return [x.to(DEVICE) for x in found]


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal to the bit; NaN to NaN."""
    if want.is_floating_point() and want.element_size() > 1 and bool(want.isnan().all()):
        return bool(got.isnan().all())
    return torch.equal(got.contiguous().flatten().view(torch.uint8), want.contiguous().flatten().view(torch.uint8))


def assert_parts(got: object, want: tuple[torch.Tensor, ...], what: object) -> None:
    for name, a, b in zip(("codes", "scales", "amax"), got, want, strict=True):
        assert same(a, b), (what, name)


def block_values(parts: tuple[torch.Tensor, ...], shape: torch.Size, spec: qt.QuantSpec) -> torch.Tensor:
    return qt.QTensor(*parts, shape, spec).block_values(torch.bfloat16)


@pytest.mark.parametrize("spec", few(fast_specs()), ids=lambda s: s.to_json())
def test_rows_and_columns(spec: qt.QuantSpec) -> None:
    for x in inputs():
        rows = quantize_reference(x, spec, KEY)
        columns = quantize_reference(x.t().contiguous(), spec, KEY)
        got = quantize_triton.quantize_pair(x, spec, spec, KEY, KEY)
        assert_parts(got[0], rows, "rows of both")
        assert_parts(got[1], columns, "columns of both")
        assert_parts(quantize_triton.quantize_pair(x, spec, None, KEY)[0], rows, "rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = (torch.randn(17, 40, device=DEVICE) * (1e36 if dtype == torch.float32 else 1e3)).to(dtype)
    for spec in (qt.QuantSpec(transform="hadamard"), qt.QuantSpec(scale="four-over-six", rounding="stochastic")):
        got = quantize_triton.quantize_pair(x, spec, spec, KEY, KEY)
        assert_parts(got[0], quantize_reference(x, spec, KEY), "rows")
        assert_parts(got[1], quantize_reference(x.t().contiguous(), spec, KEY), "columns")


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_decoded_operands_are_those_codes(rounding: str) -> None:
    spec = qt.QuantSpec(rounding=rounding)
    rht = qt.QuantSpec(rounding=rounding, transform="hadamard")
    for x in inputs():
        row, column = quantize_triton.quantize_pair(x, spec, rht, KEY, KEY, decoded=(True, True))
        assert same(row[0], block_values(quantize_reference(x, spec, KEY), x.shape, spec))
        want = block_values(quantize_reference(x.t().contiguous(), rht, KEY), x.t().shape, rht)
        assert same(column[0], want.t())
        assert row[1] is None and column[1] is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_input(bad: float) -> None:
    x = torch.randn(16, 32, device=DEVICE).bfloat16()
    x[3, 3] = bad
    for spec in (qt.QuantSpec(), qt.QuantSpec(scale="four-over-six")):
        got = quantize_triton.quantize_pair(x, spec, spec)
        assert_parts(got[0], quantize_reference(x, spec, None), "rows")
        assert_parts(got[1], quantize_reference(x.t().contiguous(), spec, None), "columns")


def test_close_calls_of_four_over_six() -> None:
    """Blocks whose two errors are equal or nearly so: the quick comparison must leave them to the exact one."""
    torch.manual_seed(1)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = grid[torch.randint(8, (32, 32))] * torch.randint(0, 2, (32, 32)).sub(0.5).sign()
    x = torch.cat([x, x * (1 + 2**-9)]).to(DEVICE)
    for error in ("mse", "mae", "absmax"):
        spec = qt.QuantSpec(scale="four-over-six", error=error)
        assert_parts(quantize_triton.quantize_pair(x, spec, None)[0], quantize_reference(x, spec, None), error)


def test_empty_and_strided_input() -> None:
    spec = qt.QuantSpec()
    for shape in ((0, 32), (3, 0)):
        x = torch.zeros(shape, device=DEVICE)
        assert_parts(quantize_triton.quantize_pair(x, spec, None)[0], quantize_reference(x, spec, None), shape)
    x = torch.randn(16, 64, device=DEVICE)
    for view in (x.t(), x[:, 16:48], x[::2]):
        assert_parts(
            quantize_triton.quantize_matrix(view, spec, None), quantize_reference(view.contiguous(), spec, None), "view"
        )


def test_the_backend_is_honoured() -> None:
    x = torch.randn(4, 3, 40, device=DEVICE)
    a, b = qt.quantize(x, "nvfp4", backend="triton"), qt.quantize(x, "nvfp4", backend="reference")
    assert_parts((a.codes, a.scales, a.amax), (b.codes, b.scales, b.amax), "public call")
    assert a.codes.shape == b.codes.shape and a.scales.shape == b.scales.shape
    with pytest.raises(ValueError, match="compute capability 10|CUDA device"):
        if GPU and torch.cuda.get_device_capability()[0] >= 10:
            pytest.skip("this GPU has the instructions")
        qt.quantize(x, "nvfp4", backend="blackwell")


def test_stochastic_rounding_needs_a_key() -> None:
    spec = qt.QuantSpec(rounding="stochastic")
    with pytest.raises(ValueError, match="needs a key"):
        quantize_triton.quantize_pair(torch.zeros(16, 16, device=DEVICE), spec, None)


@pytest.mark.parametrize("decoded", [False, True])
def test_both_operands_from_one_call(decoded: bool) -> None:
    """What the linear calls, on any device: two packed operands, or two decoded ones."""
    x = torch.randn(33, 48, device=DEVICE).bfloat16()
    row, column = qt.QuantSpec(rounding="stochastic"), qt.QuantSpec(transform="hadamard")
    got = quantize_both(x, row.to_json(), column.to_json(), KEY, None, (decoded, decoded))
    for parts, matrix, spec in ((got[0], x, row), (got[1], x.t().contiguous(), column)):
        want = quantize_parts(matrix, spec.to_json(), KEY if spec.stochastic else None)
        if decoded:
            assert parts[1] is None and same(parts[0], block_values(want, matrix.shape, spec))
        else:
            assert_parts(parts, want, spec)
    assert quantize_both(x, None, None, None, None) == (None, None)
    assert quantize_both(x, row.to_json(), None, KEY, None)[1] is None


def test_division_by_a_constant_is_exact() -> None:
    """The corrected product with the reciprocal equals the quotient for every mantissa and every constant in use."""
    mantissas = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    divisors = {c for s in supported_specs() if s.format == "nvfp4" for c in (s.constant, s.element_max)}
    for divisor in sorted(np.float32(d) for d in divisors):
        inverse = np.float32(1) / divisor
        quotient = mantissas * inverse
        rest = (mantissas.astype(np.float64) - quotient.astype(np.float64) * np.float64(divisor)).astype(np.float32)
        corrected = (quotient.astype(np.longdouble) + rest.astype(np.longdouble) * np.longdouble(inverse)).astype(
            np.float32
        )
        assert np.array_equal(corrected, mantissas / divisor), divisor
