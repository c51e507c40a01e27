"""The best placement of experts there is, by mixed-integer programming: what swaps are measured against on small cases.

Solved by HiGHS through scipy; exponential in the worst case, so for tests and reports only.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.experts import Balanced, ExpertLoad

ROUNDING = 1e-6
"""Relative: by so much the second solve may pass the first one's busiest place. HiGHS holds constraints to about as much, and
finds none of its own solutions feasible under less."""


def gap(load: ExpertLoad, place: np.ndarray | None = None) -> float:
    """Return by which share the busiest place of a placement has more rows than the least possible; 0 is optimal.

    Args:
        load: of a layer.
        place: (num_experts,) the place of each expert; None for what `Balanced` finds where moving costs nothing.
    """
    best = load.busiest(exact(load))
    found = load.busiest(Balanced().best(load) if place is None else place)
    return found / best - 1 if best else float(found > 0)


def exact(load: ExpertLoad) -> np.ndarray:
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
