"""Charts of runs: those that compare runs (loss, speed, optimisation, balance as the mean over the layers), and those of one
run's MoE layers (a line per layer, and the load of every expert over time).

One function per chart. Each leaves out runs that lack the number; the page leaves out charts without a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from moesaic.report.style import INK, RUN_SYMBOLS, figure, layer_colours, line, run_colour, time_unit
from moesaic.report.summary import LayerSeries, RunSummary, Series, mean_over_layers
from moesaic.report.template import Key, Legend, Table
from moesaic.report.words import number, percent

STEP = "optimizer step"


def loss_unit(runs: Sequence[RunSummary]) -> str:
    """Return the unit of losses over steps: a token is a byte unless a run has another tokenizer."""
    return "nats/byte" if all(run.val_loss == run.val_nats_per_byte for run in runs) else "nats/token"


def loss_over_steps(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw training loss (thin) and validation loss (markers) over steps.

    The axis starts out without the first steep drop, which would flatten all that follows.
    """
    made = figure(STEP, f"loss ({loss_unit(runs)})", height=340, legend=True)
    for index, run in enumerate(runs):
        made.add_trace(
            line(f"{run.name}, training", run.loss.steps, run.loss.values, run_colour(index), width=1, opacity=0.55)
        )
    for index, run in enumerate(runs):
        if run.val_loss:
            made.add_trace(_validation(f"{run.name}, validation", run.val_loss.steps, run.val_loss.values, index))
    made.update_yaxes(range=_loss_range(runs))
    if len(runs) in (2, 3) and all(len(run.name) <= 30 // len(runs) for run in runs):  # a row for each kind of loss
        made.update_layout(legend={"entrywidth": 0.98 / len(runs), "entrywidthmode": "fraction"})
    return made


def validation_over_time(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw validation loss over training time: what a step costs counts here."""
    unit, length = time_unit(max(run.training_seconds for run in runs))
    made = figure(f"training time ({unit})", "validation loss (nats/byte)", height=340, legend=True)
    for index, run in enumerate(runs):
        if run.val_nats_per_byte:
            times = [second / length for second in run.val_seconds.values]
            made.add_trace(_validation(run.name, times, run.val_nats_per_byte.values, index))
    made.update_xaxes(rangemode="tozero", hoverformat=".1f")
    return made


def throughput(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw training tokens per second over steps."""
    return _per_run(runs, lambda run: run.tokens_per_second, "tokens/s", rangemode="tozero", tickformat="~s")


def mfu(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw the share of the measured matmul peak that the model's FLOPs reach."""
    return _per_run(runs, lambda run: run.mfu, "MFU (% of matmul peak)", rangemode="tozero", tickformat="~%")


def gradient_norm(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw the norm of the gradient before clipping, over steps."""
    return _per_run(runs, lambda run: run.grad_norm, "gradient norm", rangemode="tozero")


def learning_rate(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw the learning rate over steps; later runs are dashed, since the rates are often the same."""
    made = _per_run(runs, lambda run: run.lr, "learning rate", rangemode="tozero", exponentformat="power")
    for trace in made.data[1:]:
        trace.line.dash = "dash"
    return made


def auxiliary_loss(runs: Sequence[RunSummary], name: str) -> go.Figure:
    """Draw one auxiliary loss over steps, before its coefficient."""
    return _per_run(runs, lambda run: run.auxiliary.get(name, Series()), name.replace("_", " "))


def mean_max_violation(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw MaxVio, mean over the MoE layers, over steps."""
    return _per_run(
        runs,
        lambda run: mean_over_layers([layer.max_violation for layer in run.layers]),
        "mean MaxVio",
        rangemode="tozero",
    )


def mean_churn(runs: Sequence[RunSummary]) -> go.Figure:
    """Draw churn, mean over the MoE layers, over steps."""
    return _per_run(
        runs,
        lambda run: mean_over_layers([layer.churn for layer in run.layers]),
        "mean churn (% of tokens)",
        rangemode="tozero",
        tickformat="~%",
    )


def _per_run(runs: Sequence[RunSummary], pick: Callable[[RunSummary], Series], title: str, **y_axis: str) -> go.Figure:
    """Draw one line per run that has the number; runs keep their colours."""
    made = figure(STEP, title, height=270, legend=len(runs) > 1, **y_axis)
    for index, run in enumerate(runs):
        series = pick(run)
        if series:
            made.add_trace(line(run.name, series.steps, series.values, run_colour(index), showlegend=True))
    return made


def _validation(name: str, x: Sequence[float], y: Sequence[float], index: int) -> go.Scatter:
    marker = {"symbol": RUN_SYMBOLS[index % len(RUN_SYMBOLS)], "line": {"color": "#ffffff", "width": 1}}
    return line(name, x, y, run_colour(index), width=2.2, mode="lines+markers", marker=marker, showlegend=True)


def _loss_range(runs: Sequence[RunSummary]) -> list[float] | None:
    """Return an axis from below the smallest loss to the largest first validation loss; None leaves it automatic."""
    first = [run.val_loss.values[0] for run in runs if len(run.val_loss) > 2]
    if not first:
        return None
    low = min(min((*run.loss.values, *run.val_loss.values)) for run in runs)
    high = max(first) + 0.12 * (max(first) - low)
    return [low - 0.08 * (high - low), high]


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
