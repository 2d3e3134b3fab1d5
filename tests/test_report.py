"""The comparison page: its numbers, what it forgives, what it refuses; it loads nothing and escapes everything."""

import hashlib
import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from quatrain.files import signed
from quatrain.report import find_runs, summarise, write_report
from quatrain.report.collect import read_run
from quatrain.report.figures import DARK, LIGHT, smooth, snr_figure
from quatrain.report.gaps import group_runs
from quatrain.report.snr import OPERANDS, natural, short_names

# ---------------------------------------------------------------------------------------------------- fake run folders
# 26 linears of a small Nemotron-H: Mamba (M), attention (*) and feed-forward (-) blocks, as transformers names them.
LINEARS = {"M": ("in_proj", "out_proj"), "*": ("q_proj", "k_proj", "v_proj", "o_proj"), "-": ("up_proj", "down_proj")}
MODULES = [f"model.layers.{i}.mixer.{name}" for i, kind in enumerate("M-M-M*-M-M-M") for name in LINEARS[kind]]
RECIPES = {  # name: (gap in percent, dB, saved bytes an element, rows' format, kept blocks)
    "bf16": (0.0, None, 2.0, None, 0),
    "fp8": (0.15, 31.0, 1.03, "fp8", 3),
    "mxfp4": (2.1, 17.0, 0.53, "mxfp4", 2),
    "nvfp4-plain": (1.9, 20.0, 0.56, "nvfp4", 0),
    "nvfp4": (1.4, 19.5, 0.56, "nvfp4", 2),
    "nvfp4-46": (1.1, 20.6, 0.56, "nvfp4", 2),
}
TOKENS = 1024  # a step


def recipe_toml(name):
    rows = RECIPES.get(name, (0, 0, 0, "nvfp4", 0))[3]
    lines = [f'name = "{name}"', "", "[linear]"]
    if rows:
        lines += [f'{operand} = {{ format = "{rows}" }}' for operand in OPERANDS]
        lines += ["", "[linear.keep]", "last_share = 0.15", "head = true"]
    return "\n".join(lines) + "\n"


def run_toml(name, seed, steps, **train):
    more = "".join(f"{key} = {value}\n" for key, value in train.items())
    return f"""recipe = "{name}"
out = "runs/demo/{name}"
[model]
preset = "tiny-hybrid"
[data]
path = "stdlib"
tokenizer = "bpe"
vocab_size = 1024
sequence_length = 128
[train]
tokens = {steps * TOKENS}
batch_size = 8
seed = {seed}
dtype = "bfloat16"
{more}[optimizer]
name = "adamw"
lr = 0.003
"""


def fake_run(root, name, seed=0, steps=130, *, finished=True, val_every=10, bf16=True, **train):
    """One run folder such as the trainer writes; `steps` may be short of the planned 130 where it is not finished."""
    gap, db, saved, rows, kept_blocks = RECIPES.get(name, (1.0, 20.0, 0.56, "nvfp4", 2))
    noise, shared = random.Random(f"{name}{seed}"), random.Random(seed)
    wave = [shared.gauss(0, 0.05) for _ in range(131)]
    offset = gap + noise.gauss(0, 0.25) if rows else 0.0

    def loss(step):
        return (3.1 + 3.85 * math.exp(-step / 28) + shared_level) * (1 + 0.01 * offset * min(1, step / 40))

    shared_level = 0.03 * seed
    folder = root / f"{name}-seed{seed}"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(run_toml(name, seed, 130, **train))
    (folder / "recipe.toml").write_text(recipe_toml(name))
    lines = [{"kind": "phase", "step": 110, "bf16": "forward"}] if name == "nvfp4" and steps > 110 else []
    for step in range(steps + 1):
        if step and step % 2 == 0:
            lines.append(
                {
                    "kind": "train",
                    "step": step,
                    "tokens": step * TOKENS,
                    "loss": loss(step) + wave[step],
                    "lr": 3e-3,
                    "grad_norm": 1.0,
                    "tokens_per_s": 5000.0 - 900 * bool(rows),
                }
            )
        if step % val_every == 0 or (finished and step == steps):
            value = loss(step) * (1 + 0.0004 * noise.gauss(0, 1))
            record = {"kind": "val", "step": step, "tokens": step * TOKENS, "val_loss": value}
            lines.append(record | ({"val_loss_bf16": value * 0.997} if bf16 else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        last = next(line for line in reversed(lines) if line["kind"] == "val")
        kept = [m for m in MODULES if int(m.split(".")[2]) >= 12 - kept_blocks] if rows else MODULES
        snr = {m: {o: (db or 0.0) + noise.gauss(0, 0.8) - 1.5 * o.endswith("grad") for o in OPERANDS} for m in MODULES}
        write_summary(folder, name, seed, steps, last, saved, kept, snr if rows else {})
    return folder


def write_summary(folder, name, seed, steps, last, saved, kept, snr):
    summary = {
        "recipe": name,
        "fingerprint": hashlib.sha256(name.encode()).hexdigest(),
        "seed": seed,
        "steps": steps,
        "tokens": steps * TOKENS,
        "val_loss_first": 6.95,
        "val_loss": last["val_loss"],
        "tokens_per_s": 5123.4,
        "wall_s": 26.5,
        "saved_bytes_per_element": saved,
        "saved_bytes": 123456,
        "quantized_mac_share": 1 - len(kept) / len(MODULES),
        "converted": {m: "an operand row applies" for m in MODULES if m not in kept},
        "kept": dict.fromkeys(kept, "keep.last_share = 0.15") | {"lm_head": "keep.head"},
        "snr": {m: rows for m, rows in snr.items() if m not in kept},
        "parameters": 1_423_104,
        "device": "cpu",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "quatrain": "0.1.0"},
        "commit": "0123abc",
        "date": "2026-11-29",
        "threads": 2,
        "dtype": "bfloat16",
        "recipe_toml": recipe_toml(name),
    }
    if "val_loss_bf16" in last:
        summary["val_loss_bf16"] = last["val_loss_bf16"]
    (folder / "summary.json").write_text(json.dumps(summary))


def comparison(root, seeds=(0, 1, 2)):
    return [fake_run(root, name, seed) for name in RECIPES for seed in seeds]


class Page(HTMLParser):
    """A page as a browser sees it: its tags with attributes, and its text outside scripts and styles."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self._inside = [], "", ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return comparison(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return Page(write_report(runs, tmp_path_factory.mktemp("page") / "deep" / "report.html", title="Demo"))


# ------------------------------------------------------------------------------------------------------------ contents
def test_holds_every_part(page):
    assert page.source.startswith("<!DOCTYPE html>")
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {"results", "reading", "losses", "snr", "recipes", "runs"} <= ids
    assert {"chart-final", "chart-gap", "chart-loss", "chart-snr"} <= ids
    for word in (
        "Demo",
        "6 recipes",
        "133,120 tokens",
        "tiny-hybrid",
        "1,423,104 (1.42 M)",
        "2.13.0",
        "0123abc",
        "No order among the recipes is claimed",
        "keep.last_share = 0.15",
        "wgrad.input",
        "5,123",
    ):
        assert word in page.text, word
    for name in RECIPES:
        assert f'name = "{name}"' in page.text
    assert "prefers-color-scheme: dark" in page.source


def test_loads_nothing(page):
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert not attrs.get("src"), (tag, attrs)
        assert attrs.get("href", "#").startswith("#"), (tag, attrs)
    own_style = re.search(r"<style>(.*?)</style>", page.source, re.DOTALL).group(1)
    assert "url(" not in own_style
    assert "@import" not in own_style
    assert "default-src 'none'" in page.source
    assert page.source.count("* plotly.js v") == 1


def test_same_runs_give_the_same_bytes(runs, tmp_path):
    a, b = (write_report(runs[:6], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert a == b


def test_everything_from_files_is_escaped(tmp_path):
    evil = '</script><img src=x onerror="alert(1)">&<b>'
    folders = [fake_run(tmp_path / "r", name) for name in ("bf16", "nvfp4")]
    summary = json.loads((folders[1] / "summary.json").read_text())
    summary |= {
        "recipe": evil,
        "fingerprint": evil,
        "device": evil,
        "commit": evil,
        "date": evil,
        "versions": {evil: evil},
        "kept": {f"model.layers.0.{evil}": evil},
        "snr": {f"model.{evil}": {"fprop.input": 20.0}},
    }
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    (folders[1] / "recipe.toml").write_text(f"# {evil}")
    page = Page(write_report(folders, tmp_path / "page.html", title=evil))
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [attrs for _, attrs in page.tags if "onerror" in attrs]
    assert evil in page.text
    assert "<img src=x" not in page.source


def test_an_exact_operand_does_not_stretch_the_colours(tmp_path):
    folder = fake_run(tmp_path, "nvfp4")
    summary = json.loads((folder / "summary.json").read_text())
    summary["snr"] = {
        "a.b": {"fprop.input": 20.0, "wgrad.grad": 200.0},
        "a.c": {"fprop.input": 10.0, "wgrad.grad": None},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    figure = snr_figure(group_runs([read_run(folder)]))
    assert (figure["data"][0]["zmin"], figure["data"][0]["zmax"]) == (10.0, 20.0)
    assert figure["data"][0]["z"] == [[20.0, *[None] * 3, 200.0, None], [10.0, *[None] * 5]]


def test_without_quantized_runs_there_is_no_heat_map(tmp_path):
    page = Page(write_report([fake_run(tmp_path, "bf16")], tmp_path / "page.html"))
    assert not [attrs for _, attrs in page.tags if attrs.get("id") == "chart-snr"]
    assert "No operand was quantized" in page.text
    assert "1 recipe · seed 0" in page.text


def test_one_seed_says_that_noise_is_unknown(tmp_path):
    page = Page(write_report(comparison(tmp_path, seeds=(0,)), tmp_path / "page.html"))
    assert "the noise is unknown" in page.text
    assert "half a percent or more" in page.text
    assert "Not resolved:" not in page.text


# ------------------------------------------------------------------------------------------------------------- numbers
def put_losses(folder, losses):
    lines = [{"kind": "val", "step": 10 * i, "tokens": 10240 * i, "val_loss": v} for i, v in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").unlink()


def test_gap_is_the_mean_of_paired_gaps(tmp_path):
    ends = {("bf16", 0): 4.0, ("bf16", 1): 5.0, ("nvfp4", 0): 4.04, ("nvfp4", 1): 5.15}
    folders = []
    for (name, seed), end in ends.items():
        folders.append(fake_run(tmp_path, name, seed))
        put_losses(folders[-1], [7.0, 6.0, end])
    base, row = summarise(folders)
    assert base["recipe"] == "bf16" and base["gap_percent"] is None and base["val_loss"] == 4.5
    assert row["gap_percent"] == pytest.approx(2.0)  # 1 % and 3 %
    half = 12.7062047 * math.sqrt(2) / math.sqrt(2)
    assert row["gap_interval"] == pytest.approx((2.0 - half, 2.0 + half))
    assert row["resolved"] is False and row["gap_seeds"] == (0, 1)
    flipped = summarise(folders, baseline="nvfp4")
    assert [r["recipe"] for r in flipped] == ["nvfp4", "bf16"]
    assert flipped[1]["gap_percent"] == pytest.approx(100 * ((4 / 4.04 + 5 / 5.15) / 2 - 1))


def test_seeds_that_stopped_early_are_left_out_of_means(tmp_path):
    folders = [fake_run(tmp_path, name, seed) for name in ("bf16", "nvfp4") for seed in (0, 1)]
    for folder, losses in zip(folders, ([7, 6, 5], [7, 6, 5], [7, 6, 5.1], [7, 9]), strict=True):
        put_losses(folder, [float(v) for v in losses])
    row = summarise(folders)[1]
    assert row["val_loss"] == 5.1 and row["gap_seeds"] == (0,) and row["gap_percent"] == pytest.approx(2.0)
    page = Page(write_report(folders, tmp_path / "page.html"))
    assert "seed 1 ended early and is in no mean" in page.text


def test_a_diverged_seed_is_not_averaged_away(tmp_path):
    folders = [fake_run(tmp_path, name, seed) for name in ("bf16", "nvfp4") for seed in (0, 1)]
    for folder, end in zip(folders, (5.0, 5.0, 5.1, math.nan), strict=True):
        put_losses(folder, [7.0, end])
    row = summarise(folders)[1]
    assert row["val_loss"] is None and row["gap_percent"] is None and row["diverged"] == (1,)
    page = Page(write_report(folders, tmp_path / "page.html"))
    assert "not finite" in page.text and "diverged" in page.text
    assert "NaN" not in re.sub(r"<script>/\*\*.*?</script>", "", page.source, flags=re.DOTALL)


def end_in(folder, text):
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "diverged", "step": 60, "error": text}) + "\n")


def test_a_recorded_divergence_is_shown(tmp_path):
    folders = [fake_run(tmp_path, name, seed) for name in ("bf16", "nvfp4", "fp8") for seed in (0, 1)]
    end_in(folders[3], "step 60: the loss is <nan>")
    rows = summarise(folders)
    assert rows[1]["diverged"] == (1,) and rows[1]["val_loss"] is None and rows[1]["gap_percent"] is None
    assert rows[1]["unfinished"] == () and rows[2]["gap_percent"] is not None
    page = Page(write_report(folders, tmp_path / "page.html"))
    assert "diverged, step 60: the loss is <nan>" in page.text and "seed 1 diverged" in page.text
    assert "unfinished" not in page.text and "ended early" not in page.text

    end_in(folders[0], "lost")  # the reference
    assert [row["gap_percent"] for row in summarise(folders)] == [None, None, None]
    assert "the reference diverged" in Page(write_report(folders, tmp_path / "page.html")).text


def test_a_run_taken_up_after_a_divergence_is_whole(tmp_path):
    folder = fake_run(tmp_path, "nvfp4")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines.insert(20, json.dumps({"kind": "diverged", "step": 15, "error": "lost"}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert not read_run(folder).diverged


def test_signed_and_unsigned_recipes_are_one(tmp_path):
    folders = [fake_run(tmp_path, "nvfp4"), fake_run(tmp_path, "nvfp4", 1, steps=50, finished=False)]
    (folders[1] / "recipe.toml").write_text(signed((folders[1] / "recipe.toml").read_text()))
    assert [row["seeds"] for row in summarise(folders)] == [(0, 1)]


def test_nesting_that_python_cannot_hold(tmp_path):
    folder = fake_run(tmp_path, "nvfp4")
    (folder / "summary.json").write_text("[" * 100_000)
    (folder / "run.toml").write_text("x = " + "[" * 5000)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert len(read_run(folder).notes) == 3


def test_two_recipes_of_one_name_stay_apart(tmp_path):
    folders = [fake_run(tmp_path / "a", "nvfp4"), fake_run(tmp_path / "b", "nvfp4", 1)]
    text = recipe_toml("nvfp4").replace("0.15", "0.25")
    (folders[1] / "recipe.toml").write_text(text)
    summary = json.loads((folders[1] / "summary.json").read_text()) | {"fingerprint": "0" * 64}
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    folders.append(fake_run(tmp_path / "c", "nvfp4", 2, steps=50, finished=False))
    (folders[2] / "recipe.toml").write_text(text)
    assert [row["seeds"] for row in summarise(folders)] == [(0,), (1, 2)]
    names = [row["recipe"] for row in summarise(folders)]
    assert len(set(names)) == 2 and all(re.fullmatch(r"nvfp4 \([0-9a-f]{8}\)", name) for name in names)


def test_settings_that_differ_are_named(tmp_path):
    folders = [fake_run(tmp_path, "bf16"), fake_run(tmp_path, "nvfp4", clip=0.5)]
    assert "Runs differ in train.clip (not set and 0.5)" in Page(write_report(folders, tmp_path / "page.html")).text


# ---------------------------------------------------------------------------------------------- unfinished and damaged
def test_unfinished_run_is_shown_and_marked(tmp_path):
    folders = [fake_run(tmp_path, "bf16"), fake_run(tmp_path, "nvfp4", steps=57, finished=False)]
    row = summarise(folders)[1]
    assert row["unfinished"] == (0,) and row["step"] == 50 and row["gap_step"] == 50 and row["gap_partial"]
    assert row["tokens_per_s"] == 4100.0 and row["fingerprint"] is None
    page = Page(write_report(folders, tmp_path / "page.html"))
    for word in ("1 of 2 runs unfinished", "at step 50", "57,344 tokens so far (step 56)"):
        assert word in page.text, word


def test_cut_last_line_is_ignored_and_said(tmp_path):
    folder = fake_run(tmp_path, "nvfp4", steps=40, finished=False)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"val","step":50,"tokens":512\xc3')
    assert read_run(folder).seen[0] == 40
    page = Page(write_report([folder], tmp_path / "page.html"))
    assert "the last line of metrics.jsonl is cut off and was ignored" in page.text


@pytest.mark.parametrize("text", ["", "\n\n", "[1]\nnull\n", '{"kind":"val","step":"x","tokens":1}\n', "NaN\n{}\n"])
def test_metrics_without_a_record(tmp_path, text):
    folder = fake_run(tmp_path, "nvfp4", finished=False)
    (folder / "metrics.jsonl").write_text(text)
    page = Page(write_report([folder], tmp_path / "page.html"))
    assert "No losses have been recorded yet" in page.text


def test_half_written_summary_and_run_file(tmp_path):
    folders = [fake_run(tmp_path, "bf16"), fake_run(tmp_path, "nvfp4")]
    (folders[1] / "summary.json").write_text('{"recipe": "nv')
    (folders[1] / "run.toml").write_text("[model\n")
    page = Page(write_report(folders, tmp_path / "page.html"))
    for name in ("summary.json", "run.toml"):
        assert f"{name} cannot be read and was ignored" in page.text


def test_summary_stands_in_for_lost_metrics(tmp_path):
    folder = fake_run(tmp_path, "nvfp4")
    end = json.loads((folder / "summary.json").read_text())["val_loss"]
    (folder / "metrics.jsonl").unlink()
    assert summarise([folder])[0]["val_loss"] == end


def test_missing_bf16_loss_and_odd_values(tmp_path):
    folders = [fake_run(tmp_path, "bf16", bf16=False), fake_run(tmp_path, "nvfp4", bf16=False)]
    summary = json.loads((folders[1] / "summary.json").read_text())
    summary |= {
        "snr": {"a": {"fprop.input": None, "fprop.weight": math.inf, "other": 3.0}, "b": 5},
        "kept": None,
        "tokens_per_s": None,
        "versions": None,
        "quantized_mac_share": "much",
    }
    (folders[1] / "summary.json").write_text(json.dumps(summary))
    rows = summarise(folders)
    assert rows[0]["val_loss_bf16"] is None and rows[1]["quantized_mac_share"] is None
    assert rows[1]["tokens_per_s"] == 4100.0
    write_report(folders, tmp_path / "page.html")


def test_unequal_lengths_and_grids(tmp_path):
    folders = [
        fake_run(tmp_path, "bf16"),
        fake_run(tmp_path, "fp8", val_every=26),
        fake_run(tmp_path, "mxfp4", val_every=7, steps=85, finished=False),
        fake_run(tmp_path, "nvfp4", 5),
    ]
    rows = summarise(folders)
    assert [row["gap_step"] for row in rows] == [None, 130, 70, None]
    assert "shares no seed and validation step with bf16" in Page(write_report(folders, tmp_path / "page.html")).text


# -------------------------------------------------------------------------------------------------------------- errors
def test_refusals_say_rule_received_and_remedy(tmp_path):
    folder = fake_run(tmp_path, "bf16")
    other = fake_run(tmp_path / "again", "bf16")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="at least one run folder; got none; pass"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(FileNotFoundError, match="must exist; got .*nowhere; pass"):
        summarise([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="must hold one of summary.json, .*; got .*empty, which holds none; pass"):
        summarise([tmp_path / "empty"])
    with pytest.raises(ValueError, match="baseline must be one of .*; got 'fp8'; choose from bf16"):
        summarise([folder], baseline="fp8")
    with pytest.raises(ValueError, match="one run a seed.*; got two runs of bf16 with seed 0.*; leave one out"):
        summarise([folder, other])
    with pytest.raises(ValueError, match="a report is one file; got the folder"):
        write_report([folder], tmp_path)
    assert len(summarise([folder, folder])) == 1


def test_find_runs(runs, tmp_path):
    assert find_runs(runs[0]) == [runs[0]]
    assert find_runs(runs[0].parent) == sorted(runs)
    both = fake_run(tmp_path / "deep", "bf16", 7)
    inner = fake_run(both, "nvfp4", 7)
    assert find_runs(both) == [both, inner]
    (tmp_path / "deep" / "run.toml").write_text("")  # the user's own run file, beside the runs
    assert find_runs(tmp_path / "deep") == [both]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds none"):
        find_runs(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="must exist"):
        find_runs(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------------- small tools
def test_short_names_are_short_and_distinct():
    short = short_names(MODULES)
    assert short[0] == "0 in_proj" and short[-1] == "11 out_proj" and len(set(short)) == len(MODULES)
    llama = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj"]
    assert short_names(llama) == ["0 self_attn.q_proj", "0 mlp.up_proj", "10 mlp.up_proj"]
    assert short_names(["l.3.m.in_proj", "l.3.m.out_proj"]) == ["3 in_proj", "3 out_proj"]
    assert short_names(["a.b"]) == ["a.b"] and short_names([]) == []
    assert short_names(["a.b", "a.b.c"]) == ["b", "b.c"]
    assert sorted(["l.10.b", "l.9.b", "l.a"], key=natural) == ["l.9.b", "l.10.b", "l.a"]


def test_smooth_keeps_length_level_and_ends():
    assert smooth([]) == [] and smooth([3.0]) == [3.0]
    line = [float(i) for i in range(50)]
    assert smooth(line) == pytest.approx(line)


@pytest.mark.parametrize(("palette", "paper"), [(LIGHT, "#ffffff"), (DARK, "#15181d")])
def test_colours_stand_out_from_the_page(palette, paper):
    def luminance(value):
        parts = [int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(
            w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    for value in palette:
        dark, light = sorted((luminance(value), luminance(paper)))
        assert (light + 0.05) / (dark + 0.05) >= 3, value


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_draws_in_a_browser_without_errors(runs, tmp_path):
    path = write_report(runs[::3], tmp_path / "page.html")
    done = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--enable-logging=stderr",
            "--v=0",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        pytest.skip(f"Chromium does not start here: {done.stderr[-200:]}")
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert done.stdout.count('class="main-svg"') >= 4
    assert done.stdout.count('class="trace scatter') >= 12
