"""Amax of a split linear's operands, x and x less its part in a subspace: to the bit; interpreted without a GPU."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import quatrain as qt
from quatrain.kernels import quantize_triton

pytest.importorskip("triton", reason="triton has no build for this platform")

from quatrain.kernels import lowrank_triton as kernels  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN, RHT = qt.QuantSpec(), qt.QuantSpec(transform="hadamard")


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """NumPy, which runs the interpreter, warns of what fp32 on a GPU does in silence."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


def operands(rows: int, columns: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, U and basis; their products are exact in fp32, so that no order of sums shows in a bit."""
    generator = torch.Generator().manual_seed(rows + columns + rank)
    u = torch.randint(-8, 9, (rows, 2 * rank), generator=generator).bfloat16() / 8
    basis = torch.randint(-4, 5, (rank, columns), generator=generator).bfloat16() / 16
    x = torch.randn(rows, columns, generator=generator).bfloat16()
    return x.to(DEVICE), u.to(DEVICE)[:, rank:], basis.to(DEVICE)


def check(x: torch.Tensor, u: torch.Tensor, basis: torch.Tensor, column: qt.QuantSpec) -> list[float]:
    """Both amaxes, after comparing them with those of the plain kernel over x' in memory."""
    found = kernels.projected_amaxes(x, u, basis, column)
    rest = (x.float() - u.float() @ basis.float()).bfloat16()
    wanted = torch.cat([quantize_triton.amaxes(x, PLAIN, None)[:1], quantize_triton.amaxes(rest, None, column)[1:]])
    assert torch.equal(found.isnan(), wanted.isnan()), (found, wanted)
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num()), (found, wanted)
    return found.tolist()


SHAPES = [(64, 128, 32), (37, 48, 16), (50, 176, 48), (16, 16, 128)]


@pytest.mark.parametrize("column", [RHT, PLAIN], ids=["hadamard", "plain"])
@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_largest_magnitudes_to_the_bit(rows: int, columns: int, rank: int, column: qt.QuantSpec) -> None:
    x, u, basis = operands(rows, columns, rank)
    assert all(check(x, u, basis, column))


def test_every_strip_of_rows_counts() -> None:
    x, u, basis = operands(530, 16, 16)
    x[529, 15], x[3, 2] = 1000.0, 2000.0
    assert check(x, u, basis, RHT)[0] == 2000.0


@pytest.mark.parametrize("place", [(0, 0), (36, 47)])
def test_each_place_counts(place: tuple[int, int]) -> None:
    x, u, basis = operands(37, 48, 16)
    x[place] = 512.0
    rest = (x.float() - u.float() @ basis.float())[place].bfloat16()
    assert check(x, u, basis, PLAIN) == [512.0, rest.abs().item()]


@pytest.mark.parametrize("column", [RHT, PLAIN], ids=["hadamard", "plain"])
def test_not_a_number_and_infinity_come_through(column: qt.QuantSpec) -> None:
    inf, nan = float("inf"), float("nan")
    for second in (1, 4, 8, 11):  # two infinities of one group meet in some stage, as a NaN
        x, u, basis = operands(48, 32, 16)
        x[16, 5] = x[16 + second, 5] = inf
        row, turned = check(x, u, basis, column)
        assert row == inf and (turned != turned) == (column is RHT)
    x, u, basis = operands(48, 32, 16)
    x[7, 3] = -inf
    assert check(x, u, basis, column) == [inf, inf]
    x[7, 3] = 3.0e38
    x[8, 3] = 3.0e38
    assert check(x, u, basis, column)[1] == (inf if column is RHT else x[7, 3].item())
    x[40, 31] = nan
    assert all(value != value for value in check(x, u, basis, column))


def test_zeros_and_no_tokens() -> None:
    x, u, basis = operands(20, 32, 16)
    assert kernels.projected_amaxes(x * 0, u * 0, basis, RHT).tolist() == [0.0, 0.0]
    assert kernels.projected_amaxes(x[:0], u[:0], basis, RHT).tolist() == [0.0, 0.0]


def test_rows_apart_in_memory() -> None:
    x, u, basis = operands(33, 80, 16)
    wide = torch.full((33, 96), 1e30, dtype=torch.bfloat16, device=DEVICE)
    wide[:, :80] = x
    assert torch.equal(
        kernels.projected_amaxes(wide[:, :80], u, basis, RHT), kernels.projected_amaxes(x, u, basis, RHT)
    )
