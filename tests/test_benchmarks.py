"""Records and tables: what is missing is said, what diverged is not dropped."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from quatrain.train.comparison import Comparison, Gap, Row

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_without_records(tmp_path, monkeypatch):
    table = load("table", monkeypatch)
    readme = tmp_path / "README.md"
    empty = "".join(f"<!-- table:{name} -->\n<!-- /table:{name} -->\n" for name in ("speed", "gaps"))
    readme.write_text(empty)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(table, "README", readme)
    monkeypatch.setattr(sys, "argv", ["table.py"])
    table.main()
    assert "Not measured yet: `make bench`." in readme.read_text()
    assert "Not measured yet: `make gaps`." in readme.read_text()
    assert json.loads((tmp_path / "results" / "summary.json").read_text()) == {}


def run(seed):
    return {
        "seed": seed, "val_loss": 3.0 + seed / 10, "quantized_mac_share": 0.8, "saved_bytes_per_element": 0.6,
        "fingerprint": "f" * 16,
    }  # fmt: skip


def test_a_diverged_recipe_stays_in_the_table(tmp_path, monkeypatch):
    gaps, table = load("gaps", monkeypatch), load("table", monkeypatch)
    lost = {"seed": 1, "error": "step 3: the loss is nan"}
    rows = (
        Row("bf16", (), (run(0), run(1)), None),
        Row("nvfp4", (), (run(0), run(1)), Gap((1.0, 2.0), 1.5, 6.35)),
        Row("mxfp4-plain", (), (run(0), lost), None),
    )
    found = Comparison(tmp_path, (0, 1), 1000, rows)
    records = [gaps.record(row, found) for row in rows[1:]]
    (tmp_path / "gaps.json").write_text(
        json.dumps({"rows": records, "tokens": 1000, "seed": [0, 1], "device": "x"}, allow_nan=False)
    )
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    text = table.gap_table()
    assert "| `mxfp4-plain` | a run diverged (seed 1) | - | - | - |" in text
    assert "| `nvfp4` | +1.50 ± 6.35, not resolved | +1.00, +2.00 | 0.60 | 80.0% |" in text
    assert table.summary() == {"gap_nvfp4_percent": 1.5}


def test_one_seed_is_not_called_unresolved(monkeypatch):
    table = load("table", monkeypatch)
    row = {"median": 1.0, "interval_half_width": None, "resolved": None}
    assert table.gap_cell(row) == "+1.00 (one seed)"


@pytest.mark.parametrize(("status", "mark"), [("", ""), (" M README.md", "+changes")])
def test_a_changed_tree_is_marked(monkeypatch, status, mark):
    records = load("records", monkeypatch)
    monkeypatch.setattr(records, "_git", lambda command, *_: "abc" if command == "rev-parse" else status)
    assert records.commit() == f"abc{mark}"


def test_rounding_of_what_is_missing(monkeypatch):
    gaps = load("gaps", monkeypatch)
    assert gaps.rounded(math.nan) is None and gaps.rounded(None) is None and gaps.rounded(1.23456, 2) == 1.23
