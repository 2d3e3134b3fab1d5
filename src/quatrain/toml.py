"""What TOML files share: writing a value, and the message for a key that does not exist."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def format_value(value: Any) -> str:
    """A boolean, number, text, path, array or table as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {format_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def unknown_key(key: str, valid: Iterable[str], where: str = "") -> str:
    """The message for a key that table `where` does not have: the nearest valid one, then all of them."""
    names, prefix = list(valid), f"{where}." if where else ""
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}? " if near else ""
    place = f"[{where}]" if where else "the top level"
    return f"unknown key {prefix}{key}; {hint}Valid keys of {place}: {', '.join(names)}"
