"""The `quatrain` command: its arguments, its exit codes, and how it says what went wrong.

Exit codes: 0 on success, 2 on a usage or input error (one clear line on stderr), 130 on Ctrl-C.

What the commands do is in `quatrain.commands`, which is slow to import (torch) and so comes last, where Ctrl-C is
already taken care of.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from quatrain import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = argparse.Namespace(traceback=False, restart=None)
    try:
        parser = _parser()
        parser.parse_args(arguments, options)
        if not hasattr(options, "run"):
            parser.print_help()
            return _fail("no command was given; the first word must be one of those above")
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            _run(options)
    except KeyboardInterrupt:
        again = "; run again without --restart to resume" if options.restart else "; the same command resumes"
        print(f"\nstopped{'' if options.restart is None else again}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `quatrain recipe show x | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush goes nowhere
        return 0
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        return _fail(_message(error))
    return 0


def _run(options: argparse.Namespace) -> None:
    ours = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGINT, _leave) if ours else None
    try:
        from quatrain import commands
    finally:
        if ours:
            signal.signal(signal.SIGINT, previous)
    getattr(commands, options.run.replace("-", "_"))(options)
    sys.stdout.flush()


def _leave(*_: object) -> None:
    """End at once: during imports there is nothing to save, and some modules swallow a KeyboardInterrupt."""
    os.write(2, b"\nstopped\n")
    os._exit(130)


def _fail(message: str) -> int:
    print(f"quatrain: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _message(error: Exception) -> str:
    """What the user can do about it; anything that was not foreseen is called an internal error."""
    text, kind = str(error), type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in text:
        return f"out of memory: {text or kind}; lower train.batch_size or data.sequence_length, or take a smaller model"
    if isinstance(error, ValueError | OSError) or kind == "NonFiniteError":
        return text
    return f"internal error: {kind}: {text[:400]}; please report it, with what `quatrain --traceback ...` shows"


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"quatrain: warning: {' '.join(str(message).split())}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say it and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _path(text: str) -> Path:
    """A path from the command line."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a path must not be empty")
    return Path(text)


def _parser() -> _Parser:
    parser = _Parser(
        prog="quatrain",
        description="Pretrain language models in 4-bit floating point.",
        epilog="examples:\n"
        "  quatrain train run.toml --recipe nvfp4\n"
        "  quatrain compare bf16 nvfp4 --run run.toml --seeds 0 1 2\n"
        "  quatrain recipe diff nvfp4-plain nvfp4\n"
        "  quatrain doctor\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quatrain {__version__}")
    parser.add_argument("--traceback", action="store_true", help="on an error, show where in the code it arose")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _train_command(commands)
    _compare_command(commands)
    _report_command(commands)
    _recipe_command(commands)
    _inspect_command(commands)
    _doctor_command(commands)
    _fit_command(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    summary: str,
    examples: str,
) -> _Parser:
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"examples:\n{lines}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=name)
    return parser


def _train_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    examples = """
    quatrain train run.toml
    quatrain train run.toml --recipe nvfp4-46 --set train.tokens=2_000_000 --out runs/long
    quatrain train run.toml --set optimizer.lr=1e-3 --restart
    """
    parser = _command(commands, "train", "train one run; the same command resumes it", examples)
    parser.add_argument("run_file", type=_path, metavar="RUN.toml", help="the run: model, data, training, schedule")
    parser.add_argument("--recipe", help="library name or path, in place of the run file's")
    parser.add_argument("--out", type=_path, help="the run's folder (default: the run file's out)")
    _run_options(parser)


def _compare_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    examples = """
    quatrain compare bf16 fp8 nvfp4 --run run.toml
    quatrain compare bf16 nvfp4 my-recipe.toml --run run.toml --seeds 0 1 2 --out runs/three-seeds
    """
    summary = "train several recipes on the same data, initialization and seeds; a table and an HTML report"
    parser = _command(commands, "compare", summary, examples)
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="library names or paths; the first is the reference"
    )
    parser.add_argument(
        "--run", dest="run_file", type=_path, required=True, metavar="RUN.toml", help="the run they share"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="seeds (default: the run file's)")
    parser.add_argument("--out", type=_path, help="folder of the runs and the report (default: the run file's out)")
    _run_options(parser)


def _run_options(parser: _Parser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the run file; may be repeated",
    )
    parser.add_argument("--restart", action="store_true", help="remove what is in the folder and train anew")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _report_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    examples = """
    quatrain report runs/demo
    quatrain report runs/bf16-seed0 runs/nvfp4-seed0 --baseline bf16 --out gaps.html
    """
    summary = "write the HTML report of run folders, finished or not"
    parser = _command(commands, "report", summary, examples)
    parser.add_argument("folders", nargs="+", type=_path, help="run folders, or folders that hold them")
    parser.add_argument("--out", type=_path, help="the page (default: report.html in the first folder)")
    parser.add_argument("--baseline", help="recipe that gaps are counted from (default: bf16 where it is there)")


def _recipe_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    examples = """
    quatrain recipe list
    quatrain recipe show nvfp4
    quatrain recipe show nvfp4 --resolved > mine.toml
    quatrain recipe diff nvfp4-plain nvfp4
    """
    parser = _command(commands, "recipe", "list, show or compare recipes", examples)
    parser.add_argument("action", choices=("list", "show", "diff"))
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="one for show, two for diff: names or paths")
    parser.add_argument("--resolved", action="store_true", help="show: as TOML, with every default filled in")


def _inspect_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    examples = """
    quatrain inspect runs/demo/nvfp4-seed0
    quatrain inspect weight.safetensors
    """
    parser = _command(
        commands, "inspect", "what is in a safetensors file, a checkpoint, a run or a comparison", examples
    )
    parser.add_argument("path", type=_path, help="a .safetensors file, or a folder")


def _doctor_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    _command(commands, "doctor", "what this machine will use, and why", "quatrain doctor")


def _fit_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    examples = """
    quatrain fit-coefficients --out mine.toml
    quatrain fit-coefficients --rows 128 512 --ratios 1 4 --split none diagonal --out mine.toml
    quatrain fit-coefficients --operands bf16 --rows 2048 --spectra momenta.safetensors --out bf16.toml
    """
    summary = (
        "fit Newton-Schulz coefficients of Root and Muon to the arithmetic that runs them; the same command resumes"
    )
    parser = _command(commands, "fit-coefficients", summary, examples)
    add = parser.add_argument
    add("--out", type=_path, default=Path("coefficients.toml"), help="the table, written after every shape")
    add("--rows", type=int, nargs="+", default=[128], metavar="M", help="smaller dimensions (default: 128)")
    add("--ratios", type=float, nargs="+", default=[1, 2, 4, 8], metavar="R", help="larger over smaller dimension")
    add("--operands", choices=("nvfp4", "bf16"), default="nvfp4", help="what the products read (default: nvfp4)")
    add("--split", nargs="+", choices=("none", "diagonal"), default=["none"], help="with or without the diagonal split")
    add("--schedule", action="store_true", help="one triple for each step in place of one for all")
    add("--steps", type=int, default=5, help="of the iteration (default: 5)")
    add("--spectra", type=_path, metavar="FILE", help="safetensors file of recorded momenta or their singular values")
    add("--matrices", type=int, default=2, help="random matrices of each kind in the loss (default: 2)")
    add("--population", type=int, default=40, help="candidates a round (default: 40)")
    add("--rounds", type=int, default=14, help="of the cross-entropy method (default: 14)")
    add("--seed", type=int, default=0, help="of matrices and candidates (default: 0)")
    add("--device", default="cpu", help="where the loss is computed (default: cpu)")
    add("--restart", action="store_true", help="fit every shape anew")
    add("--quiet", action="store_true", help="no progress on stderr")
