"""What `apply` says of the rows of a linear, its `split` included."""

from __future__ import annotations

from torch import nn

from quatrain.nn import Split, describe_split
from quatrain.recipe.schema import Recipe


def describe_linear(recipe: Recipe, linear: nn.Linear) -> str:
    """What a converted linear runs, for `Report.converted`."""
    rows, split = [row for row in recipe.linear.rows if row is not None], _fitted(recipe, linear)
    words = ["/".join(dict.fromkeys(row.format for row in rows)) or "bf16", f"{len(rows)} of 6 operands"]
    return ", ".join([*words, *([] if split is None else [f"split {describe_split(split)}"])])


def check_split(recipe: Recipe, linears: list[nn.Linear]) -> None:
    """Raise ValueError where a recipe has a split and none of the linears to be converted is large enough for it."""
    if recipe.linear.split is not None and not any(_fitted(recipe, linear) for linear in linears):
        raise ValueError(
            f"a low-rank split needs linears whose sides are at least 32, and recipe {recipe.name!r} would convert "
            "none such; leave its split out for this model"
        )


def split_notes(recipe: Recipe, linears: list[nn.Linear]) -> list[str]:
    """For `Report.notes`: linears too small for the split or its rank, where decay belongs; that it does nothing."""
    wanted = recipe.linear.split
    if wanted is None:
        return []
    if wanted.kind == "mean":
        idle = not any(recipe.linear.rows)
        return ['split = "mean" has no effect, as no operand of the linears is quantized'] if idle else []
    found = [_fitted(recipe, linear) for linear in linears]
    without, lower = sum(s is None for s in found), sum(s is not None and s.rank < wanted.rank for s in found)
    notes = [f"{without} linear(s) have a side under 32 and are quantized without the split"] if without else []
    if lower:
        notes.append(f"{lower} linear(s) have a side under {2 * wanted.rank} and are split with a lower rank")
    if wanted.has_factors:
        notes.append("give weight decay to weight and lowrank_left, not to lowrank_right (the trainer does)")
    return notes


def _fitted(recipe: Recipe, linear: nn.Linear) -> Split | None:
    split = recipe.linear.split
    return None if split is None else split.fitted(linear.out_features, linear.in_features)
