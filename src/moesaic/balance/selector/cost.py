"""What each way of running a call takes, in closed form over the busiest place and link: quick enough to ask at every call.

The model of `replication/cost.py`, with what the other options need: start-up of messages, weights that are gathered for
adaptive r (Tutel, Hwang et al. 2023, section 4.1), and computing that goes on while the next part travels (FasterMoE, He et
al. 2022, section 4.2). It ranks options; a simulation of each program may correct it by a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.tables import NOTHING, Replications, rows_of


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a layer, forward and backward, on the busiest of its replicas."""

    compute: float
    """Seconds of products."""
    travel: float
    """Seconds that tokens take of the fullest link."""
    fetch: float
    """Seconds that weights and their gradients take of it."""
    rows: tuple[int, ...]
    """Copies that each place of ep computes, replica after replica."""
    token_bytes: int = 0
    """That cross links, of all replicas."""
    weight_bytes: int = 0
    """Likewise; gradients of weights included."""

    def seconds(self, parts: int) -> float:
        """Return the modelled time if tokens travel in so many parts, each computed while the next one travels."""
        longer, shorter = max(self.compute, self.travel), min(self.compute, self.travel)
        return longer + shorter / parts + self.fetch


def worst(costs: Sequence[Cost]) -> Cost:
    """Return the cost of several replicas: the slowest one's times, everyone's bytes."""
    slowest = max(costs, key=lambda each: each.seconds(1))
    return Cost(
        compute=slowest.compute,
        travel=slowest.travel,
        fetch=slowest.fetch,
        rows=tuple(rows for each in costs for rows in each.rows),
        token_bytes=sum(each.token_bytes for each in costs),
        weight_bytes=sum(each.weight_bytes for each in costs),
    )


def replicated_cost(replica: ReplicaLoad, replicated: Replications, chunks: int = 1) -> Cost:
    """Return the cost under a table of replicated copies.

    Args:
        replica: the load of one replica of the experts.
        replicated: between its places.
        chunks: parts that the copies which stay at home travel in.
    """
    rows, shards, passes = rows_of(replica, replicated), replica.origins.shape[1], replica.passes
    messages = replica.links.start_up
    moved = rows.home + rows.replicated
    starts = messages * (chunks * (rows.home > 0) + (rows.replicated > 0))
    across = int(moved.sum() - np.trace(moved))
    # Replicated copies travel behind those that stay, and their results behind theirs: the two do not share a link's time.
    travelling = replica.fullest(rows.home, 0) + replica.fullest(rows.replicated, 0)
    return Cost(
        compute=replica.compute_seconds(replica.busiest(moved.sum(0))),
        travel=replica.travel_seconds(travelling) + passes * _fullest(starts),
        fetch=replica.fetch_seconds(replica.fullest(rows.fetched, 1))
        + passes / 2 * _fullest(messages * (rows.fetched > 0))
        + rows.held * replica.costs.expert_us * 1e-6,
        rows=tuple(moved.sum(0).tolist()),
        token_bytes=passes * across * replica.row_bytes * shards,
        weight_bytes=passes // 2 * int(rows.fetched.sum()) * replica.weight_bytes * shards,
    )


def gathered_cost(replica: ReplicaLoad, alone: Cost, r: int) -> Cost:
    """Return the cost with `gather_weights` r below etp.

    Args:
        replica: the load of one replica of the experts.
        alone: its cost with r = etp.
        r: shards that a token visits; 0: weights come to the tokens.
    """
    shards, each = replica.origins.shape[1], replica.load.num_experts // len(replica.origins)
    within = _within_place(replica)
    if r:
        got = (shards // r - 1) * each
        gathered = got * replica.weight_bytes * within
        weight_bytes = (replica.passes - 1) * got * replica.weight_bytes * replica.origins.size
        return Cost(
            compute=alone.compute,
            travel=alone.travel * r / shards,
            fetch=(replica.passes - 1) * gathered,  # forward, again in backward, and the gradients back
            rows=alone.rows,
            token_bytes=alone.token_bytes * r // shards,
            weight_bytes=weight_bytes,
        )
    # Every rank fetches all shards of all experts of the replica and computes what is its own.
    own = replica.load.copies[replica.origins].sum(2)
    sent = shards * each * (1 - np.eye(len(replica.origins)))
    fetched = replica.weight_bytes * replica.fullest(sent, 1) + _fullest(shards * replica.links.start_up)
    fetched += (shards - 1) * each * replica.weight_bytes * within
    got = (replica.origins.size - 1) * each
    return Cost(
        compute=replica.compute_seconds(replica.busiest(own.max(1)) * shards),
        travel=0.0,
        fetch=(replica.passes - 1) * fetched,
        rows=tuple(own.sum(1).tolist()),
        weight_bytes=(replica.passes - 1) * got * replica.weight_bytes * replica.origins.size,
    )


def is_even(replica: ReplicaLoad, margin: float) -> bool:
    """Whether nothing that depends on the counts can gain much: no place computes, sends or gets more than the margin above
    the mean, and no expert's weights are fewer bytes than the tokens that one place sends it.

    Args:
        replica: the load of one replica of the experts.
        margin: a share.
    """
    home, ep = replica.load.home, len(replica.origins)
    away = replica.copies * (np.arange(ep)[:, None] != home[None, :])
    if 2 * int(away.max(initial=0)) * replica.row_bytes > replica.weight_bytes:
        return False
    rows = rows_of(replica, NOTHING).home
    travel = rows * replica.seconds_per_byte
    loads = (rows.sum(0) * replica.links.slowness, travel.sum(0), travel.sum(1))
    return all(float(each.max()) <= (1 + margin) * float(each.mean()) for each in loads)


def _fullest(seconds: np.ndarray) -> float:
    """Return what the place that sends or gets most needs, (ep, ep) -> ()."""
    return float(max(seconds.sum(0).max(), seconds.sum(1).max()))


def _within_place(replica: ReplicaLoad) -> float:
    """Return the seconds of a byte between two ranks that hold shards of the same experts."""
    machine, grid = replica.costs.machine, replica.load.grid
    nodes = {grid.node_of(int(rank)) for rank in replica.origins[0]}
    return 8 / ((machine.intra_gbps if len(nodes) == 1 else machine.inter_gbps) * 1e9)
