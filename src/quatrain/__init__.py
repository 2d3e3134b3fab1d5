"""quatrain: pretrain language models in 4-bit floating point.

Recipes are short tables of data; the same bits come out on every backend.

    import quatrain as qt
    report = qt.apply(model, "nvfp4")
"""

from quatrain.formats import Hadamard, QTensor, QuantSpec
from quatrain.kernels import matmul, quantize
from quatrain.nn import NonFiniteError, check_finite, drop_weight_codes, rng_state, set_precision, set_rng_state
from quatrain.recipe import Recipe, apply, load_recipe, recipe_names

__version__ = "0.1.0"

__all__ = [
    "Hadamard",
    "NonFiniteError",
    "QTensor",
    "QuantSpec",
    "Recipe",
    "apply",
    "check_finite",
    "drop_weight_codes",
    "load_recipe",
    "matmul",
    "quantize",
    "recipe_names",
    "rng_state",
    "set_precision",
    "set_rng_state",
]
