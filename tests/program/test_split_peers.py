"""The smart schedule: which groups exchange in which step and on which lane, and that steps
overlap."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Device, Link, Tflops
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.passes.split import groups_inside_nodes, split_peers
from moesaic.program.plan import Plan
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Lane, Op
from moesaic.program.timeline import Span
from moesaic.program.transpose import transpose

GRID = Grid(world=8, ep=8, ranks_per_node=2)


def pairs(
    grid: Grid, groups: int, task_name: str, *, backward: bool = False
) -> set[tuple[int, int]]:
    """Return which group of ep ranks sends to which in a movement. Every rank has copies for every
    expert."""
    program = split_peers(SCHEDULES["s1"](), groups, grid)
    program = transpose(program) if backward else program
    slots = {slot.name: slot for slot in program.slots}
    copies = np.full((grid.world, grid.ep), 2)
    sizes = CallSizes(grid, copies, copies.sum(1))
    task = next(task for task in program.tasks if task.name == task_name)
    ranks_per_group = grid.ep // groups
    group_of_rank = [grid.coordinate(rank, "ep") // ranks_per_group for rank in range(grid.world)]
    return {
        (group_of_rank[source], group_of_rank[target])
        for source, target, _ in messages_of(task, slots, sizes)
    }


@pytest.mark.parametrize(
    ("groups", "grid"), [(4, GRID), (8, GRID), (2, Grid(world=8, ep=4, etp=2, ranks_per_node=4))]
)
def test_group_g_sends_to_g_plus_j_and_gets_from_g_minus_j(groups: int, grid: Grid) -> None:
    """As in FasterMoE's code, not its figure: step 0 is inside the group, the last step an exchange
    with the previous group."""
    assert pairs(grid, groups, "h~0") <= {(g, g) for g in range(groups)}
    assert pairs(grid, groups, "z~0'", backward=True) <= {(g, g) for g in range(groups)}
    for step in range(1, groups):
        forward = {(g, (g + step) % groups) for g in range(groups)}
        backward = {(b, a) for a, b in forward}
        assert (
            pairs(grid, groups, f"h~{step}")
            == pairs(grid, groups, f"z~{step}'", backward=True)
            == forward
        )
        assert (
            pairs(grid, groups, f"z~{step}")
            == pairs(grid, groups, f"h~{step}'", backward=True)
            == backward
        )
    last = pairs(grid, groups, f"z~{groups - 1}")
    assert last == {(g, (g + 1) % groups) for g in range(groups)}, (
        "the last results travel between neighbours"
    )


def test_groups_follow_the_nodes() -> None:
    assert groups_inside_nodes(GRID) == 4
    assert groups_inside_nodes(Grid(world=8, ep=8, ranks_per_node=4)) == 2
    assert groups_inside_nodes(Grid(world=8, ep=8)) == 1, "one node: nothing to tell apart"
    assert groups_inside_nodes(Grid(world=8, ep=4, etp=2, ranks_per_node=4)) == 2
    assert groups_inside_nodes(Grid(world=8, ep=4, etp=2, innermost="ep", ranks_per_node=2)) == 2
    assert groups_inside_nodes(Grid(world=12, ep=6, ranks_per_node=4)) == 3, (
        "4 + 2: the largest that fit both"
    )
    assert groups_inside_nodes(Grid(world=6, ep=3, ranks_per_node=2)) == 3, (
        "nodes that cut a copy unevenly"
    )
    with pytest.raises(InputError, match=r"plan\.peer_groups=3 does not divide mesh\.ep=8"):
        split_peers(SCHEDULES["s1"](), 3, GRID)


@pytest.mark.parametrize("groups", [2, 4])
def test_step_0_takes_the_lane_inside_nodes_where_it_stays_there(groups: int) -> None:
    work = compile_plan(Plan(peer_groups=groups), GRID)
    for program in (work.forward, work.backward):
        by_step = {
            (task.name, program.slot(task.writes[0]).layout.step): task.lane
            for task in program.tasks
            if task.op is Op.MOVE and program.slot(task.writes[0]).layout.step is not None
        }
        assert {lane for (_, step), lane in by_step.items() if step[0] > 0} == {Lane.INTER}  # type: ignore[index]
        local = {lane for (_, step), lane in by_step.items() if step[0] == 0}  # type: ignore[index]
        assert local == {Lane.INTRA if groups >= 4 else Lane.INTER}, (
            "2 groups of 4 ranks span two nodes each"
        )


def test_shards_that_span_nodes_keep_step_0_between_nodes() -> None:
    grid = Grid(world=8, ep=2, etp=4, ranks_per_node=2)
    program = split_peers(SCHEDULES["s2"](), 2, grid)
    lanes = {task.name: task.lane for task in program.tasks if task.op is Op.MOVE}
    assert lanes["h~0"] is Lane.INTER


def spans(plan: Plan) -> dict[str, Span]:
    links = (
        Link(name="nvlink", devices=1, gbps=(400,), carries="inside"),
        Link(name="nic", devices=1, gbps=(100,), carries="outside"),
    )
    device = Device(tflops=Tflops(bf16=50), memory_gib=80, memory_gigabytes_per_second=1e6)
    cluster = ClusterSpec(nodes=4, devices_per_node=2, device=device, links=links)
    workload = Workload(tokens=4096, dim=1024, hidden=1024, num_experts=8, top_k=2)
    work = compile_plan(plan, GRID)
    return {
        span.task: span
        for span in Simulator(cluster).run(work.forward, workload, GRID).timeline.spans
    }


def test_the_next_step_travels_while_the_experts_of_one_run() -> None:
    by_node = spans(Plan(peer_groups=4))
    whole = spans(Plan())
    assert by_node["h~1"].start < 0.1 * by_node["h~0"].end, "links inside nodes, and those between"
    for step in range(3):
        first = by_node[f"out~{step}"]
        second = by_node[f"h~{step + 1}"]
        assert first.start < second.end, (
            f"step {step + 1} arrives while the experts of step {step} run, or later"
        )
    assert by_node["z~0"].start < by_node["h~3"].end, "results leave while other steps still arrive"
    ends = [max(span.end for span in timeline.values()) for timeline in (by_node, whole)]
    assert ends[0] < 0.85 * ends[1]
