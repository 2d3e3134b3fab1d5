"""What Root and Muon do to one hidden matrix: which tensors are some, their options, batches, state and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels.newton_schulz import SPLITS, Iteration, Triple
from quatrain.optim.adamw import MASTERS, OPTIONS
from quatrain.optim.coefficients import Coefficients, coefficients_for
from quatrain.optim.momentum import MOMENTUM_STATES, empty_momentum, matrix_shape
from quatrain.optim.plain import empty_master
from quatrain.optim.routing import refuse_misspelled, role_of

Member = tuple[str | None, Tensor]
Options = Mapping[str, Any]

ADAMW_LR = 0.1  # AdamW's lr over the matrices' where the size of updates is not matched to AdamW's
_WITHOUT_EFFECT = ("amsgrad", "foreach", "fused", "capturable", "differentiable")  # arguments of AdamW, checked there
_OWN = ("params", "param_names", "treatment", "automatic", "adamw")  # of groups of Root and Muon
ADJUSTMENTS = (None, "original", "match_rms_adamw")
NARROWEST = 16  # rows and columns of a matrix that is orthogonalized
BATCH_ELEMENTS = 1 << 26  # matrices of one shape go through the iteration together, up to so many elements
FOUR_OVER_SIX = QuantSpec("nvfp4", scale="four-over-six")


def members_of(params: Any) -> list[Member]:
    """(name or None, tensor) of what a group was given.

    Raises:
        ValueError: a set, something that is no tensor, or names for some of the parameters only.
    """
    if isinstance(params, set):
        raise ValueError("parameters must be ordered, received a set; give a list")
    items: Iterable[Any] = [params] if isinstance(params, Tensor) else params
    members = [item if isinstance(item, tuple) else (None, item) for item in items]
    for name, parameter in members:
        if not isinstance(parameter, Tensor):
            raise ValueError(f"parameters must be tensors, or pairs of a name and one, received {type(parameter)}")
        if (name is None) != (members[0][0] is None):
            raise ValueError("either all parameters have names or none, received both; give model.named_parameters()")
    return members


def as_given(members: Sequence[Member]) -> list[Any]:
    """`members` in the form in which torch's optimizers take them."""
    return [parameter if name is None else (name, parameter) for name, parameter in members]


def refuse_unknown(options: Options) -> None:
    """Raise where `adamw=` of Root and Muon has a key that is no option of AdamW.

    Raises:
        ValueError: the key, and those there are.
    """
    unknown = [option for option in options if option not in (*OPTIONS, *_WITHOUT_EFFECT)]
    if unknown:
        raise ValueError(f"adamw takes {', '.join(OPTIONS)}, received {', '.join(map(repr, unknown))}")


def options_of_others(defaults: Options, adamw: Options, options: Options, treatment: str) -> dict[str, Any]:
    """AdamW's options for the tensors of a group that are no matrices; keys of the user's own go along.

    Args:
        defaults: of the optimizer.
        adamw: what it was given for AdamW.
        options: of the group.
        treatment: of the group.

    Raises:
        ValueError: a learning rate that is no number, or a misspelled option.
    """
    group = {**defaults, **options}
    if not isinstance(group["lr"], Real | Tensor):
        raise ValueError(f"lr must be a number or a tensor of one element, received {group['lr']!r}")
    share = 1.0 if group["adjust_lr_fn"] == "match_rms_adamw" else ADAMW_LR
    found = {key: group[key] for key in ("weight_decay", "master", "seed")}
    found |= {key: value for key, value in options.items() if key not in defaults and key not in _OWN}
    # Tensors of their own: schedulers write into them.
    found |= {key: group[key] * share for key in ("lr", "initial_lr") if key in group}
    own = dict(options.get("adamw") or {})
    refuse_misspelled(own, OPTIONS)
    if treatment == "adamw":
        return found | {**adamw, **{key: value for key, value in options.items() if key != "adamw"}, **own}
    given = {**adamw, **own}
    if "lr" in given and "initial_lr" in found:
        given.setdefault("initial_lr", given["lr"])  # a schedule begins with AdamW's own, not with the matrices'
    return found | given


def obstacle(name: str | None, parameter: Tensor) -> str | None:
    """Why a tensor is not orthogonalized but left to AdamW, or None."""
    role = role_of(name, parameter)
    if role.kind != "matrix":
        return role.reason
    narrow = min(matrix_shape(parameter))
    return None if narrow >= NARROWEST else f"a matrix with a side of {narrow}, less than {NARROWEST}"


def check_group(group: Options) -> None:
    """Options and parameters of one group of matrices.

    Raises:
        ValueError: what cannot be served, with the remedy.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr as a tensor must have one element, received {tuple(lr.shape)}; give a scalar")
    _require(lr >= 0, "lr must not be negative", lr)
    _require(group["weight_decay"] >= 0, "weight_decay must not be negative", group["weight_decay"])
    _require(0 <= group["momentum"] < 1, "momentum must be in [0, 1)", group["momentum"])
    for option, choices in (
        ("adjust_lr_fn", ADJUSTMENTS),
        ("split", SPLITS),
        ("momentum_state", MOMENTUM_STATES),
        ("master", MASTERS),
    ):
        if group[option] not in choices:
            raise ValueError(f"{option} must be one of {', '.join(map(str, choices))}, received {group[option]!r}")
    clip = group["clip"]
    _require(clip is None or 0 < clip <= 1, "clip must be None or a quantile in (0, 1], as 0.99", clip)
    iteration_of(group, (1024, 1024))
    for parameter in group["params"]:
        if parameter.dim() < 2 or not parameter.numel():
            raise ValueError(
                f"a matrix has at least 2 dimensions and an element, received shape {tuple(parameter.shape)}; "
                'put it in a group with treatment="adamw"'
            )
        if not parameter.is_floating_point() or parameter.itemsize < 2:
            raise ValueError(f"parameters must be float32, bfloat16, float16 or float64, received {parameter.dtype}")
        iteration_of(group, matrix_shape(parameter))


def _require(condition: Any, rule: str, received: object) -> None:
    if not condition:
        raise ValueError(f"{rule}, received {received}")


def iteration_of(group: Options, shape: tuple[int, int]) -> Iteration:
    """The iteration for matrices of one shape."""
    coefficients, operands = _frozen(group["coefficients"]), _operands(group["operands"])
    return _iteration(coefficients, operands, group["split"], int(group["ns_steps"]), shape)


@cache
def _iteration(
    coefficients: Coefficients, operands: QuantSpec | None, split: str | None, steps: int, shape: tuple[int, int]
) -> Iteration:
    kind = "bf16" if operands is None else operands.format
    schedule = coefficients_for(coefficients, *shape, steps=steps, operands=kind, split=split)
    return Iteration(schedule, operands, split)


def _frozen(coefficients: Any) -> str | tuple[Triple, ...] | tuple[float, ...]:
    """A name or path as text, triples as tuples."""
    if isinstance(coefficients, list | tuple):
        return tuple(tuple(item) if isinstance(item, list | tuple) else item for item in coefficients)
    return str(coefficients)


def _operands(operands: Any) -> QuantSpec | None:
    if operands == "bf16":
        return None
    if operands == "nvfp4":
        return FOUR_OVER_SIX
    if isinstance(operands, str) and operands.startswith("{"):  # as a state dict holds a QuantSpec
        return QuantSpec.from_json(operands)
    if not isinstance(operands, QuantSpec):
        raise ValueError(f'operands must be "bf16", "nvfp4" or a QuantSpec, received {operands!r}')
    return operands


def method(group: Options) -> str:
    """What `routing()` says of a matrix."""
    operands = group["operands"]
    given = group["coefficients"]
    words = ["orthogonal", operands if operands in ("bf16", "nvfp4") else str(operands)]
    words.append("own coefficients" if isinstance(given, list | tuple) else str(given))
    words += [f"{group['split']} split"] if group["split"] else []
    words += [f"clip {group['clip']:g}"] if group["clip"] is not None else []
    return ", ".join([*words, f"momentum {group['momentum_state']}"])


def batches_of(named: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Parameters that have a gradient, by shape, dtypes and device, in batches of bounded size.

    Raises:
        ValueError: a sparse gradient.
    """
    together: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for label, parameter in named:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(
                f"gradients must be dense, received a {grad.layout} one of {label}; make the module with sparse=False"
            )
        if hasattr(parameter, "full_tensor"):
            raise ValueError(
                f"matrices are orthogonalized whole, received {label} sharded over processes; keep it whole, or "
                'give it to a group with treatment="adamw"'
            )
        key = (matrix_shape(parameter), parameter.dtype, grad.dtype, parameter.device)
        together.setdefault(key, []).append((label, parameter))
    for items in together.values():
        size = max(1, BATCH_ELEMENTS // items[0][1].numel())
        for start in range(0, len(items), size):
            yield items[start : start + size]


def empty_matrix_state(parameter: Tensor, group: Options, device: torch.device) -> dict[str, Any]:
    """The state of one matrix before its first step, on its device or on "meta" for shapes and dtypes alone."""
    state = empty_momentum(parameter, group["momentum_state"], device) | empty_master(
        parameter, group["master"], device
    )
    draws = group["momentum_state"] == "nvfp4" or (parameter.dtype == torch.bfloat16 and group["master"] == "bf16-sr")
    return state | ({"step": torch.zeros((), dtype=torch.int64, device=device)} if draws else {})


def state_size(parameter: Tensor, group: Options) -> int:
    """Bytes of the state of one matrix."""
    return sum(t.numel() * t.itemsize for t in empty_matrix_state(parameter, group, torch.device("meta")).values())


def adjustment(name: str | None, shape: tuple[int, int]) -> float:
    """Factor of the learning rate for a matrix [R, C], as torch.optim.Muon's `adjust_lr_fn`.

    Sources: Jordan 2024 ("original"), arXiv 2502.16982 ("match_rms_adamw").
    """
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))
