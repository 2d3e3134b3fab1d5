"""[attention] of a recipe, and the attention modules of a model that follow it; absent rows are BF16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from quatrain.formats import QuantSpec
from quatrain.nn import (
    ATTENTION_OPERANDS,
    AttentionRows,
    AttentionSlot,
    SharedState,
    convert_attention,
    register_attention,
)

ATTENTION_KEYS = (*ATTENTION_OPERANDS, "smooth", "views")


def attention_to_dict(rows: AttentionRows) -> dict[str, Any]:
    """The table with every default filled in; empty without operand rows."""
    if not rows.quantizes:
        return {}
    found = {n: r.to_dict() for n, r in zip(ATTENTION_OPERANDS, rows.rows, strict=True) if r is not None}
    return found | {"smooth": rows.smooth, "views": rows.views}


def flat_rows(table: dict[str, Any], operands: tuple[str, ...]) -> dict[str, Any]:
    """A table with `scores.query = {...}`, which TOML nests, as flat keys."""
    groups = {name.split(".")[0] for name in operands}
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key in groups and isinstance(value, dict):
            flat |= {f"{key}.{name}": row for name, row in value.items()}
        else:
            flat[key] = value
    return flat


def attention_from_dict(data: dict[str, Any], spec: Callable[[Any, str], QuantSpec]) -> AttentionRows:
    """Rows from a flat table whose keys have been checked; `spec` makes a QuantSpec of a row and its name.

    Raises:
        ValueError: a value of another type, or one that is not served.
    """
    for key, kind, words in (("smooth", bool, "true or false"), ("views", str, "text")):
        if key in data and not isinstance(data[key], kind):
            raise ValueError(f"attention.{key} must be {words}, received {data[key]!r}")
    rows: dict[str, Any] = {k.replace(".", "_"): spec(v, k) if k in ATTENTION_OPERANDS else v for k, v in data.items()}
    return AttentionRows(**rows)


def find_attention(model: nn.Module) -> list[str]:
    """Names of the attention modules of a transformers model: the innermost whose class is called so.

    Raises:
        ValueError: the model is not one of transformers', or it has no such module.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            f"[attention] rows need a transformers model, whose attention can be replaced, received "
            f"{type(model).__name__}; in a model of your own call quatrain.attention"
        )
    named = [name for name, m in model.named_modules() if "attention" in type(m).__name__.lower() and name]
    found = [n for n in named if not any(other.startswith(n + ".") for other in named)]
    if not found:
        raise ValueError(
            f"[attention] rows need modules whose class name holds 'Attention', received {type(model).__name__} "
            "without any; leave the rows out for it"
        )
    return found


def switch_attention(model: Any) -> None:
    """Make a transformers model run attn_implementation="quatrain".

    Raises:
        ValueError: it does not let its attention be replaced.
    """
    register_attention()
    model.set_attn_implementation("quatrain")
    if model.config._attn_implementation != "quatrain":
        raise ValueError(
            f"{type(model).__name__} does not let its attention be replaced (it does not use transformers' "
            "AttentionInterface); leave the [attention] rows out for it"
        )


def convert_attention_modules(
    model: nn.Module, names: list[str], rows: AttentionRows, state: SharedState, seed: int, rank: int
) -> None:
    """Give the named modules their slots, the last lines of `state`, and switch the model over."""
    if not names:
        return
    switch_attention(model)
    for index, name in enumerate(names, start=len(state.names) - len(names)):
        convert_attention(model.get_submodule(name), AttentionSlot(rows, state, index, seed, rank))


def describe_attention(rows: AttentionRows) -> str:
    """What a converted attention module runs, for `Report.converted`."""
    return f"nvfp4, {sum(row is not None for row in rows.rows)} of 6 attention operands"
