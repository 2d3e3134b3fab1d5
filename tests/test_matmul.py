"""Products of quantized operands: exact up to accumulation order, padded length contracted, mismatches refused."""

import pytest
import torch

import quatrain as qt
from quatrain.kernels.matmul import gemm

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
