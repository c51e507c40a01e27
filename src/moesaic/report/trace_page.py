"""A routing trace as a page: how uneven each layer is over the steps, and each expert's load. Loads nothing."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from moesaic import __version__
from moesaic.errors import InputError
from moesaic.report.assets import CSS
from moesaic.report.layers import load_heatmap
from moesaic.report.style import INK, figure, layer_colours, line
from moesaic.report.summary import LayerSeries, Series, mean_over_layers
from moesaic.traces.load import LayerLoad
from moesaic.traces.trace import Trace, steps_in_words

MOST_HEATMAPS = 12
"""Layers whose experts are drawn; of deeper models as many, evenly spread."""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_DRAW = """
for (const [id, chart] of Object.entries(charts))
  Plotly.newPlot(id, chart.data, chart.layout, {responsive: true, displayModeBar: false});
"""


def write_trace_page(trace: Trace, loads: Sequence[LayerLoad], path: Path) -> Path:
    """Write the page; returns its path.

    Args:
        trace: what it is about.
        loads: its figures, by layer.
        path: of the file.

    Raises:
        InputError: if the file cannot be written.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder: name a file, {path / 'trace.html'} say")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_page(trace, loads), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}): choose another place") from error
    return path


def violations(steps: Sequence[int], loads: Sequence[LayerLoad]) -> go.Figure:
    """Draw MaxVio over steps, a thin line per layer and their mean in ink."""
    made = figure("optimizer step", "MaxVio", height=320, legend=True, rangemode="tozero")
    series = [Series(tuple(steps), load.max_violation) for load in loads]
    for load, each, colour in zip(loads, series, layer_colours(len(loads))):
        name = f"layer {load.layer}"
        made.add_trace(line(name, each.steps, each.values, colour, width=1.4, showlegend=len(loads) <= MOST_HEATMAPS))
    if len(series) > 1:
        mean = mean_over_layers(series)
        made.add_trace(line("mean", mean.steps, mean.values, INK, width=2.6, showlegend=True))
    return made


def experts(steps: Sequence[int], load: LayerLoad) -> go.Figure:
    """Draw each expert's load over the mean load of a layer, experts by steps."""
    empty = Series()
    shares = tuple(tuple(row) for row in load.shares.tolist())
    series = LayerSeries(
        max_violation=empty, dead_experts=empty, dropped_share=empty, entropy=empty, needed_capacity_factor=empty,
        churn=empty, load_steps=tuple(steps), loads=shares, dropped=0,
    )  # fmt: skip
    return load_heatmap(series)


def in_words(trace: Trace) -> str:
    """Return what a trace holds in a line."""
    shape = trace.shape
    held = "every token's experts" if trace.holds == "tokens" else "counts"
    micro = f" x {shape.accumulation} micro-batches" if shape.accumulation > 1 else ""
    return (
        f"{held} of {shape.num_layers} MoE layers with {shape.num_experts} experts, {shape.top_k} per token; steps "
        f"{steps_in_words(trace.steps)}{micro} of {shape.sequences} sequences of {shape.seq_len} tokens"
    )


def drawn_layers(count: int, most: int = MOST_HEATMAPS) -> list[int]:
    """Return which of so many layers get a picture of their experts."""
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _page(trace: Trace, loads: Sequence[LayerLoad]) -> str:
    steps, title = trace.steps, html.escape(Path(trace.name).name)
    charts = {"violations": violations(steps, loads)}
    shown = drawn_layers(len(loads))
    boxes = [_box("violations", charts["violations"], "MaxVio", "Largest load over mean load, minus 1; 0 is balance.")]
    for number in shown:
        load, name = loads[number], f"layer-{number}"
        charts[name] = experts(steps, load)
        said = f"locality {load.locality:.3f}, drift {load.drift:.3f} a step, {load.dead_experts} dead experts"
        boxes.append(_box(name, charts[name], f"Load of the experts, layer {load.layer}", said))
    left_out = "" if len(shown) == len(loads) else f" Drawn are {len(shown)} of {len(loads)} layers."
    drawn = ",\n".join(f'"{name}": {plotly.io.to_json(made)}' for name, made in charts.items())
    assert "</" not in drawn  # plotly writes < as an escape, so that no name can end the script
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{title} · moesaic trace</title>\n<style>{CSS}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        f"<header><p class='brand'>moesaic trace</p><h1>{title}</h1>"
        f"<p class='lead'>{html.escape(in_words(trace))}.{left_out}</p></header>\n"
        f"<div class='grid' style='grid-template-columns:minmax(0,1fr)'>{''.join(boxes)}</div>\n"
        f"<footer>Written by moesaic {__version__}. This file holds everything it shows and loads nothing.</footer>\n"
        f"</main>\n<script>\nconst charts = {{\n{drawn}\n}};{_DRAW}</script>\n</body>\n</html>\n"
    )


def _box(name: str, chart: go.Figure, title: str, said: str) -> str:
    return (
        f"<figure class='chart'><figcaption><h3>{html.escape(title)}</h3><p>{html.escape(said)}</p></figcaption>"
        f"<div class='plot' id='{name}' style='height:{chart.layout.height}px'></div></figure>"
    )
