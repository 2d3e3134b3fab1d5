"""Put the page together: one HTML file with its style, its script and plotly.js inside, which loads nothing."""

from __future__ import annotations

import string
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

import plotly.io

from quatrain.files import replace_file
from quatrain.report import figures
from quatrain.report.collect import read_runs
from quatrain.report.gaps import Group, Row, group_runs, make_row
from quatrain.report.markup import listing, swatch
from quatrain.report.snr import mean_snr
from quatrain.report.tables import facts, headline, recipe_block, run_table, snr_medians
from quatrain.report.words import caveats, notes


def write_report(
    run_folders: Sequence[Path], out: Path, *, title: str = "quatrain comparison", baseline: str | None = None
) -> Path:
    """Write the comparison of `run_folders` to `out`, one self-contained HTML file, and return `out`.

    Runs of one recipe are its seeds; `baseline` names the recipe that gaps are taken to (the first folder's if None).
    Unfinished and damaged runs are shown as far as they go, and marked. The same folders give the same bytes.

    Raises ValueError for no folders, a folder that is no run, two runs of one recipe and seed, an unknown `baseline` or
    an `out` that is a folder; FileNotFoundError for a folder that does not exist.
    """
    if out.is_dir():
        raise ValueError(f"a report is one file; got the folder {out}; name a file, such as {out / 'report.html'}")
    groups = group_runs(read_runs(run_folders), baseline)
    rows = [make_row(group, groups[0]) for group in groups]
    page = string.Template(_asset("page.html")).substitute(
        title=escape(title),
        lead=_lead(groups, rows),
        style=_asset("page.css") + _palette(),
        script=_asset("page.js"),
        body=_body(groups, rows),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, page)
    return out


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _palette() -> str:
    """The recipes' colours as CSS variables, for both schemes."""
    light, dark = (
        " ".join(f"--c{i}: {value};" for i, value in enumerate(values)) for values in (figures.LIGHT, figures.DARK)
    )
    return f"\n:root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _lead(groups: Sequence[Group], rows: Sequence[Row]) -> str:
    seeds = sorted({seed for row in rows for seed in row.seeds})
    tokens = max(row.tokens for row in rows)
    some = "recipe" if len(rows) == 1 else "recipes"
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {listing(seeds)}"
    unfinished = sum(len(row.unfinished) for row in rows)
    runs = sum(len(group.runs) for group in groups)
    state = f" · <strong>{unfinished} of {runs} runs unfinished</strong>" if unfinished else ""
    return f"{len(rows)} {some} · {which} · {tokens:,} tokens a run{state}"


def _legend(groups: Sequence[Group]) -> str:
    """Buttons that hide and show a recipe in the figures of their section."""
    keys = "".join(
        f'<button type="button" aria-pressed="true" data-recipe="{group.index}">'
        f"{swatch(group)}{escape(group.label)}</button>"
        for group in groups
    )
    return f'<div class="legend" role="group" aria-label="Recipes shown">{keys}</div>'


def _section(heading: str, *parts: str, anchor: str) -> str:
    return f'<section id="{anchor}"><h2>{heading}</h2>{"".join(parts)}</section>'


def _body(groups: Sequence[Group], rows: Sequence[Row]) -> str:
    chart = _Charts()
    base = escape(groups[0].label)
    parts = [
        _section("Results", headline(groups, rows), notes(groups, rows), anchor="results"),
        _section("What these runs can tell", caveats(groups, rows), anchor="reading"),
        _curves(groups, chart, base),
        _noise(groups, chart),
        _section("Recipes", "".join(map(recipe_block, groups)), anchor="recipes"),
        _section("Runs", facts(groups), run_table(groups), anchor="runs"),
    ]
    return "\n".join(parts)


class _Charts:
    """Turns figures into HTML; the first one brings plotly.js along."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self, figure: figures.Figure, name: str, label: str) -> str:
        inner = plotly.io.to_html(
            figure,
            config=figures.PLOT,
            include_plotlyjs=self.drawn == 0,
            full_html=False,
            div_id=f"chart-{name}",
            default_height=f"{figure['layout']['height']}px",
        )
        self.drawn += 1
        return f'<div class="chart" role="figure" aria-label="{escape(label, quote=True)}">{inner}</div>'


_FINAL = (
    "Open marks: seeds. Filled mark and bar: their mean and its 95 % interval. A bar that crosses zero is not resolved."
)
_FINAL_ALONE = "One open mark a recipe: its only seed, so the noise is unknown and there is no interval."
_GAP = (
    "Percent of the reference’s validation loss at the same step, mean over seeds. Band: smallest to largest seed. "
    '<span class="mouse">Drag to zoom, double-click to go back.</span>'
)
_LOSS = "Marked lines: validation. Faint lines: training loss, a moving average. Both are means over seeds."
_SNR = (
    "Signal power over the power of the quantization error of each operand, in dB: higher is better, 6&nbsp;dB is one "
    "bit. Measured when the run ended, mean over seeds. An empty cell was not quantized, or is all zero."
)


def _part(heading: str, caption: str, drawing: str) -> str:
    return f'<h3>{heading}</h3><p class="caption">{caption}</p>{drawing}'


def _curves(groups: Sequence[Group], chart: _Charts, base: str) -> str:
    final, gap, loss = figures.final_figure(groups), figures.gap_figure(groups), figures.loss_figure(groups)
    parts = []
    if final:
        caption = _FINAL if any("error_x" in trace for trace in final["data"]) else _FINAL_ALONE
        parts.append(_part(f"Last gap to {base}", caption, chart(final, "final", "last gap of each recipe")))
    if gap:
        heading = f"Gap to {base} during training"
        parts.append(_part(heading, _GAP, chart(gap, "gap", "gap of each recipe during training")))
    if loss:
        runs = [(group, run) for group in groups for run in group.runs]
        caption = _LOSS + (" Dotted: a run that ended early." if any(run not in g.full for g, run in runs) else "")
        caption += " Ring: a change of precision." if any(run.phases for _, run in runs) else ""
        parts.append(_part("Loss", caption, chart(loss, "loss", "validation and training loss of each recipe")))
    legend = _legend(groups) if parts else "<p>No losses have been recorded yet.</p>"
    return _section("Losses and gaps", legend, *parts, anchor="losses")


def _noise(groups: Sequence[Group], chart: _Charts) -> str:
    figure, heading = figures.snr_figure(groups), "Signal-to-noise of every operand"
    if figure is None:
        text = "<p>No operand was quantized in a finished run, so there is nothing to show.</p>"
        return _section(heading, text, anchor="snr")
    shown = [group.label for group in groups if mean_snr(group)]
    options = "".join(f'<option value="{i}">{escape(label)}</option>' for i, label in enumerate(shown))
    scales = '<option value="all">all recipes</option><option value="own">this recipe</option>'
    picks = (
        f'<div class="picks"><label>Recipe <select id="snr-recipe">{options}</select></label> '
        f'<label>Colours span <select id="snr-scale">{scales}</select></label></div>'
    )
    drawing = chart(figure, "snr", "signal-to-noise ratio by module and operand")
    return _section(heading, f'<p class="caption">{_SNR}</p>', snr_medians(groups), picks, drawing, anchor="snr")
