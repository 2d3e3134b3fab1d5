"""Small pieces of HTML and number formats that the page's parts share. Text arguments are escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from quatrain.report.figures import LIGHT, symbol
from quatrain.report.gaps import Group

_PATHS = {  # plotly's markers, drawn in a box from -8 to 8
    "circle": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0",
    "square": "M-4.5-4.5h9v9h-9z",
    "diamond": "M0-6L6 0L0 6L-6 0z",
    "triangle-up": "M0-6L5.5 4h-11z",
    "cross": "M-6-2h4v-4h4v4h4v4h-4v4h-4v-4h-4z",
    "x": "M-5-2.2L-2.2-5L0-2.8L2.2-5L5-2.2L2.8 0L5 2.2L2.2 5L0 2.8L-2.2 5L-5 2.2L-2.8 0z",
    "star": "M0-6L1.8-1.8L6-1.6L2.6 1L3.8 5.4L0 3L-3.8 5.4L-2.6 1L-6-1.6L-1.8-1.8z",
}
DASH = '<span class="none">–</span>'


def swatch(group: Group) -> str:
    """The recipe's marker as inline SVG, in the scheme's colour."""
    tint = f"fill:var(--c{group.index % len(LIGHT)})"
    path = _PATHS[symbol(group.index)]
    return f'<svg class="swatch" viewBox="-8 -8 16 16" aria-hidden="true" style="{tint}"><path d="{path}"/></svg>'


def label(group: Group) -> str:
    """The recipe's marker and name."""
    return f'{swatch(group)}<span class="name">{escape(group.label)}</span>'


def tag(text: str, kind: str = "") -> str:
    """A small badge; `kind` is "warn", "bad" or nothing."""
    return f'<span class="tag {kind}">{escape(text)}</span>'


def count(value: float | None) -> str:
    """A whole number with thousands apart, or a dash."""
    return DASH if value is None else f"{value:,.0f}"


def loss(value: float | None, *, diverged: bool = False) -> str:
    """A loss with four decimals, a badge where it is not finite, or a dash."""
    if diverged:
        return tag("not finite", "bad")
    return DASH if value is None else f"{value:.4f}"


def magnitude(value: float) -> str:
    """1_420_000 -> 1.42 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def signed(value: float) -> str:
    """A percentage with its sign (a true minus) and two decimals."""
    return f"{value:+.2f}".replace("-", "−")


def listing(names: Iterable[Any]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    items = [escape(str(name)) for name in names]
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str) -> str:
    """A table whose cells know their column's name (narrow screens show rows as cards). `heads`: text; `rows`: HTML."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    lines = []
    for first, *rest in rows:
        cells = (
            f'<td data-label="{escape(head, quote=True)}">{cell}</td>'
            for head, cell in zip(heads[1:], rest, strict=True)
        )
        lines.append(f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>')
    body = "".join(lines)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
