"""Charts of one run's MoE layers: a line per layer, and the load of every expert over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from moesaic.report.charts import STEP
from moesaic.report.style import INK, figure, layer_colours, line
from moesaic.report.summary import LayerSeries, RunSummary, Series, mean_over_layers
from moesaic.report.template import Key, Legend, Table
from moesaic.report.words import number, percent

MOST_COLUMNS = 200
"""Columns of a heatmap; neighbouring intervals are added up beyond that."""
LOAD_COLOURS = ((0.0, "#8c510a"), (0.25, "#d8b365"), (0.5, "#f5f5f5"), (0.75, "#67a9cf"), (1.0, "#2166ac"))
"""Brown below the mean load, white at it, blue above: told apart without red and green."""


def max_violation(run: RunSummary) -> go.Figure:
    """Draw MaxVio per layer and its mean."""
    return _per_layer(run, lambda layer: layer.max_violation, "MaxVio", with_mean=True, height=300)


def churn(run: RunSummary) -> go.Figure:
    """Draw the share of the probe batch's tokens whose experts changed in one optimizer step."""
    return _per_layer(
        run, lambda layer: layer.churn, "churn (% of tokens)", with_mean=True, height=300, tickformat="~%"
    )


def entropy(run: RunSummary) -> go.Figure:
    """Draw the entropy of each layer's load."""
    return _per_layer(run, lambda layer: layer.entropy, "entropy of the load", rangemode="normal")


def needed_capacity_factor(run: RunSummary) -> go.Figure:
    """Draw the smallest capacity factor that would drop nothing."""
    return _per_layer(run, lambda layer: layer.needed_capacity_factor, "capacity factor", rangemode="normal")


def dead_experts(run: RunSummary) -> go.Figure:
    """Draw how many experts no token chose."""
    most = max((max(layer.dead_experts.values, default=0) for layer in run.layers), default=0)
    options: dict[str, Any] = {"range": _from_zero_to(most or 1), "tickformat": "d"}
    if most < 6:
        options["dtick"] = 1
    return _per_layer(run, lambda layer: layer.dead_experts, "dead experts", **options)


def dropped_share(run: RunSummary) -> go.Figure:
    """Draw the share of copies that were dropped for lack of capacity."""
    most = max((max(layer.dropped_share.values, default=0) for layer in run.layers), default=0)
    return _per_layer(
        run,
        lambda layer: layer.dropped_share,
        "dropped (% of copies)",
        tickformat="~%",
        range=_from_zero_to(most or 0.01),
    )


def load_heatmap(layer: LayerSeries) -> go.Figure:
    """Draw each expert's load over the mean load, experts by steps; 1 is balance."""
    steps, shares = load_shares(layer)
    num_experts = len(shares[0]) if shares else 0
    made = figure(STEP, "expert", height=min(max(150 + 10 * num_experts, 240), 460))
    made.add_trace(
        go.Heatmap(
            x=steps,
            y=list(range(num_experts)),
            z=[[column[expert] for column in shares] for expert in range(num_experts)],
            zmin=0,
            zmax=2,
            colorscale=[list(stop) for stop in LOAD_COLOURS],
            hovertemplate="step %{x}<br>expert %{y}<br>%{z:.2f} of the mean load<extra></extra>",
            colorbar={
                "title": {"text": "load / mean", "side": "right", "font": {"size": 12}},
                "tickvals": [0, 0.5, 1, 1.5, 2],
                "ticktext": ["0", "0.5", "1", "1.5", "≥ 2"],
                "thickness": 10,
                "outlinewidth": 0,
                "len": 1.0,
            },
        )
    )
    made.update_layout(hovermode="closest")
    made.update_yaxes(autorange="reversed", showgrid=False, tickformat="d")
    return made


def load_shares(layer: LayerSeries, most_columns: int = MOST_COLUMNS) -> tuple[list[int], list[list[float | None]]]:
    """Return steps and, per step, each expert's load over the mean; None where there was no load at all.

    Args:
        layer: the layer.
        most_columns: how many steps to return at most; the loads of neighbours are added up.
    """
    group = -(-len(layer.loads) // most_columns) or 1
    steps: list[int] = []
    shares: list[list[float | None]] = []
    for first in range(0, len(layer.loads), group):
        load = [sum(column) for column in zip(*layer.loads[first : first + group])]
        mean = sum(load) / len(load)
        steps.append(layer.load_steps[min(first + group, len(layer.loads)) - 1])
        shares.append([round(count / mean, 3) if mean else None for count in load])
    return steps, shares


def legend(run: RunSummary) -> Legend:
    """Return the layers' colours, and that of their mean."""
    keys = [Key(f"layer {number}", colour) for number, colour in enumerate(layer_colours(len(run.layers)))]
    return Legend([*keys, Key("mean", INK, is_thick=True)] if len(keys) > 1 else keys)


def table(run: RunSummary) -> Table:
    """Return each layer's figures at the end."""
    heads = ("At the end", "MaxVio", "Entropy", "Needed capacity factor", "Dead experts", "Dropped", "Churn")
    rows = [
        (
            f"layer {index}",
            number(layer.max_violation.last, "{:.2f}"),
            number(layer.entropy.last, "{:.3f}"),
            number(layer.needed_capacity_factor.last, "{:.2f}"),
            number(layer.dead_experts.last, "{:.0f}"),
            percent(layer.dropped_share.last),
            percent(layer.churn.last),
        )
        for index, layer in enumerate(run.layers)
    ]
    return Table(heads, rows)


def _from_zero_to(most: float) -> list[float]:
    """Return an axis whose line does not hide a curve at zero."""
    return [-0.04 * most, 1.08 * most]


def _per_layer(
    run: RunSummary,
    pick: Callable[[LayerSeries], Series],
    title: str,
    *,
    with_mean: bool = False,
    height: int = 230,
    **y_axis: Any,
) -> go.Figure:
    """Draw one thin line per layer in the layers' colours, and the mean in ink; the page has the legend."""
    made = figure(STEP, title, height=height, **{"rangemode": "tozero", **y_axis})
    picked = [pick(layer) for layer in run.layers]
    for index, (series, colour) in enumerate(zip(picked, layer_colours(len(picked)))):
        made.add_trace(line(f"layer {index}", series.steps, series.values, colour, width=1.4))
    mean = mean_over_layers(picked)
    if with_mean and len(picked) > 1:
        made.add_trace(line("mean", mean.steps, mean.values, INK, width=2.6))
    if not with_mean:
        made.update_layout(font_size=11.5, margin={"l": 48, "r": 12})
        made.update_xaxes(nticks=5)
        made.update_yaxes(nticks=5)
    return made
