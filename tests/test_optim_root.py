"""Root and Muon: torch's Muon where that is asked for, no divergence in FP4, exact states, explicit routing."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quatrain.formats import QuantSpec
from quatrain.optim.matrices import adjustment, iteration_of
from quatrain.optim.root import Muon, Root
from quatrain.optim.state import load_file, save_file

BEST: dict[str, Any] = {"coefficients": "hybrid", "split": "diagonal", "clip": None}


class Model(nn.Module):
    """Every role that a tensor can have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, 64)
        self.conv = nn.Conv2d(4, 32, (4, 8), bias=False)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.depthwise = nn.Parameter(torch.randn(1024, 1, 4) * 0.1)
        self.head = nn.Linear(64, 80)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.down(torch.relu(self.up(h)))
        return self.head(h).square().mean() + self.conv.weight.square().mean() + self.depthwise.square().mean()


def trained(optimizer_of: Any, steps: int = 3, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = optimizer_of(model.named_parameters())
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 80, (4, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()


def matrix(rows: int = 64, columns: int = 96, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns).to(dtype))


def step_of(grad: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    """The change of one named matrix in one step from zero momentum."""
    parameter = nn.Parameter(torch.zeros_like(grad) if weight is None else weight.clone())
    before = parameter.detach().clone()
    parameter.grad = grad.clone()
    Root([("blocks.0.weight", parameter)], **{"lr": 0.1, "weight_decay": 0.0, **options}).step()
    return parameter.detach() - before


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_muon_is_torchs(adjust: str | None) -> None:
    weights = [matrix(), matrix(128, 48)]
    theirs = [nn.Parameter(w.detach().clone()) for w in weights]
    ours = Muon([(f"layer{i}.weight", w) for i, w in enumerate(weights)], lr=0.02, adjust_lr_fn=adjust)
    torchs = torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn=adjust)
    start = [w.detach().clone() for w in weights]
    for _ in range(4):
        for mine, its in zip(weights, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        ours.step()
        torchs.step()
    for mine, its, before in zip(weights, theirs, start, strict=True):
        moved = (its - before).norm()
        assert (mine - its).norm() / moved < 0.02  # BF16 products, rounded in another order


def test_muon_takes_torchs_arguments_in_torchs_order() -> None:
    w = ("layer.weight", matrix())
    group = Muon([w], 1e-2, 0.0, 0.9, False, (3.0, -3.2, 1.2), 1e-8, 4, "original").param_groups[0]
    wanted = torch.optim.Muon([w[1]], 1e-2, 0.0, 0.9, False, (3.0, -3.2, 1.2), 1e-8, 4, "original").param_groups[0]
    assert {key: group[key] for key in wanted if key != "params"} == {k: v for k, v in wanted.items() if k != "params"}
    assert iteration_of(group, (64, 96)).coefficients == ((3.0, -3.2, 1.2),) * 4
    own = Muon([{"params": [w], "ns_coefficients": (2.0, -1.5, 0.5)}]).param_groups[0]
    assert iteration_of(own, (64, 96)).coefficients == ((2.0, -1.5, 0.5),) * 5
    assert adjustment("original", (64, 16)) == 2 and adjustment(None, (16, 64)) == 1
    assert math.isclose(adjustment("match_rms_adamw", (16, 64)), 1.6)


def test_modes() -> None:
    w = [("layer.weight", matrix())]
    paper = Root(w).param_groups[0]
    assert (paper["operands"], paper["clip"], paper["split"]) == ("nvfp4", 0.99, None)
    assert len(set(iteration_of(paper, (64, 96)).coefficients)) == 1  # one fitted triple
    best = iteration_of(Root(w, **BEST).param_groups[0], (64, 96))
    assert best.split == "diagonal" and best.operands == QuantSpec("nvfp4", scale="four-over-six")
    assert best.coefficients == ((3.131, -3.588, 1.261),) * 3 + ((2.0, -1.5, 0.5),) * 2
    muon = iteration_of(Muon(w).param_groups[0], (64, 96))
    assert muon.operands is None and muon.coefficients == ((3.4445, -4.7750, 2.0315),) * 5
    for name in ("jordan", "root", "polar-express", "fitted", "hybrid"):
        assert len(iteration_of(Muon(w, coefficients=name).param_groups[0], (64, 96)).coefficients) == 5


@pytest.mark.parametrize("name", ["jordan", "root", "polar-express"])
def test_sets_for_bf16_are_refused_in_fp4(name: str) -> None:
    for operands in ("nvfp4", QuantSpec("nvfp4"), QuantSpec("mxfp8")):
        with pytest.raises(ValueError, match='"fitted" or "hybrid"'):
            Root([("layer.weight", matrix())], operands=operands, coefficients=name)
    with pytest.raises(ValueError, match='"fitted" or "hybrid"'):
        Muon([("layer.weight", matrix())], operands="nvfp4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"weight_decay": -1.0}, "weight_decay must not"),
        ({"clip": 0.0}, "clip must be None or a quantile"),
        ({"split": "rows"}, "split must be one of"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn must be one of"),
        ({"momentum_state": "int8"}, "momentum_state must be one of"),
        ({"master": "fp16"}, "master must be one of"),
        ({"operands": "fp4"}, "operands must be"),
        ({"operands": QuantSpec("nvfp4", rounding="stochastic")}, "rounding to nearest"),
        ({"operands": QuantSpec("mxfp4")}, 'use split="diagonal"'),
        ({"ns_steps": 0}, "ns_steps is at least 1"),
        ({"coefficients": "jordon"}, "no coefficient set"),
        ({"coefficients": "missing.toml"}, "no coefficient table at"),
        ({"coefficients": ((1.0, 2.0),)}, "triples of finite numbers"),
        ({"coefficients": ((2.0, -1.5, 0.5),) * 3}, "one for each of 5 steps"),
        ({"coefficients": (3.4445, -4.7750, 2.0315)}, "must keep"),
        ({"coefficients": "hybrid", "ns_coefficients": (2.0, -1.5, 0.5)}, "one option"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"adamw": {"betas": (0.9, 1.0)}}, "betas must be two"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    given = [("layer.weight", matrix()), ("layer.bias", nn.Parameter(torch.zeros(3)))]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Root(given, **options)


# Never diverges.


@pytest.mark.parametrize("mode", [{}, BEST, {"operands": "bf16", "coefficients": "jordan", "clip": None}], ids=str)
def test_any_gradient_scale_and_rank_one(mode: dict[str, Any]) -> None:
    for grad in (torch.randn(64, 96), torch.outer(torch.randn(96), torch.randn(64))):
        wanted = step_of(grad, **mode).norm()
        assert wanted > 0.01
        for scale in (1e-12, 3.3e-5, 1e12):
            assert abs(step_of(grad * scale, **mode).norm() / wanted - 1) < 0.02


@pytest.mark.parametrize("mode", [{}, BEST], ids=str)
def test_long_noisy_training_stays_bounded(mode: dict[str, Any]) -> None:
    w = nn.Parameter(torch.zeros(32, 128))
    optimizer = Root([("layer.weight", w)], lr=1.0, weight_decay=0.0, adjust_lr_fn="original", **mode)
    for _ in range(12):
        before = w.detach().clone()
        w.grad = torch.randn_like(w)
        optimizer.step()
        assert torch.linalg.matrix_norm(w.detach() - before, 2) < 2.5  # of a matrix with singular values near 1


def test_zero_and_nonfinite_gradients() -> None:
    w = torch.randn(64, 96)
    for mode in ({}, BEST, {"operands": "bf16"}, {"momentum_state": "nvfp4"}):
        assert torch.equal(step_of(torch.zeros(64, 96), w, **mode), torch.zeros(64, 96))
        for bad in (math.nan, math.inf):
            grad = torch.randn(64, 96)
            grad[3, 4] = bad
            assert step_of(grad, w, **mode).isnan().all()


def test_clip_bounds_what_outliers_do() -> None:
    grad = torch.randn(64, 96)
    grad[5, 7] = 1e5
    plain, clipped = step_of(grad, **BEST), step_of(grad, **{**BEST, "clip": 0.99})
    assert clipped.abs().median() > 3 * plain.abs().median()  # without a clip one entry owns the norm


# Parameters, groups, routing.


def test_routing() -> None:
    model = Model()
    optimizer = Root(model.named_parameters(), lr=0.02)
    routing = optimizer.routing()
    assert set(routing) == {name for name, _ in model.named_parameters()}
    orthogonal = [name for name, t in routing.items() if t.method.startswith("orthogonal")]
    assert orthogonal == ["conv.weight", "up.weight", "down.weight"]
    assert routing["up.weight"].method == "orthogonal, nvfp4, fitted, clip 0.99, momentum bf16"
    assert routing["embed.weight"].method == routing["up.bias"].method == "adamw, fp32"
    assert "embedding" in routing["embed.weight"].reason and "head" in routing["head.weight"].reason
    assert "side of 4" in routing["depthwise"].reason
    assert "up.weight" in str(routing)
    with_embeddings = Root(model.named_parameters(), adamw={"embeddings": "nvfp4"}).routing()
    assert with_embeddings["embed.weight"].method == "adamw, nvfp4"


def test_learning_rates_of_the_rest() -> None:
    def rates(**options: Any) -> set[float]:
        return {g["lr"] for g in Root(Model().named_parameters(), lr=0.02, **options).param_groups}

    assert rates() == {0.02}
    assert rates(adjust_lr_fn="original") == {0.02, 0.002}
    optimizer = Root(Model().named_parameters(), lr=0.02, adamw={"lr": 3e-4, "betas": (0.8, 0.9)})
    matrices, others = optimizer.param_groups
    assert others["lr"] == 3e-4 and others["betas"] == (0.8, 0.9) and others["weight_decay"] == 0.1
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert (matrices["lr"], others["lr"]) == (0.01, 1.5e-4)


def test_groups_and_treatments() -> None:
    a, b, c = matrix(), matrix(), nn.Parameter(torch.randn(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said outright: nothing to warn of
        optimizer = Root(
            [
                {"params": [a], "treatment": "orthogonal", "weight_decay": 0.5},
                {"params": [b, c], "treatment": "adamw", "lr": 1e-4, "state": "fp32"},
            ],
            lr=0.01,
        )
    assert [t.method.split(",")[0] for t in optimizer.routing().values()] == ["orthogonal", "adamw", "adamw"]
    assert optimizer.param_groups[0]["weight_decay"] == 0.5 and optimizer.param_groups[1]["lr"] == 1e-4
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [a]})
    with pytest.raises(ValueError, match="in one group"):
        optimizer.add_param_group({"params": [c]})
    assert len(optimizer.param_groups) == 2
    for group, message in (
        ({"params": [matrix()], "treatment": "muon"}, "treatment must be one of"),
        ({"params": [nn.Parameter(torch.zeros(3))], "treatment": "orthogonal"}, "at least 2 dimensions"),
        ({"params": [matrix(), ("x", matrix())]}, "all parameters have names"),
        ({"params": {matrix()}}, "a set"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 2
    with pytest.warns(UserWarning, match="without names"):
        Root([matrix()])


def test_conv_weights_flatten_and_memory_order_does_not_matter() -> None:
    grad = torch.randn(32, 4, 4, 8)
    flat = step_of(grad.flatten(1), **BEST)
    for weight in (torch.zeros(32, 4, 4, 8), torch.zeros(32, 4, 4, 8).to(memory_format=torch.channels_last)):
        assert torch.equal(step_of(grad, weight, **BEST).flatten(1), flat)
    turned = nn.Parameter(torch.zeros(96, 64).t())
    turned.grad = torch.randn(64, 96)
    plain = step_of(turned.grad, **BEST)
    Root([("layer.weight", turned)], lr=0.1, weight_decay=0.0, **BEST).step()
    assert torch.equal(turned.detach(), plain)


def test_closures_missing_and_sparse_gradients() -> None:
    model = Model()
    optimizer = Root(model.named_parameters())
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.step(lambda: 3.0) == 3.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))  # no gradient, no decay
    assert optimizer.state_bytes() == 0
    model.up.weight.grad = torch.randn(96, 64)
    optimizer.step()
    assert list(optimizer.state) == [model.up.weight]
    model.up.weight.grad = torch.randn(96, 64).to_sparse()
    with pytest.raises(ValueError, match=r"dense.*up\.weight"):
        optimizer.step()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_weight_decay_is_decoupled(lr: float | Tensor) -> None:
    w = torch.randn(64, 96)
    assert torch.allclose(step_of(torch.zeros(64, 96), w, weight_decay=0.5, lr=lr), -0.05 * w, atol=1e-6)


# State.


@pytest.mark.parametrize("kind", ["bf16", "fp32", "nvfp4"])
def test_a_state_is_put_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    def make(parameters: Any) -> Root:
        return Root(
            parameters, lr=0.02, momentum_state=kind, operands=QuantSpec("nvfp4"), adamw={"embeddings": "nvfp4"}
        )

    model, optimizer = trained(make)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    save_file(optimizer, tmp_path / "state.safetensors")
    train(model, optimizer, range(3, 5))
    for load in (lambda o: o.load_state_dict(saved), lambda o: load_file(o, tmp_path / "state.safetensors")):
        again, other = trained(make, steps=1, seed=5)
        again.load_state_dict(weights)
        load(other)
        found = other.state_dict()["state"]
        assert set(found) == set(saved["state"])
        for index, entries in saved["state"].items():
            assert set(found[index]) == set(entries)
            for key, value in entries.items():
                assert found[index][key].dtype == value.dtype and torch.equal(found[index][key], value), key
        train(again, other, range(3, 5))
        for name, value in model.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), name
    bound = {"bf16": 2.0, "fp32": 4.0, "nvfp4": 0.564}[kind]
    held = sum(v.numel() * v.element_size() for k, v in optimizer.state[model.up.weight].items() if k != "step")
    assert held / model.up.weight.numel() <= bound


def test_copies_and_refused_states() -> None:
    model, optimizer = trained(lambda p: Root(p, lr=0.02))
    both = copy.deepcopy((model, optimizer))
    for one, its in (both, (model, optimizer)):
        train(one, its, range(3, 4))
    for name, value in model.state_dict().items():
        assert torch.equal(value, both[0].state_dict()[name]), name
    with pytest.raises(ValueError, match="groups"):
        Root(nn.Linear(64, 64, bias=False).named_parameters()).load_state_dict(optimizer.state_dict())
    _, other = trained(lambda p: Root(p, momentum_state="fp32"))
    broken = copy.deepcopy(other.state_dict())
    broken["state"][0]["momentum_buffer"] = broken["state"][0]["momentum_buffer"].bfloat16()
    with pytest.raises(ValueError, match="must be torch.float32"):
        other.load_state_dict(broken)


@pytest.mark.parametrize("master", ["fp32", "bf16+int8", "bf16-sr"])
def test_bf16_weights_keep_small_updates(master: str) -> None:
    """Updates of a tenth of BF16's step add up, whichever way precision is kept; rounded each time they are lost."""
    torch.manual_seed(1)
    w = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = Root([("layer.weight", w)], lr=1.0, weight_decay=4e-4, momentum=0.0, master=master, clip=None)
    w.grad = torch.zeros_like(w)
    for _ in range(40):
        optimizer.step()
    assert abs(float(w.detach().float().mean()) - (1 - 4e-4) ** 40) < 2e-3
    fp32 = nn.Parameter(torch.randn(64, 96))
    for master_of_fp32 in ("fp32", "bf16-sr"):  # an fp32 weight is its own master
        Root([("layer.weight", fp32)], master=master_of_fp32)
