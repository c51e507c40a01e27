"""Policies that decide which copies are replicated. To add one: a new file and a line in `REPLICATION_POLICIES`."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.plan.replication.cost import ReplicationCosts
from moesaic.plan.replication.policy import AbstractReplicationPolicy
from moesaic.plan.replication.published import Published
from moesaic.plan.replication.shadow import Shadow
from moesaic.plan.replication.spill import LeastLoaded, Spill

REPLICATION_POLICIES: dict[str, Callable[[ReplicationCosts], AbstractReplicationPolicy]] = {
    "shadow": Shadow,
    "published": Published,
    "spill": Spill,
    "least_loaded": lambda _: LeastLoaded(),
}
"""What builds each from the rates of a machine and a layer, by the name that `Plan.replication` takes."""
