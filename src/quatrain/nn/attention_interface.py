"""Attention of `transformers` models: `attn_implementation="quatrain"`, and what each attention module runs.

Nothing here is imported from transformers: `register_attention` looks the package up when it is called.
A mask that transformers asks for says by its shape what it stands for, so that no [queries, keys] tensor is made where
a rule will do: None the module's own `is_causal`; [b, keys] that and padding; [b, window, keys] causal, a query sees
the last `window` keys, and padding (one row, expanded: no memory); [b, 1 or h, queries, keys] anything else.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from quatrain.kernels.attention_rows import ATTENTION_OPERANDS, NVFP4_ROWS, AttentionRows
from quatrain.nn.attention import attention_keys, quantized_attention
from quatrain.nn.state import PRECISIONS, SharedState, key_word, keys_now

NAME = "quatrain"
_REFUSED = (
    "softcap", "logits_soft_cap", "s_aux", "sinks", "position_bias", "head_mask", "layer_head_mask", "alibi", "bias",
    "attention_bias", "indices", "block_indices",
)  # fmt: skip


class AttentionSlot:
    """What one attention module of a converted model runs: its rows, its keys, its line in the shared state."""

    def __init__(self, rows: AttentionRows, state: SharedState, index: int, seed: int, rank: int) -> None:
        self.plans = {precision: rows.without(precision).plan for precision in PRECISIONS}
        self.state = state
        self.index = index
        words = [key_word(seed, rank, state.names[index], f"attention.{operand}") for operand in ATTENTION_OPERANDS]
        self.keys = torch.tensor(words, dtype=torch.int64, device=state.clock.device)

    def follow(self, device: torch.device) -> None:
        """Move to the device where the module now runs; not to "meta", where the clock would be lost."""
        if self.keys.device != device and device.type != "meta":
            self.keys = self.keys.to(device)
            self.state.follow(device)


def convert_attention(module: nn.Module, slot: AttentionSlot) -> None:
    """Give a module its slot; it takes effect with attn_implementation="quatrain"."""
    module._shared_state = slot.state  # type: ignore[assignment]
    module._quatrain_attention = slot  # type: ignore[assignment]


def register_attention() -> None:
    """Make attn_implementation="quatrain" known to `transformers`; safe to call again.

    Raises:
        ValueError: transformers is not installed, or has no attention interface.
    """
    try:
        interface = importlib.import_module("transformers").AttentionInterface
        masking = importlib.import_module("transformers.masking_utils")
        masks = masking.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f'attn_implementation="{NAME}" needs transformers 5 with its AttentionInterface, received {error}; '
            "install it, or call quatrain.attention in a model of your own"
        ) from error
    interface.register(NAME, attention_interface)
    masks.register(NAME, functools.partial(attention_mask, masking))


def attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [b, h, q, d] to [b, q, h, e], and no weights.

    Raises:
        ValueError: dropout, or an argument that is not served (soft cap, sinks, bias, ...), naming it.
    """
    _refuse(module, dropout, attention_mask, kwargs)
    rules = _rules(module, query, key, attention_mask, is_causal, sliding_window, kwargs)
    slot = getattr(module, "_quatrain_attention", None)
    if slot is None:
        rows, seen, keys = NVFP4_ROWS.plan, None, _drawn_keys(query)
    else:
        slot.follow(query.device)
        rows, seen = slot.plans[slot.state.precision], slot.state.seen[slot.index]
        keys = keys_now(slot.keys, slot.state.clock)
    out = quantized_attention(query, key, value, rows, scale=scaling, keys=keys, seen=seen, **rules)
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, dropout: float, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"quatrain's attention has no dropout, received dropout = {dropout}; set the attention dropout of the "
            "model's config to 0 (attention_dropout, attn_pdrop, ...)"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"quatrain's attention does not serve {name}, received one from {type(module).__name__}; "
                'use another attn_implementation, such as "eager", for this model'
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "quatrain's attention never holds attention weights, received output_attentions = True; "
            'use attn_implementation="eager" for them'
        )
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(
            f"quatrain's attention takes boolean masks, received attention_mask of {attention_mask.dtype} "
            f"{tuple(attention_mask.shape)}: an additive bias is not served; give True where a query sees a key"
        )


def _rules(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Keyword arguments of `quantized_attention` for what transformers means."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    rules: dict[str, Any] = {"is_causal": causal, "bottom_right": True, "window": sliding_window or None}
    starts = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if starts[0] is not None or starts[1] is not None:  # a mask beside them says the same
        return rules | {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    if mask is None:
        return rules
    if mask.dim() == 4:
        return {"mask": mask[:, :, :, : key.shape[2]]}
    if mask.dim() == 3:
        if mask.shape[1] > 1 and mask.stride(1) != 0:
            raise ValueError(
                f"quatrain's attention takes masks [batch, keys] or [batch, heads, queries, keys], received "
                f"attention_mask {tuple(mask.shape)}; add a dimension for heads"
            )
        return {"is_causal": True, "bottom_right": True, "window": mask.shape[1], "key_padding": mask[:, 0]}
    return rules | {"key_padding": mask}


def attention_mask(
    masking: Any,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask that transformers hands to `attention_interface`, by the shapes above.

    `masking` is transformers.masking_utils; the other arguments are those of its own mask functions.
    """
    window = _causal_window(masking, mask_function)
    plain = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset + q_length == kv_offset + kv_length
    if not plain or not getattr(kwargs.get("config"), "is_causal", True):
        window = None
    padding: Any = masking.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None and window is not None and (window == 0 or window >= kv_length):
        return None
    # Generation makes masks ahead and hands them to the model again, which takes none but dense ones as they are.
    if window is None or not torch.is_grad_enabled():
        kwargs |= {"allow_is_causal_skip": window is not None, "allow_is_bidirectional_skip": False}
        dense: Tensor | None = masking.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
        )
        return dense
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        if not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
    if padding is None and (window == 0 or window >= kv_length):
        return None
    if padding is None:
        padding = torch.ones(1, kv_length, dtype=torch.bool, device=kwargs.get("device")).expand(batch_size, -1)
    rule: Tensor = padding.unsqueeze(1)
    return rule.expand(-1, min(window or kv_length, kv_length), -1)


def _causal_window(masking: Any, mask_function: Any) -> int | None:
    """0 for plain causal attention, the window of a causal sliding one, None for any other rule."""
    if mask_function is masking.causal_mask_function:
        return 0
    if torch.compiler.is_compiling():
        return None
    parts = _enclosed(mask_function, "and_masks.<locals>.and_mask")
    if isinstance(parts, tuple) and len(parts) == 2 and parts[1] is masking.causal_mask_function:
        window = _enclosed(parts[0], "sliding_window_overlay.<locals>.inner_mask")
        return window if isinstance(window, int) else None
    return None


def _enclosed(function: Any, qualified_name: str) -> Any:
    """What a function of that name closes over, if it is one variable."""
    cells: Any = getattr(function, "__closure__", None) or ()
    found = getattr(function, "__qualname__", "") == qualified_name and len(cells) == 1
    return cells[0].cell_contents if found else None


def _drawn_keys(query: Tensor) -> Tensor:
    """Keys for a module that no recipe was applied to: drawn from torch's generator, which checkpointing restores."""
    seed = torch.randint(-(1 << 62), 1 << 62, (1,), dtype=torch.int64, device=query.device)
    return attention_keys(seed, 0, query.device)
