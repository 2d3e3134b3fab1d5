"""Models as data: shapes of the papers' models, large and scaled down, built by ``transformers`` with random weights.

A preset is a TOML file in ``presets/``: what it is, where its numbers come from, the ``transformers`` model type and
the fields of that type's configuration. Nothing here knows about quantization; ``quatrain.apply`` converts afterwards.
The Mamba-2 mixers of a Nemotron-H scan in matrix products (``quatrain.models.mamba``); its checkpoints are unchanged.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from quatrain.files import expand

__all__ = ["Preset", "build", "build_from_path", "presets"]


@dataclass(frozen=True)
class Preset:
    """The shape of one model.

    name: what `build` takes. description: one line. source: where each number comes from, and what was chosen where
    sources differ or are silent. architecture: the `transformers` model type. parameters: the number of parameters
    at the preset's own vocabulary. config: the fields given to that type's configuration; others keep its defaults.
    """

    name: str
    description: str
    source: str
    architecture: str
    parameters: int
    config: Mapping[str, Any] = field(hash=False)


def presets() -> dict[str, Preset]:
    """Every preset that ships with the package, by name, in alphabetical order."""
    found = {}
    for entry in sorted(files(__name__).joinpath("presets").iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            name = entry.name.removesuffix(".toml")
            table = tomllib.loads(entry.read_text(encoding="utf-8"))
            table["config"] = MappingProxyType(table["config"])
            found[name] = Preset(name=name, **table)
    return found


def build(
    preset: str, *, vocab_size: int | None = None, seed: int = 0, max_positions: int | None = None
) -> torch.nn.Module:
    """A causal language model of the preset's shape with random fp32 weights.

    preset: a name of `presets()`. vocab_size, max_positions: tokens and positions, in place of the preset's own.
    seed: the same seed gives the same bits on one version of torch and transformers; the global generators of random
    numbers are left as they were found. The model lies on the CPU, or on the meta device (no memory, no weights)
    inside ``with torch.device("meta")``; it is in training mode and keeps no generation cache (`use_cache = False`).

    Raises ValueError for an unknown preset or a size that is not positive.
    """
    known = presets()
    if preset not in known:
        raise ValueError(
            f"a model preset is one of {', '.join(known)}; received {preset!r}; "
            "choose one of these, or give a folder that holds a config.json as model.path"
        )
    chosen = known[preset]
    config = AutoConfig.for_model(
        chosen.architecture, **dict(chosen.config), pad_token_id=None, bos_token_id=None, eos_token_id=None
    )
    return _random_model(config, vocab_size, seed, max_positions, preset)


def build_from_path(
    folder: str | Path, *, vocab_size: int | None = None, seed: int = 0, max_positions: int | None = None
) -> torch.nn.Module:
    """A causal language model of the shape that `folder`/config.json describes, with random fp32 weights.

    Only config.json is read: weights beside it are not, no code from the folder is run and no network is used. The
    other arguments and the result are those of `build`.

    Raises FileNotFoundError without a config.json, ValueError when `transformers` cannot make a causal language model
    of it.
    """
    path = expand(folder, "model.path")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"model.path is a folder that holds a transformers config.json; received {str(folder)!r}, "
            "where there is none; give such a folder, or name a preset as model.preset"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ValueError(
            f"config.json must describe a model type that this version of transformers holds; received "
            f"{str(path / 'config.json')!r}: {_first_line(error)}; correct the file, or update transformers"
        ) from error
    return _random_model(config, vocab_size, seed, max_positions, str(folder))


def _random_model(
    config: PreTrainedConfig, vocab_size: int | None, seed: int, max_positions: int | None, what: str
) -> torch.nn.Module:
    """Instantiate `config` (named `what` in errors) with weights drawn from `seed` alone."""
    text = config.get_text_config()
    for key, label, value in (
        ("vocab_size", "vocab_size", vocab_size),
        ("max_position_embeddings", "max_positions", max_positions),
    ):
        if value is None:
            continue
        if value < 1:
            raise ValueError(f"{label} is at least 1; received {value}; leave it out to keep the model's own")
        setattr(text, key, value)
    # Training needs no cache, and transformers fills one in every training forward unless told otherwise.
    text.use_cache = False
    device = "meta" if torch.get_default_device().type == "meta" else "cpu"
    state = torch.random.get_rng_state()
    try:
        # The CPU generator alone: torch.manual_seed would also seed the accelerators.
        torch.random.default_generator.manual_seed(seed)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"a model to train is a causal language model; received {what!r} of type {config.model_type!r}: "
            f"{_first_line(error)}; choose another model"
        ) from error
    finally:
        torch.random.set_rng_state(state)
    if config.model_type == "nemotron_h":
        from quatrain.models.mamba import use_ssd_scan  # takes transformers' modeling code, which others need not load

        use_ssd_scan(model)
    trainable: torch.nn.Module = model.train()
    return trainable


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, which for transformers may run to a page."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
