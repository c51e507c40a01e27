"""The best placements of experts and of samples there are, by mixed-integer programming: what policies are measured against.

Solved by HiGHS through scipy; exponential in the worst case, so for small cases only.
"""

from __future__ import annotations

from typing import Any

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
    from scipy.sparse import kron, vstack

    experts, ep = len(load.order), load.grid.ep
    scale = load.weight.sum(1).max() / ep or 1.0
    rows = vstack([kron(of_copy[None], np.eye(ep)) for of_copy in load.weight / scale])
    room, crossing = np.full(ep, experts // ep), load.crossing / max(load.crossing.sum(), 1.0)
    if most is None:
        return _assigned(np.zeros((experts, ep)), room, loads=rows)
    return _assigned(crossing.reshape(experts, ep), room, loads=rows, largest=most / scale)


def _assigned(
    cost: np.ndarray, room: np.ndarray, *, loads: Any = None, largest: float = np.inf, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Return the place of each thing, (things,) int64, at the least summed cost; if nothing costs, with the least largest load.

    Args:
        cost: (things, places).
        room: (places,) things that each place takes.
        loads: (loads, things * places) sparse: what a thing at a place adds to each load; None for no loads.
        largest: that a load may be.
        allowed: (things, places) bool; None for everywhere.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, csr_array, hstack, kron, vstack

    things, places = cost.shape
    once, full = kron(np.eye(things), np.ones((1, places))), kron(np.ones((1, things)), np.eye(places))
    matrix = vstack([once, full] if loads is None else [once, full, loads])
    more = matrix.shape[0] - things - places
    above = coo_array(np.concatenate([np.zeros(things + places), np.full(more, -1.0)])[:, None])
    fixed, everywhere = np.concatenate([np.ones(things), room]), np.ones(things * places)
    found = milp(
        np.append(cost.reshape(-1).astype(np.float64), float(not cost.any())),
        constraints=LinearConstraint(
            csr_array(hstack([matrix, above])), np.append(fixed, np.full(more, -np.inf)), np.append(fixed, np.zeros(more))
        ),
        integrality=np.append(everywhere, 0),
        bounds=Bounds(0, np.append(everywhere if allowed is None else allowed.reshape(-1).astype(float), largest)),
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    assert found.x is not None, f"no placement of {things} things on {places} places: {found.message}"
    return found.x[:-1].reshape(things, places).argmax(1)


def assign_by_program(cost: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Return the place of each sample at the least summed cost, as `moesaic.balance.samples.assign` does."""
    return _assigned(cost, room)


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
    from scipy.sparse import csr_array

    scale = max(float(table.sum(0).max()) for table in tables) or 1.0
    times = csr_array(np.stack([table.reshape(-1) / scale for table in tables]))
    room = np.full(ranks, load.homes.slots)
    return Homes.of_ranks(_assigned(np.zeros((samples, ranks)), room, loads=times, allowed=allowed), ranks)
