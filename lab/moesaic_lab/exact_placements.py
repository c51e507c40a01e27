"""The best placements of experts and of samples there are, by mixed-integer programming: what policies are measured against.

Solved by HiGHS through scipy; exponential in the worst case, so for small cases only.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.experts import Balanced, ExpertLoad
from moesaic.balance.samples import AbstractPlacer, Homes, SampleLoad

ROUNDING = 1e-6
"""Relative: by so much the second solve may pass the first one's busiest place. HiGHS holds constraints to about as much, and
finds none of its own solutions feasible under less."""


def expert_gap(load: ExpertLoad, place: np.ndarray | None = None) -> float:
    """Return by which share the busiest place of a placement has more rows than the least possible; 0 is optimal.

    Args:
        load: of a layer.
        place: (num_experts,) the place of each expert; None for what `Balanced` finds where moving costs nothing.
    """
    best = load.busiest(best_experts(load))
    found = load.busiest(Balanced().best(load) if place is None else place)
    return found / best - 1 if best else float(found > 0)


def best_experts(load: ExpertLoad) -> np.ndarray:
    """Return the place of each expert, (num_experts,) int64: the least busiest place, then the fewest rows between nodes."""
    best = _solve(load, None)
    return _solve(load, load.busiest(best) * (1 + ROUNDING))


def _solve(load: ExpertLoad, most: float | None) -> np.ndarray:
    """Solve for the least busiest place; with `most` rows there, for the fewest rows between nodes."""
    experts, ep = len(load.order), load.grid.ep
    scale = load.weight.sum(1).max() / ep or 1.0
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, csr_array, hstack, kron, vstack

    each_once = kron(np.eye(experts), np.ones((1, ep)))
    each_full = kron(np.ones((1, experts)), np.eye(ep))
    rows = vstack([kron(of_copy[None], np.eye(ep)) for of_copy in load.weight / scale])
    limit = np.zeros((experts + ep + rows.shape[0], 1))
    limit[experts + ep :] = -1
    matrix = csr_array(hstack([vstack([each_once, each_full, rows]), coo_array(limit)]))
    counts = np.concatenate([np.ones(experts), np.full(ep, experts // ep)])
    cost = np.zeros(experts * ep + 1) if most is not None else np.append(np.zeros(experts * ep), 1.0)
    if most is not None:
        cost[:-1] = load.crossing.reshape(-1) / max(load.crossing.sum(), 1.0)
    found = milp(
        cost,
        constraints=LinearConstraint(
            matrix,
            np.append(counts, np.full(rows.shape[0], -np.inf)),
            np.append(counts, np.zeros(rows.shape[0])),
        ),
        integrality=np.append(np.ones(experts * ep), 0),
        bounds=Bounds(0, np.append(np.ones(experts * ep), np.inf if most is None else most / scale)),
        options={"mip_rel_gap": 0.0},
    )
    assert found.x is not None, f"no placement of {experts} experts on {ep} places: {found.message}"
    return found.x[:-1].reshape(experts, ep).argmax(1)


def assign_by_program(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the place of each sample at the least summed cost, as `moesaic.balance.samples.assign` does."""
    samples, places = cost.shape
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, kron, vstack

    once, full = kron(np.eye(samples), np.ones((1, places))), kron(np.ones((1, samples)), np.eye(places))
    wanted = np.concatenate([np.ones(samples), room])
    found = milp(
        cost.reshape(-1).astype(np.float64),
        constraints=LinearConstraint(csr_array(vstack([once, full])), wanted, wanted),
        integrality=np.ones(samples * places),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert found.x is not None, f"no assignment of {samples} samples to {places} places: {found.message}"
    return found.x.reshape(samples, places).argmax(1)


def sample_gap(load: SampleLoad, placer: AbstractPlacer, intra: float, inter: float) -> float:
    """Return by which share a policy's placement takes longer than the best one; rates as for `SampleLoad.seconds`."""
    best = load.seconds(best_samples(load, intra, inter), intra, inter)
    found = load.seconds(placer.decide(load), intra, inter)
    return found / best - 1 if best else float(found > 0)


def best_samples(load: SampleLoad, intra: float, inter: float) -> Homes:
    """Return a placement of the least modelled time. Rates as for `SampleLoad.seconds`."""
    tables = [table.astype(np.float64) * rate for table, rate in zip(load.rows, (intra, inter))]
    samples, ranks = tables[0].shape
    allowed = np.zeros((samples, ranks), dtype=bool)
    for group in load.replicas:
        allowed[np.ix_(np.isin(load.homes.rank, group), group)] = True
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, csr_array, hstack, vstack

    each_once = coo_array(
        (np.ones(samples * ranks), (np.repeat(np.arange(samples), ranks), np.arange(samples * ranks)))
    )
    each_full = coo_array((np.ones(samples * ranks), (np.tile(np.arange(ranks), samples), np.arange(samples * ranks))))
    scale = max(float(table.sum(0).max()) for table in tables) or 1.0
    times = csr_array(np.stack([table.reshape(-1) / scale for table in tables]))
    longest = csr_array(np.array([[0.0]] * (samples + ranks) + [[-1.0]] * 2))
    matrix = hstack([vstack([each_once, each_full, times]), longest]).tocsr()
    low = np.concatenate([np.ones(samples), np.full(ranks, load.homes.slots), np.full(2, -np.inf)])
    high = np.concatenate([np.ones(samples), np.full(ranks, load.homes.slots), np.zeros(2)])
    found = milp(
        np.append(np.zeros(samples * ranks), 1.0),
        constraints=LinearConstraint(matrix, low, high),
        integrality=np.append(np.ones(samples * ranks), 0),
        bounds=Bounds(0, np.append(allowed.reshape(-1).astype(float), np.inf)),
        options={"mip_rel_gap": 0.0},
    )
    assert found.x is not None, f"no placement of {samples} samples on {ranks} ranks: {found.message}"
    return Homes.of_ranks(found.x[:-1].reshape(samples, ranks).argmax(1), ranks)
