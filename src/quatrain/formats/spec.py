"""QuantSpec: everything that decides the bits of one quantized operand, as one frozen value."""

from __future__ import annotations

import difflib
import functools
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from quatrain.formats.block import FORMATS, BlockFormat
from quatrain.formats.transform import Hadamard

ROUNDINGS = ("nearest", "stochastic", "stochastic-unbiased")
ERRORS = ("mse", "mae", "absmax")
SCALE_ROUNDINGS = ("nearest", "up")


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor becomes codes and scales; defaults resolve per format when the spec is made.

    Args:
        format: "nvfp4" | "mxfp4" | "mxfp8" | "fp8".
        block: (rows, columns) of one block; None is the format's own, (16, 16) or (32, 32) suits weights,
            fp8 knows (1, 128) and (128, 128).
        scale: nvfp4 "to-6" (default), "to-4", "four-over-six", "search"; mx formats "rceil" (default), "floor",
            "ceil", "even"; fp8 "fp32" (default), "pow2".
        error: "mse" | "mae" | "absmax"; read only by "four-over-six" and "search".
        scale_max: nvfp4: largest block scale used, 448 or 256; None is 448, and 256 for "four-over-six".
        scale_rounding: nvfp4: block scales round "nearest" (default) or "up" (then no element is ever clipped).
        rounding: "nearest" | "stochastic" | "stochastic-unbiased" (nvfp4: blocks aim at 6 * 16/17, so that a scale
            rounded down never clips the block's maximum).
        transform: None | "hadamard" (size 16, fixed signs) | Hadamard(...).

    Raises:
        ValueError: an unknown name, or a pair that has no meaning, with the rule and the remedy.

    Sources: arXiv 2509.25149 (formats, rounding, transform), arXiv 2512.02010 (four-over-six).
    """

    format: str = "nvfp4"
    block: tuple[int, int] | None = None
    scale: str | None = None
    error: str = "mse"
    scale_max: int | None = None
    scale_rounding: str = "nearest"
    rounding: str = "nearest"
    transform: Hadamard | str | None = None

    def __post_init__(self) -> None:
        _one_of("format", self.format, tuple(FORMATS))
        fmt = FORMATS[self.format]
        self._set("block", _resolve_block(fmt, self.block))
        self._set("scale", _resolve_scale(fmt, self.scale))
        _one_of("error", self.error, ERRORS)
        self._set("scale_max", _resolve_scale_max(fmt, self.scale, self.scale_max))
        _one_of("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS)
        _one_of("rounding", self.rounding, ROUNDINGS)
        if not fmt.tensor_scale:
            _nvfp4_only("scale_rounding", self.scale_rounding, "nearest", fmt)
            if self.rounding == "stochastic-unbiased":
                _nvfp4_only("rounding", self.rounding, "stochastic", fmt)
        self._set("transform", _resolve_transform(fmt, self.transform))
        self._set("_text", json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":")))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the one place where a default becomes a value

    @property
    def block_format(self) -> BlockFormat:
        """The format's constants."""
        return FORMATS[self.format]

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, columns) of one block, resolved."""
        return self.block or self.block_format.blocks[0]

    @property
    def hadamard(self) -> Hadamard | None:
        """The transform, resolved."""
        return self.transform if isinstance(self.transform, Hadamard) else None

    @property
    def stochastic(self) -> bool:
        """Whether elements are rounded stochastically (then seed and offset matter)."""
        return self.rounding != "nearest"

    @property
    def element_max(self) -> float:
        """What the largest element of a block aims at: 6 (4 with "to-4"), times 16/17 when unbiased."""
        target = 4.0 if self.scale == "to-4" else self.block_format.element.maximum
        return target * 16.0 / 17.0 if self.rounding == "stochastic-unbiased" else target

    @property
    def constant(self) -> float:
        """Tensor scale = amax / constant (2688 for plain NVFP4, 1536 for four-over-six); 1 without a tensor scale.

        "to-4" uses 4 x 448; four-over-six and search count from 6.
        """
        if not self.block_format.tensor_scale:
            return 1.0
        return float(self.scale_max or 0) * self.element_max

    @property
    def padding(self) -> int:
        """The last dimension is padded with zeros to a multiple of this."""
        return max(self.block_shape[1], self.hadamard.size if self.hadamard else 1)

    @property
    def bits_per_element(self) -> float:
        """Stored bits of one element: 4.5 for NVFP4 1x16."""
        return self.block_format.bits_per_element(self.block_shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every default filled in, for TOML, JSON and fingerprints."""
        data = asdict(self)
        data["block"] = list(self.block_shape)
        if self.scale not in ("four-over-six", "search"):
            data.pop("error")
        if self.hadamard:
            signs = "none" if self.hadamard.signs is None else self.hadamard.signs  # TOML has no null
            data["transform"] = {
                "size": self.hadamard.size,
                "signs": list(signs) if isinstance(signs, tuple) else signs,
            }
        return {k: v for k, v in data.items() if v is not None}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> QuantSpec:
        """The inverse of `to_dict`; missing keys take their defaults, an unknown one raises and lists the valid."""
        valid = [f.name for f in fields(QuantSpec)]
        unknown = sorted(set(data) - set(valid))
        if unknown:
            raise ValueError(_unknown(unknown[0], "a quantization row", valid))
        values = dict(data)
        if "error" in values and values.get("scale") not in ("four-over-six", "search"):
            raise ValueError(
                f'error = {values["error"]!r} chooses between candidate scales, which only scale = "four-over-six" and '
                f'"search" have, received scale = {values.get("scale", "default")!r}; add one or leave it out'
            )
        if isinstance(values.get("block"), list):
            values["block"] = tuple(values["block"])
        if isinstance(values.get("transform"), dict):
            table = dict(values["transform"])
            bad = sorted(set(table) - {"size", "signs"})
            if bad:
                raise ValueError(_unknown(bad[0], "a transform", ["size", "signs"]))
            signs = table.get("signs", "fixed")
            signs = None if signs in (None, "none") else tuple(signs) if isinstance(signs, list) else signs
            values["transform"] = Hadamard(table.get("size", 16), signs)
        return QuantSpec(**values)

    def to_json(self) -> str:
        """Canonical text of `to_dict`: what files and compiled graphs carry."""
        return self.__dict__["_text"]

    @staticmethod
    def from_json(text: str) -> QuantSpec:
        """Parse `to_json`'s text (cached: specs are few and frozen)."""
        return _spec_from_json(text)


@functools.lru_cache(maxsize=1024)
def _spec_from_json(text: str) -> QuantSpec:
    return QuantSpec.from_dict(json.loads(text))


def _unknown(key: str, where: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown key {key!r} in {where}; valid keys: {', '.join(valid)}{hint}"


def _one_of(field: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{field} must be one of {', '.join(valid)}, received {value!r}")


def _nvfp4_only(field: str, value: str, remedy: str, fmt: BlockFormat) -> None:
    if value != remedy:
        raise ValueError(
            f'{field}="{value}" is defined for nvfp4 only (it concerns E4M3 block scales), '
            f'received format="{fmt.name}"; '
            f'use {field}="{remedy}"'
        )


def _resolve_block(fmt: BlockFormat, block: Any) -> tuple[int, int]:
    if block is None:
        return fmt.blocks[0]
    block = tuple(block) if isinstance(block, (list, tuple)) else block
    if block not in fmt.blocks or not all(type(n) is int for n in block):
        raise ValueError(
            f'block of format="{fmt.name}" must be one of {list(fmt.blocks)}, received {block!r}; '
            "leave it out for the format's own"
        )
    return block


def _resolve_scale(fmt: BlockFormat, scale: str | None) -> str:
    if scale is None:
        return fmt.scale_rules[0]
    if scale in fmt.scale_rules:
        return scale
    if scale in FORMATS["nvfp4"].scale_rules:
        raise ValueError(
            f'scale="{scale}" needs block scales that can express a factor of 1.5 (E4M3, nvfp4), '
            f'received format="{fmt.name}" whose rules are {", ".join(fmt.scale_rules)}'
        )
    raise ValueError(f'scale of format="{fmt.name}" must be one of {", ".join(fmt.scale_rules)}, received {scale!r}')


def _resolve_scale_max(fmt: BlockFormat, scale: str | None, scale_max: int | None) -> int | None:
    if not fmt.tensor_scale:
        if scale_max is not None:
            raise ValueError(
                f'scale_max is for nvfp4 only, received {scale_max!r} with format="{fmt.name}"; leave it out'
            )
        return None
    if scale_max is None:
        return 256 if scale == "four-over-six" else 448
    if scale_max not in (256, 448):
        raise ValueError(f"scale_max must be 448 or 256, received {scale_max!r}; leave it out for the rule's own")
    return int(scale_max)


def _resolve_transform(fmt: BlockFormat, transform: Hadamard | str | None) -> Hadamard | None:
    if transform is None:
        return None
    if isinstance(transform, str):
        if transform != "hadamard":
            raise ValueError(f'transform must be None, "hadamard" or Hadamard(size, signs), received {transform!r}')
        transform = Hadamard()
    if not isinstance(transform, Hadamard):
        raise ValueError(f'transform must be None, "hadamard" or Hadamard(size, signs), received {transform!r}')
    size = fmt.block_size
    if size % transform.size and transform.size % size:
        raise ValueError(
            f'a Hadamard size must divide the block of format="{fmt.name}" ({size}) or be a multiple of it, '
            f"received {transform.size}"
        )
    return transform
