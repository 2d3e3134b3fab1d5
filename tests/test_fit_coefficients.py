"""Coefficient sets: the range check that every FP4 set passes, the table, the fitting program and its command."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quatrain import cli, commands
from quatrain.optim import fitting
from quatrain.optim.coefficients import (
    FP4_SETS,
    check_range,
    coefficients_for,
    format_entry,
    parse_table,
    shipped_entries,
    steps_of,
)
from quatrain.optim.fitting import Fit, fit, load_spectra, marchenko_pastur
from quatrain.optim.root import Root

JORDAN = (3.4445, -4.7750, 2.0315)
TINY = Fit(rows=24, population=16, rounds=3, matrices=1)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


# The range check and the table.


def test_range_check() -> None:
    assert not check_range([JORDAN] * 5).passes
    assert not check_range([(2.0, -1.5, math.nan)]).passes
    dip = check_range([(3.0, -8.0, 5.0), (2.0, -1.5, 0.5)])  # fine at 0 and 1, negative between
    assert not dip.passes and dip.smallest < -0.1 and dip.largest < 1.25
    damped = check_range([(2.0, -1.5, 0.5)] * 5)
    assert damped.passes and 1.0 < damped.largest < 1.03  # 1.0036 exactly at 1.08, then smaller


def test_every_set_that_fp4_may_use_passes() -> None:
    entries = shipped_entries()
    assert set(FP4_SETS) <= set(entries)
    for name in FP4_SETS:
        for entry in entries[name]:
            if entry.operands == "nvfp4":
                for steps in (1, 3, 5, 8, 15):
                    assert check_range(steps_of(entry.coefficients, steps, name)).passes, (name, entry, steps)
    for name in ("jordan", "root", "polar-express"):
        for entry in entries[name]:
            assert entry.operands == "bf16" and not check_range(steps_of(entry.coefficients, 5)).passes


def test_the_table_covers_the_shapes_and_takes_the_nearest() -> None:
    fitted = shipped_entries()["fitted"]
    for split in ("none", "diagonal"):
        assert {1.0, 2.0, 4.0, 8.0} <= {e.ratio for e in fitted if e.operands == "nvfp4" and e.split == split}
    assert any(e.operands == "bf16" for e in fitted)
    wide = {"steps": 5, "operands": "nvfp4", "split": None}
    for entry in fitted:
        if (entry.operands, entry.split) == ("nvfp4", "none"):
            columns = round(entry.rows * entry.ratio)
            assert coefficients_for("fitted", entry.rows, columns, **wide) == entry.coefficients * 5
            assert coefficients_for("fitted", columns, entry.rows, **wide) == entry.coefficients * 5  # either way round
    root = coefficients_for("root", 2048, 8192, steps=5, operands="bf16", split=None)
    assert root == ((2.9794, -3.6674, 1.6207),) * 5
    head, tail = (3.131, -3.588, 1.261), (2.0, -1.5, 0.5)
    for rows, split, heads in ((64, None, 1), (128, None, 2), (1024, None, 3), (32, "diagonal", 3)):
        found = coefficients_for("hybrid", rows, rows, steps=5, operands="nvfp4", split=split)
        assert found == (head,) * heads + (tail,) * (5 - heads)
    longer = coefficients_for("hybrid", 1024, 1024, steps=7, operands="nvfp4", split=None)
    assert longer == (head,) * 5 + (tail,) * 2
    assert len(coefficients_for("polar-express", 64, 64, steps=3, operands="bf16", split=None)) == 3


def test_bf16_sets_lift_without_leaving_the_range() -> None:
    """Exact arithmetic, no inflation; two published sets go further than the others."""
    bounds = {"polar-express": 2.0, "root": 3.4}
    grid = torch.linspace(1e-4, 1, 20_001, dtype=torch.float64)
    for name, entries in shipped_entries().items():
        for entry in entries:
            x = grid
            for a, b, c in steps_of(entry.coefficients, 5, name):
                x = a * x + b * x**3 + c * x**5
                assert float(x.min()) > 0 and float(x.max()) < bounds.get(name, 1.3), (name, entry)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[fited]]\nrows = 1", "did you mean fitted"),
        ("[[fitted]]\nrow = 1", "did you mean rows"),
        ("[[fitted]]\nrows = 0\nratio = 1", "at least 1"),
        ('[[fitted]]\nrows = 8\nratio = 1\noperands = "fp8"\nsplit = "none"', 'operands is "bf16" or "nvfp4"'),
        ('[[fitted]]\nrows = 8\nratio = 1\noperands = "bf16"\nsplit = "none"\ncoefficients = [[1, 2]]', "triples"),
        ("[[fitted", "not valid TOML"),
    ],
)
def test_bad_tables(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_table(text, "mine.toml")


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    def named(coefficients: Any, operands: str) -> Any:
        path = tmp_path / f"{operands}{coefficients[0]}.toml"
        keys = f'rows = 64\nratio = 1\noperands = "{operands}"\nsplit = "none"\ncoefficients = [{coefficients}]'
        entry = parse_table(f"[[fitted]]\n{keys}", "")["fitted"][0]
        path.write_text(format_entry("fitted", entry, loss=0.1, largest=1.1))
        return Root([("layer.weight", nn.Parameter(torch.zeros(64, 64)))], operands=operands, coefficients=str(path))

    assert named([2.5, -2.3, 0.75], "nvfp4").routing()["layer.weight"].method.startswith("orthogonal, nvfp4")
    named(list(JORDAN), "bf16")
    with pytest.raises(ValueError, match="must keep"):
        named(list(JORDAN), "nvfp4")


# The fitting program.


def test_a_fit_is_reproducible_and_better_than_its_start() -> None:
    calls: list[tuple[int, float]] = []
    found = fit(TINY, progress=lambda done, loss: calls.append((done, loss)))
    assert found == fit(TINY)
    assert found != fit(Fit(rows=24, population=16, rounds=3, matrices=1, seed=1))
    assert found.range.passes and len(found.entry.coefficients) == 1
    assert [done for done, _ in calls] == list(range(1, 49)) and calls[-1][1] < calls[0][1]
    start = fitting._loss(TINY, (), torch.Generator().manual_seed(7))
    assert start(found.entry.coefficients * 5) < start(((2.6, -2.35, 0.75),) * 5)


def test_a_schedule_with_the_split() -> None:
    found = fit(Fit(rows=24, population=12, rounds=3, matrices=1, split="diagonal", schedule=True))
    assert len(found.entry.coefficients) == 5 and found.range.passes and found.loss < 0.1


def test_a_fit_for_exact_arithmetic() -> None:
    task = Fit(rows=64, ratio=4, operands="bf16", population=24, rounds=8)
    found = fit(task)
    loss = fitting._loss(task, (), torch.Generator().manual_seed(3))
    assert loss(found.entry.coefficients * 5) < 0.7 * loss((JORDAN,) * 5)


def test_the_fitter_refuses_what_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (torch.tensor([triple], dtype=torch.float64) for triple in ((2.5, -2.3, 0.75), JORDAN))
    loss = fitting._loss(TINY, (), torch.Generator().manual_seed(0))
    assert fitting._verdict(TINY, [bad, good], loss).entry.coefficients == ((2.5, -2.3, 0.75),)
    with pytest.raises(ValueError, match="no candidate kept"):
        fitting._verdict(TINY, [bad], loss)
    monkeypatch.setattr(fitting, "_CENTRE", {"nvfp4": (9.0, 9.0, 9.0)})
    monkeypatch.setattr(fitting, "_DRAWS", 5)
    with pytest.raises(ValueError, match="pass the range check"):
        fit(TINY)


@pytest.mark.parametrize("ratio", [1.0, 2.0, 8.0])
def test_marchenko_pastur_is_the_spectrum_of_gaussian_matrices(ratio: float) -> None:
    wanted = torch.linalg.svdvals(torch.randn(300, round(300 * ratio), dtype=torch.float64))
    found = marchenko_pastur(300, ratio)
    assert torch.allclose(found, wanted / wanted.norm(), atol=0.03 * float(found.max()))
    assert abs(float(found.norm()) - 1) < 0.01


def test_recorded_spectra_count(tmp_path: Path) -> None:
    path = tmp_path / "spectra.safetensors"
    save_file({"values": torch.logspace(0, -4, 50), "matrix": torch.randn(40, 4, 8)}, path)
    spectra = load_spectra(path)
    assert sorted(len(s) for s in spectra) == [32, 50]
    task = Fit(rows=24, operands="bf16", matrices=1)
    with_them = fitting._spectra(task, spectra)
    assert len(with_them) == 4 and all(len(s) == 24 for s in with_them)
    assert with_them[2].max() == spectra[0].max() and with_them[2].min() == spectra[0].min()
    assert fit(TINY, spectra).entry != fit(TINY).entry
    for tensors, message in (
        ({"a": torch.zeros(4)}, "one of them positive"),
        ({"a": torch.tensor([1.0, math.nan])}, "finite"),
        ({"a": torch.ones(3, dtype=torch.int32)}, "finite singular values"),
    ):
        save_file(tensors, path)
        with pytest.raises(ValueError, match=message):
            load_spectra(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_spectra(path)


# The command.

SMALL = ("--rows", "16", "--population", "10", "--rounds", "2", "--matrices", "1")


def test_command_writes_resumes_and_stops(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine.toml"
    arguments = ("fit-coefficients", *SMALL, "--ratios", "1", "2", "--out", str(out))
    fits = fitting.fit

    def interrupted(task: Fit, *rest: Any) -> Any:
        if task.ratio == 2:
            raise KeyboardInterrupt
        return fits(task, *rest)

    monkeypatch.setattr(fitting, "fit", interrupted)
    code, _, err = call(capsys, *arguments)
    assert code == 130 and "the same command resumes" in err and "1/2  m 16, n/m 1, split none  loss" in err
    first = out.read_text()
    assert len(parse_table(first, "")["fitted"]) == 1 and first.startswith(
        "# quatrain fit-coefficients --operands nvfp4"
    )
    monkeypatch.setattr(fitting, "fit", fits)
    code, text, err = call(capsys, *arguments)
    assert code == 0 and "2 entries, 1 of them new" in text and "1/1  m 16, n/m 2" in err
    whole = out.read_text()
    assert whole.startswith(first) and [e.ratio for e in parse_table(whole, "")["fitted"]] == [1.0, 2.0]
    code, text, err = call(capsys, *arguments, "--quiet", "--restart")
    assert code == 0 and err == "" and out.read_text() == whole  # the same seed gives the same table
    code, _, err = call(capsys, *arguments, "--seed", "1")
    assert code == 2 and "was not written with these settings" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "8"), "rows is at least 16"),
        (("--ratios", "0.5"), "ratio is at least 1"),
        (("--spectra", "missing.safetensors"), "no spectra at"),
        (("--operands", "fp8"), "invalid choice"),
        (("--population", "3"), "population is at least 10"),
        (("--device", "cuda:99"), "torch sees"),
        (("--device", "gpu"), '--device must be "cpu", "cuda" or "cuda:N", received \'gpu\''),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = call(capsys, "fit-coefficients", "--out", str(tmp_path / "t.toml"), *arguments)
    assert code == 2 and out == "" and message in err and len(err.strip().splitlines()) == 1


def test_help_and_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(capsys, "fit-coefficients", "--help")
    assert code == 0 and "examples:" in out and "quatrain fit-coefficients --out mine.toml" in out
    seconds = iter([0.0, 1.0, 11.0, 12.0])
    monkeypatch.setattr(commands.time, "monotonic", lambda: next(seconds))
    progress = commands._FitProgress(100, quiet=False)
    progress.begin("1/1  m 16")
    progress.update(5, 0.3)  # too soon to say anything
    progress.update(55, 0.25)
    assert capsys.readouterr().err == "1/1  m 16  candidate 55  loss 0.2500  5.0/s  0:09 left\n"
