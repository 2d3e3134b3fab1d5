"""The split linear as GPUs run it: kernels to the bit, products against the definition; interpreted without a GPU."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import quatrain as qt
from quatrain.kernels import lowrank, quantize_triton
from quatrain.kernels.operands import quantize_both
from quatrain.kernels.rounding import make_key
from quatrain.telemetry import saved_bytes

pytest.importorskip("triton", reason="triton has no build for this platform")

from quatrain.kernels import lowrank_triton as kernels  # noqa: E402
from quatrain.kernels.decode_triton import decode  # noqa: E402
from quatrain.kernels.lowrank_gradients_triton import factor_gradients  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
S = qt.QuantSpec
RHT = S(transform="hadamard")
DRAWN, DRAWN_RHT = S(rounding="stochastic"), S(rounding="stochastic", transform="hadamard")
RECIPE = """
[linear]
split = { kind = "svd", rank = 16, beta = 0.5 }
fprop.input = "nvfp4"
fprop.weight = { format = "nvfp4", block = [16, 16] }
dgrad.grad = { format = "nvfp4", rounding = "stochastic" }
dgrad.weight = { format = "nvfp4", block = [16, 16] }
wgrad.grad = { format = "nvfp4", rounding = "stochastic", transform = "hadamard" }
wgrad.input = { format = "nvfp4", transform = "hadamard" }
"""


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """NumPy, which runs the interpreter, warns of what fp32 on a GPU does in silence."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def operands(rows: int, columns: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, U and basis; their products are exact in fp32, so that no order of sums shows in a bit."""
    u = torch.randint(-8, 9, (rows, 2 * rank)).bfloat16() / 8
    basis = torch.randint(-4, 5, (rank, columns)).bfloat16() / 16
    return torch.randn(rows, columns).bfloat16().to(DEVICE), u.to(DEVICE)[:, rank:], basis.to(DEVICE)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


SHAPES = {"whole": (64, 64, 16), "ragged": (33, 80, 48), "small": (20, 32, 16)}
CASES = [("whole", (S(), RHT)), ("ragged", (DRAWN, DRAWN_RHT)), ("small", (S(scale="four-over-six"),) * 2)]
if GPU:
    CASES = [(name, specs) for name in SHAPES for _, specs in CASES]


@pytest.mark.parametrize(("shape", "specs"), CASES, ids=str)
def test_projected_operands_to_the_bit(shape: str, specs: tuple[S, S]) -> None:
    rows, columns, rank = SHAPES[shape]
    x, u, basis = operands(rows, columns, rank)
    rest = (x.float() - u.float() @ basis.float()).bfloat16()
    keys = make_key(1, 2, DEVICE), make_key(3, 4, DEVICE)
    amax = kernels.projected_amaxes(x, u, basis, specs[1])
    assert same(amax[:1], quantize_triton.amaxes(x, specs[0], None)[:1])
    assert same(amax[1:], quantize_triton.amaxes(rest, None, specs[1])[1:])
    tall, blocks = -(-rows // 16) * 16, -(-rows // 16)
    for in_place in (False, True) if GPU else (specs[0].stochastic,):
        wide = torch.full((rows, columns + 64 - columns % 64), -7.0, dtype=torch.bfloat16, device=DEVICE)
        codes = torch.full((tall, columns + 16), -7.0, dtype=torch.bfloat16, device=DEVICE)
        scales = None
        if not in_place:
            codes = torch.empty(columns, blocks * 8, dtype=torch.uint8, device=DEVICE)
            scales = torch.empty(columns, blocks, dtype=torch.float8_e4m3fn, device=DEVICE)
        kernels.quantize_projected(x, u, basis, specs, keys, wide, (codes, scales), amax)
        texts = [s.to_json() for s in specs]
        plain = quantize_both(x, texts[0], None, keys[0], None)[0]
        assert same(wide[:, :columns], decode(plain[0], plain[1], specs[0])) and (wide[:, columns:] == -7).all()
        wanted = quantize_both(rest, None, texts[1], None, keys[1])[1]
        if in_place:
            assert same(codes[:, :columns], decode(wanted[0], wanted[1], specs[1]).t())
            assert (codes[:, columns:] == -7).all()
        else:
            assert same(codes, wanted[0]) and scales is not None and same(scales, wanted[1])


def test_narrow_operands_take_the_scales_back_out() -> None:
    copied = torch.zeros(16, 8).bfloat16().to(DEVICE)
    factor = (copied, copied.clone())
    u, scale = torch.randn(33, 32).bfloat16().to(DEVICE), lambda v: (torch.tensor([v], device=DEVICE), 2688.0)
    rows, columns = (torch.zeros(n, 24, dtype=torch.bfloat16, device=DEVICE) for n in (33, 48))
    factors = kernels.place_narrow(
        u[:, :16], 0.5, rows[:, :16], (scale(3.0), scale(0.5)), factor, (columns[:, :16], RHT, scale(7.0), scale(2.0))
    )
    alpha, other = torch.tensor(3.0) / 2688 * (torch.tensor(0.5) / 2688), torch.tensor(7.0) / 2688
    assert factors.tolist() == [alpha.item(), 0.0, (other * (torch.tensor(2.0) / 2688)).item(), 0.0]
    assert (
        torch.equal(rows[:, :16].cpu(), (u[:, :16].cpu().float() * (0.5 / alpha)).bfloat16()) and not rows[:, 16:].any()
    )
    from quatrain.nn.split_function import rotate_tokens

    turned = rotate_tokens(u[:, :16], RHT.to_json()).t()
    assert error(columns[:, :16].float() * other.item() / 0.5, turned) < 3e-3 and not columns[:, 16:].any()
    # An operand of zeros keeps the branch: its scale counts as 1. A product of scales near 0 is bounded.
    factors = kernels.place_narrow(u[:, :16], 1.0, rows[:, :16], (scale(0.0), scale(0.5)), factor)
    assert factors[0] == torch.tensor(0.5) / 2688 and rows[:, :16].isfinite().all() and rows[:, :16].any()
    kernels.place_narrow(u[:, :16], 1.0, rows[:, :16], (scale(1e-30), scale(1e-20)), factor)
    assert rows[:, :16].isfinite().all()
    assert kernels.place_narrow(u[:, :16], 1.0, rows[:, :16], (scale(float("nan")), scale(1.0)), factor)[0].isnan()


@pytest.mark.parametrize("along", [True, False], ids=["along", "plain"])
@pytest.mark.parametrize("across", [True, False], ids=["columns", "rows"])
@pytest.mark.parametrize(("rank", "length", "tokens"), [(16, 64, 33), (48, 80, 16), (32, 200, 130)])
def test_the_factor_beside_the_weight(rank: int, length: int, tokens: int, across: bool, along: bool) -> None:
    """As columns (Fprop reads it so) or rows (Dgrad): any bits, NaN's too, and nothing beside them changes."""
    source = torch.randint(-(2**15), 2**15, (2 * rank, length), dtype=torch.int16, device=DEVICE)
    room = torch.full((length + 3, rank + 40) if across else (rank + 3, length + 40), -7, dtype=torch.int16).to(DEVICE)
    place = (lambda t: t[:length, 8 : 8 + rank].t()) if across else (lambda t: t[1 : 1 + rank, :length])
    wanted = room.clone()
    place(wanted).copy_(source[:rank])
    u, one = torch.randn(tokens, rank, device=DEVICE).bfloat16(), (torch.ones(1, device=DEVICE), 1.0)
    rows = torch.zeros_like(u)
    columns = torch.zeros(-(-tokens // 16) * 16, rank, dtype=torch.bfloat16, device=DEVICE)
    factor = source.view(torch.bfloat16), place(room.view(torch.bfloat16))
    factors = kernels.place_narrow(u, 1.0, rows, (one, one), factor, (columns, S(), one, one) if along else None)
    assert torch.equal(room, wanted) and torch.equal(rows, u)
    assert torch.equal(columns[:tokens], u * along) and factors.tolist() == [1.0, 0.0] * (1 + along)


def test_amaxes_of_zeros_at_hand() -> None:
    x, u, basis = operands(33, 80, 16)
    q, amax = qt.quantize(x[:32, :64], S()), torch.full((2,), float("nan"), device=DEVICE)
    assert same(decode(q.codes, q.scales, q.spec, clear=amax), decode(q.codes, q.scales, q.spec)) and not amax.any()
    found = kernels.projected_amaxes(x, u, basis, RHT, amax)
    assert found is amax and same(amax, kernels.projected_amaxes(x, u, basis, RHT))
    nothing = torch.empty(0, 8, dtype=torch.uint8, device=DEVICE)
    decode(nothing, torch.empty(0, 1, device=DEVICE).to(torch.float8_e4m3fn), S(), clear=amax)
    assert not amax.any()


@pytest.mark.parametrize(("rank", "dtype"), [(16, torch.float32), (48, torch.bfloat16)])
def test_gradients_of_both_factors(rank: int, dtype: torch.dtype) -> None:
    n, k = 70, 96
    given = torch.randn(n, 2 * rank, device=DEVICE)[:, :rank]
    rest = torch.randn(n + rank, k, device=DEVICE).to(dtype)[n:]
    small, basis = torch.randn(rank, rank, device=DEVICE), torch.randn(rank, k, device=DEVICE).bfloat16()
    left, right = factor_gradients(given, rest, small, basis, 0.5, dtype)
    assert left.dtype == right.dtype == dtype and torch.equal(left, (given * 0.5).to(dtype))
    wanted = rest.double() + 0.5 * (small.double() @ basis.double())
    assert error(right, wanted) < (1e-5 if dtype == torch.float32 else 3e-3)


def test_decoding_leaves_room() -> None:
    q = qt.quantize(torch.randn(32, 64, device=DEVICE), S(block=(16, 16)))
    room = torch.full((40, 80), -7.0, dtype=torch.bfloat16, device=DEVICE)
    decode(q.codes, q.scales, q.spec, out=room[:32, :64])
    assert (
        same(room[:32, :64], decode(q.codes, q.scales, q.spec))
        and (room[32:] == -7).all()
        and (room[:, 64:] == -7).all()
    )
    with pytest.raises(ValueError, match="out must be torch.bfloat16"):
        decode(q.codes, q.scales, q.spec, out=room[:32, :48])


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let CPU tensors take the path of GPUs."""
    if not GPU:
        monkeypatch.setattr(lowrank, "decodes_at_once", lambda device, spec: spec is not None)
    return monkeypatch


def linear(joined: bool, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32, bias=bias, dtype=dtype))
    qt.apply(model, RECIPE)
    model.to(DEVICE if joined else "cpu")
    assert model[0]._joined == joined
    return model


def run(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    x = x.to(device).requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = model(x)
    y.backward(dy.to(device))
    return [y, x.grad, *(p.grad for p in model.parameters()), model[0]._shared_state.seen]


def data(rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(rows, 48, generator=generator) + 0.5).bfloat16(), torch.randn(
        rows, 32, generator=generator
    ).bfloat16()


@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_joined_products_agree_with_the_definition(joining: pytest.MonkeyPatch, bias: bool, dtype: torch.dtype) -> None:
    """Up to a rounding of the narrow operands to BF16 (2**-8), and of codes that it moves."""
    x, dy = data()
    found = run(linear(True, bias, dtype), x, dy)
    joining.setattr(lowrank, "decodes_at_once", lambda device, spec: False)
    wanted = run(linear(False, bias, dtype), x, dy)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert all(error(a, b) < 2e-2 for a, b in zip(found, wanted, strict=True)), list(map(error, found, wanted))


def test_nothing_is_read_before_it_is_written(joining: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, as torch fills it where asked to be deterministic."""
    joining.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x, dy = data(17)
    wanted = run(linear(True), x, dy)
    joining.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2, device=DEVICE).isnan().all()
        found = run(linear(True), x, dy)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True)) and all(t.isfinite().all() for t in found)


def test_a_linear_that_gets_no_gradient(joining: pytest.MonkeyPatch) -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    model = linear(True)
    Nothing.apply(model(data()[0].to(DEVICE).requires_grad_())).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_what_the_joined_path_saves(joining: pytest.MonkeyPatch) -> None:
    model = linear(True, dtype=torch.bfloat16)
    x = data(64)[0].to(DEVICE).requires_grad_()
    held = saved_bytes(lambda: model(x).float().sum(), model)["bytes"]
    assert held / x.numel() <= 0.5625 + 4 * 16 / 48 + 0.01


def test_joined_products_checkpointed(joining: pytest.MonkeyPatch) -> None:
    x, dy = data(16)
    wanted = run(linear(True, dtype=torch.bfloat16), x, dy)
    saving = linear(True, dtype=torch.bfloat16)
    y = torch.utils.checkpoint.checkpoint(saving, x.to(DEVICE).requires_grad_(), use_reentrant=False)
    y.backward(dy.to(DEVICE))
    assert all(torch.equal(p.grad, g) for p, g in zip(saving.parameters(), wanted[2:-1], strict=True))


def test_joined_products_compiled_and_after_a_realignment(joining: pytest.MonkeyPatch) -> None:
    x, dy = data(16)
    x = x.to(DEVICE)
    model = linear(True, dtype=torch.bfloat16)
    wanted = run(model, x, dy)
    other = linear(True, dtype=torch.bfloat16)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    compiled(x.detach().requires_grad_()).backward(dy.to(DEVICE))
    assert all(error(p.grad, g) < 1e-2 for p, g in zip(other.parameters(), wanted[2:-1], strict=True))
    with torch.no_grad():
        model[0].factors()[0].mul_(2.0)
    before = model[0].merged_weight().float()
    codes = model[0].weight_code_tensors()[0].clone()
    assert qt.realign(model) == 1
    assert error(model[0].merged_weight(), before) < 1e-2  # W_res in BF16
    y = model(x.detach().requires_grad_())
    assert error(y, x.float() @ before.t() + model[0].bias.float()) < 0.2
    assert not torch.equal(model[0].weight_code_tensors()[0], codes)


def test_who_joins(joining: pytest.MonkeyPatch) -> None:
    rows = [s.to_json() for s in (S(), S(block=(16, 16)), DRAWN, S(block=(16, 16)), DRAWN_RHT, RHT)]
    assert lowrank.serves(DEVICE, (64, 48), tuple(rows))
    for place, other in (
        (0, None),
        (1, S().to_json()),
        (4, S("mxfp4").to_json()),
        (5, S(transform=qt.Hadamard(32)).to_json()),
    ):
        assert not lowrank.serves(DEVICE, (64, 48), (*rows[:place], other, *rows[place + 1 :]))
    assert not lowrank.serves(DEVICE, (60, 48), tuple(rows))
    model = linear(True)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        y = model(data()[0].to(DEVICE))  # no gradient of the input: every product on its own
    y.float().sum().backward()
    assert model[0].weight.grad is not None and model(torch.zeros(3, 48, device=DEVICE)).dtype == torch.float32
