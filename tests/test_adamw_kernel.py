"""AdamW with NVFP4 moments, the definition: what is stored, how near it stays, what does not drift."""

import math
import zlib

import pytest
import torch

import quatrain as qt
from quatrain.kernels import dither, moments
from quatrain.kernels.adamw import (
    Item,
    MomentSpec,
    adamw_step,
    decode_moments,
    empty_state,
    encode_moments,
    join_master,
    round_bfloat16,
    split_master,
)

CPU = torch.device("cpu")


def scalars(step: int, lr: float = 1e-3, decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.95)) -> torch.Tensor:
    """The vector of a step, eps = 1e-8."""
    b1, b2 = betas
    bound = 0.0
    if b1 * b1 < b2:
        bound = math.sqrt(1 - b2) * math.sqrt(1 - b1 * b1 / b2) / (1 - b1)
    values = (lr, 1 - lr * decay, lr / (1 - b1**step), 1 / math.sqrt(1 - b2**step), 1e-8, b1, 1 - b1, b2, 1 - b2, bound)
    return torch.tensor(values, dtype=torch.float32)


class Run:
    """A tensor, its state and a step counter."""

    def __init__(self, weight: torch.Tensor, spec: MomentSpec, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.weight, self.spec, self.betas, self.count = weight, spec, betas, 0
        self.state = empty_state(*weight.shape, spec, CPU)
        if weight.dtype == torch.bfloat16 and spec.master == "fp32":
            self.state["master"] = weight.float()
        if spec.master == "bf16+int8":
            self.state["correction"] = torch.zeros(weight.shape, dtype=torch.int8)

    def step(self, gradient: torch.Tensor, seed: int = 0, number: int = 1, decay: float = 0.0) -> None:
        self.count += 1
        self.key, self.number = torch.tensor([seed, self.count]), number
        vector = scalars(self.count, decay=decay, betas=self.betas)
        adamw_step([Item(self.weight, gradient, self.state, number)], vector, self.key, self.spec, "reference")

    def decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        return decode_moments(self.state, *self.weight.shape, self.spec, self.key, self.number)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_bytes() -> None:
    state = empty_state(2048, 8192, MomentSpec(), CPU)
    total = sum(tensor.untyped_storage().nbytes() for tensor in state.values())
    assert total / (2048 * 8192) <= 1.142
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "m_codes": torch.uint8, "v_codes": torch.uint8, "m_scales": torch.float8_e4m3fn,
        "v_scales": torch.float8_e4m3fn, "m_amax": torch.float32, "v_amax": torch.float32, "v_mean": torch.bfloat16,
    }  # fmt: skip
    assert empty_state(3, 100, MomentSpec(), CPU)["v_mean"].shape == (3, 2)  # tiles of 64


def test_error_of_the_root() -> None:
    torch.manual_seed(0)
    root = torch.exp(0.3 * torch.randn(64, 2048))
    state = empty_state(64, 2048, MomentSpec(), CPU)
    encode_moments(torch.randn(64, 2048), root.square(), state, MomentSpec())
    m, v = decode_moments(state, 64, 2048, MomentSpec())
    plain = relative(qt.quantize(root, "nvfp4").dequantize(), root)
    error = relative(v.sqrt(), root)
    assert error <= 0.03 and error <= 0.45 * plain
    assert abs(float(v.sum() / root.square().sum()) - 1) < 1e-3
    again = empty_state(64, 2048, MomentSpec(), CPU)
    encode_moments(m, v, again, MomentSpec())
    assert relative(decode_moments(again, 64, 2048, MomentSpec())[0], m) < 0.12  # one rounding more


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_sum_of_v(spread: float) -> None:
    """4,000 steps at beta2 = 0.999 with gradients that decay tenfold."""
    torch.manual_seed(1)
    steps = 4000 if spread == 0.3 else 1000
    scale = torch.exp(spread * torch.randn(8, 1024))
    run, v, m = Run(torch.zeros(8, 1024), MomentSpec(), (0.9, 0.999)), torch.zeros(8, 1024), torch.zeros(8, 1024)
    for t in range(steps):
        gradient = scale * torch.randn(8, 1024) * 0.1 ** (t / steps)
        run.step(gradient)
        v.mul_(0.999).add_(0.001 * gradient.square())
        m.mul_(0.9).add_(0.1 * gradient)
    got_m, got_v = run.decoded()
    assert 0.97 <= float(got_v.sum() / v.sum()) <= 1.03
    got_m, m = got_m / scale, m / scale
    assert abs(float((got_m * m).sum() / m.square().sum()) - 1) < 0.02  # stochastic rounding shrinks nothing
    assert relative(got_m, m) < 0.5


def test_first_step_is_adamw() -> None:
    """Before anything has been encoded the update is torch's to the last bits, decay included."""
    torch.manual_seed(0)
    weight, gradient = torch.randn(8, 256), torch.randn(8, 256)
    run = Run(weight.clone(), MomentSpec())
    run.step(gradient, decay=0.1)
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient
    torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1).step()
    assert torch.allclose(run.weight, parameter.detach(), rtol=1e-6, atol=1e-9)
    half = Run(weight.clone(), MomentSpec())
    half.step(gradient.bfloat16(), decay=0.1)
    wide = Run(weight.clone(), MomentSpec())
    wide.step(gradient.bfloat16().float(), decay=0.1)
    assert torch.equal(half.weight, wide.weight)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("pattern", ["few", "half", "one"])
def test_coordinates_without_gradient_stay(betas: tuple[float, float], pattern: str) -> None:
    torch.manual_seed(2)
    mask = torch.ones(4, 256)
    if pattern == "few":
        mask[:, ::37] = 0
    elif pattern == "half":
        mask = (torch.rand(4, 256) < 0.5).float()
    else:
        mask = torch.zeros(4, 256)
        mask[:, 5::64] = 1
    run = Run(torch.zeros(4, 256), MomentSpec(), betas)
    for _ in range(500):
        run.step(torch.randn(4, 256) * mask)
    assert float(run.weight[mask == 0].abs().max()) <= 1e-3  # the learning rate
    assert float(run.weight[mask == 1].abs().mean()) > 1e-3


def test_no_gradient_no_motion() -> None:
    weight = torch.randn(4, 256)
    run = Run(weight.clone(), MomentSpec())
    for _ in range(3):
        run.step(torch.zeros(4, 256))
    assert torch.equal(run.weight, weight)
    assert all(float(x.abs().max()) < 1e-30 for x in run.decoded())


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_coordinate_that_falls_silent_moves_on(beta2: float) -> None:
    torch.manual_seed(3)
    silent = torch.zeros(16, 512, dtype=torch.bool)
    silent[:, ::19] = True
    run = Run(torch.zeros(16, 512), MomentSpec(), (0.9, beta2))
    exact = torch.nn.Parameter(torch.zeros(16, 512))
    optimizer = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0)
    moved = []
    for t in range(100):
        gradient = 1 + 0.3 * torch.randn(16, 512)
        gradient[silent & torch.tensor(t >= 50)] = 0
        run.step(gradient)
        exact.grad = gradient
        optimizer.step()
        moved.append((float(run.weight[silent].mean()), float(exact.detach()[silent].mean())))
    assert all(abs(ours / theirs - 1) < 0.05 for ours, theirs in moved[20:])
    assert moved[-1][1] < 1.1 * moved[49][1]  # it did move on after the gradients ended


def test_draws() -> None:
    """Random bits depend on seed, step, tensor, row and block; m has no bias; neighbours are not correlated."""
    rows = torch.arange(64)
    base = moments.block_hashes(torch.tensor([1, 2]), 3, rows, 64)
    for key, number in (([2, 2], 3), ([1, 3], 3), ([1, 2], 4)):
        other = moments.block_hashes(torch.tensor(key), number, rows, 64)
        assert float((other == base).float().mean()) < 1e-3
    assert base.unique().numel() == base.numel()
    draws = moments.element_draws(moments.block_hashes(torch.tensor([1, 2]), 3, torch.arange(512), 128)).double()
    for low in (draws, (draws.int() & 0x7F).double(), (draws.int() & 0x3F).double()):
        centred = (low - low.mean()) / low.std()
        table = centred @ centred.t() / centred.shape[1]
        assert float((table - torch.eye(16)).abs().max()) < 0.02
        assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < 0.01


def drawn_moments(m: torch.Tensor, v: torch.Tensor, spec: MomentSpec, count: int) -> torch.Tensor:
    """m as decoded after each of `count` encodings, [count, R, K]."""
    found = []
    for step in range(count):
        state, key = empty_state(*m.shape, spec, CPU), torch.tensor([5, step])
        encode_moments(m, v, state, spec, key, 3)
        found.append(decode_moments(state, *m.shape, spec, key, 3)[0])
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["normal", "one", "equal", "ramp"])
def test_the_first_moment_has_no_bias(kind: str) -> None:
    """The mean over draws is the value, within four standard errors, whatever a block looks like."""
    torch.manual_seed(0)
    m, v = torch.randn(16, 256), torch.exp(torch.randn(16, 256))
    if kind == "one":
        m = torch.zeros(16, 256).index_fill_(1, torch.arange(3, 256, 16), 1.0) * (1 + torch.rand(16, 256))
    elif kind == "equal":
        m, v = torch.full((16, 256), 0.7), torch.ones(16, 256)
    elif kind == "ramp":
        m, v = torch.linspace(-3, 3, 4096).view(16, 256), torch.ones(16, 256)
    for spec in (MomentSpec(), MomentSpec(faithful=True)):
        found = drawn_moments(m, v, spec, 100)
        chance = found.std(dim=0) / 10
        # Beside chance a value is placed to 1/128 of a step, and along straight lines where steps change their width.
        allowed = 4 * chance + m.square().view(16, 16, 16).mean(dim=2).sqrt().repeat_interleave(16, dim=1) / 150
        assert bool(((found.mean(dim=0) - m).abs() <= allowed).all())
        assert abs(float((found.mean(dim=0) * m).sum() / m.square().sum()) - 1) < 3e-3


def test_the_dither_takes_noise_away() -> None:
    """Against stochastic rounding: at least a fifth of the error of one rounding, and of what many add up to."""
    torch.manual_seed(0)
    m, v = torch.randn(16, 512), torch.ones(16, 512)
    errors = [relative(drawn_moments(m, v, MomentSpec(faithful=faithful), 1)[0], m) for faithful in (False, True)]
    assert errors[0] < 0.108 and errors[0] < 0.8 * errors[1]
    gradients = [torch.randn(16, 512) for _ in range(60)]
    wandered = []
    for faithful in (False, True):
        run, exact = Run(torch.zeros(16, 512), MomentSpec(faithful=faithful)), torch.zeros(16, 512)
        for gradient in gradients:
            exact.mul_(0.9).add_(0.1 * gradient)
            run.step(gradient)
        wandered.append(relative(run.decoded()[0], exact))
    assert wandered[0] < 0.265 and wandered[0] < 0.8 * wandered[1]


def test_the_dither_has_next_to_no_bias() -> None:
    """Over all 128 random numbers: within 0.1 % of a normal block's root mean square, and none along the values."""
    torch.manual_seed(0)
    x = (300 * torch.randn(16, 5000)).half()
    total = torch.zeros(16, 5000)
    for number in range(128):
        draws = torch.full((16, 5000), number, dtype=torch.int32)
        encoded = dither.encode_dithered(x, draws)
        total += dither.decode_dithered(encoded.codes, draws).float() * (encoded.units / dither.PARTS)
    size = x.float().square().mean(dim=0).sqrt()
    bias = (total / 128 - x.float()) / size
    assert float(bias.square().mean().sqrt()) < 1.1e-3  # half of it from half precision, which follows no value
    assert abs(float((bias * x.float() / size).mean())) < 1.5e-4


def test_lines_follow_the_curve() -> None:
    """Places bent by straight lines, half-precision numbers, against the root that makes the mean exact."""
    assert all(float(torch.tensor(x).half()) == x for slope, end in dither.LINES for x in (slope, 8 + end))
    for code, value, width in ((4, 2.0, 0.5), (6, 4.0, 1.0)):
        a = torch.linspace(value - 0.75 * width, value + 1.25 * width, 2001, dtype=torch.float64)
        w = (a - value) / width
        exact = torch.minimum(w, w / 2)
        root = -1.5 + (2 + 2 * w).sqrt()
        exact = torch.where(root.abs() <= 0.5, root, exact)
        lines = [2 * a, a + 2, a / 2 + 4, *(a * slope + end for slope, end in dither.LINES)]
        error = torch.stack(lines).amin(dim=0) - code - exact
        assert float(error.abs().max()) < 0.009 and abs(float(error.mean())) < 2e-3


def test_codes_of_the_first_moment_are_e2m1() -> None:
    """Read plainly, without the random numbers, each value is within a step of what it stands for."""
    torch.manual_seed(0)
    x = (300 * torch.randn(16, 5000)).half()
    draws = torch.randint(0, 65536, (16, 5000), dtype=torch.int32)
    encoded = dither.encode_dithered(x, draws)
    plain, value = (
        moments.doubled(encoded.codes) / 2,
        dither.decode_dithered(encoded.codes, draws).float() / dither.PARTS,
    )
    step = torch.where(plain.abs() >= 4, 2.0, torch.where(plain.abs() >= 2, 1.0, 0.5))
    assert bool(((x.float() / encoded.units - plain).abs() <= step * 1.13).all())  # 1/8 more where places are bent
    assert bool(((value - plain).abs() <= step / 2).all())
    assert encoded.codes.unique().numel() == 16
    assert float(encoded.codes.remainder(8).max()) == 7


def test_another_key_finds_no_moment() -> None:
    """What the shifts were drawn from is needed to decode; the wrong ones double the variance, and leave no bias."""
    torch.manual_seed(0)
    m, v = torch.randn(64, 512), torch.ones(64, 512)
    state, key = empty_state(64, 512, MomentSpec(), CPU), torch.tensor([5, 9])
    encode_moments(m, v, state, MomentSpec(), key, 3)
    right, wrong = (decode_moments(state, 64, 512, MomentSpec(), key, number)[0] for number in (3, 4))
    assert 1.5 < relative(wrong, m) / relative(right, m) < 1.9
    assert abs(float((wrong * m).sum() / m.square().sum()) - 1) < 0.01


def test_masters() -> None:
    weight = torch.randn(1 << 14) * torch.logspace(-30, 30, 1 << 14)
    weight[:4] = torch.tensor([1.0 - 2**-17, -(2.0 - 2**-20), 1.00390625, 0.0])  # across a binade, a tie, zero
    parameter, correction = split_master(weight)
    assert parameter.dtype == torch.bfloat16 and correction.dtype == torch.int8
    assert float(((join_master(parameter, correction) - weight).abs() / weight.abs().clamp(min=1e-37)).max()) <= 2**-16
    again = split_master(join_master(parameter, correction))
    assert torch.equal(again[0], parameter) and torch.equal(again[1], correction)
    assert float((parameter.float() - weight).abs().div(weight.abs().clamp(min=1e-37)).max()) <= 2**-8
    x = torch.full((1 << 16,), 1.0 + 2**-9)  # a quarter of a step above 1
    drawn = round_bfloat16(x, torch.arange(1 << 16, dtype=torch.int32))
    assert float((drawn.float() > 1).float().mean()) == 0.25
    lost = torch.tensor([math.nan, -math.nan, math.inf])
    assert round_bfloat16(lost, torch.full((3,), 0xFFFF, dtype=torch.int32)).isnan().tolist() == [True, True, False]
    assert split_master(lost)[0].isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("master", ["fp32", "bf16+int8", "bf16-sr"])
def test_small_updates_are_not_lost(master: str) -> None:
    """Steps of 2**-10 of the weight, a quarter of what BF16 resolves."""
    torch.manual_seed(0)
    run = Run(torch.ones(64, 256).bfloat16(), MomentSpec(master=master))
    for _ in range(20):
        run.step(torch.ones(64, 256))
    kept = run.state.get("master", run.weight.float())
    if master == "bf16+int8":
        kept = join_master(run.weight, run.state["correction"])
    assert abs(float((1 - kept).mean()) / 0.02 - 1) < 0.1
    if master == "fp32":
        run.weight.fill_(3.0)  # written by someone else
        run.step(torch.zeros(64, 256))
        assert float(run.weight.float().min()) > 2.9


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("master", ["fp32", "bf16+int8", "bf16-sr"])
def test_lost_gradients_are_seen(value: float, master: str) -> None:
    torch.manual_seed(0)
    run = Run(torch.randn(4, 512).bfloat16(), MomentSpec(master=master))
    run.step(torch.randn(4, 512))
    gradient = torch.randn(4, 512)
    gradient[1, 200] = value
    for _ in range(2):
        run.step(gradient)
        assert bool(run.weight[1, 200].isnan())
        rest = torch.ones(4, 512, dtype=torch.bool)
        rest[1, 128:256] = False  # its tile
        assert bool(run.weight[rest].isfinite().all())
        gradient = torch.randn(4, 512)
    assert bool(run.decoded()[0][1, 200].isnan())


@pytest.mark.parametrize("scale", [1e-15, 1e-9, 1e9, 1e12])
def test_gradients_of_any_size(scale: float) -> None:
    """The update does not depend on the gradient's size."""
    torch.manual_seed(0)
    gradients = [torch.randn(4, 256) for _ in range(4)]
    runs = [Run(torch.zeros(4, 256), MomentSpec()) for _ in range(2)]
    for gradient in gradients:
        for run, factor in zip(runs, (1.0, 2.0 ** round(math.log2(scale))), strict=True):
            vector = scalars(run.count + 1)
            vector[4] = 0.0  # eps
            run.count += 1
            item = Item(run.weight, gradient * factor, run.state, 1)
            adamw_step([item], vector, torch.tensor([0, run.count]), run.spec, "reference")
    assert torch.allclose(runs[0].weight, runs[1].weight, rtol=1e-5, atol=1e-8)


def test_padding_and_tiles() -> None:
    torch.manual_seed(0)
    v = torch.full((2, 100), 4.0)
    state = empty_state(2, 100, MomentSpec(), CPU)
    encode_moments(torch.zeros(2, 100), v, state, MomentSpec())
    assert torch.equal(decode_moments(state, 2, 100, MomentSpec())[1], v)  # means over elements, not padding
    run = Run(torch.zeros(3, 17), MomentSpec(), (0.9, 0.999))
    exact = torch.zeros(3, 17)
    for _ in range(300):
        gradient = torch.randn(3, 17)
        run.step(gradient)
        exact.mul_(0.999).add_(0.001 * gradient.square())
    assert 0.9 < float(run.decoded()[1].sum() / exact.sum()) < 1.1
    # Blocks 2**-20 below their row's largest keep their precision: the sign of a scale stands for 2**-14.
    m = torch.randn(1, 256)
    m[:, 128:] *= 2.0**-20
    encode_moments(m, torch.ones_like(m), state := empty_state(1, 256, MomentSpec(), CPU), MomentSpec())
    got = decode_moments(state, 1, 256, MomentSpec())[0]
    assert relative(got[:, 128:], m[:, 128:]) < 0.15 and bool((state["m_scales"].view(torch.uint8) > 127).any())


def test_faithful_leaves_the_additions_out() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(4, 256) for _ in range(3)]
    for gradient in gradients:
        gradient[:, ::5] = 0
    runs = [Run(torch.zeros(4, 256), MomentSpec(faithful=faithful)) for faithful in (False, True)]
    for gradient in gradients:
        for run in runs:
            run.step(gradient)
    assert bool((runs[0].weight[:, ::5] == 0).all()) and not bool((runs[1].weight[:, ::5] == 0).all())
    assert not torch.equal(runs[0].state["v_mean"], runs[1].state["v_mean"])


def test_bits_are_pinned() -> None:
    """The state after three steps; a change of these is a change of the definition."""
    generator = torch.Generator().manual_seed(0)
    run = Run(torch.randn(5, 200, generator=generator), MomentSpec())
    for _ in range(3):
        run.step(torch.randn(5, 200, generator=generator), seed=11, number=4, decay=0.1)
    data = b"".join(run.state[name].view(torch.uint8).numpy().tobytes() for name in sorted(run.state))
    assert (zlib.crc32(data), zlib.crc32(run.weight.numpy().tobytes())) == PINNED


PINNED = (515518665, 1405084582)


def test_root_is_correctly_rounded() -> None:
    x = torch.exp2(torch.empty(1 << 18).uniform_(-90, 100))
    assert torch.equal(moments.square_root(x), x.double().sqrt().float())


def test_errors() -> None:
    with pytest.raises(ValueError, match="power of two from 16 to 256, received 100"):
        MomentSpec(tile=100)
    with pytest.raises(ValueError, match="master must be one of"):
        MomentSpec(master="fp16")
    with pytest.raises(ValueError, match="at least 16 columns, received 8"):
        empty_state(4, 8, MomentSpec(), CPU)
    state = empty_state(4, 32, MomentSpec(), CPU)
    key, weight = torch.tensor([0, 1]), torch.zeros(4, 32)
    for item, spec, message in (
        (Item(weight, torch.zeros(4, 16), state, 0), MomentSpec(), "matrices of one shape"),
        (Item(weight.double(), weight, state, 0), MomentSpec(), "must be fp32 or BF16"),
        (Item(weight, weight.half(), state, 0), MomentSpec(), "gradient must be fp32 or BF16"),
        (Item(weight, weight, state, 0), MomentSpec(master="bf16-sr"), "is for BF16 parameters"),
        (Item(torch.zeros(32, 4).t(), weight, state, 0), MomentSpec(), "row-major"),
        (Item(weight.bfloat16(), weight, state, 0), MomentSpec(), "needs a state with"),
    ):
        with pytest.raises(ValueError, match=message):
            adamw_step([item], scalars(1), key, spec, "reference")
    with pytest.raises(ValueError, match="cannot run here"):
        adamw_step([Item(weight, weight, state, 0)], scalars(1), key, MomentSpec(), "cpu")


@pytest.mark.parametrize(
    "kind,share,beta2,least", [("rows", 0.1, 0.95, 0.97), ("rows", 0.5, 0.999, 0.97), ("columns", 0.5, 0.95, 0.85)]
)
def test_gradients_that_come_and_go_keep_their_second_moment(
    kind: str, share: float, beta2: float, least: float
) -> None:
    """The deadband is for coordinates that never have a gradient."""
    torch.manual_seed(0)
    run, v = Run(torch.zeros(32, 128), MomentSpec(), (0.9, beta2)), torch.zeros(32, 128)
    for _ in range(300):
        mask = torch.rand(32, 1) < share if kind == "rows" else torch.rand(1, 128) < share
        gradient = torch.randn(32, 128) * mask
        run.step(gradient)
        v.mul_(beta2).add_((1 - beta2) * gradient.square())
    assert least <= float(run.decoded()[1].sum() / v.sum()) <= 1.05


def test_a_nan_leaves_other_rows_alone() -> None:
    weights = []
    for bad in (0.0, math.nan):
        torch.manual_seed(0)
        run = Run(torch.randn(64, 128), MomentSpec())
        for _ in range(3):
            gradient = torch.randn(64, 128)
            gradient[10:, 3] = 0.0
            gradient[0, 0] += bad
            run.step(gradient)
        weights.append(run.weight.clone())
    assert torch.equal(weights[0][1:], weights[1][1:]) and bool(weights[1][0].isnan().any())
