"""Layers: the quantized linear, mixed-precision attention and what converted modules share."""

from quatrain.kernels.attention_rows import ATTENTION_OPERANDS, AttentionRows, RowsPlan
from quatrain.nn.attention import attention_keys, quantized_attention
from quatrain.nn.attention_interface import AttentionSlot, convert_attention, register_attention
from quatrain.nn.linear import LinearRows, QuantLinear, convert
from quatrain.nn.state import (
    OPERANDS,
    NonFiniteError,
    SharedState,
    check_finite,
    drop_weight_codes,
    rng_state,
    set_precision,
    set_rng_state,
    shared_states,
)

__all__ = [
    "ATTENTION_OPERANDS",
    "AttentionRows",
    "AttentionSlot",
    "attention_keys",
    "convert_attention",
    "quantized_attention",
    "register_attention",
    "OPERANDS",
    "LinearRows",
    "NonFiniteError",
    "QuantLinear",
    "RowsPlan",
    "SharedState",
    "check_finite",
    "convert",
    "drop_weight_codes",
    "rng_state",
    "set_precision",
    "set_rng_state",
    "shared_states",
]
