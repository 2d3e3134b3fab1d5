"""Rounding: every tie of E2M1 and E4M3, the generator's vectors, and the law of stochastic rounding."""

import pytest
import torch

import quatrain as qt
from quatrain.formats import E2M1, E4M3
from quatrain.kernels.rounding import encode_nearest, encode_stochastic, make_key, random_bits

BACKENDS = ["reference", "cpu"]
VECTORS = {  # (seed, offset): two rows of five 16-bit numbers
    (0, 0): [[11774, 9214, 20432, 42004, 22889], [6349, 4052, 10191, 59512, 9808]],
    (2**64 - 1, 7): [[39157, 47524, 2367, 59435, 50247], [50107, 17202, 27398, 41456, 51365]],
}


def test_e2m1_ties_and_neighbours() -> None:
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for tie, code in ties.items():
        below, above = (torch.nextafter(torch.tensor(tie), torch.tensor(t)) for t in (0.0, 9.0))
        values = torch.tensor([tie, below, above])
        low = sum(tie > t for t in ties)
        assert encode_nearest(values, E2M1).tolist() == [code, low, low + 1], tie
        assert encode_nearest(-values, E2M1).tolist() == [code + 8, low + 8, low + 9]
    assert encode_nearest(torch.tensor([6.0, 7.0, 1e30, -1e30, -0.0, 0.0]), E2M1).tolist() == [7, 7, 7, 15, 8, 0]


def test_every_e2m1_code_survives() -> None:
    assert encode_nearest(E2M1.values(), E2M1).tolist() == list(range(16))


def test_e4m3_every_code_and_every_tie() -> None:
    grid = E4M3.values()[:127]
    assert torch.equal(encode_nearest(grid, E4M3).view(torch.uint8), torch.arange(127, dtype=torch.uint8))
    middles = (grid[:-1] + grid[1:]) / 2
    codes = encode_nearest(middles, E4M3).view(torch.uint8)
    lower = torch.arange(126, dtype=torch.uint8)
    assert torch.equal(codes, lower + (lower % 2))  # to the even code
    down = encode_nearest(torch.nextafter(middles, torch.tensor(0.0)), E4M3).view(torch.uint8)
    up = encode_nearest(torch.nextafter(middles, torch.tensor(1e9)), E4M3).view(torch.uint8)
    assert torch.equal(down, lower) and torch.equal(up, lower + 1)
    saturated = encode_nearest(torch.tensor([449.0, 1e9, -1e9, float("inf")]), E4M3).float()
    assert saturated.tolist() == [448, 448, -448, 448]


def test_generator_vectors() -> None:
    """The generator never changes: stored runs and checkpoints rely on these numbers."""
    assert random_bits(make_key(0, 0, torch.device("cpu")), 2, 5).tolist() == VECTORS[(0, 0)]
    assert random_bits(make_key(2**64 - 1, 7, torch.device("cpu")), 2, 5).tolist() == VECTORS[(2**64 - 1, 7)]
    assert random_bits(make_key(-1, 7, torch.device("cpu")), 2, 5).tolist() == VECTORS[(2**64 - 1, 7)]
    key = torch.tensor([5, 6])
    assert torch.equal(make_key(key[:1], key[1:], torch.device("cpu")), key)


def test_bits_do_not_depend_on_the_size_around_them() -> None:
    key = make_key(3, 4, torch.device("cpu"))
    assert torch.equal(random_bits(key, 9, 33)[:4, :7], random_bits(key, 4, 7))


def test_bits_are_uniform_and_uncorrelated() -> None:
    n = 1 << 20
    bits = random_bits(make_key(11, 0, torch.device("cpu")), 1024, n // 1024).double()
    others = {
        "offset": random_bits(make_key(11, 1, torch.device("cpu")), 1024, n // 1024).double(),
        "seed": random_bits(make_key(12, 0, torch.device("cpu")), 1024, n // 1024).double(),
        "row": bits.roll(1, 0),
        "column": bits.roll(1, 1),
        "two columns": bits.roll(2, 1),
        "high word": random_bits(make_key(11 + (1 << 32), 0, torch.device("cpu")), 1024, n // 1024).double(),
    }
    assert abs(bits.mean() - 32767.5) < 4 * 18918 / n**0.5
    for name, other in others.items():
        r = torch.corrcoef(torch.stack([bits.flatten(), other.flatten()]))[0, 1]
        assert abs(r) < 0.005, name
    for bit in range(16):
        share = ((bits.long() >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 4 * 0.5 / n**0.5, bit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("y", [2.0**-12, 0.001, 0.1, 0.3, 1.9, 3.3, 4.5])
def test_stochastic_rounding_is_unbiased(y: float, backend: str) -> None:
    """2**20 draws of y x scale beside a maximum of exactly 6 x scale, within four standard errors."""
    scale = 0.75
    x = torch.full((1 << 16, 32), y * scale)
    x[:, ::16] = 6 * scale  # the block's maximum: the scale is exact, nothing clips
    q = qt.quantize(x, qt.QuantSpec(rounding="stochastic"), seed=5, offset=9, backend=backend)
    drawn = q.dequantize().view(-1, 16)[:, 1:].double() / scale
    grid = E2M1.values()[:8].double()
    low, high = grid[grid <= y].max(), grid[grid > y].min()
    p = (y - low) / (high - low)
    error = (high - low) * (p * (1 - p) / drawn.numel()) ** 0.5
    assert drawn.numel() > 1 << 20 and set(drawn.unique().tolist()) <= {low.item(), high.item()}
    assert abs(drawn.mean() - y) < 4 * error + 2.0**-17 * (high - low)  # 16 bits resolve 2**-16 of a step
    flat = (drawn - drawn.mean()).flatten()
    assert abs((flat[1:] * flat[:-1]).mean() / flat.var()) < 0.01


def test_two_draws_are_uncorrelated() -> None:
    x = torch.full((4096, 32), 0.3)
    x[:, ::16] = 6.0
    spec = qt.QuantSpec(rounding="stochastic")
    base = qt.quantize(x, spec, seed=1, offset=0).dequantize()
    for other in (
        qt.quantize(x, spec, seed=1, offset=1),
        qt.quantize(x, spec, seed=2, offset=0),
    ):
        pair = torch.stack([base.flatten(), other.dequantize().flatten()])[:, (x == 0.3).flatten()]
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.01
    assert torch.equal(base, qt.quantize(x, spec, seed=1, offset=0).dequantize())
    rows = base[:, 1:16] - base[:, 1:16].mean()
    assert abs((rows[1:] * rows[:-1]).mean() / rows.var()) < 0.01


def test_bias_of_the_clipped_maximum_is_known() -> None:
    """Plain stochastic rounding clips a maximum whose scale was rounded down; the 16/17 style does not."""
    torch.manual_seed(0)
    x = torch.randn(256, 256)
    tops = x.abs().view(-1, 16).argmax(1)

    def slope(spec: qt.QuantSpec) -> float:
        mean = torch.stack([qt.quantize(x, spec, seed=s).dequantize() for s in range(100)]).mean(0)
        at = lambda t: t.view(-1, 16).gather(1, tops[:, None])  # noqa: E731
        return float((at(mean) * at(x)).sum() / at(x).square().sum())

    assert 0.98 < slope(qt.QuantSpec(rounding="stochastic")) < 0.995
    assert abs(slope(qt.QuantSpec(rounding="stochastic-unbiased")) - 1) < 0.002


def test_stochastic_on_e4m3() -> None:
    values = torch.full((1 << 20,), 17.3)
    bits = random_bits(make_key(0, 0, torch.device("cpu")), 1024, 1024).flatten()
    drawn = encode_stochastic(values, E4M3, bits).float()
    assert set(drawn.unique().tolist()) == {16.0, 18.0} and abs(drawn.mean() - 17.3) < 4 * 2 * 0.48 / 1024
    tiny = encode_stochastic(torch.full((1 << 20,), 0.3 * 2.0**-9), E4M3, bits).float()
    assert abs(tiny.mean() / 2.0**-9 - 0.3) < 0.002
