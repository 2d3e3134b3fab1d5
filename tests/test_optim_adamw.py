"""quatrain.optim.AdamW in the place of torch.optim.AdamW: what a training script can do with it."""

import copy
import pickle
import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quatrain as qt
from quatrain.optim.routing import canonical, role_of, tensor_id

EXAMPLES = Path(__file__).parents[1] / "examples"
OPTIONS = [
    {"state": "nvfp4"}, {"state": "fp32"}, {"state": "bf16"}, {"state": "nvfp4", "faithful": True},
]  # fmt: skip


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    layers = {"embed": nn.Embedding(64, 96), "up": nn.Linear(96, 160), "norm": nn.LayerNorm(160)}
    return nn.ModuleDict({**layers, "down": nn.Linear(160, 96), "lm_head": nn.Linear(96, 64, bias=False)}).to(dtype)


def loss_of(net: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(64, (32,), generator=torch.Generator().manual_seed(seed))
    hidden = net["down"](torch.relu(net["norm"](net["up"](net["embed"](tokens)))))
    return nn.functional.cross_entropy(net["lm_head"](hidden).float(), (7 * tokens + 3) % 64)


def train(net: nn.Module, optimizer: Any, steps: int, start: int = 0) -> float:
    loss = torch.zeros(())
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()
        optimizer.step()
    return loss.item()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in net.parameters()])


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype))


def named(**parameters: Tensor) -> list[tuple[str, Tensor]]:
    return list(parameters.items())


# ---- the same as torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp32_state_is_torch_to_the_bit(dtype: torch.dtype, maximize: bool) -> None:
    ours, theirs = model(dtype=dtype), model(dtype=dtype)
    options: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.97), "maximize": maximize}
    train(ours, qt.optim.AdamW(ours.named_parameters(), state="fp32", **options), 6)
    train(theirs, torch.optim.AdamW(theirs.parameters(), fused=True, **options), 6)
    assert torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("options", OPTIONS)
def test_training_follows_torch(options: dict[str, Any]) -> None:
    ours, theirs = model(), model()
    final = train(ours, qt.optim.AdamW(ours.named_parameters(), lr=3e-3, **options), 60)
    wanted = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=3e-3), 60)
    assert wanted < 3.0 and abs(final - wanted) < 0.15 * wanted
    moved, error = weights(theirs) - weights(model()), weights(ours) - weights(theirs)
    assert error.norm() < (1e-4 if options["state"] == "fp32" else 0.5) * moved.norm()


@pytest.mark.parametrize("state", ["nvfp4", "fp32"])
def test_maximize_mirrors_minimize(state: str) -> None:
    up, down = (nn.Parameter(torch.zeros(64, 128)) for _ in range(2))
    ascent = qt.optim.AdamW(named(w=up), maximize=True, state=state)
    descent = qt.optim.AdamW(named(w=down), state=state)
    for step in range(3):
        gradient = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
        up.grad, down.grad = gradient.clone(), gradient.clone()
        ascent.step()
        descent.step()
    assert torch.equal(up, -down) and up.abs().max() > 1e-4
    assert torch.equal(ascent.moments(up)[0], -descent.moments(down)[0])


def test_closure_and_its_value() -> None:
    net = model()
    optimizer = qt.optim.AdamW(net.named_parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss

    before, wanted = weights(net), closure().item()
    with torch.no_grad():
        assert optimizer.step(closure).item() == wanted
    assert not torch.equal(before, weights(net))
    assert optimizer.step() is None


@pytest.mark.parametrize("state", ["nvfp4", "fp32"])
def test_schedulers_with_numbers_and_tensors(state: str) -> None:
    results = []
    for lr in (1e-2, torch.tensor(1e-2)):
        net = model()
        optimizer = qt.optim.AdamW(net.named_parameters(), lr=lr, state=state)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
        train(net, optimizer, 1)
        for step in range(1, 5):
            scheduler.step()
            before = weights(net)
            train(net, optimizer, 1, step)
            assert torch.equal(before, weights(net)) == (step >= 3)
        results.append(weights(net))
    assert torch.allclose(*results, rtol=0, atol=1e-6)


def test_one_cycle_changes_betas() -> None:
    net = model()
    optimizer = qt.optim.AdamW(net.named_parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
    for step in range(10):
        train(net, optimizer, 1, step)
        scheduler.step()
    assert optimizer.param_groups[0]["betas"][0] != 0.9 and weights(net).isfinite().all()


def test_grad_scaler_skips_overflow_and_unscales() -> None:
    scaled, plain = model(), model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = qt.optim.AdamW(scaled.named_parameters(), lr=1e-2)
    scaler.scale(loss_of(scaled, 0)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(scaled.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()
    train(plain, qt.optim.AdamW(plain.named_parameters(), lr=1e-2), 1)
    assert torch.allclose(weights(scaled), weights(plain), atol=1e-6)
    before = weights(scaled)
    scaler.scale(loss_of(scaled, 1) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, weights(scaled)) and scaler.get_scale() == 512.0


def test_hooks_run() -> None:
    net, seen = model(), []
    optimizer = qt.optim.AdamW(net.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(net, optimizer, 1)
    assert seen == ["before", "after"]


@pytest.mark.parametrize("state", ["nvfp4", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_steps(state: str, dtype: torch.dtype) -> None:
    shapes = [
        (),
        (5,),
        (5000,),
        (0,),
        (0, 64),
        (64, 0),
        (3, 5),
        (4096, 1),
        (8, 24, 5, 5),
        (70, 70),
        (33, 200),
        (1, 4096),
    ]
    parameters = [(f"p{i}", parameter(*shape, dtype=dtype)) for i, shape in enumerate(shapes)]
    before = {name: p.detach().clone() for name, p in parameters}
    optimizer = qt.optim.AdamW(parameters, lr=0.1, state=state)
    for _ in range(2):
        for _, p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    for name, p in parameters:
        assert torch.allclose(p.float(), before[name].float() * 0.998 - 0.2, atol=0.03), name


@pytest.mark.parametrize("state", ["nvfp4", "fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_formats_give_the_same_values(state: str, dtype: torch.dtype) -> None:
    values, gradient = torch.randn(32, 24, 4, 4).to(dtype), torch.randn(32, 24, 4, 4).to(dtype)
    results = []
    for memory in (torch.contiguous_format, torch.channels_last):
        weight = nn.Parameter(values.clone(memory_format=memory))
        optimizer = qt.optim.AdamW(named(w=weight), lr=1e-2, state=state)
        for _ in range(3):
            weight.grad = gradient.clone(memory_format=memory)
            optimizer.step()
        assert weight.is_contiguous(memory_format=memory)
        results.append(weight.detach().contiguous())
    assert torch.equal(*results) and not torch.equal(results[0], values)


def test_gradients_of_another_dtype_or_layout() -> None:
    weight, other = (nn.Parameter(torch.zeros(64, 128)) for _ in range(2))
    gradient = torch.randn(128, 64).bfloat16().float().t()
    first, second = qt.optim.AdamW(named(w=weight)), qt.optim.AdamW(named(w=other))
    weight.grad, other.grad = gradient, gradient.contiguous()
    first.step()
    second.step()
    assert torch.equal(weight, other)


# ---- gradients that are not there, zero or not finite ------------------------------------------------------------


@pytest.mark.parametrize("state", ["nvfp4", "fp32"])
def test_a_late_tensor_has_its_own_bias_correction(state: str) -> None:
    pairs = [[nn.Parameter(torch.zeros(64, 128)) for _ in range(2)] for _ in range(2)]
    ours = qt.optim.AdamW([("a", pairs[0][0]), ("b", pairs[0][1])], lr=1e-2, state=state, weight_decay=0)
    theirs = torch.optim.AdamW(pairs[1], lr=1e-2, weight_decay=0)
    for step in range(6):
        for early, late in pairs:
            early.grad = torch.ones(64, 128)
            late.grad = torch.ones(64, 128) if step in (3, 5) else None
        ours.step()
        theirs.step()
    for mine, wanted in zip(*pairs, strict=True):
        assert mine.mean().item() == pytest.approx(wanted.mean().item(), rel=0.01)
        assert torch.allclose(mine, wanted, rtol=0.25 if state == "nvfp4" else 1e-5)
    assert [int(ours.state[p]["step"]) for p in pairs[0]] == [6, 2]


def test_tensors_that_step_together_share_a_clock() -> None:
    net = model()
    optimizer = qt.optim.AdamW(net.named_parameters(), embeddings="nvfp4")
    train(net, optimizer, 2)
    clocks = {id(s["step"]) for s in optimizer.state.values() if "m_codes" in s}
    assert len(clocks) == 1
    net["up"].weight.grad = None
    optimizer.step()
    steps = {name: int(optimizer.state[p]["step"]) for name, p in net.named_parameters()}
    assert steps["up.weight"] == 2 and steps["down.weight"] == steps["lm_head.weight"] == 3


def test_zero_gradients_move_nothing() -> None:
    weight = parameter(64, 256)
    before = weight.detach().clone()
    optimizer = qt.optim.AdamW(named(w=weight), lr=1.0, weight_decay=0.0)
    for _ in range(5):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert torch.equal(weight, before)


def test_a_coordinate_without_gradient_stays_near() -> None:
    weight = nn.Parameter(torch.zeros(32, 128))
    optimizer = qt.optim.AdamW(named(w=weight), lr=1e-3, weight_decay=0.0)
    silent = torch.rand(32, 128) < 0.1
    for _ in range(500):
        weight.grad = torch.randn(32, 128).masked_fill(silent, 0.0)
        optimizer.step()
    assert weight[silent].abs().max() <= 1e-3
    assert weight[~silent].abs().max() > 3e-3


def test_a_coordinate_that_falls_silent_coasts_as_in_fp32() -> None:
    ours, theirs = (nn.Parameter(torch.zeros(32, 256)) for _ in range(2))
    mine = qt.optim.AdamW(named(w=ours), lr=1e-3, weight_decay=0.0)
    wanted = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.0)
    quiet = torch.rand(32, 256) < 0.25
    for step in range(100):
        gradient = 1.0 + 0.3 * torch.randn(32, 256)
        ours.grad = gradient.masked_fill(quiet, 0.0) if step >= 50 else gradient
        theirs.grad = ours.grad.clone()
        if step == 50:
            start = theirs.detach().clone(), ours.detach().clone()
        mine.step()
        wanted.step()
    coasted, total = ours - start[1], ours
    for mine_moved, wanted_moved in ((coasted, theirs - start[0]), (total, theirs)):
        slope = (mine_moved * wanted_moved)[quiet].sum() / wanted_moved[quiet].square().sum()
        assert abs(slope - 1) < 0.05


@pytest.mark.parametrize("state", ["nvfp4", "fp32"])
def test_a_nan_gradient_gives_a_nan_weight(state: str) -> None:
    weight, other = parameter(64, 256), parameter(64, 128)
    before = weight.detach().clone()
    optimizer = qt.optim.AdamW(named(w=weight, o=other), state=state)
    weight.grad, other.grad = torch.ones_like(weight), torch.ones_like(other)
    weight.grad[3, 5] = float("nan")
    optimizer.step()
    assert weight[3, 5].isnan() and other.isfinite().all()
    lost = weight.isnan()
    assert lost.sum() == 1 if state == "fp32" else not lost[:, 128:].any() and not lost[torch.arange(64) != 3].any()
    assert torch.allclose(weight[~lost], before[~lost] * (1 - 1e-5) - 1e-3, atol=1e-5)
    weight.grad[3, 5] = 1.0
    optimizer.step()
    assert weight[3, 5].isnan()


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad must be False.*torch.optim.AdamW"),
        ({"differentiable": True}, "differentiable must be False"),
        ({"foreach": True}, "foreach must be None or False"),
        ({"state": "int8"}, "state must be one of nvfp4, fp32, bf16"),
        ({"embeddings": "4bit"}, "embeddings must be one of"),
        ({"master": "fp16"}, "master must be one of fp32, bf16.int8, bf16-sr"),
        ({"master": "bf16-sr"}, "none of the parameters is BF16"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": torch.ones(2)}, "lr as a tensor must have one element"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers in"),
        ({"seed": -1}, "seed must be in"),
        ({"tile": 100}, "tile must be"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qt.optim.AdamW(named(w=parameter(64, 64)), **options)


def test_arguments_of_torch_are_taken() -> None:
    optimizer = qt.optim.AdamW(
        named(w=parameter(64, 64)), 1e-3, (0.9, 0.99), 1e-8, 0.1, False, fused=True, foreach=False, capturable=False
    )
    assert optimizer.param_groups[0]["weight_decay"] == 0.1 and isinstance(optimizer, torch.optim.Optimizer)


def test_gradients_and_parameters_are_refused() -> None:
    table, other = nn.Embedding(64, 128, sparse=True), parameter(64, 128)
    before = other.detach().clone()
    optimizer = qt.optim.AdamW(named(other=other, table=table.weight))
    table(torch.tensor([1, 2])).sum().backward()
    other.grad = torch.ones_like(other)
    with pytest.raises(ValueError, match="dense.*of table.*SparseAdam"):
        optimizer.step()
    assert torch.equal(other, before)
    with pytest.raises(ValueError, match="complex"):
        qt.optim.AdamW(named(w=nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))))
    with pytest.raises(ValueError, match="float16"):
        qt.optim.AdamW(
            named(w=parameter(64, 64, dtype=torch.float16), b=parameter(64, dtype=torch.bfloat16)), master="bf16-sr"
        )
    with pytest.raises(ValueError, match="received a Linear; give its .named_parameters"):
        qt.optim.AdamW(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="empty parameter list"):
        qt.optim.AdamW([])


# ---- groups and routing ------------------------------------------------------------------------------------------


def test_groups_override() -> None:
    first, second, third = (parameter(64, 128) for _ in range(3))
    optimizer = qt.optim.AdamW(
        [{"params": named(a=first), "lr": 0.0}, {"params": named(b=second), "state": "fp32", "weight_decay": 0.0}],
        lr=1.0,
    )
    optimizer.add_param_group({"params": named(c=third), "state": "bf16", "betas": [0.5, 0.5]})
    before = [p.detach().clone() for p in (first, second, third)]
    for p in (first, second, third):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(first, before[0]) and torch.allclose(second, before[1] - 1.0, atol=1e-5)
    assert [t.method for t in optimizer.routing().values()] == ["nvfp4", "fp32", "bf16"]
    with pytest.raises(ValueError, match="state must be one of"):
        optimizer.add_param_group({"params": named(d=parameter(64, 64)), "state": "q4"})
    with pytest.raises(ValueError, match="with/without names"), warnings.catch_warnings():
        optimizer.add_param_group({"params": [parameter(64, 64)]})
    assert len(optimizer.param_groups) == 3


def test_routing_says_what_and_why() -> None:
    net = model()
    routing = qt.optim.AdamW(net.named_parameters()).routing()
    assert {name: t.method for name, t in routing.items() if t.method != "fp32"} == {
        "up.weight": "nvfp4",
        "down.weight": "nvfp4",
    }
    text = str(routing)
    assert 'embedding by its name ("embed")' in text and 'output head by its name ("lm_head")' in text
    assert "norm.weight" in text and "1-D" in text and "160x96" in text
    wanted = r"nvfp4, 1.\d\d bytes each: 2 tensors, 30,720 parameters .hidden matrix.: up.weight, down.weight\n"
    assert re.search(wanted, routing.summary())
    optimizer = qt.optim.AdamW(net.named_parameters())
    train(net, optimizer, 1)
    assert (
        routing.summary()
        .splitlines()[-1]
        .startswith(f"all, {optimizer.bytes_per_parameter():.2f} bytes each: 8 tensors")
    )
    asked = qt.optim.AdamW(net.named_parameters(), embeddings="nvfp4").routing()
    assert asked["embed.weight"].method == asked["lm_head.weight"].method == "nvfp4"
    narrow = qt.optim.AdamW(named(conv=parameter(2000, 1, 4), tiny=parameter(8, 8))).routing()
    assert "rows of 4 elements" in narrow["conv"].reason and "64 elements, fewer than 4,096" in narrow["tiny"].reason
    low = qt.optim.AdamW(model(dtype=torch.bfloat16).named_parameters(), master="bf16-sr").routing()
    assert low["up.weight"].method == "nvfp4, master bf16-sr"


def test_without_names_one_warning() -> None:
    net = model()
    with pytest.warns(UserWarning, match="4 tensors of at least 2 dimensions and 4,096.*named_parameters") as seen:
        optimizer = qt.optim.AdamW(net.parameters())
    assert len(seen) == 1 and seen[0].filename == __file__
    assert sum(t.method == "nvfp4" for t in optimizer.routing().values()) == 4
    assert optimizer.routing()["parameter 0"].reason == "no name: taken for a hidden matrix"
    qt.optim.AdamW(net.parameters(), state="fp32")
    qt.optim.AdamW([net["norm"].weight])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"), ("transformer.wte.weight", "embedding"),
        ("tok_embeddings.weight", "embedding"), ("_orig_mod.module.embedding.weight", "embedding"),
        ("bert.embeddings.word_embeddings.weight", "embedding"), ("shared.weight", "embedding"),
        ("gpt_neox.embed_in.weight", "embedding"), ("backbone.embeddings.weight", "embedding"),
        ("lm_head.weight", "head"), ("module.lm_head.weight", "head"), ("embed_out.weight", "head"),
        ("output.weight", "head"), ("model.output.weight", "head"), ("classifier.6.weight", "head"),
        ("cls.predictions.decoder.weight", "head"), ("transformer.lm_head.weight", "head"),
        ("blocks.0.att.output.weight", "matrix"), ("encoder.layer.3.output.dense.weight", "matrix"),
        ("model.layers.0.self_attn.q_proj.weight", "matrix"), ("model.decoder.layers.0.fc1.weight", "matrix"),
        ("h.0.attn.c_proj.weight", "matrix"), ("backbone.layers.1.mixer.in_proj.weight", "matrix"),
    ],
)  # fmt: skip
def test_roles_by_name(name: str, kind: str) -> None:
    assert role_of(name, torch.empty(64, 64, device="meta")).kind == kind


def test_ids_do_not_depend_on_wrappers() -> None:
    assert tensor_id("_orig_mod.a.weight") == tensor_id("module.a.weight") == tensor_id("a.weight")
    assert tensor_id("a.weight") != tensor_id("b.weight") and canonical("a._orig_mod.b") == "a.b"


# ---- BF16 parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["nvfp4", "fp32", "bf16"])
@pytest.mark.parametrize("master", ["fp32", "bf16+int8", "bf16-sr"])
def test_bf16_parameters_keep_small_steps(state: str, master: str) -> None:
    """Steps of an eightieth of BF16's spacing under 1: rounded to nearest, none of them would ever arrive."""
    weight = nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
    optimizer = qt.optim.AdamW(named(w=weight), lr=5e-5, weight_decay=0.0, state=state, master=master)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    near = {"fp32": 2e-3, "bf16-sr": 6e-4, "bf16+int8": 1.5e-3}[master]  # 16 bits: each step is rounded to 2^-16
    assert weight.float().mean().item() == pytest.approx(1.0 - 100 * 5e-5, abs=near)
    if master == "bf16-sr":
        assert weight.unique().numel() > 1


def test_bf16_moments_do_not_stand_still() -> None:
    """At beta2 = 0.999, v = 0.25 and g = 1 the increment is below half a unit of BF16: to nearest, v stays there."""
    weight = parameter(64, 64)
    optimizer = qt.optim.AdamW(named(w=weight), state="bf16")
    weight.grad = torch.ones_like(weight)
    for _ in range(500):
        optimizer.step()
    exp_avg, exp_avg_sq = optimizer.moments(weight)
    assert exp_avg_sq.mean().item() == pytest.approx(1 - 0.999**500, rel=0.01)
    assert exp_avg.mean().item() == pytest.approx(1.0, rel=0.01)
    assert optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16


def test_a_parameter_written_by_someone_else_is_not_overwritten_by_its_master() -> None:
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = qt.optim.AdamW(named(w=weight), lr=1e-3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.data.fill_(4.0)
    optimizer.step()
    assert torch.allclose(weight.float(), torch.full((8,), 4.0), atol=0.05)


# ---- memory ------------------------------------------------------------------------------------------------------


def test_bytes_per_parameter() -> None:
    net = model()
    optimizer = qt.optim.AdamW(net.named_parameters(), embeddings="nvfp4")
    assert optimizer.state_bytes() == 0 and optimizer.bytes_per_parameter() == 0.0
    weight = parameter(256, 4096)
    optimizer = qt.optim.AdamW(named(w=weight))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert 1.125 < optimizer.bytes_per_parameter() <= 1.16
    full = qt.optim.AdamW(named(w=weight), state="fp32")
    full.step()
    assert full.bytes_per_parameter() == pytest.approx(8.0, abs=1e-4)


# ---- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_go_on_with_the_same_bits(duplicate: Callable[[Any], Any]) -> None:
    net = model()
    optimizer = qt.optim.AdamW(net.named_parameters(), lr=1e-2, backend="reference")
    train(net, optimizer, 3)
    other_net, other = duplicate((net, optimizer))
    train(net, optimizer, 3, 3)
    train(other_net, other, 3, 3)
    assert torch.equal(weights(net), weights(other_net)) and other.backend == "reference"


def test_the_seed_decides_the_bits() -> None:
    results = []
    for seed in (0, 0, 1):
        net = model()
        train(net, qt.optim.AdamW(net.named_parameters(), lr=1e-2, seed=seed), 4)
        results.append(weights(net))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


# ---- examples ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", ["pytorch_loop.py", "huggingface.py"])
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str], quiet_transformers: None) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    text = capsys.readouterr().out
    assert "bytes a parameter" in text
    first, last = (float(line.split()[-1]) for line in text.splitlines() if line.startswith("loss"))
    assert last < 0.9 * first
    source = (EXAMPLES / name).read_text()
    assert source.count("qt.") == 1 and "# optimizer = torch.optim.AdamW(" in source
