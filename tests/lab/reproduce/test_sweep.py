"""A sweep's simulator gives the times of the plain one, for layers it never built."""

from __future__ import annotations

import pytest

from moesaic.planner.cluster import read_cluster
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.reproduce.sweep import sweep_simulator

LAYERS = [
    Workload(
        tokens=tokens,
        num_experts=8,
        top_k=2,
        dim=dim,
        hidden=hidden,
        matrices=2,
        dtype="fp32",
        capacity_factor=1.2,
    )
    for tokens, dim, hidden in ((1024, 512, 2048), (4096, 1024, 512))
]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(schedule="baseline"),
        Plan(chunks=2),
        Plan(schedule="s2", overlap_gather=True),
        Plan(gather_weights=1),
        Plan(gather_weights=0),
        Plan(all_to_all="hier2d", chunks=2),
        Plan(all_to_all="pipelined", codec="int8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("start_up", [False, True])
def test_a_sweep_has_the_times_of_the_simulator(plan: Plan, start_up: bool) -> None:
    spec = read_cluster("tutel" if start_up else "parm-b", nodes=2)
    per_node = spec.devices_per_node
    grid = Grid(world=2 * per_node, tp=2, ep=per_node, etp=2, ranks_per_node=per_node)
    made = compile_plan(plan, grid)
    sweep = sweep_simulator(spec)
    for layer in LAYERS:
        for program in (made.forward, made.backward):
            one, other = (s.run(program, layer, made.grid) for s in (Simulator(spec), sweep))
            assert other.seconds == pytest.approx(one.seconds, rel=1e-9)
            assert other.compute_seconds == pytest.approx(one.compute_seconds, rel=1e-9)
            assert other.link_seconds == pytest.approx(one.link_seconds, rel=1e-9)


def test_two_layers_of_a_sweep_do_not_mix() -> None:
    spec = read_cluster("parm-b", nodes=2)
    grid = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)
    program = compile_plan(Plan(), grid).forward
    sweep = sweep_simulator(spec)
    found = [sweep.run(program, layer, grid).seconds for layer in (*LAYERS, *LAYERS)]
    assert found[:2] == found[2:]
    assert found[0] != found[1]
