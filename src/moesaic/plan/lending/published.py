"""Shadowing as published: FasterMoE (He et al., PPoPP 2022), Algorithm 1 with equation 8. Kept to be compared with.

Its cost forgets the tokens that still travel, and it stops at the first expert that does not help, so it may lend what
makes a layer slower, and nothing where two experts are equally hot. Loads are summed over origins, as the paper says; a
released implementation summed over experts and never lent anything.
"""

from __future__ import annotations

import numpy as np

from moesaic.plan.lending.cost import Board, LendingCosts, boards
from moesaic.plan.lending.lender import AbstractLender, Load


class Published(AbstractLender):
    """Lends experts to all places, hottest first, while equation 8 falls.

    Args:
        costs: rates; None for those of `cost.Machine`.
    """

    def __init__(self, costs: LendingCosts | None = None) -> None:
        self.costs: LendingCosts = costs or LendingCosts()

    def decide(self, load: Load) -> np.ndarray:
        """Return the lent copies."""
        return np.sum([board.spread(self._lent(board)) for board in boards(load, self.costs)], axis=0)

    def _lent(self, board: Board) -> np.ndarray:
        load, ep = board.load, len(board.origins)
        slowest = board.seconds_per_byte.max()
        loads = np.bincount(load.home, weights=board.copies.sum(0), minlength=ep)
        best = loads.max() * (board.seconds_per_copy + board.passes * board.row_bytes * slowest)
        lent = np.zeros((ep, load.num_experts, ep), dtype=np.int64)
        places = np.arange(ep)
        for number, expert in enumerate(np.argsort(-board.copies.sum(0), kind="stable"), start=1):
            loads[load.home[expert]] -= board.copies[:, expert].sum()
            loads += board.copies[:, expert]
            seconds = loads.max() * board.seconds_per_copy + board.passes * number * board.weight_bytes * slowest
            if seconds >= best:
                break
            best = seconds
            away = places[places != load.home[expert]]
            lent[away, expert, away] = board.copies[away, expert]
        return lent
