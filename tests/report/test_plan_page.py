"""The page about a plan: bars add up to what the plan says, and the roofline passes through what its experts reach."""

from __future__ import annotations

import pytest

pytest.importorskip("plotly")

from moesaic.cost.cluster import read_cluster
from moesaic.plan.candidates import Pins
from moesaic.plan.model import Job
from moesaic.plan.search import Settings, search
from moesaic.report.plan_page import roofline, stacked

H100 = read_cluster("dgx-h100", nodes=2)
JOB = Job()


def test_bars_add_up_part_by_part() -> None:
    made = stacked({"one": {"a": 1.0, "b": 2.0}, "two": {"b": 0.5}}, "s", limit=4.0)
    assert {trace.name: tuple(trace.x) for trace in made.data} == {"a": (1.0, 0.0), "b": (2.0, 0.5)}
    assert all(tuple(trace.y) == ("one", "two") for trace in made.data)
    assert [shape.x0 for shape in made.layout.shapes] == [4.0]
    assert made.layout.barmode == "stack"


def test_the_roofline_is_never_passed_and_holds_the_plans_experts() -> None:
    best = search(JOB, H100, Settings(pins=Pins(tp=1, ep=4, etp=1), keep=1)).best
    layer = JOB.step_model(H100, best.grid.dp).layer
    lines = {trace.name: trace for trace in roofline(best, H100, layer).data}
    bound, reached = lines["memory and the best rate"], lines["reached"]
    assert tuple(bound.x) == tuple(reached.x)
    assert all(y <= 1.000001 * most for y, most in zip(reached.y, bound.y))
    assert max(reached.y) == pytest.approx(H100.device.tflops.bf16)
    (here,) = (trace for name, trace in lines.items() if name.startswith("experts of the best plan"))
    rows = best.grid.dp * layer.tokens * layer.top_k / layer.num_experts / best.grid.edp
    assert tuple(here.x) == (rows,)
    before = max(x for x in reached.x if x <= rows)
    assert here.y[0] >= reached.y[list(reached.x).index(before)] * 0.999
