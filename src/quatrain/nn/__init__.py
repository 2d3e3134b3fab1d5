"""Layers: the quantized linear and what converted modules share."""

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
    "OPERANDS",
    "LinearRows",
    "NonFiniteError",
    "QuantLinear",
    "SharedState",
    "check_finite",
    "convert",
    "drop_weight_codes",
    "rng_state",
    "set_precision",
    "set_rng_state",
    "shared_states",
]
