"""Optimizers whose state takes four bits."""

from quatrain.optim.adamw import AdamW
from quatrain.optim.convert import conversion_error, from_torch, load_torch_state, to_torch
from quatrain.optim.root import Muon, Root
from quatrain.optim.routing import Routing, Treatment
from quatrain.optim.state import load_file, save_file

__all__ = [
    "AdamW",
    "Muon",
    "Root",
    "Routing",
    "Treatment",
    "conversion_error",
    "from_torch",
    "load_file",
    "load_torch_state",
    "save_file",
    "to_torch",
]
