"""The best possible placements of experts and samples by mixed-integer programming, as a reference
for policies.

HiGHS solves the programs, through scipy. The time is exponential in the worst case, so use this for
small cases only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.balance.expert_placement import ExpertLoad
from moesaic.balance.samples import Homes, SampleLoad

ROUNDING = 1e-6
"""Relative amount by which the second solve may exceed the busiest place of the first. HiGHS
satisfies constraints only to about this tolerance, and with a smaller one rejects its own
solutions."""


def best_experts(load: ExpertLoad) -> np.ndarray:
    """Return the place of each expert, (num_experts,) int64, with the fewest rows at the busiest
    place. Among such placements, choose one with the fewest rows between nodes."""
    best = _solve(load, None)
    return _solve(load, load.busiest(best) * (1 + ROUNDING))


def _solve(load: ExpertLoad, most: float | None) -> np.ndarray:
    """Minimise the rows at the busiest place; if `most` is given, bound them by `most` and minimise
    rows between nodes.

    An expert has an instance in each replica of all experts (the axis edp), at the same place of
    ep in all of them. So every pair of replica and place has a load.
    """
    from scipy.sparse import kron, vstack

    experts = len(load.order)
    ep = load.grid.ep
    # Loads are relative to the mean place of the fullest replica: the solver wants them near 1.
    scale = load.weight.sum(1).max() / ep or 1.0
    rows = vstack([kron(of_replica[None], np.eye(ep)) for of_replica in load.weight / scale])
    room = np.full(ep, experts // ep)
    crossing = load.crossing / max(load.crossing.sum(), 1.0)
    if most is None:
        return assign_by_program(np.zeros((experts, ep)), room, loads=rows)
    return assign_by_program(crossing.reshape(experts, ep), room, loads=rows, largest=most / scale)


def assign_by_program(
    cost: np.ndarray,
    room: np.ndarray,
    *,
    loads: Any = None,
    largest: float = np.inf,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Return the place of each item, (things,) int64, with the least total cost. If all costs are
    0, minimise the largest load.

    Args:
        cost: (things, places).
        room: (places,) number of items that each place takes.
        loads: (loads, things * places) sparse: what an item at a place adds to each load; None for
            no loads.
        largest: upper bound of every load.
        allowed: (things, places) bool; None allows every place.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, csr_array, hstack, kron, vstack

    # Variables: whether a thing is at a place (0 or 1), thing by thing, and last the largest load.
    things, places = cost.shape
    everywhere = np.ones(things * places)
    objective = np.append(cost.reshape(-1).astype(np.float64), float(not cost.any()))
    at_most = everywhere if allowed is None else allowed.reshape(-1).astype(float)

    # Rows: a thing has one place; a place is full; a load less the largest one is at most 0.
    places_of_thing = kron(np.eye(things), np.ones((1, places)))
    things_of_place = kron(np.ones((1, things)), np.eye(places))
    constraints = [places_of_thing, things_of_place]
    matrix = vstack(constraints if loads is None else [*constraints, loads])
    num_loads = matrix.shape[0] - things - places
    not_loads = np.zeros(things + places)
    are_loads = np.full(num_loads, -1.0)
    largest_column = coo_array(np.concatenate([not_loads, are_loads])[:, None])
    sums = np.concatenate([np.ones(things), room])
    solution = milp(
        objective,
        constraints=LinearConstraint(
            csr_array(hstack([matrix, largest_column])),
            np.append(sums, np.full(num_loads, -np.inf)),
            np.append(sums, np.zeros(num_loads)),
        ),
        integrality=np.append(everywhere, 0),
        bounds=Bounds(0, np.append(at_most, largest)),
        options={"mip_rel_gap": 0.0},
    )
    assert solution.x is not None, (
        f"no placement of {things} things on {places} places: {solution.message}"
    )
    return solution.x[:-1].reshape(things, places).argmax(1)


def best_samples(load: SampleLoad, intra: float, inter: float) -> Homes:
    """Return a placement with the least modelled time; rates are those of `SampleLoad.seconds`."""
    from scipy.sparse import csr_array

    # Seconds that each sample adds at each rank, to its link inside the node and to that across.
    inside, across = load.rows
    inside_seconds = inside.astype(np.float64) * intra
    across_seconds = across.astype(np.float64) * inter
    tables = [inside_seconds, across_seconds]
    samples, ranks = inside.shape

    # A sample may only move among the ranks of its replica.
    allowed = np.zeros((samples, ranks), dtype=bool)
    for group in load.replicas:
        allowed[np.ix_(np.isin(load.homes.rank, group), group)] = True

    # The modelled time is the larger of two sums over all samples, one for each kind of link. With
    # costs of 0 the program minimises the larger of them.
    scale = max(float(table.sum(0).max()) for table in tables) or 1.0
    times = csr_array(np.stack([table.reshape(-1) / scale for table in tables]))
    room = np.full(ranks, load.homes.slots)
    costs = np.zeros((samples, ranks))
    rank_of = assign_by_program(costs, room, loads=times, allowed=allowed)
    return Homes.of_ranks(rank_of, ranks)
