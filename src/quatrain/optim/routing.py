"""What each tensor is to an optimizer (hidden matrix, embedding, head, vector, small), and why.

Only names and parameters are known to an optimizer. Names come from `model.named_parameters()`; without them every
tensor of at least 2 dimensions and 4,096 elements counts as a hidden matrix.
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

Kind = Literal["matrix", "embedding", "head", "vector", "small"]

SMALLEST = 4096  # elements; fewer are not worth a launch (torchao and bitsandbytes draw the line here too)
NARROWEST = 16  # columns: one NVFP4 block
_LONG_ENOUGH = 5  # letters of an option, for another name to be a slip of it rather than a word

_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_EMBEDDING = re.compile(r"(^|_)(embed|embeds|embedder|embedding|embeddings|emb|wte|wpe)(_|$)")
_FACTORS = ("lowrank_left", "lowrank_right")  # of a split linear
_HEADS = (
    "lm_head", "head", "output", "embed_out", "unembed", "unembedding", "output_layer", "output_head",
    "output_projection", "out_head", "score", "classifier", "qa_outputs", "cls", "logits",
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    """What a tensor is to the model, and how that was found out."""

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Treatment:
    """What an optimizer does with one tensor.

    Attributes:
        method: the update and how its state is kept, "nvfp4" for instance.
        reason: why.
        shape: of the tensor.
        group: index of its parameter group.
        state_bytes: what its state takes once it has stepped.
    """

    method: str
    reason: str
    shape: tuple[int, ...]
    group: int
    state_bytes: int = 0


class Routing(dict[str, Treatment]):
    """Tensor name (or "parameter 3" without names) -> Treatment; prints as a table."""

    def summary(self) -> str:
        """One line for each pair of method and reason: tensors, parameters, bytes of state, the first names."""
        together: dict[tuple[str, str], list[str]] = {}
        for name, treatment in self.items():
            together.setdefault((treatment.method, treatment.reason), []).append(name)
        lines = []
        for (method, reason), names in together.items():
            elements = sum(_elements(self[name].shape) for name in names)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            cost = _each(sum(self[name].state_bytes for name in names), elements)
            lines.append(f"{method}{cost}: {_tensors(len(names))}, {elements:,} parameters ({reason}): {shown}")
        elements = sum(_elements(treatment.shape) for treatment in self.values())
        cost = _each(sum(treatment.state_bytes for treatment in self.values()), elements)
        return "\n".join([*lines, f"all{cost}: {_tensors(len(self))}, {elements:,} parameters"])

    def __str__(self) -> str:
        rows = [(name, "x".join(map(str, t.shape)) or "0-d", t.method, t.reason) for name, t in self.items()]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        return "\n".join("  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows)


def role_of(name: str | None, parameter: Tensor) -> Role:
    """The role of one tensor.

    Args:
        name: its name in the model; None if it was given without.
        parameter: any shape; its size counts before any sharding.
    """
    if parameter.ndim < 2:
        return Role("vector", f"{parameter.ndim}-D")
    *parts, last = canonical(name).lower().split(".") if name is not None else [""]
    if last in _FACTORS:
        return Role("small", "low-rank factor of a split linear")
    head = _head_part(parts)
    if head is not None:
        return Role("head", f'output head by its name ("{head}")')
    embedding = next((part for part in parts if _EMBEDDING.search(part)), None)
    if embedding is None and parts[-1:] == ["shared"]:  # T5's
        embedding = "shared"
    if embedding is not None:
        return Role("embedding", f'embedding by its name ("{embedding}")')
    if parameter.numel() < SMALLEST:
        return Role("small", f"{parameter.numel():,} elements, fewer than {SMALLEST:,}")
    return Role("matrix", "hidden matrix" if name is not None else "no name: taken for a hidden matrix")


def nvfp4_obstacle(parameter: Tensor) -> str | None:
    """Why the moments of a tensor cannot be kept in NVFP4, or None."""
    if parameter.ndim < 2:
        return "fewer than 2 dimensions"
    if parameter.numel() < SMALLEST:
        return f"{parameter.numel():,} elements, fewer than {SMALLEST:,}"
    columns = parameter.numel() // parameter.shape[0]
    return None if columns >= NARROWEST else f"rows of {columns} elements, fewer than {NARROWEST}"


def names_of(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str | None, Tensor]]:
    """(group index, name or None, tensor) of every parameter, in order."""
    for index, group in enumerate(groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=True):
            yield index, name, parameter


def labels_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The label of every parameter, in order."""
    starts = itertools.accumulate((len(group["params"]) for group in groups), initial=0)
    return [
        label_of(group, position, first)
        for group, first in zip(groups, starts, strict=False)
        for position in range(len(group["params"]))
    ]


def refuse_module(params: object) -> None:
    """Raise where a model was given in place of its parameters."""
    if isinstance(params, nn.Module):
        raise ValueError(f"params must be parameters, received a {type(params).__name__}; give its .named_parameters()")


def refuse_repeated(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise where two parameters have one name: names key the random bits and match states on disk.

    Raises:
        ValueError: the name, and what to do.
    """
    seen: set[str] = set()
    for _, name, _ in names_of(groups):
        if name is not None and canonical(name) in seen:
            raise ValueError(
                f'names must tell parameters apart, received "{name}" twice; prefix the names of each model, as in '
                '[(f"actor.{n}", p) for n, p in actor.named_parameters()]'
            )
        seen.update(() if name is None else (canonical(name),))


def refuse_misspelled(options: Mapping[Any, Any], known: Iterable[str]) -> None:
    """Raise where an option of a group is one slip away from a known one, which would stay at its default in silence.

    Other keys are the user's own, as with torch's optimizers; so are flags, and names with a number at the end.

    Raises:
        ValueError: the option, and the one that may be meant.
    """
    known = [name for name in known if len(name) >= _LONG_ENOUGH]
    for option, value in options.items():
        own = not isinstance(option, str) or isinstance(value, bool) or option[-1:].isdigit() or option in known
        near = [] if own else [name for name in known if _one_slip(option, name)]
        if near:
            raise ValueError(f'a group has no option "{option}"; did you mean "{near[0]}"?')


def _one_slip(a: str, b: str) -> bool:
    """Whether one letter too many, missing or wrong, or two that changed places, make one of the other."""
    if len(a) == len(b):
        wrong = [i for i in range(len(a)) if a[i] != b[i]]
        swapped = (
            len(wrong) == 2 and wrong[1] == wrong[0] + 1 and a[wrong[0]] + a[wrong[1]] == b[wrong[1]] + b[wrong[0]]
        )
        return len(wrong) == 1 or swapped
    shorter, longer = sorted((a, b), key=len)
    return len(longer) == len(shorter) + 1 and any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer)))


def label_of(group: Mapping[str, Any], position: int, first: int) -> str:
    """A parameter's name, or "parameter 3" where it has none; `first` counts the parameters of the groups before."""
    names = group.get("param_names")
    return names[position] if names else f"parameter {first + position}"


def warn_without_names(groups: Sequence[Mapping[str, Any]], optimizer: str) -> None:
    """One warning where tensors that count as hidden matrices came without names."""
    nameless = [p for _, name, p in names_of(groups) if name is None and role_of(None, p).kind == "matrix"]
    if nameless:
        warnings.warn(
            f"{optimizer} was given parameters without names: all {len(nameless)} tensors of at least 2 dimensions and "
            f"{SMALLEST:,} elements count as hidden matrices, embeddings and output head included; "
            "give model.named_parameters() (or groups of them) to have those told apart",
            stacklevel=3,
        )


def canonical(name: str) -> str:
    """`name` without what wrappers add: torch.compile, DDP, FSDP, activation checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@functools.cache
def tensor_id(label: str) -> int:
    """32 bits that key the random numbers of one tensor: the same whatever the order of parameters or the wrapper."""
    return zlib.crc32(canonical(label).encode())


def _head_part(parts: list[str]) -> str | None:
    """The part that says so: the outermost module, or the innermost where no block number precedes it."""
    inner = parts[1:] if parts[:1] == ["model"] else parts
    if not inner:
        return None
    if inner[0] in _HEADS:
        return inner[0]
    return inner[-1] if inner[-1] in _HEADS and not any(part.isdigit() for part in inner) else None


def _tensors(count: int) -> str:
    return f"{count} tensor" + ("" if count == 1 else "s")


def _each(size: int, elements: int) -> str:
    return f", {size / elements:.2f} bytes each" if size and elements else ""


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
