"""Packing, swizzle, decoding, files."""

import pytest
import torch

import quatrain as qt
from quatrain.formats import pack, swizzle_scales, unpack, unswizzle_scales


def test_pack_puts_the_even_index_low() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    assert pack(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack(pack(codes)), codes)
    assert unpack(torch.empty(0, 4, dtype=torch.uint8)).shape == (0, 8)
    with pytest.raises(ValueError, match="even last dimension, received 3"):
        pack(torch.zeros(3, dtype=torch.uint8))


def test_swizzle_offsets() -> None:
    scales = torch.arange(256 * 8).reshape(256, 8)
    flat = swizzle_scales((scales % 251).to(torch.uint8))
    for (r, c), offset in {
        (0, 0): 0,
        (1, 0): 16,
        (32, 0): 4,
        (31, 3): 499,
        (127, 3): 511,
        (0, 4): 512,
        (128, 0): 1024,
        (129, 5): 1553,
    }.items():
        assert flat[offset] == scales[r, c] % 251, (r, c)


@pytest.mark.parametrize("shape", [(1, 5), (100, 1), (129, 5), (128, 4), (300, 9)])
def test_swizzle_round_trip(shape: tuple[int, int]) -> None:
    scales = torch.randint(1, 127, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    flat = swizzle_scales(scales)
    assert flat.dtype == scales.dtype and flat.numel() % 512 == 0
    assert torch.equal(unswizzle_scales(flat, shape).view(torch.uint8), scales.view(torch.uint8))
    assert int((flat.view(torch.uint8) == 0).sum()) == flat.numel() - scales.numel()  # padding is zero
    with pytest.raises(ValueError, match="must hold"):
        unswizzle_scales(flat[:-1], shape)


def test_swizzle_wants_a_matrix() -> None:
    with pytest.raises(ValueError, match="takes a matrix"):
        swizzle_scales(torch.zeros(3, dtype=torch.uint8))


SPECS = [qt.QuantSpec(), qt.QuantSpec(block=(16, 16)), qt.QuantSpec("mxfp4"), qt.QuantSpec("mxfp8"),
         qt.QuantSpec("fp8"), qt.QuantSpec(transform="hadamard", scale="four-over-six")]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_save_and_load(spec: qt.QuantSpec, tmp_path) -> None:
    q = qt.quantize(torch.randn(3, 7, 50), spec)
    q.save(tmp_path / "q.safetensors")
    back = qt.QTensor.load(tmp_path / "q.safetensors")
    assert back.spec == q.spec and back.shape == q.shape
    for name in ("codes", "scales", "amax"):
        ours, theirs = getattr(q, name), getattr(back, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(q.dequantize(), back.dequantize())


def test_load_refuses_what_is_not_whole(tmp_path) -> None:
    path = tmp_path / "q.safetensors"
    with pytest.raises(FileNotFoundError, match="no quantized tensor"):
        qt.QTensor.load(path)
    qt.quantize(torch.randn(8, 64), "nvfp4").save(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        qt.QTensor.load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        qt.QTensor.load(path)
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="holds no quantized tensor"):
        qt.QTensor.load(path)

    save_file({"codes": torch.zeros(1)}, path, metadata={"quatrain": "99"})
    with pytest.raises(ValueError, match="file version 1, received version '99'"):
        qt.QTensor.load(path)


def test_block_values_are_exact_in_bf16() -> None:
    x = torch.randn(64, 64) * torch.logspace(-6, 3, 64)[:, None]
    q = qt.quantize(x, "nvfp4")
    assert torch.equal(q.block_values(torch.bfloat16).float(), q.block_values())


def test_dequantize_crops_only_after_the_inverse() -> None:
    x = torch.randn(5, 27)
    q = qt.quantize(x, qt.QuantSpec(transform="hadamard"))
    assert q.shape == (5, 27) and q.padded_length == 32
    assert q.dequantize().shape == (5, 32)
    assert q.dequantize(inverse=True).shape == (5, 27)
    plain = qt.quantize(x, "nvfp4")
    assert plain.dequantize().shape == plain.dequantize(inverse=True).shape == (5, 27)
    back = q.dequantize(inverse=True)
    assert 0.05 < float((back - x).norm() / x.norm()) < 0.13
    assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_prints_short() -> None:
    text = repr(qt.quantize(torch.randn(64, 64), "nvfp4"))
    assert "shape=(64, 64), 4.5 bits" in text and len(text) < 300


def test_bytes() -> None:
    q = qt.quantize(torch.randn(256, 256), "nvfp4")
    assert q.nbytes == 256 * 256 * 9 // 16 + 4
    assert qt.quantize(torch.randn(256, 256), qt.QuantSpec(block=(16, 16))).nbytes == 256 * 128 + 256 + 4
