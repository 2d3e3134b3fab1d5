"""[attention] of a recipe, and the attention modules of a model that follow it; absent rows are BF16."""

from __future__ import annotations

import inspect
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
        ValueError: a value of another type, one that is not served, or smooth or views without an operand row.
    """
    for key, kind, words in (("smooth", bool, "true or false"), ("views", str, "text")):
        if key in data and not isinstance(data[key], kind):
            raise ValueError(f"attention.{key} must be {words}, received {data[key]!r}")
    rows: dict[str, Any] = {k.replace(".", "_"): spec(v, k) if k in ATTENTION_OPERANDS else v for k, v in data.items()}
    found = AttentionRows(**rows)
    if data and not found.quantizes:
        raise ValueError(
            f"attention.{next(iter(data))} has no effect without an operand row ({', '.join(ATTENTION_OPERANDS)}); "
            "add one, or leave [attention] out"
        )
    return found


def find_attention(model: nn.Module) -> list[str]:
    """Names of the modules of a transformers model that look their attention up in its AttentionInterface.

    Raises:
        ValueError: the model is not one of transformers', or it has no such module.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            f"[attention] rows need a transformers model, whose attention can be replaced, received "
            f"{type(model).__name__}; in a model of your own call quatrain.attention"
        )
    users = {kind for kind in {type(m) for m in model.modules()} if _uses_interface(kind)}
    found = [name for name, m in model.named_modules() if type(m) in users]
    if not found:
        raise ValueError(
            f"[attention] rows need modules that use transformers' AttentionInterface, received {type(model).__name__} "
            "without any; leave the rows out for it"
        )
    return found


def _uses_interface(kind: type[nn.Module]) -> bool:
    """Whether a method of the class, its own or inherited, reads transformers' table of attention functions."""
    if hasattr(kind, "set_attn_implementation"):
        return False  # a whole model, which reads the table to switch
    methods = (inspect.unwrap(f) for c in kind.__mro__ for f in vars(c).values() if inspect.isfunction(f))
    return any("ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in methods)


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
