"""What a run does at which step: the learning rate (warm-up, stable, decay) and the precision phases.

Steps count finished optimizer steps: step 0 is before the first update, and a phase at step N rules from the update
that makes step N + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quatrain.recipe import Phase

SHAPES = ("linear", "cosine", "1-sqrt")


@dataclass(frozen=True)
class ScheduleConfig:
    """[schedule]: the learning rate over the run.

    Args:
        warmup: linear rise: a fraction of the run (a float under 1) or a number of steps (an integer).
        decay: fall at the end, likewise.
        final: the last learning rate as a ratio of the peak.
        shape: of the fall: "linear" | "cosine" | "1-sqrt".

    Raises:
        ValueError: a value outside its range.
    """

    warmup: float | int = 0.05
    decay: float | int = 0.2
    final: float = 0.01
    shape: str = "linear"

    def __post_init__(self) -> None:
        for key, share in (("warmup", self.warmup), ("decay", self.decay)):
            if share < 0 or (isinstance(share, float) and share >= 1):
                raise ValueError(
                    f"schedule.{key} must be a fraction of the run from 0 to under 1, or an integer of steps; "
                    f"got {share!r}"
                )
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final must lie from 0 to 1 (a ratio of the peak), got {self.final!r}")
        if self.shape not in SHAPES:
            raise ValueError(f"schedule.shape must be one of {', '.join(SHAPES)}; got {self.shape!r}")


@dataclass(frozen=True)
class Wsd:
    """Warm-up, stable, decay (arXiv 2404.06395, section 4.1), resolved to steps.

    Args:
        peak: learning rate of the stable part.
        total: steps of the run.
        warmup: steps of the linear rise; the last of them has the peak.
        decay: steps of the fall; the last of them, the run's last, has `final * peak`.
        final: ratio of the last learning rate to the peak.
        shape: "linear" | "cosine" | "1-sqrt" (arXiv 2405.18392).
    """

    peak: float
    total: int
    warmup: int
    decay: int
    final: float
    shape: str

    def rate(self, step: int) -> float:
        """The learning rate of the update that makes step `step` + 1."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = step + 1 - (self.total - self.decay)
        if done <= 0:
            return self.peak
        return self.peak * (self.final + (1.0 - self.final) * _remaining(self.shape, done / self.decay))


def wsd(config: ScheduleConfig, peak: float, total: int) -> Wsd:
    """The schedule of a run of `total` steps; fractions become whole steps, rounded down.

    Raises:
        ValueError: warm-up and decay together are longer than the run.
    """
    warmup, decay = in_steps(config.warmup, total), in_steps(config.decay, total)
    if warmup + decay > total:
        raise ValueError(
            f"schedule.warmup ({warmup} steps) and schedule.decay ({decay} steps) exceed the run's {total} steps; "
            "shorten them or train longer"
        )
    return Wsd(peak, total, warmup, decay, config.final, config.shape)


def in_steps(share: float | int, total: int) -> int:
    """A fraction of the run (a float under 1) or a number of steps (an int), as steps."""
    return share if isinstance(share, int) else math.floor(share * total + 1e-9)


def phase_steps(phases: Sequence[Phase], total: int) -> tuple[tuple[int, str], ...]:
    """The phases as (first step, "forward" | "both"), in order.

    Raises:
        ValueError: a phase begins after the run's end, or two begin at one step.
    """
    starts = sorted((p.step if p.step is not None else in_steps(float(p.at or 0.0), total), p.bf16) for p in phases)
    for step, bf16 in starts:
        if step >= total:
            raise ValueError(
                f"the phase bf16 = {bf16!r} begins at step {step}, but the run ends at step {total}; "
                "move it forward or train longer"
            )
    if len({step for step, _ in starts}) < len(starts):
        raise ValueError(f"two phases begin at the same step: {starts}; keep one of them")
    return tuple(starts)


def precision_at(starts: Sequence[tuple[int, str]], step: int) -> str | None:
    """What `set_precision` gets from step `step` on: None (the recipe), "forward" or "both"."""
    begun = [bf16 for start, bf16 in starts if start <= step]
    return begun[-1] if begun else None


def _remaining(shape: str, progress: float) -> float:
    """How much of the fall is still ahead, 1 at its beginning and 0 at its end."""
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - math.sqrt(progress)
