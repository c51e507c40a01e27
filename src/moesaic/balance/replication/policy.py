"""The interface of replication policies, which decide from a call's counts which copies helpers compute instead of the home.

A policy only decides. Every rank calls it with the same counts and gets the same decision, so no rank waits for another.
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
    """The part of a plan that policies read: a dataclass with these fields, which `plan.Plan` describes."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def replication(self) -> str:
        """Name of the replication policy, or "none"."""

    @property
    def replicates(self) -> bool:
        """Whether the plan names a replication policy."""

    @property
    def gather_weights(self) -> int | None:
        """Shards of an expert that a token visits (r); None for all."""

    @property
    def peer_groups(self) -> int:
        """Number of groups of neighbours that exchange one after the other."""

    @property
    def chunks(self) -> int:
        """Number of chunks into which each expert's copies are split."""


AnyPlan = TypeVar("AnyPlan", bound=PolicyPlan)


@dataclass(frozen=True, kw_only=True)
class BarePlan:
    """A `PolicyPlan` with nothing but these choices, and the defaults of `plan.Plan`."""

    replication: str = NO_REPLICATION
    gather_weights: int | None = None
    peer_groups: int = 1
    chunks: int = 1

    @property
    def replicates(self) -> bool:
        """Whether `replication` names a policy."""
        return self.replication != NO_REPLICATION


class AbstractReplicationPolicy(ABC):
    """The interface of a replication policy."""

    costs: ReplicationCosts | None = None
    """The rates of the cost model; None if the policy uses none or the default rates."""

    @abstractmethod
    def decide(self, load: CallLoad) -> np.ndarray:
        """Return the table of replicated copies, (world, num_experts, ep) int64.

        Entry [o, e, h] is the number of copies that origin o has for expert e and that helper h, a place of ep, computes. The
        entry of the expert's home is always 0. The decision is deterministic: the lowest index wins ties.

        Args:
            load: the load of the call, the same on all ranks.
        """

    def option_plans(self, plan: AnyPlan, grid: Grid) -> Iterable[AnyPlan]:
        """Return the plans whose programs calls may run, if the policy chooses among several.

        The first plan replicates nothing and the second replicates; further plans are left out if they do not compile. The
        default is empty: a call runs the plan itself, or the plan without replication if the policy replicates nothing.

        Args:
            plan: the plan that names the policy.
            grid: the mesh.
        """
        del plan, grid
        return ()

    def settings_text(self) -> str:
        """Return the policy's settings as text, which ranks compare, since the settings must be the same on all ranks.

        Only attributes that are numbers, strings, tuples, dictionaries or dataclasses are included.
        """
        plain = {
            name: value
            for name, value in sorted(vars(self).items())
            if value is None or isinstance(value, (bool, int, float, str, tuple, dict)) or is_dataclass(value)
        }
        return f"{type(self).__name__} {plain}"


class AbstractReplicaPolicy(AbstractReplicationPolicy):
    """A policy that decides for each replica of the experts separately."""

    @abstractmethod
    def replicated(self, replica: ReplicaLoad) -> Replications:
        """Return the copies to replicate between the places of one replica of the experts.

        Args:
            replica: the load of that replica.
        """

    def decide(self, load: CallLoad) -> np.ndarray:
        replicas = replica_loads(load, self.costs or ReplicationCosts())
        return full_table(replicas, [self.replicated(replica) for replica in replicas])


class Replicated(AbstractReplicationPolicy):
    """A policy with a fixed table, whatever the load, for tests and replays.

    Args:
        replicated: (world, num_experts, ep) int64, the table; entries above a call's copies are reduced.
    """

    def __init__(self, replicated: np.ndarray) -> None:
        self.replicated = replicated

    def decide(self, load: CallLoad) -> np.ndarray:
        """Return the table, reduced to the copies of the call; lower-numbered helpers get theirs first."""
        before = np.cumsum(self.replicated, axis=2) - self.replicated
        available = np.maximum(load.copies[:, :, None] - before, 0)
        return np.minimum(self.replicated, available)
