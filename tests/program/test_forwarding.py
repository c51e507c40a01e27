"""Kernels that forward rows in pieces: both movements run at once, without copies around them,
encoded only on dispatch."""

from __future__ import annotations

import pytest

from moesaic.planner.simulator import Simulator
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.passes.multicast import in_pieces
from moesaic.program.plan import Plan
from moesaic.program.task import Program
from planner.clusters import DEVICE, flat

GRID = Grid(world=8, ep=8, ranks_per_node=4)
LAYER = Workload(tokens=4096, num_experts=16, top_k=4, dim=1024, hidden=256)


def multicast(grid: Grid = GRID) -> tuple[Program, Program]:
    compiled = compile_plan(Plan(all_to_all="multicast", order="fifo"), grid)
    return compiled.forward, compiled.backward


def run(program: Program, inter: float, grid: Grid = GRID) -> Simulated:
    spec = flat(grid.world // 4, 4, intra=400, inter=inter, device=DEVICE)
    return Simulator(spec).run(program, LAYER, grid)


def spans(simulated: Simulated) -> dict[str, tuple[float, float]]:
    return {each.task: (each.start, each.end) for each in simulated.timeline.spans}


@pytest.mark.parametrize(("inter", "way"), [(10, 0), (1000, 1)])
def test_rows_move_between_nodes_and_inside_them_at_once(inter: float, way: int) -> None:
    """Both movements of each pair, one pair to the experts and one back, begin together, and the
    program gets shorter by as much."""
    program = multicast()[way]
    pieces = in_pieces(program)
    pairs = (
        (("node_tokens_here", "rank_tokens_in"), ("z_rank_tokens", "z"))
        if way == 0
        else (("z'", "z_rank_tokens'"), ("rank_tokens_in'", "node_tokens_here'"))
    )
    apart = spans(run(program, inter))
    together = spans(run(pieces, inter))
    for first, second in pairs:
        assert apart[second][0] >= apart[first][1]
        assert together[second][0] == pytest.approx(together[first][0])
        reader = {name: task for task in pieces.tasks for name in task.reads}[
            next(task for task in program.tasks if task.name == second).writes[0]
        ]
        assert together[reader.name][0] >= max(together[first][1], together[second][1])
    assert run(pieces, inter).seconds < run(program, inter).seconds


def test_what_moves_is_the_same_but_for_codecs() -> None:
    for program in multicast():
        plain = run(program, 100).link_seconds
        pieces = run(in_pieces(program), 100).link_seconds
        assert pieces == pytest.approx(plain)
    forward = multicast()[0]
    plain, coded = (
        run(in_pieces(forward, codec), 100).link_seconds["port out 0"] for codec in ("", "fp8")
    )
    # Dispatched rows in a byte and a scale's share for two, sums in two.
    assert 0.74 < coded / plain < 0.78


def test_on_one_node_only_copies_go() -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=4)
    forward = multicast(grid)[0]
    pieces = in_pieces(forward)
    assert [task.name for task in pieces.tasks] == [task.name for task in forward.tasks]
    assert run(pieces, 100, grid).seconds < run(forward, 100, grid).seconds
