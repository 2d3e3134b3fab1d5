"""Layers: the quantized linear, mixed-precision attention and what converted modules share."""

from quatrain.kernels.attention_rows import ATTENTION_OPERANDS, AttentionRows, RowsPlan
from quatrain.nn.attention import attention_keys, quantized_attention
from quatrain.nn.attention_interface import AttentionSlot, convert_attention, register_attention
from quatrain.nn.dense import dense_state_dict, exact_splits, load_dense, load_exact_splits, realign, realign_cost
from quatrain.nn.linear import LinearRows, QuantLinear, convert
from quatrain.nn.nonfinite import NonFiniteError
from quatrain.nn.split import Split, describe_split
from quatrain.nn.state import (
    OPERANDS,
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
    "Split",
    "check_finite",
    "convert",
    "dense_state_dict",
    "describe_split",
    "drop_weight_codes",
    "exact_splits",
    "load_dense",
    "load_exact_splits",
    "realign",
    "realign_cost",
    "rng_state",
    "set_precision",
    "set_rng_state",
    "shared_states",
]
