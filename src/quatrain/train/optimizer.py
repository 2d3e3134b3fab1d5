"""The optimizer of a run."""

from __future__ import annotations

import torch
from torch import nn

from quatrain.train.config import OptimizerConfig

# Mamba's recurrence parameters are exempt from weight decay by its authors, whatever their shape (arXiv 2312.00752).
_NO_DECAY = ("A_log", "D", "dt_bias")


def make_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW: tensors of at least 2 dimensions decay; norms, biases and Mamba's A_log, D and dt_bias do not."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim < 2 or name.rpartition(".")[2] in _NO_DECAY
            (free if exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=device.type in ("cpu", "cuda") or None,
    )
