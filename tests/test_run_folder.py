"""What a run may do to the folder it is given, and what it says when it may not."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from quatrain import files
from quatrain.nn import NonFiniteError
from quatrain.recipe import load_recipe
from quatrain.train import load_run, train
from quatrain.train.config import replace_in
from quatrain.train.parts import Parts
from quatrain.train.records import Metrics, failure, open_folder, read_summary
from tiny_run import history, make_run

MINE = "# my own notes\nrecipe = 'bf16'\n"


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, "train.steps=2", "checkpoint.every=0", "validation.every=0")


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", ["run.toml", "recipe.toml", "summary.json", "metrics.jsonl"])
def test_files_that_no_run_wrote_stay(run, name, restart):
    out = Path(run.out)
    out.mkdir()
    (out / name).write_text(MINE)
    (out / "checkpoints" / "notes").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{name}.*no run that quatrain wrote.*choose another out"):
        train(run, progress=False, restart=restart)
    assert (out / name).read_text() == MINE and (out / "checkpoints" / "notes").is_dir()
    assert sorted(p.name for p in out.iterdir()) == sorted([name, "checkpoints"])


def test_files_of_a_run_are_signed(run):
    train(run, progress=False)
    for name in ("run.toml", "recipe.toml"):
        path = Path(run.out) / name
        assert files.is_signed(path) and path.read_text().startswith("# written by quatrain")
    assert load_run(Path(run.out) / "run.toml") == run


def test_a_folder_of_before_the_signature_is_taken_up(run):
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=lambda: True)
    for name in ("run.toml", "recipe.toml"):
        path = Path(run.out) / name
        path.write_text(files.unsigned(path.read_text()))
    before = (Path(run.out) / "run.toml").read_text()
    train(run, progress=False)
    assert (Path(run.out) / "run.toml").read_text() == before and read_summary(Path(run.out))["val_loss"] > 0
    train(run, progress=False, restart=True)
    assert files.is_signed(Path(run.out) / "run.toml")


def test_a_folder_of_before_the_signature_that_never_began(run):
    open_folder(Path(run.out), run, load_recipe("bf16")).close()
    for name in ("run.toml", "recipe.toml"):
        path = Path(run.out) / name
        path.write_text(files.unsigned(path.read_text()))
    train(run, progress=False)


def test_what_may_change_when_a_run_resumes(run):
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=lambda: True)
    train(replace_in(run, train__log_every=7, checkpoint__keep=5), progress=False)


def test_another_recipe_is_told_by_name_and_the_same_one_by_its_keys(run):
    plain = load_recipe("nvfp4-plain")
    open_folder(Path(run.out), run, plain).close()
    (Path(run.out) / "metrics.jsonl").write_text('{"kind": "train", "step": 0}\n')
    other = load_recipe("nvfp4")
    told = f"it differs in recipe (nvfp4-plain {plain.fingerprint()} -> nvfp4 {other.fingerprint()}); choose another"
    with pytest.raises(ValueError, match=re.escape(told)):
        open_folder(Path(run.out), run, other)
    changed = load_recipe(plain.to_toml().replace("head = true", "head = false"))
    with pytest.raises(ValueError, match=r"differs in recipe.linear.keep.head \(true -> false\); choose"):
        open_folder(Path(run.out), run, changed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "val_loss"),
        ("{}", "tokens_per_s"),
        ("x", "recipe"),
        ("[" * 100_000, "recipe"),
        ('{"recipe": 3}', "recipe"),
    ],
)
def test_a_broken_summary_is_named(run, text, words):
    train(run, progress=False)
    (Path(run.out) / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=rf"summary.json is no summary of a run: .*{words}.*remove it"):
        train(run, progress=False)
    (Path(run.out) / "summary.json").unlink()
    train(run, progress=False)


@pytest.mark.parametrize("name", ["run.toml", "recipe.toml"])
@pytest.mark.parametrize("content", [b"x = = 1\n", b"\xff\xfe"])
def test_a_broken_settings_file_is_named(run, name, content):
    train(run, progress=False)
    (Path(run.out) / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}, which an earlier run wrote, cannot be read.*--restart"):
        train(run, progress=False)


@pytest.mark.parametrize(
    "line", [b'{"kind": "train", "step": "1"}', b'{"step": 1}', b"\xff", b"[" * 100_000, b"1" * 5000, b"[]"]
)
def test_a_metrics_line_that_is_no_record(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n' + line + b'\n{"kind": "train", "step": 3}\n')
    metrics = Metrics(path)
    assert [r["step"] for r in metrics.read()] == [1]
    metrics.rewind(5)
    metrics.write({"kind": "train", "step": 2})
    assert [r["step"] for r in metrics.read()] == [1, 2]
    with pytest.raises(ValueError, match="not JSON compliant"):
        metrics.write({"kind": "train", "step": 3, "loss": float("nan")})
    metrics.close()


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device; free space.*a\.txt"):
        files.replace_file(tmp_path / "a.txt", "text")
    assert list(tmp_path.iterdir()) == []


def test_broken_checkpoints_are_not_thrown_away(run):
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=lambda: True)
    before = history(run.out)
    for folder in (Path(run.out) / "checkpoints").glob("step-*"):
        (folder / "state.json").write_text("{}")
    with pytest.warns(RuntimeWarning, match="passed over"), pytest.raises(ValueError, match="is whole; .*--restart"):
        train(run, progress=False)
    assert history(run.out) == before
    train(run, progress=False, restart=True)


def test_advice_after_a_restart(run, capfd):
    for restart, advice in ((False, "the same command resumes it"), (True, "run again without --restart to resume it")):
        with pytest.raises(KeyboardInterrupt):
            train(run, stop=lambda: True, restart=restart)
        assert f"saved step 1 of 2; {advice}" in capfd.readouterr().err


# divergence


def diverged(out):
    return [r for r in history(out) if r["kind"] == "diverged"]


def test_a_divergence_is_recorded_and_cut_off_by_a_resume(tmp_path, monkeypatch):
    run = make_run(tmp_path, "train.steps=3", "checkpoint.every=1", "validation.every=0")
    real, calls = Parts.loss, []

    def loss(self, batch):
        calls.append(1)
        return real(self, batch) * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr(Parts, "loss", loss)  # two calls for the first validation, then one a step
    with pytest.raises(NonFiniteError, match="step 2: the loss of the next step is nan"):
        train(run, progress=False)
    (record,) = diverged(run.out)
    assert record["step"] == 2 and "step-00000002 is kept" in record["error"] and history(run.out)[-1] == record
    assert failure(Path(run.out)) == record["error"]
    monkeypatch.undo()
    train(run, progress=False)
    assert diverged(run.out) == [] and failure(Path(run.out)) is None


@pytest.mark.parametrize("recipe", ["bf16", "tiny.toml"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_update_that_ends_in_nan_saves_nothing(tmp_path, recipe, dtype):
    run = make_run(tmp_path, "train.steps=1", "optimizer.lr=1e38", "schedule.warmup=0", f"train.dtype={dtype}")
    recipe = recipe if recipe == "bf16" else str(tmp_path / recipe)
    with pytest.raises(NonFiniteError, match="step 1"):
        train(run, recipe=recipe, progress=False)
    assert len(diverged(run.out)) == 1 and not (Path(run.out) / "summary.json").exists()
    assert not list((Path(run.out) / "checkpoints").glob("step-*"))
    assert ": NaN" not in (Path(run.out) / "metrics.jsonl").read_text()


def test_a_weight_that_no_loss_sees_is_checked(tmp_path, monkeypatch):
    run = make_run(tmp_path, "train.steps=1", tie_word_embeddings=False, vocab_size=400)  # ids from 300 on never occur
    real = Parts.validation_loss

    def spoil(self):
        self.model.get_parameter("model.embed_tokens.weight").data[399, 0] = float("nan")
        return real(self)

    monkeypatch.setattr(Parts, "validation_loss", spoil)
    with pytest.raises(NonFiniteError, match="step 1: NaN or infinity in the weights model.embed_tokens.weight;"):
        train(run, progress=False)
    assert not list((Path(run.out) / "checkpoints").glob("step-*"))


def test_nothing_of_a_moved_run_is_lost(run, tmp_path):
    train(run, progress=False)
    shutil.copytree(run.out, tmp_path / "moved")
    assert train(replace_in(run, out=str(tmp_path / "moved")), progress=False)["steps"] == 2
    assert json.loads((tmp_path / "moved" / "summary.json").read_text())["steps"] == 2
