"""Experts in random orders under random plans, meshes, routers, capacities and precisions: results
equal the plain layer's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from meshes import make_layer, on_mesh, tokens_of
from test_by_deepep import DIM, EXPERTS, GRID, TOKENS, opened
from torch import Tensor

from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator
from moesaic.balance.samples import Given, Homes
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.testing.cases import draw_case
from moesaic.testing.equivalence import expert_placement_of, failures, run_case

__all__ = ["opened"]

CASES = 16


@pytest.mark.random
def test_random_cases_in_random_orders() -> None:
    seeds = [seed for seed in range(4 * CASES) if draw_case(seed).grid.ep > 1][:CASES]
    assert len(seeds) == CASES
    wrong = {}
    for seed in seeds:
        case = replace(draw_case(seed), experts_move=True)
        found = failures(case, run_case(case))
        if found:
            wrong[seed] = (case, found)
    assert wrong == {}


@pytest.mark.usefixtures("opened")
def test_deepep_finds_experts_where_they_are() -> None:
    x = torch.randn(4, TOKENS, DIM)
    whole = MoE(DIM, 8, EXPERTS, 2)

    def rank(transport: AbstractTransport) -> tuple[Tensor, Tensor]:
        found = []
        for order in (np.arange(EXPERTS), np.random.default_rng(0).permutation(EXPERTS)):
            layer = on_mesh(whole, GRID, transport, Plan(all_to_all="deepep"))
            expert_placement_of(layer, Mesh(GRID, transport)).place([order])
            with torch.autocast("cpu", torch.bfloat16):
                found.append(layer(x[transport.rank]).detach())
        return found[0], found[1]

    for still, moved in run_ranks(4, rank):
        torch.testing.assert_close(moved, still, rtol=2e-2, atol=2e-3)
        assert float(still.abs().max()) > 0.02


def test_samples_that_move_find_experts_that_moved() -> None:
    """Expert and sample placement together: where samples should go depends on where the next
    layer's experts are."""
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    whole = make_layer()
    after = Homes(np.array([[7, 1], [0, 3], [4, 2], [6, 5]]))
    order = np.array([2, 3, 0, 1])

    def run(transport: AbstractTransport, layer: MoE) -> tuple[Tensor, np.ndarray, np.ndarray]:
        following = Following(layer.router, 2, layer.on_mesh.order)
        trip = Relocator(Mesh(grid, transport), Given([after]), ends_home=False).start(
            [following] * 2, 2, 3
        )
        move = trip.next()
        y = trip.take_home(MovingMoE(layer)(tokens_of(transport.rank).view(2, 3, -1), move=move))
        assert move.load.following is not None
        return y.detach(), move.load.copies, move.load.following

    def rank(transport: AbstractTransport) -> list[tuple[Tensor, np.ndarray, np.ndarray]]:
        layer = on_mesh(whole, grid, transport, Plan(schedule="s1"))
        found = [run(transport, layer)]
        expert_placement_of(layer, Mesh(grid, transport)).place([order])
        return [*found, run(transport, layer)]

    for (still, copies, following), (moved, by_slot, following_by_slot) in run_ranks(4, rank):
        torch.testing.assert_close(moved, still, rtol=1e-12, atol=1e-12)
        assert np.array_equal(by_slot, copies[:, order])
        assert np.array_equal(following_by_slot, following[:, order])
        assert not np.array_equal(by_slot, copies)
