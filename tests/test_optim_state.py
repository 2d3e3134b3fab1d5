"""The state of quatrain.optim.AdamW on disk: the same bits back, or a clear refusal with nothing changed."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import quatrain as qt
from quatrain import checkpoint
from quatrain.optim.routing import tensor_id

SHAPES = {"a.weight": (40, 200), "b.weight": (64, 96), "embed.weight": (50, 96), "b.bias": (64,)}
STATES = ["nvfp4", "fp32", "bf16"]


def parameters(dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def steps(tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for index, (name, parameter) in enumerate(tensors.items()):
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if name == "b.weight" and step == 1 else gradient  # a clock of its own
        optimizer.step()


def made(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[dict[str, Tensor], qt.optim.AdamW]:
    tensors = parameters(dtype)
    return tensors, qt.optim.AdamW(tensors.items(), lr=1e-2, **options)


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            found += [
                p.detach().clone(),
                *(optimizer.state[p][key].clone() for key in sorted(optimizer.state.get(p, {}))),
            ]
    return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8) if a.ndim else a, b.view(torch.uint8) if b.ndim else b)
        for a, b in zip(first, second, strict=True)
    )


def through_torch_save(optimizer: qt.optim.AdamW, other: qt.optim.AdamW, folder: Path) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))


def through_safetensors(optimizer: qt.optim.AdamW, other: qt.optim.AdamW, folder: Path) -> None:
    qt.optim.save_file(optimizer, folder / "optimizer.safetensors")
    qt.optim.load_file(other, folder / "optimizer.safetensors")


WAYS = [lambda one, two, _: two.load_state_dict(one.state_dict()), through_torch_save, through_safetensors]


@pytest.mark.parametrize("way", WAYS, ids=["dict", "torch.save", "safetensors"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("master", ["own", "fp32", "bf16+int8", "bf16-sr"])
def test_resumed_equals_uninterrupted(way: Callable[..., None], state: str, master: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"state": state, "seed": 7}
    if master != "own":
        options |= {"dtype": torch.bfloat16, "master": master}
    tensors, optimizer = made(**options)
    steps(tensors, optimizer, 0, 3)
    others, resumed = made(**options | {"seed": 0})
    for name, other in others.items():
        other.data.copy_(tensors[name].data)
    way(optimizer, resumed, tmp_path)
    assert same(snapshot(optimizer), snapshot(resumed))
    steps(tensors, optimizer, 3, 6)
    steps(others, resumed, 3, 6)
    assert same(snapshot(optimizer), snapshot(resumed))


def test_nothing_is_cast_and_nothing_is_shared() -> None:
    tensors, optimizer = made(torch.bfloat16)
    steps(tensors, optimizer, 0, 2)
    _, other = made(torch.bfloat16)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(tensors.values(), other.param_groups[0]["params"], strict=True):
        for key, value in optimizer.state[p].items():
            loaded = other.state[q][key]
            assert loaded.dtype == value.dtype and loaded.data_ptr() != value.data_ptr(), key
    dtypes = {key: value.dtype for key, value in optimizer.state[tensors["a.weight"]].items()}
    assert dtypes["m_codes"] == dtypes["v_codes"] == torch.uint8 and dtypes["master"] == torch.float32
    assert dtypes["m_scales"] == dtypes["v_scales"] == torch.float8_e4m3fn and dtypes["v_mean"] == torch.bfloat16


def test_hyperparameters_come_back() -> None:
    tensors, optimizer = made(weight_decay=0.3, betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    steps(tensors, optimizer, 0, 1)
    scheduler.step()
    _, other = made()
    other.load_state_dict(optimizer.state_dict())
    group = other.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["betas"], group["weight_decay"]) == (5e-3, 1e-2, (0.8, 0.9), 0.3)


def test_a_tensor_lr_survives(tmp_path: Path) -> None:
    tensors = parameters()
    optimizer = qt.optim.AdamW(tensors.items(), lr=torch.tensor(0.25))
    steps(tensors, optimizer, 0, 1)
    _, other = made()
    through_safetensors(optimizer, other, tmp_path)
    assert isinstance(other.param_groups[0]["lr"], Tensor) and other.param_groups[0]["lr"] == 0.25
    steps(tensors, other, 0, 1)


def test_load_hooks_run() -> None:
    _, optimizer = made()
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, d: seen.append("before") or d)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after"]


def test_names_decide_the_order(tmp_path: Path) -> None:
    tensors, optimizer = made()
    steps(tensors, optimizer, 0, 2)
    for wrapper in ("", "module."):
        other_tensors = {wrapper + name: p for name, p in reversed(parameters().items())}
        for way in WAYS[:1] if wrapper else WAYS:
            other = qt.optim.AdamW(other_tensors.items(), lr=1e-2)
            way(optimizer, other, tmp_path)
            for name, p in tensors.items():
                for key, value in optimizer.state[p].items():
                    loaded = other.state[other_tensors[wrapper + name]][key]
                    assert torch.equal(loaded.float(), value.float())


def test_what_moments_were_drawn_from_belongs_to_the_state() -> None:
    """Other names (matched by position) and another seed decode the same moments, and go on with the same bits."""
    tensors, optimizer = made(seed=7)
    steps(tensors, optimizer, 0, 3)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["param_names"]
    others = {"other." + name: p for name, p in parameters().items()}
    resumed = qt.optim.AdamW(others.items(), lr=1e-2)
    resumed.load_state_dict(saved)
    resumed.param_groups[0]["seed"] = 8
    for p, q in zip(tensors.values(), others.values(), strict=True):
        q.data.copy_(p.data)
        assert all(torch.equal(a, b) for a, b in zip(optimizer.moments(p), resumed.moments(q), strict=True))
    assert resumed.state[others["other.a.weight"]]["m_key"].tolist() == [7, tensor_id("a.weight")]
    steps(tensors, optimizer, 3, 5)
    steps(dict(zip(tensors, others.values(), strict=True)), resumed, 3, 5)
    assert same(snapshot(optimizer), snapshot(resumed))


# ---- refusals ----------------------------------------------------------------------------------------------------


def reshaped() -> qt.optim.AdamW:
    return qt.optim.AdamW(parameters(shapes=SHAPES | {"a.weight": (40, 328)}).items(), lr=1e-2)


def renamed() -> qt.optim.AdamW:
    return qt.optim.AdamW([("x" + name, p) for name, p in parameters().items()], lr=1e-2)


def regrouped() -> qt.optim.AdamW:
    return qt.optim.AdamW([{"params": [item]} for item in parameters().items()], lr=1e-2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: made(tile=64)[1], "saved with tile=128.*has tile=64.*construct it with tile=128"),
        (lambda: made(state="fp32")[1], "saved with state='nvfp4'"),
        (lambda: made(embeddings="nvfp4")[1], "saved with embeddings='fp32'"),
        (lambda: made(faithful=True)[1], "saved with faithful=False"),
        (lambda: made(torch.bfloat16)[1], "state of .* does not fit: missing master"),
        (reshaped, "v_mean of a.weight must be torch.bfloat16 .40, 3.*received torch.bfloat16 .40, 2"),
        (renamed, "other parameters: missing x"),
        (regrouped, "1 parameter groups, this optimizer 4"),
        (lambda: qt.optim.AdamW(list(parameters().items())[:2]), "4 parameters, this optimizer's has 2"),
    ],
)
@pytest.mark.parametrize("way", WAYS[::2], ids=["dict", "safetensors"])
def test_what_does_not_fit_changes_nothing(build: Any, message: str, way: Callable[..., None], tmp_path: Path) -> None:
    tensors, optimizer = made()
    steps(tensors, optimizer, 0, 2)
    other = build()
    for group in other.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    other.step()
    before, options = snapshot(other), json.dumps([{**g, "params": 0} for g in other.param_groups])
    with pytest.raises(ValueError, match=message):
        way(optimizer, other, tmp_path)
    assert same(before, snapshot(other)) and options == json.dumps([{**g, "params": 0} for g in other.param_groups])


def test_a_torch_state_is_named_as_such() -> None:
    tensors = parameters()
    theirs = torch.optim.AdamW(tensors.values())
    steps(tensors, theirs, 0, 1)
    with pytest.raises(ValueError, match="another optimizer.*load_torch_state"):
        made()[1].load_state_dict(theirs.state_dict())


def test_files_that_are_not_whole_or_not_ours(tmp_path: Path) -> None:
    tensors, optimizer = made()
    steps(tensors, optimizer, 0, 1)
    path = tmp_path / "o.safetensors"
    qt.optim.save_file(optimizer, path)
    whole = path.read_bytes()
    before = snapshot(optimizer)
    for size in (0, 4, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            qt.optim.load_file(optimizer, path)
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="must be a file of quatrain.optim.save_file"):
        qt.optim.load_file(optimizer, path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        qt.optim.load_file(optimizer, tmp_path / "none")
    with pytest.raises(OSError):
        qt.optim.save_file(optimizer, tmp_path / "no" / "folder")
    optimizer.param_groups[0]["callback"] = print
    with pytest.raises(ValueError, match="option callback"):
        qt.optim.save_file(optimizer, path)
    assert same(before, snapshot(optimizer)) and [p.name for p in tmp_path.iterdir()] == ["o.safetensors"]


def test_the_file_says_what_it_holds(tmp_path: Path) -> None:
    tensors, optimizer = made()
    steps(tensors, optimizer, 0, 1)
    qt.optim.save_file(optimizer, tmp_path / "o")
    with safe_open(tmp_path / "o", framework="pt") as file:
        assert file.metadata()["optimizer"] == "AdamW"
        assert file.get_tensor("a.weight/m_scales").dtype == torch.float8_e4m3fn
        assert json.loads(file.metadata()["groups"])[0]["names"] == list(SHAPES)


# ---- torch's states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_from_torch_goes_on_and_says_its_error(state: str) -> None:
    tensors, others = parameters(), parameters()
    theirs = torch.optim.AdamW(tensors.values(), lr=1e-2, weight_decay=0.2)
    steps(tensors, theirs, 0, 30)
    for name, other in others.items():
        other.data.copy_(tensors[name].data)
    source = torch.optim.AdamW(others.values(), lr=1e-2, weight_decay=0.2)
    source.load_state_dict(theirs.state_dict())
    ours = qt.optim.from_torch(source, others.items(), state=state)
    errors = qt.optim.conversion_error(ours, source)
    bound = {"nvfp4": (0.11, 0.05), "fp32": (0.0, 0.0), "bf16": (3e-3, 3e-3)}[state]
    assert all(m <= bound[0] and v <= bound[1] for m, v in errors.values()), errors
    assert (errors["a.weight"][0] == 0) == (state == "fp32") and errors["embed.weight"] == (0.0, 0.0)
    assert ours.param_groups[0]["weight_decay"] == 0.2
    steps(tensors, theirs, 30, 32)
    steps(others, ours, 30, 32)
    for name, other in others.items():
        assert torch.allclose(other, tensors[name], atol=1e-6 if state == "fp32" else 6e-3)


@pytest.mark.parametrize("maximize", [False, True])
def test_to_torch_and_back_again(maximize: bool) -> None:
    tensors, optimizer = made(maximize=maximize)
    steps(tensors, optimizer, 0, 20)
    theirs = qt.optim.to_torch(optimizer)
    assert type(theirs) is torch.optim.AdamW and theirs.param_groups[0]["param_names"] == list(SHAPES)
    for p in tensors.values():
        exp_avg, exp_avg_sq = optimizer.moments(p)
        assert torch.equal(theirs.state[p]["exp_avg"], exp_avg) and torch.equal(
            theirs.state[p]["exp_avg_sq"], exp_avg_sq
        )
        assert theirs.state[p]["step"] == int(optimizer.state[p]["step"])
    again = qt.optim.from_torch(theirs)
    assert again.routing() == optimizer.routing()
    errors = qt.optim.conversion_error(again, theirs)
    assert max(m for m, _ in errors.values()) < 0.11 and max(v for _, v in errors.values()) < 0.05
    before = {name: p.detach().clone() for name, p in tensors.items()}
    steps(tensors, theirs, 20, 21)
    assert all(not torch.equal(before[name], p) for name, p in tensors.items())


def test_conversions_are_refused() -> None:
    tensors = parameters()
    for other, message in (
        (torch.optim.AdamW(tensors.values(), amsgrad=True), "amsgrad must be False"),
        (torch.optim.Adam(tensors.values(), weight_decay=0.1), "must be decoupled"),
    ):
        with pytest.raises(ValueError, match=message):
            qt.optim.from_torch(other, tensors.items())
    momentum = torch.optim.SGD(tensors.values(), lr=0.1, momentum=0.9)
    steps(tensors, momentum, 0, 1)
    _, ours = made()
    with pytest.raises(ValueError, match="without step"):
        qt.optim.load_torch_state(ours, momentum.state_dict())
    with pytest.raises(ValueError, match="step first"):
        ours.moments(next(iter(tensors.values())))
    with pytest.raises(ValueError, match="names must name every parameter"):
        qt.optim.from_torch(torch.optim.AdamW(tensors.values()), list(tensors.items())[:1])


# ---- the trainer's checkpoints -----------------------------------------------------------------------------------


def test_a_checkpoint_of_a_run_holds_it(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, qt.optim.AdamW]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 96))
        return net, qt.optim.AdamW(net.named_parameters(), lr=1e-2)

    (net, optimizer), (other, resumed) = build(), build()
    steps(dict(net.named_parameters()), optimizer, 0, 3)
    checkpoint.load(checkpoint.save(tmp_path, 3, net, optimizer, state={}), other, resumed)
    assert same(snapshot(optimizer), snapshot(resumed))
    steps(dict(net.named_parameters()), optimizer, 3, 6)
    steps(dict(other.named_parameters()), resumed, 3, 6)
    assert same(snapshot(optimizer), snapshot(resumed))
    assert len({id(s["step"]) for s in resumed.state.values() if "m_codes" in s}) == 1


@pytest.mark.parametrize("options", [{}, {"state": "bf16"}, {"state": "nvfp4"}], ids=str)
def test_memory_formats_come_back(tmp_path: Path, options: dict[str, str]) -> None:
    """Files hold rows; a parameter that is channels-last or transposed goes on as if nothing had been saved."""
    weights = []
    for saved in (False, True):
        torch.manual_seed(0)
        images = nn.Parameter(torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last))
        turned = nn.Parameter(torch.randn(96, 64).t())
        optimizer = qt.optim.AdamW([("conv.weight", images), ("turned.weight", turned)], lr=1e-2, **options)
        for step in range(4):
            for parameter in (images, turned):
                parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
            optimizer.step()
            if saved and step == 1:
                qt.optim.save_file(optimizer, tmp_path / "state.safetensors")
                qt.optim.load_file(optimizer, tmp_path / "state.safetensors")
        weights.append((images.detach().clone(), turned.detach().clone()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("make", [qt.optim.AdamW, qt.optim.Root])
def test_repeated_names_are_refused(make: type[torch.optim.Optimizer]) -> None:
    models = [nn.Linear(64, 64), nn.Linear(64, 64)]
    with pytest.raises(ValueError, match='received "(weight|bias)" twice; prefix the names'):
        make([item for model in models for item in model.named_parameters()], lr=1e-3)
    make([(f"{i}.{n}", p) for i, model in enumerate(models) for n, p in model.named_parameters()], lr=1e-3)


@pytest.mark.parametrize("make", [qt.optim.AdamW, qt.optim.Root])
def test_a_model_is_no_list_of_parameters(make: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"received a Linear; give its .named_parameters\(\)"):
        make(nn.Linear(64, 64), lr=1e-3)
