"""Draws the charts of runs.

Some charts compare runs: loss, speed, optimisation, and balance as the mean over the layers. Others show one run's MoE layers:
a line per layer, and the load of every expert over time. A chart leaves out runs that lack its number; the page leaves out
empty charts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import plotly.graph_objects as go

from moesaic.report.style import (
    INK,
    RUN_SYMBOLS,
    Key,
    Legend,
    Picture,
    Table,
    figure,
    layer_colours,
    line,
    run_colour,
    time_unit,
)
from moesaic.report.summary import LayerSeries, RunSummary, Series, mean_over_layers, number, percent

STEP = "optimizer step"
MOST_COLUMNS = 200
"""Largest number of columns of a heatmap. If there are more steps, the loads of neighbouring ones are added up."""
LOAD_COLOURS = ((0.0, "#8c510a"), (0.25, "#d8b365"), (0.5, "#f5f5f5"), (0.75, "#67a9cf"), (1.0, "#2166ac"))
"""Brown for less than the mean load, white for the mean, blue for more; colour-blind readers can distinguish them."""


def loss_unit(runs: Sequence[RunSummary]) -> str:
    """Return the unit of losses over steps: nats/byte if every run's tokens are bytes, else nats/token."""
    return "nats/byte" if all(run.val_loss == run.val_nats_per_byte for run in runs) else "nats/token"


def loss_over_steps(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw training loss (thin) and validation loss (markers) over steps.

    The initial axis excludes the first steep drop, which would flatten the rest of the curve.
    """
    chart = figure(STEP, f"loss ({loss_unit(runs)})", height=340, legend=True)
    for index, run in enumerate(runs):
        chart.add_trace(
            line(f"{run.name}, training", run.loss.steps, run.loss.values, run_colour(index), width=1, opacity=0.55)
        )
    for index, run in enumerate(runs):
        if run.val_loss:
            chart.add_trace(_validation(f"{run.name}, validation", run.val_loss.steps, run.val_loss.values, index))
    chart.update_yaxes(range=_loss_range(runs))
    if len(runs) in (2, 3) and all(len(run.name) <= 30 // len(runs) for run in runs):  # a row for each kind of loss
        chart.update_layout(legend={"entrywidth": 0.98 / len(runs), "entrywidthmode": "fraction"})
    return chart


def validation_over_time(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw validation loss over training time, which takes the cost of a step into account."""
    unit, length = time_unit(max(run.training_seconds for run in runs))
    chart = figure(f"training time ({unit})", "validation loss (nats/byte)", height=340, legend=True)
    for index, run in enumerate(runs):
        if run.val_nats_per_byte:
            times = [second / length for second in run.val_seconds.values]
            chart.add_trace(_validation(run.name, times, run.val_nats_per_byte.values, index))
    chart.update_xaxes(rangemode="tozero", hoverformat=".1f")
    return chart


def speed(runs: Sequence[RunSummary]) -> list[Picture]:
    """Draw speed, optimisation and auxiliary losses over steps, a line per run."""
    names = dict.fromkeys(name for run in runs for name in run.auxiliary)
    pictures = [
        Picture(title, caption, _per_run(runs, pick, axis, rangemode="tozero", **options))
        for title, caption, axis, pick, options in OVER_STEPS
        if any(pick(run) for run in runs)
    ]
    for picture in pictures[-1:]:
        for trace in picture.figure.data[1:]:  # equal learning rates would hide each other
            trace.line.dash = "dash"
    for name in names:
        words = name.replace("_", " ")
        chart = _per_run(runs, partial(_auxiliary, name), words)
        pictures.append(
            Picture(f"Auxiliary loss: {words}", "Before its coefficient, averaged over the MoE layers.", chart)
        )
    return pictures


OVER_STEPS: tuple[tuple[str, str, str, Callable[[RunSummary], Series], dict[str, str]], ...] = (
    ("Throughput", "Training tokens per second since the previous line of metrics.", "tokens/s",
     lambda run: run.tokens_per_second, {"tickformat": "~s"}),
    ("MFU", "The model's FLOPs over the matmul peak measured at the start.", "MFU (% of matmul peak)",
     lambda run: run.mfu, {"tickformat": "~%"}),
    ("Gradient norm", "Over all parameters, before clipping.", "gradient norm", lambda run: run.grad_norm, {}),
    ("Learning rate", "Linear warm-up, then a cosine.", "learning rate", lambda run: run.lr, {"exponentformat": "power"}),
)  # fmt: skip
"""(title, caption, axis title, series, axis options) of the charts about speed and optimisation; the learning rate is last."""
BALANCE: tuple[tuple[str, str, str, Callable[[LayerSeries], Series], dict[str, str]], ...] = (
    ("MaxVio", "Largest load over mean load, minus 1; 0 is balanced.", "MaxVio", lambda layer: layer.max_violation, {}),
    ("Churn", "Tokens of a fixed probe batch whose experts changed in one optimizer step.", "churn (% of tokens)",
     lambda layer: layer.churn, {"tickformat": "~%"}),
)  # fmt: skip
"""(title, caption, axis title, series, axis options) of the charts about the balance of MoE layers."""


def comparison(runs: Sequence[RunSummary]) -> list[Picture]:
    """Draw the balance of runs over steps, averaged over their MoE layers."""
    return [
        Picture(title, caption, _per_run(runs, partial(_mean, pick), f"mean {axis}", rangemode="tozero", **options))
        for title, caption, axis, pick, options in BALANCE
    ]


def balance_of_layers(run: RunSummary) -> list[Picture]:
    """Draw the balance of a run over steps: a line per layer, and their mean."""
    return [
        Picture(title, caption, _per_layer(run, pick, axis, with_mean=True, height=300, **options))
        for title, caption, axis, pick, options in BALANCE
    ]


def experts_of_layers(run: RunSummary) -> list[Picture]:
    """Draw dead experts, dropped copies, load entropy and needed capacity of a run: small charts with a line per layer."""
    dead = max(max(layer.dead_experts.values, default=0) for layer in run.layers)
    dropped = max(max(layer.dropped_share.values, default=0) for layer in run.layers)
    whole = {"dtick": 1} if dead < 6 else {}
    rows: list[tuple[str, str, str, Callable[[LayerSeries], Series], dict[str, Any]]] = [
        ("Dead experts", "Chosen by no token since the previous line.", "dead experts",
         lambda layer: layer.dead_experts, {"range": _from_zero_to(dead or 1), "tickformat": "d", **whole}),
        ("Dropped copies", "For lack of capacity.", "dropped (% of copies)",
         lambda layer: layer.dropped_share, {"range": _from_zero_to(dropped or 0.01), "tickformat": "~%"}),
        ("Load entropy", "1: balanced; 0: one expert gets all tokens.", "entropy of the load",
         lambda layer: layer.entropy, {"rangemode": "normal"}),
        ("Needed capacity factor", "The smallest that drops nothing.", "capacity factor",
         lambda layer: layer.needed_capacity_factor, {"rangemode": "normal"}),
    ]  # fmt: skip
    return [
        Picture(title, caption, _per_layer(run, pick, axis, **options)) for title, caption, axis, pick, options in rows
    ]


def expert_loads(steps: Sequence[int], loads: Sequence[Sequence[float]]) -> go.Figure:
    """Draw a heatmap of each expert's load relative to the layer's mean load, over steps.

    Args:
        steps: the steps at which loads were written.
        loads: (steps, experts), copies per expert or any multiple of them.
    """
    steps, shares = load_shares(steps, loads)
    num_experts = len(shares[0]) if shares else 0
    return load_heatmap(steps, shares, "expert", height=min(max(150 + 10 * num_experts, 240), 460))


def load_heatmap(
    steps: Sequence[int], shares: Sequence[Sequence[float | None]], what: str, *, height: int
) -> go.Figure:
    """Draw a heatmap of loads relative to the mean load, over steps; 1 is balanced.

    Args:
        steps: the steps, one per column.
        shares: (steps, rows): the relative loads; None for a step without load.
        what: what a row stands for, such as "expert".
        height: height of the chart in pixels.
    """
    chart = figure(STEP, what, height=height)
    if not shares:
        return chart
    chart.add_trace(
        go.Heatmap(
            x=list(steps),
            y=list(range(len(shares[0]))),
            z=[list(row) for row in zip(*shares)],
            zmin=0,
            zmax=2,
            colorscale=[list(stop) for stop in LOAD_COLOURS],
            hovertemplate=f"step %{{x}}<br>{what} %{{y}}<br>%{{z:.2f}} of the mean load<extra></extra>",
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
    chart.update_layout(hovermode="closest")
    chart.update_yaxes(autorange="reversed", showgrid=False, tickformat="d")
    return chart


def load_shares(
    steps: Sequence[int], loads: Sequence[Sequence[float]], most_columns: int = MOST_COLUMNS
) -> tuple[list[int], list[list[float | None]]]:
    """Return steps and, per step, each expert's load relative to the mean; None for a step without load.

    Args:
        steps: see `expert_loads`.
        loads: see `expert_loads`.
        most_columns: largest number of steps to return. If there are more, the loads of neighbouring steps are added up.
    """
    group = -(-len(loads) // most_columns) or 1
    ends: list[int] = []
    shares: list[list[float | None]] = []
    for first in range(0, len(loads), group):
        load = [sum(column) for column in zip(*loads[first : first + group])]
        mean = sum(load) / len(load)
        ends.append(steps[min(first + group, len(loads)) - 1])
        shares.append([round(count / mean, 3) if mean else None for count in load])
    return ends, shares


def legend(run: RunSummary) -> Legend:
    """Return the legend of the layers and, if there are several, of their mean."""
    keys = [Key(f"layer {number}", colour) for number, colour in enumerate(layer_colours(len(run.layers)))]
    return Legend([*keys, Key("mean", INK, is_thick=True)] if len(keys) > 1 else keys)


def table(run: RunSummary) -> Table:
    """Return a table with each layer's last numbers."""
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
    """Return an axis range that starts a little below zero, so that the axis does not hide a curve at zero."""
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
    """Draw a thin line per layer and, with `with_mean`, their mean in `INK`. The page shows the legend."""
    chart = figure(STEP, title, height=height, **{"rangemode": "tozero", **y_axis})
    picked = [pick(layer) for layer in run.layers]
    for index, (series, colour) in enumerate(zip(picked, layer_colours(len(picked)))):
        chart.add_trace(line(f"layer {index}", series.steps, series.values, colour, width=1.4))
    mean = mean_over_layers(picked)
    if with_mean and len(picked) > 1:
        chart.add_trace(line("mean", mean.steps, mean.values, INK, width=2.6))
    if not with_mean:
        chart.update_layout(font_size=11.5, margin={"l": 48, "r": 12})
        chart.update_xaxes(nticks=5)
        chart.update_yaxes(nticks=5)
    return chart


def _auxiliary(name: str, run: RunSummary) -> Series:
    return run.auxiliary.get(name, Series())


def _mean(pick: Callable[[LayerSeries], Series], run: RunSummary) -> Series:
    return mean_over_layers([pick(layer) for layer in run.layers])


def _per_run(runs: Sequence[RunSummary], pick: Callable[[RunSummary], Series], title: str, **y_axis: str) -> go.Figure:
    """Draw one line for each run that has the number. A run has the same colour in all charts."""
    chart = figure(STEP, title, height=270, legend=len(runs) > 1, **y_axis)
    for index, run in enumerate(runs):
        series = pick(run)
        if series:
            chart.add_trace(line(run.name, series.steps, series.values, run_colour(index), showlegend=True))
    return chart


def _validation(name: str, x: Sequence[float], y: Sequence[float], index: int) -> go.Scatter:
    marker = {"symbol": RUN_SYMBOLS[index % len(RUN_SYMBOLS)], "line": {"color": "#ffffff", "width": 1}}
    return line(name, x, y, run_colour(index), width=2.2, mode="lines+markers", marker=marker, showlegend=True)


def _loss_range(runs: Sequence[RunSummary]) -> list[float] | None:
    """Return an axis range from below the smallest loss to above the largest first validation loss; None for automatic."""
    first = [run.val_loss.values[0] for run in runs if len(run.val_loss) > 2]
    if not first:
        return None
    low = min(min((*run.loss.values, *run.val_loss.values)) for run in runs)
    high = max(first) + 0.12 * (max(first) - low)
    return [low - 0.08 * (high - low), high]
