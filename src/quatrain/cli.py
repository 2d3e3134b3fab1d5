"""The `quatrain` command.

Exit codes: 0 on success, 2 on a usage or input error (one clear line on stderr), 130 on Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import quatrain
from quatrain.nn import OPERANDS
from quatrain.recipe import describe, diff, load_recipe, recipe_names

_TRAIN_PACKAGES = ("transformers", "tokenizers", "rich", "plotly", "pyarrow")


class UsageError(ValueError):
    """A request that cannot be carried out; becomes one line on stderr and exit code 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    try:
        options.run(options)
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `quatrain recipe show x | head`
        sys.stderr.close()
        return 0
    except (ValueError, OSError, quatrain.NonFiniteError) as error:
        print(f"quatrain: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quatrain",
        description="Pretrain language models in 4-bit floating point.",
        epilog="examples:\n"
        "  quatrain train run.toml --recipe nvfp4\n"
        "  quatrain compare bf16 nvfp4 --run run.toml --seeds 0 1 2\n"
        "  quatrain recipe diff nvfp4-plain nvfp4\n"
        "  quatrain doctor\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quatrain {quatrain.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _train_command(commands)
    _compare_command(commands)
    _report_command(commands)
    _recipe_command(commands)
    _inspect_command(commands)
    _doctor_command(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], None],
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"examples:\n{lines}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _train_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    examples = """
    quatrain train run.toml
    quatrain train run.toml --recipe nvfp4-46 --set train.tokens=2_000_000 --set out=runs/long
    quatrain train run.toml --set optimizer.lr=1e-3 --restart
    """
    parser = _command(commands, "train", _train, "train one run; the same command resumes it", examples)
    parser.add_argument("run_file", metavar="RUN.toml", help="the run: model, data, training, schedule")
    parser.add_argument("--recipe", help="library name or path, in place of the run file's")
    _run_options(parser)


def _compare_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    examples = """
    quatrain compare bf16 fp8 nvfp4 --run run.toml
    quatrain compare bf16 nvfp4 my-recipe.toml --run run.toml --seeds 0 1 2 --out runs/three-seeds
    """
    summary = "train several recipes on the same data, initialization and seeds; a table and an HTML report"
    parser = _command(commands, "compare", _compare, summary, examples)
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="library names or paths; the first is the reference"
    )
    parser.add_argument("--run", dest="run_file", required=True, metavar="RUN.toml", help="the run they share")
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="seeds (default: the run file's)")
    parser.add_argument("--out", type=Path, help="folder of the runs and the report (default: the run file's out)")
    _run_options(parser)


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the run file; may be repeated",
    )
    parser.add_argument("--restart", action="store_true", help="remove what is in the folder and train anew")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _report_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    examples = """
    quatrain report runs/demo
    quatrain report runs/bf16-seed0 runs/nvfp4-seed0 --baseline bf16 --out gaps.html
    """
    summary = "write the HTML report of run folders, finished or not"
    parser = _command(commands, "report", _report, summary, examples)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that hold them")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the first folder)")
    parser.add_argument("--baseline", help="recipe that gaps are counted from (default: bf16 where it is there)")


def _recipe_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    examples = """
    quatrain recipe list
    quatrain recipe show nvfp4
    quatrain recipe diff nvfp4-plain nvfp4
    """
    parser = _command(commands, "recipe", _recipe, "list, show or compare recipes", examples)
    parser.add_argument("action", choices=("list", "show", "diff"))
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="one for show, two for diff: names or paths")
    parser.add_argument("--resolved", action="store_true", help="show: with every default filled in")


def _inspect_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    examples = """
    quatrain inspect runs/demo/nvfp4-seed0
    quatrain inspect weight.safetensors
    """
    parser = _command(commands, "inspect", _inspect, "what is in a safetensors file or a run folder", examples)
    parser.add_argument("path", type=Path)


def _doctor_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _command(commands, "doctor", _doctor, "what this machine will use, and why", "quatrain doctor")


# ---- what the commands do ------------------------------------------------------------------------------------------


def _need_train_extra(command: str) -> None:
    missing = [name for name in _TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"`quatrain {command}` needs the [train] extra, and {', '.join(missing)} cannot be found; "
            "run: pip install 'quatrain[train]'"
        )


def _train(options: argparse.Namespace) -> None:
    _need_train_extra("train")
    from quatrain.train import load_run, train

    config = load_run(options.run_file, options.set, recipe=options.recipe)
    summary = train(config, progress=not options.quiet, restart=options.restart)
    print(
        f"{summary['recipe']}: validation loss {summary['val_loss']:.4f} "
        f"(from {summary['val_loss_first']:.4f}) after {summary['tokens']:,} tokens, "
        f"{summary['tokens_per_s']:,.0f} tokens/s; {config.out}"
    )


def _compare(options: argparse.Namespace) -> None:
    _need_train_extra("compare")
    from quatrain.report import write_report
    from quatrain.train import compare, load_run

    config = load_run(options.run_file, options.set)
    out = options.out or Path(config.out)
    seeds = options.seeds if options.seeds is not None else [config.train.seed]
    found = compare(config, options.recipes, seeds=seeds, out=out, progress=not options.quiet, restart=options.restart)
    page = write_report(found.folders, out / "report.html", baseline=found.rows[0].recipe)
    print(f"report: {page}")


def _report(options: argparse.Namespace) -> None:
    _need_train_extra("report")
    from quatrain.report import find_runs, summarise, write_report

    folders = [run for folder in options.folders for run in find_runs(folder)]
    if not folders:
        raise UsageError(f"no run folder in {', '.join(map(str, options.folders))}; give a folder with metrics.jsonl")
    recipes = [row["recipe"] for row in summarise(folders)]
    baseline = options.baseline or ("bf16" if "bf16" in recipes else None)
    page = write_report(folders, options.out or options.folders[0] / "report.html", baseline=baseline)
    print(f"report: {page}")


def _recipe(options: argparse.Namespace) -> None:
    wanted = {"list": 0, "show": 1, "diff": 2}[options.action]
    if len(options.recipes) != wanted:
        raise UsageError(
            f"`quatrain recipe {options.action}` takes {wanted} recipe(s), received {len(options.recipes)}"
        )
    recipes = [load_recipe(name) for name in options.recipes]
    if options.action == "list":
        _list_recipes()
    elif options.action == "show":
        _show_recipe(options.recipes[0], options.resolved)
    else:
        changes = diff(*recipes)
        rows = [("", recipes[0].name, recipes[1].name), *changes]
        print(_columns(rows) if changes else "no difference")


def _list_recipes() -> None:
    rows = []
    for name in recipe_names():
        recipe = load_recipe(name)
        rows.append((name, recipe.fingerprint(), recipe.description))
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


def _inspect(options: argparse.Namespace) -> None:
    path: Path = options.path
    if path.is_dir():
        _inspect_folder(path)
    elif path.suffix == ".safetensors" or path.is_file():
        _inspect_file(path)
    else:
        raise FileNotFoundError(f"nothing at {path}; give a safetensors file or a run folder")


def _inspect_folder(path: Path) -> None:
    summary = path / "summary.json"
    if not summary.is_file():
        raise UsageError(f"{path} holds no summary.json; give the folder of a finished run, or a safetensors file")
    data = json.loads(summary.read_text())
    for key, value in data.items():
        if isinstance(value, dict):
            print(f"{key}: {len(value)} entries")
        elif "\n" not in str(value):
            print(f"{key}: {value}")


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
        raise UsageError(f"{path} is not a whole safetensors file ({error})") from error
    for key, value in meta.items():
        print(f"{key}: {value}")
    print(_columns(rows) if rows else "no tensors")


def _doctor(_: argparse.Namespace) -> None:
    import torch

    from quatrain.kernels import quantize_cpu
    from quatrain.kernels.dispatch import choose

    rows = [("quatrain", quatrain.__version__, ""), ("torch", torch.__version__, f"{torch.get_num_threads()} threads")]
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        choice = choose(device, "auto", quantize_cpu.obstacle)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
        rows.append((f"quantize on {device}", choice.backend, f"{name}: {choice.reason}"))
    rows.append(
        ("matmul", "emulated", "decoded operands, fp32 accumulation; equals FP4 cores up to accumulation order")
    )
    missing = [name for name in _TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    rows.append(("[train] extra", "no" if missing else "yes", f"missing: {', '.join(missing)}" if missing else ""))
    print(_columns(rows))


if __name__ == "__main__":
    warnings.simplefilter("default")
    raise SystemExit(main())
