"""The arbiter: for each call of a layer, whether tokens, weights or nothing special moves; it learns from what calls took.

Every rank has the counts of all ranks after the one exchange of a call, and by the same message what earlier calls took on
every rank. So all of them come to the same option without asking each other. The option with the least seconds runs, by the
model corrected with what was measured, unless the last one is about as good; and as soon as nothing gains, the call is left
alone again. Options that may well be faster are tried, now and then, until that is known.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.balance.replication.cost import CallLoad, LinkTimes, ReplicaLoad, ReplicationCosts
from moesaic.balance.replication.policy import AbstractReplicationPolicy, AnyPlan, BarePlan, PolicyPlan
from moesaic.balance.replication.tables import spread
from moesaic.balance.selector.options import ALONE, NO_CHANGE, CallChoice, Option, Weigher, is_even, option_plans
from moesaic.balance.selector.prepared import Pick, Prepared
from moesaic.balance.selector.times import Times
from moesaic.errors import InputError
from moesaic.program.grid import Grid

JUMP = 0.15
"""Change of the seconds per copy, as a share, from which all limits are tried again, not only neighbours of the last best."""
REST = 5
"""Calls from one weighing of all options because the load changed to the next one, at least: a load that changes at every call
is not weighed at every one. An odd number, since loads may take turns by fours."""
TRIALS = 8
"""After so many trials, and so many more, the pause between them is twice as long."""
RAREST = 5
"""How often it gets twice as long: loads that are new after thousands of calls want trials too."""
HOPELESS = 3.0
"""Leaving alone is not even tried once where it is thought to take so many times the best: under such skew it may need memory
that is not there."""
RIVAL, RIVALS = 0.2, 2
"""By how much an option may seem slower than what was decided, as a share, and how many of them are weighed once more where a
call's load moved."""
UNANSWERED = 64
"""Calls that may be under way without anybody having told yet what they took."""


@dataclass(frozen=True)
class CallDecision:
    """What was decided for a call, and from what."""

    option: str
    """Its name, as `options.name_of` gives it."""
    program: int
    """Which of the plans that were offered runs."""
    replicated: np.ndarray | None
    """(world, num_experts, ep) int64: copies that other ranks than their experts' homes compute; None for none."""
    seconds: Mapping[str, float]
    """Of every option that was weighed, forward and backward: the model's, corrected by what was measured."""
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    """Copies that each place of ep computes, replica after replica: if the call is left alone, and as it was decided."""
    token_bytes: tuple[int, int]
    """Of tokens and their gradients that cross links: left alone, and as it was decided."""
    weight_bytes: int
    """Of weights and their gradients that cross links."""
    decision_seconds: float
    """Processor time of deciding in the way of the call, and the time for which an earlier decision was waited for. What other
    processes do on the same core meanwhile does not count."""
    weighing_seconds: float = 0.0
    """What weighing for the next call took beside this one: processor time of a thread of its own."""
    is_trial: bool = False
    """Whether the option ran to learn what it takes."""

    @property
    def copies_replicated(self) -> int:
        """Copies that another rank computes."""
        return 0 if self.replicated is None else int(self.replicated.sum())


def decision_of(
    pick: Pick, alone: Option, ran: Option, seconds: Mapping[str, float], started: float | None = None
) -> CallDecision:
    """Return what was decided for a call.

    Args:
        pick: what runs.
        alone: the option of leaving it alone.
        ran: the option that runs.
        seconds: of every option that was weighed.
        started: on `time.thread_time`, if deciding began then.
    """
    return CallDecision(
        option=pick.choice.name,
        program=pick.choice.program,
        replicated=pick.table,
        seconds=seconds,
        rows=(alone.cost.rows, ran.cost.rows),
        token_bytes=(alone.cost.token_bytes, ran.cost.token_bytes),
        weight_bytes=ran.cost.weight_bytes,
        decision_seconds=0.0 if started is None else time.thread_time() - started,
        is_trial=pick.is_trial,
    )


@dataclass(frozen=True, kw_only=True)
class Arbiter(AbstractReplicationPolicy):
    """How a layer's arbiter weighs options. Settings only: `start` makes one for a layer."""

    costs: ReplicationCosts = field(default_factory=ReplicationCosts)
    """Rates of the machine; `cost.Machine`'s unless a cluster or a profile gave others."""
    margin: float = 0.05
    """Leave an option only for one that is faster by this share; by more where few calls of either were measured, down to half
    of it where many were."""
    memory: float = 0.25
    """How much earlier calls count, 0 to below 1: each call's weight is this share of the next one's."""
    part_us: float = 100.0
    """Microseconds that each further part of a pass costs, for launching it, where a call goes step by step."""
    weigh_every: int = 17
    """Calls of about the same load until all options are weighed again; between, only the last one's table is made anew."""
    at_most: int = 8
    """Experts that one place may be replicated for its own copies; they need memory for weights and gradients."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By option: what its modelled seconds are multiplied by, where a simulation says that the model is off."""
    learn: bool = True
    """Correct the model by what calls of the layer take, and try options that may be faster."""
    optimism: float = 0.3
    """By how much an option that never ran may be faster than it is thought to be: one within that of the best is tried."""
    trial_every: int = 1
    """Calls from one of the first trials to the next, at least; it grows with each dozen of them."""

    def __post_init__(self) -> None:
        for name in ("margin", "memory", "optimism"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"arbiter.{name}={getattr(self, name)}: choose a share of at least 0 and below 1")
        for name in ("at_most", "weigh_every", "trial_every"):
            if getattr(self, name) < 1:
                raise InputError(f"arbiter.{name}={getattr(self, name)}: must be at least 1")

    def option_plans(self, plan: AnyPlan, grid: Grid) -> Iterator[AnyPlan]:
        """Return the plans whose programs it chooses from: the plan alone, with replication, with other r, step by step."""
        return option_plans(plan, grid)

    def start(self, plan: PolicyPlan, plans: Sequence[PolicyPlan]) -> Arbitration:
        """Return the arbiter of one layer.

        Args:
            plan: of the layer.
            plans: of the programs that it may run, the plan without replication first.
        """
        return Arbitration(self, plan, plans)

    def decide(self, load: CallLoad) -> np.ndarray:
        """Return the cheapest table of replicated copies for a call alone, as replication policies do; (world,
        num_experts, ep) int64."""
        plan = BarePlan(replication="spill")
        replicated = Arbitration(self, plan, [BarePlan(), plan]).choose(load).replicated
        return np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64) if replicated is None else replicated


@dataclass(frozen=True)
class _Asked:
    """A call of which nobody told yet what it took."""

    choice: CallChoice
    load: float
    modelled: float


class Arbitration:
    """The arbiter of one layer: what it decided last, and how options fared of late.

    A call is decided in one of two ways. `choose` decides it at once, by the model. Else `pick` says what was decided for it
    already and makes the tables; then `weigh` decides the next call, from this one's counts, while this one runs.

    Args:
        settings: how it weighs.
        plan: of the layer.
        plans: of the programs that it may run, the plan without replication first.
    """

    goes_by_times = True
    """Whether it may decide by measured times: `pick` and `weigh` in place of `choose`."""

    def __init__(self, settings: Arbiter, plan: PolicyPlan, plans: Sequence[PolicyPlan]) -> None:
        self.settings, self.plan, self.plans = settings, plan, tuple(plans)
        self.last = NO_CHANGE
        """What was thought best last."""
        self.times = Times(settings.optimism)
        """What was measured."""
        self.weigher = Weigher(
            plan, plans, settings.costs, at_most=settings.at_most, part_us=settings.part_us, factors=settings.factors,
        )  # fmt: skip
        self._trial: CallChoice | None = None
        self._since_trial = self._trials = 0
        self._shares: dict[str, float] = {}
        self._choices: dict[str, CallChoice] = {}
        self._contents: dict[str, bytes] = {}
        self._weighed_at, self._change = 0.0, np.inf
        self._calls_until, self._since_change = 0, REST
        self.prepared: Prepared | None = None
        """What the next call runs; None before the first one."""
        self._asked: dict[int, _Asked] = {}
        self._ran: set[int] = set()

    def choose(self, load: CallLoad) -> CallDecision:
        """Return the decision for a call, from its own counts and the model; the same on all ranks.

        Where all ranks have alike to do, the call is left alone: what is best then the plan says already. The last option's
        table is made anew as long as the load is about the one for which all options were weighed.

        Args:
            load: of the call.
        """
        started, found = time.thread_time(), self.weigher.replica_loads(load)
        options = [self.weigher.alone(found)]
        if all(is_even(replica, self.settings.margin) for replica in found):
            self._calls_until = 0
        elif not self._is_due(_load_of(found, options[0])):
            again = self._again(found, options[0])
            gains = again is None or again.seconds < options[0].seconds
            options = [*options, *([again] if again else [])] if gains else self._all(found, options[0])
        else:
            options = self._all(found, options[0])
        by_name = {each.name: each for each in options}
        seconds = {name: each.seconds for name, each in by_name.items()}
        self._settle(seconds, 0.0, among=by_name)
        chosen = by_name[self.last.name]
        pick = Pick(chosen.choice, tuple(found), spread(found, chosen.replicated))
        return decision_of(pick, options[0], chosen, seconds, started)

    def offers(self, load: CallLoad) -> list[tuple[Option, np.ndarray | None]]:
        """Return the options for a call, with the table that each replicates, (world, num_experts, ep) int64; decides
        nothing."""
        found = self.weigher.replica_loads(load)
        options = self.weigher.all(found, self.weigher.alone(found), anew=True)
        return [(option, spread(found, option.replicated)) for option in options]

    def pick(self, load: CallLoad) -> Pick:
        """Return what a call runs: what was decided during the one before it; the first one is decided here.

        Args:
            load: of the call.
        """
        if self.prepared is None:
            found = self.weigher.replica_loads(load)
            options = self._all(found, self.weigher.alone(found))
            self._settle({each.name: each.seconds for each in options}, _load_of(found, options[0]))
            self._prepare(found, {}, 0.0)
            assert self.prepared is not None
        return self.prepared.fit(load)

    def hear(self, told: Mapping[int, float], speeds: tuple[float, ...] = (), links: LinkTimes | None = None) -> None:
        """Take down what earlier calls took; all ranks are told the same.

        Args:
            told: by number of a call, its seconds, forward and backward, on the slowest rank.
            speeds: of the ranks, where they were measured; () for what the costs say.
            links: inside nodes or between them, how many times as fast as the costs say.
        """
        self.weigher.hear(speeds, links or {})
        for number, seconds in told.items():
            asked = self._asked.pop(number, None)
            if asked is not None:
                self.times.note(asked.choice.name, asked.choice.program, asked.load, asked.modelled, seconds)

    def weigh(self, pick: Pick, *, call: int | None) -> CallDecision:
        """Decide what the next call runs; all ranks with the same numbers.

        Args:
            pick: of this call.
            call: its number; None if its time will not be known, since it ran something else or has no backward pass. The
                next call is no trial then.

        Returns:
            what was decided for this call.
        """
        started, found = time.thread_time(), self.weigher.replica_loads(pick.found[0].load)
        alone = self.weigher.alone(found)
        load = _load_of(found, alone)
        ran = alone if pick.choice.name == ALONE else self.weigher.priced(pick.choice, pick.replicated, found, alone)
        self._ask(call, pick.choice, load, ran.seconds)
        options = self._all(found, alone) if self._is_due(load) else [alone, ran]
        thought = self._settle({each.name: each.seconds for each in options}, load)
        self._try(thought, load, may_try=call is not None)
        self._prepare(found, thought, load)
        machine, (name, program) = self.times.machine(), (pick.choice.name, pick.choice.program)
        corrected = {option: alone.seconds * machine * each for option, each in thought.items()}
        corrected.setdefault(name, ran.seconds * machine * self.times.factor(name, program, load))  # no option any more
        decision = decision_of(pick, alone, ran, corrected)
        return replace(decision, weighing_seconds=time.thread_time() - started)

    def _prepare(self, found: Sequence[ReplicaLoad], thought: Mapping[str, float], load: float) -> None:
        """Prepare the next call, as far as that is possible without its counts."""
        if self._trial is not None:
            self.prepared = Prepared(self.weigher, self._trial, True, found)
            return
        near = sorted((seconds, name) for name, seconds in thought.items() if name != self.last.name)
        most = (1 + RIVAL) * thought.get(self.last.name, 0.0)
        rivals = {self._contents[name]: self._choices[name] for seconds, name in reversed(near) if seconds <= most}
        rivals.pop(self._contents.get(self.last.name, b""), None)
        choices = [self.last, *list(reversed(rivals.values()))[:RIVALS]]
        factors = {each: self.times.factor(each.name, each.program, load) for each in choices}
        self.prepared = Prepared(self.weigher, self.last, False, found, factors)

    def _ask(self, call: int | None, choice: CallChoice, load: float, modelled: float) -> None:
        """Wait for what a call takes, unless it is the first one of its program, which makes what later ones find."""
        if call is None:
            return
        if choice.program in self._ran:
            self._asked[call] = _Asked(choice, load, modelled)
        self._ran.add(choice.program)
        while len(self._asked) > UNANSWERED:
            del self._asked[next(iter(self._asked))]

    def _is_due(self, load: float) -> bool:
        """Whether all options are to be weighed: for another load than last time, or after so many calls."""
        self._calls_until, self._since_change = self._calls_until - 1, self._since_change + 1
        self._change = abs(load - self._weighed_at) / self._weighed_at if self._weighed_at else np.inf
        changed = self._change > 2 * self.settings.margin and self._since_change >= REST
        self._since_change = 0 if changed and self._weighed_at else self._since_change
        return self._calls_until <= 0 or changed

    def _all(self, found: Sequence[ReplicaLoad], alone: Option) -> list[Option]:
        """Return all options for a call, leaving it alone first."""
        options = self.weigher.all(found, alone, anew=self._change > JUMP)
        self._weighed_at, self._calls_until, self._change = _load_of(found, alone), self.settings.weigh_every, 0.0
        self._choices = {each.name: each.choice for each in options}
        self._contents = {each.name: each.content for each in options}
        return options

    def _again(self, found: Sequence[ReplicaLoad], alone: Option) -> Option | None:
        """Return the last choice's option for this call; None if it was leaving alone, or has nothing left to replicate."""
        replicated = self.weigher.tables(self.last.recipe, found)
        if self.last.name == ALONE or replicated is None:
            return None
        return self.weigher.priced(self.last, replicated, found, alone)

    def _settle(
        self, seconds: Mapping[str, float], load: float, among: Collection[str] | None = None
    ) -> dict[str, float]:
        """Decide what seems best: the last option unless another is faster by the margin, or it gains nothing any more.

        Args:
            seconds: modelled, of the options that were weighed for this call.
            load: of the call, as `Times` wants it.
            among: options that may be chosen; None for all that were weighed when all were.

        Returns:
            what each of them is thought to take, in units of leaving alone by the model.
        """
        memory, margin = self.settings.memory, self.settings.margin
        now = {name: each / seconds[ALONE] if seconds[ALONE] else 1.0 for name, each in seconds.items()}
        for name, share in now.items():
            self._shares[name] = (1 - memory) * share + memory * self._shares.get(name, share)
        thought = {
            name: self._shares[name] * self.times.factor(name, self._choices.get(name, NO_CHANGE).program, load)
            for name in (self._choices if among is None else among)
        }  # fmt: skip
        best = min(thought, key=lambda name: (thought[name], name != ALONE))
        last = self.last.name if self.last.name in thought else ALONE
        if thought[best] < (1 - self.times.margin(margin, best, last, load)) * thought[last]:
            last = best
        if last in now and now[last] * thought[last] >= self._shares[last] * thought[ALONE]:
            last = ALONE
        self.last = NO_CHANGE if last == ALONE else self._choices[last]
        return thought

    def _try(self, thought: Mapping[str, float], load: float, may_try: bool) -> None:
        """Decide whether the next call is a trial."""
        self._trial, self._since_trial = None, self._since_trial + 1
        # Odd and even pauses, since loads may take turns; they double, so that what is never settled costs ever less.
        pause = self.settings.trial_every + self._trials % 2 + 2 ** min(self._trials // TRIALS, RAREST) - 1
        if not may_try or self._since_trial < pause:
            return
        different = {self._contents[name]: name for name in (*reversed(list(thought)), self.last.name)}
        unsure = {each: thought[each] for each in different.values()}
        is_sane = thought[ALONE] < HOPELESS * min(thought.values())
        knows_alone = self.times.ran(ALONE) or not is_sane
        name = self.times.worth_trying(unsure, self.last.name, load) if knows_alone else ALONE
        if name is None:
            return
        self._trial, self._since_trial, self._trials = self._choices[name], 0, self._trials + 1
        if self._trial.program in self._ran:
            self.times.try_out(name, self._trial.program, load)


def _load_of(found: Sequence[ReplicaLoad], alone: Option) -> float:
    """Return what tells loads apart: the seconds of a copy, which grow with skew, left alone."""
    return alone.seconds / max(1, sum(int(replica.copies.sum()) for replica in found))
