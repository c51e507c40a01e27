"""Writes the page about a routing trace. It is self-contained and loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from moesaic.report.page import MOST_NAMED, per_layer
from moesaic.report.style import Picture, charts_page, expert_loads
from moesaic.report.summary import Series
from moesaic.traces.load import LayerLoad
from moesaic.traces.trace import Trace, steps_in_words


def write_trace_page(trace: Trace, loads: Sequence[LayerLoad], path: Path) -> Path:
    """Write the page about a routing trace and return its path.

    Raises:
        InputError: the file cannot be written.
    """
    pictures = [
        Picture(
            "MaxVio",
            "Largest load over mean load, minus 1; 0 is balanced.",
            violations(trace.steps, loads),
        )
    ]
    shown = drawn_layers(len(loads))
    for number in shown:
        load = loads[number]
        caption = (
            f"locality {load.locality:.3f}, drift {load.drift:.3f} a step, "
            f"{load.dead_experts} dead experts"
        )
        chart = expert_loads(trace.steps, load.shares.tolist())
        pictures.append(Picture(f"Load of the experts, layer {load.layer}", caption, chart))

    left_out = ""
    if len(shown) < len(loads):
        left_out = f" The charts show {len(shown)} of {len(loads)} layers."
    lead = f"{trace_in_words(trace)}.{left_out}"
    title = Path(trace.name).name
    return charts_page(path, what="trace", title=title, lead=lead, charts=pictures)


def violations(steps: Sequence[int], loads: Sequence[LayerLoad]) -> go.Figure:
    """Draw MaxVio over steps: a line per layer, and the mean of the layers."""
    return per_layer(
        {f"layer {load.layer}": Series(tuple(steps), load.max_violation) for load in loads},
        "MaxVio",
    )


def trace_in_words(trace: Trace) -> str:
    """Return a one-line description of a trace."""
    shape = trace.shape
    contents = "every token's experts" if trace.holds == "tokens" else "counts"
    micro = f" x {shape.accumulation} micro-batches" if shape.accumulation > 1 else ""
    return (
        f"{contents} of {shape.num_layers} MoE layers with {shape.num_experts} experts, "
        f"{shape.top_k} per token; steps {steps_in_words(trace.steps)}{micro} of "
        f"{shape.sequences} sequences of {shape.seq_len} tokens"
    )


def drawn_layers(count: int) -> list[int]:
    """Return which of `count` layers get a heatmap of their experts."""
    if count <= MOST_NAMED:
        return list(range(count))
    # evenly spread from the first to the last
    last = MOST_NAMED - 1  # index of the last one drawn
    return sorted({round(index * (count - 1) / last) for index in range(MOST_NAMED)})
