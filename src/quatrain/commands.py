"""What the commands do; `quatrain.cli` calls the function of the command's name.

Bad input is a ValueError or an OSError whose text says what is wrong and what to do about it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quatrain import __version__
from quatrain.files import expand, is_signed
from quatrain.nn import OPERANDS
from quatrain.recipe import describe, load_recipe, recipe_names
from quatrain.recipe import diff as differences

_TRAIN_PACKAGES = ("transformers", "tokenizers", "rich", "plotly", "pyarrow")
_UNLIMITED = 10_000  # columns of a table that goes into a file or a pipe


def _need_train_extra(command: str) -> None:
    missing = [name for name in _TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"`quatrain {command}` needs the [train] extra, and {', '.join(missing)} cannot be found; "
            "run: pip install 'quatrain[train]'"
        )


def train(options: argparse.Namespace) -> None:
    """`quatrain train`."""
    _need_train_extra("train")
    from quatrain.train import load_run
    from quatrain.train import train as train_run

    config = load_run(options.run_file, options.set, recipe=options.recipe)
    out = expand(config.out, "out")
    file, mine = expand(options.run_file, "the run file"), out / "run.toml"
    if mine.exists() and mine.samefile(file) and not is_signed(mine):
        raise ValueError(
            f"out = {config.out!r} is the folder of the run file itself, which would be overwritten; choose another out"
        )
    summary = train_run(config, progress=not options.quiet, restart=options.restart)
    print(
        f"{summary['recipe']}: validation loss {summary['val_loss']:.4f} "
        f"(from {summary['val_loss_first']:.4f}) after {summary['tokens']:,} tokens, "
        f"{summary['tokens_per_s']:,.0f} tokens/s; {out}"
    )


def compare(options: argparse.Namespace) -> None:
    """`quatrain compare`."""
    _need_train_extra("compare")
    from rich.console import Console

    from quatrain.report import write_report
    from quatrain.train import compare as compare_recipes
    from quatrain.train import load_run

    config = load_run(options.run_file, options.set)
    found = compare_recipes(
        config,
        options.recipes,
        seeds=[config.train.seed] if options.seeds is None else options.seeds,
        out=options.out or Path(config.out),
        progress=not options.quiet,
        restart=options.restart,
    )
    page = write_report(found.folders, found.out / "report.html", baseline=found.rows[0].recipe)
    Console(width=None if sys.stdout.isatty() else _UNLIMITED).print(found.table())
    print(f"report: {page}")


def report(options: argparse.Namespace) -> None:
    """`quatrain report`."""
    _need_train_extra("report")
    from quatrain.report import find_runs, summarise, write_report

    given = [expand(folder, "the folder") for folder in options.folders]
    folders = [run for folder in given for run in find_runs(folder)]
    recipes = [row["recipe"] for row in summarise(folders)]
    baseline = options.baseline or ("bf16" if "bf16" in recipes else None)
    page = given[0] / "report.html" if options.out is None else expand(options.out, "--out")
    print(f"report: {write_report(folders, page, baseline=baseline)}")


def recipe(options: argparse.Namespace) -> None:
    """`quatrain recipe list`, `show` and `diff`."""
    wanted = {"list": 0, "show": 1, "diff": 2}[options.action]
    if len(options.recipes) != wanted:
        raise ValueError(
            f"`quatrain recipe {options.action}` takes {wanted} recipe(s), received {len(options.recipes)}"
        )
    recipes = [load_recipe(name) for name in options.recipes]
    if options.action == "list":
        _list_recipes()
    elif options.action == "show":
        _show_recipe(options.recipes[0], options.resolved)
    else:
        changes = differences(*recipes)
        rows = [("", recipes[0].name, recipes[1].name), *changes]
        print(_columns(rows) if changes else "no difference")


def _list_recipes() -> None:
    rows = []
    for name in recipe_names():
        found = load_recipe(name)
        rows.append((name, found.fingerprint(), found.description))
    print(_columns(rows))


def _show_recipe(name: str, resolved: bool) -> None:
    recipe = load_recipe(name)
    if resolved:
        print(recipe.to_toml(), end="")
        return
    print(f"{recipe.name}  {recipe.fingerprint()}\n{recipe.description}\nsource: {recipe.source or '-'}\n")
    if recipe.quantizes:
        print(_columns([(n, describe(r)) for n, r in zip(OPERANDS, recipe.linear.rows, strict=True)]))
        kept = recipe.to_dict()["linear"]["keep"].items()
        print("\nkeep:  " + "  ".join(f"{k}={v}" for k, v in kept if v not in (0, 0.0, [], None)))
    for phase in recipe.phases:
        print(f"phase: from {phase.at:g} of the run, {phase.bf16} in BF16")


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def inspect(options: argparse.Namespace) -> None:
    """`quatrain inspect`."""
    path = expand(options.path, "the path")
    if path.is_dir():
        _inspect_folder(path)
    elif path.is_file():
        _inspect_file(path)
    else:
        raise FileNotFoundError(f"nothing at {path}; give a safetensors file, or the folder of a run or a checkpoint")


def _inspect_folder(path: Path) -> None:
    tensors = sorted(path.glob("*.safetensors"))
    if (path / "summary.json").is_file():
        _print_facts(_read_table(path / "summary.json"))
    elif (path / "metrics.jsonl").is_file():
        _inspect_unfinished(path)
    elif (path / "comparison.json").is_file():
        _inspect_comparison(path / "comparison.json")
    elif tensors:
        for file in tensors:
            print(f"{'' if file == tensors[0] else chr(10)}{file.name}")
            _inspect_file(file)
    else:
        raise ValueError(f"{path} holds no run, no comparison and no checkpoint; give such a folder, or a file")


def _print_facts(facts: dict[str, Any]) -> None:
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{key}: {len(value)} entries")
        elif "\n" not in str(value):
            print(f"{key}: {value}")


def _inspect_unfinished(path: Path) -> None:
    """The newest record of each kind, and the checkpoints."""
    newest: dict[str, dict[str, Any]] = {}
    for line in (path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            newest[str(record.get("kind"))] = record
    print("unfinished")
    for kind, record in newest.items():
        print(f"last {kind}: " + ", ".join(f"{key} {value}" for key, value in record.items() if key != "kind"))
    print("checkpoints: " + (", ".join(sorted(p.name for p in path.glob("checkpoints/step-*"))) or "none"))


def _inspect_comparison(path: Path) -> None:
    data = _read_table(path)
    rows = [("recipe", "seed", "validation loss", "folder")]
    try:
        for row in data["recipes"]:
            for run in row["runs"]:
                rows.append((row["recipe"], str(run["seed"]), str(run.get("val_loss", "diverged")), run["folder"]))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no comparison that quatrain wrote; run quatrain compare again") from error
    print(_columns(rows))


def _read_table(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not the JSON object that quatrain wrote; put it back from a copy")
    return data


def _inspect_file(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as handle:
            rows = [
                (name, handle.get_slice(name).get_dtype(), "x".join(map(str, handle.get_slice(name).get_shape())))
                for name in handle.keys()  # noqa: SIM118 (not a dict)
            ]
            meta = handle.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error})") from error
    for key, value in meta.items():
        print(f"{key}: {value}")
    print(_columns(rows) if rows else "no tensors")


def _version_of(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "no"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # some builds are distributed under another name
        return "yes"


def doctor(_: argparse.Namespace) -> None:
    """`quatrain doctor`."""
    import torch

    from quatrain.kernels import quantize_cpu
    from quatrain.kernels.dispatch import choose
    from quatrain.kernels.matmul import matmul_backends

    compiler = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    rows = [
        ("quatrain", __version__, ""),
        ("torch", torch.__version__, f"{torch.get_num_threads()} threads"),
        ("CUDA", torch.version.cuda or "no", "of this build of torch"),
        ("triton", _version_of("triton"), ""),
        ("C++ compiler", "yes" if compiler else "no", compiler or "none of g++, clang++, c++ on the PATH"),
    ]
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        if device.type == "cuda":
            capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
            rows.append((str(device), f"capability {capability}", torch.cuda.get_device_name(device)))
        choice = choose(device, "auto", quantize_cpu.obstacle)
        rows += [(f"quantize on {device}", choice.backend, choice.reason), *matmul_backends(device)]
    missing = [name for name in _TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    rows.append(("[train] extra", "no" if missing else "yes", f"missing: {', '.join(missing)}" if missing else ""))
    print(_columns(rows))
