"""quatrain: pretrain language models in 4-bit floating point.

Recipes are short tables of data; the same bits come out on every backend.

    import quatrain as qt
    report = qt.apply(model, "nvfp4")
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quatrain import optim
    from quatrain.formats import Hadamard, QTensor, QuantSpec
    from quatrain.kernels import matmul, quantize
    from quatrain.nn import (
        NonFiniteError,
        check_finite,
        dense_state_dict,
        drop_weight_codes,
        realign,
        register_attention,
        rng_state,
        set_precision,
        set_rng_state,
    )
    from quatrain.recipe import Recipe, apply, attention, load_recipe, recipe_names

__version__ = "0.1.0"

__all__ = [
    "Hadamard",
    "NonFiniteError",
    "QTensor",
    "QuantSpec",
    "Recipe",
    "apply",
    "attention",
    "check_finite",
    "dense_state_dict",
    "drop_weight_codes",
    "load_recipe",
    "matmul",
    "optim",
    "quantize",
    "realign",
    "recipe_names",
    "register_attention",
    "rng_state",
    "set_precision",
    "set_rng_state",
]

_PARTS = ("formats", "kernels", "nn", "optim", "recipe")


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first asked for: torch is slow, and the command handles Ctrl-C first."""
    if name in _PARTS:
        return importlib.import_module(f"quatrain.{name}")
    for part in _PARTS if name in __all__ else ():
        found = getattr(importlib.import_module(f"quatrain.{part}"), name, None)
        if found is not None and not isinstance(found, ModuleType):  # kernels and nn have files of the same name
            return globals().setdefault(name, found)
    raise AttributeError(f"module 'quatrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names too."""
    return sorted({*globals(), *__all__})
