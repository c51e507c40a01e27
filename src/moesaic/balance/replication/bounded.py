"""Replication within a budget of rows: what replicated weights leave of it, tables that fit, and what they cost beside slices.

A rank's memory has two peaks. While gradients of its experts are computed it holds each row three times (input, gradient of
the result, gradient of the input) with their hidden numbers, and of a replicated expert weights and gradient. While weights or
their gradients travel it holds at most two thirds of that per row, but messages for every helper, what it passes on,
and at a home that replicates the packed weights and the sum of what comes back. A budget has to cover both, not their sum.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicaLoad, ReplicationCosts, replica_loads
from moesaic.balance.replication.spill import Giving
from moesaic.balance.replication.tables import Replications, full_table

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


def rows_for_weights(load: CallLoad) -> int:
    """Return how many rows need the memory of the weights of one shard of an expert.

    A row counts as what is held of it at the peak: input, both gradients, and the hidden units of each matrix.
    """
    matrices = ReplicationCosts().matrices
    return -(-load.units * load.dim * matrices // (3 * load.dim + matrices * load.units))


def limits(replica: ReplicaLoad, helped: np.ndarray, budget: int) -> np.ndarray:
    """Return the rows that each place may compute beside replicated weights, (ep,) int64; none or fewer where these
    fill the budget.

    Args:
        replica: the load of one replica.
        helped: (num_experts, ep) bool: which places are replicated an expert.
        budget: rows at one rank's experts.
    """
    home, ep, size = replica.load.home, len(replica.origins), rows_for_weights(replica.load)
    replicates = np.bincount(home, weights=helped.any(1), minlength=ep) > 0
    messages = replica.sent(helped)
    travelling = HELD * messages.sum(0) + messages.sum(1) + AT_HOME * replicates * (len(home) // ep)
    found: np.ndarray = np.minimum(budget - size * HELD * helped.sum(0), (budget - size * travelling) * 3 // 2)
    return np.minimum(found, budget)


def within_budget(load: CallLoad, replicated: np.ndarray, budget: int, slices: int = 1) -> np.ndarray | None:
    """Return a table of replicated copies with which a call fits a budget in so many slices; None where none is found.

    What a place has too much of is replicated on, of its largest expert, to the place that has most room: few experts
    move much.

    Args:
        load: of the call.
        replicated: (world, num_experts, ep) int64, what a policy wants.
        budget: copies that one rank may compute at once, with the weights that it holds.
        slices: parts that the call may be run in, one after the other.
    """
    found, tables = replica_loads(load, ReplicationCosts()), []
    for replica in found:
        table = _fitted(replica, replicated[replica.origins].sum(1), budget, slices)
        if table is None:
            return None
        tables.append(Replications.of(table))
    return full_table(found, tables)


def _fitted(replica: ReplicaLoad, given: np.ndarray, budget: int, slices: int) -> np.ndarray | None:
    """Return what is replicated, (ep, num_experts, ep), so that each place has room for it; None where that is not found."""
    giving, weights = Giving(replica, given), slices * HELD * rows_for_weights(replica.load)
    for _ in range(giving.helped.size):
        room = slices * limits(replica, giving.helped, budget) - giving.loads
        giver = int(room.argmin())
        if room[giver] >= 0:
            return giving.replicated
        if not giving.give(giver, room, weights):
            return None
    return None


def fitting_tables(load: CallLoad, replicated: np.ndarray, budget: int, most: int) -> list[np.ndarray]:
    """Return tables with which a call fits a budget in as few slices as tables are found for.

    Args:
        load: of the call.
        replicated: what a policy wants, as for `within_budget`; added to, or put aside.
        budget: as for `within_budget`.
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


def seconds(load: CallLoad, costs: ReplicationCosts, replicated: np.ndarray, slices: int, repeated: float) -> float:
    """Return the modelled time of a call in slices: weights travel for each, and what is not kept is dispatched and computed
    again.

    Args:
        load: of the call.
        costs: rates.
        replicated: (world, num_experts, ep) int64.
        slices: parts of the call; 1 for a whole one.
        repeated: share of the busiest rank's rows in slices that are not kept.
    """
    worst = 0.0
    for replica in replica_loads(load, costs):
        of_places = replicated[replica.origins].sum(1)
        computed = of_places.copy()
        computed[:, np.arange(load.num_experts), load.home] += replica.copies - of_places.sum(2)
        rows = computed.sum(1)
        again = replica.busiest(rows.sum(0)) * replica.seconds_per_copy / 3 + replica.row_bytes * replica.fullest(
            rows, 0
        )
        starts = (slices - 1) * (replica.passes + 1) * (len(rows) - 1) * costs.machine.inter_latency_us * 1e-6
        fetched = replica.sent(of_places.sum(0) > 0) * slices
        worst = max(worst, replica.seconds_of(rows, fetched) + repeated * again + starts)
    return worst
