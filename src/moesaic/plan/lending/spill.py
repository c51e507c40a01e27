"""Spilling: what overloads a place goes to places with room, with the weights sent after it.

As least-loaded expert parallelism does, from whatever origin; copies whose origin is the helper itself go first, since they
need not travel.
"""

from __future__ import annotations

import numpy as np

from moesaic.errors import InputError
from moesaic.plan.lending.cost import Board, LendingCosts, boards
from moesaic.plan.lending.lender import AbstractLender, Load

LIMITS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Copies per place, over the mean, that are tried as what a place may compute."""
HELD = 4
"""Times the memory of its weights that an expert takes at a helper: weights, gradient, and the messages that carry both."""
AT_HOME = 5
"""The same at a home that lends any of its experts, besides a message for each helper: packed, its own gradient, their sum."""
MOST_HELPED = 8
"""Experts that one place is lent at most: it holds their weights until the backward pass, and their gradients in it."""


class LeastLoaded(AbstractLender):
    """Lets no place compute more than a limit, wherever there is room, whatever it costs: for bounded memory.

    Args:
        limit: copies per place over the mean; at least 1.
        budget: copies that one rank may compute, instead of `limit`; a load above all budgets together is spread evenly.
    """

    def __init__(self, limit: float = 1.0, *, budget: int | None = None) -> None:
        if limit < 1:
            raise InputError(f"lending limit={limit}: the mean must fit: choose 1 or more")
        if budget is not None and budget < 1:
            raise InputError(f"lending budget={budget}: choose at least one token copy per rank")
        self.limit, self.budget = limit, budget

    def decide(self, load: Load) -> np.ndarray:
        """Return the lent copies."""
        found = []
        for board in boards(load, LendingCosts()):
            mean = -(-int(board.copies.sum()) // len(board.origins))
            most = int(np.ceil(mean * self.limit)) if self.budget is None else max(self.budget, mean)
            found.append(board.spread(overflow(board, most)))
        return np.sum(found, axis=0)


class Spill(AbstractLender):
    """Spills down to the limit that is fastest by the cost model; to none, if nothing helps.

    Args:
        costs: rates; None for those of `cost.Machine`.
    """

    def __init__(self, costs: LendingCosts | None = None) -> None:
        self.costs = costs or LendingCosts()

    def decide(self, load: Load) -> np.ndarray:
        """Return the lent copies."""
        found = []
        for board in boards(load, self.costs):
            mean = board.copies.sum() / len(board.origins)
            none = np.zeros((len(board.origins), load.num_experts, len(board.origins)), dtype=np.int64)
            tried = [none, *(overflow(board, int(np.ceil(mean * limit))) for limit in LIMITS)]
            found.append(board.spread(min(tried, key=board.seconds)))
        return np.sum(found, axis=0)


def within_budget(load: Load, lent: np.ndarray, budget: int) -> np.ndarray:
    """Return a table of lent copies with what is more than a budget lent on, where a place has room for it.

    Weights that are lent take room too: see `rows_for_weights`. Where all places together have too little room, they are
    filled evenly.

    Args:
        load: of the call.
        lent: (world, num_experts, ep) int64, what a policy wants.
        budget: copies that one rank may compute.
    """
    found = []
    for board in boards(load, LendingCosts()):
        given = lent[board.origins].sum(1)
        mean = -(-int(board.copies.sum()) // len(board.origins))
        found.append(board.spread(overflow(board, max(budget, mean), given, rows_for_weights(load))))
    total: np.ndarray = np.sum(found, axis=0)
    return total


def rows_for_weights(load: Load) -> int:
    """Return how many rows need the memory of the weights of one shard of an expert.

    A row counts as what the experts keep of it: input, output, and the hidden units of each matrix.
    """
    matrices = LendingCosts().matrices
    return -(-load.units * load.dim * matrices // (2 * load.dim + matrices * load.units))


def weights_held(load: Load, lent: np.ndarray) -> int:
    """Return the rows that lent weights take the room of, at the rank where that is most.

    A helper holds an expert's weights, and in the backward pass their gradient and the message that carries it; a home that
    lends holds packed weights and the sum of gradients; a rank that passes on what comes to its node holds both of it; and
    each of them a message for everyone whom it sends to.

    Args:
        load: of the call.
        lent: (world, num_experts, ep) int64.
    """
    most = 0
    for board in boards(load, LendingCosts()):
        helped = lent[board.origins].sum((0, 1)) > 0
        lends = np.bincount(load.home, weights=helped.any(1), minlength=load.grid.ep) > 0
        sent = board.sent(helped)
        passed_on = np.where(lends, 0, sent.sum(1))
        held = HELD * helped.sum(0) + sent.sum(1) + AT_HOME * (lends + passed_on)
        most = max(most, int(held.max()))
    return most * rows_for_weights(load)


def overflow(board: Board, most: int, given: np.ndarray | None = None, per_expert: int = 0) -> np.ndarray:
    """Return what is lent, (ep, num_experts, ep), so that no place computes more than `most` copies, if that can be.

    The fullest place gives first, of its largest expert, to the emptiest place that may be lent it.

    Args:
        board: the load.
        most: copies of one place.
        given: (ep, num_experts, ep) int64, what is lent already; None for nothing.
        per_expert: copies for which the weights of an expert count, or their gradient, where they are held.
    """
    ep, home = len(board.origins), board.load.home
    lent = np.zeros((ep, board.load.num_experts, ep), dtype=np.int64) if given is None else given.copy()
    staying, helped = board.copies - lent.sum(2), lent.sum(0) > 0
    loads = np.bincount(home, weights=staying.sum(0) + per_expert * helped.sum(1), minlength=ep).astype(np.int64)
    loads += lent.sum((0, 1)) + per_expert * HELD * helped.sum(0)
    loads += per_expert * AT_HOME * (np.bincount(home, weights=helped.sum(1), minlength=ep) > 0)
    for giver in np.argsort(-loads, kind="stable"):
        experts = np.flatnonzero(home == giver)
        while loads[giver] > most:
            expert = experts[np.argmax(staying[:, experts].sum(0))]
            then = loads + per_expert * HELD * ~helped[expert]
            may_help = (helped[expert] | (helped.sum(0) < MOST_HELPED)) & (home[expert] != np.arange(ep))
            helper = int(np.argmin(np.where(may_help, then, np.iinfo(np.int64).max)))
            new = 0 if helped[expert, helper] else per_expert * (1 if helped[experts].any() else 1 + AT_HOME)
            amount = int(min(most - then[helper], loads[giver] + new - most, staying[:, expert].sum()))
            if not may_help[helper] or amount <= new:
                break
            _give(staying[:, expert], lent[:, expert, helper], helper, amount)
            helped[expert, helper] = True
            loads[giver] += new - amount
            loads[helper] = then[helper] + amount
    return lent


def _give(staying: np.ndarray, lent: np.ndarray, helper: int, amount: int) -> None:
    """Lend so many copies, those of the helper's own tokens first, then of the places that have most."""
    others = [int(place) for place in np.argsort(-staying, kind="stable") if place != helper]
    for place in (helper, *others):
        moved = min(amount, int(staying[place]))
        staying[place] -= moved
        lent[place] += moved
        amount -= moved
