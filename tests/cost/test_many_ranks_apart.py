"""Uneven loads on many ranks: copies of the experts are alike but for their ranks, so pieces are matched for one of them."""

from __future__ import annotations

import numpy as np
import pytest

from cost.clusters import tree
from moesaic.cost.call_sizes import sizes_of
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload, dirichlet_counts
from moesaic.plan import Plan, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.sizes import LayoutIndex

LAYER = Workload(tokens=256, num_experts=16, top_k=2, dim=64, hidden=64)
PLANS = [
    Plan(schedule="s2", chunks=2, all_to_all="hier2d"), Plan(schedule="s1", all_to_all="multicast"), Plan(peer_groups=2),
    Plan(schedule="baseline", all_to_all="naive"), Plan(gather_weights=0),
]  # fmt: skip


def grid(world: int) -> Grid:
    return Grid(world=world, tp=2, ep=4, etp=2, ranks_per_node=4)


def run(plan: Plan, world: int) -> tuple[list[np.ndarray], list[dict[str, float]]]:
    """Return when each rank ends, forward and backward, and how long links are taken."""
    compiled = compile_plan(plan, grid(world))
    counts = dirichlet_counts(world // 2, LAYER, concentration=0.3, seed=1)
    simulator, ends, links = Simulator(tree(world // 4, 4)), [], []
    for program in (compiled.forward, compiled.backward):
        found = simulator.run(program, LAYER, compiled.grid, sizes=sizes_of(program, LAYER, compiled.grid, counts))
        ends.append(found.ends)
        links.append(found.link_seconds)
    return ends, links


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.schedule} {plan.all_to_all} {plan.peer_groups}")
def test_what_is_derived_from_one_copy_of_the_experts_is_what_every_rank_says(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, links = run(plan, 32)
    monkeypatch.setattr(LayoutIndex, "ranks_apart", lambda self, layout, group=(): self.grid.world)
    again, links_again = run(plan, 32)
    assert all((one == other).all() for one, other in zip(ends, again))
    assert links == links_again
    assert len({*ends[0].round(9)}) > 4, "loads are uneven, so ranks end at several moments"


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.schedule} {plan.all_to_all} {plan.peer_groups}")
def test_pieces_are_matched_for_one_copy_of_the_experts_only(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    exchanged = LayoutIndex._exchanged
    monkeypatch.setattr(
        LayoutIndex,
        "_exchanged",
        lambda self, move, members: asked.append(len(members)) or exchanged(self, move, members),
    )
    matched = []
    for world in (16, 64):
        asked.clear()
        run(plan, world)
        matched.append(sum(asked))
    assert matched[0] == matched[1] > 0
