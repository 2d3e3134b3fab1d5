"""A run small enough for tests: a minute Llama on a few kB of text, all in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from quatrain.train import RunConfig, load_run

# Every operand quantized, with stochastic rounding, so that a lost rounding clock changes the losses.
QUANTIZED = """
name = "tiny"
[linear]
fprop.input = { format = "nvfp4" }
fprop.weight = { format = "nvfp4", block = [16, 16] }
dgrad.grad = { format = "nvfp4", rounding = "stochastic" }
dgrad.weight = { format = "nvfp4", block = [16, 16] }
wgrad.grad = { format = "nvfp4", rounding = "stochastic", transform = "hadamard" }
wgrad.input = { format = "nvfp4", transform = "hadamard" }
"""

TIMING = ("tokens_per_s",)


def make_run(folder: Path, *overrides: str, **model: Any) -> RunConfig:
    """A run of 6 steps under `folder`; `model` changes the Llama's config."""
    shape = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    LlamaConfig(**(shape | model)).save_pretrained(folder / "model")
    text = folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    for index in range(24):
        words = " ".join(f"word{(index * 7 + k * k) % 40} is not word{k % 11}," for k in range(60))
        (text / f"{index}.txt").write_text(words)
    (folder / "tiny.toml").write_text(QUANTIZED)
    run = f"""
out = "{folder / "out"}"
[model]
path = "{folder / "model"}"
[data]
path = "{text}"
vocab_size = 300
sequence_length = 16
validation_fraction = 0.2
cache = "{folder / "cache"}"
[train]
steps = 6
batch_size = 2
dtype = "float32"
device = "cpu"
threads = 1
log_every = 1
[validation]
every = 2
sequences = 4
[checkpoint]
every = 2
"""
    return load_run(run, overrides)


def history(out: Path | str) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without the timing."""
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]
