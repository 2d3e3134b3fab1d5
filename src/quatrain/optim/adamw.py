"""AdamW whose moments take 4.5 bits each: `torch.optim.AdamW` with one more argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quatrain.kernels.adamw import MomentSpec
from quatrain.optim.clock import Clocks, new_clock, refuse_in_capture
from quatrain.optim.packed import decode_packed, empty_packed, step_packed
from quatrain.optim.plain import empty_plain, loss_of, step_plain
from quatrain.optim.routing import (
    Routing,
    Treatment,
    label_of,
    labels_of,
    names_of,
    nvfp4_obstacle,
    refuse_misspelled,
    refuse_module,
    refuse_repeated,
    role_of,
    tensor_id,
    warn_without_names,
)
from quatrain.optim.state import load_exact, state_bytes, with_float8, without_float8

STATES = ("nvfp4", "fp32", "bf16")
BACKENDS = ("auto", "reference", "triton")
MASTERS = ("fp32", "bf16+int8", "bf16-sr")
OPTIONS = (
    "lr", "betas", "eps", "weight_decay", "maximize", "state", "master", "embeddings", "tile", "faithful", "seed",
)  # fmt: skip

# What a loaded state must have been saved with: these decide which tensors there are, or how they are to be read.
_FIXED = ("state", "master", "embeddings", "tile", "faithful")

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class AdamW(Optimizer):
    """AdamW with both moments in NVFP4: 1.14 bytes a parameter instead of 8.

    First moment: Hadamard transform, E2M1 with four-over-six scales, a dither that is subtracted when decoding (with
    `faithful`: stochastic rounding). Second moment: square root, tile mean in BF16, the rest through a Hadamard
    transform into E2M1 with four-over-six scales. The update itself is in fp32.

    Hidden matrices of at least 4,096 elements and 16 columns are treated so; vectors, small tensors, embeddings and
    the output head keep fp32 moments and torch's own arithmetic. `routing()` lists what happens to each tensor and
    why. Any group may set lr, betas, eps, weight_decay, maximize, state, master, embeddings, tile, faithful for itself.

    Args:
        params: `model.named_parameters()`, or parameters, or groups of either. Only names tell embeddings and head
            from hidden matrices.
        lr: learning rate; a tensor of one element (on the device, for CUDA graphs) or a number.
        betas: decay of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled, times lr.
        amsgrad: refused; there for torch's argument order.
        maximize: ascend.
        state: how moments are kept: "nvfp4", "fp32" (torch's AdamW) or "bf16" (stochastically rounded).
        master: what carries the precision of a BF16 parameter: "fp32" (a copy in the state, 4 bytes), "bf16+int8" (a
            correction, 1 byte) or "bf16-sr" (nothing: the update is rounded stochastically). FP32 parameters are
            their own master.
        embeddings: how the moments of embeddings and output head are kept: as `state`.
        tile: elements that share one mean of the second moment; a power of two from 16 to 256.
        faithful: the paper's bare pipeline, without denominator guard, deadband, energy-matched mean and dither.
        seed: of random bits; a state keeps the one it began with.
        backend: "auto", or "reference" or "triton" for the NVFP4 step; honoured or refused.
        foreach: refused if True; there is one step for all tensors.
        fused, capturable: accepted and without effect: the step always is both.
        differentiable: refused.

    Raises:
        ValueError: an option or a parameter that cannot be served; the remedy is named.

    Source: Full-Stack FP4 (Ding et al., 2026), Q-AdamW; AdamW: arXiv 1711.05101; BF16 with an INT8 correction: arXiv
        2602.23349.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state: str = "nvfp4",
        master: str = "fp32",
        embeddings: str = "fp32",
        tile: int = 128,
        faithful: bool = False,
        seed: int = 0,
        backend: str = "auto",
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        _refuse(amsgrad=amsgrad, foreach=foreach, differentiable=differentiable)
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, received {backend!r}")
        refuse_module(params)
        self.backend = backend
        self._clocks = Clocks()
        defaults: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize, "state": state,
            "master": master, "embeddings": embeddings, "tile": tile, "faithful": faithful, "seed": seed,
            "capturable": True,
        }  # fmt: skip
        super().__init__(params, defaults)
        if any("nvfp4" in (group["state"], group["embeddings"]) for group in self.param_groups):
            warn_without_names(self.param_groups, type(self).__name__)
        if master != "fp32" and not any(p.dtype == torch.bfloat16 for _, _, p in names_of(self.param_groups)):
            raise ValueError(
                f'master="{master}" says how BF16 parameters keep their precision, and none of the parameters is BF16; '
                'cast the model first (model.bfloat16()), or leave master="fp32"'
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; nothing is added where it cannot be served.

        Raises:
            ValueError: an option of the group, or one of its parameters.
        """
        refuse_misspelled(param_group, OPTIONS)
        super().add_param_group(param_group)
        try:
            _check_group(param_group)
            refuse_repeated(self.param_groups)
        except Exception:
            self.param_groups.pop()
            raise
        self._clocks.part([self.state[p] for p in param_group["params"] if "m_codes" in self.state.get(p, ())])

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
        self.step_groups()
        return loss

    @torch.no_grad()
    def step_groups(self) -> None:
        """What `step` does, without a closure and without hooks: for an optimizer that has this one inside."""
        work = []
        first = 0
        for group in self.param_groups:
            work.append((group, first, _with_gradient(group, first)))
            first += len(group["params"])
        for group, first, positions in work:
            self._step_group(group, first, positions)

    def _step_group(self, group: dict[str, Any], first: int, positions: list[int]) -> None:
        plain: list[tuple[int, Tensor, dict[str, Any]]] = []
        packed: list[tuple[Tensor, dict[str, Any]]] = []
        for position in positions:
            parameter = group["params"][position]
            state = self.state[parameter]
            number = tensor_id(label_of(group, position, first))
            if not state:
                refuse_in_capture("a parameter's first step")
                name = group["param_names"][position] if "param_names" in group else None
                state.update(new_state(name, parameter, group, parameter.device, number))
            if "m_codes" in state:
                packed.append((parameter, state))
            else:
                plain.append((number, parameter, state))
        if plain:
            step_plain(plain, group)
        if packed:
            states = [state for _, state in packed]
            holders = states
            if len(positions) < len(group["params"]):
                holders = [self.state[p] for p in group["params"] if "m_codes" in self.state.get(p, ())]
            self._clocks.prepare(states, holders)
            step_packed(packed, group, self.backend)

    def routing(self) -> Routing:
        """What happens to each tensor and why; prints as a table, `.summary()` is shorter."""
        routing = Routing()
        for label, (index, name, parameter) in zip(
            labels_of(self.param_groups), names_of(self.param_groups), strict=True
        ):
            group = self.param_groups[index]
            moments, reason = storage_of(name, parameter, group)
            method = moments + (f", master {group['master']}" if _low(parameter) else "")
            state = self._expected(name, parameter, group).values()
            size = sum(tensor.numel() * tensor.itemsize for tensor in state)
            routing[label] = Treatment(method, reason, tuple(parameter.shape), index, size)
        return routing

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """exp_avg and exp_avg_sq of a parameter that has stepped, decoded: its shape, fp32 (fp64 for float64).

        Raises:
            ValueError: the parameter is not here, or has no state yet.
        """
        state = self.state.get(parameter)
        group = next((g for g in self.param_groups if any(p is parameter for p in g["params"])), None)
        if not state or group is None:
            raise ValueError(
                "moments are of a parameter of this optimizer that has stepped, received another; step first"
            )
        if "m_codes" in state:
            return decode_packed(parameter, state, group)
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        wide = torch.promote_types(exp_avg.dtype, torch.float32)
        return exp_avg.to(wide), exp_avg_sq.to(wide)

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
        load_exact(self, state_dict, self._expected, _FIXED)

    def _expected(self, name: str | None, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state = new_state(name, parameter, group, torch.device("meta"))
        return state if "step" in state else state | new_clock(torch.device("meta"))

    def __getstate__(self) -> dict[str, Any]:
        values = super().__getstate__()
        return values | {"state": without_float8(values["state"]), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"state": with_float8(state["state"])})
        self._clocks = Clocks()  # equal clocks are merged again at the next step


def new_state(
    name: str | None, parameter: Tensor, group: Mapping[str, Any], device: torch.device, number: int = 0
) -> dict[str, Any]:
    """Zero moments of one tensor, on its device or on "meta"; packed ones, drawn by `number`, without a clock."""
    moments, _ = storage_of(name, parameter, group)
    if moments == "nvfp4":
        return empty_packed(parameter, group, device, number)
    return empty_plain(parameter, moments, group["master"], device)


def storage_of(name: str | None, parameter: Tensor, group: Mapping[str, Any]) -> tuple[str, str]:
    """How the moments of one tensor are kept ("nvfp4", "fp32", "bf16" or "fp64"), and why."""
    role = role_of(name, parameter)
    if parameter.dtype == torch.float64:
        return "fp64", "a float64 parameter keeps its precision"
    if role.kind in ("vector", "small"):
        return "fp32", role.reason
    option = "state" if role.kind == "matrix" else "embeddings"
    obstacle = nvfp4_obstacle(parameter) if group[option] == "nvfp4" else None
    if obstacle is not None:
        return "fp32", obstacle
    return group[option], role.reason if option == "state" else f'{role.reason}, embeddings="{group[option]}"'


def _low(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.bfloat16, torch.float16)


def _refuse(*, amsgrad: bool, foreach: bool | None, differentiable: bool) -> None:
    if amsgrad:
        raise ValueError("amsgrad must be False, received True: its running maximum is not kept; use torch.optim.AdamW")
    if differentiable:
        raise ValueError("differentiable must be False, received True: codes have no gradient; use torch.optim.AdamW")
    if foreach:
        raise ValueError("foreach must be None or False, received True: one step serves all tensors; leave it out")


def _check_group(group: dict[str, Any]) -> None:
    """Options and parameters of one group; betas become plain numbers."""
    if group.get("amsgrad"):
        _refuse(amsgrad=True, foreach=None, differentiable=False)
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"lr as a tensor must have one element, received {tuple(group['lr'].shape)}; give a scalar")
    two = "betas must be two numbers in [0, 1)"
    try:
        betas = group["betas"] = tuple(float(beta) for beta in group["betas"])
    except TypeError as error:
        raise ValueError(f"{two}, received {group['betas']!r}") from error
    _require(group["lr"] >= 0, "lr must not be negative", group["lr"])
    _require(group["eps"] >= 0, "eps must not be negative", group["eps"])
    _require(group["weight_decay"] >= 0, "weight_decay must not be negative", group["weight_decay"])
    _require(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), two, betas)
    _require(isinstance(group["seed"], int) and 0 <= group["seed"] < 2**63, "seed must be in [0, 2^63)", group["seed"])
    for option, choices in (("state", STATES), ("embeddings", STATES), ("master", MASTERS)):
        if group[option] not in choices:
            raise ValueError(f"{option} must be one of {', '.join(choices)}, received {group[option]!r}")
    MomentSpec(tile=group["tile"], faithful=group["faithful"], master=group["master"])  # checks them
    for _, name, parameter in names_of([group]):
        if hasattr(parameter, "device_mesh") and (_low(parameter) or storage_of(name, parameter, group)[0] != "fp32"):
            raise ValueError(
                "sharded parameters (DTensor) must be FP32 with fp32 moments, received "
                f'{parameter.dtype} and state="{group["state"]}"; give state="fp32", or replicate them (DDP)'
            )
        if not parameter.is_floating_point() or parameter.itemsize < 2:
            raise ValueError(
                f"parameters must be float32, bfloat16, float16 or float64, received {parameter.dtype}; "
                "for complex parameters use torch.optim.AdamW on torch.view_as_real of them"
            )
        if parameter.dtype == torch.float16 and group["master"] != "fp32":
            raise ValueError(
                f'master="{group["master"]}" is for BF16 parameters, received a float16 one; '
                'cast the model to bfloat16 or leave master="fp32"'
            )


def _with_gradient(group: Mapping[str, Any], first: int) -> list[int]:
    """Positions in the group of the parameters that have a gradient, all of them dense."""
    positions = []
    for position, parameter in enumerate(group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"gradients must be dense, received a {gradient.layout} one of {label_of(group, position, first)}; "
                "make the embedding with sparse=False, or give it to torch.optim.SparseAdam"
            )
        positions.append(position)
    return positions


def _require(condition: Any, rule: str, received: object) -> None:
    if not condition:
        raise ValueError(f"{rule}, received {received}")
