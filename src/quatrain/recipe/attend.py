"""`quatrain.attention`: mixed-precision attention as one function, driven by a recipe's [attention] rows."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from quatrain.nn import AttentionRows, RowsPlan, attention_keys, quantized_attention
from quatrain.recipe.schema import Recipe, load_recipe


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
    spec: str | Path | Recipe | AttentionRows = "nvfp4-attention",
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    **rules: Any,
) -> Tensor:
    """Softmax attention with quantized operands, for autograd.

    Args:
        q: [b, h, q, d].
        k: [b, g, k, d]; g divides h.
        v: [b, g, k, e].
        is_causal: query i sees keys up to i, aligned at the top left as in torch's scaled_dot_product_attention;
            `bottom_right=True` aligns the last query with the last key.
        scale: of the scores, None for 1 / sqrt(d).
        enable_gqa: whether g may differ from h.
        spec: a recipe with [attention] rows (library name, path, TOML text or Recipe), or the rows themselves.
        seed: key of stochastic rounding: an integer, or an int64 tensor of one element.
        offset: a second word of the key; another at each step draws anew.
        rules: bottom_right, window, key_padding, mask, cu_seqlens_q, cu_seqlens_k, backend: see
            `quatrain.nn.quantized_attention`.

    Returns:
        [b, h, q, e] in the inputs' dtype, autocast's under autocast.

    Raises:
        ValueError: a recipe without [attention] rows, or arguments that do not fit together.

    Source: Full-Stack FP4 (Ding et al., 2026), Q-Attn.
    """
    unknown = sorted(set(rules) - _RULES)
    if unknown:
        raise ValueError(
            f"attention does not serve {unknown[0]}, received {rules[unknown[0]]!r}; it takes "
            f"{', '.join(sorted(_RULES))}"
        )
    plan = spec.plan if isinstance(spec, AttentionRows) else _plan_of(spec)
    keys = attention_keys(seed, offset, q.device) if plan.stochastic else None
    return quantized_attention(
        q, k, v, plan, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, keys=keys, **rules
    )


_RULES = frozenset(("bottom_right", "window", "key_padding", "mask", "cu_seqlens_q", "cu_seqlens_k", "backend"))


def _plan_of(spec: str | Path | Recipe) -> RowsPlan:
    if isinstance(spec, str) and not spec.endswith(".toml"):
        return _named_plan(spec)
    return _checked(load_recipe(spec))


@functools.lru_cache(maxsize=64)
def _named_plan(spec: str) -> RowsPlan:
    return _checked(load_recipe(spec))


def _checked(recipe: Recipe) -> RowsPlan:
    if not recipe.attention.quantizes:
        raise ValueError(
            f"attention needs a recipe with [attention] rows, received {recipe.name!r} without any; use "
            '"nvfp4-attention", or torch\'s scaled_dot_product_attention'
        )
    return recipe.attention.plan


# A compiler takes the rows as a constant: it can read no files.
_plan_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
