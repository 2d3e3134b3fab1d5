"""The errors of quantized attention stand as the benchmark's bounds say, on operands like those of a trained model."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quatrain.train import train
from tiny_run import make_run

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_attention_error", FOLDER / "attention_error.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def made_case(script, scale):
    """Grouped queries, keys and values with a mean, neighbouring values alike."""
    b, h, g, t, d = 2, 2, 1, 128, 64
    q, k = torch.randn(b, h, t, d), torch.randn(b, g, t, d) + torch.randn(1, g, 1, d)
    v = 0.5 * torch.randn(b, g, t, d) + torch.randn(b, g, t // 8, d).repeat_interleave(8, 2)
    do = 1e-4 * torch.randn(b, h, t, d)
    return script.Case(*(x.bfloat16() for x in (scale * q, k, v, do)))


def test_bounds_hold_and_can_fail(script):
    found = script.measure_all([made_case(script, 0.7), made_case(script, 1.2)], "auto")
    assert {row["key"]: row["met"] for row in script.bounds(found, "x")} == {
        "x_vs_fp32": True, "x_vs_unsmoothed": True, "x_biased_vs_unsmoothed": True, "x_dov_control": True,
    }  # fmt: skip
    # The simulation shares no arithmetic with the library but the quantizer.
    for ours, other in zip(script.mean(found["smooth"].fp32), found["simulated"].errors, strict=True):
        assert other == pytest.approx(ours, rel=0.02)
    _, dq, dk, _ = found["smooth"].errors
    for name in ("view_decoded", "view_square", "recipe"):  # what the default is better than, and what noise costs
        assert found[name].errors[1] > 1.05 * dq and found[name].errors[2] > 1.05 * dk
    assert max(script.ratios(found["46"].errors, found["smooth"].errors)) < 0.97
    worse = script.Found([[1.06 * e for e in errors] for errors in found["46"].fp32], found["46"].fp32)
    swapped = {"recipe": found["recipe_unsmoothed"], "biased_recipe": found["biased_unsmoothed"]}
    rows = script.bounds(found | swapped | {"46": worse, "dov": found["pv"]}, "x")
    assert [row["met"] for row in rows] == [False] * 4 and rows[0]["of"] == "46"


def test_records_a_trained_model(tmp_path, monkeypatch, script):
    run = make_run(tmp_path)
    train(run, progress=False)
    monkeypatch.setattr(script.records, "RESULTS", tmp_path / "results")
    argv = ["attention_error.py", "--model", run.out, "--text", run.data.path, "--length", "16", "--batch", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    script.main()
    record = json.loads((tmp_path / "results" / "attention_error.json").read_text())
    assert record["shape"] == "B2 H2 T16 D16" and record["model"] == "out, step-00000006"
    assert {row["repeats"] for row in record["rows"] if "errors" in row} == {2}
    rows = {row["key"]: row for row in record["rows"]}
    assert 0 < rows["attention_error_smooth"]["errors"]["bf16"]["dK"] < 1
    assert rows["attention_error_dov"]["errors"]["expected"]["dQ"] == 0.339
    assert isinstance(rows["attention_error_vs_fp32"]["met"], bool)


def test_what_is_recorded_is_the_models_own(script):
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1))
    batch = torch.randint(0, 40, (2, 25))
    (case,) = script.record_cases(model, batch)
    assert case.q.shape == case.do.shape == (2, 2, 24, 16) and case.k.shape == case.v.shape == (2, 1, 24, 16)
    # The value projection's gradient is dV times what it reads.
    attention = model.model.layers[0].self_attn
    dv = script.exact(case)[3].transpose(1, 2).flatten(2).flatten(0, 1)
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(batch[:, :-1])).flatten(0, 1)
    assert torch.allclose(dv.T.float() @ x, attention.v_proj.weight.grad, rtol=0.05, atol=1e-4)
    assert attention.v_proj.weight.grad.abs().max() > 1e-3
