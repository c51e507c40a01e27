"""Whose durations an exact order is searched by: those of the cluster or profile that is named, wherever it is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost.clusters import DEVICE, flat
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload
from moesaic.plan import Plan, compile_plan
from moesaic.plan.candidates import compile_on
from moesaic.plan.compile import durations_on
from moesaic.program.grid import Grid
from moesaic.program.timeline import lay_out
from moesaic.train.balance import known_cluster, known_durations
from moesaic.train.config import MeshConfig, PlannerConfig, TrainConfig

GRID = Grid(world=4, ep=4, ranks_per_node=2)
LAYER = Workload(tokens=2048, num_experts=8, top_k=2, dim=512, hidden=512, matrices=2, dtype="fp32")
EXACT = Plan(order="exact", chunks=2, all_to_all="hier2d")


def test_durations_are_those_of_the_cluster_to_the_nanosecond() -> None:
    simulator = Simulator(flat(2, 2, device=DEVICE))
    program = compile_plan(EXACT, GRID).forward
    found, exact = durations_on(simulator, LAYER)(program, GRID), simulator.durations(program, LAYER, GRID)
    assert set(found) == {task.name for task in program.tasks}
    assert found == {name: pytest.approx(each, abs=5.1e-10) for name, each in exact.items()}
    assert all(each == round(each, 9) for each in found.values())


def test_an_order_is_searched_by_the_cluster_it_is_compiled_on() -> None:
    """On slow links and on fast ones other orders are best; each is at least as good as the other's on its own."""
    plans, simulators = {}, {}
    for name, cluster in (("slow", flat(2, 2, device=DEVICE)), ("fast", flat(2, 2, device=DEVICE))):
        times = 0.02 if name == "slow" else 50.0
        simulators[name] = Simulator(cluster.with_links("outside", times))
        plans[name] = compile_on(EXACT, GRID, simulators[name], LAYER)
    for name, other in (("slow", "fast"), ("fast", "slow")):
        seconds = durations_on(simulators[name], LAYER)

        def makespan(of: str, seconds=seconds) -> float:  # type: ignore[no-untyped-def]
            program = plans[of].backward
            return lay_out(program, seconds(program, GRID)).makespan

        assert makespan(name) <= makespan(other) + 1e-9
    assert plans["slow"].digest != plans["fast"].digest


def test_a_run_knows_the_durations_of_what_its_planner_names() -> None:
    config = TrainConfig(mesh=MeshConfig(ep=4, ranks_per_node=2))
    assert known_durations(config, GRID) is None
    named = replace(config, planner=PlannerConfig(cluster="bed-2x2"))
    found, program = known_durations(named, GRID), compile_plan(EXACT, GRID).forward
    assert found is not None
    simulator, layer = known_cluster(named, GRID)
    assert found(program, GRID) == durations_on(simulator, layer)(program, GRID)
