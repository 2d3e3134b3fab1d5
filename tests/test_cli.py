"""The command: help with examples, exit codes, one clear line for each kind of bad input."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from quatrain import cli, commands

COMMANDS = ("train", "compare", "report", "recipe", "inspect", "fit-coefficients", "doctor")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(arguments)
    except SystemExit as stop:  # argparse's own errors and --help
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, command, "--help")
    assert code == 0 and "examples:" in out and f"quatrain {command}" in out


def test_no_command_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys)
    assert code == 2 and all(c in out for c in COMMANDS) and len(err.splitlines()) == 1
    for bad in (
        ("trian",),
        ("train",),
        ("compare", "bf16"),
        ("train", ""),
        ("compare", "bf16", "--run", "x", "--out", ""),
    ):
        code, out, err = call(capsys, *bad)
        assert code == 2 and out == "" and len(err.splitlines()) == 1 and "--help" in err, err
    assert call(capsys, "--version")[1].startswith("quatrain 0.")


def test_recipe_list_show_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "recipe", "list")
    assert code == 0 and len(out.splitlines()) >= 9 and "nvfp4-46-all" in out
    code, out, _ = call(capsys, "recipe", "show", "nvfp4")
    assert "wgrad.grad    nvfp4 1x16 stochastic hadamard 16" in out and "last_share=0.15" in out
    code, out, _ = call(capsys, "recipe", "show", "nvfp4", "--resolved")
    path = tmp_path / "mine.toml"
    path.write_text(call(capsys, "recipe", "show", "nvfp4")[1])
    code, _, err = call(capsys, "recipe", "show", str(path))
    assert code == 2 and "`quatrain recipe show nvfp4 --resolved` writes a recipe as TOML" in err
    path.write_text(out)
    code, out, _ = call(capsys, "recipe", "diff", "nvfp4", str(path))
    assert (code, out) == (0, "no difference\n")
    code, out, _ = call(capsys, "recipe", "diff", "nvfp4-plain", "nvfp4")
    assert "fprop.weight.block" in out and "16x16" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recipe", "show", "nvfp5"), "no recipe named 'nvfp5'"),
        (("recipe", "show"), "takes 1 recipe(s), received 0"),
        (("recipe", "diff", "nvfp4"), "takes 2 recipe(s), received 1"),
        (("recipe", "show", "missing.toml"), "no recipe file"),
        (("train", "missing.toml"), "missing.toml"),
        (("compare", "bf16", "nvfp5", "--run", "RUN"), "no recipe named 'nvfp5'"),
        (("compare", "bf16", "--run", "RUN", "--set", "train.tokns=5"), "unknown key train.tokns"),
        (("train", "RUN", "--recipe", "nvfp5", "--quiet"), "no recipe named 'nvfp5'"),
        (("inspect", "missing"), "nothing at missing"),
        (("report", "missing"), "missing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'out = "{tmp_path}/out"\n[model]\npreset = "tiny-llama"\n[train]\nsteps = 1\n')
    code, out, err = call(capsys, *(str(run) if a == "RUN" else a for a in arguments))
    assert code == 2 and message in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1 and out == ""


def test_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    import quatrain as qt

    path = tmp_path / "q.safetensors"
    qt.quantize(torch.randn(4, 64), "nvfp4").save(path)
    code, out, _ = call(capsys, "inspect", str(path))
    assert code == 0 and "F8_E4M3" in out and "4x32" in out
    path.write_bytes(path.read_bytes()[:50])
    (tmp_path / "empty").mkdir()
    assert call(capsys, "inspect", str(path))[0] == 2
    assert "holds no run" in call(capsys, "inspect", str(tmp_path / "empty"))[2]
    (tmp_path / "summary.json").write_text(json.dumps({"recipe": "nvfp4", "snr": {"a": 1}}))
    assert "recipe: nvfp4" in call(capsys, "inspect", str(tmp_path))[1]


def test_inspect_run_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from quatrain.train import compare, train
    from tiny_run import make_run

    run = make_run(tmp_path, "train.steps=2")
    with pytest.raises(KeyboardInterrupt):
        train(run, progress=False, stop=lambda: True)
    code, out, _ = call(capsys, "inspect", run.out)
    assert code == 0 and out.startswith("unfinished\n") and "checkpoints: step-00000001" in out and "last train" in out
    code, out, _ = call(capsys, "inspect", f"{run.out}/checkpoints/step-00000001")
    assert code == 0 and "model.safetensors" in out and "\noptimizer.safetensors\n" in out and "F32" in out
    compare(run, ["bf16"], seeds=[1], out=tmp_path / "all", progress=False)
    code, out, _ = call(capsys, "inspect", str(tmp_path / "all"))
    assert code == 0 and out.splitlines()[1].startswith("bf16") and "bf16-seed1" in out
    for name, text in (("summary.json", "[]"), ("comparison.json", "{}"), ("comparison.json", '{"recipes": [3]}')):
        folder = tmp_path / name / str(len(text))
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
        code, out, err = call(capsys, "inspect", str(folder))
        assert (code, out) == (2, "") and name in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), "internal error: KeyError: 'x'; please report it"),
        (RecursionError("deep"), "internal error: RecursionError: deep"),
        (TypeError("two\nlines"), "internal error: TypeError: two lines"),
        (RuntimeError("shape"), "internal error: RuntimeError: shape"),
        (MemoryError(), "out of memory: MemoryError; lower train.batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
    ],
)
def test_what_was_not_foreseen_is_one_line_too(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(commands, "doctor", fail)
    code, out, err = call(capsys, "doctor")
    assert (code, out) == (2, "") and err.startswith(f"quatrain: {message}") and len(err.splitlines()) == 1
    code, out, err = call(capsys, "--traceback", "doctor")
    assert code == 2 and "Traceback" in err and message in err


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def warn(_: object) -> None:
        warnings.simplefilter("always")
        warnings.warn("checkpoint x is\npassed over", RuntimeWarning, stacklevel=1)

    before = warnings.showwarning
    monkeypatch.setattr(commands, "doctor", warn)
    assert call(capsys, "doctor") == (0, "", "quatrain: warning: checkpoint x is passed over\n")
    assert warnings.showwarning is before


def test_ctrl_c_during_the_imports() -> None:
    """torch is imported where Ctrl-C is taken care of already."""
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from quatrain.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nstopped\n")


def test_a_run_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_run import make_run

    run = tmp_path / "run.toml"
    run.write_text("# mine\n" + make_run(tmp_path, "train.steps=1").to_toml())
    for out in (str(tmp_path), f"{tmp_path}/x/.."):
        (tmp_path / "x").mkdir(exist_ok=True)
        for more in ((), ("--restart",)):
            for way in (("--set", f"out={out}"), ("--out", out)):
                code, _, err = call(capsys, "train", str(run), "--quiet", *way, *more)
                assert code == 2 and "the run file itself, which would be overwritten; choose another out" in err
    assert run.read_text().startswith("# mine\n")
    assert call(capsys, "train", str(run), "--quiet")[0] == 0
    assert (
        call(capsys, "train", str(tmp_path / "out" / "run.toml"), "--quiet")[0] == 0
    )  # the run's own: nothing is lost


def test_stderr_of_a_quiet_run_is_empty(tmp_path: Path) -> None:
    """transformers recommends kernels of its own at each model; the table comes all the same."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(24):
        (text / f"{i}.txt").write_text(f"document {i}: the quick brown fox jumps over {i * 7} dogs. " * 30)
    run = tmp_path / "run.toml"
    run.write_text(
        f'[model]\npreset = "tiny-hybrid"\n[data]\npath = "{text}"\nvocab_size = 300\nsequence_length = 32\n'
        f'validation_fraction = 0.2\ncache = "{tmp_path}/cache"\n[train]\nsteps = 1\nbatch_size = 2\nthreads = 1\n'
    )
    command = [sys.executable, "-m", "quatrain", "compare", "bf16", "nvfp4", "--run", str(run), "--quiet"]
    done = subprocess.run(
        [*command, "--out", "~/x"],
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(tmp_path)},
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "nvfp4" in done.stdout and "One seed" in done.stdout and (tmp_path / "x" / "report.html").is_file()


def test_doctor_says_what_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor")
    assert code == 0 and "quantize on cpu" in out and "compiled CPU twin" in out and "emulated" in out


def test_doctor_names_devices_and_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine with two GPUs, one old and one new, and on one without Triton and compiler."""
    import torch

    from quatrain.kernels import cublaslt

    capabilities = [(9, 0), (10, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {torch.device(device).index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index])
    monkeypatch.setattr(cublaslt, "obstacle", lambda device: None)
    code, out, _ = call(capsys, "doctor")
    lines = {line.split("  ")[0]: line for line in out.splitlines() if not line.startswith(" ")}
    assert code == 0 and torch.__version__ in lines["torch"] and "compiler" in out
    assert "capability 9.0" in lines["cuda:0"] and "GPU 1" in lines["cuda:1"] and "quantize on cuda:1" in lines
    assert "blackwell" in lines["matmul on cuda:1"] and "blackwell" not in lines["matmul on cuda:0"]
    assert "cuBLASLt" in out and "GPU 0 has 9.0" in out and "never run on such hardware" in out

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(commands.shutil, "which", lambda name: None)
    code, out, _ = call(capsys, "doctor")
    lines = {line.split("  ")[0]: line.split()[1] for line in out.splitlines()}
    assert code == 0 and lines["triton"] == "no" and "none of g++, clang++, c++ on the PATH" in out


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = commands.importlib.util.find_spec
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda n: None if n == "plotly" else real(n))
    for command in (("train", "x.toml"), ("compare", "bf16", "--run", "x.toml"), ("report", "x")):
        code, _, err = call(capsys, *command)
        assert code == 2 and "[train] extra" in err and "plotly" in err
    assert call(capsys, "recipe", "list")[0] == 0
    assert "missing: plotly" in call(capsys, "doctor")[1]


def test_core_imports_without_the_extra() -> None:
    """A fresh interpreter in which the extra's packages cannot be imported still quantizes and converts."""
    code = (
        "import sys\n"
        "for name in ('transformers', 'tokenizers', 'rich', 'plotly', 'pyarrow'): sys.modules[name] = None\n"
        "import torch, quatrain as qt\n"
        "from quatrain.cli import main\n"
        "qt.apply(torch.nn.Sequential(torch.nn.Linear(32, 32)), 'nvfp4-plain')\n"
        "assert main(['recipe', 'list']) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "doctor", stop)
    monkeypatch.setattr(commands, "train", stop)
    assert call(capsys, "doctor") == (130, "", "\nstopped\n")
    assert call(capsys, "train", "x")[2] == "\nstopped; the same command resumes\n"
    assert call(capsys, "train", "x", "--restart")[2] == "\nstopped; run again without --restart to resume\n"


def test_train_compare_and_report_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(24):
        (text / f"{i}.txt").write_text(
            f"document {i}: the quick brown fox jumps over the lazy dog {i * 7} times. " * 30
        )
    run = tmp_path / "run.toml"
    run.write_text(
        f'out = "{tmp_path}/one"\n[model]\npreset = "tiny-hybrid"\n[data]\npath = "{text}"\nvocab_size = 300\n'
        f'sequence_length = 32\nvalidation_fraction = 0.2\ncache = "{tmp_path}/cache"\n'
        "[train]\nsteps = 3\nbatch_size = 2\nthreads = 1\n[validation]\nevery = 2\nsequences = 2\n"
    )
    code, out, err = call(capsys, "train", str(run), "--recipe", "nvfp4", "--quiet")
    assert code == 0 and out.startswith("nvfp4: validation loss"), err
    code, out, err = call(capsys, "compare", "bf16", "nvfp4-46", "--run", str(run), "--out", str(tmp_path / "two"))
    assert code == 0 and "nvfp4-46" in out and (tmp_path / "two" / "report.html").is_file(), err
    code, out, _ = call(capsys, "report", str(tmp_path / "two"), "--out", str(tmp_path / "again.html"))
    assert code == 0 and (tmp_path / "again.html").is_file()
    (tmp_path / "two" / "bf16-seed0" / "summary.json").write_text("{")
    code, _, err = call(capsys, "report", str(tmp_path / "two"), "--out", str(tmp_path / "again.html"))
    assert code == 0 and err.endswith("bf16-seed0: summary.json cannot be read and was ignored\n")
    page = (tmp_path / "two" / "report.html").read_text()
    assert "nvfp4-46" in page and "fprop.input" in page
