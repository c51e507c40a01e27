"""Loads for tests of replication policies, and what their tables do to them."""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.program.grid import Grid
from moesaic.program.replications import NOTHING, Replications

GRIDS = [
    Grid(world=4, ep=4, ranks_per_node=2),
    Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4),
    Grid(world=8, ep=4, ranks_per_node=2),
    Grid(world=8, ep=2, etp=2, innermost="ep", ranks_per_node=2),
]


def draw(seed: int) -> CallLoad:
    rng = np.random.default_rng(seed)
    grid = GRIDS[seed % len(GRIDS)]
    experts = grid.ep * int(rng.integers(1, 5))
    popular = rng.dirichlet(np.full(experts, rng.choice([0.1, 0.5, 5.0])))
    copies = rng.multinomial(int(rng.integers(0, 400)), popular, size=grid.world)
    return CallLoad(grid, copies, experts, int(rng.integers(1, 64)), int(rng.integers(1, 64)))


def flat(loads: list[int], ep: int, ranks_per_node: int = 2) -> CallLoad:
    """Return a load in which the copies of every expert are spread evenly over the places."""
    copies = np.tile(np.array(loads) // ep, (ep, 1))
    return CallLoad(Grid(world=ep, ep=ep, ranks_per_node=ranks_per_node), copies, len(loads), 4, 4)


def dense(load: CallLoad | ReplicaLoad, replicated: Replications) -> np.ndarray:
    """Return the dense table over all ranks, or over the places of one replica of the experts."""
    ep = len(load.origins) if isinstance(load, ReplicaLoad) else load.grid.ep
    return replicated.table((*load.copies.shape, ep))


def by_place(load: CallLoad, replicated: np.ndarray) -> list[np.ndarray]:
    return [replicated[origins].sum(1) for origins in load.replicas]


def computed(load: CallLoad, replicated: Replications | None) -> np.ndarray:
    """Return the copies that each place computes, (ep,) int64."""
    table = dense(load, replicated or NOTHING)
    copies: np.ndarray = np.bincount(
        load.home, (load.copies - table.sum(2)).sum(0), load.grid.ep
    ) + table.sum((0, 1))
    return copies.astype(np.int64)


def check_table(policy: AbstractReplicationPolicy, load: CallLoad) -> None:
    """Assert that a policy replicates copies that are there, never to their home, and the same each
    time."""
    replicated = policy.decide(load)
    assert replicated.shape == (load.grid.world, load.num_experts, load.grid.ep)
    assert (replicated >= 0).all()
    assert (replicated.sum(2) <= load.copies).all()
    assert replicated[:, np.arange(load.num_experts), load.home].sum() == 0
    assert (replicated == policy.decide(load)).all()
