"""The figures of the page as plotly dictionaries.

Colours are the light scheme's; every trace that belongs to a recipe carries `meta.recipe`, by which `page.js` recolours
it for the dark scheme and the legend switches it. Text that comes from files is HTML-escaped, since plotly reads tags.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from quatrain.report.collect import Run
from quatrain.report.gaps import Gap, Group, final_gap, full_pairs, pairs
from quatrain.report.snr import OPERANDS, mean_snr, modules_of, short_names

# Contrast with the page is at least 3 in both schemes; shapes tell apart what a colour-blind reader may not.
LIGHT = ("#6d7279", "#2b78e4", "#b4540a", "#04985a", "#5b2183", "#a3123f", "#0589ab", "#86830a")
DARK = ("#a0a5ab", "#4c97e6", "#e8811a", "#3ddc91", "#b072ff", "#f0447a", "#5fdcf2", "#e1be05")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
PLOT = {"displaylogo": False, "responsive": True, "displayModeBar": False}

Figure = dict[str, Any]


def colour(index: int) -> str:
    """The light scheme's colour of the recipe at `index`."""
    return LIGHT[index % len(LIGHT)]


def symbol(index: int) -> str:
    """The marker of the recipe at `index`; seven shapes and eight colours pair up anew 56 times."""
    return SYMBOLS[index % len(SYMBOLS)]


def _text(value: str) -> str:
    """`value` for plotly, which reads tags but draws &quot; as it stands."""
    return html.escape(value, quote=False)


def _layout(**more: Any) -> dict[str, Any]:
    axis = {"automargin": True, "gridcolor": "#e3e6ea", "zerolinecolor": "#e3e6ea", "linecolor": "#9aa0a8"}
    base: dict[str, Any] = {
        "template": {"layout": {}},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#1b1f24"},
        "margin": {"l": 12, "r": 12, "t": 12, "b": 12},
        "hoverlabel": {"font": {"family": "system-ui, sans-serif"}},
        "showlegend": False,
        "dragmode": False,
        "xaxis": axis | more.pop("xaxis", {}),
        "yaxis": axis | more.pop("yaxis", {}),
    }
    return base | more


def _line(group: Group, x: Sequence[Any], y: Sequence[Any], **more: Any) -> dict[str, Any]:
    own = colour(group.index)
    trace: dict[str, Any] = {
        "type": "scatter",
        "x": list(x),
        "y": [None if isinstance(v, float) and not math.isfinite(v) else v for v in y],
        "name": _text(group.label),
        "mode": "lines+markers",
        "line": {"color": own, "width": 2},
        "marker": {"color": own, "symbol": symbol(group.index), "size": 7, "maxdisplayed": 24},
        "meta": {"recipe": group.index},
    }
    return trace | more


def _common(columns: Sequence[Mapping[int, Any]]) -> list[int]:
    """The sorted steps that all columns have."""
    return sorted(set.intersection(*(set(column) for column in columns))) if columns else []


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else None


def smooth(values: Sequence[float]) -> list[float]:
    """The centred moving average over about a tenth of the values, at least three; windows shrink at both ends."""
    reach, sums = max(1, len(values) // 20), [0.0, *accumulate(values)]
    reaches = [min(reach, i, len(values) - 1 - i) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reaches)]


def _training(group: Group) -> list[dict[str, Any]]:
    runs = [run for run in (group.full or group.runs) if run.train]
    columns = [{p.step: p for p in run.train} for run in runs]
    steps = _common(columns)
    if not steps:
        return []
    losses = smooth([math.fsum(c[s].loss for c in columns) / len(columns) for s in steps])
    tokens = [columns[0][s].tokens for s in steps]
    stride = max(1, len(steps) // 800)  # a screen shows no more
    faint = {"line": {"color": colour(group.index), "width": 1.5}, "opacity": 0.4, "hoverinfo": "skip"}
    return [_line(group, tokens[::stride], losses[::stride], mode="lines", **faint)]


def _validation(group: Group) -> list[dict[str, Any]]:
    columns = [{p.step: p for p in run.validation} for run in group.full]
    steps = _common(columns)
    if not steps:
        return []
    means = [_mean([c[s].loss for c in columns]) for s in steps]
    hover = f"%{{y:.4f}} at step %{{customdata}}{'' if len(columns) == 1 else f', mean of {len(columns)} seeds'}"
    main = _line(group, [columns[0][s].tokens for s in steps], means, customdata=steps, hovertemplate=hover)
    return [main, *(_lone(group, run) for run in group.runs if run not in group.full and run.validation)]


def _lone(group: Group, run: Run) -> dict[str, Any]:
    """A run that ended before the others of its recipe: a thin dotted line of its own."""
    dotted = {"color": colour(group.index), "width": 1.2, "dash": "dot"}
    return _line(
        group,
        [p.tokens for p in run.validation],
        [p.loss for p in run.validation],
        mode="lines",
        line=dotted,
        name=_text(f"{group.label}, seed {run.seed} only"),
        hovertemplate="%{y:.4f}",
    )


def _phases(group: Group) -> list[dict[str, Any]]:
    """Open rings on the validation curve where a run changed precision."""
    run = group.full[0] if group.full else None
    found = []
    for step, bf16 in run.phases if run else ():
        spot = _on_curve(run, step) if run else None
        if spot is not None:
            text = _text(f"{group.label}: BF16 {bf16} from step {step}")
            ring = {"color": colour(group.index), "symbol": "circle-open", "size": 15, "line": {"width": 2}}
            found.append(
                _line(
                    group,
                    [spot[0]],
                    [spot[1]],
                    mode="markers",
                    marker=ring,
                    name="",
                    hovertemplate=f"{text}<extra></extra>",
                )
            )
    return found


def _on_curve(run: Run, step: int) -> tuple[float, float] | None:
    """(tokens, loss) where a run's validation curve passes `step`, between the points on either side of it."""
    points = [p for p in run.validation if math.isfinite(p.loss)]
    left = [p for p in points if p.step <= step]
    right = [p for p in points if p.step >= step]
    if not left:
        return None
    a, b = left[-1], right[0] if right else left[-1]
    share = (step - a.step) / (b.step - a.step) if b.step > a.step else 0.0
    return a.tokens + share * (b.tokens - a.tokens), a.loss + share * (b.loss - a.loss)


def loss_figure(groups: Sequence[Group]) -> Figure | None:
    """Validation loss (mean over seeds) and smoothed training loss against tokens; None where nothing is recorded."""
    faint = [trace for group in groups for trace in _training(group)]
    clear = [trace for group in groups for trace in (*_validation(group), *_phases(group))]
    if not faint and not clear:
        return None
    layout = _layout(
        height=430,
        hovermode="x unified",
        xaxis={"title": {"text": "tokens"}, "zeroline": False, "spikethickness": 1},
        yaxis={"title": {"text": "loss (nats per token)"}},
    )
    return {"data": faint + clear, "layout": layout}


def _gap_traces(group: Group, base: Group) -> list[dict[str, Any]]:
    used = full_pairs(group, base)
    columns = [{p.step: (p.tokens, gap) for p, gap in points} for points in used.values()]
    steps = _common(columns)
    rows = [(columns[0][s][0], [c[s][1] for c in columns]) for s in steps]
    clean = [(tokens, values) for tokens, values in rows if all(map(math.isfinite, values))]
    traces = []
    if len(columns) > 1 and clean:
        x = [tokens for tokens, _ in clean]
        edge = [max(values) for _, values in clean] + [min(values) for _, values in reversed(clean)]
        own = colour(group.index)
        edgeless = {"width": 0, "color": own}
        band = {"mode": "lines", "fill": "toself", "fillcolor": _faded(own), "line": edgeless, "hoverinfo": "skip"}
        traces.append(_line(group, x + x[::-1], edge, **band))
    many = "" if len(columns) == 1 else ", %{customdata[1]:+.2f} to %{customdata[2]:+.2f} over seeds"
    extent = [[s, min(values), max(values)] for s, (_, values) in zip(steps, rows, strict=True)]
    traces.append(
        _line(
            group,
            [t for t, _ in rows],
            [_mean(values) for _, values in rows],
            customdata=extent,
            hovertemplate=f"%{{y:+.2f}} %{many}",
        )
    )
    traces += [_lone_gap(group, seed, points) for seed, points in pairs(group, base).items() if seed not in used]
    return traces


def _lone_gap(group: Group, seed: int, points: list[tuple[Any, float]]) -> dict[str, Any]:
    dotted = {"color": colour(group.index), "width": 1.2, "dash": "dot"}
    return _line(
        group,
        [p.tokens for p, _ in points],
        [gap for _, gap in points],
        mode="lines",
        line=dotted,
        name=_text(f"{group.label}, seed {seed} only"),
        hovertemplate="%{y:+.2f} %",
    )


def _faded(value: str) -> str:
    red, green, blue = (int(value[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.14)"


def gap_figure(groups: Sequence[Group]) -> Figure | None:
    """The gap to the first group in percent at each validation, the range over seeds as a band; None without pairs."""
    base = groups[0]
    data = [trace for group in groups[1:] if pairs(group, base) for trace in _gap_traces(group, base)]
    if not data:
        return None
    zero = {"zeroline": True, "zerolinewidth": 2, "zerolinecolor": colour(0)}
    layout = _layout(
        height=430,
        hovermode="x unified",
        xaxis={"title": {"text": "tokens"}, "zeroline": False, "spikethickness": 1},
        yaxis=zero | {"title": {"text": f"gap to {_text(base.label)} (%)"}},
    )
    return {"data": data, "layout": layout}


def _clipped(text: str) -> str:
    """`text`, cut in its middle where it is too long for an axis."""
    return text if len(text) <= 22 else f"{text[:12]}…{text[-9:]}"


def _final_traces(group: Group, gap: Gap) -> list[dict[str, Any]]:
    name, own = _text(group.label), colour(group.index)
    seeds, values = [seed for seed, _ in gap.values], [value for _, value in gap.values]
    small = {"color": own, "symbol": f"{symbol(group.index)}-open", "size": 8}
    text = "seed %{customdata}: %{x:+.2f} %<extra></extra>"
    marks = {"mode": "markers", "marker": small, "customdata": seeds, "hovertemplate": text}
    traces = [_line(group, values, [name] * len(values), **marks)]
    if gap.mean is not None and gap.low is not None and gap.high is not None:
        bar = {"type": "data", "array": [gap.high - gap.mean], "color": own, "thickness": 2, "width": 7}
        large = {"color": own, "symbol": symbol(group.index), "size": 12}
        text = f"%{{x:+.2f}} %, 95 % interval {gap.low:+.2f} to {gap.high:+.2f}<extra></extra>"
        mark = {"mode": "markers", "marker": large, "error_x": bar, "hovertemplate": text}
        traces.append(_line(group, [gap.mean], [name], **mark))
    return traces


def final_figure(groups: Sequence[Group]) -> Figure | None:
    """The last gap of each recipe: small marks are seeds, the large one their mean with its 95 % interval."""
    found = [(group, gap) for group in groups[1:] if (gap := final_gap(group, groups[0])) and gap.values]
    if not found:
        return None
    names = [_text(group.label) for group, _ in found]
    order = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": names[::-1],
        "tickvals": names,
        "ticktext": [_text(_clipped(group.label)) for group, _ in found],
        "range": [-0.6, len(names) - 0.4],
    }
    zero = {"zeroline": True, "zerolinewidth": 2, "zerolinecolor": colour(0), "rangemode": "tozero"}
    title = {"text": f"gap to {_text(groups[0].label)} (%)"}
    layout = _layout(height=90 + 42 * len(found), hovermode="closest", yaxis=order, xaxis=zero | {"title": title})
    return {"data": [trace for group, gap in found for trace in _final_traces(group, gap)], "layout": layout}


_HEAT = {
    "type": "heatmap",
    "xgap": 1,
    "ygap": 1,
    "colorscale": "Cividis",
    "hoverongaps": False,
    "hovertemplate": "%{customdata}: %{z:.2f} dB<extra></extra>",
}
_BAR = {"orientation": "h", "thickness": 10, "len": 0.5, "ticksuffix": " dB", "nticks": 4, "tickangle": 0, "ypad": 0}
_EXACT = 100.0  # dB: above it an operand was exact or nearly so, and would stretch the colours to no use
_READABLE = 80  # rows up to which a cell has room for its number


def snr_figure(groups: Sequence[Group]) -> Figure | None:
    """One heat map a recipe, modules by operands, in dB on one scale; only the first is visible. None without data."""
    tables = [(group, table) for group in groups if (table := mean_snr(group))]
    modules = modules_of([table for _, table in tables])
    known = [v for _, table in tables for row in table.values() for v in row.values() if math.isfinite(v)]
    if not known:
        return None
    lossy = [v for v in known if v < _EXACT] or known
    readable = len(modules) <= _READABLE
    tall = (22 if readable else 13) * len(modules)  # pixels of the cells
    shared = _HEAT | {
        "x": [operand.replace(".", "<br>") for operand in OPERANDS],
        "y": [_text(name) for name in short_names(modules)],
        "customdata": [[_text(f"{module}, {operand}") for operand in OPERANDS] for module in modules],
        "zmin": min(lossy),
        "zmax": max(lossy),
        "texttemplate": "%{z:.1f}" if readable else "",
        "colorbar": _BAR | {"y": 1 + 44 / tall, "yanchor": "bottom"},
    }
    data = []
    for place, (group, table) in enumerate(tables):
        cells = [[table.get(module, {}).get(operand) for operand in OPERANDS] for module in modules]
        z = [[v if v is not None and math.isfinite(v) else None for v in row] for row in cells]
        data.append(shared | {"z": z, "name": _text(group.label), "visible": place == 0})
    layout = _layout(
        height=tall + 100,
        margin={"l": 12, "r": 12, "t": 92, "b": 8},
        xaxis={"side": "top", "showgrid": False, "tickangle": 0},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False},
    )
    return {"data": data, "layout": layout}
