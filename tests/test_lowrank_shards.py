"""Quantized linears under FSDP2, split or not: two processes with sharded parameters do what a single one does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

RECIPE = """
[linear]
split = { kind = "svd", rank = 16, every = 2, state = "STATE", basis = "BASIS" }
fprop.input  = { format = "nvfp4" }
fprop.weight = { format = "nvfp4", block = [16, 16] }
dgrad.grad   = { format = "nvfp4" }
dgrad.weight = { format = "nvfp4", block = [16, 16] }
wgrad.grad   = { format = "nvfp4", transform = "hadamard" }
wgrad.input  = { format = "nvfp4", transform = "hadamard" }
"""
RUN = """
import sys, torch
import quatrain as qt
from quatrain.nn import realign_cost
world, rank, folder, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 48))
qt.apply(model, text)
if world > 1:
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
optimizer = eval(sys.argv[5])
torch.manual_seed(1)  # both ranks see the same batch: the mean of their gradients is the single process's
for _ in range(5):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
found = {name: whole(value).clone() for name, value in model.state_dict().items()}
found |= {f"{n}/{k}": whole(v).clone() for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
found |= {f"dense/{name}": whole(value).clone() for name, value in qt.dense_state_dict(model).items()}
found["realigned"] = torch.tensor(realign_cost(model)[0])
torch.save(found, f"{folder}/{world}-{rank}.pt")
if world > 1:
    torch.distributed.destroy_process_group()
"""


TORCHS = "torch.optim.AdamW(model.parameters(), lr=1e-2)"
OURS = "qt.optim.AdamW(model.named_parameters(), lr=1e-2, state='fp32')"


def run(folder: Path, text: str, optimizer: str) -> list[dict[str, torch.Tensor]]:
    """What a single process ends with, and each of two."""
    head = [sys.executable, "-W", "ignore", "-c", RUN]
    processes = [
        subprocess.Popen([*head, world, rank, str(folder), text, optimizer], stderr=subprocess.PIPE, text=True)
        for world, rank in (("1", "0"), ("2", "0"), ("2", "1"))
    ]
    try:
        said = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], said
    return [torch.load(folder / f"{name}.pt") for name in ("1-0", "2-0", "2-1")]


@pytest.mark.parametrize(("state", "basis"), [("rotate", "weight"), ("reset", "activation")])
def test_sharded_parameters_are_realigned_as_whole_ones(tmp_path: Path, state: str, basis: str) -> None:
    text = RECIPE.replace("STATE", state).replace("BASIS", basis)
    single, *sharded = run(tmp_path, text, TORCHS)
    assert single["realigned"] == (4 if basis == "weight" else 6) and single["dense/0.weight"].shape == (96, 64)
    for found in sharded:
        assert found.keys() == single.keys()
        # Sketches of activations are summed over the ranks, twice the single one's: the directions differ in rounding.
        tolerance = {"rtol": 0.0, "atol": 0.0} if basis == "weight" else {"rtol": 1e-3, "atol": 1e-4}
        for key, value in single.items():
            torch.testing.assert_close(found[key], value, **tolerance, msg=lambda m, key=key: f"{key}: {m}")
    for key, value in sharded[0].items():
        assert torch.equal(value, sharded[1][key]), key


def test_linears_without_a_split_and_our_adamw_in_fp32(tmp_path: Path) -> None:
    text = "".join(line for line in RECIPE.splitlines(keepends=True) if not line.startswith("split"))
    single, *sharded = run(tmp_path, text, OURS)
    for found in sharded:
        assert found.keys() == single.keys()
        assert all(torch.equal(found[key], value) for key, value in single.items())
