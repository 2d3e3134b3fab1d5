import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quatrain import checkpoint

EVENTS = ("before-temporary", "mid-file", "before-fsync", "before-rename", "after-rename")


class Tied(nn.Module):
    """Embedding and head share one weight, as in a tied language model."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("small", torch.full((3,), 0.5, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))


def pair(seed: int = 0, width: int = 6, steps: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(steps):
        advance(model, optimizer, step)
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = model.head(model.norm(model.embed(torch.tensor([step % 5, 3])) + torch.randn(6))).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def write(root: Path, step: int = 1, **options) -> checkpoint.Checkpoint:
    model, optimizer = pair(steps=1)
    return checkpoint.save(root, step, model, optimizer, state={"at": step}, **options)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_resume_continues_bit_for_bit(tmp_path):
    model, optimizer = pair(steps=3)
    checkpoint.save(tmp_path, 3, model, optimizer, state={})
    expected = [advance(model, optimizer, step) for step in range(3, 6)]

    other, fresh = pair(seed=9, steps=0)
    checkpoint.load(checkpoint.latest(tmp_path), other, fresh)
    assert [advance(other, fresh, step) for step in range(3, 6)] == expected
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert other.head.weight is other.embed.weight


def test_state_and_assets_come_back(tmp_path):
    saved = write(tmp_path, 12, assets={"config.json": b"{}", "none": b""})
    assert saved.folder == tmp_path / "step-00000012"
    assert names(saved.folder) == ["config.json", "model.safetensors", "none", "optimizer.safetensors", "state.json"]
    found = checkpoint.latest(tmp_path)
    assert (found.step, found.state, found.folder) == (12, {"at": 12}, saved.folder)


def test_optimizer_state_is_not_cast(tmp_path):
    model, optimizer = pair(steps=1)
    codes = torch.arange(12, dtype=torch.uint8)
    optimizer.state[model.norm.weight]["codes"] = codes
    checkpoint.save(tmp_path, 1, model, optimizer, state={})
    other, fresh = pair(seed=1)
    checkpoint.load(checkpoint.latest(tmp_path), other, fresh)
    kept = fresh.state[other.norm.weight]
    assert kept["codes"].dtype == torch.uint8 and torch.equal(kept["codes"], codes)
    assert kept["step"].dtype == torch.float32 and kept["step"].item() == 1


def test_the_file_is_plain_safetensors(tmp_path):
    model, _ = pair(steps=1)
    tensors = load_file(write(tmp_path).folder / "model.safetensors")
    assert set(tensors) == {"embed.weight", "norm.weight", "norm.bias", "empty", "small", "count"}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, model.state_dict()[name]) and tensor.dtype == model.state_dict()[name].dtype
        assert tensor.shape == model.state_dict()[name].shape


def test_strided_tensors_are_written_in_order(tmp_path):
    model, optimizer = pair()
    model.norm.register_buffer("view", torch.arange(6.0).reshape(2, 3).t())
    checkpoint.save(tmp_path, 1, model, optimizer, state={})
    assert torch.equal(load_file(tmp_path / "step-00000001/model.safetensors")["norm.view"], model.norm.view)


def test_a_dtype_without_a_name_is_refused(tmp_path):
    model, optimizer = pair()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"odd is torch.complex64, which"):
        checkpoint.save(tmp_path, 1, model, optimizer, state={})


def test_prune_keeps_the_newest(tmp_path):
    for step in (1, 2, 3, 10):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_failed_write_leaves_the_earlier_checkpoint(tmp_path, event, number):
    write(tmp_path, 1)

    def fail(now: str) -> None:
        if now == event:
            raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match="checkpoint of step 2 could not be written") as error:
        write(tmp_path, 2, on_event=fail)
    assert error.value.errno == number
    assert str(tmp_path) in str(error.value) and os.strerror(number) in str(error.value)
    assert checkpoint.latest(tmp_path).step == (2 if event == "after-rename" else 1)
    assert not [name for name in names(tmp_path) if name.startswith(".tmp")]


def test_a_root_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not be written"):
        write(tmp_path / "file")


def test_leftovers_are_ignored_then_removed(tmp_path):
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".tmp-00000002-123")
    (tmp_path / "step-notes").mkdir()
    assert checkpoint.latest(tmp_path).step == 1
    write(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-notes"]


def test_half_of_a_file_is_on_disk_at_mid_file(tmp_path):
    sizes = {}

    def look(now: str) -> None:
        if now == "mid-file":
            for path in next(tmp_path.glob(".tmp-*")).iterdir():
                sizes.setdefault(path.name, path.stat().st_size)

    folder = write(tmp_path, 1, on_event=look).folder
    assert set(sizes) == {path.name for path in folder.iterdir()}
    for name, size in sizes.items():
        assert size == (folder / name).stat().st_size // 2


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"])
@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
def test_a_broken_checkpoint_is_passed_over(tmp_path, name, damage):
    write(tmp_path, 1, assets={"config.json": b'{"a": 1}'})
    broken = write(tmp_path, 2, assets={"config.json": b'{"a": 1}'}).folder
    damage(broken / name)
    with pytest.warns(RuntimeWarning, match=rf"step-00000002 is passed over: .*{name}"):
        assert checkpoint.latest(tmp_path).step == 1
    with pytest.raises(ValueError, match=name):
        checkpoint.read(broken)
    write(tmp_path, 2)  # the rerun writes it anew
    assert checkpoint.latest(tmp_path).step == 2


def test_a_value_changed_in_the_state_is_noticed(tmp_path):
    path = write(tmp_path, 1).folder / "state.json"
    path.write_text(path.read_text().replace('"at": 1', '"at": 2'))
    with pytest.warns(RuntimeWarning, match="was changed"), pytest.raises(ValueError, match="is whole; .*--restart"):
        checkpoint.latest(tmp_path)


def test_nothing_there(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    (tmp_path / "step-00000001").mkdir()
    with (
        pytest.warns(RuntimeWarning, match=r"state.json cannot be read"),
        pytest.raises(ValueError, match="none of the 1 checkpoints in .* is whole; .*--restart"),
    ):
        checkpoint.latest(tmp_path)


def test_a_newer_format_is_refused(tmp_path):
    path = write(tmp_path, 1).folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match=r"has checkpoint format 2, this version of quatrain reads up to 1; upgrade"):
        checkpoint.latest(tmp_path)


def test_another_model_is_named(tmp_path):
    folder = write(tmp_path, 1).folder
    with pytest.raises(
        ValueError, match=r"embed.weight is torch.float32 \(5, 6\), the model's is torch.float32 \(5, 4\)"
    ):
        checkpoint.load_weights(folder, pair(width=4)[0])
    untied = Tied()
    untied.head = nn.Linear(6, 5)
    with pytest.raises(ValueError, match=r"missing \['head.bias', 'head.weight'\], unexpected none"):
        checkpoint.load_weights(folder, untied)
    del untied.head, untied.count
    with pytest.raises(ValueError, match=r"missing none, unexpected \['count'\]"):
        checkpoint.load_weights(folder, untied)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoint.load_weights(tmp_path, pair()[0])


def test_another_optimizer_is_named(tmp_path):
    write(tmp_path, 1)
    model, _ = pair()
    optimizer = torch.optim.AdamW([model.embed.weight])
    with pytest.raises(ValueError, match=r"unexpected \['norm.bias', 'norm.weight'\]"):
        checkpoint.load(checkpoint.latest(tmp_path), model, optimizer)
