"""Optimizers of runs: chosen by a recipe's [optimizer] or the run's, resumed to the bit, refused where they clash."""

from pathlib import Path

import pytest
import torch

import quatrain as qt
from quatrain.optim import AdamW, Muon, Root
from quatrain.train import load_run, train
from quatrain.train.config import RunConfig
from quatrain.train.optimizer import describe_optimizer, make_optimizer, optimizer_rows
from tiny_run import make_run

WIDE = {"hidden_size": 64, "intermediate_size": 96}
ROOT = '[optimizer]\nname = "root"\noperands = { format = "nvfp4", scale = "four-over-six" }\nstate = "nvfp4"\n'


def optimizer_of(run: RunConfig, recipe: str = "") -> torch.optim.Optimizer:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    return make_optimizer(model, run, torch.device("cpu"), qt.load_recipe(recipe).optimizer)


def test_the_empty_recipe_is_torchs_fused_adamw(tmp_path: Path) -> None:
    optimizer = optimizer_of(make_run(tmp_path))
    assert type(optimizer) is torch.optim.AdamW and optimizer.param_groups[0]["fused"]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]


def test_the_run_comes_before_the_recipe(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    by_recipe = optimizer_of(run, "root-nvfp4")
    assert type(by_recipe) is Root and by_recipe.param_groups[0]["clip"] == 0.99
    assert type(optimizer_of(make_run(tmp_path, "optimizer.name=muon"), "root")) is Muon
    state = optimizer_of(make_run(tmp_path, "optimizer.state=nvfp4"))
    assert type(state) is AdamW and state.routing()["0.weight"].method == "nvfp4"
    bf16 = optimizer_of(make_run(tmp_path, "optimizer.operands=bf16", "optimizer.clip=1.0"), "root-nvfp4")
    assert bf16.param_groups[0]["operands"] == "bf16" and bf16.param_groups[0]["clip"] is None


@pytest.mark.parametrize("name", [n for n in qt.recipe_names() if qt.load_recipe(n).optimizer.to_dict()])
def test_every_recipe_of_an_optimizer_trains(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
    run = make_run(tmp_path, "optimizer.lr=1e-2")
    optimizer = make_optimizer(model, run, torch.device("cpu"), qt.load_recipe(name).optimizer)
    x = torch.randn(256, 64)
    losses = []
    for _ in range(8):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses


@pytest.mark.parametrize("recipe", ["adamw-nvfp4", ROOT], ids=["adamw", "root"])
def test_a_run_resumes_to_the_bit(tmp_path: Path, recipe: str) -> None:
    chosen = qt.load_recipe(recipe)
    losses = []
    for name, pause in (("whole", None), ("halved", 3)):
        run = make_run(tmp_path / name, **WIDE)
        if pause is not None:
            steps = iter(range(100))
            with pytest.raises(KeyboardInterrupt):
                train(run, recipe=chosen, progress=False, stop=lambda steps=steps, pause=pause: next(steps) >= pause)
        summary = train(run, recipe=chosen, progress=False)
        losses.append(summary["val_loss"])
        assert summary["optimizer"] == describe_optimizer(run, chosen.optimizer) and "nvfp4" in summary["optimizer"]
        assert 0 < summary["optimizer_bytes"] < 8 * summary["parameters"]
    assert losses[0] == losses[1]


def test_recipes_say_what_departs() -> None:
    recipe = qt.load_recipe("root-nvfp4-split")
    assert qt.load_recipe(recipe.to_toml()) == recipe and recipe.optimizer.operands.scale == "four-over-six"
    words = qt.recipe.diff(qt.load_recipe("bf16"), recipe)
    assert ("optimizer.split", "-", "diagonal") in words and words[1][:2] == ("optimizer.operands", "BF16")
    assert qt.load_recipe('[optimizer]\nstate = "fp32"\n').fingerprint() == qt.load_recipe("").fingerprint()
    shorthand = qt.load_recipe('[optimizer]\noperands = "nvfp4"\n').optimizer
    assert shorthand.operands == qt.QuantSpec("nvfp4", scale="four-over-six")


@pytest.mark.parametrize(
    "text,message",
    [
        ('[optimizer]\nstat = "nvfp4"', "unknown key 'stat'.*did you mean 'state'"),
        ('[optimizer]\nstate = "int8"', "optimizer.state must be one of fp32, bf16, nvfp4"),
        ("[optimizer]\nclip = 2.0", "optimizer.clip must be a quantile"),
        ("[optimizer]\ntile = 100", "optimizer.tile must be a power of two"),
        ("[optimizer]\nfaithful = 1", "optimizer.faithful must be true or false"),
        ('[optimizer]\noperands = { format = "nvfp5" }', "optimizer.operands: "),
        ('[optimizer]\nname = "adamw"\nclip = 0.99', "optimizer.clip is an option of Root and Muon"),
        (
            '[optimizer]\nname = "root"\ncoefficients = "jordan"\noperands = "nvfp4"',
            'optimizer.coefficients: coefficients="jordan" are for BF16',
        ),
        ('[optimizer]\ncoefficients = "jordon"', "no coefficient set 'jordon'"),
        ("optimizer = 3", r"\[optimizer\] must be a table"),
    ],
)
def test_wrong_rows_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qt.load_recipe(text + "\n")


def test_options_that_clash_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'optimizer.clip is an option of Root and Muon.*optimizer.name = "root"'):
        optimizer_of(make_run(tmp_path, "optimizer.clip=0.9"))
    with pytest.raises(ValueError, match="optimizer.state must be one of"):
        load_run("[model]\npreset = 'tiny-llama'\n[train]\nsteps = 1\n[optimizer]\nstate = 'int8'\n")
    with pytest.raises(ValueError, match="jordan"):
        optimizer_of(make_run(tmp_path, "optimizer.coefficients=jordan"), "root-nvfp4")
    bf16 = make_run(tmp_path, "optimizer.coefficients=jordan", "optimizer.operands=bf16")
    assert optimizer_of(bf16, "root-nvfp4").param_groups[0]["coefficients"] == "jordan"
    with pytest.raises(ValueError, match="optimizer.clip is an option of Root and Muon"):
        make_run(tmp_path, "optimizer.name=adamw", "optimizer.clip=0.9")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="optimizer.clip is an option"):  # before anything is made
        train(make_run(tmp_path, "optimizer.clip=0.9"), recipe="bf16", progress=False)
    assert not out.exists()


def test_a_run_may_complete_its_recipe(tmp_path: Path) -> None:
    """What a recipe alone would be refused for is judged together with the run's keys, tables of files included."""
    muon = qt.load_recipe('name = "a"\n[optimizer]\nname = "muon"\noperands = "nvfp4"\n')
    noisy = qt.load_recipe('name = "b"\n[optimizer]\nname = "root"\noperands = { format = "mxfp4" }\n')
    for recipe, key, message in ((muon, "coefficients=fitted", "are for BF16"), (noisy, "split=diagonal", "diverges")):
        with pytest.raises(ValueError, match=message):
            train(make_run(tmp_path), recipe=recipe, progress=False)
        assert not (tmp_path / "out").exists()
        optimizer_rows(make_run(tmp_path, f"optimizer.{key}"), recipe.optimizer)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        train(make_run(tmp_path, f"optimizer.coefficients={tmp_path}/nowhere.toml"), recipe="root", progress=False)
    assert not (tmp_path / "out").exists()


def test_adamw_of_the_run_leaves_out_what_the_recipe_says_of_root(tmp_path: Path) -> None:
    run = make_run(tmp_path, "optimizer.name=adamw")
    found = optimizer_of(run, "full-stack")
    assert type(found) is AdamW and found.routing()["0.weight"].method == "nvfp4"  # state is AdamW's too
    assert type(optimizer_of(run, "root-nvfp4-split")) is torch.optim.AdamW
    muon = optimizer_of(make_run(tmp_path, "optimizer.name=muon", "optimizer.operands=nvfp4"), "root-nvfp4")
    assert type(muon) is Muon and muon.param_groups[0]["coefficients"] == "fitted"
