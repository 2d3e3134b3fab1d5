import json
import math
import shutil
import sys

import pytest
from rich.console import Console

from quatrain.nn import NonFiniteError
from quatrain.train import compare
from quatrain.train.compare import Comparison, Gap, Row, paired_gap, t_quantile
from tiny_run import QUANTIZED, history, make_run

compare_module = sys.modules["quatrain.train.compare"]

# R: qt(0.975, c(1:10, 29, 30, 120))
QUANTILES = {
    1: 12.7062047, 2: 4.3026527, 3: 3.1824463, 4: 2.7764451, 5: 2.5705818, 6: 2.4469119, 7: 2.3646243, 8: 2.3060041,
    9: 2.2621572, 10: 2.2281389, 29: 2.0452296, 30: 2.0422725, 120: 1.9799304,
}  # fmt: skip


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES.items())
def test_t_quantile(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-6)


def test_t_quantile_of_another_level():
    assert t_quantile(2, 0.9) == pytest.approx(2.9199856, abs=1e-6)
    assert t_quantile(10**4) == pytest.approx(1.960201, abs=1e-5)


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

    out = capsys.readouterr().out
    assert all(word in out for word in ("bf16", "tiny", "plain", "64 tokens", "2 seeds"))


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
    assert "diverged, seed 5" in text_of(found)


def test_table_of_one_seed(tmp_path):
    text = text_of(rows_of(tmp_path, None, Gap((1.0,), 1.0, None)))
    assert "+1.00" in text and "One seed" in " ".join(text.split())
