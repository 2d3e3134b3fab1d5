"""The page's tables: results, signal-to-noise, recipes, runs. Whatever comes from a file is escaped on its way in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quatrain.report.collect import Run, finite, section
from quatrain.report.gaps import Group, Row
from quatrain.report.markup import DASH, count, label, loss, magnitude, signed, table, tag
from quatrain.report.snr import OPERANDS, mean_snr, medians, modules_of, short_names

_FACTS = (  # (label, key of summary.json, or table and key of run.toml)
    ("Model preset", "run:model.preset"),
    ("Model folder", "run:model.path"),
    ("Parameters", "parameters"),
    ("Data", "run:data.path"),
    ("Tokenizer", "run:data.tokenizer"),
    ("Vocabulary", "run:data.vocab_size"),
    ("Sequence length", "run:data.sequence_length"),
    ("Batch (sequences)", "run:train.batch_size"),
    ("Accumulation", "run:train.accumulate"),
    ("Tokens", "tokens"),
    ("Steps", "steps"),
    ("Dtype", "dtype"),
    ("Optimizer", "optimizer"),
    ("Optimizer state (bytes)", "optimizer_bytes"),
    ("Learning rate", "run:optimizer.lr"),
    ("Device", "device"),
    ("Threads", "threads"),
    ("Versions", "versions"),
    ("Commit", "commit"),
)


def headline(groups: Sequence[Group], rows: Sequence[Row]) -> str:
    """The table at the top: one line a recipe."""
    gap = f"Gap to {rows[0].recipe}"
    heads = ("Recipe", "Validation loss", "with BF16 forward", gap, "Tokens/s", "Saved B/element", "MACs quantized")
    alike = len({row.seeds for row in rows}) == 1  # then the page's first line has said it
    lines = []
    for group, row in zip(groups, rows, strict=True):
        saved, share = row.saved_bytes_per_element, row.quantized_mac_share
        short = (
            f'<code title="{escape(row.fingerprint)}">{escape(row.fingerprint[:8])}</code>' if row.fingerprint else DASH
        )
        line = (
            label(group) + ("" if alike else _seeds(row)) + _state(row),
            loss(row.val_loss, diverged=bool(row.diverged)),
            loss(row.val_loss_bf16),
            _gap(row, group),
            count(row.tokens_per_s),
            DASH if saved is None else f"{saved:.3f}",
            DASH if share is None else f"{100 * share:.1f} %",
            short,
        )
        lines.append(line)
    return table((*heads, "Fingerprint"), lines, kind="cards numbers")


def _seeds(row: Row) -> str:
    return f' <span class="quiet nowrap">{len(row.seeds)} seed{"s" if len(row.seeds) > 1 else ""}</span>'


def _state(row: Row) -> str:
    if not row.unfinished:
        return ""
    share = "" if len(row.unfinished) == len(row.seeds) else f"{len(row.unfinished)} of {len(row.seeds)} "
    return f" {tag(f'{share}unfinished', 'warn')}"


def _gap(row: Row, group: Group) -> str:
    if group.index == 0:
        return '<span class="quiet">reference</span>'
    if row.gap_percent is None:
        if row.diverged:
            return tag("diverged", "bad")
        return tag("the reference diverged", "bad") if row.gap_step is not None else DASH
    parts = [f"<b>{signed(row.gap_percent)} %</b>"]
    if row.gap_interval:
        low, high = row.gap_interval
        parts.append(f'<span class="quiet nowrap">[{signed(low)}, {signed(high)}]</span>')
    if row.resolved is None:
        parts.append(tag("one seed"))
    elif not row.resolved:
        parts.append(tag("not resolved"))
    if row.gap_partial:
        parts.append(tag(f"at step {row.gap_step}", "warn"))
    return " ".join(parts)


def snr_medians(groups: Sequence[Group]) -> str:
    """Recipes by operands: the median over modules, in dB."""
    lines = []
    for group in groups:
        middle = medians(mean_snr(group))
        if middle:
            cells = [f"{middle[o]:.1f}" if o in middle and math.isfinite(middle[o]) else DASH for o in OPERANDS]
            lines.append([label(group), *cells])
    return table(("Median, dB", *OPERANDS), lines, kind="numbers") if lines else ""


def recipe_block(group: Group) -> str:
    """A collapsible block: the recipe's TOML, what it converted and what it kept, by reason."""
    converted, kept = section(group.summary, "converted"), section(group.summary, "kept")
    known = (
        f"{len(converted)} converted, {len(kept)} kept"
        if group.summary
        else "conversions unknown until a run has ended"
    )
    toml = next((run.recipe_toml.strip() for run in group.runs if run.recipe_toml.strip()), "")
    blocks = [f"<pre><code>{escape(toml)}</code></pre>" if toml else "<p>No recipe.toml was found.</p>"]
    for word, modules in (("Converted", converted), ("Kept", kept)):
        if modules:
            heading = f"{word}: {len(modules)} module{'s' if len(modules) > 1 else ''}"
            blocks.append(f"<details><summary>{heading}</summary>{_reasons(modules)}</details>")
    top = f'<summary>{label(group)} <span class="quiet">{known}</span></summary>'
    return f'<details class="recipe">{top}{"".join(blocks)}</details>'


def _reasons(reasons: Mapping[str, Any]) -> str:
    """Modules gathered by reason, in the order of the model."""
    gathered: dict[str, list[str]] = {}
    for name in modules_of([reasons]):
        gathered.setdefault(str(reasons[name]), []).append(name)
    lines = []
    for reason, names in gathered.items():
        chips = (
            f'<code title="{escape(name)}">{escape(short)}</code>'
            for name, short in zip(names, short_names(names), strict=True)
        )
        lines.append(f'<dt>{escape(reason)} <span class="quiet">({len(names)})</span></dt><dd>{" ".join(chips)}</dd>')
    return f'<dl class="reasons">{"".join(lines)}</dl>'


def facts(groups: Sequence[Group]) -> str:
    """What the runs ran on: one value where they agree, all values where they differ."""
    runs = [run for group in groups for run in group.runs]
    lines = []
    for name, path in _FACTS:
        values = list(dict.fromkeys(text for run in runs if (text := _fact(run, path))))
        if values:
            lines.append(f"<div><dt>{name}</dt><dd>{'<br>'.join(escape(value) for value in values)}</dd></div>")
    return f'<dl class="facts">{"".join(lines)}</dl>' if lines else ""


def _fact(run: Run, path: str) -> str:
    if path.startswith("run:"):
        name, key = path[4:].split(".")
        value = section(run.config, name).get(key)
    else:
        value = run.summary.get(path)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" + (f" ({magnitude(value)})" if path == "parameters" else "")
    return "" if value is None else str(value)


def run_table(groups: Sequence[Group]) -> str:
    """One line a run."""
    heads = ("Run", "Seed", "State", "Steps", "Tokens", "Validation loss", "with BF16 forward", "Seconds", "Date")
    lines = []
    for group in groups:
        for run in group.runs:
            step, tokens = run.seen
            line = (
                label(group),
                str(run.seed),
                tag("diverged", "bad") if run.diverged else "finished" if run.finished else tag("unfinished", "warn"),
                count(step),
                count(tokens),
                loss(run.last.loss, diverged=math.isnan(run.last.loss)) if run.last else DASH,
                loss(run.last.loss_bf16) if run.last else DASH,
                count(finite(run.summary.get("wall_s"))),
                escape(str(run.summary.get("date") or "")[:19]) or DASH,
                f"<code>{escape(run.folder.name)}</code>",
            )
            lines.append(line)
    return table((*heads, "Folder"), lines, kind="numbers runs")
