"""When splits are realigned, with what becomes of the optimizer's moments, and what it costs.

Each optimizer step is counted by a hook, outside of any compiled graph; once all the optimizers that move a module's
factors have stepped, those that are due are split anew. Data-parallel processes hold equal weights and draw equal
sketches, so they do the same without talking; only sketches of activations are summed over the processes, and sharded
parameters (FSDP2) gathered and scattered again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quatrain.nn.factors import refresh_factors
from quatrain.nn.lowrank import rotate_linear, rotate_square, transport
from quatrain.nn.shards import whole, write

if TYPE_CHECKING:
    from quatrain.nn.split_linear import SplitLinear

_LINEAR = ("exp_avg", "momentum_buffer")
_SQUARE = ("exp_avg_sq", "max_exp_avg_sq")


class Splits:
    """The modules of one conversion that have factors, and the optimizers seen to move them.

    Attributes:
        count: modules realigned so far.
        seconds: spent on it.
    """

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._modules: weakref.WeakSet[SplitLinear] = weakref.WeakSet()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "seconds": self.seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.count, self.seconds = state["count"], state["seconds"]

    def add(self, module: SplitLinear) -> None:
        """Count this module in; again is no harm."""
        self._modules.add(module)

    def modules(self) -> list[SplitLinear]:
        """Those that are alive, in the order of conversion."""
        return sorted(self._modules, key=lambda module: module._index)

    def after_step(self, optimizer: Optimizer) -> bool:
        """Note a step; once every parameter that learns has been stepped, count it and realign what is due.

        Returns:
            Whether weights have been changed.
        """
        modules = self.modules()
        mine = {id(p) for module in modules for p in _parameters(module)}
        if not mine or not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            return False
        self._stepped[optimizer] = True
        for other in list(self._stepped):
            mine -= {id(p) for group in other.param_groups for p in group["params"]} if self._stepped[other] else set()
        if mine:
            return False  # another optimizer holds the rest
        optimizers = [o for o, stepped in self._stepped.items() if stepped]
        for other in optimizers:
            self._stepped[other] = False
        due = []
        for module in modules:
            module._step += 1
            if module.is_due():
                due.append(module)
        self.realign(due, optimizers)
        for module in modules:
            module._set_due()
        return bool(due)

    def refresh(self, generation: Tensor) -> None:
        """Make the bases of all factors anew, together, where a GPU would spend launches on each."""
        refresh_factors(((*module.factors(), module._keys) for module in self.modules()), generation)

    def realign(self, modules: Iterable[SplitLinear], optimizers: Iterable[Optimizer]) -> None:
        """Split these modules anew now; the moments of the optimizers follow."""
        start = time.perf_counter()
        optimizers = list(optimizers)
        for module in modules:
            _realign(module, optimizers)
            self.count += 1
            self.seconds += time.perf_counter() - start
            start = time.perf_counter()


@torch.no_grad()
def _realign(module: SplitLinear, optimizers: list[Optimizer]) -> None:
    split = module.split
    if split is None:
        return
    left, right = module.factors()
    old_left, old_right = whole(left.detach()).clone(), whole(right.detach()).clone()
    module.resplit(module.merged_exact())
    new_left, new_right = whole(left.detach()), whole(right.detach())
    # dL2 = beta G L1^T is linear in L1^T, and dL1^T = beta G^T L2 in L2.
    for parameter, old, new in ((left, old_right.t(), new_right.t()), (right, old_left, new_left)):
        for state in _states(parameter, optimizers):
            if split.state == "reset":
                _reset(state)
            else:
                _rotate(state, transport(old, new), transposed=parameter is right)
    for changed in (module.weight, left, right):
        for state in _states(changed, optimizers):
            _refresh(state, changed)


def _states(parameter: Tensor, optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """The state of one parameter; optimizers inside others may share theirs, which then counts once."""
    found = [o.state[parameter] for o in optimizers if parameter in o.state]
    return list({id(state): state for state in found}.values())


def _reset(state: dict[str, Any]) -> None:
    """Zero moments and step: bias correction starts anew."""
    for key, value in state.items():
        if isinstance(value, Tensor) and key not in ("master", "correction"):
            value.zero_()


def _rotate(state: dict[str, Any], change: Tensor, *, transposed: bool) -> None:
    for key, value in state.items():
        rotate = rotate_linear if key in _LINEAR else rotate_square if key in _SQUARE else None
        if rotate is None or not isinstance(value, Tensor):
            continue
        moment = whole(value).t() if transposed else whole(value)
        found = rotate(moment, change)
        write(value, found.t() if transposed else found)


def _refresh(state: dict[str, Any], parameter: Tensor) -> None:
    """What an optimizer keeps beside a narrow parameter is of its old value."""
    for key, value in state.items():
        if key == "master":
            value.copy_(parameter)
        elif key == "correction":
            value.zero_()


def _parameters(module: SplitLinear) -> list[Tensor]:
    return [p for p in (module.weight, *module.factors()) if p.requires_grad]


def sum_over_ranks(sketch: Tensor) -> Tensor:
    """The sum over all processes of the default group, if there is one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        sketch = sketch.clone()
        distributed.all_reduce(sketch)
    return sketch


def sketch_input(x: Tensor, probe: Tensor, sketch: Tensor, due: Tensor) -> None:
    """Add X^T (X probe) to the sketch where this step is followed by a realignment; else nothing is computed."""
    if torch.compiler.is_compiling():
        _sketch_op(x, probe, sketch, due)
    elif not x.is_meta:
        _sketch(x, probe, sketch, due)


def _sketch(x: Tensor, probe: Tensor, sketch: Tensor, due: Tensor) -> None:
    if int(due):
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(probe.dtype)
            sketch.add_(wide.t() @ (wide @ probe))


@torch.library.custom_op("quatrain::sketch_input", mutates_args=("sketch",))
def _sketch_op(x: Tensor, probe: Tensor, sketch: Tensor, due: Tensor) -> None:
    _sketch(x, probe, sketch, due)


@_sketch_op.register_fake
def _(x: Tensor, probe: Tensor, sketch: Tensor, due: Tensor) -> None:
    return None
