"""TOML tables to frozen dataclasses and back, strictly: an unknown key or a wrong type is an error that names it."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quatrain.toml import format_value, unknown_key

T = TypeVar("T")

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a string",
    dict: "a table",
    list: "an array",
}


def build(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """The dataclass `cls` from a TOML table.

    Args:
        cls: a dataclass; its type hints say what each key may be: bool, int, float (an integer is taken too), str,
            Path, a fixed tuple, a union of these, None for "may be absent", or another such dataclass.
        table: the parsed table; its values may already be of the type that is wanted.
        where: the key of this table in the file, for messages.

    Raises:
        ValueError: an unknown key (with the valid ones and the nearest), a wrong type, a missing key.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ValueError(unknown_key(key, fields, where))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in table:
            raise ValueError(f"{_join(where, name)} is missing; give {_expected(hints[name])}")
    return cls(**{key: convert(hints[key], value, _join(where, key)) for key, value in table.items()})


def convert(hint: Any, value: Any, key: str) -> Any:
    """One value of a table as `hint` wants it.

    Raises:
        ValueError: the key, what was expected and what was received.
    """
    members = _members(hint)
    for member in sorted(members, key=lambda m: m is float):  # int before float: 3 stays 3 where both are allowed
        if dataclasses.is_dataclass(member) and isinstance(value, Mapping):
            return build(typing.cast("type[Any]", member), value, key)
        if typing.get_origin(member) is tuple and isinstance(value, list | tuple):
            return _convert_tuple(member, value, key)
        if _fits(member, value):
            return Path(value) if member is Path else float(value) if member is float else value
    raise ValueError(f"{key}: expected {_expected(hint)}, got {json.dumps(value, default=str)} ({_received(value)})")


def set_keys(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `a.b=value` texts to a parsed table, in order; the value is TOML, or else a bare string.

    Raises:
        ValueError: a text without "=", or a key that runs through something that is no table.
    """
    for text in overrides:
        path, separator, raw = text.partition("=")
        keys = [part.strip() for part in path.split(".")]
        if not separator or not all(keys):
            raise ValueError(f"--set takes key=value, for example train.steps=100; got {text!r}")
        inner = table
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ValueError(f"--set {text}: {key} is no table, so it has no key {keys[-1]}; name a key of a table")
        inner[keys[-1]] = _parse_value(raw.strip())


def dump(value: object) -> str:
    """A frozen dataclass as TOML text: plain keys first, then its tables; a key that is None by default is left out.

    Raises:
        ValueError: a key is None whose default is not.
    """
    return "\n".join(_dump_lines(value, "")) + "\n"


def flatten(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The table with dotted keys, for comparing two of them key by key."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, _join(where, key))
        else:
            flat[_join(where, key)] = value
    return flat


def _dump_lines(value: Any, where: str) -> list[str]:
    plain, tables = [], []
    for field in dataclasses.fields(value):
        entry = getattr(value, field.name)
        if entry is None and field.default is not None:
            raise ValueError(f"{_join(where, field.name)} is None, which TOML cannot say; give it a value")
        if dataclasses.is_dataclass(entry):
            tables += ["", f"[{_join(where, field.name)}]", *_dump_lines(entry, _join(where, field.name))]
        elif isinstance(entry, tuple) and entry and dataclasses.is_dataclass(entry[0]):
            for item in entry:
                tables += ["", f"[[{_join(where, field.name)}]]", *_dump_lines(item, _join(where, field.name))]
        elif entry is not None and entry != ():
            plain.append(f"{field.name} = {format_value(entry)}")
    return plain + tables


def _parse_value(raw: str) -> Any:
    try:
        table = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    except RecursionError as error:
        raise ValueError(f"--set takes a value, got one that is nested too deeply: {raw[:40]}...") from error
    return table["value"] if len(table) == 1 else raw


def _convert_tuple(hint: Any, value: Sequence[Any], key: str) -> tuple[Any, ...]:
    members = typing.get_args(hint)
    if len(members) == 2 and members[1] is Ellipsis:
        return tuple(convert(members[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    if len(members) != len(value):
        raise ValueError(f"{key}: expected {_expected(hint)}, got {len(value)} values: {list(value)}")
    return tuple(convert(m, item, f"{key}[{i}]") for i, (m, item) in enumerate(zip(members, value, strict=True)))


def _fits(member: Any, value: Any) -> bool:
    if member is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if member is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if member is Path:
        return isinstance(value, str | Path)
    return isinstance(member, type) and isinstance(value, member)


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(m for m in typing.get_args(hint) if m is not type(None)) if union else (hint,)


def _expected(hint: Any) -> str:
    texts = []
    for member in _members(hint):
        if typing.get_origin(member) is tuple:
            inner = typing.get_args(member)
            count = "" if inner[-1] is Ellipsis else f" of {len(inner)}"
            texts.append(f"an array{count}, each {_expected(inner[0])}")
        else:
            texts.append("a table" if dataclasses.is_dataclass(member) else _NAMES.get(member, str(member)))
    return " or ".join(dict.fromkeys(texts))


def _received(value: Any) -> str:
    return next((name for kind, name in _NAMES.items() if isinstance(value, kind)), type(value).__name__)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
