"""Per-layer numerics: how well each operand of each quantized linear is represented, and what backward keeps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quatrain.formats import QuantSpec
from quatrain.kernels import quantize
from quatrain.nn import OPERANDS, QuantLinear, rng_state, set_rng_state

SNR_CEILING = 200.0  # dB reported for an operand that is represented exactly


def operand_snr(model: nn.Module, loss_fn: Callable[[], Tensor]) -> dict[str, dict[str, float]]:
    """Signal-to-noise ratio of every quantized operand, from one forward and backward pass.

    SNR = 10 log10(|x|^2 / |x - dequantize(quantize(x))|^2) in dB, after the operand's transform. Gradients, clock and
    weights are left as they were found.

    Args:
        model: holds converted modules.
        loss_fn: runs the model's forward and returns a scalar loss.

    Returns:
        module name -> operand row ("fprop.input", ...) -> dB. Empty without converted modules.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    if not modules:
        return {}
    found: dict[str, dict[str, float]] = {name: {} for name in modules}
    handles = [h for name, m in modules.items() for h in _watch(m, found[name])]
    clock, grads = rng_state(model), [p.grad for p in model.parameters()]
    try:
        for p in model.parameters():
            p.grad = None
        loss_fn().backward()
    finally:
        for handle in handles:
            handle.remove()
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        set_rng_state(model, clock)
    return found


def _watch(module: QuantLinear, out: dict[str, float]) -> list[torch.utils.hooks.RemovableHandle]:
    rows = dict(zip(OPERANDS, module.operand_rows.rows, strict=True))

    def forward(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], result: Tensor) -> None:
        x = (args[0] if args else named["input"]).detach().reshape(-1, module.in_features).to(result.dtype)
        x, kept, w = module.operand_sources(x)
        operands = {"fprop.input": x, "fprop.weight": w, "dgrad.weight": w.t(), "wgrad.input": kept.t()}
        for name, value in operands.items():
            _record(out, name, value, rows[name])
        if result.requires_grad:
            result.register_hook(backward)

    def backward(gradient: Tensor) -> None:
        dy = gradient.detach().reshape(-1, module.out_features)
        dy, rest = module.gradient_sources(dy)
        _record(out, "dgrad.grad", dy, rows["dgrad.grad"])
        _record(out, "wgrad.grad", rest.t(), rows["wgrad.grad"])

    return [module.register_forward_hook(forward, with_kwargs=True)]


def _record(out: dict[str, float], name: str, value: Tensor, spec: QuantSpec | None) -> None:
    if spec is not None:
        out[name] = snr(value, spec)


def snr(x: Tensor, spec: QuantSpec) -> float:
    """Signal-to-noise ratio in dB of one tensor under one spec; NaN for an all-zero or non-finite tensor."""
    decoded = quantize(x, spec, nonfinite="defer").dequantize(torch.float32, inverse=True).double()
    signal = float(x.double().square().sum())
    noise = float((decoded - x.double()).square().sum())
    if signal == 0.0 or not math.isfinite(signal + noise):
        return math.nan
    return SNR_CEILING if noise == 0.0 else min(10.0 * math.log10(signal / noise), SNR_CEILING)


def saved_bytes(loss_fn: Callable[[], Tensor], model: nn.Module | None = None) -> dict[str, int]:
    """Bytes that the autograd graph of one forward pass holds for the backward pass.

    Each storage counts once; parameters, and the cached weight codes of converted modules in `model`, do not count.

    Returns:
        {"bytes": total, "tensors": how many}.
    """
    excluded = set()
    for module in model.modules() if model is not None else ():
        excluded |= {p.untyped_storage().data_ptr() for p in module.parameters(recurse=False)}
    storages: dict[int, int] = {}  # sizes, not tensors: the graph holds this function, and would then never be freed

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that its own node holds, hooks and all, would be a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_fn()
    for module in model.modules() if model is not None else ():
        if isinstance(module, QuantLinear):
            excluded |= {t.untyped_storage().data_ptr() for t in module.weight_code_tensors()}
    held = [size for pointer, size in storages.items() if pointer not in excluded]
    del loss
    return {"bytes": sum(held), "tensors": len(held)}
