"""Two programs joined into one keep all tasks and dependencies, and together take no longer than one after the other."""

from __future__ import annotations

import pytest

from moesaic.planner.cluster import read_cluster
from moesaic.planner.simulate import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.order.graph import predecessors
from moesaic.program.plan import Plan
from moesaic.program.timeline import lay_out
from moesaic_lab.ledger.overlapped import BEFORE, BEHIND, soonest_first, together

LAYER = Workload(tokens=4096, num_experts=64, top_k=4, dim=2048, hidden=1024)
GRID = Grid(world=16, ep=16, ranks_per_node=8)


@pytest.mark.parametrize("all_to_all", ["linear", "multicast", "hier2d"])
def test_both_programs_run_in_one_and_wait_only_for_their_own(all_to_all: str) -> None:
    compiled = compile_plan(Plan(all_to_all=all_to_all), GRID)  # type: ignore[arg-type]
    both = together(compiled.forward, compiled.backward)
    names = [task.name for task in both.tasks]
    assert len(set(names)) == len(names) == len(compiled.forward.tasks) + len(compiled.backward.tasks) + 2
    for task, before in zip(both.tasks, predecessors(both)):
        sides = {both.tasks[number].name.split()[0] for number in before} - {BEFORE}
        assert sides <= {task.name.split()[0]} if task.name != BEHIND else sides == {"backward"}
    first = [task for task in both.tasks if task.name.startswith("forward") and "forward x" in task.reads]
    assert first
    assert all(both.tasks[0].name == BEFORE and set(task.reads) & set(both.tasks[0].writes) for task in first)


@pytest.mark.parametrize("all_to_all", ["linear", "multicast"])
@pytest.mark.parametrize("around", [1e-4, 2e-3])
def test_overlapped_micro_batches_take_less_than_separate_ones_and_at_least_the_busiest_lane(
    all_to_all: str, around: float
) -> None:
    simulator = Simulator(read_cluster("dgx-h100", nodes=2))
    compiled = compile_plan(Plan(all_to_all=all_to_all, order="fifo"), GRID)  # type: ignore[arg-type]
    both = together(compiled.forward, compiled.backward)
    known = {BEFORE: around, BEHIND: 2 * around}
    seconds = simulator.durations(both, LAYER, compiled.grid) | known
    ordered = soonest_first(both, seconds)
    overlapped = lay_out(ordered, seconds)
    apart = [
        lay_out(program, simulator.durations(program, LAYER, compiled.grid))
        for program in (compiled.forward, compiled.backward)
    ]
    assert overlapped.makespan < sum(program.makespan for program in apart) + 3 * around
    for lane, share in overlapped.busy.items():
        busy = share * overlapped.makespan
        assert share <= 1
        assert busy == pytest.approx(
            sum(program.busy.get(lane, 0.0) * program.makespan for program in apart)
            + 3 * around * (lane.value == "compute")
        )
    run = simulator.run(ordered, LAYER, compiled.grid, known=known)
    assert run.compute_seconds > 3 * around
    assert run.seconds >= run.compute_seconds
