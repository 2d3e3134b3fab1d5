"""Apply a recipe to a model: the only converter. It says what it converted, what it kept, and why."""

from __future__ import annotations

import collections
import fnmatch
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from quatrain.nn import SharedState, convert
from quatrain.recipe.attention_rows import convert_attention_modules, describe_attention, find_attention
from quatrain.recipe.schema import Keep, Recipe, load_recipe
from quatrain.recipe.splits import check_split, describe_linear, split_notes

_HEAD_NAMES = (
    "lm_head", "head", "output", "embed_out", "output_layer", "score", "classifier", "qa_outputs",
)  # fmt: skip
_KEPT_SHARE_WARNING = 0.25


@dataclass(frozen=True)
class Report:
    """What `apply` did.

    Attributes:
        converted: module name -> what it runs now.
        kept: module name -> why it stays in high precision; linears first, then everything else with parameters.
        linears: number of linears converted, and in all.
        macs: multiply-accumulates per token of the blocks' linears: converted, and in all (the head not counted).
        head_macs: those of the output head.
        recipe: its name.
    """

    converted: dict[str, str]
    kept: dict[str, str]
    linears: tuple[int, int]
    macs: tuple[int, int]
    head_macs: int
    recipe: str
    notes: list[str] = field(default_factory=list)

    @property
    def quantized_mac_share(self) -> float:
        """Share of the blocks' linear multiply-accumulates that is quantized; the head is not counted."""
        return self.macs[0] / self.macs[1] if self.macs[1] else 0.0

    @property
    def quantized_mac_share_with_head(self) -> float:
        """The same with the output head counted as unquantized."""
        total = self.macs[1] + self.head_macs
        return self.macs[0] / total if total else 0.0

    def summary(self) -> str:
        """A few lines for a person."""
        lines = [
            f"{self.recipe}: {self.linears[0]} of {self.linears[1]} linears quantized, "
            f"{self.quantized_mac_share:.1%} of the blocks' linear multiply-accumulates "
            f"({self.quantized_mac_share_with_head:.1%} with the head)"
        ]
        attention = list(self.converted.values())[self.linears[0] :]  # they come last
        lines += [f"  attention of {len(attention)} modules: {attention[0]}"] if attention else []
        reasons: dict[str, list[str]] = {}
        for name, why in self.kept.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"  kept: {why}: {shown}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def apply(model: nn.Module, recipe: Recipe | str | Path, seed: int = 0) -> Report:
    """Convert the linears of any model in place, and the attention of a transformers model.

    Each plain nn.Linear becomes a QuantLinear: the same object with the same parameters, hooks and state_dict keys.
    With [attention] rows the model's attn_implementation becomes "quatrain".
    Embeddings, norms, convolutions, the output head (unless `keep.head = false`) and everything that is no
    nn.Linear stay as they are.

    Args:
        model: any module. Shared modules are converted once; a linear tied to an embedding is kept.
        recipe: a Recipe, a library name, a path, or TOML text.
        seed: of stochastic rounding and everything else that is drawn.

    Returns:
        Report.

    Raises:
        ValueError: the model is converted already; a rule needs blocks that cannot be found, or a pattern matches
            nothing; or the recipe has operand rows and nothing would be converted.

    Source: arXiv 2509.25149 section 4.1 (which layers).
    """
    recipe = load_recipe(recipe)
    done = next((name for name, m in model.named_modules() if "_shared_state" in m.__dict__), None)
    if done is not None:
        raise ValueError(f"apply converts a model once, received one whose {done!r} is converted; build the model anew")
    plan = _Plan(model, recipe)
    names = [name for name in plan.linears if name not in plan.kept]
    if recipe.quantizes and not names:
        raise ValueError(
            f"recipe {recipe.name!r} has operand rows but would convert nothing: {plan.why_nothing()}; "
            "relax its keep rules or give a model with nn.Linear layers"
        )
    check_split(recipe, [plan.linears[name] for name in names])
    names = names if recipe.quantizes else []
    attentions = find_attention(model) if recipe.attention.quantizes else []
    if names or attentions:
        _convert_all(model, recipe, names, attentions, seed)
    report = plan.report(names)
    report.converted.update(dict.fromkeys(attentions, describe_attention(recipe.attention)))
    if recipe.quantizes and 1.0 - report.quantized_mac_share > _KEPT_SHARE_WARNING:
        warnings.warn(
            f"recipe {recipe.name!r} keeps {1.0 - report.quantized_mac_share:.1%} of the blocks' linear "
            f"multiply-accumulates in BF16, more than {_KEPT_SHARE_WARNING:.0%}; see report.kept",
            stacklevel=2,
        )
    return report


def _convert_all(model: nn.Module, recipe: Recipe, names: list[str], attentions: list[str], seed: int) -> None:
    devices = {p.device for name in names or attentions for p in model.get_submodule(name).parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"apply needs all linears of a model on one device, received {sorted(map(str, devices))}; "
            "convert the model before it is spread, or each part by itself"
        )
    device = devices.pop() if devices else torch.device("cpu")
    state = SharedState(
        [*names, *attentions], torch.device("cpu") if device.type == "meta" else device, len(attentions)
    )
    convert_attention_modules(model, attentions, recipe.attention, state, seed, _rank())
    for index, name in enumerate(names):
        linear = model.get_submodule(name)
        if isinstance(linear, nn.Linear):
            convert(linear, recipe.linear, state, index, seed, _rank())
    model.register_forward_pre_hook(state.advance)
    for parent in dict.fromkeys(model.get_submodule(name.rpartition(".")[0]) for name in names):
        if hasattr(parent, "out_proj") and hasattr(parent, "conv1d"):
            _call_projections(parent)
        elif isinstance(parent, nn.TransformerEncoderLayer):
            parent.register_forward_pre_hook(_nothing)  # a hook keeps torch off its fused path in evaluation


def _nothing(*_: object) -> None:
    return None


def _call_projections(mixer: nn.Module) -> None:
    """Make a Mamba mixer call its projections as modules.

    While training, transformers' mixers may hand `out_proj.weight` to a fused kernel of mamba_ssm, past the module and
    so past its quantization. They look at their own `training` flag for that, and for nothing else, so the flag is
    down for the length of their forward; their children keep theirs.
    """
    mixer.register_forward_pre_hook(_lower_training_flag)
    mixer.register_forward_hook(_restore_training_flag, always_call=True)


def _lower_training_flag(mixer: nn.Module, _: object) -> None:
    mixer.__dict__["_trained"] = mixer.training
    mixer.training = False


def _restore_training_flag(mixer: nn.Module, *_: object) -> None:
    mixer.training = mixer.__dict__.pop("_trained", mixer.training)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class _Plan:
    """Names of the model's linears and the reason for each that is kept."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        # A module that is used in several places has several names; rules may use any of them.
        self.names: dict[str, str] = {}
        first = {id(m): name for name, m in self.linears.items()}
        for name, module in model.named_modules(remove_duplicate=False):
            if id(module) in first:
                self.names[name] = first[id(module)]
        self.experts = _expert_macs(model)
        self.kept: dict[str, str] = {}
        self.blocks = _blocks(model, recipe.keep)
        self.head = _head_name(model, self.linears, self.blocks)
        if not recipe.quantizes:
            self.kept = dict.fromkeys(self.linears, "the recipe has no rows for linears")
            return
        self._keep_by_kind()
        self._keep_by_name(recipe.keep)
        self._keep_by_block(recipe.keep)

    def _keep_by_kind(self) -> None:
        embeddings = {id(m.weight): name for name, m in self.model.named_modules() if isinstance(m, nn.Embedding)}
        split = self.recipe.linear.split
        uses = collections.Counter(id(m.weight) for m in self.linears.values() if split and split.has_factors)
        for name, linear in self.linears.items():
            tied = embeddings.get(id(linear.weight))
            if tied is not None:
                self.kept[name] = f"its weight is tied to the embedding {tied}"
            elif uses[id(linear.weight)] > 1:
                self.kept[name] = "its weight is another linear's too, and a split would change it under both"
            elif name == self.head and self.recipe.keep.head:
                self.kept[name] = "output head"
            elif type(linear) is not nn.Linear:
                self.kept[name] = f"a subclass of nn.Linear with a forward of its own ({type(linear).__name__})"
            elif _is_router(self.model, name):
                self.kept[name] = "router of experts"

    def _keep_by_name(self, keep: Keep) -> None:
        for pattern in keep.names:
            found = fnmatch.filter(self.names, pattern)
            if not found:
                raise ValueError(
                    f"keep.names pattern {pattern!r} matches no linear of this model; "
                    f"its linears are called like {', '.join(list(self.linears)[:4])}"
                )
            for name in found:
                self.kept.setdefault(self.names[name], f"name pattern {pattern!r}")

    def _keep_by_block(self, keep: Keep) -> None:
        if not keep.counts_blocks:
            return
        if not self.blocks:
            raise ValueError(
                "keep rules by first, last or share need the model's list of blocks, and no nn.ModuleList holds "
                'nn.Linear layers; name it with keep.blocks = "path.to.list" in a recipe '
                "of your own, or take a recipe without such rules (nvfp4-plain)"
            )
        weights = [self._block_macs(block) for block in self.blocks]
        last = max(keep.last_blocks, _blocks_for_share(weights, keep.last_share))
        for number, block in enumerate(self.blocks):
            place = f"block {number + 1} of {len(self.blocks)}"
            if number < keep.first_blocks:
                why = f"{place}: first {keep.first_blocks}"
            elif number >= len(self.blocks) - last:
                rule = f"last {keep.last_blocks}" if last == keep.last_blocks else f"last share {keep.last_share:g}"
                why = f"{place}: {rule}"
            else:
                continue
            for name, linear in self.names.items():
                if name == block or name.startswith(block + "."):
                    self.kept.setdefault(linear, why)

    def _block_macs(self, block: str) -> int:
        inside = [name for name in self.names if name == block or name.startswith(block + ".")]
        experts = sum(macs for name, macs in self.experts.items() if name.startswith(block + "."))
        return sum(_macs(self.linears[self.names[name]]) for name in inside) + experts

    def why_nothing(self) -> str:
        """Reasons, counted, for an error message."""
        counts: dict[str, int] = {}
        for why in self.kept.values():
            counts[why] = counts.get(why, 0) + 1
        return "; ".join(f"{n} kept ({why})" for why, n in counts.items()) or "the model has no nn.Linear"

    def report(self, converted: list[str]) -> Report:
        """The account of what was done."""
        in_blocks = {n: m for n, m in self.linears.items() if n != self.head}
        done = {name: describe_linear(self.recipe, self.linears[name]) for name in converted}
        kept = {name: why for name, why in self.kept.items() if name not in done} | _other_modules(self.model)
        total = sum(_macs(m) for m in in_blocks.values()) + sum(self.experts.values())
        macs = (sum(_macs(self.linears[n]) for n in done), total)
        head_macs = _macs(self.linears[self.head]) if self.head and self.head not in done else 0
        if self.head in done:  # a converted head counts on both sides
            macs = (macs[0], macs[1] + _macs(self.linears[self.head]))
        return Report(done, kept, (len(done), len(self.linears)), macs, head_macs, self.recipe.name, self._notes(total))

    def _notes(self, total: int) -> list[str]:
        notes = []
        if self.recipe.phases:
            notes.append("its phases are the trainer's to switch; in a loop of your own call quatrain.set_precision")
        if self.recipe.keep.counts_blocks and self.recipe.quantizes:
            notes.append(f"blocks: {self.blocks[0].rpartition('.')[0]} ({len(self.blocks)})")
        notes += split_notes(self.recipe, [m for n, m in self.linears.items() if n not in self.kept])
        if self.experts and total:
            share = sum(self.experts.values()) / total
            notes.append(f"fused expert weights stay in BF16: {share:.0%} of the linear multiply-accumulates")
        return notes


def _macs(linear: nn.Linear) -> int:
    return linear.in_features * linear.out_features


def _expert_macs(model: nn.Module) -> dict[str, int]:
    """Multiply-accumulates per token of fused experts: 3-D weights [experts, ...] outside convolutions.

    Counted for the experts that a token visits where the model's configuration says how many, else for all.
    """
    config = getattr(model, "config", None)
    visited = getattr(config, "num_experts_per_tok", None)
    found = {}
    for name, module in model.named_modules():
        weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        if weights and not isinstance(module, nn.modules.conv._ConvNd):
            found[name] = sum(p[0].numel() * min(visited or p.shape[0], p.shape[0]) for p in weights)
    return found


def _blocks(model: nn.Module, keep: Keep) -> list[str]:
    """Full names of the model's blocks, in order; empty where none can be told."""
    if keep.blocks is not None:
        try:
            named = model.get_submodule(keep.blocks)
        except AttributeError as error:
            raise ValueError(f"keep.blocks names no module of this model: {keep.blocks!r}") from error
        found = [f"{keep.blocks}.{child}" for child, m in named.named_children() if _holds_linears(m)]
        if not found and keep.counts_blocks:
            raise ValueError(
                f"keep.blocks must name a list whose members hold nn.Linear layers, received {keep.blocks!r}"
            )
        return found
    best: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            prefix = f"{name}." if name else ""
            members = [f"{prefix}{i}" for i, m in enumerate(module) if _holds_linears(m)]
            if len(members) > len(best):
                best = members
    return best


def _holds_linears(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Linear) for m in module.modules())


def _blocks_for_share(weights: list[int], share: float) -> int:
    """Smallest number of blocks from the end that hold `share` of the total."""
    if share == 0.0:
        return 0
    total, held = sum(weights), 0
    for count, weight in enumerate(reversed(weights), start=1):
        held += weight
        if held >= share * total * (1 - 1e-9):  # 0.07 of a hundred equal blocks is seven, not eight
            return count
    return len(weights)


def _head_name(model: nn.Module, linears: dict[str, nn.Linear], blocks: list[str]) -> str | None:
    """The output head: what a transformers model says it is, else a linear outside the blocks with a usual name."""
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    if head is not None:
        return next((name for name, m in linears.items() if m is head), None)
    for name in linears:
        inside = any(name.startswith(block + ".") for block in blocks)
        if name.rsplit(".", 1)[-1] in _HEAD_NAMES and not inside and (blocks or "." not in name):
            return name
    return None


def _is_router(model: nn.Module, name: str) -> bool:
    parent, _, child = name.rpartition(".")
    return child == "router" or (child == "gate" and hasattr(model.get_submodule(parent), "experts"))


def _other_modules(model: nn.Module) -> dict[str, str]:
    """Everything else that owns parameters, so that nothing is left out of the account."""
    others = {}
    for name, module in model.named_modules():
        own = [p for p, _ in module.named_parameters(recurse=False)]
        if isinstance(module, nn.Linear) or not own:
            continue
        kind = type(module).__name__
        if isinstance(module, nn.Embedding):
            others[name] = "embedding"
        elif "norm" in kind.lower():
            others[name] = "normalization"
        elif isinstance(module, nn.modules.conv._ConvNd):
            others[name] = f"convolution ({kind})"
        else:
            others[name or "model"] = f"parameters {', '.join(own)} of {kind}"
    return others
