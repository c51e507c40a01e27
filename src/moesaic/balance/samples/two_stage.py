"""Placing samples in two stages, nodes first, then ranks within each node: NetMoE (Liu et al., ICLR 2025), section 4.3.

Stage two leaves what crosses nodes as it is. Ours beside the paper: among equal costs a sample stays where it is (published
figures show as many moves as chance would make), a residual that travels counts, and where the best placement gains less
than a threshold nobody moves.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.samples.assign import assign
from moesaic.balance.samples.homes import Homes
from moesaic.balance.samples.load import SampleLoad
from moesaic.balance.samples.placer import LEAST_GAIN, REST, AbstractPlacer, check


class TwoStage(AbstractPlacer):
    """The least rows between nodes, then the least within each.

    Args:
        least_gain: share of the rows between nodes (within them, where there is one node) that a move must save, else
            nobody moves; from 0 to below 1.
        rest: passes in which it is not asked after some in which nobody moved: to decide costs as much where nobody does.

    Raises:
        InputError: for what is no share.
    """

    def __init__(self, least_gain: float = LEAST_GAIN, *, rest: int = REST) -> None:
        check(least_gain, rest)
        self.least_gain, self.rest = least_gain, rest

    def decide(self, load: SampleLoad) -> Homes:
        """Return the homes of the two assignments, or the present ones if they gain too little."""
        rank = load.homes.rank.copy()
        for ranks in load.replicas:
            samples = np.flatnonzero(np.isin(rank, ranks))
            rank[samples] = _placed(load, samples, ranks)
        found = Homes.of_ranks(rank, load.grid.world)
        before, after = load.volume(load.homes), load.volume(found)
        if (after.inter, after.intra) >= (before.inter, before.intra):
            return load.homes
        saved, of = (
            (before.inter - after.inter, before.inter) if before.inter else (before.intra - after.intra, before.intra)
        )
        return found if saved >= self.least_gain * of else load.homes


def _placed(load: SampleLoad, samples: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the rank of each of a replica's samples, (samples,) int64."""
    intra, inter = (table[np.ix_(samples, ranks)] for table in load.rows)
    now, slots = load.homes.rank[samples], load.homes.slots
    nodes, first = np.unique(load.node[ranks], return_index=True)
    room = np.array([slots * (load.node[ranks] == node).sum() for node in nodes])
    stays = load.node[now][:, None] == nodes[None, :]
    node = nodes[assign(_weighed(inter[:, first], stays), room)]
    found = np.empty(len(samples), dtype=np.int64)
    for each in nodes:
        here, members = np.flatnonzero(node == each), load.node[ranks] == each
        stays = now[here][:, None] == ranks[members][None, :]
        cost = _weighed(intra[np.ix_(here, members)], stays)
        found[here] = ranks[members][assign(cost, np.full(int(members.sum()), slots))]
    return found


def _weighed(rows: np.ndarray, stays: np.ndarray) -> np.ndarray:
    """Return costs in which rows come first, and fewer moves decide between equal ones."""
    weighed: np.ndarray = rows * (len(rows) + 1) + ~stays
    return weighed
