"""QuantSpec: defaults resolve once, illegal pairs raise with rule and remedy, values round-trip."""

import dataclasses

import pytest

import quatrain as qt
from quatrain.kernels.quantize import supported_specs

S = qt.QuantSpec


def test_defaults_per_format() -> None:
    assert (S().block, S().scale, S().scale_max) == ((1, 16), "to-6", 448)
    assert (S("mxfp4").block, S("mxfp4").scale, S("mxfp4").scale_max) == ((1, 32), "rceil", None)
    assert (S("mxfp8").block, S("fp8").block, S("fp8").scale) == ((1, 32), (1, 128), "fp32")
    assert S(scale="four-over-six").scale_max == 256 and S(scale="search").scale_max == 448
    assert S(scale="to-4").constant == 1792 and S(scale="four-over-six").constant == 1536 and S().constant == 2688
    assert S(transform="hadamard").transform == qt.Hadamard(16, "fixed")
    assert S().bits_per_element == 4.5 and S("mxfp4").bits_per_element == 4.25


def test_is_a_frozen_hashable_value() -> None:
    assert S(block=[16, 16]) == S(block=(16, 16)) and len({S(), S("nvfp4")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        S().format = "mxfp4"


@pytest.mark.parametrize(
    "spec", [*supported_specs(), S(transform=qt.Hadamard(64, None)), S(transform=qt.Hadamard(4, (1, -1, 1, 1)))]
)
def test_round_trips(spec) -> None:
    assert S.from_json(spec.to_json()) == spec and S.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "nvfp5"}, "format must be one of nvfp4, mxfp4, mxfp8, fp8, received 'nvfp5'"),
        ({"block": (1, 32)}, r"block of format=\"nvfp4\" must be one of .*received \(1, 32\)"),
        ({"format": "mxfp4", "scale": "four-over-six"}, "factor of 1.5"),
        ({"format": "mxfp8", "scale": "search"}, "factor of 1.5"),
        ({"format": "fp8", "scale": "to-4"}, "factor of 1.5"),
        ({"format": "mxfp4", "scale": "pow2"}, "rceil, floor, ceil, even"),
        ({"scale": "floor"}, "to-6, to-4, four-over-six, search"),
        ({"error": "rmse"}, "mse, mae, absmax"),
        ({"scale_max": 300}, "448 or 256"),
        ({"format": "fp8", "scale_max": 448}, "nvfp4 only"),
        ({"format": "mxfp4", "rounding": "stochastic-unbiased"}, 'use rounding="stochastic"'),
        ({"format": "mxfp4", "scale_rounding": "up"}, "nvfp4 only"),
        ({"rounding": "floor"}, "nearest, stochastic"),
        ({"transform": "dct"}, "hadamard"),
        ({"format": "mxfp4", "transform": 16}, "Hadamard"),
    ],
)
def test_illegal_pairs_raise(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        S(**arguments)


def test_hadamard_sizes() -> None:
    for size in (4, 16, 32, 64, 128):
        assert S(transform=qt.Hadamard(size)).padding == max(16, size)
    assert S("mxfp4", transform=qt.Hadamard(16)).padding == 32
    with pytest.raises(ValueError, match="one of"):
        qt.Hadamard(12)
    with pytest.raises(ValueError, match="16 values of"):
        qt.Hadamard(16, (1, -1))
    with pytest.raises(ValueError, match="16 values of"):
        qt.Hadamard(16, (2,) * 16)


def test_one_meaning_has_one_form() -> None:
    assert qt.Hadamard(16, qt.Hadamard().sign_vector()) == qt.Hadamard()
    with pytest.raises(ValueError, match=r"received \(1.0, 16.0\)"):
        S(block=[1.0, 16.0])
    with pytest.raises(ValueError, match="one of"):
        qt.Hadamard(16.0)


def test_unknown_key_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown key 'roundings'.*valid keys: format, block"):
        S.from_dict({"format": "nvfp4", "roundings": "nearest"})
