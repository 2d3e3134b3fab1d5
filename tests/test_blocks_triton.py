"""The Triton kernels for every spec, and decoding: the reference's bits, on a GPU or in Triton's interpreter.

The interpreter takes a millisecond for each call of a device function, so there the inputs are tiny.
"""

import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import quatrain as qt
from quatrain.formats import FORMATS
from quatrain.kernels.quantize import empty_parts, quantize_reference, supported_specs
from quatrain.kernels.rounding import make_key

pytest.importorskip("triton", reason="triton has no build for this platform")

from quatrain.kernels.blocks_triton import quantize_blocks  # noqa: E402
from quatrain.kernels.decode_triton import decode  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
KEY = make_key(3, 5, DEVICE)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = (None, 4, 16, 32, 64, 128)
Spec = qt.QuantSpec
gpu_only = pytest.mark.skipif(not GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """NumPy, which runs the interpreter, warns of what fp32 on a GPU does in silence."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


def transforms(spec: Spec) -> list[Spec]:
    """The spec with every transform that its format allows."""
    found = []
    for size in SIZES:
        try:
            found.append(dataclasses.replace(spec, transform=None if size is None else qt.Hadamard(size)))
        except ValueError:
            continue
    return found


def turned() -> list[tuple[int, Spec]]:
    """Every supported spec, the transforms in turn; without a GPU not those that only draw with another constant."""
    found = [(i, transforms(s)[i % len(transforms(s))]) for i, s in enumerate(supported_specs())]
    alike = [s.scale == "four-over-six" and s.scale_max == 448 and s.stochastic for _, s in found]
    return [case for case, again in zip(found, alike, strict=True) if GPU or not again]


def same(got: Tensor | None, want: Tensor) -> bool:
    """Equal to the bit; NaN equal to NaN."""
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return False
    if want.dtype in (torch.float32, torch.bfloat16):
        bits = torch.int32 if want.dtype == torch.float32 else torch.int16
        equal = got.contiguous().view(bits) == want.contiguous().view(bits)
        return bool((equal | (got.isnan() & want.isnan())).all())
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def assert_same(x: Tensor, spec: Spec, cast: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    want = quantize_reference(x if cast is None else x.to(cast), spec, KEY)
    got = quantize_blocks(x, spec, KEY, cast=cast)
    for name, a, b in zip(("codes", "scales", "amax"), got, want, strict=True):
        assert same(a, b), (name, spec, tuple(x.shape), x.dtype, x.stride(), differences(a, b))
    return want


def differences(a: Tensor, b: Tensor) -> str:
    """How many elements differ, and the first few of them."""
    left, right = (t.contiguous().view(torch.uint8).flatten() for t in (a, b))
    places = (left != right).nonzero().flatten()
    return f"{len(places)} of {len(left)} bytes, at {places[:8].tolist()}: {left[places[:8]]}, not {right[places[:8]]}"


def block_values(parts: tuple[Tensor, Tensor, Tensor], x: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    return qt.QTensor(*parts, x.shape, spec).block_values(dtype)


def wide(rows: int, columns: int) -> Tensor:
    """Subnormals to the largest numbers, zeros of both signs, zero blocks."""
    x = torch.randn(rows, columns) * torch.logspace(-42, 37, rows)[:, None]
    x[1], x[2, ::2], x[3] = 0.0, -0.0, -0.0
    return x.to(DEVICE)


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.parametrize("i,spec", turned(), ids=[s.to_json() for _, s in turned()])
def test_every_spec(i: int, spec: Spec) -> None:
    x = torch.randn(5, 40, device=DEVICE) * torch.logspace(-3, 1, 5, device=DEVICE)[:, None]
    x = x.to(DTYPES[i % 3])
    assert_same(column_major(x) if i % 2 else x, spec)


@gpu_only
@pytest.mark.parametrize("spec", [s for _, s in turned()], ids=lambda s: s.to_json())
def test_larger_inputs(spec: Spec) -> None:
    inputs = [
        torch.randn(33, 77, device=DEVICE).bfloat16(),
        wide(130, 264),
        (torch.randn(512, 1024, device=DEVICE) ** 5).half(),
    ]
    for x in inputs:
        assert_same(x, spec)
        assert_same(column_major(x), spec)


EXTREME = [
    Spec(block=(16, 16)),
    Spec(block=(16, 16), scale="four-over-six", error="absmax", rounding="stochastic-unbiased"),
    Spec(block=(16, 16), scale="to-4", scale_rounding="up"),
    Spec("mxfp4", rounding="stochastic"),
    Spec("mxfp4", (32, 32), "even"),
    Spec("mxfp8", (32, 32), "floor", rounding="stochastic"),
    Spec("fp8", scale="pow2", rounding="stochastic"),
    Spec("fp8", (128, 128)),
]


@pytest.mark.parametrize("spec", EXTREME, ids=lambda s: s.to_json())
def test_extreme_inputs(spec: Spec) -> None:
    x = torch.randn(18, 40, device=DEVICE)
    x[2, 2], x[17, 20] = -float("inf"), float("inf")
    y = x.clone()
    y[16, 39] = float("nan")
    assert_same(wide(18, 40), spec)
    assert_same(x, spec)
    assert_same(y.bfloat16(), spec)


def test_ties_go_to_even() -> None:
    grid = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6], device=DEVICE)
    x = torch.cat([grid, -grid]).repeat(2, 1)
    for spec in (Spec(block=(16, 16)), Spec("mxfp4"), Spec("mxfp8")):
        assert_same(x, spec)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (1, 1), (17, 24), (9, 140)])
def test_shapes(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=DEVICE)
    for spec in (Spec(block=(16, 16)), Spec("mxfp8")):
        want = empty_parts(x, spec)
        codes, scales, amax = assert_same(x, spec)
        assert codes.shape == want[0].shape and scales.shape == want[1].shape and amax.shape == (1,)
        assert same(decode(codes, scales, spec), block_values((codes, scales, amax), x, spec, torch.bfloat16))


def test_views() -> None:
    x = torch.randn(36, 80, device=DEVICE).bfloat16()
    for view in (x.t(), x[::2, 8:72], x[:, ::2], x[:1].expand(20, 80), x[3:, 1:41]):
        assert_same(view, Spec(block=(16, 16)))


@pytest.mark.parametrize("transform", [None, "hadamard"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tensor_is_cast_first(dtype: torch.dtype, transform: str | None) -> None:
    x = torch.randn(16, 32, device=DEVICE)
    for spec in (Spec(block=(16, 16), transform=transform), Spec("mxfp4", (32, 32), transform=transform)):
        assert_same(x, spec, cast=dtype)
        assert_same(column_major(x), spec, cast=dtype)


def test_a_known_amax_is_used() -> None:
    x = torch.randn(16, 32, device=DEVICE)
    for spec in (Spec(block=(16, 16)), Spec("mxfp4")):
        want = quantize_reference(x, spec, None)
        got = quantize_blocks(x, spec, None, amax=want[2])
        assert all(same(a, b) for a, b in zip(got, want, strict=True)) and got[2] is want[2]


@pytest.mark.parametrize(
    "spec",
    [Spec(block=(16, 16)), Spec(scale="search"), Spec("mxfp4", rounding="stochastic"), Spec("mxfp8", (32, 32))],
    ids=lambda s: s.to_json(),
)
def test_decoded(spec: Spec) -> None:
    for x in (torch.randn(5, 40, device=DEVICE).bfloat16(), wide(5, 40)):
        want = quantize_reference(x, spec, KEY)
        values, scales, amax = quantize_blocks(x, spec, KEY, decoded=True)
        assert scales is None and same(amax, want[2])
        assert same(values, block_values(want, x, spec, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", [Spec(n, b) for n in FORMATS for b in FORMATS[n].blocks], ids=lambda s: s.to_json())
def test_decode(spec: Spec, dtype: torch.dtype) -> None:
    if not GPU and spec.block_shape[0] == 128 and dtype == torch.float32:
        pytest.skip("thirty-two programs, which differ from those of BF16 in the store alone")
    inputs = [wide(6, 40)]
    inputs[0][4, 3] = float("nan")
    if GPU:
        inputs += [
            torch.randn(17, 40, device=DEVICE),
            torch.randn(1000, 2000, device=DEVICE),
            torch.randn(4096, 4096, device=DEVICE),
        ]
    for x in inputs:
        parts = quantize_reference(x, spec, None)
        assert same(decode(parts[0], parts[1], spec, dtype), block_values(parts, x, spec, dtype))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_decode_every_code_and_scale(name: str) -> None:
    spec, packed = Spec(name), name == "nvfp4"
    scale = torch.arange(127 if packed else 256, dtype=torch.uint8, device=DEVICE)[:, None]
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(len(scale), 1)
    scales = scale.expand(-1, 32 if packed else 8).contiguous()
    if packed:
        scales = scales.view(torch.float8_e4m3fn)
    else:
        codes = codes.view(torch.float8_e4m3fn)
    keep = slice(None) if GPU else slice(0, None, 15)
    parts = (codes[keep], scales[keep], torch.ones(1, device=DEVICE))
    x = torch.empty(parts[0].shape[0], 512 if packed else 256)
    assert same(decode(parts[0], parts[1], spec), block_values(parts, x, spec, torch.bfloat16))


def test_what_cannot_be_done_is_refused() -> None:
    x = torch.zeros(2, 32, device=DEVICE)
    with pytest.raises(ValueError, match="needs a key"):
        quantize_blocks(x, Spec("mxfp4", rounding="stochastic"), None)
    with pytest.raises(ValueError, match="fp32 scales"):
        quantize_blocks(x, Spec("fp8"), None, decoded=True)
    for bad in (x.double(), x[0]):
        with pytest.raises(ValueError, match="matrices of"):
            quantize_blocks(bad, Spec("mxfp4"), None)
    codes, scales, _ = quantize_reference(x, Spec("mxfp4"), None)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        decode(codes, scales, Spec("mxfp4"), torch.float16)
    with pytest.raises(ValueError, match="need scales"):
        decode(codes, scales, Spec())
