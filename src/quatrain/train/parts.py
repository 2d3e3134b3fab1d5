"""What a run is made of: the data, the model with its recipe applied, the device; and the losses they give."""

from __future__ import annotations

import copy
import json
import math
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quatrain.data import Corpus, prepare
from quatrain.models import build, build_from_path
from quatrain.recipe import Recipe, Report, apply
from quatrain.telemetry import operand_snr, saved_bytes
from quatrain.train import records
from quatrain.train.config import RunConfig
from quatrain.train.optimizer import optimizer_rows
from quatrain.train.process import quiet_transformers
from quatrain.train.progress import Display
from quatrain.train.savings import linear_bytes_per_element


@dataclass(frozen=True)
class Parts:
    """A run's model and data, ready to train.

    Args:
        config: the run.
        corpus: packed training and validation sequences.
        model: fp32 weights on the device, converted by the recipe.
        report: what the recipe converted and kept.
        device: where the model is.
        assets: files of every checkpoint besides the weights: the model's config.json and the tokenizer.
    """

    config: RunConfig
    corpus: Corpus
    model: nn.Module
    report: Report
    device: torch.device
    assets: dict[str, bytes]

    def train_batch(self, index: int) -> Tensor:
        """Micro-batch `index` of the run, [batch_size, sequence_length + 1] token ids on the device."""
        settings = self.config.train
        return self.corpus.train.batch(index, settings.batch_size, seed=settings.seed).to(self.device)

    def loss(
        self,
        batch: Tensor,  # [B, T + 1] token ids
    ) -> Tensor:
        """Mean cross-entropy of the next token in nats, in fp32 whatever the forward's precision."""
        settings = self.config.train
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            logits = self.model(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over the first `validation.sequences` held-out sequences (or all there are), in evaluation mode."""
        self.model.eval()
        sequences = min(self.config.validation.sequences, self.corpus.val.windows)
        left, losses = sequences, []
        for index in range(math.ceil(sequences / self.config.train.batch_size)):
            batch = self.corpus.val.batch(index, self.config.train.batch_size)[:left].to(self.device)
            losses.append(self.loss(batch) * len(batch))
            left -= len(batch)
        return math.fsum(torch.stack(losses).tolist()) / sequences

    def measure(self) -> dict[str, Any]:
        """Signal-to-noise of every quantized operand in dB (None if it is all zero), and what a training forward keeps.

        Both on the run's first micro-batch. `saved_bytes` is all that the loss's graph holds but parameters and codes,
        attention, scan and logits included; `saved_bytes_per_element` is what the linears hold of their inputs.
        """
        batch = self.train_batch(0)
        self.model.train()
        kept = saved_bytes(lambda: self.loss(batch), self.model)["bytes"]
        per_element = linear_bytes_per_element(self.model, lambda: self.loss(batch))
        found = operand_snr(self.model, lambda: self.loss(batch)) if self.report.converted else {}
        snr = {
            name: {row: db if math.isfinite(db) else None for row, db in rows.items()} for name, rows in found.items()
        }
        return {"saved_bytes": kept, "saved_bytes_per_element": per_element, "snr": snr}

    def ground(self) -> dict[str, Any]:
        """What, beside the configuration, decides the last bits of a run."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return {
            "device": name,
            "threads": torch.get_num_threads(),
            "versions": records.versions(),
            "data": self.corpus.fingerprint,
        }


def assemble(config: RunConfig, recipe: Recipe, display: Display) -> Parts:
    """Prepare the data, build the model on its device and apply the recipe.

    Raises:
        ValueError: no such device, a vocabulary or a sequence that does not fit the model, or what `apply` refuses.
    """
    device = pick_device(config.train.device)
    corpus = prepare(config.data, progress=display.preparing)
    model = _model(config, corpus.vocab_size)
    _check_fit(config, corpus.vocab_size, model)
    assets = _assets(model, corpus)
    report = apply(model.to(device), recipe, seed=config.train.seed)
    display.say(report.summary())
    if corpus.val.windows < config.validation.sequences:
        display.say(f"the held-out text has {corpus.val.windows} sequences; validation uses all of them")
    return Parts(config, corpus, model, report, device, assets)


def rehearse(config: RunConfig, recipe: Recipe) -> None:
    """Whatever can be refused without the data: device, optimizer, model, the recipe on a model without weights.

    Raises:
        ValueError: as `assemble`.
    """
    pick_device(config.train.device)
    optimizer_rows(config, recipe.optimizer)
    vocabulary = config.data.vocab_size if config.data.tokenizer == "bpe" else None
    with torch.device("meta"), warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")  # the run itself will say it
        model = _model(config, vocabulary)
        _check_fit(config, 0, model)  # how many tokens there are is known only later
        apply(model, recipe, seed=config.train.seed)


def _model(config: RunConfig, vocab_size: int | None) -> nn.Module:
    """The run's model before the recipe; `vocab_size` counts for presets."""
    if config.model.preset is not None:
        return build(config.model.preset, vocab_size=vocab_size, seed=config.train.seed)
    return build_from_path(config.model.path or "", seed=config.train.seed)


def pick_device(name: str) -> torch.device:
    """The device that train.device names; "auto" is CUDA where there is one.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f'train.device = "{name}", but torch sees {count} CUDA devices; use "auto" or "cpu"')
    return device


def _check_fit(config: RunConfig, vocab_size: int, model: Any) -> None:
    shape = model.config.get_text_config()
    if vocab_size > shape.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, the model's vocabulary {shape.vocab_size}; "
            "lower data.vocab_size or give a model with a larger vocabulary"
        )
    positions = getattr(shape, "max_position_embeddings", None)
    if positions is not None and config.data.sequence_length > positions:
        raise ValueError(
            f"data.sequence_length is {config.data.sequence_length}, the model has {positions} positions; "
            "shorten the sequences or raise max_position_embeddings in the model's config.json"
        )


def _assets(model: nn.Module, corpus: Corpus) -> dict[str, bytes]:
    """config.json and the tokenizer as transformers writes them beside a model's weights."""
    shape: Any = copy.deepcopy(model.config)
    shape.architectures = [type(model).__name__]
    shape.dtype = "float32"
    # The corpus ends documents with this token and begins them with none, whatever the model's config assumed.
    shape.eos_token_id, shape.bos_token_id, shape.pad_token_id = corpus.end_of_document, None, None
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": corpus.tokenizer.id_to_token(corpus.end_of_document),
    }
    files["tokenizer.json"] = corpus.tokenizer.to_str().encode()
    files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode()
    return files
