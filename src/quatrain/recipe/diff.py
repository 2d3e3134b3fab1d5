"""The difference between two recipes, row by row, so that it reads like a method section."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from quatrain.formats import QuantSpec
from quatrain.nn import ATTENTION_OPERANDS, OPERANDS, Split, describe_split
from quatrain.recipe.optimizer import OptimizerRows
from quatrain.recipe.schema import Recipe


def diff(left: Recipe, right: Recipe) -> list[tuple[str, str, str]]:
    """(what, in left, in right) for every setting that differs; absent rows read "BF16"."""
    changes = []
    for name, a, b in zip(OPERANDS, left.linear.rows, right.linear.rows, strict=True):
        changes += _row_changes(name, a, b)
    changes += _split_changes(left.linear.split, right.linear.split)
    if left.quantizes and right.quantizes:
        before, after = left.to_dict()["linear"]["keep"], right.to_dict()["linear"]["keep"]
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                changes.append((f"keep.{key}", _text(before.get(key)), _text(after.get(key))))
    for name, a, b in zip(ATTENTION_OPERANDS, left.attention.rows, right.attention.rows, strict=True):
        changes += _row_changes(name, a, b)
    if left.attention.quantizes and right.attention.quantizes:
        for key in ("smooth", "views"):
            a, b = getattr(left.attention, key), getattr(right.attention, key)
            changes += [(f"attention.{key}", _text(a), _text(b))] if a != b else []
    before, after = left.optimizer.resolved(), right.optimizer.resolved()
    for key in (f.name for f in fields(OptimizerRows)):
        a, b = getattr(before, key), getattr(after, key)
        if key == "operands":
            changes += _row_changes("optimizer.operands", a, b)
        elif a != b:
            changes.append((f"optimizer.{key}", _text(a), _text(b)))
    if left.phases != right.phases:
        changes.append(("phases", _text(left.to_dict()["phase"]), _text(right.to_dict()["phase"])))
    return changes


def describe(spec: QuantSpec | None) -> str:
    """One operand row in words, departures from the format's defaults only."""
    if spec is None:
        return "BF16"
    plain = QuantSpec(spec.format).to_dict()
    parts = [spec.format, "x".join(map(str, spec.block_shape))]
    for key, value in spec.to_dict().items():
        if key not in ("format", "block") and value != plain.get(key):
            parts.append(f"hadamard {value['size']}" if key == "transform" else str(value))
    return " ".join(parts)


def optimizer_words(rows: OptimizerRows) -> str:
    """The [optimizer] table in one line, departures only."""
    found = rows.to_dict() | ({"operands": describe(rows.operands)} if rows.operands is not None else {})
    return "  ".join(f"{key}={_text(value)}" for key, value in found.items())


def _split_changes(a: Split | None, b: Split | None) -> list[tuple[str, str, str]]:
    if a == b:
        return []
    if a is None or b is None or a.kind != b.kind:
        words = ["-" if s is None else describe_split(s) for s in (a, b)]
        return [("split", words[0], words[1])]
    before, after = a.to_dict(), b.to_dict()
    return [(f"split.{k}", _text(before[k]), _text(after[k])) for k in before if before[k] != after[k]]


def _row_changes(name: str, a: QuantSpec | None, b: QuantSpec | None) -> list[tuple[str, str, str]]:
    if a == b:
        return []
    if a is None or b is None or a.format != b.format:
        return [(name, describe(a), describe(b))]
    before, after = a.to_dict(), b.to_dict()
    return [
        (f"{name}.{key}", _text(before.get(key)), _text(after.get(key)))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return "x".join(map(str, value)) if all(isinstance(v, int) for v in value) and value else str(value)
    return str(value)
