"""Calls that balance: a selector says what a call runs and replicates, and a budget holds that to its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from moesaic.balance.replication.cost import LinkTimes
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.balance.selector.arbiter import CallDecision
from moesaic.plan import Compiled
from moesaic.plan.budget import CountedCall, MemoryBudget
from moesaic.routing.route import RoutingRecord
from moesaic.runtime.balance.selector import ProgramSelector
from moesaic.runtime.balance.slices import run_slices
from moesaic.runtime.expert_parallel import AbstractCallPolicy, Chosen, PlainCalls


class BalancedCalls(AbstractCallPolicy):
    """Decides under a plan that replicates copies, has a memory budget, or both.

    Args:
        compiled: of the layer.
        policy: decides in place of the policy that the plan names; None for that policy.
        num_experts: of the layer.
        dim: width of a token.

    Raises:
        InputError: as `ProgramSelector` does.
    """

    def __init__(
        self, compiled: Compiled, policy: AbstractReplicationPolicy | None, num_experts: int, dim: int
    ) -> None:
        super().__init__(compiled)
        self.selector = ProgramSelector(compiled, policy, num_experts, dim)
        self.meter = self.selector.meter.watch if self.selector.learns else None
        self.budget = MemoryBudget(compiled, num_experts, None if policy is None else policy.costs)

    @property
    def digest(self) -> bytes:
        """See `ProgramSelector.digest`."""
        return self.selector.digest

    def tell(self) -> Sequence[float]:
        """See `ProgramSelector.tell`."""
        return self.selector.tell()

    def refuse_padding(self) -> None:
        """See `MemoryBudget.refuse_padding`."""
        self.budget.refuse_padding()

    def choose(self, record: RoutingRecord, call: CountedCall) -> Chosen:
        """Return what the selector chose, or what of it the budget allows."""
        compiled, replicated = self.selector.choose(record, call.copies, call.units)
        compiled, replicated, cut = self.budget.hold(compiled, replicated, call)
        return Chosen(compiled, replicated, None if cut is None else partial(run_slices, cut))

    def timed(self, record: RoutingRecord, chosen: Chosen, program: Callable[[], Tensor]) -> Tensor:
        """Run and time it; see `ProgramSelector.timed`."""
        return self.selector.timed(record, chosen.compiled, chosen.replicated, program)


def calls_under(
    compiled: Compiled, policy: AbstractReplicationPolicy | None, num_experts: int, dim: int
) -> AbstractCallPolicy:
    """Return what decides for the calls of a layer; arguments as of `BalancedCalls`."""
    if not compiled.replicates and compiled.plan.memory_budget is None:
        return PlainCalls(compiled)
    return BalancedCalls(compiled, policy, num_experts, dim)


def decisions_of(calls: AbstractCallPolicy | None) -> list[CallDecision]:
    """Return what an arbiter decided since it was asked last, oldest first; nothing where there is none."""
    selector = None if calls is None else selector_of(calls)
    return [] if selector is None else selector.take()


def selector_of(calls: AbstractCallPolicy) -> ProgramSelector | None:
    """Return the selector of calls that balance; None for others."""
    return calls.selector if isinstance(calls, BalancedCalls) else None


def speeds_of(calls: AbstractCallPolicy) -> tuple[float, ...]:
    """Return the speeds of ranks that an arbiter heard last, the same on all ranks; () where nobody measures them."""
    selector = selector_of(calls)
    return () if selector is None else selector.speeds


def hear_links(calls: AbstractCallPolicy, times: LinkTimes) -> bool:
    """Let an arbiter that learns go by links as they are now, over what it was told at the start; returns whether there is one.

    All ranks call it between the same calls.
    """
    selector = selector_of(calls)
    if selector is None or not selector.learns:
        return False
    selector.links = dict(times)
    return True


def bare_of(calls: AbstractCallPolicy) -> Compiled:
    """Return the programs under which samples may move: the arbiter's without replication, else those of the plan."""
    return calls.compiled.options[0] if calls.compiled.options else calls.compiled
