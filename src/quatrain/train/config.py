"""RUN.toml: everything one training run needs, as frozen values; strict, with `--set` overrides, and back to TOML.

Paths are those of the working folder, as on the command line; "~" is the home folder.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quatrain.data import DataConfig
from quatrain.files import expand
from quatrain.recipe import OptimizerRows, Phase, Recipe, operands_of
from quatrain.train import tables
from quatrain.train.schedule import ScheduleConfig, phase_steps, wsd

DTYPES = ("bfloat16", "float32")
PRECISIONS = ("forward", "both")

LARGEST_SEED = 2**63 - 1
MOST_THREADS = 1024
LARGEST_BATCH = 2**31  # tokens of a micro-batch

# Of these pairs a run names exactly one; an override of one replaces the other.
_EITHER = (("train", "tokens", "steps"), ("model", "preset", "path"))


@dataclass(frozen=True)
class ModelConfig:
    """[model]: a preset of quatrain.models, or the folder of a transformers config.

    Args:
        preset: a name, for example "tiny-hybrid".
        path: a folder with the config.json of a transformers model; weights are made anew from the seed.
    """

    preset: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        _exactly_one("model", preset=self.preset, path=self.path)


@dataclass(frozen=True)
class TrainConfig:
    """[train]: length, batch, precision and place of a run.

    Args:
        tokens: length in tokens; whole steps that fit are made. Or:
        steps: length in optimizer steps.
        batch_size: sequences of one micro-batch.
        accumulate: micro-batches of one step; the loss is the mean over all tokens of the step.
        seed: of the initial weights, the data order, torch's generators and the rounding.
        dtype: "bfloat16" (autocast, fp32 master weights) | "float32" (no autocast).
        device: "auto" | "cpu" | "cuda" | "cuda:N".
        threads: CPU threads; 0 leaves torch's default.
        clip: largest gradient norm; 0 is no clipping, the norm is recorded all the same.
        log_every: steps between two training records.
    """

    tokens: int | None = None
    steps: int | None = None
    batch_size: int = 8
    accumulate: int = 1
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "auto"
    threads: int = 0
    clip: float = 1.0
    log_every: int = 10

    def __post_init__(self) -> None:
        _exactly_one("train", tokens=self.tokens, steps=self.steps)
        for key in ("tokens", "steps", "batch_size", "accumulate", "log_every"):
            value = getattr(self, key)
            _require(value is None or value >= 1, f"train.{key} must be at least 1", value)
        _require(self.clip >= 0, "train.clip must not be negative", self.clip)
        _require(0 <= self.seed <= LARGEST_SEED, "train.seed must lie from 0 to 2^63 - 1", self.seed)
        _require(
            0 <= self.threads <= MOST_THREADS,
            f"train.threads must lie from 1 to {MOST_THREADS}, or be 0 for torch's default",
            self.threads,
        )
        _one_of("train.dtype", self.dtype, DTYPES)
        _require(
            re.fullmatch("auto|cpu|cuda(:[0-9]{1,3})?", self.device) is not None,
            'train.device must be "auto", "cpu", "cuda" or "cuda:N"',
            self.device,
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: on fp32 master weights. Keys that are absent here are the recipe's, or else those of fp32 AdamW.

    Args:
        name: "adamw" (arXiv 1711.05101), "root" or "muon"; these update hidden matrices with steps the size of AdamW's
            ("match_rms_adamw") and leave other tensors to AdamW.
        lr: peak learning rate.
        betas: decay rates of AdamW's two moments.
        eps: added to the root of the second moment.
        weight_decay: of tensors with at least 2 dimensions; norms, biases and A_log, D, dt_bias have none.
        beta: decay rate of Root's and Muon's momentum.
        state, embeddings, tile, faithful, operands, coefficients, split, clip, momentum: as in a recipe's [optimizer];
            operands are "bf16" or "nvfp4" here, and split = "none" undoes the recipe's.
    """

    name: str | None = None
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    beta: float = 0.95
    state: str | None = None
    embeddings: str | None = None
    tile: int | None = None
    faithful: bool | None = None
    operands: str | None = None
    coefficients: str | None = None
    split: str | None = None
    clip: float | None = None
    momentum: str | None = None

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optimizer.lr must be positive", self.lr)
        _require(all(0 <= b < 1 for b in self.betas), "optimizer.betas must lie from 0 to under 1", list(self.betas))
        _require(0 <= self.beta < 1, "optimizer.beta must lie from 0 to under 1", self.beta)
        _require(self.eps > 0, "optimizer.eps must be positive", self.eps)
        _require(self.weight_decay >= 0, "optimizer.weight_decay must not be negative", self.weight_decay)
        self.rows(OptimizerRows())

    def rows(self, recipe: OptimizerRows) -> OptimizerRows:
        """How state and products are kept: this table's keys, then the recipe's.

        Where this table chooses AdamW, what the recipe says of Root and Muon is left out.

        Raises:
            ValueError: a value that is not served, or keys that do not go together.
        """
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(OptimizerRows)}
        own = {key: value for key, value in own.items() if value is not None}
        if "operands" in own:
            own["operands"] = operands_of(own["operands"])
        if self.split == "none":
            own["split"] = None
        return dataclasses.replace(recipe.for_adamw() if self.name == "adamw" else recipe, **own)


@dataclass(frozen=True)
class ValidationConfig:
    """[validation]: `every` steps (0: only first and last) over `sequences` held-out sequences."""

    every: int = 20
    sequences: int = 32

    def __post_init__(self) -> None:
        _require(self.every >= 0, "validation.every must not be negative (0: only first and last)", self.every)
        _require(self.sequences >= 1, "validation.sequences must be at least 1", self.sequences)


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint]: `every` steps (0: only at the end and on Ctrl-C), of which the newest `keep` stay."""

    every: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        _require(self.every >= 0, "checkpoint.every must not be negative (0: only at the end)", self.every)
        _require(self.keep >= 1, "checkpoint.keep must be at least 1", self.keep)


@dataclass(frozen=True)
class StepConfig:
    """{ step = N }: a point of the run given in optimizer steps."""

    step: int


@dataclass(frozen=True)
class PhaseConfig:
    """[[phase]]: from `at` on, the forward GEMMs or all GEMMs run in BF16; overrides the recipe's phases.

    Args:
        at: a fraction of the run's tokens from 0 to under 1, or { step = N }.
        bf16: "forward" | "both".
    """

    at: float | StepConfig
    bf16: str

    def __post_init__(self) -> None:
        start = self.at.step if isinstance(self.at, StepConfig) else self.at
        fits = start >= 0 if isinstance(self.at, StepConfig) else 0 <= start < 1
        _require(fits, "phase.at must be a fraction from 0 to under 1, or { step = N }", start)
        _one_of("phase.bf16", self.bf16, PRECISIONS)

    def resolve(self) -> Phase:
        """The same as a recipe's phase."""
        if isinstance(self.at, StepConfig):
            return Phase(at=None, step=self.at.step, bf16=self.bf16)
        return Phase(at=self.at, step=None, bf16=self.bf16)


@dataclass(frozen=True)
class RunConfig:
    """A whole run: RUN.toml with every default filled in.

    Args:
        recipe: a name of the library, or the path of a recipe TOML.
        out: the run's folder.
        model, data, train, optimizer, schedule, validation, checkpoint: the tables of the file.
        phase: precision phases in place of the recipe's.

    Raises:
        ValueError: a run shorter than one step, or a schedule or phase that does not fit into it.
    """

    model: ModelConfig
    train: TrainConfig
    recipe: str = "bf16"
    out: str = "runs/run"
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    phase: tuple[PhaseConfig, ...] = ()

    def __post_init__(self) -> None:
        _require(bool(self.out.strip()), "out must name a folder", self.out)
        _require(
            self.train.batch_size * self.data.sequence_length < LARGEST_BATCH,
            "train.batch_size x data.sequence_length must stay under 2^31 tokens; lower one, raise train.accumulate",
            self.train.batch_size * self.data.sequence_length,
        )
        wsd(self.schedule, self.optimizer.lr, self.total_steps)
        phase_steps([phase.resolve() for phase in self.phase], self.total_steps)

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens of one optimizer step."""
        return self.train.batch_size * self.train.accumulate * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run: those given, or the whole ones that fit into the tokens given."""
        if self.train.steps is not None:
            return self.train.steps
        tokens = self.train.tokens or 0
        if tokens < self.tokens_per_step:
            raise ValueError(
                f"train.tokens = {tokens} is less than one step of {self.tokens_per_step} tokens (batch_size "
                f"{self.train.batch_size} x accumulate {self.train.accumulate} x sequence_length "
                f"{self.data.sequence_length}); ask for more tokens or make the batch smaller"
            )
        return tokens // self.tokens_per_step

    def phases_of(self, recipe: Recipe) -> tuple[tuple[int, str], ...]:
        """The phases as (first step, "forward" | "both"): the run's own, or else the recipe's.

        Raises:
            ValueError: one begins after the run's end, or two begin at one step.
        """
        return phase_steps([phase.resolve() for phase in self.phase] or recipe.phases, self.total_steps)

    def to_toml(self) -> str:
        """TOML that `load_run` turns back into an equal value."""
        return tables.dump(self)


def load_run(source: str | Path, overrides: Sequence[str] = (), *, recipe: str | None = None) -> RunConfig:
    """Read a run file.

    Args:
        source: a path, or TOML text (any string with a line break or an "=").
        overrides: "key=value" texts (`--set`): dotted key, TOML value or bare string. Overriding one of
            train.tokens | train.steps or model.preset | model.path replaces the other.
        recipe: in place of the file's recipe (`--recipe`).

    Raises:
        FileNotFoundError: no such file.
        ValueError: no TOML, an unknown key, a wrong type or a value outside its range; the key is named.
    """
    name, text = _read(source)
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not valid TOML: {error}") from error
    given = {text.partition("=")[0].strip() for text in overrides}
    for section, first, second in _EITHER:
        replaced = {f"{section}.{first}": second, f"{section}.{second}": first}
        for key in given & set(replaced):
            if f"{section}.{replaced[key]}" not in given and isinstance(table.get(section), dict):
                table[section].pop(replaced[key], None)
    tables.set_keys(table, overrides)
    if recipe is not None:
        table["recipe"] = recipe
    try:
        return tables.build(RunConfig, table)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def replace_in(config: RunConfig, **changes: Any) -> RunConfig:
    """The configuration with other values: `replace_in(config, out="runs/b", train__seed=1)`."""
    for path, value in changes.items():
        section, _, key = path.partition("__")
        inner = dataclasses.replace(getattr(config, section), **{key: value}) if key else value
        config = dataclasses.replace(config, **{section: inner})
    return config


def _read(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and ("\n" in source or ("=" in source and not Path(source).exists())):
        return "the run", source
    path = expand(source, "the run file")
    if not path.is_file():
        raise FileNotFoundError(f"the run file {path} does not exist; give the path of a RUN.toml")
    try:
        return str(path), path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); give the path of a RUN.toml") from error


def _exactly_one(section: str, **values: object) -> None:
    given = [key for key, value in values.items() if value is not None]
    if len(given) != 1:
        names = " or ".join(f"{section}.{key}" for key in values)
        raise ValueError(f"give exactly one of {names}; got {' and '.join(given) or 'neither'}")


def _one_of(key: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{key} must be one of {', '.join(valid)}; got {value!r}")


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{rule}; got {value!r}")
