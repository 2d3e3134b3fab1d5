"""Root and Muon: the momentum of a hidden matrix is orthogonalized before it is applied; AdamW takes the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quatrain.formats import QuantSpec
from quatrain.kernels.newton_schulz import Triple, apply_updates, momentum_updates, orthogonalize, runs_on_triton
from quatrain.optim.adamw import BACKENDS, OPTIONS, AdamW, new_state
from quatrain.optim.clock import new_clock, refuse_in_capture
from quatrain.optim.coefficients import Coefficients
from quatrain.optim.matrices import (
    Member,
    adjustment,
    as_given,
    batches_of,
    check_group,
    empty_matrix_state,
    iteration_of,
    members_of,
    method,
    obstacle,
    options_of_others,
    refuse_unknown,
    state_size,
)
from quatrain.optim.momentum import as_matrix, load_momentum, matrix_shape, store_momentum
from quatrain.optim.plain import Words, gradient_of, keep_weight, loss_of, seed_word, weight_keys, wide_weight
from quatrain.optim.routing import (
    Routing,
    Treatment,
    labels_of,
    names_of,
    refuse_misspelled,
    refuse_module,
    refuse_repeated,
    role_of,
    tensor_id,
    warn_without_names,
)
from quatrain.optim.state import load_exact, state_bytes, with_float8, without_float8

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

TREATMENTS = ("auto", "orthogonal", "adamw")


class Root(Optimizer):
    """Momentum, orthogonalized by Newton-Schulz products in NVFP4, for hidden matrices; AdamW for everything else.

        buffer <- momentum buffer + (1 - momentum) g        M = (1 - momentum) g + momentum buffer        (Nesterov)
        w <- (1 - lr weight_decay) w - lr s(R, C) NS(clip(M))

    with s = sqrt(max(1, R / C)) ("original") or 0.2 sqrt(max(R, C)) ("match_rms_adamw"). Trailing dimensions flatten.
    Defaults are the paper's mode: `operands="nvfp4", coefficients="fitted", clip=0.99`. The most exact one is
    `coefficients="hybrid", split="diagonal", clip=None`. A matrix has at least 4,096 elements and 16 rows and columns,
    and is neither embedding nor output head; `routing()` lists every tensor. A group may set any option for itself,
    and `treatment="orthogonal"` or `"adamw"` (then its options are AdamW's) in place of "auto".

    Args:
        params: `model.named_parameters()`, or parameters, or groups of either. Only names tell embeddings and head
            from hidden matrices.
        lr: of matrices; a number, or a tensor of one element, of which AdamW's group gets a copy of its own.
        weight_decay: decoupled, times lr.
        momentum: of the average, in [0, 1).
        nesterov: look one step ahead.
        ns_coefficients: one (a, b, c): torch.optim.Muon's name for `coefficients`.
        eps: of torch.optim.Muon; M is divided by max|M| first, so its norm is at least 1 and nothing is added.
        ns_steps: of the iteration.
        adjust_lr_fn: None or "original", or "match_rms_adamw".
        operands: of the products: "bf16", "nvfp4" (four-over-six) or a QuantSpec.
        coefficients: "fitted", "hybrid", with BF16 operands also "jordan", "root", "polar-express"; a table of
            `quatrain fit-coefficients`; one (a, b, c) or one for each step.
        split: None, or "diagonal" to keep the diagonals of the iteration's square matrices out of the quantizer.
        clip: quantile of |M| at which M is clipped, or None.
        momentum_state: "bf16", "fp32", or "nvfp4" (experimental).
        master: what carries the precision of a BF16 parameter, as of `AdamW`: "fp32", "bf16+int8" or "bf16-sr".
        adamw: AdamW's own options for the other tensors. lr is by default the matrices' with "match_rms_adamw", else a
            tenth of it; weight_decay the matrices'.
        seed: of stochastic rounding (NVFP4 momentum).
        backend: "auto", "reference" or "triton" for the iteration; honoured or refused.

    Raises:
        ValueError: an option or a parameter that cannot be served; coefficients that would diverge with quantized
            operands; the remedy is named.

    Sources: Full-Stack FP4 (Ding et al., 2026), Q-Root; ROOT: arXiv 2511.20626; Muon: Jordan 2024, arXiv 2502.16982.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple | None = None,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        *,
        operands: str | QuantSpec = "nvfp4",
        coefficients: Coefficients | None = None,
        split: str | None = None,
        clip: float | None = 0.99,
        momentum_state: str = "bf16",
        master: str = "fp32",
        adamw: Mapping[str, Any] | None = None,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, received {backend!r}")
        refuse_module(params)
        if coefficients is not None and ns_coefficients is not None:
            raise ValueError("ns_coefficients and coefficients are one option, received both; leave one out")
        if coefficients is None:
            coefficients = "fitted" if ns_coefficients is None else ns_coefficients
        self.backend = backend
        self._adamw: AdamW | None = None
        self._seeds: dict[tuple[Any, ...], Tensor] = {}
        self._adamw_options = dict(adamw or {})
        refuse_unknown(self._adamw_options)
        defaults: dict[str, Any] = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "operands": operands, "coefficients": coefficients, "split": split, "clip": clip,
            "momentum_state": momentum_state, "master": master, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)
        automatic = [group for group in self.param_groups if group.get("automatic")]
        warn_without_names(automatic, type(self).__name__)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as one of matrices and one of AdamW's tensors; nothing is added where it cannot be served.

        Raises:
            ValueError: an option of the group, or one of its parameters.
        """
        refuse_misspelled(param_group, (*self.defaults, *OPTIONS, "treatment"))
        options = dict(param_group)
        members = members_of(options.pop("params"))
        treatment = options.pop("treatment", "auto")
        if treatment not in TREATMENTS:
            raise ValueError(f"treatment must be one of {', '.join(TREATMENTS)}, received {treatment!r}")
        others = options_of_others(self.defaults, self._adamw_options, options, treatment)
        wanted = [treatment == "orthogonal" or (treatment == "auto" and not obstacle(*m)) for m in members]
        matrices = [m for m, is_matrix in zip(members, wanted, strict=True) if is_matrix]
        rest = [m for m, is_matrix in zip(members, wanted, strict=True) if not is_matrix]
        before, adamw = len(self.param_groups), self._adamw
        before_others = len(adamw.param_groups) if adamw else 0
        try:
            if matrices or not rest:
                self._add_matrices(options, matrices, treatment == "auto")
            if rest:
                self._add_others(others, rest)
            refuse_repeated(self.param_groups)
        except Exception:
            del self.param_groups[before:]
            if adamw:
                del adamw.param_groups[before_others:]
            self._adamw = adamw
            raise

    def _add_matrices(self, options: dict[str, Any], members: list[Member], automatic: bool) -> None:
        options.pop("adamw", None)
        if options.get("ns_coefficients") is not None:
            options.setdefault("coefficients", options["ns_coefficients"])
        group = {**options, "params": as_given(members), "treatment": "orthogonal", "automatic": automatic}
        super().add_param_group(group)
        if isinstance(group["operands"], QuantSpec):
            group["operands"] = group["operands"].to_json()  # plain data: it goes into files
        if isinstance(group["coefficients"], Path):
            group["coefficients"] = str(group["coefficients"])
        check_group(group)

    def _add_others(self, options: dict[str, Any], members: list[Member]) -> None:
        taken = {p for group in self.param_groups for p in group["params"]}
        if not taken.isdisjoint(p for _, p in members):
            raise ValueError("a parameter must be in one group, received one that is in two; name it once")
        group = {**options, "params": as_given(members), "treatment": "adamw"}
        if self._adamw is None:
            self._adamw = AdamW([group], backend=self.backend)
            self._adamw.state = self.state  # one state: it is saved, loaded and counted together
        else:
            self._adamw.add_param_group(group)
        self.param_groups.append(self._adamw.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: evaluates the model anew and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a sparse gradient; no parameter has been changed then.
        """
        loss = loss_of(closure)
        batches = []
        labels = iter(labels_of(self.param_groups))
        for group in self.param_groups:
            named = [(next(labels), parameter) for parameter in group["params"]]
            if group["treatment"] == "orthogonal":
                batches += [(group, batch) for batch in batches_of(named)]
        for group, batch in batches:  # a table that is gone is noticed before anything changes
            iteration_of(group, matrix_shape(batch[0][1]))
        if self._adamw is not None:
            self._adamw.step_groups()
        for group, batch in batches:
            self._step_batch(group, batch)
        return loss

    def _step_batch(self, group: dict[str, Any], batch: list[tuple[str, Tensor]]) -> None:
        """Momentum, iteration and update of matrices of one shape."""
        keys, parameters, states = [tensor_id(label) for label, _ in batch], [p for _, p in batch], []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                refuse_in_capture("a parameter's first step")
                state.update(empty_matrix_state(parameter, group, parameter.device))
            states.append(state)
        counts = [state["step"] for state in states if "step" in state]
        if counts:
            torch._foreach_add_(counts, 1)
        shape = matrix_shape(parameters[0])
        buffers = [load_momentum(state, shape) for state in states]
        grads = [as_matrix(gradient_of(parameter)) for parameter in parameters]
        updates = momentum_updates(grads, buffers, group["momentum"], group["nesterov"], backend=self.backend)
        for key, state, buffer in zip(keys, states, buffers, strict=True):
            store_momentum(state, buffer, group["seed"], key)
        found = orthogonalize(updates, iteration_of(group, shape), group["clip"], backend=self.backend)
        parts = [_part(parameter, state) for parameter, state in zip(parameters, states, strict=True)]
        lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        sizes = lr, group["weight_decay"], lr * adjustment(group["adjust_lr_fn"], shape)
        if runs_on_triton(found.device, self.backend) and all(map(_fused, parameters)):
            words = [(group["seed"], key, _count(state), 0) for key, state in zip(keys, states, strict=True)]
            self._apply_narrow(parts, found, sizes, words)
            return
        wide = [wide_weight(part) if _narrow(part["parameter"]) else part["parameter"] for part in parts]
        weights = [as_matrix(weight) for weight in wide]
        apply_updates(weights, found, *sizes, backend=self.backend)
        for key, parameter, state, part, weight in zip(keys, parameters, states, parts, weights, strict=True):
            if _narrow(parameter):
                keep_weight(weight.view(parameter.shape), part, (group["seed"], key, _count(state), 0))
            elif weight.data_ptr() != parameter.data_ptr():  # not row-major: the step ran on a copy
                parameter.copy_(weight.view(parameter.shape))

    def _apply_narrow(
        self, parts: list[dict[str, Tensor]], found: Tensor, sizes: tuple[Any, float, Any], words: list[Words]
    ) -> None:
        """BF16 weights and what stands beside them, read and written once."""
        shape = found.shape[1:]
        kept = [part[name].view(shape) for part in parts for name in ("master", "correction") if name in part]
        keys = None if kept else weight_keys(words, self._seeds_of(words, found.device))
        weights = [part["parameter"].view(shape) for part in parts]
        apply_updates(weights, found, *sizes, kept=kept or None, keys=keys, backend=self.backend)

    def _seeds_of(self, words: list[Words], device: torch.device) -> Tensor:
        """int64 [k] of a batch, copied to the device once."""
        numbers = tuple(map(seed_word, words))
        key = (device, *numbers)
        if key not in self._seeds:
            refuse_in_capture("a first step of these weights")
            self._seeds[key] = torch.tensor(numbers, dtype=torch.int64, device=device)
        return self._seeds[key]

    def routing(self) -> Routing:
        """What happens to each tensor and why; prints as a table, `.summary()` is shorter."""
        others = iter(self._adamw.routing().values() if self._adamw else ())
        routing = Routing()
        for label, (index, name, parameter) in zip(
            labels_of(self.param_groups), names_of(self.param_groups), strict=True
        ):
            group, shape = self.param_groups[index], tuple(parameter.shape)
            if group["treatment"] == "adamw":
                found = next(others)
                reason = obstacle(name, parameter) or 'treatment="adamw"'
                routing[label] = Treatment(f"adamw, {found.method}", reason, shape, index, found.state_bytes)
            else:
                reason = role_of(name, parameter).reason if group["automatic"] else 'treatment="orthogonal"'
                routing[label] = Treatment(method(group), reason, shape, index, state_size(parameter, group))
        return routing

    def state_bytes(self) -> int:
        """Bytes of the storages that hold the state now: 0 before the first step."""
        return state_bytes(self)

    def bytes_per_parameter(self) -> float:
        """`state_bytes` over the parameters that have a state; 0.0 before the first step."""
        elements = sum(p.numel() for p, entries in self.state.items() if entries)
        return self.state_bytes() / elements if elements else 0.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a state back to the bit: every tensor keeps its dtype and goes to its parameter's device.

        Parameters are matched by name where both sides have names, else by position.

        Raises:
            ValueError: groups, names, options, shapes or dtypes that do not fit; nothing has been changed then.
        """
        load_exact(self, state_dict, self._expected, ("treatment",))

    def _expected(self, name: str | None, parameter: Tensor, group: Mapping[str, Any]) -> Mapping[str, Tensor]:
        if group["treatment"] == "adamw":
            state = new_state(name, parameter, group, torch.device("meta"))
            return state if "step" in state else state | new_clock(torch.device("meta"))
        return empty_matrix_state(parameter, group, torch.device("meta"))

    def __getstate__(self) -> dict[str, Any]:
        values = super().__getstate__()
        own = {"backend": self.backend, "_adamw": self._adamw, "_adamw_options": self._adamw_options}
        return values | {"state": without_float8(values["state"])} | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"state": with_float8(state["state"])})
        self._seeds = {}
        if self._adamw is not None:
            groups = [group for group in self.param_groups if group["treatment"] == "adamw"]
            self._adamw.__setstate__({"state": self.state, "param_groups": groups})
            self._adamw.state = self.state


class Muon(Root):
    """`torch.optim.Muon` with AdamW for what is not a hidden matrix: Jordan's coefficients, products in BF16, no clip.

    Arguments as of `Root`, whose options it all has; given the same ones it is `Root`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Triple | None = None,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        operands: str | QuantSpec = "bf16",
        coefficients: Coefficients | None = None,
        split: str | None = None,
        clip: float | None = None,
        momentum_state: str = "bf16",
        master: str = "fp32",
        adamw: Mapping[str, Any] | None = None,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        if coefficients is None and ns_coefficients is None:
            coefficients = "jordan"
        super().__init__(
            params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn,
            operands=operands, coefficients=coefficients, split=split, clip=clip, momentum_state=momentum_state,
            master=master, adamw=adamw, seed=seed, backend=backend,
        )  # fmt: skip


def _part(parameter: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """A parameter and what it keeps beside itself, as the update reads them."""
    return {"parameter": parameter.detach()} | {key: state[key] for key in ("master", "correction") if key in state}


def _count(state: dict[str, Any]) -> Tensor:
    """The number of the step where something is drawn at random, else any."""
    return state["step"] if "step" in state else torch.zeros(())


def _fused(parameter: Tensor) -> bool:
    """Whether the twin updates a parameter together with its master, correction or random bits."""
    return parameter.dtype == torch.bfloat16 and parameter.is_contiguous()


def _narrow(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16)
