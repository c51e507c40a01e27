"""Writes the page about a plan: a sentence, tiles, the ranking, a step by part, a layer, memory,
roofline and sources.

`named` are the plans of the ranking by the name that charts and table give them, "plan 1" for the
fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from moesaic.planner.answer import USUAL_PRICE, Speed
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.compute import rates_of
from moesaic.planner.in_flight import InFlight
from moesaic.planner.job import Job
from moesaic.planner.pipeline import Timed
from moesaic.planner.rank_memory import GIB
from moesaic.planner.search import Result
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.workload import Workload
from moesaic.program.plan import plan_in_words
from moesaic.program.text import NAMES
from moesaic.program.timeline import Timeline
from moesaic.report.gantt import (
    bars_of,
    gantt,
    in_flight_gantt,
    in_words,
    stages_gantt,
    step_gantt,
    unit_of,
)
from moesaic.report.style import (
    INK,
    Picture,
    Table,
    bars,
    charts_page,
    figure,
    line,
    part_colour,
    run_colour,
)
from moesaic.report.summary import Card, amount, percent


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """What the planner found."""

    job: Job
    result: Result
    cluster: ClusterSpec
    speed: Speed
    """The speed of the best plan."""
    price: float | None
    """Price of a device per hour, in a currency that nobody said; None for a usual one in US
    dollars."""
    lines: Sequence[str]
    """The answer in sentences, as the terminal shows it."""
    timelines: Mapping[str, Timeline]
    """The timelines of the best plan's programs, "forward" and "backward"."""
    stages: Timed | None = None
    """The passes of the best plan's micro-batches through its pipeline stages, if it has some."""
    flight: InFlight | None = None
    """The forward pass of two micro-batches of the best plan, if they are in flight."""


def write_plan_page(title: str, answer: PlanAnswer, path: Path) -> Path:
    """Write the page about a plan and return its path. The page is self-contained and loads
    nothing.

    Raises:
        InputError: the file cannot be written.
    """
    named = {
        f"plan {number}": planned for number, planned in enumerate(answer.result.ranking, start=1)
    }
    sources = [f"measured: {what}" for what in answer.cluster.measured]
    sources.append(f"the rest: {answer.cluster.source}")
    folded = {"The answer in sentences": answer.lines, "Where the numbers come from": sources}
    return charts_page(
        path,
        what="plan",
        title=title,
        lead=_lead(answer),
        charts=_pictures(answer, named),
        cards=tiles(answer),
        table=ranking(named),
        folded=folded,
    )


def _lead(answer: PlanAnswer) -> str:
    """Return the sentence about the best plan."""
    job = answer.job
    best = answer.result.best
    tokens = job.batch_size * job.accumulation * job.model.seq_len
    return (
        f"The fastest of {answer.result.num_simulated:,} simulated plans trains on {tokens:,} "
        f"tokens in a simulated step of {_time(best.seconds)}, limited by "
        f"{best.estimate.bottleneck}: "
        f"{best.layout}, {plan_in_words(best.plan)}."
    )


def _step_picture(answer: PlanAnswer) -> Picture:
    """Draw a step of the best plan: the stages of a pipeline, or one rank's blocks."""
    name = "One step of the best plan"
    if answer.flight is not None:
        text = (
            "The first layers of two micro-batches in flight, forward: one computes while the "
            "messages of the other travel. Where neither computes, both wait. Drag to zoom in."
        )
        return Picture(name, text, in_flight_gantt(answer.flight))

    if answer.stages is None:
        text = (
            f"The first micro-batch of {answer.job.accumulation}, block by block. Drag to zoom in, "
            "double-click for the whole step."
        )
        all_bars = bars_of(answer.job, answer.result.best, answer.timelines)
        return Picture(name, text, step_gantt(all_bars))

    drawn = 1 + max(span.operation.micro_batch for span in answer.stages.spans)
    count = answer.result.best.split.of(answer.job).accumulation  # of the job as the plan cuts it
    text = (
        f"The first {drawn} micro-batches of {count}: each stage computes a forward or a backward "
        "pass, and waits in between for the messages of its neighbours. Drag to zoom in."
    )
    return Picture(name, text, stages_gantt(answer.stages))


def _pictures(answer: PlanAnswer, named: Mapping[str, PlannedStep]) -> list[Picture]:
    """Draw the best plan's step and layer, and the plans beside each other, which have names."""
    cluster = answer.cluster
    best = answer.result.best

    seconds_by_part = {name: planned.estimate.parts for name, planned in named.items()}
    caption = "Seconds by part of the step, for the plans of the table."
    pictures = [
        _step_picture(answer),
        Picture("One step", caption, stacked(seconds_by_part, "seconds")),
    ]

    # forward and backward on one scale
    until = max(timeline.makespan for timeline in answer.timelines.values())
    for name, timeline in answer.timelines.items():
        title = f"One MoE layer of the best plan, {name}"
        caption = f"{in_words(timeline)}. {NAMES}"
        pictures.append(Picture(title, caption, gantt(timeline, until)))

    gib_by_use = {}
    for name, planned in named.items():
        memory = vars(planned.memory)  # use -> bytes
        gib_by_use[name] = {use: size / GIB for use, size in memory.items()}
    limit = cluster.device.memory_gib
    caption = f"GiB by use; the line marks the device's memory, {limit:g} GiB."
    pictures.append(Picture("Memory of a rank", caption, stacked(gib_by_use, "GiB", limit=limit)))

    # the sizes of an MoE layer as the plan splits it
    layer = best.split.of(answer.job).step_model(cluster, best.grid.dp).layer
    caption = (
        "The device's rate over the rows of a product: bounded by memory bandwidth times "
        "operations per byte of weights, and by the best measured rate. The dot is an expert "
        "of the best plan."
    )
    pictures.append(Picture("Roofline of products", caption, roofline(best, cluster, layer)))
    return pictures


def tiles(answer: PlanAnswer) -> list[Card]:
    """Return the headline numbers of the best plan."""
    best = answer.result.best
    speed = answer.speed
    low, high = speed.interval  # of tokens per second
    # the step takes longest at the lowest speed
    slow = _time(speed.step_seconds * speed.tokens_per_second / low)
    fast = _time(speed.step_seconds * speed.tokens_per_second / high)
    total, active = (amount(number) for number in answer.job.parameters(answer.cluster))
    bottleneck = best.estimate.bottleneck
    busy_seconds = best.estimate.limits[bottleneck]
    price = answer.price or USUAL_PRICE
    currency = "US dollars" if answer.price is None else "the currency of --price-per-hour"

    rows = [
        (
            "Step time",
            _time(speed.step_seconds),
            f"{fast} to {slow} by published steps; {_time(best.seconds)} simulated",
        ),
        (
            "Memory of a rank",
            f"{best.memory.total / GIB:.1f} GiB",
            f"of {answer.cluster.device.memory_gib:g} GiB",
        ),
        (
            f"Cost in {currency}",
            f"{speed.price(price):,.0f}",
            f"a trillion tokens, at {price:g} a device and hour",
        ),
        ("Bottleneck", bottleneck, f"busy for {percent(busy_seconds / best.seconds)} of the step"),
        (
            "Speed",
            f"{speed.tokens_per_second:,.0f}",
            f"tokens/s and device, {low:,.0f} to {high:,.0f}",
        ),
        ("MFU", percent(speed.utilization), "of the data sheet's rate"),
        (
            "Over the bound",
            f"{best.seconds / answer.result.bound_seconds:.2f}",
            "times the least step of any layout",
        ),
        ("Parameters", total, f"{active} active"),
    ]
    return [Card(title, (value,), note) for title, value, note in rows]


def ranking(named: Mapping[str, PlannedStep]) -> Table:
    """Return the table of plans, by the name that the charts give them."""
    heads = ("", "step", "times the best", "layout", "plan", "limited by", "memory")
    fastest = min(planned.seconds for planned in named.values())
    rows = [
        (
            name,
            _time(planned.seconds),
            f"{planned.seconds / fastest:.2f}",
            planned.layout,
            plan_in_words(planned.plan),
            planned.estimate.bottleneck,
            f"{planned.memory.total / GIB:.1f} GiB",
        )
        for name, planned in named.items()
    ]
    return Table(heads, rows)


def stacked(
    named: Mapping[str, Mapping[str, float]], unit: str, *, limit: float | None = None
) -> go.Figure:
    """Draw stacked bars.

    Args:
        named: name of a bar -> name of a part -> value.
        unit: unit of the values.
        limit: where to draw a vertical line; None for no line.
    """
    # in pixels: 34 a bar, and 140 for axis, legend and margins
    chart = figure(unit, "", height=140 + 34 * len(named), legend=True)
    all_parts: dict[str, None] = {}  # each once
    for parts in named.values():
        all_parts |= dict.fromkeys(parts)
    for part in all_parts:
        values = [parts.get(part, 0.0) for parts in named.values()]
        chart.add_trace(bars(part, list(named), values, part_colour(part)))
    chart.update_yaxes(autorange="reversed", dtick=1)
    chart.update_layout(barmode="stack", hovermode="closest", legend={"traceorder": "normal"})
    if limit is not None:
        chart.add_vline(x=limit, line={"color": INK, "width": 2, "dash": "dash"})
    return chart


def roofline(best: PlannedStep, cluster: ClusterSpec, layer: Workload) -> go.Figure:
    """Draw the rate of an expert's matrix products over its rows: the upper bound, the rate
    reached, and the plan's experts."""
    rates = rates_of(cluster, layer.products or layer.dtype)
    weights = float(layer.matrices * layer.dim * layer.hidden / best.grid.etp)  # of a shard
    # the copies of all data-parallel groups for an expert, which its edp copies share
    plan_rows = best.grid.dp * layer.copies / layer.num_experts / best.grid.edp

    def reached(rows: np.ndarray) -> np.ndarray:
        """Return the rate reached in TFLOP/s, (rows,)."""
        weight_bytes = weights * layer.element_bytes
        # a product and a sum for each weight and row
        seconds = rates.product_seconds(rows, 2 * weights, weight_bytes, grouped=True)
        rate: np.ndarray = rows * 2 * weights / seconds / 1e12
        return rate

    rows = np.geomspace(1, max(8192.0, 2 * plan_rows), 60)
    chart = figure("rows of an expert", "TFLOP/s", height=340, legend=True, type="log")
    chart.update_xaxes(type="log")
    # a product does 2 * rows operations with each weight that it reads
    by_memory = 2 * rows * rates.memory / layer.element_bytes
    bound = np.minimum(by_memory, rates.grouped_flops) / 1e12
    # colours of runs: grey for the bound, blue for what is reached, orange for the data sheet
    chart.add_trace(
        line("memory and the best rate", rows.tolist(), bound.tolist(), run_colour(6), width=1.2)
    )
    chart.add_trace(
        line("reached", rows.tolist(), reached(rows).tolist(), run_colour(0), width=2.4)
    )
    if cluster.device.peak_tflops:
        ends = [float(rows[0]), float(rows[-1])]
        chart.add_trace(
            line("data sheet", ends, [cluster.device.peak_tflops] * 2, run_colour(1), width=1.2)
        )
    plan_rate = float(reached(np.array([plan_rows]))[0])
    chart.add_trace(
        line(f"experts of the best plan, {plan_rows:,.0f} rows", [plan_rows], [plan_rate], INK)
    )
    return chart


def _time(seconds: float) -> str:
    """Return a time in words, in a fitting unit."""
    unit, length = unit_of(seconds)
    return f"{seconds / length:.3g} {unit}"
