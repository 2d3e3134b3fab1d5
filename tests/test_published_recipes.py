"""Methods that others published, and the full stack, are tables of rows alone: each trains a few steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import quatrain as qt
from quatrain.recipe import diff
from quatrain.train import train
from tiny_run import history, make_run

NAMES = ("averis", "metis", "quartet2-forward", "fp4-all-the-way", "full-stack")


@pytest.mark.parametrize("name", NAMES)
def test_each_trains(tmp_path: Path, name: str) -> None:
    config = make_run(tmp_path, hidden_size=64, intermediate_size=96, num_hidden_layers=6)
    recipe = qt.load_recipe(name)
    if name == "metis":  # its realignments fall into the few steps of the test
        recipe = qt.load_recipe(recipe.to_toml().replace("every = 1000", "every = 2"))
    found = train(config, recipe=recipe, progress=False)
    losses = [row["loss"] for row in history(config.out) if "loss" in row]
    assert all(math.isfinite(loss) for loss in losses) and found["val_loss"] < found["val_loss_first"]
    assert found["quantized_mac_share"] > 0.5
    assert found.get("realigned", 0) == (42 * 4 if name == "metis" else 0)  # after steps 1, 2, 4 and 6
    assert ("root" in found["optimizer"]) == (name == "full-stack")


def test_the_full_stack_resumes_bit_for_bit(tmp_path: Path) -> None:
    recipe = qt.load_recipe(qt.load_recipe("full-stack").to_toml().replace("every = 2048", "every = 2"))
    found = []
    for name in ("straight", "broken"):
        config = make_run(tmp_path / name, hidden_size=128, intermediate_size=128, num_hidden_layers=6)
        seen: list[int] = []

        def stop(seen: list[int] = seen, name: str = name) -> bool:
            seen.append(1)
            return name == "broken" and len(seen) == 4

        if name == "broken":
            with pytest.raises(KeyboardInterrupt):
                train(config, recipe=recipe, progress=False, stop=stop)
        summary = train(config, recipe=recipe, progress=False)
        found.append((summary["val_loss"], summary["optimizer_bytes"], history(config.out)))
    assert found[0] == found[1]


def test_the_full_stack_is_the_sum_of_its_parts() -> None:
    def changes(name: str) -> dict[str, tuple[str, str, str]]:
        return {row[0]: row for row in diff(qt.load_recipe("bf16"), qt.load_recipe(name))}

    parts = [changes(name) for name in ("nvfp4-lora-svd", "nvfp4-attention", "adamw-nvfp4", "root-nvfp4")]
    assert sum(map(len, parts)) == len({key for part in parts for key in part})  # no two of them set one row
    assert {key: row for part in parts for key, row in part.items()} == changes("full-stack")


def test_published_methods_differ_from_nvidia_s_in_the_rows_they_are_about() -> None:
    rows = {name: {k: v for k, _, v in diff(qt.load_recipe("nvfp4"), qt.load_recipe(name))} for name in NAMES}
    assert rows["averis"].keys() == {"split", "wgrad.grad.transform", "wgrad.input.transform"}
    assert rows["metis"]["split"].startswith("svd rank 32, mode naive, basis activation")
    assert rows["fp4-all-the-way"]["wgrad.input.rounding"] == "stochastic"
    assert rows["quartet2-forward"]["fprop.weight.scale"] == "four-over-six"
    assert rows["quartet2-forward"]["dgrad.weight.rounding"] == "stochastic-unbiased"
