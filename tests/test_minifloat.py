"""Every code of every minifloat: 16 of E2M1, 256 of E4M3 and E5M2, 256 scales of E8M0."""

import math

import pytest
import torch

from quatrain.formats import E2M1, E4M3, E5M2, E8M0


def test_e2m1_codes() -> None:
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1.values()[:8].tolist() == expected
    assert E2M1.values()[8:].tolist() == [-v for v in expected]
    assert math.copysign(1, E2M1.values()[8].item()) == -1
    assert E2M1.bits == 4 and E2M1.max_exponent == 2 and E2M1.min_exponent == 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_eight_bit_grids_are_torchs(fmt) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    ours, torchs = fmt.values(), codes.view(fmt.dtype).float()
    assert torch.equal(ours.isnan(), torchs.isnan())
    assert torch.equal(
        ours.nan_to_num(nan=7.0, posinf=8.0, neginf=-8.0), torchs.nan_to_num(nan=7.0, posinf=8.0, neginf=-8.0)
    )
    assert torch.equal(fmt.decode(codes).isnan(), torchs.isnan())
    assert fmt.values()[torch.isfinite(fmt.values())].max() == fmt.maximum


def test_e8m0_codes() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    values = E8M0.decode(codes).double()
    assert values[:255].tolist() == [2.0 ** (c - 127) for c in range(255)]
    assert values[255].isnan()
