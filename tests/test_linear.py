"""The quantized linear: exact against an independent straight-line computation, lean in what it saves, any shape."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

import quatrain as qt
from quatrain.nn import OPERANDS, LinearRows, QuantLinear, SharedState, convert
from quatrain.telemetry import saved_bytes

S = qt.QuantSpec
NVFP4 = LinearRows(
    S(), S(block=(16, 16)), S(rounding="stochastic"), S(block=(16, 16)),
    S(rounding="stochastic", transform="hadamard"), S(transform="hadamard"),
)  # fmt: skip
ONE_D = LinearRows(*[S()] * 6)
FP8 = LinearRows(S("fp8"), S("fp8", (128, 128)), S("fp8"), S("fp8", (128, 128)), S("fp8"), S("fp8"))
MX = LinearRows(S("mxfp4"), S("mxfp4", (32, 32)), S("mxfp4"), S("mxfp4"), S("mxfp8"), S("mxfp8"))
EVERY = {"nvfp4": NVFP4, "1-D": ONE_D, "fp8": FP8, "mx": MX}


def make(
    rows: LinearRows, k: int = 64, n: int = 48, bias: bool = True, dtype: torch.dtype = torch.float32
) -> QuantLinear:
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=bias).to(dtype)
    return convert(linear, rows, SharedState(["m"], torch.device("cpu")), 0, seed=0, rank=0)


def run(linear: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.detach().clone().requires_grad_()
    linear.zero_grad()
    y = linear(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad, linear.bias.grad if linear.bias is not None else torch.zeros(1)


def without(rows: LinearRows, *names: str) -> LinearRows:
    return LinearRows(*[None if o in names else r for o, r in zip(OPERANDS, rows.rows, strict=True)])


def straight_line(linear: QuantLinear, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The three products written out from decoded operands, in float64."""
    rows = dict(zip(OPERANDS, linear.operand_rows.rows, strict=True))
    clock = linear._shared_state.clock

    def q(name: str, value: torch.Tensor) -> torch.Tensor:
        if rows[name] is None:
            return value.double()
        seed = linear._keys[OPERANDS.index(name)]
        return qt.quantize(value, rows[name], seed=seed, offset=clock).dequantize(torch.float64)

    w = linear.weight.detach().to(x.dtype)
    y = q("fprop.input", x) @ q("fprop.weight", w).t()
    dx = q("dgrad.grad", dy) @ q("dgrad.weight", w.t()).t()
    dw = q("wgrad.grad", dy.t()) @ q("wgrad.input", x.t()).t()
    return y + (linear.bias.double() if linear.bias is not None else 0), dx, dw, dy.double().sum(0)


def close(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    assert (a.double() - b.double()).norm() <= bound * b.double().norm() + 1e-300, float(
        (a.double() - b.double()).norm() / b.double().norm()
    )


@pytest.mark.parametrize("rows", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("sizes", [(96, 64, 48), (27, 72, 80), (1, 16, 16), (130, 200, 136)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_a_straight_line_computation(rows: LinearRows, sizes: tuple[int, int, int], bias: bool) -> None:
    t, k, n = sizes
    linear = make(rows, k, n, bias)
    linear._shared_state.clock.fill_(3)
    x, dy = torch.randn(t, k), torch.randn(t, n)
    for ours, theirs in zip(run(linear, x, dy), straight_line(linear, x, dy), strict=True):
        if bias or theirs.dim() > 1:
            close(ours, theirs, 1e-5)


def test_without_rows_it_is_nn_linear() -> None:
    linear = make(LinearRows(), dtype=torch.float64)
    plain = nn.Linear(64, 48).double()
    plain.load_state_dict(linear.state_dict())
    x, dy = torch.randn(20, 64).double(), torch.randn(20, 48).double()
    for ours, theirs in zip(run(linear, x, dy), run(plain, x, dy), strict=True):
        close(ours, theirs, 1e-10)


@pytest.mark.parametrize("rows", EVERY.values(), ids=EVERY)
def test_a_gemm_without_rows_is_unquantized(rows: LinearRows) -> None:
    x, dy = torch.randn(40, 64).double(), torch.randn(40, 48).double()
    plain = nn.Linear(64, 48).double()
    for i, gemm in enumerate(("fprop", "dgrad", "wgrad")):
        linear = make(without(rows, *[o for o in OPERANDS if o.startswith(gemm)]), dtype=torch.float64)
        plain.load_state_dict(linear.state_dict())
        ours, theirs = run(linear, x, dy), run(plain, x, dy)
        close(ours[i], theirs[i], 1e-10)
        for j in {0, 1, 2} - {i}:
            assert (ours[j] - theirs[j]).norm() > 1e-3 * theirs[j].norm()


def test_single_rows_work() -> None:
    x, dy = torch.randn(30, 64), torch.randn(30, 48)
    for name in OPERANDS[:4]:
        linear = make(without(NVFP4, *(o for o in OPERANDS if o != name)))
        for ours, theirs in zip(run(linear, x, dy), straight_line(linear, x, dy), strict=True):
            close(ours, theirs, 1e-5)


def test_rows_of_one_gemm_must_fit() -> None:
    with pytest.raises(ValueError, match="both rows of fprop must have one format, received nvfp4 and mxfp4"):
        LinearRows(S(), S("mxfp4"))
    with pytest.raises(ValueError, match="both rows of wgrad must carry the same transform"):
        LinearRows(wgrad_grad=S(transform="hadamard"), wgrad_input=S())
    with pytest.raises(ValueError, match="same transform"):
        LinearRows(wgrad_grad=S(transform="hadamard"))


@pytest.mark.parametrize("sizes", [(7200, 72), (256, 64), (767, 48), (64, 767), (20, 1)])
@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3), (2, 1, 3)])
def test_any_shape(sizes: tuple[int, int], lead: tuple[int, ...]) -> None:
    linear = make(NVFP4, *sizes)
    x = torch.randn(*lead, sizes[0], requires_grad=True)
    y = linear(x)
    assert y.shape == (*lead, sizes[1])
    y.sum().backward()
    assert x.grad.shape == x.shape and linear.weight.grad.shape == linear.weight.shape
    assert linear.weight.grad.isfinite().all() and linear.bias.grad.isfinite().all()
    if lead == (0,):
        assert linear.weight.grad.abs().max() == 0


def test_wrong_width_says_so() -> None:
    with pytest.raises(ValueError, match=r"in_features = 64, received shape \(3, 65\)"):
        make(NVFP4)(torch.randn(3, 65))


def test_compute_dtype_is_autocasts_or_the_inputs() -> None:
    linear = make(NVFP4)
    x = torch.randn(32, 64)
    assert linear(x).dtype == torch.float32 and linear(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    w = linear.weight.detach().bfloat16()  # fp32 master -> BF16 -> codes
    exact = qt.quantize(x.bfloat16(), S()).dequantize() @ qt.quantize(w, S(block=(16, 16))).dequantize().t()
    assert torch.allclose(y.float(), (exact + linear.bias).detach(), atol=2e-2, rtol=2**-7)
    y.sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_four_micro_batches_accumulate_in_fp32() -> None:
    linear = make(NVFP4)
    parts = []
    data = [(torch.randn(32, 64), torch.randn(32, 48).bfloat16()) for _ in range(4)]
    for i, (x, dy) in enumerate(data):
        linear.zero_grad()
        linear._shared_state.clock.fill_(i)
        linear(x.bfloat16()).backward(dy)
        parts.append(linear.weight.grad.double())
    linear.zero_grad()
    for i, (x, dy) in enumerate(data):
        linear._shared_state.clock.fill_(i)
        linear(x.bfloat16()).backward(dy)
    total = torch.stack(parts).sum(0)
    close(linear.weight.grad, total, 1e-6)
    assert (parts[0] - parts[0].bfloat16().double()).abs().max() > 0  # never rounded to BF16 on the way


def test_saved_bytes_are_the_packed_operand() -> None:
    linear = make(NVFP4, 512, 256)
    x = torch.randn(1024, 512).bfloat16().requires_grad_()
    held = saved_bytes(lambda: linear(x).float().sum(), linear)["bytes"]
    assert held / x.numel() <= 0.5625 + 0.001  # 4.5 bits, plus amax and keys
    codes = sum(t.numel() * t.element_size() for t in linear.weight_code_tensors())
    assert codes / linear.weight.numel() <= 0.51
    plain = nn.Linear(512, 256).bfloat16()
    assert saved_bytes(lambda: plain(x).float().sum(), plain)["bytes"] / x.numel() == 2  # nn.Linear keeps X itself


def test_eval_and_frozen_save_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_quantize(monkeypatch)
    linear = make(NVFP4)
    x = torch.randn(32, 64)
    with torch.no_grad():
        assert not linear(x).requires_grad
    assert calls == ["fprop.weight", "fprop.input"]
    calls.clear()
    linear.weight.requires_grad_(False)
    xg = x.clone().requires_grad_()
    assert saved_bytes(lambda: linear(xg).sum(), linear)["bytes"] < 100
    linear(xg).sum().backward()
    assert "wgrad.input" not in calls and "wgrad.grad" not in calls and linear.weight.grad is None
    calls.clear()
    linear.weight.requires_grad_(True)
    linear(x).sum().backward()  # an input without grad runs no Dgrad
    assert "dgrad.grad" not in calls and "wgrad.grad" in calls


def count_quantize(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of operands as they are quantized, told apart by their specs' texts."""
    from quatrain.kernels import operands

    calls: list[str] = []
    original = operands.quantize_parts

    def counting(x: torch.Tensor, spec: str, key: torch.Tensor | None, backend: str = "auto"):
        for name, row in zip(OPERANDS, NVFP4.rows, strict=True):
            if row.to_json() == spec:
                calls.append(name)
                break
        return original(x, spec, key, backend)

    monkeypatch.setattr(operands, "quantize_parts", counting)
    return calls


def test_weight_is_quantized_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_quantize(monkeypatch)
    linear = make(NVFP4)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for step in range(1, 4):
        for _ in range(4):
            linear(torch.randn(32, 64, requires_grad=True)).sum().backward()
        optimizer.step()
        assert calls.count("fprop.weight") == step
    with torch.no_grad():
        before = linear(torch.ones(1, 64))
        linear.weight.data.mul_(2)  # hidden from autograd's version counter, then an optimizer step
        optimizer.step()
        after = linear(torch.ones(1, 64))
        linear.weight.data.mul_(-3)  # and without one: a sample of the weight gives it away
        again = linear(torch.ones(1, 64))
    assert not torch.equal(before, after) and not torch.equal(after, again)
    linear.load_state_dict({k: torch.zeros_like(v) for k, v in linear.state_dict().items()})
    assert linear(torch.ones(1, 64)).abs().max() == 0


def test_dgrad_reuses_the_square_blocks_of_fprop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_quantize(monkeypatch)
    linear = make(NVFP4)
    linear(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert calls.count("fprop.weight") == 1  # dgrad.weight has the same spec and made no second call
    assert len(make(ONE_D).weight_code_tensors()) == 0


def test_stochastic_draws_differ_by_clock_module_and_operand() -> None:
    x, dy = torch.randn(64, 64), torch.randn(64, 48)
    linear = make(NVFP4)
    first = run(linear, x, dy)
    again = run(linear, x, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    linear._shared_state.clock.add_(1)
    later = run(linear, x, dy)
    assert (
        torch.equal(first[0], later[0]) and not torch.equal(first[1], later[1]) and not torch.equal(first[2], later[2])
    )
    other = convert(copy_plain(linear), NVFP4, SharedState(["n"], torch.device("cpu")), 0, seed=0, rank=0)
    assert not torch.equal(run(other, x, dy)[1], first[1])
    for seed, rank in ((1, 0), (0, 1)):
        other = convert(copy_plain(linear), NVFP4, SharedState(["m"], torch.device("cpu")), 0, seed=seed, rank=rank)
        assert not torch.equal(run(other, x, dy)[1], first[1])


def copy_plain(linear: nn.Linear) -> nn.Linear:
    plain = nn.Linear(linear.in_features, linear.out_features)
    plain.load_state_dict(linear.state_dict())
    return plain


def test_backward_uses_the_clock_of_its_forward() -> None:
    x, dy = torch.randn(64, 64, requires_grad=True), torch.randn(64, 48)
    linear = make(NVFP4)
    y = linear(x)
    linear._shared_state.clock.add_(5)
    y.backward(dy)
    late = x.grad.clone()
    linear._shared_state.clock.zero_()
    assert torch.equal(late, run(linear, x, dy)[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_identical_gradients(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    qt.apply(model, NVFP4_TEXT)
    x = torch.randn(48, 64, requires_grad=True)

    def grads(checkpoint: bool) -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        qt.set_rng_state(model, torch.tensor([7]))
        if checkpoint:
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        else:
            model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()] + [x.grad]

    plain, checked = grads(False), grads(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True))
    before = qt.rng_state(model)
    grads(True)
    assert torch.equal(qt.rng_state(model), before)  # one tick a step, none for the recompute


def test_checkpointing_with_two_forwards_before_one_backward() -> None:
    """The recompute of the first micro-batch happens when the clock has moved on; its gradients keep its own bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    qt.apply(model, NVFP4_TEXT)
    batches = [torch.randn(48, 64) for _ in range(2)]

    class Runner(nn.Module):
        checkpointed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in model:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            return x

    runner = Runner()
    runner.register_forward_pre_hook(lambda *_: model[0]._shared_state.clock.add_(1) and None)
    results = []
    for runner.checkpointed in (False, True):
        model.zero_grad()
        qt.set_rng_state(model, torch.tensor([0]))
        sum(runner(x).square().mean() for x in batches).backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


NVFP4_TEXT = """
[linear]
fprop.input  = { format = "nvfp4" }
fprop.weight = { format = "nvfp4", block = [16, 16] }
dgrad.grad   = { format = "nvfp4", rounding = "stochastic" }
dgrad.weight = { format = "nvfp4", block = [16, 16] }
wgrad.grad   = { format = "nvfp4", rounding = "stochastic", transform = "hadamard" }
wgrad.input  = { format = "nvfp4", transform = "hadamard" }
"""


def test_compile_fullgraph_once_with_moving_clock() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    twin = copy.deepcopy(model)
    qt.apply(model, NVFP4_TEXT)
    qt.apply(twin, NVFP4_TEXT)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")  # its partitioner recomputes in backward whatever is cheap
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(4):
        x = torch.randn(48, 64)
        for m in (compiled, twin):
            m.zero_grad()
            m(x).square().sum().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert counter.frame_count == 1 and qt.rng_state(model).item() == 4
    compiled.eval()
    assert compiled(x).shape == (48, 32) and qt.rng_state(model).item() == 4


def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    linear = make(NVFP4)
    expected = run(linear, x := torch.randn(32, 64), dy := torch.randn(32, 48))
    compiled = torch.compile(linear, fullgraph=True)
    xc = x.clone().requires_grad_()
    linear.zero_grad()
    y = compiled(xc)
    y.backward(dy)
    assert (
        torch.equal(y, expected[0])
        and torch.equal(xc.grad, expected[1])
        and torch.equal(linear.weight.grad, expected[2])
    )


def test_compiled_caller_advances_the_clock() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64))
    qt.apply(model, NVFP4_TEXT)
    step = torch.compile(lambda x: model(x).sum(), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        step(torch.randn(16, 64)).backward()
    assert qt.rng_state(model).item() == 3


def test_state_dict_deepcopy_and_meta() -> None:
    linear = make(NVFP4)
    plain = nn.Linear(64, 48)
    assert list(linear.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(linear.state_dict(), strict=True)
    linear.load_state_dict(plain.state_dict(), strict=True)
    twin = copy.deepcopy(linear)
    assert isinstance(twin, QuantLinear) and twin._shared_state is not linear._shared_state
    x = torch.randn(5, 64)
    assert torch.equal(twin(x), linear(x))
    with torch.no_grad():
        twin.weight.zero_()
    assert twin(x).sub(twin.bias).abs().max() == 0 and linear(x).abs().max() > 0
    with torch.device("meta"):
        ghost = nn.Linear(64, 48)
    ghost = convert(ghost, NVFP4, SharedState(["m"], torch.device("cpu")), 0, seed=0, rank=0)
    assert ghost(torch.randn(3, 64, device="meta")).shape == (3, 48)
    ghost = ghost.to_empty(device="cpu")
    ghost.load_state_dict(linear.state_dict())
    assert torch.equal(ghost(x), linear(x))
    assert linear.double()(x.double()).dtype == torch.float64


def test_module_keeps_hooks_and_identity() -> None:
    linear = nn.Linear(64, 48)
    seen = []
    linear.register_forward_hook(lambda *_: seen.append(1))
    weight = linear.weight
    assert (
        convert(linear, NVFP4, SharedState(["m"], torch.device("cpu")), 0, 0, 0) is linear and linear.weight is weight
    )
    linear(torch.randn(2, 64))
    assert seen == [1] and isinstance(linear, nn.Linear) and "fprop.input" in repr(linear)
    with pytest.raises(ValueError, match="plain nn.Linear, received QuantLinear"):
        convert(linear, NVFP4, SharedState(["m"], torch.device("cpu")), 0, 0, 0)


def test_one_module_used_twice_accumulates_both() -> None:
    linear = make(NVFP4, 64, 64)
    plain = copy_plain(linear)
    x = torch.randn(64, 64)
    linear(linear(x)).sum().backward()
    plain(plain(x)).sum().backward()
    close(linear.weight.grad, plain.weight.grad, 0.35)


def test_strided_and_broadcast_gradients() -> None:
    linear = make(NVFP4)
    x = torch.randn(64, 40).t().requires_grad_()  # column-major input
    y = linear(x)
    y.sum().backward()  # gradient of strides (0, 0)
    first = linear.weight.grad.clone()
    linear.zero_grad()
    linear(x.detach().contiguous()).backward(torch.ones(40, 48))
    assert torch.equal(first, linear.weight.grad)


def test_frozen_stack_passes_gradients_on() -> None:
    first, second = make(NVFP4, 64, 64), make(NVFP4, 64, 64)
    for m in (first, second):
        m.requires_grad_(False)
    x = torch.randn(64, 64, requires_grad=True)
    second(first(x)).square().sum().backward()
    exact = x.detach().clone().requires_grad_()
    copy_plain(second)(copy_plain(first)(exact)).square().sum().backward()
    assert torch.nn.functional.cosine_similarity(x.grad.flatten(), exact.grad.flatten(), dim=0) > 0.95


def test_precision_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 48))
    qt.apply(model, NVFP4_TEXT)
    plain = copy_plain(model[0])
    x, dy = torch.randn(32, 64), torch.randn(32, 48)
    qt.set_precision(model, "both")
    for ours, theirs in zip(run(model[0], x, dy), run(plain, x, dy), strict=True):
        assert torch.equal(ours, theirs)
    qt.set_precision(model, "forward")
    calls = count_quantize(monkeypatch)
    ours, theirs = run(model[0], x, dy), run(plain, x, dy)
    assert torch.allclose(ours[0], theirs[0], atol=1e-6) and not torch.allclose(ours[1], theirs[1], atol=1e-3)
    assert calls.count("fprop.input") == 0 and calls.count("fprop.weight") == 1  # the weight, for Dgrad alone
    qt.set_precision(model, None)
    assert not torch.allclose(run(model[0], x, dy)[0], theirs[0], atol=1e-3)
    with pytest.raises(ValueError, match="received 'backward'"):
        qt.set_precision(model, "backward")


def test_check_finite_names_module_and_operand() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48))
    qt.apply(model, NVFP4_TEXT)
    qt.check_finite(model)
    x = torch.randn(4, 64)
    x[1, 2] = float("inf")
    y = model(x)
    assert not y[1].isfinite().all()  # nothing is laundered
    with pytest.raises(qt.NonFiniteError, match=r"0 \(fprop.input\), 0 \(wgrad.input\)"):
        qt.check_finite(model)
    qt.check_finite(model)  # reported once
    model(torch.randn(4, 64)).backward(torch.full((4, 48), float("nan")))
    with pytest.raises(qt.NonFiniteError, match=r"1 \(dgrad.grad\), 1 \(wgrad.grad\)"):
        qt.check_finite(model)


def test_rng_state_round_trip() -> None:
    model = nn.Sequential(nn.Linear(64, 48))
    assert qt.rng_state(model).tolist() == [0]
    qt.apply(model, NVFP4_TEXT)
    for _ in range(3):
        model(torch.randn(2, 64))
    with torch.no_grad():
        model(torch.randn(2, 64))
    model.eval()
    model(torch.randn(2, 64))
    assert qt.rng_state(model).tolist() == [4] and "clock" not in str(list(model.state_dict()))
    qt.set_rng_state(model, torch.tensor([11]))
    assert qt.rng_state(copy.deepcopy(model)).tolist() == [11]
    with pytest.raises(ValueError, match="1 clock value"):
        qt.set_rng_state(model, torch.zeros(2))


def test_random_combinations_of_features() -> None:
    """Bugs hide in combinations: bias x dtype x strides x leading dimensions x phase, against the straight line."""
    rng = random.Random(0)
    choices = list(itertools.product(EVERY.values(), (True, False), (torch.float32, torch.float64), (1, 17, 64)))
    for rows, bias, dtype, tokens in rng.sample(choices, 20):
        linear = make(rows, 40, 24, bias, dtype)
        linear._shared_state.clock.fill_(rng.randrange(1 << 40))
        x, dy = torch.randn(40, tokens).t().to(dtype), torch.randn(24, tokens).t().to(dtype)
        for i, (a, b) in enumerate(zip(run(linear, x, dy), straight_line(linear, x, dy), strict=True)):
            if bias or i < 3:
                close(a, b, 1e-5)


def test_double_backward_raises() -> None:
    linear = make(NVFP4)
    x = torch.randn(8, 64, requires_grad=True)
    (gx,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gx.square().sum().backward()


def test_inference_mode_then_training() -> None:
    linear = make(NVFP4)
    x = torch.randn(8, 64)
    with torch.inference_mode():
        expected = linear(x).clone()
    y = linear(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert linear.weight.grad.abs().max() > 0


def test_integer_input_raises() -> None:
    with pytest.raises(ValueError, match="floating input, received torch.int64"):
        make(NVFP4)(torch.ones(2, 64, dtype=torch.long))


def test_plain_forward_rounds_once() -> None:
    linear = make(NVFP4, 256, 256).bfloat16()
    linear._shared_state.precision = "forward"
    x = torch.randn(64, 256).bfloat16()
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


def test_idle_modules_are_mentioned_once() -> None:
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    qt.apply(model, "nvfp4-plain")
    nn.functional.linear(model[0](torch.randn(4, 64)), model[1].weight)
    with pytest.warns(UserWarning, match=r"1 converted module\(s\) have not run: 1"):
        qt.check_finite(model)
    model[0](torch.randn(4, 64))
    qt.check_finite(model)


def test_dropping_weight_codes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_quantize(monkeypatch)
    linear = make(NVFP4)
    for _ in range(2):
        linear(torch.randn(4, 64))
    qt.drop_weight_codes(linear)
    linear(torch.randn(4, 64))
    assert calls.count("fprop.weight") == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_weights_are_quantized_once_per_step(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    twin = copy.deepcopy(model)
    qt.apply(model, NVFP4_TEXT)
    qt.apply(twin, NVFP4_TEXT)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    compiled(torch.randn(48, 64))  # trace before counting
    twin(torch.randn(48, 64))
    import quatrain.nn.weights as weights

    calls = []
    original = weights.quantize_cast
    monkeypatch.setattr(weights, "quantize_cast", lambda *a: calls.append(1) or original(*a))
    for step in range(1, 4):
        for optimizer in optimizers:
            optimizer.step()
        for _ in range(4):
            x = torch.randn(48, 64)
            for m in (compiled, twin):
                m(x).square().mean().backward()
        assert len(calls) == 2 * 2 * step  # two weights, two models
    if backend == "aot_eager":
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    model[0].weight.data.mul_(2)
    assert not torch.equal(compiled(x), compiled(x * 0)) and torch.allclose(
        compiled(x), nn.Sequential.forward(model, x), atol=1e-5
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_backward_is_watched_too(backend: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    qt.apply(model, NVFP4_TEXT)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    y = compiled(torch.randn(48, 64))
    y.sum().backward()
    qt.check_finite(model)
    y = compiled(torch.randn(48, 64))
    y.backward(torch.full_like(y, float("inf")))
    with pytest.raises(qt.NonFiniteError, match=r"2 \(dgrad.grad\), 2 \(wgrad.grad\)"):
        qt.check_finite(model)
