"""Codes and scales equal the public reference vectors, bit for bit, on every backend."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quatrain as qt
from quatrain.formats import unpack

GOLDEN = Path(__file__).parent / "golden"
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BACKENDS = ["reference", "cpu", pytest.param("triton", marks=[pytest.mark.gpu, NO_GPU])]

REFERENCE_VARIANTS = {
    "1d": qt.QuantSpec(),
    "1d_rht": qt.QuantSpec(transform="hadamard"),
    "2d": qt.QuantSpec(block=(16, 16)),
    **{
        f"{dims}_4over6_{error}_{scale_max}": qt.QuantSpec(
            block=block, scale="four-over-six", error=error.lower(), scale_max=scale_max
        )
        for dims, block in (("1d", None), ("2d", (16, 16)))
        for error in ("MAE", "MSE")
        for scale_max in ((256, 448) if dims == "1d" else (256,))
    },
}
PINNED_ORDER = {"amax": 3.25, "block_max": 2.4375, "to-6": [0x7E, 123], "divided": 122}
PACKAGE_RULES = {
    "static_6": {"scale": "to-6"},
    "static_4": {"scale": "to-4"},
    "mse": {"scale": "four-over-six", "error": "mse"},
    "mae": {"scale": "four-over-six", "error": "mae"},
    "abs_max": {"scale": "four-over-six", "error": "absmax"},
}


def quantize(x: torch.Tensor, spec: qt.QuantSpec | str, backend: str) -> qt.QTensor:
    """On the device that the backend is for; the result on the CPU."""
    return qt.quantize(x.cuda() if backend == "triton" else x, spec, backend=backend).to("cpu")


def assert_same(q: qt.QTensor, packed: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, where: str) -> None:
    scales, rows = q.scales.view(torch.uint8), q.spec.block_shape[0]
    if scale.shape != scales.shape:  # two-dimensional scales repeated over the block's rows
        scale = scale[::rows]
    assert torch.equal(scales, scale), f"{where}: {int((scales != scale).sum())} scales differ"
    # The references rotate fp32 by a matrix product, we by the butterfly of the definition: one step apart at most.
    steps = 1 if "f32.1d_rht" in where else 0
    assert (q.amax.view(torch.int32) - amax.view(torch.int32)).abs().max() <= steps, f"{where}: amax"
    zero = (scale == 0).repeat_interleave(q.spec.block_shape[1], dim=1).repeat_interleave(rows, dim=0)
    ours, theirs = (unpack(c).masked_fill(zero, 0) for c in (q.codes, packed))
    ours, theirs = ours.masked_fill(ours == 8, 0), theirs.masked_fill(theirs == 8, 0)
    assert torch.equal(ours, theirs), f"{where}: {int((ours != theirs).sum())} codes differ"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", sorted(REFERENCE_VARIANTS))
def test_nvfp4_reference(variant: str, backend: str) -> None:
    tensors = load_file(GOLDEN / "nvfp4_reference.safetensors")
    compared = 0
    for key in sorted(k for k in tensors if k.endswith(".packed") and k.split(".")[2] == variant):
        case, dtype, _, direction, _ = key.split(".")
        x = tensors[f"{case}.{dtype}.input"]
        q = quantize(x.t() if direction == "col" else x, REFERENCE_VARIANTS[variant], backend)
        stem = key.removesuffix("packed")
        assert_same(q, tensors[key], tensors[f"{stem}scale"], tensors[f"{stem}amax"], key)
        compared += 1
    assert compared >= 12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("four_over_six_*.safetensors")), ids=lambda p: p.stem)
def test_four_over_six(path: Path, backend: str) -> None:
    tensors = load_file(path)
    compared = 0
    for key in sorted(k for k in tensors if k.endswith(".packed") and not k.startswith("hw.")):
        *prefix, dims, rule, _ = key.split(".")
        rotated = prefix[0] if prefix else None
        x = tensors[f"{rotated}.rotated"] if rotated else tensors["input"]
        spec = qt.QuantSpec(block=(16, 16) if dims == "2d" else None, **PACKAGE_RULES[rule])
        q = quantize(x, spec, backend)
        stem = key.removesuffix("packed")
        assert_same(q, tensors[key], tensors[f"{stem}scale"], tensors[f"{stem}amax"], key)
        if f"{stem}dequant" in tensors:
            assert torch.equal(q.dequantize(), tensors[f"{stem}dequant"])
        compared += 1
    assert compared >= 8


def test_rotation_is_the_packages() -> None:
    for path in GOLDEN.glob("four_over_six_*.safetensors"):
        tensors = load_file(path)
        if "rht.rotated" in tensors:
            assert torch.equal(qt.Hadamard().forward(tensors["input"]), tensors["rht.rotated"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_operations_of_to_6(backend: str) -> None:
    """amax_b * (S_enc * 1/6) and (amax_b / 6) * S_enc differ in the last bit here, and in the byte that results."""
    amax, block_max = PINNED_ORDER["amax"], PINNED_ORDER["block_max"]
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = amax, block_max
    assert quantize(x, "nvfp4", backend).scales.view(torch.uint8).tolist()[0] == PINNED_ORDER["to-6"]
    other = quantize(x, qt.QuantSpec(scale="search"), backend)  # divides first
    assert other.spec.scale_max == 448
    encode = torch.tensor(2688.0) / torch.tensor(amax)
    divided = ((torch.tensor(block_max) / 6.0) * encode).to(torch.float8_e4m3fn).view(torch.uint8)
    assert int(divided) == PINNED_ORDER["divided"] != PINNED_ORDER["to-6"][1]


def test_worked_examples() -> None:
    """Section 1.5 of the format's public description: ramp, two blocks, underflow, two-dimensional scales."""
    q = qt.quantize(torch.arange(1, 17) / 4.0, "nvfp4")
    assert q.codes.numpy().tobytes().hex() == "2132445565667677" and q.scales.view(torch.uint8).item() == 0x7E
    i = torch.arange(16)
    x = torch.cat([(-1.0) ** i * (i + 1) / 8, (-1.0) ** (i // 2) * 0.05 * 2.0**-i]).float()
    q = qt.quantize(x, "nvfp4")
    assert q.codes.numpy().tobytes().hex() == "a1b2c4d5e5e6f6f757ab018800880088"
    assert q.scales.view(torch.uint8).tolist() == [0x7E, 0x53]
    q = qt.quantize(torch.stack([torch.full((16,), 1e-6), torch.ones(16)]), "nvfp4")
    assert q.codes[0].tolist() == [0x77] * 8 and q.scales.float().tolist() == [[0.0], [448.0]]
    assert q.dequantize()[0].abs().max() == 0
    r, c = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    w = ((32 * r + c) % 7 - 3).float()
    w[:, :16] *= 0.25
    q = qt.quantize(w, qt.QuantSpec(block=(16, 16)))
    assert q.scales.view(torch.uint8).tolist() == [[0x6E, 0x7E], [0x6E, 0x7E]]
    q = qt.quantize(torch.arange(16.0), qt.QuantSpec(transform="hadamard"))
    assert q.codes.numpy().tobytes().hex() == "df85855f7510a0f6" and q.amax.item() == 15.5
