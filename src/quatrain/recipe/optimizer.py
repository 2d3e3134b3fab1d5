"""[optimizer] of a recipe: how the optimizer's state and products are kept; absent rows are fp32 and BF16."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from quatrain.formats import QuantSpec
from quatrain.optim.coefficients import coefficients_for

NAMES = ("adamw", "root", "muon")
STATES = ("fp32", "bf16", "nvfp4")
MOMENTA = ("bf16", "fp32", "nvfp4")
MATRIX_OPTIONS = ("operands", "coefficients", "split", "clip", "momentum")  # of Root and Muon alone
_OWN: dict[str, dict[str, Any]] = {  # what None stands for
    "root": {"coefficients": "fitted", "clip": 0.99},
    "muon": {"coefficients": "jordan", "clip": 1.0},
}


@dataclass(frozen=True)
class OptimizerRows:
    """Departures from AdamW with fp32 moments. A run file's own [optimizer] keys come before these.

    Attributes:
        name: "adamw", "root" or "muon"; None leaves it to the run.
        state: how AdamW keeps its moments: "fp32", "bf16" or "nvfp4" (also for what Root and Muon leave to it).
        embeddings: the same for embeddings and output head.
        tile: elements that share one mean of the second moment in NVFP4.
        faithful: the paper's bare pipeline for NVFP4 moments, without guard, deadband and energy match.
        operands: what Newton-Schulz products read; None is BF16.
        coefficients: a set's name; None is the optimizer's own ("fitted" for Root, "jordan" for Muon).
        split: None or "diagonal".
        clip: quantile at which a momentum's entries are clipped, 1.0 for none; None is the optimizer's own.
        momentum: how the momentum of Root and Muon is kept: "bf16", "fp32" or "nvfp4".

    Raises:
        ValueError: a value that is not served, an option of Root and Muon with AdamW, or operands beside coefficients
            that they do not allow.
    """

    name: str | None = None
    state: str = "fp32"
    embeddings: str = "fp32"
    tile: int = 128
    faithful: bool = False
    operands: QuantSpec | None = None
    coefficients: str | None = None
    split: str | None = None
    clip: float | None = None
    momentum: str = "bf16"

    def __post_init__(self) -> None:
        _one_of("name", self.name, (None, *NAMES))
        _one_of("state", self.state, STATES)
        _one_of("embeddings", self.embeddings, STATES)
        _one_of("momentum", self.momentum, MOMENTA)
        _one_of("split", self.split, (None, "diagonal"))
        if self.tile not in (16, 32, 64, 128, 256):
            raise ValueError(f"optimizer.tile must be a power of two from 16 to 256, received {self.tile!r}")
        if self.clip is not None and not 0.0 < self.clip <= 1.0:
            raise ValueError(f"optimizer.clip must be a quantile in (0, 1], 1.0 for none, received {self.clip!r}")
        if self.name == "adamw":
            self._refuse_matrix_options()
        if self.coefficients is not None and not self.coefficients.endswith(".toml"):
            self._allow(self.coefficients, self.split or "diagonal")  # the run may still add that

    def _refuse_matrix_options(self) -> None:
        plain = OptimizerRows()
        for key in MATRIX_OPTIONS:
            if getattr(self, key) != getattr(plain, key):
                raise ValueError(
                    f'optimizer.{key} is an option of Root and Muon, received it with name = "adamw"; '
                    'leave it out, or set optimizer.name = "root"'
                )

    def check_coefficients(self) -> None:
        """Whether the operands allow the coefficients, the optimizer's own or a table's included.

        Raises:
            ValueError: they do not, or there is no such set, or a file is no table of any.
            FileNotFoundError: there is no such file.
        """
        name = self.resolved().coefficients
        if name is not None:
            self._allow(name, self.split)

    def _allow(self, coefficients: str, split: str | None) -> None:
        operands = "bf16" if self.operands is None else self.operands.format
        try:
            coefficients_for(coefficients, 1024, 1024, steps=5, operands=operands, split=split)
        except ValueError as error:
            raise ValueError(f"optimizer.coefficients: {error}") from error

    def resolved(self) -> OptimizerRows:
        """The same with the optimizer's own coefficients and clip in place of None, where a name says which."""
        absent = {key: value for key, value in _OWN.get(self.name or "", {}).items() if getattr(self, key) is None}
        return replace(self, **absent) if absent else self

    def for_adamw(self) -> OptimizerRows:
        """What is left of them for AdamW: without the options of Root and Muon."""
        plain = OptimizerRows()
        return replace(self, name="adamw", **{key: getattr(plain, key) for key in MATRIX_OPTIONS})

    def to_dict(self) -> dict[str, Any]:
        """The keys that depart, as in TOML; empty for the plain optimizer."""
        plain = OptimizerRows()
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found = {key: value for key, value in found.items() if value != getattr(plain, key)}
        return found | ({"operands": self.operands.to_dict()} if self.operands is not None else {})


def optimizer_from_dict(data: dict[str, Any]) -> OptimizerRows:
    """Rows from a table whose keys have been checked.

    Raises:
        ValueError: a value of another type, or one that is not served.
    """
    kinds: dict[str, Any] = {"tile": int, "faithful": bool, "clip": (int, float)}
    for key, value in data.items():
        kind = kinds.get(key, str)
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if key != "operands" and not fits:
            wanted = {int: "whole number", bool: "true or false", str: "text"}.get(kind, "number")
            raise ValueError(f"optimizer.{key} must be a {wanted}, received {value!r}".replace("a true", "true"))
    return OptimizerRows(**{**data, "operands": operands_of(data.get("operands"))})


def operands_of(row: Any) -> QuantSpec | None:
    """Operands of Newton-Schulz from a row: absent or "bf16" (None), "nvfp4" (with four-over-six), or a spec's table.

    Raises:
        ValueError: anything else.
    """
    if row is None or row == "bf16":
        return None
    if row == "nvfp4":
        return QuantSpec("nvfp4", scale="four-over-six")
    if not isinstance(row, dict):
        raise ValueError(f'optimizer.operands must be "bf16", "nvfp4" or a table with a format, received {row!r}')
    try:
        return QuantSpec.from_dict(row)
    except (ValueError, TypeError) as error:
        raise ValueError(f"optimizer.operands: {error}") from error


def _one_of(key: str, value: str | None, valid: tuple[str | None, ...]) -> None:
    if value not in valid:
        names = ", ".join(str(v) for v in valid if v is not None)
        raise ValueError(f"optimizer.{key} must be one of {names}, received {value!r}")
