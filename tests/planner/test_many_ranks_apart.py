"""Uneven loads on many ranks are counted for all ranks at once
(`tests/program/test_sizes_of_all_ranks.py`)."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, dirichlet_counts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex, Pieces
from moesaic.program.plan import Plan
from moesaic.program.task import Layout
from planner.clusters import tree

LAYER = Workload(tokens=256, num_experts=16, top_k=2, dim=64, hidden=64)
PLANS = [
    Plan(schedule="s2", chunks=2, all_to_all="hier2d"),
    Plan(schedule="s1", all_to_all="multicast"),
    Plan(peer_groups=2),
    Plan(schedule="baseline", all_to_all="naive"),
    Plan(gather_weights=0),
]


def grid(world: int) -> Grid:
    return Grid(world=world, tp=2, ep=4, etp=2, ranks_per_node=4)


def run(plan: Plan, world: int) -> tuple[list[np.ndarray], list[dict[str, float]]]:
    """Return the end of each rank, forward and backward, and the busy seconds of links."""
    compiled = compile_plan(plan, grid(world))
    counts = dirichlet_counts(world // 2, LAYER, concentration=0.3, seed=1)
    simulator = Simulator(tree(world // 4, 4))
    ends = []
    links = []
    for program in (compiled.forward, compiled.backward):
        simulated = simulator.run(
            program, LAYER, compiled.grid, sizes=sizes_of(program, LAYER, compiled.grid, counts)
        )
        ends.append(simulated.ends)
        links.append(simulated.link_seconds)
    return ends, links


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: f"{plan.schedule} {plan.all_to_all} {plan.peer_groups}"
)
def test_pieces_are_listed_for_the_first_rank_only(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []
    pieces = LayoutIndex.pieces

    def watched(self: LayoutIndex, layout: Layout, rank: int) -> Pieces:
        listed.append(rank)
        return pieces(self, layout, rank)

    monkeypatch.setattr(LayoutIndex, "pieces", watched)
    ends, links = run(plan, 32)
    assert set(listed) == {0}, "what share of an expert a rank runs, the first one says"
    assert len({*ends[0].round(9)}) > 4, "loads are uneven, so ranks end at several moments"
    assert all(links)
