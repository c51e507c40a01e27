"""A routing trace as a page: how uneven each layer is over the steps, and each expert's load. Loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from moesaic.report.layers import load_heatmap
from moesaic.report.style import INK, figure, layer_colours, line
from moesaic.report.summary import LayerSeries, Series, mean_over_layers
from moesaic.report.template import Drawn, Picture, page_text, write_text
from moesaic.traces.load import LayerLoad
from moesaic.traces.trace import Trace, steps_in_words

MOST_HEATMAPS = 12
"""Layers whose experts are drawn; of deeper models as many, evenly spread."""


def write_trace_page(trace: Trace, loads: Sequence[LayerLoad], path: Path) -> Path:
    """Write the page; returns its path.

    Args:
        trace: what it is about.
        loads: its figures, by layer.
        path: of the file.

    Raises:
        InputError: if the file cannot be written.
    """
    shown = drawn_layers(len(loads))
    charts = [
        Picture("MaxVio", "Largest load over mean load, minus 1; 0 is balance.", violations(trace.steps, loads)),
        *(
            Picture(
                f"Load of the experts, layer {load.layer}",
                f"locality {load.locality:.3f}, drift {load.drift:.3f} a step, {load.dead_experts} dead experts",
                experts(trace.steps, load),
            )
            for load in (loads[number] for number in shown)
        ),
    ]
    left_out = "" if len(shown) == len(loads) else f" Drawn are {len(shown)} of {len(loads)} layers."
    lead = f"{in_words(trace)}.{left_out}"
    title = Path(trace.name).name
    return write_text(page_text("charts.html", Drawn(), what="trace", title=title, lead=lead, charts=charts), path)


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
