"""The README is executed: its snippet, its recipe, its commands, its tree, its links, its tables."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import quatrain as qt
from quatrain import cli
from quatrain.train import load_run

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.S | re.M) if name == language]


def test_the_python_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippet, optimizers, attention = blocks("python")
    code = [line for line in snippet.splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 11
    found: dict[str, object] = {}
    exec(compile(snippet, "README.md", "exec"), found)
    exec(compile(optimizers, "README.md", "exec"), found)
    exec(compile(attention, "README.md", "exec"), found)
    out = capsys.readouterr().out
    assert "orthogonal, nvfp4, fitted" in out
    assert "2 of 2 linears quantized" in out and "torch.Size([64, 128])" in out


def test_the_recipe_is_the_librarys() -> None:
    (text,) = blocks("toml")
    recipe = qt.load_recipe(text)
    assert recipe.linear == qt.load_recipe("nvfp4").linear and recipe.keep == qt.load_recipe("nvfp4").keep
    assert recipe.phases[0].bf16 == "forward"
    for name in re.findall(r"^\| (`.*?) \|", TEXT, flags=re.M):
        for recipe_name in re.findall(r"`([a-z0-9-]+)`", name):
            qt.load_recipe(recipe_name)


def test_the_commands_parse() -> None:
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("quatrain ")]
    assert len(lines) >= 6
    for line in lines:
        options = cli._parser().parse_args(shlex.split(line)[1:])
        if getattr(options, "run_file", None):
            load_run(ROOT / options.run_file, options.set)


def test_the_two_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_the_tree_and_the_links_exist() -> None:
    tree = next(block for block in blocks("") if "src/quatrain/" in block)
    for line in tree.splitlines():
        name = line.split()[0]
        assert (ROOT / ("src/quatrain/" + name if line.startswith("  ") else name)).exists(), name
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_tables_are_made_from_the_records() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/table.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, "run `make bench-table`: " + done.stderr


def test_the_demo_is_large_enough_to_mean_something() -> None:
    """Six recipes, 100,000 tokens each or more, threads set explicitly, three quarters of the MACs quantized."""
    from quatrain.models import build

    config = load_run(ROOT / "examples" / "demo.toml")
    assert config.total_steps * config.tokens_per_step >= 100_000 and config.train.threads > 0
    target = re.search(r"^demo:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    names = shlex.split(target.group(1))[2:]
    names = names[: names.index("--run")]
    assert names == ["bf16", "fp8", "mxfp4", "nvfp4-plain", "nvfp4", "nvfp4-46"]
    for name in names[1:]:
        report = qt.apply(build(config.model.preset, vocab_size=config.data.vocab_size), name)
        assert report.quantized_mac_share_with_head >= 0.75, name


def test_the_reference_page_is_valid() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    recipe, run = re.findall(r"^```toml\n(.*?)^```$", page, flags=re.S | re.M)
    assert qt.load_recipe(recipe).linear.fprop_input.error == "mse"
    config = load_run(run)
    assert config.phase[0].resolve().step == 100
    for table, value in vars(config).items():  # every key of every table is on the page
        for key in getattr(value, "__dataclass_fields__", {}):
            if (table, key) not in (("model", "path"), ("train", "steps")):
                assert re.search(rf"^(# .* )?{key} = ", run, flags=re.M), f"{table}.{key}"
