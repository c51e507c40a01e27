"""The interface of replication policies, which decide from a call's counts which copies helpers
compute instead of the home.

A policy only decides. Every rank calls it with the same counts and gets the same decision, so no
rank waits for another. Places, homes, helpers and replicas are those of `replication/cost.py`; a
*table* says how many copies of each origin for each expert each helper computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicaLoad, replica_loads
from moesaic.balance.replication.tables import spread
from moesaic.errors import InputError
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.plan import NO_REPLICATION, Plan
from moesaic.program.rates import Rates
from moesaic.program.replications import Replications

ALONE = "alone"
REPLICATED = "replicated"
"""Names of the programs without replication ("leaving a call alone") and with it."""


class CallTraffic(NamedTuple):
    """What a call computes and moves, over all ranks, forward and backward."""

    rows: tuple[int, ...] = ()
    """Copies that each place of ep computes, replica after replica."""
    token_bytes: int = 0
    """Bytes of tokens and their gradients that cross links."""
    weight_bytes: int = 0
    """Bytes of weights and their gradients that cross links."""


@dataclass(frozen=True, kw_only=True)
class CallDecision:
    """The decision for a call."""

    option: str
    """Name of the option."""
    program: str
    """Name of the chosen program among those of the policy."""
    replicated: Replications | None = None
    """The replicated copies; None if nothing is replicated."""
    seconds: Mapping[str, float]
    """Modelled seconds, forward and backward, of every option when options were last compared; {}
    if a policy has no choice."""
    moved: Callable[[], tuple[CallTraffic, CallTraffic]] = lambda: (CallTraffic(), CallTraffic())
    """Returns what moves if the call is left alone, and by the decision."""
    decision_seconds: float = 0.0
    """Processor time of the decision, which delays the call. The time of other processes on the
    same core is not included."""


class AbstractChooser(ABC):
    """Decides for the calls of one layer, in their order."""

    @abstractmethod
    def choose(self, load: CallLoad) -> CallDecision:
        """Return the decision for a call; the same on all ranks, since it depends only on the loads
        so far."""


class AbstractReplicationPolicy(ABC):
    """The interface of a replication policy."""

    costs: Rates | None = None
    """The rates of the cost model; None if the policy uses none or the default rates."""
    has_choice: ClassVar[bool] = False
    """Whether the policy chooses among several ways to run a call, and its decisions are
    recorded."""

    @abstractmethod
    def decide(self, load: CallLoad) -> np.ndarray:
        """Return the table of replicated copies, (world, num_experts, ep) int64.

        Entry [o, e, h] is the number of copies that origin o has for expert e and that helper h, a
        place of ep, computes. The entry of the expert's home is always 0. The decision is
        deterministic: the lowest index wins ties.

        Args:
            load: the load of the call, the same on all ranks.
        """

    def replications(self, load: CallLoad) -> Replications:
        """Return the table of `decide` as a sparse one.

        Raises:
            InputError: if `decide` returns no such table.
        """
        table = self.decide(load)
        shape = (*load.copies.shape, load.grid.ep)
        if isinstance(table, np.ndarray):
            if table.dtype.kind == "i" and table.shape == shape:
                return Replications.of(table)
            decided = f"{table.dtype} {table.shape}"
        else:
            decided = type(table).__name__
        raise InputError(
            f"replication policy {type(self).__name__} decided {decided}: return integers of "
            f"shape {shape}, (world, num_experts, ep)"
        )

    def option_plans(self, plan: Plan, grid: Grid) -> dict[str, Plan]:
        """Return the plans whose programs calls may run, by name: first one that replicates
        nothing, then one that does.

        Further plans are left out if they do not compile. These two do not depend on the mesh.
        """
        del grid
        return {ALONE: replace(plan, replication=NO_REPLICATION), REPLICATED: plan}

    def start(self, plans: Mapping[str, Plan]) -> AbstractChooser:
        """Return what decides for the calls of one layer, given the plans of the programs that it
        may run. Here that is `decide` alone, which needs no plans."""
        del plans
        return _ByTable(self)

    def settings_text(self) -> str:
        """Return the policy's settings as text, which ranks compare, since the settings must be the
        same on all ranks.

        Only attributes that are numbers, strings, tuples, dictionaries or dataclasses are included.
        """
        settings = {}
        for name, value in sorted(vars(self).items()):
            is_plain = value is None or isinstance(value, (bool, int, float, str, tuple, dict))
            if is_plain or is_dataclass(value):
                settings[name] = value
        return f"{type(self).__name__} {settings}"


class _ByTable(AbstractChooser):
    """Runs the program with replication if the policy's table replicates anything, so an empty
    table costs nothing."""

    def __init__(self, policy: AbstractReplicationPolicy) -> None:
        self._policy = policy

    def choose(self, load: CallLoad) -> CallDecision:
        """Ask the policy what to replicate, and check its answer."""
        replicated = self._policy.replications(load)
        goes_home = replicated.helper == load.home[replicated.expert]
        if (replicated.amount < 1).any() or goes_home.any():
            raise InputError(
                f"replication policy {type(self._policy).__name__} replicates less than a "
                "copy, or to load.home: leave it out"
            )
        if replicated.is_empty:
            return CallDecision(option=ALONE, program=ALONE, seconds={})
        return CallDecision(
            option=REPLICATED, program=REPLICATED, replicated=replicated, seconds={}
        )


def programs_of(compiled: Compiled, policy: AbstractReplicationPolicy) -> dict[str, Compiled]:
    """Return the programs that calls may run under a plan that replicates, by name; options that do
    not fit are left out.

    Raises:
        InputError: if the plan without replication does not fit.
    """
    programs = {}
    # the mesh as it is before a plan with gathered weights splits its etp in two factors
    plans = policy.option_plans(compiled.plan, replace(compiled.grid, etp_inner=1))
    for name, plan in plans.items():
        try:
            programs[name] = compiled if plan == compiled.plan else compiled.under(plan)
        except InputError:
            if name in (ALONE, REPLICATED):
                raise
    return programs


class AbstractReplicaPolicy(AbstractReplicationPolicy):
    """A policy that decides for each replica of the experts separately.

    Args:
        costs: rates of the cost model; None for the usual ones.
    """

    def __init__(self, costs: Rates | None = None) -> None:
        self.costs: Rates = costs or Rates()

    @abstractmethod
    def replicated(self, replica: ReplicaLoad) -> Replications:
        """Return the copies to replicate between the places of one replica of the experts."""

    def replications(self, load: CallLoad) -> Replications:
        replicas = replica_loads(load, self.costs)
        return spread(replicas, [self.replicated(replica) for replica in replicas])

    def decide(self, load: CallLoad) -> np.ndarray:
        return self.replications(load).table((*load.copies.shape, load.grid.ep))


class Replicated(AbstractReplicationPolicy):
    """A policy with a fixed table, whatever the load, for tests and replays.

    Args:
        replicated: (world, num_experts, ep) int64, the table; entries above a call's copies are
            reduced.
    """

    def __init__(self, replicated: np.ndarray) -> None:
        self.replicated = replicated

    def decide(self, load: CallLoad) -> np.ndarray:
        """Return the table, reduced to the copies of the call; lower-numbered helpers get theirs
        first."""
        before = np.cumsum(self.replicated, axis=2) - self.replicated
        available = np.maximum(load.copies[:, :, None] - before, 0)
        return np.minimum(self.replicated, available)
