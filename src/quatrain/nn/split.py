"""The `split` row of a linear: which part of its products stays out of the quantizer."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

KINDS = ("svd", "mean")
MODES = ("tangent", "onesided", "core", "naive")
BASES = ("weight", "activation")
STATES = ("rotate", "reset")
_OF_REALIGNMENT = ("every", "state")
_TYPES: dict[str, tuple[Any, str]] = {
    "rank": (int, "a whole number"),
    "every": (int, "a whole number"),
    "beta": ((int, float), "a number"),
    "parametrize": (bool, "true or false"),
}
RANK_MULTIPLE = 16


@dataclass(frozen=True)
class Split:
    """What is computed in high precision beside the quantized products.

    "svd": W = W_res + beta L2 L1, with L2 L1 the principal subspace and only W_res quantized. "mean": the token means
    of X and dY are taken out before quantizing and their products added back; it has no further options.

    Attributes:
        kind: "svd" or "mean".
        rank: of L2 L1, a multiple of 16. A linear takes at most half of its smaller side, in multiples of 16; one with
            a side under 32 is quantized without the split.
        beta: scales the branch, and so its effective learning rate.
        mode: what W_res learns from G = dY^T X: "tangent" (I - P2) G (I - P1), "onesided" G (I - P1) with L1 fixed
            between realignments, "core" G - P2 G P1 with the factors confined to their spans, "naive" G.
        basis: L1 spans the principal rows of W ("weight") or the principal directions of X ("activation", measured in
            the step before a realignment, the first one after step 1).
        every: optimizer steps between realignments; 0 for none.
        state: what a realignment does to the moments of L1 and L2: "rotate" or "reset".
        parametrize: keep W_res, L1 and L2 as parameters; false keeps one dense W and splits it for computing only,
            anew after each optimizer step (then there is nothing to realign).

    Raises:
        ValueError: a value that is not served.

    Sources: Full-Stack FP4 (Ding et al., 2026), LoRA-SVD; arXiv 2509.00404 (Metis); arXiv 2603.10444 (Averis).
    """

    kind: str = "svd"
    rank: int = 32
    beta: float = 1.0
    mode: str = "tangent"
    basis: str = "weight"
    every: int = 2048
    state: str = "rotate"
    parametrize: bool = True

    def __post_init__(self) -> None:
        for key, valid in (("kind", KINDS), ("mode", MODES), ("basis", BASES), ("state", STATES)):
            if getattr(self, key) not in valid:
                raise ValueError(f"split.{key} must be one of {', '.join(valid)}, received {getattr(self, key)!r}")
        if self.rank < RANK_MULTIPLE or self.rank % RANK_MULTIPLE:
            raise ValueError(f"split.rank must be a positive multiple of {RANK_MULTIPLE}, received {self.rank}")
        if not self.beta > 0.0:
            raise ValueError(f"split.beta must be positive, received {self.beta}")
        if self.every < 0:
            raise ValueError(f"split.every must not be negative (0 never realigns), received {self.every}")
        object.__setattr__(self, "beta", float(self.beta))
        if not self.parametrize and (self.basis == "activation" or self.beta != 1.0):
            raise ValueError(
                "split.parametrize = false splits W by itself, received "
                f"basis = {self.basis!r} and beta = {self.beta:g}; leave them out, or parametrize"
            )
        if self.kind == "svd" and self.parametrize:
            return
        plain = Split()  # whose options may be written out: files of earlier runs do
        given = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        if self.kind == "mean" and given != ["kind"]:
            raise ValueError('split = "mean" has no options; leave rank, beta, mode and the others out')
        idle = [key for key in _OF_REALIGNMENT if key in given]
        if idle:
            raise ValueError(
                f"split.parametrize = false has nothing to realign, received {' and '.join(idle)}; "
                "leave every and state out, or parametrize"
            )

    @property
    def has_factors(self) -> bool:
        """Whether L1 and L2 are parameters of the module."""
        return self.kind == "svd" and self.parametrize

    def fitted(self, out_features: int, in_features: int) -> Split | None:
        """The same with a rank of at most half the smaller side; None where that is under 16."""
        if self.kind == "mean":
            return self
        rank = min(self.rank, min(out_features, in_features) // 2 // RANK_MULTIPLE * RANK_MULTIPLE)
        return replace(self, rank=rank) if rank else None

    def to_dict(self) -> dict[str, Any]:
        """As in TOML, every default filled in."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return found if self.kind == "svd" else {"kind": self.kind}

    @classmethod
    def from_dict(cls, data: str | dict[str, Any]) -> Split:
        """From TOML: a kind alone, or a table.

        Raises:
            ValueError: an unknown key, a value of another type, or one that is not served.
        """
        table = {"kind": data} if isinstance(data, str) else data
        valid = tuple(f.name for f in fields(cls))
        if not isinstance(table, dict):
            raise ValueError(f'split must be "svd", "mean" or a table, received {data!r}')
        for key, value in table.items():
            if key not in valid:
                near = difflib.get_close_matches(key, valid, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown key {key!r} in split; valid keys: {', '.join(valid)}{hint}")
            kind, words = _TYPES.get(key, (str, "text"))
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise ValueError(f"split.{key} must be {words}, received {value!r}")
        return cls(**table)


def describe_split(split: Split) -> str:
    """In words, departures from the defaults only after the rank."""
    if split.kind == "mean":
        return "mean"
    plain = Split()
    more = [
        f"{f.name} {getattr(split, f.name)}"
        for f in fields(split)
        if f.name not in ("kind", "rank") and getattr(split, f.name) != getattr(plain, f.name)
    ]
    return ", ".join([f"svd rank {split.rank}", *more])
