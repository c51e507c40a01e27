"""Call policies that balance: decide which programs a call runs and which copies it replicates, within its memory budget.

A decision is made once all ranks have a call's counts. Under plans that replicate, the policy's table decides whether the
program with replication is needed at all. Under `replication="arbiter"` the arbiter chooses among several programs and tables.

The arbiter's decisions are hidden behind the call. While a call runs, a thread weighs the options from this call's counts and
from the times of earlier calls. It prepares the next call, which then only fits the prepared table to its own counts. With a
call's counts, every rank sends the number of its thread's last decision and a hash of it. A call uses the latest decision that
all ranks have. So ranks wait only if some thread is more than `LAG` calls behind, and they raise an error if their decisions
differ. A recomputation repeats the decision of its forward pass: decisions depend on earlier ones, and both passes must run the
same program.

If samples may move, the gain is known only after the call, since placement is solved while the call runs. The layer's next call
compares it with what the arbiter's best option saved last. If samples stay, placement is tried again from time to time. All
ranks have both numbers, so they decide identically.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from moesaic.balance import REPLICATION_POLICIES
from moesaic.balance.budget import CountedCall, MemoryBudget
from moesaic.balance.replication.cost import CallLoad, LinkTimes, ReplicationCosts
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.balance.run.clock import CallClock, TimedCall, WorkMeter, speeds_of
from moesaic.balance.run.relocate import SampleMove
from moesaic.balance.run.slices import run_slices
from moesaic.balance.selector.arbiter import Arbiter, Arbitration, CallDecision
from moesaic.balance.selector.options import ALONE
from moesaic.balance.selector.prepared import Pick, Prepared
from moesaic.errors import InputError
from moesaic.planner.cluster import Machine
from moesaic.program.compile import Compiled, for_call
from moesaic.routing.route import RoutingRecord
from moesaic.runtime.expert_parallel import NUMBERS, AbstractCallPolicy, Chosen, PlainCalls

PAUSE = 0.1
"""The thread sleeps for this share of the last known call time, so that the call can issue its messages first."""
LAG = 2
"""Number of calls that a decision may be late before all ranks wait for it."""
KEPT = 1024
"""Largest number of decisions of a layer that are kept for `take`."""


RELOCATE = "relocate"
"""Name of the option that moves samples."""
Weighing: TypeAlias = "Future[tuple[CallDecision, Prepared]]"
"""The thread's task during a call. It returns this call's decision, and the next call's prepared choice."""


@dataclass
class _DecidedCall:
    """The program and the table of a call, kept for its recomputation."""

    program: int
    replicated: np.ndarray | None
    timed: TimedCall | None = None
    is_recomputed: bool = False
    """Whether a recomputation has asked for it."""


class BalancedCalls(AbstractCallPolicy):
    """Decides how each call of one layer runs under a plan that replicates copies, has a memory budget, or both.

    Args:
        compiled: the compiled plan of the layer.
        policy: the replication policy to use instead of the one that the plan names; None for the plan's.
        num_experts: number of experts of the layer.
        dim: width of a token.

    Raises:
        InputError: if the plan has `replication="arbiter"` and `policy` is not an `Arbiter`.
    """

    def __init__(
        self, compiled: Compiled, policy: AbstractReplicationPolicy | None, num_experts: int, dim: int
    ) -> None:
        super().__init__(compiled)
        self._num_experts, self._dim = num_experts, dim
        self.budget = MemoryBudget(compiled, num_experts, None if policy is None else policy.costs)
        if compiled.replicates and policy is None:
            policy = REPLICATION_POLICIES[compiled.plan.replication](ReplicationCosts())
        self._policy = policy if compiled.replicates else None
        self._arbitration: Arbitration | None = None
        self.learns = False
        """Whether ranks exchange measured times and speeds, and decide by them."""
        self.links: LinkTimes = {}
        """Speed of links relative to the costs, used from the next call on. Must be set between the same calls on all ranks."""
        if compiled.options:
            if not isinstance(self._policy, Arbiter):
                raise InputError(
                    f"replication=arbiter was given the policy {type(self._policy).__name__}: give an Arbiter, or choose "
                    "another replication"
                )
            self._arbitration = self._policy.start(compiled.plan, [option.plan for option in compiled.options])
            self._evaluating = self._policy.start(compiled.plan, [option.plan for option in compiled.options])
            self._moves = MoveArbiter(self._policy)
            self.learns = self._policy.learn and self._arbitration.goes_by_times
        self._clock, self._work = CallClock(compiled.grid.world), WorkMeter()
        self.meter = self._work.watch if self.learns else None
        self._thread: ThreadPoolExecutor | None = None
        self._pause = self._waited = 0.0
        self._weighing: Weighing | None = None
        self._weighings: dict[int, Weighing] = {}
        self._number = 0
        self._decisions: deque[tuple[Weighing | CallDecision, float]] = deque(maxlen=KEPT)
        self._decided_by_call = WeakIdKeyDictionary()

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks if they run the same programs with the same policy settings."""
        if self._policy is None:
            return self.compiled.digest
        return hashlib.blake2b(self.compiled.digest + self._policy.settings_text().encode(), digest_size=16).digest()

    def tell(self) -> Sequence[float]:
        """Return the time of an earlier call, the number and hash of this rank's last decision, and the seconds per row."""
        if not self.learns:
            return super().tell()
        last_done = max((number for number, made in self._weighings.items() if made.done()), default=0)
        digest = self._weighings[last_done].result()[1].digest if last_done else 0
        return [*self._clock.tell(), float(last_done), float(digest), self._work.seconds]

    def refuse_padding(self) -> None:
        """See `MemoryBudget.refuse_padding`."""
        self.budget.refuse_padding()

    def choose(self, record: RoutingRecord, call: CountedCall) -> Chosen:
        """Return the policy's choice, changed if the memory budget requires it."""
        compiled, replicated = self._select(record, call.copies, call.units)
        compiled, replicated, cut = self.budget.hold(compiled, replicated, call)
        return Chosen(compiled, replicated, None if cut is None else partial(run_slices, cut))

    def _select(self, record: RoutingRecord, copies: np.ndarray, units: int) -> tuple[Compiled, np.ndarray | None]:
        """Return the programs of a call and its replicated copies, (world, num_experts, ep) int64, or None if it replicates
        none."""
        if self._policy is None:
            return self.compiled, None
        load = self._load(copies, units)
        if self._arbitration is None:
            replicated = self._policy.decide(load)
            compiled = for_call(self.compiled, replicated)
            return compiled, replicated if compiled.replicates else None
        decided: _DecidedCall | None = self._decided_by_call.get(record.by_rank)
        if decided is None:
            decided = self._decide_early(record, load) if self._all_ranks_exchange(record) else self._decide_now(load)
            self._decided_by_call[record.by_rank] = decided
        else:
            decided.is_recomputed = True
        return self.compiled.options[decided.program], decided.replicated

    def _load(self, copies: np.ndarray, units: int) -> CallLoad:
        return CallLoad(self.compiled.grid, copies, self._num_experts, units, self._dim)

    def timed(self, record: RoutingRecord, chosen: Chosen, program: Callable[[], Tensor]) -> Tensor:
        """Run a call's program and time it, unless the budget changed the arbiter's choice: then its time teaches nothing."""
        decided: _DecidedCall | None = self._decided_by_call.get(record.by_rank)
        if decided is None or decided.timed is None or chosen.replicated is not decided.replicated:
            return program()
        if chosen.compiled is not self.compiled.options[decided.program]:
            return program()
        if not decided.is_recomputed:
            return decided.timed.ran(program())
        try:
            return program()
        finally:
            decided.timed.ran_again()

    def stays(self, move: SampleMove) -> bool:
        """Return whether samples stay in a call that might move them. Then the layer runs as without moves.

        Args:
            move: the move of the call; it keeps the decision.
        """
        if self._arbitration is None:
            return False
        if move.stays is None:
            if move.goal is not None:
                move.stays = move.before.same_as(move.goal)
            else:
                self._finish()
                move.stays = not self._moves.prefers_moving()
                move.goal = move.before if move.stays else None
        return move.stays

    def note_move(self, record: RoutingRecord, move: SampleMove, copies: np.ndarray, units: int) -> None:
        """Record a call in which samples move.

        Args:
            record: the record of the call's routing.
            move: the move of the samples.
            copies: (world, num_experts) int64: copies of each origin for each expert.
            units: hidden units of one shard of an expert.
        """
        arbitration = self._arbitration
        if arbitration is None or record.by_rank in self._decided_by_call:
            return
        started, self._waited = time.thread_time(), 0.0
        load = self._load(copies, units)
        self._finish()
        if self._all_ranks_exchange(record):
            arbitration.hear(self._clock.hear(_sent_numbers(record)))
            decision = arbitration.weigh(arbitration.pick(load), call=None)
        else:
            decision = arbitration.choose(load)
        decision = self._moves.note_move(move, decision, self._dim)
        self._decisions.append((decision, time.thread_time() - started + self._waited))
        self._decided_by_call[record.by_rank] = _DecidedCall(decision.program, decision.replicated)

    def take(self) -> list[CallDecision]:
        """Return the arbiter's decisions since the last `take`, oldest first."""
        decisions = []
        for pending, seconds in self._decisions:
            decision = pending if isinstance(pending, CallDecision) else pending.result()[0]
            decisions.append(replace(decision, decision_seconds=seconds))
        self._decisions.clear()
        return decisions

    def _all_ranks_exchange(self, record: RoutingRecord) -> bool:
        """Return whether all ranks exchange times. They do not if each tensor-parallel group exchanges counts on its own."""
        gathered = record.gathered
        return self.learns and gathered is not None and len(gathered.values) == self.compiled.grid.world

    def _decide_early(self, record: RoutingRecord, load: CallLoad) -> _DecidedCall:
        """Return the decision that was made during the last call, and start to decide the next call."""
        assert self._arbitration is not None
        assert record.by_rank is not None
        started, self._waited, sent = time.thread_time(), 0.0, _sent_numbers(record)
        call = self._clock.start(record.by_rank.device)
        is_timed = self._clock.is_timed(sent)
        arbitration = self._arbitration if is_timed else self._evaluating
        prepared = self._agreed_decision(sent) if is_timed else None
        if prepared is None:  # the first call, and calls in evaluation, which are not timed
            self._finish()
            arbitration.hear({}, self.speeds, self.links)
        pick = arbitration.pick(load) if prepared is None else prepared.fit(load)
        decided = _DecidedCall(pick.choice.program, pick.table, call)
        self._thread = self._thread or ThreadPoolExecutor(1, "arbiter")
        number = call.number if is_timed else None
        self._weighing = self._thread.submit(self._weigh, sent, arbitration, pick, number, dict(self.links))
        if is_timed:
            self._number += 1
            self._weighings[self._number] = self._weighing
        self._decisions.append((self._weighing, time.thread_time() - started + self._waited))
        return decided

    def _weigh(
        self,
        sent: list[list[float]],
        arbitration: Arbitration,
        pick: Pick,
        call: int | None,
        links: LinkTimes,
    ) -> tuple[CallDecision, Prepared]:
        """Decide the next call. Runs on the thread, after a pause in which this call issues its first messages.

        Args:
            sent: by rank, the numbers that it sent with the counts of this call.
            arbitration: makes the decision.
            pick: the choice that this call runs.
            call: the number of this call; None if it is not timed.
            links: `self.links` at the start of the call.
        """
        time.sleep(self._pause)
        assert self._arbitration is not None
        load, call_seconds = pick.replicas[0].load, self._clock.hear(sent)
        self._pause = min([PAUSE * each for each in call_seconds.values()], default=self._pause)
        self._work.least = int(load.copies.sum()) // (2 * self.compiled.grid.world * max(1, self.compiled.plan.chunks))
        self.speeds = speeds_of(np.array([of_rank[-1] for of_rank in sent])) or self.speeds
        self._arbitration.hear(call_seconds, self.speeds, links)
        decision = arbitration.weigh(pick, call=call)
        assert arbitration.prepared is not None
        return decision, arbitration.prepared

    def _agreed_decision(self, sent: list[list[float]]) -> Prepared | None:
        """Return the latest decision that all ranks have; None before the first one.

        Args:
            sent: by rank, the numbers that it sent with the counts of this call.

        Raises:
            RuntimeError: on every rank, if ranks sent different hashes of the same decision.
        """
        ready = min(of_rank[3] for of_rank in sent)
        digests = {rank: of_rank[4] for rank, of_rank in enumerate(sent) if of_rank[3] == ready}
        first = next(iter(digests.values()))
        if others := [rank for rank, digest in digests.items() if digest != first]:
            raise RuntimeError(
                f"arbiter: after call {int(ready)} of a layer, ranks {others} decided differently from the first rank"
            )
        if not self._number:
            return None
        number_to_use = max(int(ready), self._number - LAG, 1)
        for number in [each for each in self._weighings if each < number_to_use]:
            del self._weighings[number]
        return self._result(self._weighings[number_to_use])[1]

    def _result(self, weighing: Weighing) -> tuple[CallDecision, Prepared]:
        """Return the thread's result, and add the time spent waiting for it to `_waited`."""
        started = time.perf_counter()
        result = weighing.result()
        self._waited += time.perf_counter() - started
        return result

    def _decide_now(self, load: CallLoad) -> _DecidedCall:
        """Decide by the model, from the counts of the call itself."""
        assert self._arbitration is not None
        self._arbitration.hear({}, (), self.links)
        decision = self._arbitration.choose(load)
        self._moves.note_others(decision)
        self._decisions.append((decision, decision.decision_seconds))
        return _DecidedCall(decision.program, decision.replicated)

    def _finish(self) -> None:
        """Wait until the last call's thread has finished."""
        if self._weighing is not None:
            self._moves.note_others(self._result(self._weighing)[0])
            self._weighing = None


class MoveArbiter:
    """Decides for one layer whether samples move, or the arbiter's other options are used.

    Args:
        settings: the settings of the layer's arbiter.
    """

    def __init__(self, settings: Arbiter) -> None:
        self._settings = settings
        self._tried: tuple[SampleMove, float, int] | None = None
        """The last call in which samples moved, its predicted seconds if it had been left alone, and the width of a token."""
        self._share: float | None = None
        """Predicted time with moving samples, relative to leaving the call alone; None before the first move."""
        self._other = 1.0
        """The same ratio for the best other option."""
        self._moves, self._calls = True, 0

    def prefers_moving(self) -> bool:
        """Return whether samples may move in the next call."""
        self._calls += 1
        self._look_back()
        if self._share is None or self._calls >= self._settings.weigh_every:
            self._calls = 0
            return True
        moving, margin = self._share, 1 - self._settings.margin
        self._moves = moving < 1 and not self._other < margin * moving if self._moves else moving < margin * self._other
        return self._moves

    def note_others(self, decision: CallDecision) -> None:
        """Record how good the arbiter's choice is, relative to leaving the call alone.

        Args:
            decision: the decision of the layer's arbiter for this call.
        """
        if decision.is_trial:
            return
        alone = decision.seconds.get(ALONE, 0.0)
        self._other = decision.seconds[decision.option] / alone if alone else 1.0

    def note_move(self, move: SampleMove, decision: CallDecision, dim: int) -> CallDecision:
        """Record that samples move in this call. Its gain is computed when the next call starts.

        Args:
            move: the move of the call.
            decision: what the arbiter would have decided if samples stayed.
            dim: width of a token.

        Returns:
            The decision to move, in the arbiter's form.
        """
        self.note_others(decision)
        if move.goal is None:
            self._tried = move, decision.seconds.get(ALONE, 0.0), dim
        (rows, _), (token_bytes, _) = decision.rows, decision.token_bytes
        before = replace(decision, rows=(rows, rows), token_bytes=(token_bytes, token_bytes), weight_bytes=0)
        return replace(before, option=RELOCATE, program=0, replicated=None, is_trial=False)

    def _look_back(self) -> None:
        if self._tried is None:
            return
        (move, alone_seconds, dim), self._tried = self._tried, None
        saved = saved_seconds(move, self._settings.costs, dim)
        share = 1 - saved / alone_seconds if alone_seconds else 1.0
        memory = self._settings.memory
        self._share = share if self._share is None else (1 - memory) * share + memory * self._share


def saved_seconds(move: SampleMove, costs: ReplicationCosts, dim: int) -> float:
    """Return the seconds that a move saves on average per rank, for this layer's results and the next layer's copies together.

    Args:
        move: a move that was decided.
        costs: rates of the machine.
        dim: width of a token.
    """
    unmoved, moved = move.volumes()
    machine: Machine = costs.machine
    row_bits = 8 * dim * costs.element_bytes * (2 if costs.backward else 1)
    inside, across = unmoved.intra - moved.intra, unmoved.inter - moved.inter
    seconds = inside / machine.intra_gbps + across / machine.inter_gbps
    return row_bits * seconds / 1e9 / move.before.ranks


def _sent_numbers(record: RoutingRecord) -> list[list[float]]:
    """Return the `NUMBERS` numbers that each rank sent with a call's counts."""
    assert record.gathered is not None
    numbers: list[list[float]] = record.gathered.extras_on_host[:, -NUMBERS:].tolist()
    return numbers


def calls_under(
    compiled: Compiled, policy: AbstractReplicationPolicy | None, num_experts: int, dim: int
) -> AbstractCallPolicy:
    """Return the call policy of a layer; the arguments are those of `BalancedCalls`."""
    if not compiled.replicates and compiled.plan.memory_budget is None:
        return PlainCalls(compiled)
    return BalancedCalls(compiled, policy, num_experts, dim)


def decisions_of(calls: AbstractCallPolicy | None) -> list[CallDecision]:
    """Return an arbiter's decisions since the last time, oldest first; [] if the policy has no arbiter."""
    return calls.take() if isinstance(calls, BalancedCalls) else []


def hear_links(calls: AbstractCallPolicy, times: LinkTimes) -> bool:
    """Give current link speeds to an arbiter that learns, instead of those it started with. Return whether there is one.

    All ranks call this between the same calls.
    """
    if not isinstance(calls, BalancedCalls) or not calls.learns:
        return False
    calls.links = dict(times)
    return True


def bare_of(calls: AbstractCallPolicy) -> Compiled:
    """Return the programs under which samples may move: the arbiter's without replication, else the plan's."""
    return calls.compiled.options[0] if calls.compiled.options else calls.compiled
