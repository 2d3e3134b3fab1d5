"""The optimizer of a run: torch's fused AdamW, or those whose state takes four bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from quatrain.recipe import OptimizerRows, optimizer_words
from quatrain.train.config import OptimizerConfig, RunConfig

# Mamba's recurrence parameters are exempt from weight decay by its authors, whatever their shape (arXiv 2312.00752).
# Of the two factors of a split linear one decays, or their product would do so twice as fast as W.
_NO_DECAY = ("A_log", "D", "dt_bias", "lowrank_right")


def make_optimizer(
    model: nn.Module, run: RunConfig, device: torch.device, recipe: OptimizerRows
) -> torch.optim.Optimizer:
    """The optimizer that the run and its recipe ask for.

    Tensors of at least 2 dimensions decay; norms, biases, Mamba's A_log, D and dt_bias, and one of the two factors of a
    split linear do not.

    Args:
        model: its parameters that require gradients are optimized.
        run: its [optimizer], and its seed for stochastic rounding.
        device: where the model is.
        recipe: the recipe's [optimizer].

    Raises:
        ValueError: as `optimizer_rows`, or an option that does not fit the model.
    """
    config, seed = run.optimizer, run.train.seed
    rows = optimizer_rows(run, recipe)
    decayed: list[tuple[str, nn.Parameter]] = []
    free: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim < 2 or name.rpartition(".")[2] in _NO_DECAY
            (free if exempt else decayed).append((name, parameter))
    groups: list[dict[str, Any]] = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((decayed, config.weight_decay), (free, 0.0))
        if members
    ]
    if rows.name in ("root", "muon"):
        return _orthogonal(groups, config, rows, seed)
    if rows.state == rows.embeddings == "fp32":
        for group in groups:
            group["params"] = [parameter for _, parameter in group["params"]]
        fused = device.type in ("cpu", "cuda") or None
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    from quatrain.optim import AdamW

    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, seed=seed, **_state_options(rows))


def optimizer_rows(run: RunConfig, recipe: OptimizerRows) -> OptimizerRows:
    """What the run and its recipe ask for together, with a name.

    Raises:
        ValueError: an option of Root or Muon with AdamW, or coefficients that the operands do not allow.
        FileNotFoundError: there is no such table of coefficients.
    """
    rows = run.optimizer.rows(recipe)
    rows = dataclasses.replace(rows, name=rows.name or "adamw")
    rows.check_coefficients()
    return rows


def describe_optimizer(run: RunConfig, recipe: OptimizerRows) -> str:
    """Its name and how its state and products are kept, where that departs from fp32 and BF16."""
    rows = optimizer_rows(run, recipe)
    words = optimizer_words(dataclasses.replace(rows, name=None))
    return f"{rows.name}  {words}".rstrip()


def _orthogonal(
    groups: list[dict[str, Any]], config: OptimizerConfig, rows: OptimizerRows, seed: int
) -> torch.optim.Optimizer:
    """Root or Muon with updates the size of AdamW's, so that one learning rate serves every tensor."""
    from quatrain.optim import Muon, Root

    own: dict[str, Any] = {"operands": "bf16" if rows.operands is None else rows.operands}
    if rows.coefficients is not None:
        own["coefficients"] = rows.coefficients
    if rows.clip is not None:
        own["clip"] = None if rows.clip == 1.0 else rows.clip
    return (Root if rows.name == "root" else Muon)(
        groups,
        lr=config.lr,
        momentum=config.beta,
        adjust_lr_fn="match_rms_adamw",
        split=rows.split,
        momentum_state=rows.momentum,
        seed=seed,
        adamw={"betas": config.betas, "eps": config.eps, **_state_options(rows)},
        **own,
    )


def _state_options(rows: OptimizerRows) -> dict[str, Any]:
    return {"state": rows.state, "embeddings": rows.embeddings, "tile": rows.tile, "faithful": rows.faithful}
