"""The page about a plan: bars add up to the plan's predicted time, and the roofline passes through
its experts' rate."""

from __future__ import annotations

import html
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("plotly")

from moesaic.cli.main import main
from moesaic.planner.answer import Speed
from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import read_cluster
from moesaic.planner.job import Job
from moesaic.planner.pipeline import simulate_pipeline
from moesaic.planner.search import Settings, search
from moesaic.planner.simulator import Simulator
from moesaic.program.compile import compile_plan
from moesaic.report.gantt import COMPUTING, bars_of, stages_gantt, step_gantt, unit_of
from moesaic.report.plan_page import PlanAnswer, roofline, stacked, tiles, write_plan_page
from moesaic.report.style import PART_COLOURS
from moesaic.shapes import ModelShape, MoEShape
from report.test_page import without_plotly

H100 = read_cluster("dgx-h100", nodes=2)
JOB = Job()


def test_bars_add_up_part_by_part() -> None:
    chart = stacked({"one": {"a": 1.0, "b": 2.0}, "two": {"b": 0.5}}, "s", limit=4.0)
    assert {trace.name: tuple(trace.x) for trace in chart.data} == {
        "a": (1.0, 0.0),
        "b": (2.0, 0.5),
    }
    assert all(tuple(trace.y) == ("one", "two") for trace in chart.data)
    assert [shape.x0 for shape in chart.layout.shapes] == [4.0]
    assert chart.layout.barmode == "stack"


def test_the_roofline_is_never_passed_and_holds_the_plans_experts() -> None:
    best = search(JOB, H100, Settings(pins=Pins(tp=1, ep=4, etp=1), keep=1)).best
    layer = JOB.step_model(H100, best.grid.dp).layer
    lines = {trace.name: trace for trace in roofline(best, H100, layer).data}
    bound = lines["memory and the best rate"]
    reached = lines["reached"]
    assert tuple(bound.x) == tuple(reached.x)
    assert all(y <= 1.000001 * most for y, most in zip(reached.y, bound.y))
    assert max(reached.y) == pytest.approx(H100.device.flops("bf16", grouped=True) / 1e12)
    (plan_trace,) = (
        trace for name, trace in lines.items() if name.startswith("experts of the best plan")
    )
    rows = best.grid.dp * layer.tokens * layer.top_k / layer.num_experts / best.grid.edp
    assert tuple(plan_trace.x) == (rows,)
    before = max(x for x in reached.x if x <= rows)
    assert plan_trace.y[0] >= reached.y[list(reached.x).index(before)] * 0.999


@pytest.mark.parametrize("again", [False, True])
def test_the_bars_of_a_step_are_its_parts_and_end_with_it(again: bool) -> None:
    shape = ModelShape(
        num_layers=4,
        moe_every=2,
        dense_hidden=512,
        checkpoint_activations=again,
        moe=MoEShape(num_experts=8, shared_hidden=64),
    )
    job = Job(batch_size=16, accumulation=3, model=shape)
    best = search(job, H100, Settings(pins=Pins(tp=1, ep=8, etp=1), keep=1)).best
    layer = job.step_model(H100, best.grid.dp).layer
    simulator = Simulator(H100)
    compiled = compile_plan(best.plan, best.grid)
    timelines = {
        name: simulator.run(program, layer, compiled.grid).timeline
        for name, program in (("forward", compiled.forward), ("backward", compiled.backward))
    }
    bars = bars_of(job, best, timelines)
    parts = best.estimate.parts
    assert max(bar.end for bar in bars) == pytest.approx(best.seconds)
    for part in ("attention", "dense", "shared experts", "unembed", "parameters"):
        seconds = sum(bar.end - bar.start for bar in bars if bar.part == part)
        assert 3 * seconds == pytest.approx(parts.get(part, 0.0)), part
    assert {bar.what for bar in bars if bar.part == "moe backward"} == {
        f"MoE layer of block {block}, backward" for block in (1, 3)
    }
    computing = sorted((bar.start, bar.end) for bar in bars if bar.row == COMPUTING)
    assert all(before[1] <= after[0] * (1 + 1e-9) for before, after in pairwise(computing))
    drawn = step_gantt(bars)
    assert sum(len(trace.x) for trace in drawn.data) == len(bars)
    compared = stacked({"plan 1": parts}, "seconds")
    colours = {trace.name: trace.marker.color for trace in (*compared.data, *drawn.data)}
    assert all(trace.marker.color == colours[trace.name] for trace in compared.data)
    assert colours.keys() <= PART_COLOURS.keys()
    assert len(set(colours.values())) == len(colours)
    (others,) = (trace for trace in drawn.data if trace.name == "further micro-batches")
    assert drawn.layout.xaxis.range[1] == pytest.approx(1.05 * others.x[0] / 2, rel=1e-3)


def test_the_page_opens_with_a_sentence_tiles_and_the_ranking_and_folds_the_sources(
    tmp_path: Path,
) -> None:
    result = search(JOB, H100, Settings(pins=Pins(tp=1, ep=8, etp=1), keep=2))
    best = result.best
    compiled = compile_plan(result.best.plan, result.best.grid)
    simulator = Simulator(H100)
    layer = JOB.step_model(H100, result.best.grid.dp).layer
    timelines = {
        name: simulator.run(program, layer, compiled.grid).timeline
        for name, program in (("forward", compiled.forward), ("backward", compiled.backward))
    }
    speed = Speed(
        tokens_per_second=1000.0,
        step_seconds=1.1 * best.seconds,
        interval=(800.0, 1250.0),
        utilization=0.25,
    )
    answer = PlanAnswer(
        job=JOB,
        result=result,
        cluster=H100,
        speed=speed,
        price=3.6,
        lines=["<i>said</i>"],
        timelines=timelines,
    )
    shown = {card.title: (*card.values, card.note) for card in tiles(answer)}
    times = []
    for factor in (1.1, 0.88, 1.375, 1):
        unit, length = unit_of(factor * best.seconds)
        times.append(f"{factor * best.seconds / length:.3g} {unit}")
    usual, low, high, simulated = times
    note = f"{low} to {high} by published steps; {simulated} simulated"
    assert shown["Step time"] == (usual, note)
    assert shown["Cost in the currency of --price-per-hour"][0] == "1,000,000"
    of_usual = {card.title: card.values for card in tiles(replace(answer, price=None))}
    assert of_usual["Cost in US dollars"] == ("694,444",)
    assert shown["Bottleneck"][0] == best.estimate.bottleneck
    assert shown["Memory of a rank"] == (f"{best.memory.total / 2**30:.1f} GiB", "of 80 GiB")
    text = without_plotly(
        write_plan_page("a <b> plan", answer, tmp_path / "plan.html").read_text(encoding="utf-8")
    )
    places = [
        text.index(part)
        for part in (
            "a &lt;b&gt; plan</h1>",
            "<p class='lead'>The fastest of ",
            "<h3>Step time</h3>",
            "<th>plan 2</th>",
            "id='chart-1'",
            "<details><summary>The answer in sentences",
            "&lt;i&gt;said",
            "<details><summary>Where the numbers come from",
            html.escape(H100.measured[0], quote=False)[:30],
        )
    ]
    assert places == sorted(places)


def test_stages_are_drawn_pass_by_pass(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    timed = simulate_pipeline(2, 3, [1.0, 1.0], [2.0, 2.0], [0.0, 0.0], blocks_sender=False)
    drawn = stages_gantt(timed)
    assert sum(len(trace.x) for trace in drawn.data) == 2 * 2 * 3
    assert {trace.name for trace in drawn.data} == {"forward", "backward"}
    ends = [base + x for trace in drawn.data for base, x in zip(trace.base, trace.x)]
    assert max(ends) == pytest.approx(timed.seconds)
    page = tmp_path / "plan.html"
    slow = ["--cluster", "25gbe", "--nodes", "2", "--pp", "2", "--accumulation", "4"]
    assert main(["plan", "--model", "gpt-tiny", *slow, "--page", str(page)]) == 0
    assert "each stage computes a forward or a backward pass" in page.read_text("utf-8")
