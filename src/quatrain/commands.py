"""What the commands do; `quatrain.cli` calls the function of the command's name.

Bad input is a ValueError or an OSError whose text says what is wrong and what to do about it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quatrain import __version__
from quatrain.files import expand, is_signed, replace_file
from quatrain.nn import ATTENTION_OPERANDS, OPERANDS, describe_split
from quatrain.recipe import describe, load_recipe, optimizer_words, recipe_names
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
    config = config if options.out is None else dataclasses.replace(config, out=str(options.out))
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
    from quatrain.report import find_runs, read_runs, summarise, write_report

    given = [expand(folder, "the folder") for folder in options.folders]
    folders = [run for folder in given for run in find_runs(folder)]
    for run in read_runs(folders):
        for note in run.notes:
            print(f"quatrain: {run.folder}: {note}", file=sys.stderr)
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
        same = len({recipe.fingerprint() for recipe in recipes}) == 1
        print(_columns(rows) if changes else "no difference" + ("" if same else " in effect; one writes out a default"))


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
        if recipe.linear.split is not None:
            print(f"split: {describe_split(recipe.linear.split)}")
        kept = recipe.to_dict()["linear"]["keep"].items()
        print("\nkeep:  " + "  ".join(f"{k}={v}" for k, v in kept if v not in (0, 0.0, [], None)))
    if recipe.attention.quantizes:
        rows = zip(ATTENTION_OPERANDS, recipe.attention.rows, strict=True)
        print(_columns([(n, describe(r)) for n, r in rows]))
        print(f"attention: smooth={recipe.attention.smooth}  views={recipe.attention.views}")
    if recipe.optimizer.to_dict():
        print(f"optimizer: {optimizer_words(recipe.optimizer)}")
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
    from quatrain.kernels.attention import attention_choice
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
        choice = attention_choice(device)
        rows.append((f"attention on {device}", choice.backend, choice.reason))
    missing = [name for name in _TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    rows.append(("[train] extra", "no" if missing else "yes", f"missing: {', '.join(missing)}" if missing else ""))
    print(_columns(rows))


def fit_coefficients(options: argparse.Namespace) -> None:
    """`quatrain fit-coefficients`."""
    from quatrain.optim.coefficients import format_entry, parse_table
    from quatrain.optim.fitting import Fit, fit, load_spectra

    _check_device(options.device)
    out = expand(options.out, "--out")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"--out must name a file in a folder that is there, received {out}; make {out.parent}")
    spectra = load_spectra(expand(options.spectra, "--spectra")) if options.spectra else []
    shared = {key: getattr(options, key) for key in _FIT_OPTIONS}
    shapes = [(rows, ratio, split) for split in options.split for rows in options.rows for ratio in options.ratios]
    tasks = [
        Fit(rows=rows, ratio=ratio, split=None if split == "none" else split, **shared)
        for rows, ratio, split in dict.fromkeys(shapes)
    ]
    text = _table_so_far(out, _fit_command(options), options.restart)
    done = {(e.rows, e.ratio, e.split) for e in parse_table(text, str(out)).get("fitted", ())}
    tasks = [task for task in tasks if (task.rows, float(task.ratio), task.split or "none") not in done]
    display = _FitProgress(sum(task.evaluations for task in tasks), options.quiet)
    for number, task in enumerate(tasks):
        display.begin(f"{number + 1}/{len(tasks)}  m {task.rows}, n/m {task.ratio:g}, split {task.split or 'none'}")
        found = fit(task, spectra, display.update)
        display.end(task.evaluations, found.loss)
        text += "\n" + format_entry("fitted", found.entry, loss=found.loss, largest=found.range.largest)
        replace_file(out, text)
    print(f"{len(done) + len(tasks)} entries, {len(tasks)} of them new; {out}")


def _check_device(name: str) -> None:
    import torch

    if re.fullmatch("cpu|cuda(:[0-9]{1,3})?", name) is None:
        raise ValueError(f'--device must be "cpu", "cuda" or "cuda:N", received {name!r}')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and int(name.partition(":")[2] or 0) >= count:
        raise ValueError(f"--device {name}, but torch sees {count} CUDA devices; leave it out for the CPU")


_FIT_OPTIONS = ("operands", "steps", "schedule", "population", "rounds", "matrices", "seed", "device")


def _fit_command(options: argparse.Namespace) -> str:
    """The line that heads a table: what must be equal for entries to be comparable."""
    switches = [f"--{key} {getattr(options, key)}" for key in _FIT_OPTIONS if key not in ("schedule", "device")]
    if options.schedule:
        switches.append("--schedule")
    if options.spectra:
        switches.append(f"--spectra {options.spectra.name}")
    return f"# quatrain fit-coefficients {' '.join(switches)}\n"


def _table_so_far(out: Path, command: str, restart: bool) -> str:
    """What to append to: the table at `out` if the same settings wrote it, else its first lines."""
    if restart or not out.exists():
        return f"{command}# quatrain {__version__}, torch {_version_of('torch')}\n"
    text = out.read_text(encoding="utf-8")
    if not text.startswith(command):
        raise ValueError(
            f"{out} was not written with these settings ({command[2:].strip()}); choose another --out, or --restart"
        )
    return text


class _FitProgress:
    """Rate and time left: one line that is written over on a terminal, else a line every ten seconds."""

    def __init__(self, total: int, quiet: bool) -> None:
        self._total, self._quiet = total, quiet
        self._terminal = sys.stderr.isatty()
        self._start = self._shown = time.monotonic()
        self._before, self._title = 0, ""

    def begin(self, title: str) -> None:
        """A shape begins."""
        self._title = title

    def update(self, done: int, loss: float) -> None:
        """So many candidates of the shape, and the best loss among them."""
        now = time.monotonic()
        if self._quiet or now - self._shown < (0.2 if self._terminal else 10.0):
            return
        self._shown = now
        everything = self._before + done
        rate = everything / (now - self._start)
        minutes, seconds = divmod(round((self._total - everything) / rate), 60)
        line = f"{self._title}  candidate {done}  loss {loss:.4f}  {rate:.1f}/s  {minutes}:{seconds:02d} left"
        print(
            f"\r{line}\x1b[K" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def end(self, evaluations: int, loss: float) -> None:
        """A shape is fitted."""
        self._before += evaluations
        if not self._quiet:
            head = "\r\x1b[K" if self._terminal else ""
            print(f"{head}{self._title}  loss {loss:.4f}", file=sys.stderr)
