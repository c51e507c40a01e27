"""Writes the page about a plan: the answer in words, a step's time by part, one layer as Gantt chart, memory, and roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from moesaic.planner.candidates import name_of
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.compute import rates_of
from moesaic.planner.memory import GIB
from moesaic.planner.model import Job
from moesaic.planner.search import PlannedStep, Result
from moesaic.planner.workload import Workload
from moesaic.program.plan import plan_in_words
from moesaic.program.timeline import Timeline
from moesaic.report.gantt import bars_of, gantt, in_words, step_gantt, unit_of
from moesaic.report.style import INK, Picture, bars, charts_page, figure, line, run_colour


def write_plan_page(
    title: str, answer: Sequence[str], job: Job, result: Result, cluster: ClusterSpec, timelines: Mapping[str, Timeline],
    path: Path,
) -> Path:  # fmt: skip
    """Write the page about a plan and return its path. The page is self-contained and loads nothing.

    Args:
        title: title of the page.
        answer: the planner's answer, in sentences.
        job: the training job.
        result: the ranking of plans.
        cluster: the cluster on which the job runs.
        timelines: the timelines of the best plan's programs, "forward" and "backward".
        path: the file to write.

    Raises:
        InputError: the file cannot be written.
    """
    best, until = result.best, max(timeline.makespan for timeline in timelines.values())
    layer = job.step_model(cluster, best.grid.dp).layer
    pictures = [
        Picture(
            "One step of the best plan",
            f"The first micro-batch of {job.accumulation}, block by block. Drag to zoom in, double-click for the whole step.",
            step_gantt(bars_of(job, best, timelines)),
        ),
        Picture("One step", "Seconds by part of the step, for the best plans.", stacked(
            {_name(candidate): candidate.estimate.parts for candidate in result.ranking},
            "seconds",
        )),
        *(
            Picture(f"One MoE layer of the best plan, {name}", in_words(timeline), gantt(timeline, until))
            for name, timeline in timelines.items()
        ),
        Picture(
            "Memory of a rank", f"GiB by use; the line marks the device's memory, {cluster.device.memory_gib:g} GiB.",
            stacked(
                {
                    _name(candidate): {use: size / GIB for use, size in vars(candidate.memory).items()}
                    for candidate in result.ranking
                },
                "GiB", limit=cluster.device.memory_gib,
            ),
        ),
        Picture(
            "Roofline of products",
            "The device's rate over the rows of a product: bounded by memory bandwidth times operations per byte of weights, "
            "and by the best measured rate. The dot is an expert of the best plan.",
            roofline(best, cluster, layer),
        ),
    ]  # fmt: skip
    return charts_page(path, "plan", title, " · ".join(answer), pictures)


def stacked(named: Mapping[str, Mapping[str, float]], unit: str, *, limit: float | None = None) -> go.Figure:
    """Draw stacked bars.

    Args:
        named: name of a bar -> name of a part -> value.
        unit: unit of the values.
        limit: where to draw a vertical line; None for no line.
    """
    chart = figure(unit, "", height=140 + 34 * len(named), legend=True)
    for number, part in enumerate(dict.fromkeys(part for parts in named.values() for part in parts)):
        chart.add_trace(bars(part, list(named), [parts.get(part, 0.0) for parts in named.values()], run_colour(number)))
    chart.update_yaxes(autorange="reversed", nticks=None)
    chart.update_layout(barmode="stack", hovermode="closest")
    if limit is not None:
        chart.add_vline(x=limit, line={"color": INK, "width": 2, "dash": "dash"})
    return chart


def roofline(best: PlannedStep, cluster: ClusterSpec, layer: Workload) -> go.Figure:
    """Draw the rate of an expert's matrix products over its rows: the upper bound, the rate reached, and the plan's experts."""
    rates = rates_of(cluster, layer.products or layer.dtype)
    work = float(layer.matrices * layer.dim * layer.hidden / best.grid.etp)
    plan_rows = best.grid.dp * layer.copies / layer.num_experts / best.grid.edp

    def reached(rows: np.ndarray) -> np.ndarray:
        seconds = rates.product_seconds(rows, 2 * work, work * layer.element_bytes, grouped=True)
        rate: np.ndarray = rows * 2 * work / seconds / 1e12
        return rate

    rows = np.geomspace(1, max(8192.0, 2 * plan_rows), 60)
    chart = figure("rows of an expert", "TFLOP/s", height=340, legend=True, type="log")
    chart.update_xaxes(type="log")
    memory = np.minimum(2 * rows * rates.memory / layer.element_bytes, rates.grouped_flops) / 1e12
    chart.add_trace(line("memory and the best rate", rows.tolist(), memory.tolist(), run_colour(6), width=1.2))
    chart.add_trace(line("reached", rows.tolist(), reached(rows).tolist(), run_colour(0), width=2.4))
    if cluster.device.peak_tflops:
        ends = [float(rows[0]), float(rows[-1])]
        chart.add_trace(line("data sheet", ends, [cluster.device.peak_tflops] * 2, run_colour(1), width=1.2))
    plan_rate = float(reached(np.array([plan_rows]))[0])
    chart.add_trace(line(f"experts of the best plan, {plan_rows:,.0f} rows", [plan_rows], [plan_rate], INK))
    return chart


def _name(candidate: PlannedStep) -> str:
    unit, length = unit_of(candidate.seconds)
    return f"{name_of(candidate.grid)}, {plan_in_words(candidate.plan)}: {candidate.seconds / length:.4g} {unit}"
