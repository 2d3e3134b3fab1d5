"""Which operands of attention's seven products are quantized, and how: plain data.

    scores  S  = Q K^T      rows scores.query [q, d],  scores.key [k, d]       contracts the head dimension
    dquery  dQ = dS K       rows dquery.grad [q, k],   dquery.key [d, k]       contracts keys
    dkey    dK = dS^T Q     rows dkey.grad [k, q],     dkey.query [d, q]       contracts queries

P V, P^T dO and dO V^T have no rows: they are never quantized.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from quatrain.formats import QuantSpec

ATTENTION_OPERANDS = ("scores.query", "scores.key", "dquery.grad", "dquery.key", "dkey.grad", "dkey.query")
VIEWS = ("original", "decoded")
_GRADS = ("dquery_grad", "dkey_grad")


class RowsPlan(NamedTuple):
    """What traced code needs of `AttentionRows`, as constants.

    Attributes:
        text: `AttentionRows.to_json`.
        slots: `AttentionRows.slots` without and with a backward pass.
        grads: whether dquery.grad and dkey.grad are quantized.
        stochastic: whether any operand draws random bits.
    """

    text: str
    slots: tuple[tuple[int, ...], tuple[int, ...]]
    grads: tuple[bool, bool]
    stochastic: bool


@dataclass(frozen=True)
class AttentionRows:
    """The six operand rows of attention; None leaves that operand in the dtype of the inputs.

    Attributes:
        scores_query, scores_key: Q and K as S reads them, in forward and again in backward.
        dquery_grad, dkey_grad: dS along keys, and its transpose along queries.
        dquery_key, dkey_query: K and Q along their tokens. With blocks of 16 x 16 equal to the scores row the codes of
            that row serve both ways.
        smooth: subtract the mean key of each sequence before K is quantized; S moves by a constant per query.
        views: "original" makes dquery.key and dkey.query from K and Q themselves, "decoded" from what S reads.

    Raises:
        ValueError: a row that attention does not serve, naming it.

    Source: Full-Stack FP4 (Ding et al., 2026), Q-Attn; smoothing arXiv 2411.10958 section 3.
    """

    scores_query: QuantSpec | None = None
    scores_key: QuantSpec | None = None
    dquery_grad: QuantSpec | None = None
    dquery_key: QuantSpec | None = None
    dkey_grad: QuantSpec | None = None
    dkey_query: QuantSpec | None = None
    smooth: bool = True
    views: str = "original"

    def __post_init__(self) -> None:
        if self.views not in VIEWS:
            raise ValueError(f"attention.views must be one of {', '.join(VIEWS)}, received {self.views!r}")
        for name, field in zip(ATTENTION_OPERANDS, fields(self), strict=False):
            spec = getattr(self, field.name)
            if spec is not None:
                _check_row(name, spec, field.name in _GRADS)
        text = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        plan = RowsPlan(
            json.dumps(text, sort_keys=True),
            (self._find_slots(False), self._find_slots(True)),
            (self.dquery_grad is not None, self.dkey_grad is not None),
            any(row is not None and row.stochastic for row in self.rows),
        )
        object.__setattr__(self, "_plan", plan)

    @property
    def plan(self) -> RowsPlan:
        """The constants of traced code, made once."""
        found: RowsPlan = self.__dict__["_plan"]
        return found

    def _find_slots(self, for_backward: bool) -> tuple[int, ...]:
        tokens = (
            (6, self.dquery_key, self.scores_key, self.key_serves_both),
            (9, self.dkey_query, self.scores_query, self.query_serves_both),
        )
        found = [0, 1, 2] if self.scores_query is not None else [0]
        found += [3, 4, 5] if self.scores_key is not None else [3]
        for first, column, row, both in tokens if for_backward else ():
            if column is not None and not both:
                found += range(first, first + 3)
            elif column is None and row is not None:
                found.append(first)
        return tuple(found)

    def slots(self, for_backward: bool) -> tuple[int, ...]:
        """Which of codes, scales and amax of four views are kept: Q, K, K along tokens, Q along tokens (0 to 11).

        A view that is not quantized has its first slot only; one along tokens has none where the other one serves.
        """
        return self.plan.slots[for_backward]

    @property
    def rows(self) -> tuple[QuantSpec | None, ...]:
        """The six specs in the order of ATTENTION_OPERANDS."""
        return tuple(getattr(self, f.name) for f in fields(self)[:6])

    @property
    def quantizes(self) -> bool:
        """Whether any row is present."""
        return any(self.rows)

    @property
    def query_serves_both(self) -> bool:
        """Whether the codes of scores.query are also those of dkey.query."""
        return serves_both(self.scores_query, self.dkey_query)

    @property
    def key_serves_both(self) -> bool:
        """Whether the codes of scores.key are also those of dquery.key."""
        return serves_both(self.scores_key, self.dquery_key)

    def without(self, precision: str | None) -> AttentionRows:
        """Rows less those that a BF16 phase switches off: None, "forward" (scores) or "both" (all)."""
        off = {None: 0, "forward": 2, "both": 6}[precision]
        if not off:
            return self
        names = [f.name for f in fields(self)]
        changes: dict[str, Any] = dict.fromkeys(names[:off])
        if off == 6 or self.dquery_key is None:
            changes["smooth"] = False  # nothing of K is quantized: K stays as it is, without the rounding of K - mean
        return replace(self, **changes)

    def to_json(self) -> str:
        """Canonical text: what compiled graphs carry."""
        return self.plan.text

    @staticmethod
    def from_json(text: str) -> AttentionRows:
        """Parse `to_json`'s text (cached: rows are few and frozen)."""
        return _rows_from_json(text)


def _check_row(name: str, spec: QuantSpec, grad: bool) -> None:
    if spec.format != "nvfp4" or spec.transform is not None:
        raise ValueError(
            f"{name} must be nvfp4 without a transform, received {spec}; other formats are not served in attention"
        )
    if grad and (spec.block_shape != (1, 16) or spec.scale not in ("to-6", "to-4")):
        raise ValueError(
            f'{name} must have blocks of 1 x 16 and scale = "to-6" or "to-4" (dS is quantized where it is made, in one '
            f"pass), received block = {list(spec.block_shape)}, scale = {spec.scale!r}"
        )


def serves_both(row: QuantSpec | None, column: QuantSpec | None) -> bool:
    """Whether codes along one axis are also codes along the other: equal rows of square blocks, nothing drawn."""
    return row is not None and row == column and row.block_shape == (16, 16) and not row.stochastic


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, QuantSpec) else value


@functools.lru_cache(maxsize=256)
def _rows_from_json(text: str) -> AttentionRows:
    data: dict[str, Any] = json.loads(text)
    values: dict[str, Any] = {k: QuantSpec.from_dict(v) if isinstance(v, dict) else v for k, v in data.items()}
    return AttentionRows(**values)


_VALUES = QuantSpec("nvfp4", scale="four-over-six")
_GRAD = QuantSpec("nvfp4", scale_rounding="up", rounding="stochastic")

# The paper's split: Q and K in NVFP4 with four-over-six, dS rounded stochastically, keys smoothed. Scales of dS
# round up: above a scale that was rounded down the block's maximum clips, and a tenth of dQ is biased past its noise.
NVFP4_ROWS = AttentionRows(_VALUES, _VALUES, _GRAD, _VALUES, _GRAD, _VALUES)
