"""Parameter groups of AdamW, Root and Muon: added late, moved, refused, misspelled, with learning rates as tensors."""

import warnings
from collections import UserList
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import quatrain as qt
from quatrain.optim import AdamW, Muon, Root


@pytest.fixture(autouse=True)
def quiet_schedulers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
        yield


def tensors(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def step(optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_a_parameter_in_a_group_of_its_own_keeps_its_count() -> None:
    found: list[list[Tensor]] = []
    for moves in (False, True):
        a, b = tensors((64, 64), (64, 64))
        optimizer = AdamW([("a", a), ("b", b)], lr=1e-2)
        for t in range(4):
            if moves and t == 2:
                group = optimizer.param_groups[0]
                group["params"].pop()
                group["param_names"].pop()
                optimizer.add_param_group({"params": [("b", b)], "lr": 1e-2})
            step(optimizer, t)
        assert [int(optimizer.state[p]["step"]) for p in (a, b)] == [4, 4]
        found.append([a.detach(), b.detach()])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("cls", [Root, Muon])
def test_groups_have_learning_rate_tensors_of_their_own(cls: Any) -> None:
    """A tensor in two groups would be lowered twice by what lowers that of each."""
    for lr in (1.0, torch.tensor(1.0)):
        optimizer = cls(list(zip("wb", tensors((64, 64), (64,)), strict=True)), lr=lr)
        first = [float(group["lr"]) for group in optimizer.param_groups]
        schedule = LambdaLR(optimizer, [lambda t: 0.5**t, lambda t: 1.0])
        schedule.step()
        schedule.step()
        assert [float(g["lr"]) / f for g, f in zip(optimizer.param_groups, first, strict=True)] == [0.25, 1.0]
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for _ in range(3):
            plateau.step(1.0)
        assert float(optimizer.param_groups[0]["lr"]) / first[0] == pytest.approx(0.25 * 0.25)


@pytest.mark.parametrize("bad", [{"betas": 0.9}, {"adamw": {"betas": 0.9}}, {"adamw": {"eps": -1.0}}])
def test_a_refused_group_leaves_nothing_behind(bad: dict[str, Any]) -> None:
    w, v, late_w, late_v = tensors((64, 64), (64,), (64, 64), (64,))
    optimizer = Root([("w", w), ("v", v)])
    before = len(optimizer.param_groups), len(optimizer._adamw.param_groups)
    treatment = "adamw" if "betas" in bad else "auto"
    with pytest.raises(ValueError, match="betas must be|eps must not"):
        optimizer.add_param_group({"params": [("late_w", late_w), ("late_v", late_v)], "treatment": treatment, **bad})
    with pytest.raises(ValueError, match='received "w" twice'):
        optimizer.add_param_group({"params": [("w", late_v)]})
    assert (len(optimizer.param_groups), len(optimizer._adamw.param_groups)) == before
    kept = late_v.detach().clone()
    late_v.grad = torch.ones_like(late_v)
    step(optimizer, 0)
    assert torch.equal(late_v, kept) and late_v not in optimizer.state


def test_a_refused_first_vector_leaves_no_adamw_behind() -> None:
    w, v = tensors((64, 64), (64,))
    optimizer = Root([("w", w)])
    with pytest.raises(ValueError, match='received "w" twice'):
        optimizer.add_param_group({"params": [("w", v)]})
    assert optimizer._adamw is None
    step(optimizer, 0)


@pytest.mark.parametrize(
    ("cls", "option", "meant"),
    [(AdamW, "weigth_decay", "weight_decay"), (AdamW, "stat", "state"), (Root, "coeficients", "coefficients"),
     (Root, "wieght_decay", "weight_decay"), (Muon, "treatments", "treatment")],
)  # fmt: skip
def test_a_misspelled_option_of_a_group_is_refused(cls: Any, option: str, meant: str) -> None:
    (w,) = tensors((64, 64))
    with pytest.raises(ValueError, match=f'no option "{option}"; did you mean "{meant}"'):
        cls([{"params": [("w", w)], option: 0.0}])


def test_other_keys_of_a_group_are_the_users() -> None:
    """Both halves of a group of Root have them; the rate that a schedule begins with is that of each."""
    own = {
        "lr_scale": 0.5, "name": "decay", "no_weight_decay": 0.0, "weight_decay_end": 0.1, "eps1": 1.0,
        "momentum2": 2.0, "embedding": True, "adam": False, 3: "three",
    }  # fmt: skip
    for cls in (AdamW, Root, Muon):
        w, v = tensors((64, 64), (64,))
        group = {"params": [("w", w), ("v", v)], "lr": 0.5, "initial_lr": 1.0, "betas": (0.5, 0.75), **own}
        optimizer = cls([group])
        for found in optimizer.param_groups:
            assert {key: found[key] for key in own} == own and found["initial_lr"] == 2 * found["lr"]
        assert optimizer.param_groups[-1]["betas"] == (0.5, 0.75)
        LambdaLR(optimizer, lambda t: 1.0, last_epoch=5)


def test_a_schedule_begins_with_adamws_own_rate() -> None:
    w, v = tensors((64, 64), (64,))
    optimizer = Root([{"params": [("w", w), ("v", v)], "lr": 1e-3, "initial_lr": 1e-3}], adamw={"lr": 3e-4})
    LambdaLR(optimizer, lambda t: 0.5, last_epoch=5)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 1.5e-4]


def test_numbers_come_in_any_sequence() -> None:
    """As configuration libraries hand them over."""
    w, v = tensors((64, 64), (64,))
    assert AdamW([("v", v)], betas=UserList([0.5, 0.75])).param_groups[0]["betas"] == (0.5, 0.75)
    root = Root([("w", w), ("v", v)], adamw={"betas": UserList([0.5, 0.75]), "fused": True, "amsgrad": False})
    assert root.param_groups[1]["betas"] == (0.5, 0.75)
    for lr in ("1e-3", None):
        with pytest.raises(ValueError, match="lr must be a number or a tensor of one element"):
            Root([("w", w)], lr=lr)


def test_a_group_that_adamw_takes_may_say_so_either_way() -> None:
    (w,) = tensors((64, 64))
    for options in ({"betas": (0.5, 0.75)}, {"adamw": {"betas": (0.5, 0.75)}}, {"adamw": None, "betas": (0.5, 0.75)}):
        optimizer = Root([{"params": [("w", w)], "treatment": "adamw", **options}])
        assert optimizer.param_groups[0]["betas"] == (0.5, 0.75) and "adamw" not in optimizer.param_groups[0]


@pytest.mark.parametrize("cls", [Root, Muon])
def test_options_of_adamw_are_checked(cls: Any) -> None:
    (w,) = tensors((64, 64))
    with pytest.raises(ValueError, match=r"adamw takes lr, betas, .*, received 'weigth_decay', 'momentum'"):
        cls([("w", w)], adamw={"weigth_decay": 0.0, "momentum": 0.9})


def test_a_step_of_root_is_one_step() -> None:
    """Its AdamW inside steps without hooks: a split that AdamW alone moves counts each step once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96))
    qt.apply(model, '[linear]\nsplit = { kind = "svd", rank = 16, every = 4 }\n')
    model[0].weight.requires_grad_(False)
    optimizer = Root(model.named_parameters(), lr=1e-3)
    state, calls = model[0]._shared_state, []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 96)).sum().backward()
        optimizer.step()
    assert (model[0]._step, state.splits.count, len(calls)) == (4, 1, 4)
