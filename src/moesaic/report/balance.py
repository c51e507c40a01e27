"""Sections of a report about balancing: load per rank without and with it, each layer's decisions, and the bytes moved.

They exist for runs with an arbiter or with moving samples. The numbers come from the first rank's metrics; they hold for all
ranks, since ranks exchange their counts and decide from these.

A further section lists the changes of plan during training: the plans tried, the decisions and their reasons.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from moesaic.report.charts import MOST_COLUMNS, STEP, load_heatmap
from moesaic.report.style import (
    RUN_COLOURS,
    Key,
    Legend,
    Picture,
    PictureGrid,
    Section,
    Table,
    figure,
    line,
    rounded,
)
from moesaic.report.summary import RunSummary, percent
from moesaic.train.metrics import read_metrics

BEFORE, AFTER = "#9aa1ac", "#3a6ea5"
ALONE_COLOUR = "#e5e7eb"
"""Colour of calls that were left alone, in the chart of decisions."""
MEBIBYTE = 2**20


@dataclass(frozen=True, kw_only=True)
class BalanceLines:
    """The entries about balancing in a run's metrics; each field has one element per line of metrics."""

    steps: tuple[int, ...]
    layers: tuple[tuple[dict[str, Any], ...], ...]
    """Each MoE layer's table as written by `train/balance.py`; empty for a layer that decided nothing."""

    @property
    def counts(self) -> Counter[str]:
        """How often each option was chosen."""
        counts: Counter[str] = Counter()
        for layers in self.layers:
            for layer in layers:
                counts.update(layer.get("options", {}))
        return counts

    @property
    def options(self) -> tuple[str, ...]:
        """All options that were chosen, most frequent first, with "alone" in front."""
        counts = self.counts
        return tuple(sorted(counts, key=lambda name: (name != "alone", -counts[name], name)))

    def mean(self, name: str) -> list[float]:
        """Return, per line, a number's mean over the layers that have it; 0 if no layer has it."""
        return [_mean([float(layer[name]) for layer in layers if name in layer], 0.0) for layers in self.layers]

    def busiest(self, name: str) -> list[float]:
        """Return, per line, the busiest rank's rows relative to the mean, averaged over the layers; 1 is balanced."""
        return [
            _mean([max(shares) for layer in layers if (shares := _shares(layer.get(name)))], 1.0)
            for layers in self.layers
        ]


def _mean(values: Sequence[float], empty: float) -> float:
    return sum(values) / len(values) if values else empty


def _shares(rows: Sequence[float] | None) -> list[float]:
    """Return each rank's rows relative to the mean; empty if there are no rows."""
    return [place_rows * len(rows) / sum(rows) for place_rows in rows] if rows and sum(rows) > 0 else []


def balance_section(run: RunSummary, colour: str) -> Section | None:
    """Return the section about balancing of skewed routing; None for a run without such decisions."""
    entries = balance_of(read_metrics(run.folder))
    if entries is None:
        return None
    pictures = [
        Picture(
            "Load of the busiest rank",
            "Relative to the mean load, averaged over the layers; 1 is balanced.",
            busiest_rank(entries),
        ),
        Picture("Bytes that moved", "Per call, forward and backward, averaged over the layers.", bytes_moved(entries)),
    ]
    layer = most_skewed(entries)
    for name, suffix in (("rows_alone", "if left alone"), ("rows", "as decided")):
        if layer is not None:
            title = f"Load per rank of layer {layer}, {suffix}"
            caption = "The layer with the most skew: copies that each ep rank computes, relative to the mean."
            pictures.append(Picture(title, caption, load_per_rank(entries, layer, name)))
    options_picture = Picture(
        "Decisions", "The option that each layer ran most often since the previous line of metrics.", decisions(entries)
    )
    return Section(
        title="Balance of",
        run=run.name,
        colour=colour,
        blocks=[PictureGrid(pictures), legend(entries.options), PictureGrid([options_picture]), table(entries)],
    )


def balance_of(lines: Sequence[dict[str, Any]]) -> BalanceLines | None:
    """Return the entries about balancing in a run's metrics; None if there are none."""
    train_lines = [line for line in lines if line.get("kind") == "train" and isinstance(line.get("balance"), dict)]
    if not train_lines:
        return None
    return BalanceLines(
        steps=tuple(int(line["step"]) for line in train_lines),
        layers=tuple(tuple(line["balance"]["layers"]) for line in train_lines),
    )


def busiest_rank(entries: BalanceLines) -> go.Figure:
    """Draw the busiest rank's load relative to the mean, for calls left alone and as decided."""
    chart = figure(STEP, "busiest rank / mean", height=300, legend=True, rangemode="normal")
    if any("rows" in layer for layers in entries.layers for layer in layers):
        chart.add_trace(
            line("left alone", entries.steps, entries.busiest("rows_alone"), BEFORE, width=2.2, showlegend=True)
        )
        chart.add_trace(line("as decided", entries.steps, entries.busiest("rows"), AFTER, width=2.2, showlegend=True))
    return chart


def load_per_rank(entries: BalanceLines, layer: int, name: str) -> go.Figure:
    """Draw a heatmap of each rank's load relative to the mean in one layer, over steps.

    Args:
        entries: the entries about balancing.
        layer: number of the layer.
        name: "rows_alone" for the load without balancing, "rows" for the load as decided.
    """
    steps, columns = [], []
    for step, layers in thinned(entries):
        shares = _shares(layers[layer].get(name))
        if shares:
            steps.append(step)
            columns.append([rounded(share) for share in shares])
    return load_heatmap(steps, columns, "rank of ep", height=240)


def decisions(entries: BalanceLines) -> go.Figure:
    """Draw a heatmap of the option that each layer ran most often since the previous line. The page shows its legend."""
    names = entries.options
    chart = figure(STEP, "MoE layer", height=max(160, 90 + 26 * len(entries.layers[0])))
    if not names:
        return chart
    colours = option_colours(names)
    steps, chosen = [], []
    for step, layers in thinned(entries):
        steps.append(step)
        chosen.append([_commonest(layer) for layer in layers])
    number = {name: place for place, name in enumerate(names)}
    scale = [
        [edge, colours[name]]
        for place, name in enumerate(names)
        for edge in (place / len(names), (place + 1) / len(names))
    ]
    rows = list(zip(*chosen))
    chart.add_trace(
        go.Heatmap(
            x=steps, y=list(range(len(rows))), z=[[number.get(name) for name in row] for row in rows], zmin=-0.5,
            zmax=len(names) - 0.5, colorscale=scale, showscale=False, xgap=0.5, ygap=2,
            text=[[html.escape(name) for name in row] for row in rows],
            hovertemplate="step %{x}<br>layer %{y}<br>%{text}<extra></extra>",
        )
    )  # fmt: skip
    chart.update_layout(hovermode="closest")
    chart.update_yaxes(autorange="reversed", showgrid=False, tickformat="d", dtick=1)
    return chart


def bytes_moved(entries: BalanceLines) -> go.Figure:
    """Draw the MiB that a call moves: tokens with and without balancing, experts' weights, and samples."""
    chart = figure(STEP, "MiB per call, all ranks", height=300, legend=True)
    for name, title, colour in (
        ("token_bytes_alone", "tokens, left alone", BEFORE),
        ("token_bytes", "tokens", AFTER),
        ("weight_bytes", "weights of experts", RUN_COLOURS[1]),
        ("sample_bytes_across", "samples, between nodes", RUN_COLOURS[2]),
        ("sample_bytes_inside", "samples, inside nodes", RUN_COLOURS[3]),
    ):
        if any(name in layer for layers in entries.layers for layer in layers):
            values = [value / MEBIBYTE for value in entries.mean(name)]
            chart.add_trace(line(title, entries.steps, values, colour, width=2.0, showlegend=True))
    return chart


def option_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour per option; pale for "alone"."""
    others = [name for name in names if name != "alone"]
    return {"alone": ALONE_COLOUR} | {name: RUN_COLOURS[index % len(RUN_COLOURS)] for index, name in enumerate(others)}


def thinned(entries: BalanceLines) -> list[tuple[int, tuple[dict[str, Any], ...]]]:
    """Return (step, layers) of at most `MOST_COLUMNS` lines, evenly spread and including the last."""
    stride = -(-len(entries.steps) // MOST_COLUMNS) or 1
    last = len(entries.steps) - 1
    return [(entries.steps[index], entries.layers[index]) for index in range(last % stride, last + 1, stride)]


def most_skewed(entries: BalanceLines) -> int | None:
    """Return the layer with the largest load of the busiest rank without balancing; None if no layer has this number."""
    most: dict[int, float] = {}
    for layers in entries.layers:
        for number, layer in enumerate(layers):
            if shares := _shares(layer.get("rows_alone")):
                most[number] = most.get(number, 0.0) + max(shares)
    return max(most, key=lambda number: most[number]) if most else None


def legend(names: Sequence[str]) -> Legend:
    """Return the legend of the chart of decisions."""
    return Legend([Key(name, colour, is_thick=True) for name, colour in option_colours(names).items() if name in names])


def table(entries: BalanceLines) -> Table:
    """Return a table with each layer's numbers from the last line."""
    heads = (
        "At the end", "Options", "Busiest alone", "Busiest", "Copies replicated", "Samples moved", "Deciding, ms",
    )  # fmt: skip
    rows = []
    for number, layer in enumerate(entries.layers[-1]):
        options = ", ".join(f"{name} x {times}" for name, times in layer.get("options", {}).items()) or "none"
        busy = (_shares(layer.get(name)) for name in ("rows_alone", "rows"))
        cells = [
            options,
            *(f"{max(shares):.2f}" if shares else "none" for shares in busy),
            *(f"{layer[name]:.0f}" if name in layer else "none" for name in ("copies_replicated", "samples_moved")),
            f"{1e3 * layer['decision_seconds']:.2f}" if "decision_seconds" in layer else "none",
        ]
        rows.append((f"layer {number}", *cells))
    return Table(heads, rows)


def _commonest(layer: dict[str, Any]) -> str:
    options = layer.get("options", {})
    return max(options, key=lambda name: options[name]) if options else ""


SHOWN = 40
"""Largest number of decisions in the table; the last ones are shown."""


def plans_section(run: RunSummary) -> Section | None:
    """Return the section about automatic changes of plan during a run; None if the run did not choose plans automatically."""
    plans = [line["plan"] for line in read_metrics(run.folder) if isinstance(line.get("plan"), dict)]
    if not plans:
        return None
    last = plans[-1]
    text = (
        f"{last['switches']} changes of plan, {percent(last['explored_share'])} of the steps on trial; at the end "
        f"{last['running']} runs."
    )
    rows = [(str(step), why, str(bucket), plan) for entry in plans for step, why, bucket, plan in entry["decisions"]]
    table = Table(("Step", "Why", "Load", "Plan from then on"), rows[-SHOWN:])
    return Section(title="Plans of", run=run.name, text=text, blocks=[table])
