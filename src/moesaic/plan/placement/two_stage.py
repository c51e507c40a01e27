"""Placing samples in two stages, nodes first, then ranks within each node: NetMoE (Liu et al., ICLR 2025), section 4.3.

Stage two leaves what crosses nodes as it is. Ours beside the paper: among equal costs a sample stays where it is (published
figures show as many moves as chance would make), a residual that travels counts, and where the best placement gains less
than a threshold nobody moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from moesaic.errors import InputError
from moesaic.plan.placement.assign import assign
from moesaic.plan.placement.homes import Homes
from moesaic.plan.placement.load import SampleLoad

LEAST_GAIN = 0.1
"""Share of the rows between nodes that moves must promise to save. Samples that hardly differ promise 6 to 9 % by chance, of
which nothing is left once the next layer has routed; those that do (locality 0.2 as `moesaic trace show` has it) promise 15 %
and more (`moesaic_lab/netmoe`, `moesaic_lab/relocate_train.py`)."""


REST = 15
"""Forward passes: with one asked after as many, deciding costs a sixteenth of what it does in every pass."""


def check(least_gain: float, rest: int) -> None:
    """Raise InputError for what is no share, or no number of passes."""
    if not 0 <= least_gain < 1:
        raise InputError(f"placement least_gain={least_gain}: choose a share from 0 to below 1")
    if rest < 0:
        raise InputError(f"placement rest={rest}: choose 0 or more passes")


class AbstractPlacer(ABC):
    """A policy: where samples live after a layer. Every rank calls it with the same load and gets the same answer."""

    rest: int = 0
    """After forward passes in which it moved nobody, so many may go by in which it is not asked, and nothing is told for it;
    0: it is asked in every pass."""

    @abstractmethod
    def decide(self, load: SampleLoad) -> Homes:
        """Return where the samples go; each stays within its copy of the experts.

        Args:
            load: the same on all ranks.
        """


class Stay(AbstractPlacer):
    """Nobody moves."""

    def decide(self, load: SampleLoad) -> Homes:
        """Return the homes as they are."""
        return load.homes


class Given(AbstractPlacer):
    """Goes where it is told, call after call, and then starts over: for tests and replays.

    Args:
        homes: one per call.
    """

    def __init__(self, homes: list[Homes]) -> None:
        self._homes, self._calls = homes, 0

    def decide(self, load: SampleLoad) -> Homes:
        """Return the next homes."""
        found = self._homes[self._calls % len(self._homes)]
        self._calls += 1
        return found


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
