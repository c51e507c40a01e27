"""Placing samples by the slower kind of link, ours: NetMoE's objective without its two stages.

Two stages always prefer links within nodes. Where these are no faster (shared memory on a CPU, a node with many ranks and
many network cards) that may cost more than it saves. Here rows of both kinds are weighed in one assignment of samples to
ranks. The slower of two times is the largest of their weighted means, so a few weights are tried (Lagrange multipliers of
the two constraints) and the best placement by the model is taken, the two stages' and nobody's move among them.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.samples.assign import assign
from moesaic.balance.samples.exact import seconds
from moesaic.balance.samples.homes import Homes
from moesaic.balance.samples.load import SampleLoad
from moesaic.balance.samples.placer import LEAST_GAIN, REST, AbstractPlacer, check
from moesaic.balance.samples.two_stage import TwoStage
from moesaic.cost.alpha_beta import Machine

WEIGHTS = (0.0, 0.15, 0.3, 0.5, 0.7, 0.85, 1.0)
"""Of the links within nodes, that are tried."""
_UNITS = 2**20
"""Costs are whole numbers, so that every rank adds up the same: of this many parts of the largest one."""


class Weighed(AbstractPlacer):
    """The placement whose slower kind of link is done first, by the model.

    Args:
        machine: rates of one rank's links; None for those of `cost.Machine`.
        least_gain: share of the modelled time that a move must save, else nobody moves; from 0 to below 1.
        rest: as of `TwoStage`.

    Raises:
        InputError: for what is no share.
    """

    def __init__(self, machine: Machine | None = None, *, least_gain: float = LEAST_GAIN, rest: int = REST) -> None:
        check(least_gain, rest)
        self.least_gain, self.rest = least_gain, rest
        machine = machine or Machine()
        self.rates = 1 / machine.intra_gbps, 1 / machine.inter_gbps
        """Of a row within a node and between nodes, up to a common factor."""

    def decide(self, load: SampleLoad) -> Homes:
        """Return the best of what was tried; the fewest moves among equals, as tried last."""
        tried = [load.homes, TwoStage(least_gain=0.0).decide(load), *(self._by(weight, load) for weight in WEIGHTS)]
        timed = [(seconds(load, homes, *self.rates), load.homes.moved(homes)) for homes in tried]
        best = min(range(len(tried)), key=timed.__getitem__)
        gains = timed[best][0] <= (1 - self.least_gain) * timed[0][0]
        return tried[best] if gains else load.homes

    def _by(self, weight: float, load: SampleLoad) -> Homes:
        """Return the best placement for one weight of the links within nodes."""
        intra, inter = load.rows
        cost = weight * self.rates[0] * intra + (1 - weight) * self.rates[1] * inter
        units = np.rint(cost * (_UNITS / (np.abs(cost).max() or 1.0))).astype(np.int64)
        rank = load.homes.rank.copy()
        for ranks in load.replicas:
            samples = np.flatnonzero(np.isin(load.homes.rank, ranks))
            stays = load.homes.rank[samples][:, None] == ranks[None, :]
            weighed = units[np.ix_(samples, ranks)] * (len(samples) + 1) + ~stays
            rank[samples] = ranks[assign(weighed, np.full(len(ranks), load.homes.slots))]
        return Homes.of_ranks(rank, load.grid.world)
