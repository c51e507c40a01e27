"""Shadowing, ours: hot experts' weights go to those places whose copies make it worth it.

FasterMoE (He et al., PPoPP 2022), section 4.1, with three changes: the cost counts the tokens that still travel; the best
prefix is taken instead of stopping at the first step that does not help, which two equally hot experts would block; and an
expert may be lent to some places only.
"""

from __future__ import annotations

import numpy as np

from moesaic.plan.lending.cost import Board, LendingCosts, boards
from moesaic.plan.lending.lender import AbstractLender, Load


class Shadow(AbstractLender):
    """Every place computes its own copies of experts that are lent to it.

    Args:
        costs: rates; None for those of `cost.Machine`.
        whole: lend an expert to all places or to none, as the paper does.
        at_most: experts that one place may be lent at once; they need memory for weights and gradients.
        tries: longest prefix that is looked at.
    """

    def __init__(
        self, costs: LendingCosts | None = None, *, whole: bool = False, at_most: int = 8, tries: int = 256
    ) -> None:
        self.costs = costs or LendingCosts()
        self.whole, self.at_most, self.tries = whole, at_most, tries

    def decide(self, load: Load) -> np.ndarray:
        """Return the lent copies of the best prefix."""
        return np.sum([board.spread(self._best(board)) for board in boards(load, self.costs)], axis=0)

    def _best(self, board: Board) -> np.ndarray:
        """Return the best prefix of lendings in descending order of the copies that stop travelling."""
        load, ep = board.load, len(board.origins)
        experts = np.arange(load.num_experts)
        rows = np.zeros((ep, ep), dtype=np.int64)
        np.add.at(rows.T, load.home, board.copies.T)
        helped = np.zeros((load.num_experts, ep), dtype=bool)
        held = np.zeros(ep, dtype=np.int64)
        best, best_seconds, taken = 0, board.seconds_of(rows, board.sent(helped)), []
        for expert, places in self._candidates(board):
            wanted = [p for p in places if held[p] < self.at_most and board.copies[p, expert]]
            home = load.home[expert]
            for place in wanted:
                rows[place, home] -= board.copies[place, expert]
                rows[place, place] += board.copies[place, expert]
                helped[expert, place] = True
                held[place] += 1
            taken.append((expert, wanted))
            seconds = board.seconds_of(rows, board.sent(helped))
            if seconds < best_seconds:
                best, best_seconds = len(taken), seconds
        lent = np.zeros((ep, len(experts), ep), dtype=np.int64)
        for expert, wanted in taken[:best]:
            lent[wanted, expert, wanted] = board.copies[wanted, expert]
        return lent

    def _candidates(self, board: Board) -> list[tuple[int, list[int]]]:
        """Return (expert, places other than its home) in the order in which to try them."""
        home, places = board.load.home, np.arange(len(board.origins))
        away = np.where(places[:, None] == home[None, :], 0, board.copies)
        if self.whole:
            order = np.argsort(-board.copies.sum(0), kind="stable")[: self.tries]
            return [(int(e), [int(p) for p in places if p != home[e]]) for e in order]
        flat = np.argsort(-away.reshape(-1), kind="stable")[: self.tries]
        flat = flat[away.reshape(-1)[flat] > 0]
        return [(int(i % away.shape[1]), [int(i // away.shape[1])]) for i in flat]
