"""Multicast on meshes of every kind, against the dense float64 reference: nodes and ranks, only
ranks, shards, chunks, budgets.

Cases are those of `moesaic check`, moved to meshes on which a token is sent once per node, once per
rank, or both. Only few freely drawn cases would be like this.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helpers import thinned
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.routing.capacity import Capacity, Dropless
from moesaic.testing.cases import Case, draw_case, draw_top_k, fitting_top_k, looks_across_tokens
from moesaic.testing.equivalence import failures, run_case

TWO_LEVELS = (
    Grid(world=4, ep=4, ranks_per_node=2),
    Grid(world=4, tp=2, ep=4, ranks_per_node=2),
    Grid(world=8, ep=8, ranks_per_node=4),
    Grid(world=8, tp=2, ep=8, ranks_per_node=2),
    Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4),
    Grid(world=8, ep=4, ranks_per_node=2),
)
ONE_LEVEL = (
    Grid(world=4, ep=4),
    Grid(world=4, ep=4, ranks_per_node=1),
    Grid(world=8, tp=2, ep=4, etp=2),
    Grid(world=8, tp=4, ep=4, etp=2, innermost="ep", ranks_per_node=8),
    Grid(world=8, ep=4, etp=2, ranks_per_node=2),
    Grid(world=8, tp=2, ep=2, etp=4, ranks_per_node=4),
    Grid(world=8, tp=2, ep=2, etp=2, ranks_per_node=4),
)


def case_of(seed: int, grid: Grid) -> Case:
    """Return a case of `moesaic check`, with the changes that multicast on the mesh needs."""
    rng = random.Random(f"multicast {seed}")
    drawn = draw_case(seed, world=grid.world)
    plan = Plan(
        schedule=rng.choice(["s1", "s2"]),
        all_to_all="multicast",
        chunks=rng.choice([1, 2, 3]),
        order=drawn.plan.order,
        gather_weights=rng.choice([None, 1]) if grid.etp == 2 else None,
        memory_budget=rng.choice([None, None, 3]),
    )
    longest = max(1, *(length for of_groups in drawn.lengths for length in of_groups))
    router = (
        "softmax" if looks_across_tokens(drawn.router) or drawn.router == "hash" else drawn.router
    )
    num_experts = grid.ep * rng.choice(
        [each for each in (1, 2, 3) if fitting_top_k(router, grid.ep * each)]
    )
    return replace(
        drawn,
        grid=grid,
        plan=plan,
        num_experts=num_experts,
        top_k=draw_top_k(rng, router, num_experts),
        router=router,
        experts="swiglu" if drawn.experts == "modules" else drawn.experts,
        capacity=Dropless()
        if isinstance(drawn.capacity, Capacity) and drawn.capacity.is_padded
        else drawn.capacity,
        lengths=tuple(
            tuple(rng.randint(0, longest) for _ in range(grid.dp)) for _ in drawn.lengths
        ),
        precision="float64",
        placement="none",
    )


@pytest.mark.parametrize("seed", thinned(range(14), every=5))
def test_it_computes_what_one_process_computes(seed: int) -> None:
    grids = TWO_LEVELS if seed % 2 else ONE_LEVEL
    case = case_of(seed, grids[seed // 2 % len(grids)])
    assert failures(case, run_case(case)) == {}, case
