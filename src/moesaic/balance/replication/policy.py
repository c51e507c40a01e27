"""The interface of replication policies: which copies another rank than their expert's home computes, from one call's counts.

A policy decides and never acts; every rank calls it with the same counts and gets the same answer, so nobody waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import Field, dataclass, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from moesaic.balance.replication import NO_REPLICATION
from moesaic.balance.replication.cost import CallLoad, ReplicaLoad, ReplicationCosts, replica_loads
from moesaic.balance.replication.tables import Replications, full_table
from moesaic.program.grid import Grid


class PolicyPlan(Protocol):
    """A plan, as policies see it: a dataclass with these fields, of which `plan.Plan` says what they mean."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def replication(self) -> str:
        """Name of the policy that replicates experts, or none."""

    @property
    def replicates(self) -> bool:
        """Whether there is such a policy."""

    @property
    def gather_weights(self) -> int | None:
        """Shards of an expert that a token visits; None for all."""

    @property
    def peer_groups(self) -> int:
        """Groups of neighbours that exchange one after the other."""

    @property
    def chunks(self) -> int:
        """Parts that each run of copies is cut into."""


AnyPlan = TypeVar("AnyPlan", bound=PolicyPlan)


@dataclass(frozen=True, kw_only=True)
class BarePlan:
    """These choices alone, as a plan has them unless it is told otherwise."""

    replication: str = NO_REPLICATION
    gather_weights: int | None = None
    peer_groups: int = 1
    chunks: int = 1

    @property
    def replicates(self) -> bool:
        """Whether a policy replicates experts."""
        return self.replication != NO_REPLICATION


class AbstractReplicationPolicy(ABC):
    """A policy."""

    costs: ReplicationCosts | None = None
    """The rates by which it decides, where it decides by rates."""

    @abstractmethod
    def decide(self, load: CallLoad) -> np.ndarray:
        """Return which copies are replicated, (world, num_experts, ep) int64.

        Entry [o, e, h]: how many of the copies that origin o has for expert e the ranks at place h of ep compute; those at
        the expert's home are never replicated. Deterministic: ties break by number.

        Args:
            load: the same on all ranks.
        """

    def option_plans(self, plan: AnyPlan, grid: Grid) -> Iterable[AnyPlan]:
        """Return the plans whose programs calls may run, if the policy chooses among several: first one that replicates
        nothing, then one that replicates, then others, which are left out where they do not compile. Empty, as here: a call
        runs the plan itself, or where the policy replicates nothing the plan without replication.

        Args:
            plan: that names the policy.
            grid: the mesh.
        """
        del plan, grid
        return ()

    def settings_text(self) -> str:
        """Return its settings as text: what has to be the same on all ranks, so that they decide alike.

        Numbers, words and records of them count; what a policy holds besides does not.
        """
        plain = {
            name: value
            for name, value in sorted(vars(self).items())
            if value is None or isinstance(value, (bool, int, float, str, tuple, dict)) or is_dataclass(value)
        }
        return f"{type(self).__name__} {plain}"


class AbstractReplicaPolicy(AbstractReplicationPolicy):
    """A policy that decides for each replica of the experts apart."""

    @abstractmethod
    def replicated(self, replica: ReplicaLoad) -> Replications:
        """Return what is replicated between the places of one replica of the experts, whose load is given."""

    def decide(self, load: CallLoad) -> np.ndarray:
        found = replica_loads(load, self.costs or ReplicationCosts())
        return full_table(found, [self.replicated(replica) for replica in found])


class Replicated(AbstractReplicationPolicy):
    """Replicates what it is told, whatever the load: for tests and replays.

    Args:
        replicated: (world, num_experts, ep) int64; more than there are copies is cut down.
    """

    def __init__(self, replicated: np.ndarray) -> None:
        self.replicated = replicated

    def decide(self, load: CallLoad) -> np.ndarray:
        """Return it, cut to the copies that there are, helpers in their order."""
        before = np.cumsum(self.replicated, axis=2) - self.replicated
        left = np.maximum(load.copies[:, :, None] - before, 0)
        return np.minimum(self.replicated, left)
