import dataclasses
from pathlib import Path

import pytest

from quatrain.recipe import load_recipe
from quatrain.train import RunConfig, load_run, train
from quatrain.train.config import PhaseConfig, StepConfig, replace_in
from quatrain.train.parts import rehearse

MINIMAL = '[model]\npreset = "tiny-llama"\n[train]\nsteps = 100\n'


def with_keys(text: str) -> str:
    return MINIMAL + text


def test_defaults_are_filled_in_and_frozen():
    run = load_run(MINIMAL)
    assert (run.recipe, run.optimizer.lr, run.optimizer.betas, run.schedule.shape) == (
        "bf16",
        3e-3,
        (0.9, 0.95),
        "linear",
    )
    assert run.data.path == "stdlib"
    assert hash(run) == hash(load_run(MINIMAL))
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.recipe = "fp8"


EVERYTHING = """
recipe = "nvfp4"
out = "runs/a \\"b\\" ü"
[model]
path = "some/model"
[data]
path = "texts"
vocab_size = 512
max_bytes = 0
[train]
tokens = 131072
batch_size = 4
accumulate = 2
seed = 3
dtype = "float32"
[optimizer]
lr = 1
betas = [0, 0.99]
eps = 1e-30
[schedule]
warmup = 3
decay = 0.25
shape = "1-sqrt"
[validation]
every = 0
[checkpoint]
every = 7
[[phase]]
at = { step = 20 }
bf16 = "forward"
[[phase]]
at = 0.8
bf16 = "both"
"""


@pytest.mark.parametrize("text", [MINIMAL, EVERYTHING])
def test_round_trip_through_toml(text):
    run = load_run(text)
    assert load_run(run.to_toml()) == run
    assert load_run(run.to_toml()).to_toml() == run.to_toml()


def test_everything_is_read():
    run = load_run(EVERYTHING)
    assert run.phase == (PhaseConfig(StepConfig(20), "forward"), PhaseConfig(0.8, "both"))
    assert run.optimizer.lr == 1.0 and isinstance(run.optimizer.lr, float)
    assert run.schedule.warmup == 3 and isinstance(run.schedule.warmup, int)
    assert run.total_steps == 131072 // (4 * 2 * 128)
    assert run.out == 'runs/a "b" ü'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batchsize = 3", ["unknown key train.batchsize", "did you mean train.batch_size?", "accumulate", "log_every"]),
        ("[optimiser]\nlr = 1.0", ["unknown key optimiser", "did you mean optimizer?", "validation"]),
        ("zzz = 3", ["unknown key train.zzz", "Valid keys of [train]"]),
        ("[data]\npth = 'a'", ["unknown key data.pth", "did you mean data.path?"]),
        ("[[phase]]\nat = 0.5\nbf16 = 'both'\nextra = 1", ["unknown key phase[0].extra", "at, bf16"]),
        ("[[phase]]\nat = { steps = 5 }\nbf16 = 'both'", ["phase[0].at.steps", "did you mean phase[0].at.step?"]),
        ("[[phase]]\nat = 0.5", ["phase[0].bf16 is missing"]),
        ("batch_size = '8'", ["train.batch_size", "expected an integer", '"8" (a string)']),
        ("batch_size = 8.0", ["train.batch_size", "expected an integer", "8.0 (a number)"]),
        ("batch_size = true", ["train.batch_size", "expected an integer", "true (true or false)"]),
        ("clip = true", ["train.clip", "expected a number"]),
        ("clip = inf", ["train.clip", "expected a number"]),
        ("[optimizer]\nbetas = [0.9]", ["optimizer.betas", "an array of 2"]),
        ("[optimizer]\nbetas = 0.9", ["optimizer.betas", "an array of 2, each a number", "0.9"]),
        ("[optimizer]\nlr = 0", ["optimizer.lr must be positive", "0"]),
        ("[optimizer]\nlr = nan", ["optimizer.lr", "expected a number"]),
        ("[optimizer]\nbetas = [0.9, 1.0]", ["optimizer.betas", "from 0 to under 1"]),
        ("[optimizer]\nname = 'sgd'", ["optimizer.name", "adamw", "sgd"]),
        ("batch_size = 0", ["train.batch_size must be at least 1"]),
        ("seed = -1", ["train.seed"]),
        ("seed = 18446744073709551616", ["train.seed must lie from 0 to 2^63 - 1", "18446744073709551616"]),
        ("threads = 100000", ["train.threads must lie from 1 to 1024", "100000"]),
        ("threads = -1", ["train.threads"]),
        ("batch_size = 10_000_000_000", ["train.batch_size x data.sequence_length", "2^31"]),
        ("device = 'cuda:²'", ["train.device", "cuda:²"]),
        ("device = 'cuda:99999999999999999999'", ["train.device"]),
        ("[data]\nvocab_size = 10_000_000_000", ["data.vocab_size", "2^31"]),
        ("x = " + "[" * 5000, ["not valid TOML"]),
        ("dtype = 'fp16'", ["train.dtype", "bfloat16, float32", "fp16"]),
        ("device = 'gpu'", ["train.device", "gpu"]),
        ("[schedule]\nwarmup = 1.0", ["schedule.warmup", "1.0"]),
        (
            "[schedule]\nwarmup = 0.7\ndecay = 0.4",
            ["schedule.warmup (70 steps)", "schedule.decay (40 steps)", "100 steps"],
        ),
        ("[schedule]\nwarmup = 101", ["schedule.warmup (101 steps)"]),
        ("[schedule]\nshape = 'step'", ["schedule.shape", "linear, cosine, 1-sqrt"]),
        ("[schedule]\nfinal = 1.5", ["schedule.final"]),
        ("[validation]\nsequences = 0", ["validation.sequences"]),
        ("[checkpoint]\nkeep = 0", ["checkpoint.keep"]),
        ("[data]\nvalidation_fraction = 1.5", ["data.validation_fraction"]),
        ("[[phase]]\nat = 1.0\nbf16 = 'both'", ["phase.at", "1.0"]),
        ("[[phase]]\nat = { step = 100 }\nbf16 = 'both'", ["begins at step 100", "ends at step 100"]),
        ("[[phase]]\nat = 0.5\nbf16 = 'fprop'", ["phase.bf16", "forward, both"]),
        ("tokens = 1000", ["exactly one of train.tokens or train.steps", "tokens and steps"]),
        ("train = 3", ["unknown key train.train"]),
        ("x = = 3", ["not valid TOML"]),
    ],
)
def test_faults_are_named(text, words):
    with pytest.raises(ValueError) as error:
        load_run(with_keys(text))
    for word in words:
        assert word in str(error.value)


def test_exactly_one_of_pairs():
    with pytest.raises(ValueError, match=r"exactly one of train.tokens or train.steps; got neither"):
        load_run('[model]\npreset = "a"\n[train]\n')
    with pytest.raises(ValueError, match=r"exactly one of model.preset or model.path; got neither"):
        load_run("[model]\n[train]\nsteps = 1\n")
    with pytest.raises(ValueError, match=r"model is missing; give a table"):
        load_run("[train]\nsteps = 1\n")
    with pytest.raises(ValueError, match="expected a table, got 3"):
        load_run("model = 3\n[train]\nsteps = 1\n")


def test_fewer_tokens_than_a_step():
    with pytest.raises(ValueError, match="less than one step of 1024 tokens"):
        load_run('[model]\npreset = "a"\n[train]\ntokens = 1023\n')
    assert load_run('[model]\npreset = "a"\n[train]\ntokens = 2047\n').total_steps == 1


def test_overrides():
    run = load_run(
        MINIMAL,
        [
            "train.seed=5",
            "optimizer.betas = [0.8, 0.9]",
            "data.path=my texts",
            "out=runs/x",
            'recipe="fp8"',
            "train.seed=6",
        ],
    )
    assert (run.train.seed, run.optimizer.betas, run.data.path, run.out, run.recipe) == (
        6, (0.8, 0.9), "my texts", "runs/x", "fp8",
    )  # fmt: skip
    assert load_run(MINIMAL, ["recipe=fp8"], recipe="mxfp4").recipe == "mxfp4"
    assert load_run(MINIMAL, ['phase=[{at={step=3}, bf16="both"}]']).phase == (PhaseConfig(StepConfig(3), "both"),)
    assert load_run(MINIMAL, ["data.path=a = b"]).data.path == "a = b"


def test_an_override_replaces_the_other_of_a_pair():
    run = load_run(MINIMAL, ["train.tokens=4096", "model.path=folder"])
    assert (run.train.tokens, run.train.steps, run.model.path, run.model.preset) == (4096, None, "folder", None)
    with pytest.raises(ValueError, match="exactly one"):
        load_run(MINIMAL, ["train.tokens=4096", "train.steps=4"])


@pytest.mark.parametrize("text", ["train.seed", "=3", "train..seed=3"])
def test_malformed_overrides(text):
    with pytest.raises(ValueError, match="key=value"):
        load_run(MINIMAL, [text])


def test_overrides_are_strict_too():
    with pytest.raises(ValueError, match=r"did you mean train.batch_size"):
        load_run(MINIMAL, ["train.batch_sise=3"])
    with pytest.raises(ValueError, match=r"train.seed: expected an integer, got \"x\""):
        load_run(MINIMAL, ["train.seed=x"])
    with pytest.raises(ValueError, match="is no table"):
        load_run(MINIMAL, ["train.steps.x=3"])
    with pytest.raises(ValueError, match=r"train: expected a table"):
        load_run(MINIMAL, ["train=3"])


def test_files(tmp_path: Path):
    path = tmp_path / "RUN.toml"
    path.write_text(MINIMAL)
    assert load_run(path) == load_run(str(path)) == load_run(MINIMAL)
    path.write_text(MINIMAL + "zzz = 1")
    with pytest.raises(ValueError, match=r"RUN.toml: unknown key"):
        load_run(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        load_run(path)
    with pytest.raises(FileNotFoundError, match=r"none.toml does not exist"):
        load_run(str(tmp_path / "none.toml"))


def test_replace_in():
    run = replace_in(load_run(MINIMAL), out="b", train__seed=9)
    assert isinstance(run, RunConfig)
    assert (run.out, run.train.seed, run.train.steps) == ("b", 9, 100)


def test_out_must_not_be_empty():
    for text in ("", "  "):
        with pytest.raises(ValueError, match="out must name a folder; got"):
            load_run(f'out = "{text}"\n' + MINIMAL)


def test_an_override_nested_too_deeply():
    with pytest.raises(ValueError, match="nested too deeply"):
        load_run(MINIMAL, ["train.seed=" + "[" * 5000])


def test_a_byte_order_mark_is_no_fault(tmp_path: Path):
    (tmp_path / "run.toml").write_text("\ufeff" + MINIMAL, encoding="utf-8")
    assert load_run(tmp_path / "run.toml") == load_run(MINIMAL)


@pytest.mark.parametrize("key", ["out", "data.cache", "data.path", "data.tokenizer", "model.path", "the run file"])
def test_a_home_folder_that_does_not_exist(tmp_path: Path, key: str):
    lost = "~no-such-user/x"
    with pytest.raises(ValueError, match=f"{key} = '{lost}' begins with a home folder that cannot be found"):
        if key == "the run file":
            load_run(lost)
        else:
            (tmp_path / "docs.txt").write_text("text")
            base = [f"out={tmp_path / 'out'}", f"data.cache={tmp_path}", f"data.path={tmp_path / 'docs.txt'}"]
            run = load_run(MINIMAL, [*base, f"{key}={lost}"])
            if key == "model.path":
                rehearse(run, load_recipe("bf16"))
            train(run, progress=False)
