"""Replication within a budget of rows: what replicated weights leave of it, tables that fit, and what they cost beside slices.

A rank's memory has two peaks. While gradients of its experts are computed it holds each row three times (input, gradient of
the result, gradient of the input) with their hidden numbers, and of a replicated expert weights and gradient. While weights or
their gradients travel it holds at most two thirds of that per row, but messages for every helper, what it passes on,
and at a home that replicates the packed weights and the sum of what comes back. A budget has to cover both, not their sum.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import Board, ReplicationCosts, boards
from moesaic.balance.replication.load import Load
from moesaic.balance.replication.spill import MOST_HELPED, give

HELD = 2
"""Times the memory of its weights that a replicated expert takes at a helper, or a rank that passes it on: weights and
gradient, or what came and what goes on."""
AT_HOME = 2
"""The same of every expert of a home that replicates any: packed and gathered in the forward pass, what came back and
the sum with its own gradient in the backward pass."""
EVEN = 1.25
"""Over the mean: the load down to which replication is tried too where the budget allows more."""
MOST_TABLES = 4
"""Numbers of slices for which tables are tried."""


def rows_for_weights(load: Load) -> int:
    """Return how many rows need the memory of the weights of one shard of an expert.

    A row counts as what is held of it at the peak: input, both gradients, and the hidden units of each matrix.
    """
    matrices = ReplicationCosts().matrices
    return -(-load.units * load.dim * matrices // (3 * load.dim + matrices * load.units))


def limits(board: Board, helped: np.ndarray, budget: int) -> np.ndarray:
    """Return the rows that each place may compute beside replicated weights, (ep,) int64; none or fewer where these
    fill the budget.

    Args:
        board: the load.
        helped: (num_experts, ep) bool: which places are replicated an expert.
        budget: rows at one rank's experts.
    """
    home, ep, size = board.load.home, len(board.origins), rows_for_weights(board.load)
    replicates = np.bincount(home, weights=helped.any(1), minlength=ep) > 0
    messages = board.sent(helped)
    travelling = HELD * messages.sum(0) + messages.sum(1) + AT_HOME * replicates * (len(home) // ep)
    found: np.ndarray = np.minimum(budget - size * HELD * helped.sum(0), (budget - size * travelling) * 3 // 2)
    return np.minimum(found, budget)


def limits_of_ranks(load: Load, replicated: np.ndarray, budget: int) -> np.ndarray:
    """Return the rows that each rank may compute beside replicated weights, (world,) int64; see `limits`.

    Args:
        load: of the call.
        replicated: (world, num_experts, ep) int64.
        budget: rows at one rank's experts.
    """
    found = np.zeros(len(load.copies), dtype=np.int64)
    for board in boards(load, ReplicationCosts()):
        of_places = limits(board, replicated[board.origins].sum((0, 1)) > 0, budget)
        found[board.origins] = of_places[:, None]
    return found


def within_budget(load: Load, replicated: np.ndarray, budget: int, slices: int = 1) -> np.ndarray | None:
    """Return a table of replicated copies with which a call fits a budget in so many slices; None where none is found.

    What a place has too much of is replicated on, of its largest expert, to the place that has most room: few experts
    move much.

    Args:
        load: of the call.
        replicated: (world, num_experts, ep) int64, what a policy wants.
        budget: copies that one rank may compute at once, with the weights that it holds.
        slices: parts that the call may be run in, one after the other.
    """
    total = np.zeros_like(replicated)
    for board in boards(load, ReplicationCosts()):
        found = _fitted(board, replicated[board.origins].sum(1), budget, slices)
        if found is None:
            return None
        total += board.spread(found)
    return total


def _fitted(board: Board, given: np.ndarray, budget: int, slices: int) -> np.ndarray | None:
    """Return what is replicated, (ep, num_experts, ep), so that each place has room for it; None where that is not found."""
    home, places = board.load.home, np.arange(len(board.origins))
    replicated, weights = given.copy(), slices * HELD * rows_for_weights(board.load)
    staying, helped = board.copies - replicated.sum(2), replicated.sum(0) > 0
    for _ in range(helped.size):
        at_home = np.bincount(home, weights=staying.sum(0), minlength=len(places)).astype(np.int64)
        room = slices * limits(board, helped, budget) - at_home - replicated.sum((0, 1))
        giver = int(room.argmin())
        if room[giver] >= 0:
            return replicated
        own = np.flatnonzero(home == giver)
        expert = int(own[staying[:, own].sum(0).argmax()])
        left = room - np.where(helped[expert], 0, weights)
        may_help = (helped[expert] | (helped.sum(0) < MOST_HELPED)) & (places != giver)
        helper = int(np.where(may_help, left, np.iinfo(np.int64).min).argmax())
        new = 0 if helped[expert, helper] else weights
        amount = int(min(left[helper], new - room[giver], staying[:, expert].sum()))
        if not may_help[helper] or amount <= 0:
            return None
        give(staying[:, expert], replicated[:, expert, helper], helper, amount)
        helped[expert, helper] = True
    return None


def fitting_tables(load: Load, replicated: np.ndarray, budget: int, most: int) -> list[np.ndarray]:
    """Return tables with which a call fits a budget in as few slices as tables are found for.

    Args:
        load: of the call.
        replicated: (world, num_experts, ep) int64, what a policy wants; added to, or put aside.
        budget: copies that one rank may compute at once, with the weights that it holds.
        most: slices, at most.
    """
    none, mean = np.zeros_like(replicated), load.copies.sum() / len(load.copies)
    even = min(budget, int(np.ceil(mean * EVEN)))  # under a loose budget it pays to replicate more than must be
    wanted = [(replicated, budget)] if replicated.any() else []
    wanted += [(none, budget), *([(none, even)] if even < budget else [])]
    for slices in range(1, min(most, MOST_TABLES) + 1):
        found = [within_budget(load, table, limit, slices) for table, limit in wanted]
        tables = [table for table in found if table is not None]
        if tables:
            return tables
    return []


def seconds(load: Load, costs: ReplicationCosts, replicated: np.ndarray, slices: int) -> float:
    """Return the modelled time of a call in slices: weights travel for each, all but one are dispatched and computed again.

    Args:
        load: of the call.
        costs: rates.
        replicated: (world, num_experts, ep) int64.
        slices: parts of the call; 1 for a whole one.
    """
    worst = 0.0
    for board in boards(load, costs):
        of_places = replicated[board.origins].sum(1)
        computed = of_places.copy()
        computed[:, np.arange(load.num_experts), load.home] += board.copies - of_places.sum(2)
        rows, repeated = computed.sum(1), (slices - 1) / slices
        again = rows.sum(0).max() * board.seconds_per_copy / 3 + board.row_bytes * board.fullest(rows, 0)
        starts = (slices - 1) * (board.passes + 1) * (len(rows) - 1) * costs.machine.inter_latency_us * 1e-6
        fetched = board.sent(of_places.sum(0) > 0) * slices
        worst = max(worst, board.seconds_of(rows, fetched) + repeated * again + starts)
    return worst
