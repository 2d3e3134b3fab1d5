"""What the converted modules of one model share: the clock that randomness counts by, the precision phase, and the
largest magnitude that every operand has shown.

A plain object, not a module: nothing of it enters the model's state_dict, and `.to()` cannot replace it behind the
modules' backs.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from quatrain.kernels.attention_rows import ATTENTION_OPERANDS
from quatrain.nn.nonfinite import NonFiniteError
from quatrain.nn.realign import Splits

OPERANDS = ("fprop.input", "fprop.weight", "dgrad.grad", "dgrad.weight", "wgrad.grad", "wgrad.input")
PRECISIONS = (None, "forward", "both")


class SharedState:
    """Clock, phase and seen maxima of one converted model.

    Attributes:
        clock: int64 [1] on the model's device, advanced at each training forward of the root.
        precision: None (the recipe), "forward" (forward GEMMs in BF16) or "both" (everything in BF16).
        generation: int64 [1], counts optimizer steps and phase changes; weight codes of an older one are stale.
        seen: fp32 [modules, 6], the running maximum magnitude of every operand, NaN and infinity included.
        names: module names, in the order of `seen`.
        attentions: how many of them, the last ones, are attention modules.
        splits: the modules whose split is realigned, and the optimizers that move them.
    """

    def __init__(self, names: list[str], device: torch.device, attentions: int = 0) -> None:
        self.names = names
        self.attentions = attentions
        self.said_idle = False
        self.splits = Splits()
        self.precision: str | None = None
        self.generation = torch.zeros(1, dtype=torch.int64)  # on the CPU always
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self.seen = torch.zeros(len(names), len(OPERANDS), dtype=torch.float32, device=device)
        _watch_optimizers(self)
        _run_hook_uncompiled()

    def follow(self, device: torch.device) -> None:
        """Move to the device where the modules now live; dtypes never change."""
        if self.clock.device != device:
            self.clock = _moved(self.clock, device)
            self.seen = _moved(self.seen, device)

    def operand(self, module: int, operand: int) -> str:
        """The name of an operand of the module with that index."""
        attention = module >= len(self.names) - self.attentions
        return (ATTENTION_OPERANDS if attention else OPERANDS)[operand]

    def advance(self, root: nn.Module, *_: object) -> None:
        """Forward pre-hook of the root: one tick for each training forward, none for a recompute inside backward."""
        if root.training and not _inside_backward():  # in any grad mode: checkpointing's first pass has it off
            self.clock.add_(1)

    def __setstate__(self, values: dict[str, object]) -> None:
        self.__dict__.update(values)
        _run_hook_uncompiled()
        _watch_optimizers(self)

    def __deepcopy__(self, memo: dict[int, object]) -> SharedState:
        copy = SharedState(list(self.names), self.clock.device, self.attentions)
        copy.precision, copy.clock, copy.seen = self.precision, self.clock.clone(), self.seen.clone()
        memo[id(self)] = copy
        return copy


def keys_now(keys: Tensor, clock: Tensor) -> Tensor:
    """int64 [6, 2]: the seed of each of six operands with a copy of the clock, kept for the backward pass."""
    return _keys_now_op(keys, clock) if torch.compiler.is_compiling() else _with_clock(keys, clock)


def _with_clock(keys: Tensor, clock: Tensor) -> Tensor:
    return torch.stack([keys, clock.expand_as(keys)], dim=1)


def note_maxima(row: Tensor, seen: Tensor) -> None:
    """Raise the running maxima fp32 [6] of one module in place, NaN and infinity included."""
    if torch.compiler.is_compiling():
        _note_maxima_op(row, seen)
    else:
        torch.maximum(row, seen, out=row)


@torch.library.custom_op("quatrain::note_maxima", mutates_args=("row",))
def _note_maxima_op(row: Tensor, seen: Tensor) -> None:
    torch.maximum(row, seen, out=row)


@_note_maxima_op.register_fake
def _(row: Tensor, seen: Tensor) -> None:
    return None


@torch.library.custom_op("quatrain::keys_now", mutates_args=())
def _keys_now_op(keys: Tensor, clock: Tensor) -> Tensor:
    # An opaque operation on purpose: compilers recompute cheap ones in backward, from a clock that has moved on.
    return _with_clock(keys, clock)


@_keys_now_op.register_fake
def _(keys: Tensor, clock: Tensor) -> Tensor:
    return keys.new_empty(keys.shape[0], 2)


def key_word(seed: int, rank: int, name: str, operand: str) -> int:
    """A 64-bit seed for one operand of one module."""
    digest = hashlib.sha256(f"{seed}\0{rank}\0{name}\0{operand}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else the input's own."""
    kind = x.device.type
    if kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def maxima_row(zero: Tensor, amaxes: dict[int, Tensor | None]) -> Tensor:
    """fp32 [6]: the maximum magnitude of each operand that was quantized, `zero` [1] for the others."""
    found = [amaxes.get(i) for i in range(len(OPERANDS))]
    return torch.cat([zero if amax is None else amax for amax in found])


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _inside_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _run_hook_uncompiled() -> None:
    """Keep torch.compile(model) to one graph: the root's hook runs as it is, yet is traced when a caller inlines it."""
    from torch._dynamo.eval_frame import skip_code  # slow to import, and needed only once a model is converted

    skip_code(SharedState.advance.__code__)


def _watch_optimizers(state: SharedState) -> None:
    """Any optimizer step makes cached weight codes stale, also one that writes through `.data`."""
    reference = weakref.ref(state)

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        alive = reference()
        if alive is not None:
            alive.generation.add_(1)
            if not torch.compiler.is_compiling():
                if alive.splits.after_step(optimizer):
                    alive.generation.add_(1)
                alive.splits.refresh(alive.generation)

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(state, handle.remove)


def shared_states(model: nn.Module) -> list[SharedState]:
    """The states that converted modules inside `model` use: none, one, or several after several conversions."""
    return list(dict.fromkeys(_states(model)))


def _states(model: nn.Module) -> Iterator[SharedState]:
    for module in model.modules():
        state = module.__dict__.get("_shared_state")
        if isinstance(state, SharedState):
            yield state


def set_precision(model: nn.Module, precision: str | None) -> None:
    """Switch the converted modules of `model` between their rows and BF16.

    Args:
        model: any module that holds converted ones.
        precision: None follows the recipe; "forward" runs forward GEMMs unquantized and keeps the backward rows;
            "both" runs everything unquantized.

    Raises:
        ValueError: another word.

    Source: arXiv 2509.25149 section 4.5 and appendix D (late switch to BF16).
    """
    if precision not in PRECISIONS:
        raise ValueError(f'precision must be None, "forward" or "both", received {precision!r}')
    for state in shared_states(model):
        if state.precision != precision:
            state.precision = precision
            state.generation.add_(1)


def drop_weight_codes(model: nn.Module) -> None:
    """Make every converted module quantize its weight anew at its next forward.

    Needed after writing weights through `.data` outside an optimizer's step, or putting another Parameter in a weight's
    place, on a GPU: on a CPU a sample of the weight's elements tells, and all other writes are noticed everywhere.
    """
    for state in shared_states(model):
        state.generation.add_(1)


def rng_state(model: nn.Module) -> Tensor:
    """int64 [n] on the CPU: the clock of each conversion inside `model` ([1] after one `apply`, zero if none).

    With it, `seed` and the weights, a run continues with the same random bits.
    """
    states = shared_states(model)
    return torch.cat([s.clock.detach().cpu() for s in states]) if states else torch.zeros(1, dtype=torch.int64)


def set_rng_state(model: nn.Module, value: Tensor) -> None:
    """Put back what `rng_state` returned.

    Raises:
        ValueError: a tensor of another length than this model has clocks.
    """
    states = shared_states(model)
    if value.numel() != max(len(states), 1):
        raise ValueError(
            f"the state must hold {max(len(states), 1)} clock value(s), received {value.numel()}; "
            "convert the model with the same recipe first"
        )
    for state, clock in zip(states, value.reshape(-1, 1), strict=False):
        state.clock.copy_(clock)


def _mention_idle(state: SharedState) -> None:
    """Warn once about modules that did not run while others did: something may use their weight directly."""
    ran = (state.seen != 0).any(dim=1).tolist()  # NaN counts as not zero
    idle = [name for name, active in zip(state.names, ran, strict=True) if not active]
    if idle and len(idle) < len(ran) and not state.said_idle and state.precision is None:
        state.said_idle = True
        warnings.warn(
            f"{len(idle)} converted module(s) have not run: {', '.join(idle[:4])}; a linear is not quantized "
            "where its parent passes the weight to a function of its own (keep it by name), attention where the "
            'model\'s attn_implementation is not "quatrain"',
            stacklevel=3,
        )


def check_finite(model: nn.Module) -> None:
    """Raise if any quantized operand has been NaN or infinite since the last check (one synchronisation each).

    Raises:
        NonFiniteError: names up to eight modules and operands.
    """
    for state in shared_states(model):
        bad = (~torch.isfinite(state.seen)).nonzero().tolist()
        _mention_idle(state)
        state.seen.zero_()
        if bad:
            places = [f"{state.names[i]} ({state.operand(i, j)})" for i, j in bad]
            more = f" and {len(places) - 8} more" if len(places) > 8 else ""
            raise NonFiniteError(
                f"operands must be finite, received NaN or infinity in {', '.join(places[:8])}{more}; "
                "resume from the last checkpoint with a lower learning rate, or keep these modules in BF16"
            )
