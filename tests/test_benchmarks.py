"""Records and tables: what is missing is said, what diverged is not dropped."""

import argparse
import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import pytest
import torch

from quatrain.kernels.quantize import quantize_reference
from quatrain.recipe import load_recipe
from quatrain.train import load_run
from quatrain.train.comparison import Comparison, Gap, Row

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_tables_without_records(tmp_path, monkeypatch):
    table = load("table", monkeypatch)
    readme = tmp_path / "README.md"
    empty = "".join(f"<!-- table:{name} -->\n<!-- /table:{name} -->\n" for name in ("speed", "gpu", "gaps", "stack"))
    readme.write_text(empty)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(table, "README", readme)
    monkeypatch.setattr(sys, "argv", ["table.py"])
    table.main()
    assert "Not measured yet: `make bench`." in readme.read_text()
    assert "Not measured yet: `make gaps`." in readme.read_text()
    assert "Not measured yet: `python benchmarks/gpu.py` on a GPU." in readme.read_text()
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


@pytest.fixture
def on_cpu(monkeypatch):
    """The GPU scripts as on a machine without one, timing single calls and compiling nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    measure = load("measure", monkeypatch)
    monkeypatch.setitem(sys.modules, "measure", measure)
    monkeypatch.setattr(measure, "ROUNDS", 2)
    return monkeypatch


def by_key(path):
    return {row["key"]: row for row in json.loads(path.read_text())["rows"]}


def pair(x, row, column, row_key, column_key, amax=None, decoded=(False, False)):
    """The contract of the Triton twin, from the reference."""
    made = []
    for value, spec, key, plain in ((x, row, row_key, decoded[0]), (x.t(), column, column_key, decoded[1])):
        parts = None if spec is None else quantize_reference(value, spec, key)
        made.append((value.contiguous(), None, parts[2]) if parts and plain else parts)
    return tuple(made)


def test_gpu_quantize_records_ours_where_the_peers_are_missing(tmp_path, on_cpu):
    on_cpu.setitem(sys.modules, "quatrain.kernels.quantize_triton", types.SimpleNamespace(quantize_pair=pair))
    for name in ("torchao", "fouroversix"):
        on_cpu.setitem(sys.modules, name, None)
    script = load("gpu_quantize", on_cpu)
    argv = ["gpu_quantize.py", "--out", str(tmp_path), "--size", "64", "--torchao-size", "32", "--commit", "abc"]
    on_cpu.setattr(sys, "argv", argv)
    script.main()
    record = json.loads((tmp_path / "gpu_quantize.json").read_text())
    rows = by_key(tmp_path / "gpu_quantize.json")
    assert {"quantize_rn_tbps", "quantize_sr_tbps", "quantize_46_tbps", "quantize_rowcol_tbps"} <= set(rows)
    assert rows["quantize_rn_tbps"]["bytes"] == 64 * 64 * (2 + 0.5 + 1 / 16)
    assert rows["quantize_rowcol_tbps"]["bytes"] == 64 * 64 * (2 + 2 * (0.5 + 1 / 16))
    assert rows["quantize_rn_decoded_tbps"]["bytes"] == 64 * 64 * 4
    slower = max(rows["quantize_46_mse_over_rn"]["median"], rows["quantize_46_mae_over_rn"]["median"])
    assert rows["quantize_46_over_rn"]["median"] == slower
    assert rows["quantize_sr_tbps"]["bar"] == 2.9 and record["commit"] == "abc" and record["trial"]
    assert {"quantize_vs_torchao", "quantize_46_vs_fouroversix", "quantize_sr_rht_vs_fouroversix"} <= set(
        record["failed"]
    )
    assert "Error" in record["failed"]["quantize_vs_torchao"]


def test_gpu_linear_runs_small(tmp_path, on_cpu):
    script = load("gpu_linear", on_cpu)
    argv = ["gpu_linear.py", "--out", str(tmp_path), "--tokens", "64", "--shrink", "64", "--commit", "abc"]
    on_cpu.setattr(sys, "argv", argv)
    script.main()
    record, rows = json.loads((tmp_path / "gpu_linear.json").read_text()), by_key(tmp_path / "gpu_linear.json")
    assert record["failed"] == {}
    assert {f"linear_{n}_vs_bf16{s}" for n in (4096, 14336) for s in ("", "_fresh_weight", "_compiled")} <= set(rows)
    assert rows["linear_saved_bytes"]["ours"] < 0.7 and rows["linear_saved_bytes"]["peer"] == 2.0
    assert 0 < rows["linear_4096_vs_bf16"]["gradient_errors"]["weight"] < 0.3


def test_gpu_lowrank_runs_small(tmp_path, on_cpu):
    script = load("gpu_lowrank", on_cpu)
    argv = ["gpu_lowrank.py", "--out", str(tmp_path), "--tokens", "64", "--shrink", "32", "--commit", "abc"]
    on_cpu.setattr(sys, "argv", argv)
    script.main()
    record, rows = json.loads((tmp_path / "gpu_lowrank.json").read_text()), by_key(tmp_path / "gpu_lowrank.json")
    assert record["failed"] == {} and rows["lora_svd_linear_vs_plain"]["bar"] == 1.15
    assert rows["lora_svd_saved_bytes"]["ours"] == pytest.approx(0.5625 + 2 * 32 / 128, abs=0.01)
    errors = rows["lora_svd_linear_vs_plain"]["gradient_errors"]
    assert errors["left"] < 0.02 < errors["right"] < 0.2 and rows["lora_svd_realign_ms"]["ours"] > 0


def test_gpu_model_trains_both_and_compares(on_cpu):
    script = load("gpu_model", on_cpu)
    runs = {name: script.train(name, script.TINY, 3, 1, None) for name in ("bf16-eager", "nvfp4-eager")}
    assert all(run["last_loss"] < run["losses"][0] for run in runs.values())
    assert "quantized_mac_share" not in runs["bf16-eager"] and runs["nvfp4-eager"]["quantized_mac_share"] == 1.0
    assert list(script.rows("compiled", script.TINY, runs)) == []
    (row,) = script.rows("eager", script.TINY, runs)  # a CPU tells no peak memory
    assert row["key"] == "model_1b_step_vs_bf16_eager" and row["repeats"] == 3 and row["linears"] == [28, 29]
    for run in runs.values():
        run["peak_gib"] = 2.0 if "linears" in run else 4.0
    assert [r["median"] for r in script.rows("eager", script.TINY, runs)][1] == 0.5


def test_gpu_stack_steps_and_compares(on_cpu):
    script = load("gpu_stack", on_cpu)
    shape = argparse.Namespace(presets=["tiny-llama"], batch=1, length=16, steps=2, warmup=0)
    runs = {name: script.train(name, shape) for name in ("bf16", "nvfp4-lora-svd")}
    ours, peer = runs["nvfp4-lora-svd"], runs["bf16"]
    assert ours["losses"][1] < ours["losses"][0] and ours["parameters"] > peer["parameters"]
    assert peer["state_bytes_per_parameter"] == pytest.approx(8.0, abs=0.01) and ours["quantized_mac_share"] > 0.5
    key = script.key_of("step", "nemotron-1.2b", "nvfp4-lora-svd")
    row = script.compared(key, "w", "ms", ours, peer, "step_ms")
    assert key == row["key"] == "stack_step_nemotron_1_2b_nvfp4_lora_svd_vs_bf16" and row["repeats"] == 2
    assert row["min"] <= row["median"] <= row["max"]


def stack_runs(tmp_path, name, losses):
    """Finished runs of one recipe, with a training curve, as a comparison leaves them."""
    folders, noise = [], torch.randn(400, generator=torch.Generator().manual_seed(1)).tolist()
    for seed in range(len(losses)):
        folder = tmp_path / f"{name}-seed{seed}"
        folder.mkdir()
        lines = [json.dumps({"kind": "train", "step": s, "loss": 3.0 + noise[s - 1] / 10}) for s in range(1, 401)]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        folders.append(folder.name)
    runs = tuple(run(seed) | {"val_loss": loss, "steps": 400} for seed, loss in enumerate(losses))
    return Row(name, tuple(folders), runs, None)


def test_stack_gaps_are_to_bf16_and_between_recipes(tmp_path, monkeypatch):
    script = load("stack_gaps", monkeypatch)
    rows = [
        stack_runs(tmp_path, "bf16", [4.0, 4.0]),
        *(
            Row(row.recipe, row.folders, row.runs, script.paired_gap([r["val_loss"] for r in row.runs], [4.0, 4.0]))
            for row in (stack_runs(tmp_path, "root", [3.0, 3.0]), stack_runs(tmp_path, "full-stack", [3.03, 3.06]))
        ),
    ]
    found = Comparison(tmp_path, (0, 1), 1000, tuple(rows))
    config = load_run(FOLDER / "stack.toml", [])
    keys = {row["key"]: row for row in script.gap_rows(found, config)}
    assert list(keys) == [f"stack_gap_{name}_percent" for name in ("root", "full_stack", "full_stack_to_root")]
    assert keys["stack_gap_full_stack_to_root_percent"]["per_seed"] == [1.0, 2.0]
    assert keys["stack_gap_full_stack_percent"]["per_seed"] == [-24.25, -23.5]
    assert keys["stack_gap_full_stack_percent"]["paper_percent"] == "0.838"
    seams = script.seam_rows(found, 100, config)
    names = ("no_realign_bf16", "no_realign_root", "realign_full_stack")
    assert [row["key"] for row in seams] == [f"{n}_{w}_loss_step" for n in names for w in ("seed0", "seed1", "mean")]
    assert all(row["repeats"] == 2 and row["inside"] <= 2 for row in seams)
    folder = tmp_path / "recipes"
    assert script.recipe_of("bf16", 100, tmp_path) == "bf16" and not folder.exists()
    control = load_recipe(script.recipe_of("root-split", 100, tmp_path))
    assert control.name == "root-split" and control.optimizer.name == "root" and control.linear.split.every == 100
    assert not any(control.linear.specs()) and control.keep == load_recipe("nvfp4-lora-svd").keep
    path = script.recipe_of("full-stack", 100, tmp_path)
    assert "every = 100" in Path(path).read_text() and script.recipe_of("full-stack", 100, tmp_path) == path


def test_gpu_optim_runs_small(tmp_path, on_cpu):
    script = load("gpu_optim", on_cpu)
    keys = ["adamw_bf16_vs_torch_fused", "adamw_state_bytes_per_param"]
    argv = ["gpu_optim.py", "--out", str(tmp_path), "--layers", "1", "--width", "128", "--vocabulary", "512", "--only"]
    on_cpu.setattr(sys, "argv", [*argv, *keys])
    script.main()
    rows = by_key(tmp_path / "gpu_optim.json")
    assert json.loads((tmp_path / "gpu_optim.json").read_text())["failed"] == {}
    assert rows["adamw_bf16_vs_torch_fused"]["bar"] == 1.05 and "adamw_vs_bnb8bit" not in rows
    assert 1.14 < rows["adamw_state_bytes_per_param"]["median"] < 1.2
    assert rows["adamw_state_bytes_per_param"]["median"] < rows["adamw_default_bytes_per_param"]["median"]


def test_gpu_attention_runs_small(tmp_path, on_cpu):
    script = load("gpu_attention", on_cpu)
    on_cpu.setattr(sys, "argv", ["gpu_attention.py", "--out", str(tmp_path), "--shrink", "64", "--commit", "abc"])
    script.main()
    record, rows = json.loads((tmp_path / "gpu_attention.json").read_text()), by_key(tmp_path / "gpu_attention.json")
    assert record["failed"] == {} and record["trial"]
    keys = {f"attention_{n}{part}_vs_flash" for n in ("4k", "16k") for part in ("", "_forward", "_backward")}
    keys |= {"attention_4k_in_model_vs_flash", "attention_saved_bytes_per_element", "attention_saved_bytes_in_model"}
    assert set(rows) == keys  # a CPU tells no peak memory
    assert rows["attention_4k_vs_flash"]["bar"] == 1.0 and rows["attention_4k_vs_flash"]["stretch"] == 0.8
    assert rows["attention_saved_bytes_per_element"]["ours"] == 6.25
    assert rows["attention_saved_bytes_per_element"]["peer"] == 8.0
    assert rows["attention_saved_bytes_in_model"]["peer"] == 8.0  # flash lays O out as a projection reads it
    assert 0 < rows["attention_4k_vs_flash"]["differences"]["dK"] < 0.3


def test_peak_memory_is_compared_in_bytes_beyond_the_inputs(on_cpu):
    script = load("gpu_attention", on_cpu)
    bench = script.Bench("4k", (1, 1, 32, 16), "cpu")
    assert list(bench.memory()) == [] and list(bench.sides) == ["ours", "flash"]
    # Held before the step, then its peak: of ours, then of flash.
    held, peaks = iter([3 << 20, 7 << 20]), iter([8 << 20, 17 << 20])
    on_cpu.setattr(script, "allocated", lambda: next(held))
    on_cpu.setattr(script, "peak", lambda: next(peaks))
    (row,) = bench.memory()
    assert (row["key"], row["ours"], row["peer"], row["median"]) == ("attention_peak_vs_flash", 5.0, 10.0, 0.5)


def test_each_pair_has_its_record_and_bound(tmp_path, monkeypatch):
    script = load("part_gaps", monkeypatch)
    found = Comparison(tmp_path, (0, 1), 1000, (Row("bf16", (), (run(0), run(1)), None),) * 2)
    config = load_run(FOLDER.parent / "examples" / "optimizers.toml", ["train.tokens=8192"])
    keys = []
    for pair in script.PAIRS.values():
        for mean, met in ((0.1, True), (0.25, False)):
            gap = Gap((mean, mean), mean + (pair.bound - 0.3), 0.1)
            row = Row(pair.recipes[0], (), (run(0), run(1)), gap)
            made = script.bounded(script.gaps.record(row, found), config, pair)
            assert made["met"] is met and made["bound_percent"] == pair.bound
        keys.append((made["key"], pair.record))
    assert keys == [
        ("optim_gap_adamw_nvfp4_percent", "optim_gaps"),
        ("optim_gap_root_nvfp4_percent", "optim_gaps"),
        ("attention_gap_nvfp4_attention_percent", "attention_gaps"),
    ]


def gap_record(seeds, per_seed, **more):
    row = {"key": "k", "work": "w", "fingerprint": "f", "bound_percent": 0.3, "diverged": [], "repeats": len(seeds)}
    row |= {"ours": 3.0 + len(seeds), "peer": 3.0, "per_seed": per_seed}
    head = {"tokens": 8, "model": "m", "run": [], "device": "d", "commit": "c", "date": "t"}
    return head | {"seed": seeds, "rows": [row]} | more


def test_seeds_added_later_join_in_one_gap(monkeypatch):
    join = load("part_gaps", monkeypatch).join
    joined = join([gap_record([0, 1], [0.1, 0.3]), gap_record([2], [0.2], commit="e")])
    (row,) = joined["rows"]
    assert joined["seed"] == [0, 1, 2] and [part["commit"] for part in joined["parts"]] == ["c", "e"]
    assert row["per_seed"] == [0.1, 0.3, 0.2] and row["median"] == 0.2 and row["repeats"] == 3
    assert row["ours"] == pytest.approx((5.0 * 2 + 4.0) / 3, abs=1e-4)
    assert row["interval_half_width"] == pytest.approx(4.303 * 0.1 / 3**0.5, abs=1e-3) and row["resolved"] is False
    assert row["upper_percent"] == pytest.approx(0.448, abs=1e-3) and row["met"] is False
    for other in (gap_record([1], [0.2]), gap_record([2], [0.2], tokens=9)):
        with pytest.raises(ValueError, match="joined over seeds of one and the same work"):
            join([gap_record([0, 1], [0.1, 0.3]), other])


def test_a_seam_is_told_from_the_noise_of_other_steps(monkeypatch):
    script = load("realign", monkeypatch)
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()
    losses = {step: 3.0 + 0.1 * noise[step - 1] for step in range(1, 401)}
    calm = script.seam(losses, 150, 40, 360)
    assert calm["met"] and calm["repeats"] == 2 and len(calm["each"]) == 2
    bump = {step: loss + (0.3 if 300 < step <= 310 else 0.0) for step, loss in losses.items()}
    found = script.seam(bump, 150, 40, 360)
    assert not found["met"] and found["each"][1] > 2 > abs(found["each"][0])
    with pytest.raises(ValueError, match="train longer"):
        script.seam(losses, 150, 20, 40)


def test_gpu_model_reports_a_variant_that_ends_badly(tmp_path, on_cpu):
    script = load("gpu_model", on_cpu)
    options = argparse.Namespace(out=tmp_path, steps=1, warmup=0, layers=None, tiny=True, profile=False, timeout=0.05)
    with pytest.raises(RuntimeError, match=r"bf16-eager took longer than 0\.05 s"):
        script.run_apart("bf16-eager", options)
    on_cpu.setattr(script, "__file__", str(tmp_path / "absent.py"))
    options.timeout = 60.0
    with pytest.raises(RuntimeError, match="ended with code 2"):
        script.run_apart("bf16-eager", options)


def test_the_slowest_kernels_come_first(on_cpu):
    text = load("gpu_model", on_cpu).kernel_table([("a", 4, 1000.0), ("b", 2, 3000.0)], "nvfp4-compiled").splitlines()
    assert text[0] == "nvfp4-compiled: 2.00 ms of kernels a step"
    assert text[2].split() == ["1.500", "75.0", "1", "b"] and text[3].split() == ["0.500", "25.0", "2", "a"]


def test_a_recorder_keeps_what_was_measured(tmp_path, on_cpu):
    measure = sys.modules["measure"]
    row = {"key": "quantize_sr_tbps", "work": "w", "ours": 3.0, "peer": 4.0, "unit": "TB/s", "median": 3.0}
    path = tmp_path / "gpu_quantize.json"
    recorder = measure.Recorder(path, "abc")
    recorder.run(("quantize_sr_tbps",), lambda: [row])
    recorder.run(("x", "y"), lambda: 1 / 0)
    assert json.loads(path.read_text())["failed"] == dict.fromkeys("xy", "ZeroDivisionError: division by zero")
    assert "met" in recorder.summary() and "FAILED" in recorder.summary()
    again = measure.Recorder(path, "abc")
    again.run(("quantize_sr_tbps",), lambda: 1 / 0)  # measured already
    assert again.rows["quantize_sr_tbps"]["median"] == 3.0 and again.failed == {}
    assert measure.Recorder(path, "abd").rows == {}


def section(device="NVIDIA H200", commit="new", failed=None, **medians):
    rows = [
        {
            "key": key, "work": key.replace("_", " "), "ours": value, "peer": 4.0, "peer_name": "device copy",
            "unit": "TB/s" if key.endswith("tbps") else "ms; key is the ratio",
            "median": value, "min": value - 0.1, "max": value + 0.1, "repeats": 5,
        }
        for key, value in medians.items()
    ]  # fmt: skip
    head = {
        "device": device,
        "driver": "580",
        "versions": {"torch": "2.11.0"},
        "commit": commit,
        "date": "d",
        "seed": 0,
    }
    return head | {"rows": rows, "failed": failed or {}}


def test_a_section_replaces_its_keys_and_no_others(tmp_path, on_cpu):
    gpu = load("gpu", on_cpu)
    old = gpu.merged(None, [section(commit="old", quantize_rn_tbps=3.0, linear_4096_vs_bf16=1.3, extra=1.0)])
    assert "quantize_sr_tbps" in old["missing"]
    failed = {"quantize_sr_tbps": "RuntimeError: x", "quantize_rn_tbps": "RuntimeError: y"}
    (tmp_path / "gpu_quantize.json").write_text(json.dumps(section(failed=failed, quantize_46_tbps=2.1)))
    (tmp_path / "gpu_linear.json").write_text(json.dumps(section(linear_4096_vs_bf16=1.1)))
    (tmp_path / "gpu_model.json").write_text(json.dumps(section(model_1b_step_vs_bf16=0.1) | {"trial": True}))
    path = tmp_path / "record.json"
    path.write_text(json.dumps(old))
    new = gpu.write_record(tmp_path, path)
    assert json.loads(path.read_text()) == new
    assert [row["key"] for row in new["rows"]] == [
        "quantize_rn_tbps", "quantize_46_tbps", "linear_4096_vs_bf16", "extra",
    ]  # fmt: skip
    assert [row["commit"] for row in new["rows"]] == ["old", "new", "new", "old"]
    assert new["failed"] == failed  # and the older figure of the one stays
    assert "not measured" in gpu.table(new) and "FAILED" in gpu.table(new)
    assert gpu.merged(new, [section(quantize_sr_tbps=3.0)])["failed"] == {"quantize_rn_tbps": "RuntimeError: y"}
    with pytest.raises(ValueError, match="a record holds one device, received 'L4' for 'NVIDIA H200'"):
        gpu.merged(new, [section(device="L4")])
    assert gpu.default_record("NVIDIA H200").name == "gpu_h200.json"


def test_a_section_ends_when_its_time_is_over(tmp_path, on_cpu):
    gpu = load("gpu", on_cpu)
    on_cpu.setattr(gpu, "FOLDER", tmp_path)
    (tmp_path / "gpu_linear.py").write_text("import time; time.sleep(60)")
    (tmp_path / "gpu_model.py").write_text("raise SystemExit(3)")
    assert gpu.run_section("quantize", tmp_path, None, 5, []) == "there is no gpu_quantize.py"
    assert gpu.run_section("linear", tmp_path, "abc", 0.2, []) == "ended after 0 s"
    assert gpu.run_section("model", tmp_path, "abc", 30, ["--profile"]) == "ended with code 3"


def test_the_gpu_table_says_what_was_missed(tmp_path, on_cpu):
    gpu, table = load("gpu", on_cpu), load("table", on_cpu)
    found = section(quantize_rn_tbps=3.5, quantize_sr_tbps=2.0, linear_4096_vs_bf16=1.1, extra=1.0)
    (tmp_path / "gpu_h200.json").write_text(json.dumps(gpu.merged(None, [found])))
    on_cpu.setattr(table, "RESULTS", tmp_path)
    text = table.gpu_table()
    copy = "4 TB/s (device copy)"
    assert f"| quantize rn tbps | 3.5 TB/s | {copy} | 0.88x | at least 3.4 | met |" in text
    assert f"| quantize sr tbps | 2 TB/s | {copy} | 0.50x | at least 2.9 | missed |" in text
    line = "| linear 4096 vs bf16 | 1.1 ms | 4 ms (device copy) | **1.1x** (1-1.2) | at most 1.2 |"
    assert f"{line} met, and the stretch of 1.12 |" in text
    assert "extra" not in text and "Not measured: quantize_46_tbps, " in text
    assert "NVIDIA H200, driver 580; torch 2.11.0; commit new; [record](benchmarks/results/gpu_h200.json)." in text
    assert table.summary()["extra"] == 1.0
