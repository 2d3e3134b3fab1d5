import io
import json
import math
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from quatrain.nn import NonFiniteError
from quatrain.report import write_report
from quatrain.train import compare, train
from quatrain.train import comparison as compare_module
from quatrain.train.comparison import Comparison, Gap, Row, paired_gap
from quatrain.train.config import replace_in
from tiny_run import QUANTIZED, history, make_run


def test_paired_gap():
    gap = paired_gap([1.1, 2.04, 3.0], [1.0, 2.0, 3.0])
    assert gap.percent == pytest.approx((10.0, 2.0, 0.0))
    assert gap.mean == pytest.approx(4.0)
    assert gap.half_width == pytest.approx(4.3026527 * math.sqrt(28.0) / math.sqrt(3.0))
    assert gap.resolved is False
    assert paired_gap([1.10, 2.22, 3.30], [1.0, 2.0, 3.0]).resolved is True
    one = paired_gap([3.03], [3.0])
    assert (one.half_width, one.resolved) == (None, None) and one.mean == pytest.approx(1.0)
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_gap([1.0], [1.0, 2.0])


@pytest.fixture
def run(tmp_path):
    config = make_run(tmp_path, "train.steps=2", "checkpoint.every=0", "validation.every=0")
    (tmp_path / "plain.toml").write_text(
        QUANTIZED.replace('"tiny"', '"plain"').replace(', rounding = "stochastic"', "")
    )
    return config


def test_compare(run, tmp_path, capsys):
    recipes = ["bf16", str(tmp_path / "tiny.toml"), str(tmp_path / "plain.toml")]
    found = compare(run, recipes, seeds=[3, 5], out=tmp_path / "all")
    folders = [f"{name}-seed{seed}" for name in ("bf16", "tiny", "plain") for seed in (3, 5)]
    assert [path.name for path in found.folders] == folders
    assert all((tmp_path / "all" / folder / "summary.json").is_file() for folder in folders)

    written = json.loads((tmp_path / "all" / "comparison.json").read_text())
    assert written == json.loads(json.dumps(found.to_json()))
    assert (written["reference"], written["seeds"], written["tokens"]) == ("bf16", [3, 5], 64)
    first, second, third = written["recipes"]
    assert first["gap"] is None and [r["folder"] for r in second["runs"]] == ["tiny-seed3", "tiny-seed5"]
    losses = [[r["val_loss"] for r in recipe["runs"]] for recipe in (first, second)]
    percent = [100 * (b / a - 1) for a, b in zip(*losses, strict=True)]
    assert second["gap"]["percent"] == pytest.approx(percent)
    assert second["gap"]["mean"] == pytest.approx(sum(percent) / 2)
    assert second["gap"]["half_width"] == pytest.approx(12.7062047 * abs(percent[0] - percent[1]) / 2, rel=1e-6)
    assert second["gap"]["resolved"] == (abs(sum(percent) / 2) > second["gap"]["half_width"])
    assert {"fingerprint", "tokens_per_s", "quantized_mac_share", "saved_bytes_per_element"} <= set(third["runs"][0])

    assert capsys.readouterr().out == ""
    assert all(word in text_of(found) for word in ("bf16", "tiny", "plain", "64 tokens", "2 seeds"))


def test_runs_are_paired(run, tmp_path):
    compare(run, ["bf16", str(tmp_path / "tiny.toml")], seeds=[3, 5], out=tmp_path / "all", progress=False)
    first = {name: history(tmp_path / "all" / name)[0] for name in ("bf16-seed3", "bf16-seed5", "tiny-seed3")}
    assert first["bf16-seed3"]["val_loss"] == pytest.approx(first["tiny-seed3"]["val_loss_bf16"], rel=1e-5)
    assert first["bf16-seed3"]["val_loss"] != pytest.approx(first["bf16-seed5"]["val_loss"], rel=1e-5)


def test_compare_resumes(run, tmp_path):
    found = compare(run, ["bf16"], seeds=[1], out=tmp_path / "all", progress=False)
    stamp = (found.folders[0] / "summary.json").stat().st_mtime_ns
    again = compare(run, ["bf16", str(tmp_path / "tiny.toml")], seeds=[1, 2], out=tmp_path / "all", progress=False)
    assert (found.folders[0] / "summary.json").stat().st_mtime_ns == stamp
    assert again.rows[0].runs[0] == found.rows[0].runs[0]
    compare(run, ["bf16"], seeds=[1], out=tmp_path / "all", progress=False, restart=True)
    assert (found.folders[0] / "summary.json").stat().st_mtime_ns != stamp
    shutil.rmtree(found.folders[0])
    third = compare(run, ["bf16"], seeds=[1], out=tmp_path / "all", progress=False)
    assert third.rows[0].runs[0]["val_loss"] == found.rows[0].runs[0]["val_loss"]


@pytest.mark.parametrize(
    ("recipes", "seeds", "words"),
    [
        ([], [1], "needs recipes, got none"),
        (["bf16"], [], "needs seeds, got none"),
        (["bf16", "bf16"], [1], "recipes must be named once"),
        (["bf16"], [1, 1], "seeds must be named once"),
    ],
)
def test_faults(run, tmp_path, recipes, seeds, words):
    with pytest.raises(ValueError, match=words):
        compare(run, recipes, seeds=seeds, out=tmp_path / "all", progress=False)
    assert not (tmp_path / "all").exists()


def test_an_unknown_recipe_is_refused_before_the_first_run(run, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match="no-such-recipe"):
        compare(run, ["bf16", "no-such-recipe"], seeds=[1], out=tmp_path / "all", progress=False)
    assert not (tmp_path / "all").exists()


def text_of(comparison: Comparison) -> str:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(comparison.table())
    console.file.close()
    return console.export_text()


def rows_of(tmp_path, *gaps: Gap | None) -> Comparison:
    figures = {
        "val_loss": 3.5, "val_loss_bf16": 3.4, "tokens_per_s": 1234.5, "saved_bytes_per_element": 0.61,
        "quantized_mac_share": 0.85,
    }  # fmt: skip
    rows = tuple(Row(f"r{i}", (), (figures,), gap) for i, gap in enumerate(gaps))
    return Comparison(tmp_path, (1, 2) if gaps[-1] and gaps[-1].half_width else (1,), 1000, rows)


def test_table(tmp_path):
    text = text_of(rows_of(tmp_path, None, Gap((1.0, 2.0), 1.5, 0.2), Gap((0.1, -0.1), 0.05, 0.3)))
    assert "gap: to r0" in text and "+1.50 ± 0.20" in text and "~+0.05 ± 0.30" in text
    assert "not resolved at 1,000 tokens" in " ".join(text.split())
    for figure in ("3.5000", "3.4000", "1,234", "0.61", "85%"):
        assert figure in text
    assert "not resolved" not in text_of(rows_of(tmp_path, None, Gap((1.0, 2.0), 1.5, 0.2)))


def test_a_recipe_that_diverges_does_not_end_the_comparison(run, tmp_path, monkeypatch):
    real = compare_module.train

    def train(config, **options):
        if config.recipe.endswith("tiny.toml") and config.train.seed == 5:
            raise NonFiniteError("step 2: the loss is nan")
        return real(config, **options)

    monkeypatch.setattr(compare_module, "train", train)
    recipes = ["bf16", str(tmp_path / "tiny.toml"), str(tmp_path / "plain.toml")]
    found = compare(run, recipes, seeds=[3, 5], out=tmp_path / "all", progress=False)
    _, tiny, plain = found.rows
    assert tiny.diverged == (5,) and tiny.gap is None and plain.gap is not None
    assert found.to_json()["recipes"][1]["runs"][1] == {
        "folder": "tiny-seed5", "seed": 5, "error": "step 2: the loss is nan",
    }  # fmt: skip
    assert "Diverged: tiny, seed 5." in " ".join(text_of(found).split())


def test_table_of_one_seed(tmp_path):
    text = text_of(rows_of(tmp_path, None, Gap((1.0,), 1.0, None)))
    assert "+1.00" in text and "One seed" in " ".join(text.split())


def test_the_table_fits_80_columns_and_takes_names_as_they_are(tmp_path):
    figures = {
        "seed": 1, "val_loss": 13.5, "val_loss_bf16": 13.4, "tokens_per_s": 1234567.5, "saved_bytes_per_element": 0.61,
        "quantized_mac_share": 0.85,
    }  # fmt: skip
    long = "a-recipe-with-a-rather-long-name-of-49-characters"
    rows = (
        Row("a[/b]", (), (figures,), None),
        Row(long, (), (figures,), Gap((1.0, 2.0), -11.5, 10.25)),
        Row("lost", (), ({"seed": 1, "error": "x"}, {"seed": 12, "error": "x"}), None),
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Comparison(tmp_path, (1, 12), 1000, rows).table())
    text = console.export_text()
    for figure in ("13.5000", "13.4000", "1,234,568", "-11.50 ± 10.25", "85%", "a[/b]", "diverged"):
        assert figure in text
    assert "Diverged: lost, seed 1, 12." in " ".join(text.split())
    cells = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│"))
    assert long in cells


def test_a_diverged_run_is_not_trained_again(run, tmp_path, monkeypatch):
    hot = replace_in(run, optimizer__lr=1e38, schedule__warmup=0)
    recipes = ["bf16", str(tmp_path / "tiny.toml")]
    found = compare(hot, recipes, seeds=[3], out=tmp_path / "all", progress=False)
    assert [row.diverged for row in found.rows] == [(3,), (3,)]
    page = write_report(found.folders, tmp_path / "report.html").read_text()
    assert "diverged, step 1: " in page and ">diverged</span>" in page and "1 of 2 runs unfinished" not in page

    real, calls = compare_module.train, []
    monkeypatch.setattr(compare_module, "train", lambda run, **more: (calls.append(run), real(run, **more))[1])
    again = compare(hot, recipes, seeds=[3], out=tmp_path / "all", progress=False)
    assert calls == [] and again.to_json() == found.to_json()
    compare(hot, recipes, seeds=[3], out=tmp_path / "all", progress=False, restart=True)
    assert len(calls) == 2


def test_recipes_are_read_once(run, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text((tmp_path / "tiny.toml").read_text())
    real = compare_module.train

    def train(config, **more):
        path.write_text("name = 'other'")
        return real(config, **more)

    monkeypatch.setattr(compare_module, "train", train)
    found = compare(run, ["bf16", str(path)], seeds=[1, 2], out=tmp_path / "all", progress=False)
    assert {summary["recipe"] for summary in found.rows[1].runs} == {"tiny"}
    assert all("fprop.input" in summary["recipe_toml"] for summary in found.rows[1].runs)


LATE = '\n[[phase]]\nat = 1.0\nbf16 = "both"\n'
KEEP = '\n[linear.keep]\nnames = ["no.such.*"]\n'


@pytest.mark.parametrize(("more", "words"), [(LATE, "fraction of the run in"), (KEEP, "matches no linear")])
def test_a_recipe_that_does_not_fit_is_refused_before_the_first_run(run, tmp_path, more, words):
    (tmp_path / "odd.toml").write_text((tmp_path / "tiny.toml").read_text() + more)
    with pytest.raises(ValueError, match=words):
        compare(run, ["bf16", str(tmp_path / "odd.toml")], seeds=[1], out=tmp_path / "all", progress=False)
    assert not (tmp_path / "all").exists()


def test_another_run_in_a_later_folder_is_refused_before_the_first_run(run, tmp_path):
    plain = str(tmp_path / "plain.toml")
    train(replace_in(run, out=str(tmp_path / "all" / "plain-seed1"), optimizer__lr=0.5), recipe=plain, progress=False)
    with pytest.raises(ValueError, match="plain-seed1 holds another run; it differs in .*optimizer.lr"):
        compare(run, ["bf16", plain], seeds=[1], out=tmp_path / "all", progress=False)
    assert not (tmp_path / "all" / "bf16-seed1").exists()


def test_out_is_a_run_itself(run, tmp_path):
    train(run, progress=False)
    with pytest.raises(ValueError, match="is the folder of a run itself; choose another out"):
        compare(run, ["bf16"], seeds=[1], out=Path(run.out), progress=False)


@pytest.mark.parametrize("name", ["../up", "a/b", "a[/b]", "", ".hidden", "a b"])
def test_a_name_that_makes_no_folder(run, tmp_path, name):
    (tmp_path / "odd.toml").write_text(QUANTIZED.replace('"tiny"', json.dumps(name)))
    with pytest.raises(ValueError, match="a recipe's name becomes a folder"):
        compare(run, [str(tmp_path / "odd.toml")], seeds=[1], out=tmp_path / "all", progress=False)
    assert not (tmp_path / "all").exists()


def test_out_in_the_home_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = compare(run, ["bf16"], seeds=[1], out=Path("~/x"), progress=False)
    assert found.out == tmp_path / "home" / "x" and (found.out / "comparison.json").is_file()
