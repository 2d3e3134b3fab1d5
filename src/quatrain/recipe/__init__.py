"""Recipes as data, and the converter that applies them."""

from quatrain.nn import set_precision
from quatrain.recipe.apply import Report, apply
from quatrain.recipe.attend import attention
from quatrain.recipe.diff import describe, diff, optimizer_words
from quatrain.recipe.optimizer import OptimizerRows, operands_of
from quatrain.recipe.schema import Keep, Phase, Recipe, check_keys, load_recipe, phase_from_dict, recipe_names

__all__ = [
    "Keep",
    "OptimizerRows",
    "Phase",
    "Recipe",
    "Report",
    "apply",
    "attention",
    "check_keys",
    "describe",
    "diff",
    "load_recipe",
    "operands_of",
    "optimizer_words",
    "phase_from_dict",
    "recipe_names",
    "set_precision",
]
