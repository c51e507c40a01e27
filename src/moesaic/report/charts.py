"""Charts that compare runs: loss, speed, optimisation, and balance as the mean over the layers.

One function per chart. Each leaves out runs that lack the number; the page leaves out charts without a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from moesaic.report.style import RUN_SYMBOLS, figure, line, run_colour, time_unit
from moesaic.report.summary import RunSummary, Series, mean_over_layers

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
