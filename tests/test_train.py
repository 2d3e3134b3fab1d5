import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from quatrain import checkpoint
from quatrain.files import unsigned
from quatrain.nn import NonFiniteError
from quatrain.recipe import OptimizerRows, Phase, load_recipe
from quatrain.train import RunConfig, Trainer, load_run, train
from quatrain.train import loop as loop_module
from quatrain.train.config import replace_in
from quatrain.train.optimizer import make_optimizer
from quatrain.train.parts import Parts, assemble
from quatrain.train.progress import Display
from quatrain.train.records import Metrics, failure
from quatrain.train.savings import linear_bytes_per_element
from quatrain.train.schedule import ScheduleConfig, phase_steps, precision_at, wsd
from tiny_run import QUANTIZED, history, make_run

EVENTS = ("before-temporary", "mid-file", "before-fsync", "before-rename", "after-rename")
FILES = ("model.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> RunConfig:
    """An undisturbed run of 6 steps in the quantized recipe, finished."""
    folder = tmp_path_factory.mktemp("base")
    config = make_run(folder, f"recipe={folder / 'tiny.toml'}")
    train(config, progress=False)
    return config


def last(config: RunConfig) -> Path:
    return sorted((Path(config.out) / "checkpoints").glob("step-*"))[-1]


def elsewhere(config: RunConfig, out: Path, **changes) -> RunConfig:
    return replace_in(config, out=str(out), **changes)


def stop_after(step: int):
    """A `stop` that says True once `step` steps are done."""
    calls = iter(range(1, 1000))
    return lambda: next(calls) >= step


def same_run(a: RunConfig, b: RunConfig) -> None:
    assert history(a.out) == history(b.out)
    for name in FILES:
        assert (last(a) / name).read_bytes() == (last(b) / name).read_bytes()


# the schedule


def test_warm_up_stable_decay():
    schedule = wsd(ScheduleConfig(warmup=0.2, decay=4, final=0.1), peak=2.0, total=10)
    rates = [schedule.rate(step) for step in range(10)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.55, 1.1, 0.65, 0.2])


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - 0.5**0.5)])
def test_decay_shapes(shape, middle):
    schedule = wsd(ScheduleConfig(warmup=0, decay=8, final=0.0, shape=shape), peak=1.0, total=10)
    assert schedule.rate(5) == pytest.approx(middle)
    assert schedule.rate(9) == pytest.approx(0.0, abs=1e-12)
    assert [schedule.rate(step) for step in (0, 1)] == [1.0, 1.0]
    falling = [schedule.rate(step) for step in range(1, 10)]
    assert falling == sorted(falling, reverse=True)


def test_fractions_never_exceed_the_run():
    for total in range(1, 50):
        schedule = wsd(ScheduleConfig(warmup=0.5, decay=0.5), peak=1.0, total=total)
        assert schedule.warmup + schedule.decay <= total
        assert all(0 < schedule.rate(step) <= 1 for step in range(total))


def test_phases_by_fraction_and_step():
    starts = phase_steps([Phase(at=0.8, step=None, bf16="both"), Phase(at=None, step=3, bf16="forward")], 10)
    assert starts == ((3, "forward"), (8, "both"))
    assert [precision_at(starts, step) for step in (0, 2, 3, 7, 8, 9)] == [
        None, None, "forward", "forward", "both", "both",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="two phases begin at the same step"):
        phase_steps([Phase(at=0.5, step=None, bf16="both"), Phase(at=None, step=5, bf16="forward")], 10)


# one run


def test_records(base):
    records = history(base.out)
    assert [(r["kind"], r["step"]) for r in records] == [
        ("val", 0), ("train", 1), ("train", 2), ("val", 2), ("train", 3), ("train", 4), ("val", 4),
        ("train", 5), ("train", 6), ("val", 6),
    ]  # fmt: skip
    assert all(r["tokens"] == r["step"] * 2 * 16 for r in records)
    assert set(records[1]) == {"kind", "step", "tokens", "loss", "lr", "grad_norm"}
    assert set(records[0]) == {"kind", "step", "tokens", "val_loss", "val_loss_bf16"}
    assert records[0]["val_loss"] != records[0]["val_loss_bf16"]
    assert records[-1]["val_loss"] < records[0]["val_loss"] - 0.2


def test_folder(base):
    out = Path(base.out)
    assert sorted(p.name for p in out.iterdir()) == [
        "checkpoints", "metrics.jsonl", "recipe.toml", "run.toml", "summary.json",
    ]  # fmt: skip
    assert load_run(out / "run.toml") == base
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


def test_summary(base):
    summary = json.loads((Path(base.out) / "summary.json").read_text())
    records = history(base.out)
    assert summary["val_loss_first"] == records[0]["val_loss"]
    assert (summary["val_loss"], summary["val_loss_bf16"]) == (records[-1]["val_loss"], records[-1]["val_loss_bf16"])
    assert (summary["recipe"], summary["seed"], summary["steps"], summary["tokens"]) == ("tiny", 0, 6, 192)
    assert (summary["threads"], summary["dtype"], summary["device"]) == (1, "float32", "cpu")
    assert summary["quantized_mac_share"] == 1.0
    assert len(summary["converted"]) == 14 and set(summary["snr"]) == set(summary["converted"])
    assert summary["recipe_toml"] == unsigned((Path(base.out) / "recipe.toml").read_text())
    assert summary["parameters"] == sum(
        t.numel() for t in AutoModelForCausalLM.from_pretrained(last(base)).parameters()
    )
    assert all(summary[key] > 0 for key in ("saved_bytes", "saved_bytes_per_element", "tokens_per_s", "wall_s"))
    assert summary["versions"]["torch"] == torch.__version__
    assert {"fingerprint", "commit", "date", "kept"} <= set(summary)


def test_the_speed_leaves_out_the_first_step_of_each_process(tmp_path, monkeypatch):
    """Kernels are compiled in it: on a GPU as long as hundreds of steps of a small model."""
    update, slept = Trainer._update, []

    def slow(self, rate):
        if not slept or self.step == 3 and len(slept) < 2:
            slept.append(self.step)
            time.sleep(1.0)
        return update(self, rate)

    monkeypatch.setattr(Trainer, "_update", slow)
    config = make_run(tmp_path, f"recipe={tmp_path / 'tiny.toml'}")
    with pytest.raises(KeyboardInterrupt):
        train(config, progress=False, stop=stop_after(3))
    summary = train(config, progress=False)
    assert slept == [0, 3]
    assert summary["tokens_per_s"] >= 4 / 6 * summary["tokens"] / (summary["wall_s"] - 2.0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_a_plain_transformers_model(tmp_path, tied):
    config = make_run(tmp_path, f"recipe={tmp_path / 'tiny.toml'}", "train.steps=1", tie_word_embeddings=tied)
    trainer = Trainer(config, progress=False)
    trainer.run()
    plain, info = AutoModelForCausalLM.from_pretrained(last(config), output_loading_info=True)
    assert not any(info.values())
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    for name, tensor in trainer.parts.model.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name])
    tokenizer = AutoTokenizer.from_pretrained(last(config))
    text = "word1 is not word2,"
    assert tokenizer(text).input_ids == trainer.parts.corpus.tokenizer.encode(text).ids
    assert tokenizer.eos_token_id == plain.config.eos_token_id == trainer.parts.corpus.end_of_document


def test_bfloat16_run(tmp_path):
    config = make_run(tmp_path, f"recipe={tmp_path / 'tiny.toml'}", "train.dtype=bfloat16", "train.steps=3")
    summary = train(config, progress=False)
    assert summary["val_loss"] < summary["val_loss_first"]
    assert all(p.dtype == torch.float32 for p in AutoModelForCausalLM.from_pretrained(last(config)).parameters())


def test_the_bf16_recipe(tmp_path):
    config = make_run(tmp_path, "train.steps=2")
    summary = train(config, progress=False)
    assert summary["snr"] == {} and summary["converted"] == {} and summary["quantized_mac_share"] == 0.0
    assert summary["val_loss"] == summary["val_loss_bf16"]


def test_saved_bytes_of_the_linears(tmp_path):
    batch = torch.randint(0, 300, (16, 17))
    found = {}
    for recipe in ("bf16", str(tmp_path / "tiny.toml")):
        config = make_run(tmp_path, f"recipe={recipe}", "train.dtype=bfloat16", "data.vocab_size=300")
        parts = assemble(config, load_recipe(recipe), Display("test", 1, quiet=True))
        parts.model.train()
        found[recipe] = linear_bytes_per_element(parts.model, lambda parts=parts: parts.loss(batch))
    bf16, quantized = found.values()
    assert bf16 == 2.0
    head = 32 / (2 * (4 * 32 + 2 * 32 + 48) + 32)  # share of the tied head, which stays BF16, in all input elements
    assert quantized == pytest.approx(head * 2.0 + (1 - head) * (0.5 + 1 / 16), rel=0.02)
    assert linear_bytes_per_element(nn.Embedding(3, 2), lambda: torch.zeros(())) == 0.0


def test_accumulation_is_the_mean_over_the_step(tmp_path):
    make_run(tmp_path)
    options = ("train.steps=3", "train.log_every=1")
    whole = make_run(tmp_path, *options, "train.batch_size=4", f"out={tmp_path / 'whole'}")
    parts = make_run(tmp_path, *options, "train.accumulate=2", f"out={tmp_path / 'parts'}")
    train(whole, progress=False)
    train(parts, progress=False)
    for a, b in zip(history(whole.out), history(parts.out), strict=True):
        assert a.pop("kind") == b.pop("kind")
        assert a == pytest.approx(b, rel=1e-5)


def test_clipping(tmp_path):
    make_run(tmp_path)
    free = make_run(tmp_path, "train.clip=0", "train.steps=2", f"out={tmp_path / 'free'}")
    tight = make_run(tmp_path, "train.clip=1e-12", "train.steps=2", f"out={tmp_path / 'tight'}")
    train(free, progress=False)
    train(tight, progress=False)
    (_, a, *_), (_, b, *_) = history(free.out), history(tight.out)
    assert a == b  # the norm is recorded before clipping
    assert history(free.out)[2] != history(tight.out)[2]


def test_validation_does_not_disturb(base, tmp_path):
    often = elsewhere(base, tmp_path / "often", validation__every=1)
    train(often, progress=False)
    assert [r for r in history(often.out) if r["kind"] == "train"] == [
        r for r in history(base.out) if r["kind"] == "train"
    ]
    assert (last(often) / FILES[0]).read_bytes() == (last(base) / FILES[0]).read_bytes()


def test_seeds_differ(base, tmp_path):
    other = elsewhere(base, tmp_path / "seed1", train__seed=1)
    train(other, progress=False)
    assert history(other.out)[1]["loss"] != history(base.out)[1]["loss"]


def test_settings_of_the_process_are_put_back(tmp_path):
    config = make_run(tmp_path, "train.steps=1", "train.threads=2")
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), signal.getsignal(signal.SIGINT)
    assert train(config, progress=False)["threads"] == 2
    assert before == (
        torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), signal.getsignal(signal.SIGINT),
    )  # fmt: skip


def test_weight_decay_is_for_matrices():
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_proj = nn.Linear(4, 4)
            self.conv1d = nn.Conv1d(4, 4, 2)
            self.norm = nn.LayerNorm(4)
            self.A_log, self.D = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 1))
            self.dt_bias = nn.Parameter(torch.zeros(4))
            self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    model = Mixer()
    run = load_run("[model]\npreset = 'tiny-llama'\n[train]\nsteps = 1\n[optimizer]\nweight_decay = 0.3\n")
    optimizer = make_optimizer(model, run, torch.device("cpu"), OptimizerRows())
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}
    assert groups[0.3] == {"in_proj.weight", "conv1d.weight"}
    assert groups[0.0] == {"in_proj.bias", "conv1d.bias", "norm.weight", "norm.bias", "A_log", "D", "dt_bias"}


def test_a_name_is_no_markup(capsys):
    with Display("a[/b]", 3) as display:
        display.waiting("for kernels")
        display.update(1, loss=1.0, rate=1.0, tokens_per_s=1.0, log=True)
    shown = capsys.readouterr().err
    assert "a[/b]  for kernels" in shown and "a[/b]  step 1/3" in shown
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Display("a[/b]", 3, console=console) as display:
        display.waiting("for kernels")
    assert "a[/b]" in console.file.getvalue() and "for kernels" in console.file.getvalue()


def test_lines_without_a_terminal(base, tmp_path, capfd):
    train(elsewhere(base, tmp_path / "a"), progress=True)
    lines = capfd.readouterr()
    assert lines.out == ""
    steps = [line for line in lines.err.splitlines() if "tokens/s" in line]
    assert len(steps) == 6 and steps[2].startswith("tiny  step 3/6  loss ") and "left" in steps[2]
    train(elsewhere(base, tmp_path / "b"), progress=False)
    assert capfd.readouterr() == ("", "")


# resuming


def test_stop_and_resume(base, tmp_path):
    run = elsewhere(base, tmp_path / "run")
    for step in (1, 2):  # after step 1, then after 3
        with pytest.raises(KeyboardInterrupt):
            train(run, progress=False, stop=stop_after(step))
    assert last(run).name == "step-00000003"
    assert not (Path(run.out) / "summary.json").exists()
    summary = train(run, progress=False)
    same_run(run, base)
    assert summary["val_loss_first"] == history(base.out)[0]["val_loss"]


def test_stop_at_the_last_step_still_stops(base, tmp_path):
    run = elsewhere(base, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=stop_after(6))
    train(run, progress=False)
    same_run(run, base)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves(base, tmp_path, capfd, number):
    run = elsewhere(base, tmp_path / "run")
    calls = iter(range(1, 10))

    def press() -> bool:
        if next(calls) == 3:
            os.kill(os.getpid(), number)
        return False

    with pytest.raises(KeyboardInterrupt):
        train(run, stop=press)
    assert last(run).name in ("step-00000003", "step-00000004")
    assert "finished and saved first" in capfd.readouterr().err
    train(run)
    assert "resuming" in capfd.readouterr().err
    same_run(run, base)


def test_a_second_ctrl_c_stops_at_once(base, tmp_path):
    run = elsewhere(base, tmp_path / "run")
    pressed = iter(range(1, 10))

    def press() -> bool:
        if next(pressed) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=press)
    assert last(run).name == "step-00000002"
    train(run, progress=False)
    same_run(run, base)


def test_a_crash_before_the_first_checkpoint_begins_anew(base, tmp_path):
    run = elsewhere(base, tmp_path / "run")

    def crash() -> bool:
        raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        train(run, progress=False, stop=crash)
    assert history(run.out)[-1]["step"] == 1 and not (Path(run.out) / "checkpoints").exists()
    train(run, progress=False)
    same_run(run, base)


# One interpreter, forked once an event, so that the imports are paid for once; torch has not computed anything yet.
KILLER = """
import os, signal, sys
import torch
import torch._dynamo.eval_frame
import transformers.models.llama.modeling_llama
from quatrain.train import Trainer, load_run

torch.set_num_threads(1)
for event, run in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child == 0:
        writes = 0
        def kill(now):
            global writes
            writes += now == "before-temporary"
            if writes == 2 and now == event:
                os.kill(os.getpid(), signal.SIGKILL)
        Trainer(load_run(run), progress=False, on_event=kill).run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(event, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "alive")
"""


def test_sigkill_at_each_point_of_a_checkpoint_write(base, tmp_path):
    runs = {event: elsewhere(base, tmp_path / event) for event in EVENTS}
    arguments = []
    for event, run in runs.items():
        (tmp_path / f"{event}.toml").write_text(run.to_toml())
        arguments += [event, str(tmp_path / f"{event}.toml")]
    done = subprocess.run([sys.executable, "-c", KILLER, *arguments], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:-1] == [f"{event} 9" for event in EVENTS], done.stderr
    for event, run in runs.items():
        left = sorted(p.name for p in (Path(run.out) / "checkpoints").iterdir())
        if event == "after-rename":
            assert left == ["step-00000002", "step-00000004"]
        else:
            assert left[-1] == "step-00000002" and (len(left) == 2) == (event != "before-temporary")
        assert history(run.out)[-1]["step"] == 4
        train(run, progress=False)
        same_run(run, base)


def test_a_broken_checkpoint_is_passed_over_on_resume(base, tmp_path):
    run = elsewhere(base, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=stop_after(5))
    os.truncate(last(run) / FILES[1], 100)
    with pytest.warns(RuntimeWarning, match="step-00000005 is passed over"):
        train(run, progress=False)
    same_run(run, base)


def test_a_full_disk_leaves_the_earlier_checkpoint(base, tmp_path):
    run, writes = elsewhere(base, tmp_path / "run"), []

    def fail(now: str) -> None:
        writes.append(now)
        if writes.count("before-temporary") == 2 and now == "mid-file":
            raise OSError(28, os.strerror(28))

    with pytest.raises(OSError, match="checkpoint of step 4 could not be written"):
        Trainer(run, progress=False, on_event=fail).run()
    assert checkpoint.latest(Path(run.out) / "checkpoints").step == 2
    train(run, progress=False)
    same_run(run, base)


def test_a_torn_line_is_cut_off(base, tmp_path):
    run = elsewhere(base, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=stop_after(3))
    with (Path(run.out) / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "tok')
    train(run, progress=False)
    same_run(run, base)


def test_lost_records_are_noticed(base, tmp_path):
    run = elsewhere(base, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=stop_after(3))
    (Path(run.out) / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has 0 records where the checkpoint knows of 5"):
        train(run, progress=False)
    train(run, progress=False, restart=True)
    same_run(run, base)


def test_other_text_is_noticed(tmp_path):
    config = make_run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(config, progress=False, stop=stop_after(2))
    (tmp_path / "text" / "0.txt").write_text("something else " * 30)
    with pytest.raises(ValueError, match=r"data.path = .* is not what .* was trained on"):
        train(config, progress=False)


def test_other_ground_is_told(base, tmp_path, monkeypatch):
    run = elsewhere(base, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=stop_after(2))
    ground = Parts.ground
    monkeypatch.setattr(Parts, "ground", lambda self: ground(self) | {"device": "abacus"})
    with pytest.warns(RuntimeWarning, match=r"last bits may differ: device \(cpu -> abacus\)"):
        train(run, progress=False)


# rerunning


def test_a_finished_run_is_not_trained_again(base, monkeypatch, capfd):
    monkeypatch.setattr(loop_module, "assemble", lambda *_: pytest.fail("trained again"))
    before = (Path(base.out) / "metrics.jsonl").read_bytes()
    assert train(base) == json.loads((Path(base.out) / "summary.json").read_text())
    assert (Path(base.out) / "metrics.jsonl").read_bytes() == before
    assert "is finished already; --restart trains it again" in capfd.readouterr().err


def test_restart_trains_again(base, tmp_path):
    run = elsewhere(base, tmp_path / "run", train__seed=4)
    train(run, progress=False)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    again = elsewhere(base, tmp_path / "run")
    train(again, progress=False, restart=True)
    same_run(again, base)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_moved_folder_is_the_same_run(base, tmp_path):
    shutil.copytree(base.out, tmp_path / "moved")
    summary = train(elsewhere(base, tmp_path / "moved"), progress=False)
    assert summary["val_loss"] == history(base.out)[-1]["val_loss"]


def test_another_run_in_the_folder_is_refused(base, tmp_path):
    shutil.copytree(base.out, tmp_path / "run")
    other = elsewhere(base, tmp_path / "run", train__seed=4, optimizer__lr=0.5)
    with pytest.raises(ValueError) as error:
        train(other, progress=False)
    for word in ("holds another run", "train.seed (0 -> 4)", "optimizer.lr (0.003 -> 0.5)", "another out", "--restart"):
        assert word in str(error.value)
    with pytest.raises(ValueError, match="recipe"):
        train(elsewhere(base, tmp_path / "run"), recipe="bf16", progress=False)
    assert load_run(tmp_path / "run" / "run.toml").train.seed == 0


def test_a_run_that_never_began_may_be_corrected(base, tmp_path):
    run = elsewhere(base, tmp_path / "run")
    with pytest.raises(ValueError, match="one sequence at least"):
        train(elsewhere(run, tmp_path / "run", data__sequence_length=2000), progress=False)
    train(run, progress=False)
    same_run(run, base)


def test_two_processes_cannot_share_a_folder(tmp_path):
    config = make_run(tmp_path)
    Path(config.out).mkdir()
    metrics = Metrics(Path(config.out) / "metrics.jsonl")
    with pytest.raises(ValueError, match="another process is training in"):
        train(config, progress=False)
    metrics.close()


def test_out_is_a_file(tmp_path):
    config = make_run(tmp_path)
    Path(config.out).write_text("")
    with pytest.raises(ValueError, match="out must be a folder"):
        train(config, progress=False)


# phases


def test_phases(base, tmp_path, monkeypatch):
    seen = []
    real = loop_module.set_precision
    monkeypatch.setattr(loop_module, "set_precision", lambda model, bf16: (seen.append(bf16), real(model, bf16)))
    phases = '[[phase]]\nat = { step = 2 }\nbf16 = "forward"\n[[phase]]\nat = 0.67\nbf16 = "both"\n'
    text = replace_in(base, out=str(tmp_path / "whole"), validation__every=3).to_toml() + phases
    whole = load_run(text)
    train(whole, progress=False)
    records = history(whole.out)
    assert [r for r in records if r["kind"] == "phase"] == [
        {"kind": "phase", "step": 2, "bf16": "forward"}, {"kind": "phase", "step": 4, "bf16": "both"},
    ]  # fmt: skip
    assert seen == ["both", None, "forward", "both", None]  # the first validation, two phases, the measurements
    validations = [r for r in records if r["kind"] == "val"]
    assert validations[0]["val_loss"] != validations[0]["val_loss_bf16"]
    assert all(r["val_loss"] == r["val_loss_bf16"] for r in validations[1:])
    trained = [r["loss"] for r in records if r["kind"] == "train"]
    plain = [r["loss"] for r in history(base.out) if r["kind"] == "train"]
    assert trained[:2] == plain[:2] and all(a != b for a, b in zip(trained[2:], plain[2:], strict=True))

    run = elsewhere(whole, tmp_path / "run")
    for _ in range(5):  # a stop after every step, so on the borders and inside of the phases
        with pytest.raises(KeyboardInterrupt):
            train(run, progress=False, stop=stop_after(1))
    train(run, progress=False)
    same_run(run, whole)

    crash = elsewhere(whole, tmp_path / "crash")  # after a phase has begun at the very step of a checkpoint

    def stop() -> bool:
        if history(crash.out)[-1]["step"] == 5:
            raise RuntimeError("crash")
        return False

    with pytest.raises(RuntimeError, match="crash"):
        train(crash, progress=False, stop=stop)
    assert history(crash.out)[-2] == {"kind": "phase", "step": 4, "bf16": "both"}
    train(crash, progress=False)
    same_run(crash, whole)


def test_a_phase_of_the_recipe_after_the_end(tmp_path):
    config = make_run(tmp_path)
    recipe = (tmp_path / "tiny.toml").read_text() + '\n[[phase]]\nat = 0.5\nbf16 = "both"\n'
    (tmp_path / "late.toml").write_text(recipe)
    summary = train(config, recipe=str(tmp_path / "late.toml"), progress=False)
    assert [r["step"] for r in history(config.out) if r["kind"] == "phase"] == [3]
    assert summary["snr"]  # measured with the recipe's operands, although the run ended in BF16


# faults


def test_a_non_finite_loss_names_the_step(base, tmp_path, monkeypatch):
    run, real, calls = elsewhere(base, tmp_path / "run", validation__every=0), Parts.loss, []

    def loss(self, batch):
        calls.append(1)
        value = real(self, batch)
        return value * float("nan") if len(calls) == 2 * 2 + 5 else value

    monkeypatch.setattr(Parts, "loss", loss)  # two validations of two batches come first, then one call a step
    with pytest.raises(NonFiniteError, match=r"step 4: the loss of the next step is nan.*step-00000004 is kept.*lower"):
        train(run, progress=False)
    monkeypatch.undo()
    train(run, progress=False)
    assert (last(run) / FILES[0]).read_bytes() == (last(base) / FILES[0]).read_bytes()


def test_a_non_finite_operand_names_the_module(tmp_path, monkeypatch):
    config = make_run(tmp_path, f"recipe={tmp_path / 'tiny.toml'}")
    real = Trainer._update

    def poison(self, rate):
        if self.step == 3:
            with torch.no_grad():
                self.parts.model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
        return real(self, rate)

    monkeypatch.setattr(Trainer, "_update", poison)
    with pytest.raises(
        NonFiniteError,
        match=r"step 3: .*infinity in model.layers.1.mlp.up_proj \(fprop.weight\).*step-00000002 is kept",
    ):
        train(config, progress=False)


def test_a_realignment_of_a_non_finite_weight_ends_the_run_as_diverged(tmp_path, monkeypatch):
    split = QUANTIZED.replace("[linear]", '[linear]\nsplit = { kind = "svd", rank = 16, every = 1 }')
    config = make_run(tmp_path, f"recipe={tmp_path / 'split.toml'}")
    (tmp_path / "split.toml").write_text(split)

    @torch.no_grad()
    def poison(parameters, *_):
        for parameter in parameters:
            parameter.fill_(float("nan"))

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", poison)  # after the gradients, before the step
    with pytest.raises(NonFiniteError, match=r"step 0: .*_proj: a weight that is split must be finite"):
        train(config, progress=False)
    assert failure(Path(config.out))  # so that a comparison counts it and does not train it again


def test_vocabulary_larger_than_the_model(tmp_path):
    config = make_run(tmp_path, vocab_size=64)
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ tokens, the model's vocabulary 64"):
        train(config, progress=False)


def test_sequence_longer_than_the_model(tmp_path):
    config = make_run(tmp_path, max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"data.sequence_length is 16, the model has 8 positions"):
        train(config, progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(tmp_path):
    with pytest.raises(ValueError, match=r'train.device = "cuda", but torch sees 0 CUDA devices'):
        train(make_run(tmp_path, "train.device=cuda"), progress=False)
