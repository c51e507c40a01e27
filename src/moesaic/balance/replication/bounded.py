"""Replication within a memory budget, counted in rows: the room that weights leave, tables that
fit, and their cost.

A rank's memory has two peaks, and a budget must cover the larger one.

    While the gradients of experts are computed, a rank holds each row three times (input, gradient
    of the result, gradient of the input), the row's hidden activations, and the weights and
    gradient of each replicated expert.
    While weights or their gradients travel, a rank holds at most two thirds of that per row. In
    addition it holds the messages for every helper and those that it relays. A home that replicates
    also holds the packed weights and the summed gradients.

A *budget* here is a number of rows at the experts of one rank. Places, homes, helpers and replicas
are those of `replication/cost.py`; a call in *slices* runs in parts, one after the other.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicaLoad, replica_loads
from moesaic.balance.replication.spill import Giving
from moesaic.balance.replication.tables import rows_of, spread, within
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications

HELD = 2
"""Memory of a replicated expert at a helper or relay, relative to the expert's weights: weights and
gradient, or the message received and the message sent."""
AT_HOME = 2
"""Memory of every expert of a home that replicates any, relative to the expert's weights: packed
and gathered weights in the forward pass; received gradients and their sum with the home's own
gradient in the backward pass."""
EVEN = 1.25
"""A load relative to the mean. Replication down to this load is tried too if the budget allows
more."""
MOST_TABLES = 4
"""The largest number of slices for which tables are tried."""


def rows_for_weights(load: CallLoad) -> int:
    """Return the number of rows that need as much memory as the weights of one shard of an expert.

    The memory of a row is that at the peak: input, both gradients, and the hidden units of each
    matrix.
    """
    matrices = Rates().matrices  # as usual: loads do not say how many there are
    weight_values = load.units * load.dim * matrices
    row_values = 3 * load.dim + matrices * load.units
    return -(-weight_values // row_values)  # rounded up


def limits(replica: ReplicaLoad, helped: np.ndarray, budget: int) -> np.ndarray:
    """Return the rows that each place may compute in addition to replicated weights, (ep,) int64; 0
    or negative if the weights exceed the budget.

    Args:
        replica: the load of one replica of the experts.
        helped: (num_experts, ep) bool, whether an expert is replicated to a place.
        budget: most rows at the experts of one rank.
    """
    home = replica.load.home
    ep = len(replica.origins)
    size = rows_for_weights(replica.load)
    replicates = np.bincount(home, weights=helped.any(1), minlength=ep) > 0
    messages = replica.sent(helped)

    # experts' weights that a place holds at each of the two peaks
    in_gradients = HELD * helped.sum(0)
    packed_at_home = AT_HOME * replicates * (len(home) // ep)
    # of what it receives, as a helper or relay; of what it sends; and its own, packed
    travelling = HELD * messages.sum(0) + messages.sum(1) + packed_at_home

    # `size`: rows that need as much memory as an expert's weights
    left_in_gradients = budget - size * in_gradients
    left_while_travelling = (budget - size * travelling) * 3 // 2  # rows take two thirds then
    rows: np.ndarray = np.minimum(left_in_gradients, left_while_travelling)
    return np.minimum(rows, budget)


def within_budget(
    load: CallLoad, replicated: Replications, budget: int, slices: int = 1
) -> Replications | None:
    """Return a table of replicated copies with which a call fits a budget in `slices` slices; None
    if the search finds none.

    The excess copies of a place, of its largest expert, are replicated to the place with most room.
    Few experts thus move many copies.

    Args:
        replicated: the table that a policy decided on.
        budget: the copies that one rank may compute at once, if its memory for replicated weights
            counts as copies too.
        slices: number of parts in which the call may run, one after the other.
    """
    replicas = replica_loads(load, Rates())
    tables = []
    for replica in replicas:
        table = _fitted(replica, within(replica, replicated), budget, slices)
        if table is None:
            return None
        tables.append(table)
    return spread(replicas, tables)


def _fitted(
    replica: ReplicaLoad, initial: Replications, budget: int, slices: int
) -> Replications | None:
    """Return a table of replicated copies that fits every place; None if the search finds none. It
    starts from `initial`; the rest is as for `within_budget`."""
    giving = Giving(replica, initial)
    # the room below is that of all slices together; a replicated expert takes memory in each
    weights = slices * HELD * rows_for_weights(replica.load)
    # at most as many steps as there are pairs of an expert and a helper
    for _ in range(giving.helped.size):
        room = slices * limits(replica, giving.helped, budget) - giving.loads
        giver = int(room.argmin())
        if room[giver] >= 0:  # every place fits
            return giving.replicated
        if not giving.give(giver, room, weights):
            return None
    return None


def fitting_tables(
    load: CallLoad, replicated: Replications, budget: int, most_slices: int
) -> list[Replications]:
    """Return tables with which a call fits a budget in the fewest slices for which the search finds
    any.

    Args:
        replicated: the table that a policy decided on, as for `within_budget`. Tables extend it, or
            start without it.
        budget: as for `within_budget`.
        most_slices: the largest number of slices.
    """
    # the searches: the table from which one starts, and the rows that it allows
    searches = []
    if not replicated.is_empty:
        searches.append((replicated, budget))
    searches.append((NOTHING, budget))
    # under a loose budget it pays to replicate more than necessary
    mean = load.copies.sum() / len(load.copies)
    even_rows = int(np.ceil(mean * EVEN))
    if even_rows < budget:
        searches.append((NOTHING, even_rows))
    for slices in range(1, min(most_slices, MOST_TABLES) + 1):
        candidates = [within_budget(load, start, rows, slices) for start, rows in searches]
        tables = [table for table in candidates if table is not None]
        if tables:
            return tables
    return []


def seconds(
    load: CallLoad, costs: Rates, replicated: Replications, slices: int, repeated: float
) -> float:
    """Return the modelled seconds of a call in slices.

    Weights travel for every slice. Slices that are not kept for the backward pass are dispatched
    and computed again.

    Args:
        costs: rates of the cost model.
        replicated: the table of replicated copies.
        slices: number of slices of the call; 1 for a whole call.
        repeated: share of the busiest rank's rows that are in slices that are not kept.
    """
    slowest = 0.0
    for replica in replica_loads(load, costs):
        moved = rows_of(replica, within(replica, replicated))
        rows = moved.home + moved.replicated
        whole_call = replica.seconds_of(rows, moved.fetched * slices)

        # the forward pass once more: a third of the products, and one transfer of rows
        repeat_seconds = replica.busiest(rows.sum(0)) * replica.seconds_per_copy / 3
        repeat_seconds += replica.row_bytes * replica.fullest(rows)

        # each further slice starts messages to all other places, for each transfer of rows and for
        # dispatching once more
        other_places = len(rows) - 1
        messages = (slices - 1) * (replica.costs.passes + 1) * other_places
        start_up = messages * costs.inter_latency_us * 1e-6
        slowest = max(slowest, whole_call + repeated * repeat_seconds + start_up)
    return slowest
