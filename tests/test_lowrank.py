"""The split of a linear: its algebra exact, lean in what it saves, realigned without a trace in the function."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import quatrain as qt
from quatrain import checkpoint
from quatrain.nn import LinearRows, QuantLinear, SharedState, Split, convert, realign_cost
from quatrain.nn.lowrank import cholesky_qr, principal_rows, rotate_square, split_by_weight, transport
from quatrain.telemetry import operand_snr, saved_bytes
from quatrain.train import train
from tiny_run import history, make_run

S = qt.QuantSpec
ROWS = (
    S(), S(block=(16, 16)), S(rounding="stochastic"), S(block=(16, 16)),
    S(rounding="stochastic", transform="hadamard"), S(transform="hadamard"),
)  # fmt: skip
MODES = ("tangent", "onesided", "core", "naive")


def make(split: Split | None, rows: tuple = (), k: int = 128, n: int = 96) -> tuple[QuantLinear, torch.Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(k, n)
    dense = linear.weight.detach().clone()
    rows = LinearRows(*rows, split=split) if rows else LinearRows(split=split)
    return convert(linear, rows, SharedState(["m"], torch.device("cpu")), 0, seed=0, rank=0), dense


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def data(t: int = 64, k: int = 128, n: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(t, k, generator=generator), torch.randn(t, n, generator=generator)


def projectors(linear: QuantLinear) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = linear.factors()
    q1, q2 = cholesky_qr(right.detach().t()), cholesky_qr(left.detach())
    return q1 @ q1.t(), q2 @ q2.t()


def test_split_and_merge_are_inverse() -> None:
    linear, dense = make(Split(rank=16))
    assert error(linear.merged_weight(), dense) < 1e-6
    u, s, vt = torch.linalg.svd(dense.double())
    left, right = linear.factors()
    best = (u[:, :16] * s[:16]) @ vt[:16]
    captured = float((left.double() @ right.double()).detach().norm() / best.norm())
    assert 0.98 < captured < 1.001  # of a flat spectrum, where directions are not determined
    decaying = (u * (0.8 ** torch.arange(96))) @ vt[:96]
    parts = split_by_weight(decaying, 16, 1.0, 0)
    best = (u[:, :16] * 0.8 ** torch.arange(16)) @ vt[:16]
    assert error(parts.left @ parts.right, best) < 5e-3  # factors in BF16
    assert abs((left.norm() / right.norm()).item() - 1) < 1e-2
    half, dense = make(Split(rank=32, beta=0.5))
    assert error(half.merged_weight(), dense) < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_gradients_without_quantizers(mode: str) -> None:
    linear, dense = make(Split(rank=16, mode=mode, beta=0.5))
    x, dy = data()
    x.requires_grad_()
    y = linear(x)
    y.backward(dy)
    left, right = (f.detach().double() for f in linear.factors())
    g = dy.double().t() @ x.detach().double()
    p1, p2 = projectors(linear)
    assert error(y, x.double() @ dense.double().t() + linear.bias.double()) < 1e-6
    assert error(x.grad, dy.double() @ dense.double()) < 1e-6
    dleft, dright = 0.5 * g @ right.t(), 0.5 * left.t() @ g
    dw = linear.weight.grad.double()
    if mode == "tangent":
        assert error(dw + p2 @ g + g @ p1 - p2 @ g @ p1, g) < 1e-5
    elif mode == "onesided":
        assert error(dw, g - g @ p1) < 1e-5
        assert linear.factors()[1].grad is None and not linear.factors()[1].requires_grad
    elif mode == "core":
        assert error(dw, g - p2 @ g @ p1) < 1e-5
        dleft, dright = p2 @ dleft, dright @ p1
    else:
        assert error(dw, g) < 1e-5
    assert error(linear.factors()[0].grad, dleft) < 1e-5
    if mode != "onesided":
        assert error(linear.factors()[1].grad, dright) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_a_dense_weight_gets_the_whole_gradient(mode: str) -> None:
    """`parametrize = false`: with one operand row alone (here 8-bit Fprop) the backward is exact, whatever the mode."""
    split = Split(rank=16, mode=mode, parametrize=False)
    linear, dense = make(split, (S("mxfp8"), S("mxfp8")))
    assert list(linear.state_dict()) == ["weight", "bias"] and torch.equal(linear.weight, dense)
    x, dy = data()
    x.requires_grad_()
    y = linear(x)
    y.backward(dy)
    assert 1e-4 < error(y, x.double() @ dense.double().t() + linear.bias) < 0.05
    assert error(linear.weight.grad, dy.double().t() @ x.detach().double()) < 1e-5
    assert error(x.grad, dy.double() @ dense.double()) < 1e-5
    quantized, _ = make(split, ROWS)
    x.grad = None
    quantized(x).backward(dy)
    assert error(quantized.weight.grad, dy.double().t() @ x.detach().double()) < 0.2
    assert error(x.grad, dy.double() @ dense.double()) < 0.2


@pytest.mark.parametrize("scale", ["to-6", "four-over-six"])
def test_what_is_saved_and_how_exact_dl1_is(scale: str) -> None:
    rows = list(ROWS)
    rows[1] = rows[3] = S(block=(16, 16), scale=scale)
    rows[5] = S(transform="hadamard", scale=scale)
    linear, _ = make(Split(rank=16), tuple(rows), 512, 256)
    x, dy = data(1024, 512, 256)
    x = (x + 0.5).bfloat16().requires_grad_()
    held = saved_bytes(lambda: linear(x).float().sum(), linear)["bytes"]
    assert held / x.numel() <= 0.5625 + 2 * 16 / 512 + 1e-3
    linear(x).backward(dy.bfloat16())
    g = dy.bfloat16().double().t() @ x.detach().double()
    left, right = linear.factors()
    assert error(right.grad, left.detach().double().t() @ g) <= 0.12
    assert error(left.grad, g @ right.detach().double().t()) <= 0.01
    naive, _ = make(Split(rank=16, mode="naive"), tuple(rows), 512, 256)
    naive(x).backward(dy.bfloat16())
    assert error(naive.factors()[1].grad, left.detach().double().t() @ g) <= 0.12


def test_the_projection_lowers_the_error_of_wgrad() -> None:
    """On activations with a few strong directions that the weight has learnt: below that of plain NVFP4."""
    x, dy = data(512)
    u = torch.linalg.qr(torch.randn(128, 8))[0]
    x = x + 6 * torch.randn(512, 8) @ u.t()
    errors = {}
    for kind in ("plain", "split"):
        linear, _ = make(None, ROWS)
        with torch.no_grad():
            linear.weight.add_(3 * torch.randn(96, 8) @ u.t())
        if kind == "split":
            torch.manual_seed(0)
            inner = nn.Linear(128, 96)
            inner.weight.data.copy_(linear.weight)
            linear = convert(
                inner, LinearRows(*ROWS, split=Split(rank=16)), SharedState(["m"], torch.device("cpu")), 0, 0, 0
            )
        g = dy.double().t() @ x.double()
        linear(x).backward(dy)
        if kind == "split":
            p1, p2 = projectors(linear)
            eye1, eye2 = torch.eye(128), torch.eye(96)
            wanted = (eye2 - p2) @ g @ (eye1 - p1)
            errors[kind] = float((linear.weight.grad - wanted).norm() / g.norm())
        else:
            errors[kind] = error(linear.weight.grad, g)
    assert errors["split"] < 0.7 * errors["plain"], errors


def test_mean_split() -> None:
    exact, dense = make(Split("mean"), (S("mxfp8"), S("mxfp8")))
    x, dy = data()
    x, dy = x + 1, dy + 0.3
    x.requires_grad_()
    exact(x).backward(dy)
    assert error(exact.weight.grad, dy.double().t() @ x.detach().double()) < 1e-5
    assert error(x.grad, dy.double() @ dense.double()) < 1e-5
    assert list(exact.state_dict()) == ["weight", "bias"]
    found = {}
    for split in (None, Split("mean")):
        linear, _ = make(split, ROWS)
        x.grad = None
        y = linear(x)
        y.backward(dy)
        g = dy.double().t() @ x.detach().double()
        found[split] = error(y, x.double() @ dense.double().t() + linear.bias), error(linear.weight.grad, g)
    assert all(ours < 0.85 * theirs for ours, theirs in zip(found[Split("mean")], found[None], strict=True)), found
    linear(torch.zeros(0, 128, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_not_split(value: float) -> None:
    linear, _ = make(Split(rank=16))
    before = [factor.detach().clone() for factor in linear.factors()]
    with torch.no_grad():
        linear.weight[3, 5] = value
    with pytest.raises(
        qt.NonFiniteError, match=r"^m: a weight that is split must be finite.*learning rate; of a model"
    ):
        qt.realign(linear, torch.optim.AdamW(linear.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, linear.factors(), strict=True))
    dense, _ = make(Split(rank=16, parametrize=False), ROWS)
    with torch.no_grad():
        dense.weight[3, 5] = value
    with pytest.raises(qt.NonFiniteError, match="a weight that is split must be finite"):
        dense(data()[0])


def test_realign_keeps_the_function_and_drops_codes() -> None:
    linear, _ = make(Split(rank=16), ROWS)
    x, dy = data()
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        linear(x).backward(dy)
        optimizer.step()
    before, codes = linear.merged_weight(), linear.weight_code_tensors()[0].clone()
    plain = x.bfloat16() @ before.bfloat16().t()
    with torch.no_grad():
        exact = nn.functional.linear(x, before, linear.bias)
    assert qt.realign(linear, optimizer) == 1 and realign_cost(linear)[0] == 1 and realign_cost(linear)[1] > 0
    assert error(linear.merged_weight(), before) < 1e-6
    qt.set_precision(linear, "both")
    assert error(linear(x), exact) < 1e-3
    assert error(linear(x.bfloat16()), exact) < 2 * error(plain + linear.bias, exact) + 1e-3
    qt.set_precision(linear, None)
    linear(x)
    assert not torch.equal(linear.weight_code_tensors()[0], codes)
    left, right = (f.detach().double() for f in linear.factors())
    gram = right @ right.t()
    assert float((gram - gram.diagonal().diag()).norm() / gram.norm()) < 1e-2  # singular directions again


def test_moments_follow_the_basis() -> None:
    """The first moment of L2 is M L1^T for a mean gradient M; after a realignment it is M L1'^T, inside the span."""
    torch.manual_seed(3)
    old = torch.randn(64, 16).double()
    inside = old @ torch.randn(16, 16).double()
    m = torch.randn(48, 64).double()
    assert error(m @ old @ transport(old, inside), m @ inside) < 1e-8
    assert error(transport(old, old.flip(1)), torch.eye(16).flip(1)) < 1e-8  # order and signs change
    v = torch.rand(48, 16)
    assert torch.allclose(rotate_square(v, -torch.eye(16).double()), v.clamp(min=0.1 * float(v.mean())))
    for state in ("rotate", "reset"):
        linear, _ = make(Split(rank=16, state=state))
        optimizer = qt.optim.AdamW(linear.named_parameters(), lr=1e-3)
        x, dy = data()
        linear(x).backward(dy)
        optimizer.step()
        left, right = linear.factors()
        weight_moment = optimizer.state[linear.weight][
            "m_codes" if "m_codes" in optimizer.state[linear.weight] else "exp_avg"
        ]
        kept, m_left, old_right = (
            weight_moment.clone(),
            optimizer.state[left]["exp_avg"].clone(),
            right.detach().clone(),
        )
        qt.realign(linear, optimizer)
        assert torch.equal(weight_moment, kept)
        if state == "reset":
            assert not optimizer.state[left]["exp_avg"].any() and not optimizer.state[right]["exp_avg_sq"].any()
            assert int(optimizer.state[left]["step"]) == 0
            continue
        wanted = m_left.double() @ torch.linalg.lstsq(old_right.t().double(), right.detach().t().double()).solution
        assert error(optimizer.state[left]["exp_avg"], wanted) < 1e-4
        assert (optimizer.state[left]["exp_avg_sq"] > 0).all()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(
                torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            )
        return x


def recipe(**options: object) -> str:
    words = ", ".join(f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in options.items())
    return f"""
[linear]
split = {{ {words} }}
fprop.input = "nvfp4"
fprop.weight = {{ format = "nvfp4", block = [16, 16] }}
dgrad.grad = {{ format = "nvfp4", rounding = "stochastic" }}
dgrad.weight = {{ format = "nvfp4", block = [16, 16] }}
wgrad.grad = {{ format = "nvfp4", rounding = "stochastic", transform = "hadamard" }}
wgrad.input = {{ format = "nvfp4", transform = "hadamard" }}
"""


EVERY = (
    {"kind": "svd", "rank": 16},
    {"kind": "svd", "rank": 16, "mode": "core"},
    {"kind": "svd", "rank": 16, "basis": "activation", "every": 3},
    {"kind": "svd", "rank": 16, "parametrize": False},
    {"kind": "mean"},
)


def net(seed: int = 0, **options: object) -> Net:
    torch.manual_seed(seed)
    model = Net()
    qt.apply(model, recipe(**options))
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(count):
        x = torch.randn(32, 64, generator=generator)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_compiled_checkpointed_copied(options: dict) -> None:
    x = torch.randn(48, 64)
    reference = net(**options)
    reference(x).square().sum().backward()
    grads = [p.grad.clone() for p in reference.parameters() if p.grad is not None]
    saving = net(**options)
    saving.checkpointed = True
    saving(x).square().sum().backward()
    assert all(torch.equal(p, q.grad) for p, q in zip(grads, saving.parameters(), strict=True))
    for twin in (copy.deepcopy(net(**options)), pickle.loads(pickle.dumps(net(**options)))):
        twin(x).square().sum().backward()
        assert all(torch.equal(p, q.grad) for p, q in zip(grads, twin.parameters(), strict=True))
        assert [p.shape for p in twin.parameters()] == [p.shape for p in reference.parameters()]
    model = net(**options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).square().sum().backward()
    for p, q in zip(grads, model.parameters(), strict=True):
        assert error(q.grad, p) < 1e-3
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, reference)]
    reference.zero_grad()
    model.zero_grad()
    for optimizer, m in zip(optimizers, (compiled, reference), strict=True):
        steps(m, optimizer, 4)  # realigns under the compiled model too
    assert error(model.blocks[1].merged_weight(), reference.blocks[1].merged_weight()) < 1e-2
    assert realign_cost(model)[0] == realign_cost(reference)[0] == (4 if options.get("every") else 0)


def test_a_compiled_forward_reads_realigned_weights() -> None:
    model = net(kind="svd", rank=16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 64)
    compiled(x)
    with torch.no_grad():
        model.blocks[0].factors()[0].mul_(2.0)
    qt.realign(model)
    qt.set_precision(model, "both")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


@pytest.mark.parametrize("optimizer", ["torch", "adamw", "root", "two"])
def test_realigns_every_n_steps_of_any_optimizer(optimizer: str) -> None:
    model = net(kind="svd", rank=16, every=3)
    named = list(model.named_parameters())
    factors = [p for n, p in named if "lowrank" in n]
    rest = [p for n, p in named if "lowrank" not in n]
    made = {
        "torch": lambda: [torch.optim.AdamW(model.parameters(), lr=1e-3)],
        "adamw": lambda: [qt.optim.AdamW(named, lr=1e-3)],
        "root": lambda: [qt.optim.Root(named, lr=1e-3)],
        "two": lambda: [torch.optim.AdamW(rest, lr=1e-3), torch.optim.AdamW(factors, lr=1e-3)],
    }[optimizer]()
    counts = []
    for _ in range(7):
        x = torch.randn(16, 64)
        model(x).square().mean().backward()
        for one in made:
            one.step()
            one.zero_grad()
        counts.append(realign_cost(model)[0])
    assert counts == [0, 0, 2, 2, 2, 4, 4]
    if optimizer in ("adamw", "root"):
        routing = made[0].routing()
        assert all("fp32" in t.method for name, t in routing.items() if "lowrank" in name)
    assert all(p.isfinite().all() for p in model.parameters())
    state = made[-1].state[model.blocks[0].factors()[0]]
    assert int(state["step"]) == 7 and state["exp_avg"].dtype == torch.float32


def test_a_zero_layer_stays_zero_and_learns() -> None:
    model = Net()
    nn.init.zeros_(model.blocks[1].weight)
    nn.init.zeros_(model.blocks[1].bias)
    qt.apply(model, recipe(kind="svd", rank=16, every=2))
    block = model.blocks[1]
    assert not block.merged_weight().any() and block.factors()[1].any()
    x = torch.randn(32, 64)
    assert not block(x).any()
    qt.realign(model)
    assert not block.merged_weight().any() and all(p.isfinite().all() for p in model.parameters())
    losses = steps(model, torch.optim.AdamW(model.parameters(), lr=3e-3), 30)
    assert losses[-1] < losses[0] and block.factors()[0].any() and block.merged_weight().any()
    assert all(p.isfinite().all() for p in model.parameters())


def test_rank_deficient_weights() -> None:
    w = torch.randn(64, 5) @ torch.randn(5, 48)
    u, s, v = principal_rows(w, 16, 0)
    assert (s[5:] == 0).all() and (u[:, 5:] == 0).all() and error(v.t() @ v, torch.eye(16)) < 1e-10
    parts = split_by_weight(w, 16, 1.0, 0)
    assert error(parts.residual.double() + parts.left.double() @ parts.right.double(), w) < 1e-6
    q = cholesky_qr(torch.cat([w[:, :3], torch.zeros(64, 2)], 1))
    assert not q[:, 3:].any() and error(q[:, :3].t() @ q[:, :3], torch.eye(3)) < 1e-10
    nearly = torch.ones(64, 4).double() + 1e-4 * torch.randn(64, 4).double()
    q = cholesky_qr(nearly)
    assert error(q.t() @ q, torch.eye(4)) < 1e-6


def test_activation_basis_finds_the_directions_of_the_data() -> None:
    torch.manual_seed(0)
    u = torch.linalg.qr(torch.randn(64, 16))[0]
    model = nn.Sequential(nn.Linear(64, 48))
    qt.apply(model, recipe(kind="svd", rank=16, basis="activation"))
    before = model[0].merged_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = 0.1 * torch.randn(256, 64) + 5 * torch.randn(256, 16) @ u.t()
    model(x).sum().backward()
    optimizer.step()
    assert realign_cost(model)[0] == 1 and error(model[0].merged_weight(), before) < 1e-6
    p1, _ = projectors(model[0])
    assert float((u.double() - p1 @ u.double()).norm() / 4) < 0.05
    assert float((model[0].weight.detach().double() @ p1).norm() / before.norm()) < 0.01  # W_res P1 = 0
    model(x).sum().backward()
    optimizer.step()
    assert realign_cost(model)[0] == 1


def test_random_generators_are_left_alone_and_realigning_is_deterministic() -> None:
    found = []
    for noise in (1, 2):
        model = net(kind="svd", rank=16, every=2)
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found.append((steps(model, optimizer, 5), [p.detach().clone() for p in model.parameters()]))
        assert torch.equal(torch.get_rng_state(), state)
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


def test_state_dict_resumes_and_dense_export_is_plain() -> None:
    options = {"kind": "svd", "rank": 16, "every": 3}
    straight = net(**options)
    optimizer = torch.optim.AdamW(straight.parameters(), lr=1e-3)
    steps(straight, optimizer, 2)
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict(), qt.rng_state(straight)))
    assert int(saved[0]["blocks.0.lowrank_step"]) == 2
    wanted = steps(straight, optimizer, 4, seed=1)
    again = net(1, **options)
    other = torch.optim.AdamW(again.parameters(), lr=1e-3)
    assert again.load_state_dict(saved[0]).missing_keys == []
    other.load_state_dict(saved[1])
    qt.set_rng_state(again, saved[2])
    assert steps(again, other, 4, seed=1) == wanted
    assert realign_cost(again)[0] == 4  # after steps 3 and 6
    dense = qt.dense_state_dict(again)
    plain = Net()
    assert list(dense) == list(plain.state_dict())
    plain.load_state_dict(dense)
    qt.set_precision(again, "both")
    x = torch.randn(8, 64)
    assert error(plain(x), again(x)) < 1e-5


def test_a_run_resumes_bit_for_bit_and_its_checkpoint_is_a_plain_model(tmp_path: Path) -> None:
    text = 'split = { kind = "svd", rank = 16, every = 2 }\n'
    runs = []
    for name in ("straight", "broken"):
        config = make_run(tmp_path / name, hidden_size=64, intermediate_size=64)
        rows = (tmp_path / name / "tiny.toml").read_text()
        tiny = qt.load_recipe(rows.replace("[linear]\n", "[linear]\n" + text))
        seen = []

        def stop(seen: list = seen, name: str = name) -> bool:
            seen.append(1)
            return name == "broken" and len(seen) == 3

        if name == "broken":
            with pytest.raises(KeyboardInterrupt):
                train(config, recipe=tiny, progress=False, stop=stop)
        runs.append((train(config, recipe=tiny, progress=False), history(config.out), Path(config.out)))
    assert runs[0][1] == runs[1][1] and runs[0][0]["val_loss"] == runs[1][0]["val_loss"]
    assert runs[0][0]["realigned"] > 0 and runs[0][0]["realign_seconds"] > 0
    newest = checkpoint.latest(runs[0][2] / "checkpoints")
    assert newest is not None
    from transformers import AutoModelForCausalLM

    plain, info = AutoModelForCausalLM.from_pretrained(newest.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    parts = load_file(newest.folder / "optimizer.safetensors")
    name = "model.layers.0.mlp.up_proj"
    rest, left, right = (parts[f"split/{name}.{part}"] for part in ("weight", "lowrank_left", "lowrank_right"))
    assert (
        error(plain.get_submodule(name).weight, rest + left @ right) < 1e-6 and error(rest, rest + left @ right) > 0.1
    )


def test_rows_of_the_split_are_strict_and_round_trip() -> None:
    for name in ("nvfp4-lora-svd", "averis"):
        found = qt.load_recipe(name)
        again = qt.load_recipe(found.to_toml())
        assert again == found and again.fingerprint() == found.fingerprint() != qt.load_recipe("nvfp4").fingerprint()
    from quatrain.recipe import diff

    assert diff(qt.load_recipe("nvfp4"), qt.load_recipe("nvfp4-lora-svd")) == [("split", "-", "svd rank 32")]
    assert ("split", "-", "mean") in diff(qt.load_recipe("nvfp4"), qt.load_recipe("averis"))
    other = qt.load_recipe(recipe(kind="svd", rank=16, mode="core"))
    assert ("split.mode", "tangent", "core") in diff(qt.load_recipe(recipe(kind="svd", rank=16)), other)
    dense = qt.load_recipe(recipe(kind="svd", parametrize=False))
    assert qt.load_recipe(dense.to_toml()) == dense
    assert "every = 2048" in dense.to_toml()  # as earlier runs wrote it
    with pytest.raises(ValueError, match="nothing to realign"):
        Split(parametrize=False, every=3)
    assert qt.load_recipe(recipe(kind="svd", rank=32, beta=1.0)).fingerprint() == (
        qt.load_recipe(recipe(kind="svd")).fingerprint()
    )
    for options, message in (
        ({"kind": "svd", "rank": 24}, "multiple of 16"),
        ({"kind": "lora"}, "split.kind must be one of svd, mean"),
        ({"kind": "svd", "ranks": 16}, "unknown key 'ranks' in split"),
        ({"kind": "svd", "ranks": 16}, "did you mean 'rank'"),
        ({"kind": "svd", "rank": "16"}, "split.rank must be a whole number, received '16'"),
        ({"kind": "svd", "parametrize": 1}, "split.parametrize must be true or false"),
        ({"kind": "mean", "rank": 16}, "no options"),
        ({"kind": "svd", "parametrize": False, "every": 100, "state": "reset"}, "received every and state"),
        ({"kind": "svd", "parametrize": False, "basis": "activation"}, "splits W by itself"),
        ({"kind": "svd", "beta": 0.0}, "must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            qt.load_recipe(recipe(**options))


def test_apply_reports_the_split_and_fits_the_rank() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 16), nn.Linear(16, 64), nn.Linear(64, 256))
    report = qt.apply(model, recipe(kind="svd", rank=32))
    assert report.converted["0"] == "nvfp4, 6 of 6 operands, split svd rank 16"
    assert report.converted["1"] == "nvfp4, 6 of 6 operands"
    assert report.converted["3"].endswith("svd rank 32") and "split=svd rank 16" in repr(model)
    assert any("quantized without the split" in n for n in report.notes) and model[1].split is None
    assert any("not to lowrank_right (the trainer does)" in n for n in report.notes)
    with pytest.raises(ValueError, match="sides are at least 32"):
        qt.apply(nn.Sequential(nn.Linear(16, 64)), recipe(kind="svd"))
    for text, noted in (('[linear]\nsplit = "mean"\n', True), (recipe(kind="mean"), False)):
        found = qt.apply(nn.Sequential(nn.Linear(64, 64)), text).notes
        assert any("has no effect" in note for note in found) == noted
    meta = nn.Sequential(nn.Linear(64, 64, device="meta"))
    qt.apply(meta, recipe(kind="svd", rank=16))
    assert meta[0].factors()[0].is_meta and meta(torch.empty(4, 64, device="meta")).shape == (4, 64)


def test_only_one_factor_decays(tmp_path: Path) -> None:
    from quatrain.train.optimizer import make_optimizer

    config = make_run(tmp_path)
    model = net(kind="svd", rank=16)
    optimizer = make_optimizer(model, config, torch.device("cpu"), qt.load_recipe("bf16").optimizer)
    left, right = model.blocks[0].factors()
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay[id(left)] == decay[id(model.blocks[0].weight)] > 0 == decay[id(right)]


RANK = """
import sys, torch
import quatrain as qt
from quatrain.nn import realign_cost
rank, folder, text, expected = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 48))
qt.apply(plain, text)
model = torch.nn.parallel.DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
for _ in range(5):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
for mine in model.parameters():
    other = mine.detach().clone()
    torch.distributed.broadcast(other, 0)
    if not torch.equal(mine, other):
        sys.exit("the ranks have come apart")
if realign_cost(model)[0] != expected:
    sys.exit(f"realigned {realign_cost(model)[0]} times")
torch.distributed.barrier()  # who leaves first would cut the other off
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("basis", ["weight", "activation"])
def test_data_parallel_ranks_stay_equal(tmp_path: Path, basis: str) -> None:
    text = recipe(kind="svd", rank=16, every=2, basis=basis)
    expected = "4" if basis == "weight" else "6"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, rank, str(tmp_path), text, expected], stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        found = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], found


def test_signal_to_noise_is_of_what_is_quantized() -> None:
    x, dy = data()
    x = x + 4
    found = {}
    for split in (None, Split(rank=16), Split(rank=16, parametrize=False), Split("mean")):
        linear, _ = make(split, ROWS)
        loss = lambda linear=linear: (linear(x) * dy).sum()  # noqa: E731
        found[split] = operand_snr(linear, loss)[""]
        assert set(found[split]) == set(found[None]) and all(4 < db < 40 for db in found[split].values())
    assert found[Split("mean")]["fprop.input"] != found[None]["fprop.input"]
    assert found[Split(rank=16)]["wgrad.grad"] != found[None]["wgrad.grad"]
    assert found[Split(rank=16)]["dgrad.weight"] != found[None]["dgrad.weight"]


@pytest.mark.parametrize("name", ["lowrank_left", "lowrank_right"])
def test_factors_that_are_no_leaves_are_not_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory and version come back at another value; on a GPU no sample tells."""
    monkeypatch.setattr("quatrain.nn.factors.sample", lambda weight: None)
    monkeypatch.setattr("quatrain.nn.factors.same_sample", lambda taken, weight: True)
    linear, _ = make(Split(rank=16))
    x, base = data()[0], torch.randn_like(getattr(linear, name)).requires_grad_()

    def off_by(scale: float) -> float:
        given = base * scale
        y = torch.func.functional_call(linear, {name: given}, (x,)).detach()
        left, right = (given if n == name else getattr(linear, n) for n in ("lowrank_left", "lowrank_right"))
        return error(y, x @ (linear.weight + left @ right).t() + linear.bias)

    assert max(off_by(float(scale)) for scale in range(1, 12)) < 1e-5


@pytest.mark.parametrize("name", ["weight", "lowrank_left", "lowrank_right"])
def test_writes_through_data_to_half_of_the_columns_are_noticed(name: str) -> None:
    linear, _ = make(Split(rank=16), ROWS, 64, 64)
    x = torch.randn(32, 64)
    linear(x)
    getattr(linear, name).data[:, 1::2] = 0.0
    wanted = copy.deepcopy(linear)(x)
    assert torch.equal(linear(x), wanted)
