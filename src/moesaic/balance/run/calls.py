"""Call policies that balance: decide which programs a call runs and which copies it replicates,
within its memory budget.

A decision is made once all ranks have a call's counts. Under plans that replicate, the replication
policy chooses a program and a table of replicated copies. Decisions depend on the calls before, so
a recomputation repeats that of its forward pass: both passes must run the same program.

If samples may move, the gain is known only after the call, since placement is solved while the call
runs. The layer's next call compares it with what the best other option saved last. If samples stay,
placement is tried again from time to time. All ranks have both numbers, so they decide identically.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np
from torch.utils.weak import WeakIdKeyDictionary

from moesaic import policies
from moesaic.balance import replication_policy
from moesaic.balance.budget import MemoryBudget
from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import (
    ALONE,
    AbstractChooser,
    AbstractReplicationPolicy,
    CallDecision,
    CallTraffic,
    programs_of,
)
from moesaic.balance.run.relocate import SampleMove
from moesaic.balance.run.sliced_calls import run_slices
from moesaic.program.compile import Compiled
from moesaic.program.rates import Rates
from moesaic.routing.route import RoutingRecord
from moesaic.runtime.call_counts import CountedCall
from moesaic.runtime.expert_parallel import AbstractCallPolicy, Chosen

KEPT = 64
"""Largest number of decisions of a layer that are kept for `take`."""
AGAIN = 17
"""Calls after which moving samples is tried again, if another option was faster."""
MARGIN = 0.05
"""Share by which moving samples must be faster than the best other option to replace it, or the
other way round."""
RELOCATE = "relocate"
"""Name of the option that moves samples."""


class BalancedCalls(AbstractCallPolicy):
    """Decides how each call of one layer runs under a plan that replicates copies, has a memory
    budget, or both.

    Args:
        dim: width of a token.
        policy: the replication policy to use instead of the one that the plan names; None for the
            plan's.
    """

    def __init__(
        self,
        compiled: Compiled,
        num_experts: int,
        dim: int,
        policy: AbstractReplicationPolicy | None = None,
    ) -> None:
        super().__init__(compiled)
        self._num_experts = num_experts
        self._dim = dim
        self.budget = MemoryBudget(compiled, num_experts, None if policy is None else policy.costs)
        self._policy: AbstractReplicationPolicy | None = None
        """The replication policy; None without replication."""
        self._chooser: AbstractChooser | None = None
        """Applies the policy to the calls of this layer; None without replication."""
        self._move_arbiter: MoveArbiter | None = None
        """Decides whether samples move in a call; None if the policy has no choice."""
        self.programs: dict[str, Compiled] = {}
        """The programs that calls may run, by the name that the replication policy gives them; {}
        without replication."""

        if compiled.replicates:
            self._policy = policy or replication_policy(compiled.plan.replication)
            self.programs = programs_of(compiled, self._policy)
            self._chooser = self._policy.start(
                {name: each.plan for name, each in self.programs.items()}
            )
            if self._policy.has_choice:
                self._move_arbiter = MoveArbiter(self._policy.costs or Rates())
        self._decisions: deque[CallDecision] = deque(maxlen=KEPT)
        """Decisions of a policy that has a choice, until `take` returns them."""
        self._decided_by_call = WeakIdKeyDictionary()
        """The decision of each call that may still be recomputed, by the `gathered` of its record,
        an object that the recomputation shares."""

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks if they run the same programs with the same policy
        settings."""
        if self._policy is None:
            return self.compiled.digest
        digests = b"".join(program.digest for program in self.programs.values())
        settings = self._policy.settings_text().encode()
        return hashlib.blake2b(digests + settings, digest_size=16).digest()

    @property
    def bare(self) -> Compiled:
        """The programs under which samples may move: those without replication if the policy has a
        choice, else the plan's."""
        return self.programs[ALONE] if self.has_choice else self.compiled

    @property
    def has_choice(self) -> bool:
        """Whether the replication policy chooses among several ways to run a call."""
        return self._move_arbiter is not None

    def refuse_padding(self) -> None:
        """See `MemoryBudget.refuse_padding`."""
        self.budget.refuse_padding()

    def choose(self, record: RoutingRecord, call: CountedCall) -> Chosen:
        """Return the policy's choice, changed if the memory budget requires it."""
        compiled = self.compiled
        replicated = None
        if self._chooser is not None:
            decision: CallDecision | None = self._decided_by_call.get(record.gathered)
            if decision is None:  # not a recomputation, which repeats that of its forward pass
                decision = self._chooser.choose(self._load(call.copies, call.units))
                self._note(record, decision)
            compiled = self.programs[decision.program]
            replicated = decision.replicated
        compiled, replicated, cut = self.budget.hold(compiled, replicated, call)
        return Chosen(compiled, replicated, None if cut is None else partial(run_slices, cut))

    def _load(self, copies: np.ndarray, units: int) -> CallLoad:
        """Return the load of a call; see the fields of `CallLoad`."""
        return CallLoad(self.compiled.grid, copies, self._num_experts, units, self._dim)

    def _note(self, record: RoutingRecord, decision: CallDecision) -> None:
        """Keep the decision of a call for its recomputation and for `take`."""
        # for the recomputation with the class's `moved`, since the decision's own keeps loads alive
        self._decided_by_call[record.gathered] = replace(decision, moved=CallDecision.moved)
        if self._move_arbiter is not None:
            self._move_arbiter.note_others(decision)
            self._decisions.append(decision)

    def stays(self, move: SampleMove) -> bool:
        """Return whether samples stay in a call that might move them. Then the layer runs as
        without moves.

        Args:
            move: the move of the call; it keeps the decision.
        """
        if self._move_arbiter is None:
            return False
        if move.stays is not None:  # a recomputation
            return move.stays
        if move.goal is not None:  # the homes after the layer are fixed
            move.stays = move.before.same_as(move.goal)
        else:
            move.stays = not self._move_arbiter.prefers_moving()
            move.goal = move.before if move.stays else None
        return move.stays

    def note_move(
        self, record: RoutingRecord, move: SampleMove, copies: np.ndarray, units: int
    ) -> None:
        """Record a call in which samples move.

        Args:
            record: the record of the call's routing.
            copies: (world, num_experts) int64: copies of each origin for each expert.
            units: hidden units of one shard of an expert.
        """
        # no policy with a choice, or a recomputation
        if (
            self._chooser is None
            or self._move_arbiter is None
            or record.gathered in self._decided_by_call
        ):
            return
        decision = self._chooser.choose(self._load(copies, units))
        self._note(record, decision)
        # instead of the policy's decision, which `_note` has appended
        self._decisions[-1] = self._move_arbiter.note_move(move, decision, self._dim)

    def take(self) -> list[CallDecision]:
        """Return the decisions since the last `take` of a policy that has a choice, oldest
        first."""
        decisions = list(self._decisions)
        self._decisions.clear()
        return decisions


class MoveArbiter:
    """Decides for one layer whether samples move, or the policy's other options are used.

    Args:
        costs: rates of the machine.
    """

    def __init__(self, costs: Rates) -> None:
        self._costs = costs
        self._tried: tuple[SampleMove, float, int] | None = None
        """The last call in which samples moved, its predicted seconds if it had been left alone,
        and the width of a token."""
        self._moving_time: float | None = None
        """Predicted time with moving samples, relative to leaving the call alone; None before the
        first move."""
        self._other_time = 1.0
        """The same ratio for the best other option."""
        self._moved = True
        """Whether samples moved when that was last decided."""
        self._calls = 0
        """Number of calls since moving was last tried."""

    def prefers_moving(self) -> bool:
        """Return whether samples may move in the next call."""
        self._calls += 1
        if self._tried is not None:
            move, alone_seconds, dim = self._tried
            self._tried = None
            saved = saved_seconds(move, self._costs, dim)
            self._moving_time = 1 - saved / alone_seconds if alone_seconds else 1.0
        if self._moving_time is None or self._calls >= AGAIN:  # to find out what moving takes
            self._calls = 0
            return True
        clearly = 1 - MARGIN
        if self._moved:  # goes on if it is no loss and the other option is not clearly faster
            self._moved = (
                self._moving_time < 1 and not self._other_time < clearly * self._moving_time
            )
        else:  # begins again if it is clearly faster than the other option
            self._moved = self._moving_time < clearly * self._other_time
        return self._moved

    def note_others(self, decision: CallDecision) -> None:
        """Record how good the policy's choice is, relative to leaving the call alone."""
        seconds_alone = decision.seconds.get(ALONE, 0.0)
        self._other_time = 1.0
        if seconds_alone:
            self._other_time = decision.seconds.get(decision.option, seconds_alone) / seconds_alone

    def note_move(self, move: SampleMove, decision: CallDecision, dim: int) -> CallDecision:
        """Record that samples move in this call. Its gain is computed when the next call starts.

        Args:
            decision: what the policy would have decided if samples stayed.
            dim: width of a token.

        Returns:
            The decision to move, in the policy's form.
        """
        self.note_others(decision)
        if move.goal is None:  # where samples go is decided, not fixed
            self._tried = move, decision.seconds.get(ALONE, 0.0), dim
        traffic_of = decision.moved

        def moved() -> tuple[CallTraffic, CallTraffic]:
            """Return the traffic without replication, which no program changes in this call."""
            alone, _ = traffic_of()
            return alone, alone

        return replace(decision, option=RELOCATE, program=ALONE, replicated=None, moved=moved)


def saved_seconds(move: SampleMove, costs: Rates, dim: int) -> float:
    """Return the seconds that a move saves on average per rank, for this layer's results and the
    next layer's copies together.

    Args:
        move: a move that was decided.
        costs: rates of the machine.
        dim: width of a token.
    """
    unmoved, moved = move.volumes()
    passes = 2 if costs.backward else 1  # a row is sent, and its gradient
    row_bits = 8 * dim * costs.element_bytes * passes
    intra_saved = unmoved.intra - moved.intra
    inter_saved = unmoved.inter - moved.inter
    rows_per_gbps = intra_saved / costs.intra_gbps + inter_saved / costs.inter_gbps
    # 1e9 bits a second are one gbps
    return row_bits * rows_per_gbps / 1e9 / move.before.ranks


def calls_by(policy: AbstractReplicationPolicy) -> policies.CallsOf:
    """Return what `parallelize(..., calls=...)` takes to let a given replication policy decide,
    whatever name the plan has."""

    def calls(compiled: Compiled, num_experts: int, dim: int) -> AbstractCallPolicy:
        """Return what decides a layer's calls under a plan."""
        if not compiled.replicates:
            return policies.calls_of(compiled, num_experts, dim)
        return BalancedCalls(compiled, num_experts, dim, policy)

    return calls


def decisions_of(calls: AbstractCallPolicy | None) -> list[CallDecision]:
    """Return the decisions since the last time of a call policy that has a choice, oldest first; []
    for others."""
    return calls.take() if isinstance(calls, BalancedCalls) else []


def bare_of(calls: AbstractCallPolicy) -> Compiled:
    """Return the programs under which samples may move."""
    return calls.bare if isinstance(calls, BalancedCalls) else calls.compiled
