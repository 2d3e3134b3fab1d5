"""The statistics of a comparison (definitions 22): the gap of two losses, and Student's 95 % interval of a mean."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence


def gap_percent(loss: float, base: float) -> float:
    """100 * (loss / base - 1); NaN where `base` is zero."""
    return 100.0 * (loss / base - 1.0) if base else math.nan


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of one value or more and the half-width of its two-sided 95 % interval; None for a single value.

    Raises:
        ValueError: there are no values.
    """
    n = len(values)
    if not n:
        raise ValueError("a mean needs values, got none; give one or more")
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, t_quantile(n - 1) * deviation / math.sqrt(n)


@functools.cache
def t_quantile(freedom: int, level: float = 0.95) -> float:
    """The t with P(|T| < t) = `level` for Student's T with `freedom` degrees of freedom, by bisection.

    The distribution is Abramowitz and Stegun 26.7.3 and 26.7.4, exact for whole degrees of freedom.
    """
    low, high = 0.0, 1.0
    while _t_inside(high, freedom) < level:
        high *= 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _t_inside(middle, freedom) < level else (low, middle)
    return 0.5 * (low + high)


def _t_inside(t: float, freedom: int) -> float:
    """P(|T| < t)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2.0 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
