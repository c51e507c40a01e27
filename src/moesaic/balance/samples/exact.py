"""The best placement there is, by mixed-integer programming: what the two stages are measured against on small cases.

NetMoE's own objective (section 3, equation 1): the slower of the links within nodes and those between, not one after the
other. Solved by HiGHS through scipy; exponential in the worst case, so for tests and reports only.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.samples.homes import Homes
from moesaic.balance.samples.load import SampleLoad
from moesaic.balance.samples.placer import AbstractPlacer


def seconds(load: SampleLoad, homes: Homes, intra: float, inter: float) -> float:
    """Return the modelled time of a placement: the slower kind of link.

    Args:
        load: the call.
        homes: the placement.
        intra: seconds per row within a node, over all of them.
        inter: seconds per row between nodes.
    """
    rows = load.volume(homes)
    return max(rows.intra * intra, rows.inter * inter)


def gap(load: SampleLoad, placer: AbstractPlacer, intra: float, inter: float) -> float:
    """Return by which share a policy's placement takes longer than the best one; 0 is optimal. Rates as for `seconds`."""
    best = seconds(load, exact(load, intra, inter), intra, inter)
    found = seconds(load, placer.decide(load), intra, inter)
    return found / best - 1 if best else float(found > 0)


def exact(load: SampleLoad, intra: float, inter: float) -> Homes:
    """Return a placement of the least modelled time. Rates as for `seconds`."""
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
