"""The arbiter: chooses for each call of a layer how tokens and weights move, and learns from the times of earlier calls.

After the one exchange of a call, every rank has the counts of all ranks, and the times of earlier calls on all ranks. From
these all ranks choose the same option without further messages. The fastest option runs, by the model corrected with measured
times, unless the previous option is about as good. As soon as no option gains, calls are left alone again. Options that may be
faster are tried from time to time until their times are known.
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
"""Change of the seconds per copy, as a share, above which all limits are tried and not only neighbours of the last best one."""
REST = 5
"""Fewest calls between two comparisons of all options that a change of load causes; a load may change in every call. The number
is odd, since loads may alternate with a period of four."""
TRIALS = 8
"""Number of trials after which the pause between trials doubles."""
RAREST = 5
"""How often the pause doubles at most, since loads that are new after thousands of calls need trials too."""
HOPELESS = 3.0
"""Leaving a call alone is never tried if it is predicted to take this many times as long as the best option: under such skew
memory may not suffice."""
RIVAL, RIVALS = 0.2, 2
"""The share by which a rival option may be predicted slower than the chosen one, and the most rivals that are compared again
if the load of a call has changed."""
UNANSWERED = 64
"""Most calls for whose times the arbiter waits."""


@dataclass(frozen=True)
class CallDecision:
    """The decision for a call, with the predictions on which it is based."""

    option: str
    """Name of the option, as returned by `options.name_of`."""
    program: int
    """Index of the chosen plan among the plans of the arbiter."""
    replicated: np.ndarray | None
    """(world, num_experts, ep) int64: the replicated copies; None if nothing is replicated."""
    seconds: Mapping[str, float]
    """Seconds of every option that was compared, forward and backward, by the model corrected with measured times."""
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    """Copies that each place of ep computes, replica after replica: if the call is left alone, and by the decision."""
    token_bytes: tuple[int, int]
    """Bytes of tokens and their gradients that cross links: if the call is left alone, and by the decision."""
    weight_bytes: int
    """Bytes of weights and their gradients that cross links."""
    decision_seconds: float
    """Processor time of the decision that delays the call, plus the time of waiting for a decision that was still being
    prepared. The time of other processes on the same core is not included."""
    weighing_seconds: float = 0.0
    """Processor time of preparing the next call's decision, in a separate thread while this call runs."""
    is_trial: bool = False
    """Whether the option ran to measure its time."""

    @property
    def copies_replicated(self) -> int:
        """Number of copies that helpers compute."""
        return 0 if self.replicated is None else int(self.replicated.sum())


def decision_of(
    pick: Pick, alone: Option, ran: Option, seconds: Mapping[str, float], started: float | None = None
) -> CallDecision:
    """Return the record of a call's decision.

    Args:
        pick: the choice that runs.
        alone: the option of leaving the call alone.
        ran: the option that runs.
        seconds: the seconds of every option that was compared.
        started: the `time.thread_time` at which the decision began; None if it did not delay the call.
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
    """The settings of an arbiter, as a replication policy. `start` builds the arbiter of one layer."""

    costs: ReplicationCosts = field(default_factory=ReplicationCosts)
    """Rates of the cost model, from a cluster or a profile; by default those of `cost.Machine`."""
    margin: float = 0.05
    """Share by which another option must be faster to replace the previous one. The share is larger if few calls of the options
    were measured, and falls to half of this value if many were."""
    memory: float = 0.25
    """Weight of earlier calls, 0 to below 1: each call has this share of the weight of the next call."""
    part_us: float = 100.0
    """Microseconds to launch each further part of a pass, if a call runs step by step."""
    weigh_every: int = 17
    """Number of calls under similar loads until all options are compared again. In between, only the table of the last option
    is built from each call's counts."""
    at_most: int = 8
    """Most experts that may be replicated to one place as shadows; they need memory for weights and gradients."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By name of an option, the factor by which a simulation corrects its modelled seconds."""
    learn: bool = True
    """Correct the model by the measured times of calls, and try options that may be faster."""
    optimism: float = 0.3
    """Share by which an option that never ran may be faster than predicted; it is tried if it might thus be the fastest."""
    trial_every: int = 1
    """Fewest calls from one of the first trials to the next; the pauses grow after every eight trials."""

    def __post_init__(self) -> None:
        for name in ("margin", "memory", "optimism"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"arbiter.{name}={getattr(self, name)}: choose a share of at least 0 and below 1")
        for name in ("at_most", "weigh_every", "trial_every"):
            if getattr(self, name) < 1:
                raise InputError(f"arbiter.{name}={getattr(self, name)}: must be at least 1")

    def option_plans(self, plan: AnyPlan, grid: Grid) -> Iterator[AnyPlan]:
        """Return the plans among which the arbiter chooses: without replication, with it, with other r, and step by step."""
        return option_plans(plan, grid)

    def start(self, plan: PolicyPlan, plans: Sequence[PolicyPlan]) -> Arbitration:
        """Return the arbiter of one layer.

        Args:
            plan: the plan of the layer.
            plans: the plans of the programs that the layer may run, the plan without replication first.
        """
        return Arbitration(self, plan, plans)

    def decide(self, load: CallLoad) -> np.ndarray:
        """Return the fastest table of replicated copies by the model, from this call's counts only, (world, num_experts, ep)
        int64."""
        plan = BarePlan(replication="spill")
        replicated = Arbitration(self, plan, [BarePlan(), plan]).choose(load).replicated
        return np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64) if replicated is None else replicated


@dataclass(frozen=True)
class _PendingCall:
    """A call that ran and for whose measured time the arbiter waits."""

    choice: CallChoice
    load: float
    modelled: float


class Arbitration:
    """The arbiter of one layer, with its last decision and the measured times of its options.

    A call is decided in one of two ways. `choose` decides it at once, by the model. Alternatively `pick` returns the choice
    that was prepared earlier, with tables for the call's counts; while the call runs, `weigh` then decides the next one from
    these counts.

    Args:
        settings: the settings of the arbiter.
        plan: the plan of the layer.
        plans: the plans of the programs that the layer may run, the plan without replication first.
    """

    goes_by_times = True
    """Whether the arbiter may decide by measured times, with `pick` and `weigh` instead of `choose`."""

    def __init__(self, settings: Arbiter, plan: PolicyPlan, plans: Sequence[PolicyPlan]) -> None:
        self.settings, self.plan, self.plans = settings, plan, tuple(plans)
        self.last = NO_CHANGE
        """The choice that was predicted to be best last."""
        self.times = Times(settings.optimism)
        """The measured times."""
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
        """The prepared decision for the next call; None before the first call."""
        self._pending: dict[int, _PendingCall] = {}
        self._ran: set[int] = set()

    def choose(self, load: CallLoad) -> CallDecision:
        """Return the decision for a call, from its own counts and the model; the same on all ranks.

        Under an even load the call is left alone, since the plan was chosen for that case. As long as the load is similar to
        that of the last comparison of all options, only the table of the last option is built again.

        Args:
            load: the load of the call.
        """
        started, replicas = time.thread_time(), self.weigher.replica_loads(load)
        options = [self.weigher.alone(replicas)]
        if all(is_even(replica, self.settings.margin) for replica in replicas):
            self._calls_until = 0
        elif not self._is_due(_load_of(replicas, options[0])):
            repeated = self._last_option(replicas, options[0])
            gains = repeated is None or repeated.seconds < options[0].seconds
            options = (
                [*options, *([repeated] if repeated else [])] if gains else self._all_options(replicas, options[0])
            )
        else:
            options = self._all_options(replicas, options[0])
        by_name = {option.name: option for option in options}
        seconds = {name: option.seconds for name, option in by_name.items()}
        self._settle(seconds, 0.0, among=by_name)
        chosen = by_name[self.last.name]
        pick = Pick(chosen.choice, tuple(replicas), spread(replicas, chosen.replicated))
        return decision_of(pick, options[0], chosen, seconds, started)

    def offers(self, load: CallLoad) -> list[tuple[Option, np.ndarray | None]]:
        """Return all options for a call, each with its table of replicated copies, (world, num_experts, ep) int64, without
        deciding."""
        replicas = self.weigher.replica_loads(load)
        options = self.weigher.all(replicas, self.weigher.alone(replicas), anew=True)
        return [(option, spread(replicas, option.replicated)) for option in options]

    def pick(self, load: CallLoad) -> Pick:
        """Return the choice that was prepared during the previous call, fitted to this one. The first call is decided here.

        Args:
            load: the load of the call.
        """
        if self.prepared is None:
            replicas = self.weigher.replica_loads(load)
            options = self._all_options(replicas, self.weigher.alone(replicas))
            self._settle({option.name: option.seconds for option in options}, _load_of(replicas, options[0]))
            self._prepare(replicas, {}, 0.0)
            assert self.prepared is not None
        return self.prepared.fit(load)

    def hear(
        self, call_seconds: Mapping[int, float], speeds: tuple[float, ...] = (), links: LinkTimes | None = None
    ) -> None:
        """Record the times of earlier calls, which are the same on all ranks.

        Args:
            call_seconds: by number of a call, its seconds, forward and backward, on the slowest rank.
            speeds: measured speeds of the ranks; () for those of the costs.
            links: rates of links inside and between nodes, relative to the costs.
        """
        self.weigher.set_rates(speeds, links or {})
        for number, seconds in call_seconds.items():
            call = self._pending.pop(number, None)
            if call is not None:
                self.times.note(call.choice.name, call.choice.program, call.load, call.modelled, seconds)

    def weigh(self, pick: Pick, *, call: int | None) -> CallDecision:
        """Prepare the decision for the next call, identically on all ranks, from the numbers of this call.

        Args:
            pick: the choice of this call.
            call: the number of this call; None if its time will not be measured, because it ran something else or has no
                backward pass. The next call is then no trial.

        Returns:
            the decision for this call.
        """
        started, replicas = time.thread_time(), self.weigher.replica_loads(pick.replicas[0].load)
        alone = self.weigher.alone(replicas)
        load = _load_of(replicas, alone)
        ran = alone if pick.choice.name == ALONE else self.weigher.priced(pick.choice, pick.replicated, replicas, alone)
        self._register(call, pick.choice, load, ran.seconds)
        options = self._all_options(replicas, alone) if self._is_due(load) else [alone, ran]
        predicted = self._settle({each.name: each.seconds for each in options}, load)
        self._plan_trial(predicted, load, may_try=call is not None)
        self._prepare(replicas, predicted, load)
        machine, (name, program) = self.times.machine(), (pick.choice.name, pick.choice.program)
        corrected = {option: alone.seconds * machine * each for option, each in predicted.items()}
        # An option that ran may not be among the options any more.
        corrected.setdefault(name, ran.seconds * machine * self.times.factor(name, program, load))
        decision = decision_of(pick, alone, ran, corrected)
        return replace(decision, weighing_seconds=time.thread_time() - started)

    def _prepare(self, replicas: Sequence[ReplicaLoad], predicted: Mapping[str, float], load: float) -> None:
        """Prepare the next call, as far as possible without its counts, for the predicted times of the options, `predicted`."""
        if self._trial is not None:
            self.prepared = Prepared(self.weigher, self._trial, True, replicas)
            return
        by_seconds = sorted((seconds, name) for name, seconds in predicted.items() if name != self.last.name)
        limit = (1 + RIVAL) * predicted.get(self.last.name, 0.0)
        rivals = {
            self._contents[name]: self._choices[name] for seconds, name in reversed(by_seconds) if seconds <= limit
        }
        rivals.pop(self._contents.get(self.last.name, b""), None)
        choices = [self.last, *list(reversed(rivals.values()))[:RIVALS]]
        factors = {choice: self.times.factor(choice.name, choice.program, load) for choice in choices}
        self.prepared = Prepared(self.weigher, self.last, False, replicas, factors)

    def _register(self, call: int | None, choice: CallChoice, load: float, modelled: float) -> None:
        """Register a call for the measurement of its time, unless it is the first call of its program, which has to warm up."""
        if call is None:
            return
        if choice.program in self._ran:
            self._pending[call] = _PendingCall(choice, load, modelled)
        self._ran.add(choice.program)
        while len(self._pending) > UNANSWERED:
            del self._pending[next(iter(self._pending))]

    def _is_due(self, load: float) -> bool:
        """Return whether all options must be compared: after a change of load, or after `Arbiter.weigh_every` calls."""
        self._calls_until, self._since_change = self._calls_until - 1, self._since_change + 1
        self._change = abs(load - self._weighed_at) / self._weighed_at if self._weighed_at else np.inf
        changed = self._change > 2 * self.settings.margin and self._since_change >= REST
        self._since_change = 0 if changed and self._weighed_at else self._since_change
        return self._calls_until <= 0 or changed

    def _all_options(self, replicas: Sequence[ReplicaLoad], alone: Option) -> list[Option]:
        """Return all options for a call, first that of leaving the call alone."""
        options = self.weigher.all(replicas, alone, anew=self._change > JUMP)
        self._weighed_at, self._calls_until, self._change = _load_of(replicas, alone), self.settings.weigh_every, 0.0
        self._choices = {option.name: option.choice for option in options}
        self._contents = {option.name: option.content for option in options}
        return options

    def _last_option(self, replicas: Sequence[ReplicaLoad], alone: Option) -> Option | None:
        """Return the option of the last choice for this call; None if that choice is `NO_CHANGE` or replicates nothing now."""
        replicated = self.weigher.tables(self.last.recipe, replicas)
        if self.last.name == ALONE or replicated is None:
            return None
        return self.weigher.priced(self.last, replicated, replicas, alone)

    def _settle(
        self, seconds: Mapping[str, float], load: float, among: Collection[str] | None = None
    ) -> dict[str, float]:
        """Set `last` to the best option: the previous one, unless another is faster by the margin or the previous one gains
        nothing any more.

        Args:
            seconds: modelled seconds of the options that were compared for this call.
            load: the load of the call, as in `Times`.
            among: the options that may be chosen; None for those of the last comparison of all options.

        Returns:
            the predicted time of each option that may be chosen, relative to the modelled time of leaving the call alone.
        """
        memory, margin = self.settings.memory, self.settings.margin
        relative = {name: each / seconds[ALONE] if seconds[ALONE] else 1.0 for name, each in seconds.items()}
        for name, share in relative.items():
            self._shares[name] = (1 - memory) * share + memory * self._shares.get(name, share)
        predicted = {
            name: self._shares[name] * self.times.factor(name, self._choices.get(name, NO_CHANGE).program, load)
            for name in (self._choices if among is None else among)
        }  # fmt: skip
        best = min(predicted, key=lambda name: (predicted[name], name != ALONE))
        last = self.last.name if self.last.name in predicted else ALONE
        if predicted[best] < (1 - self.times.margin(margin, best, last, load)) * predicted[last]:
            last = best
        if last in relative and relative[last] * predicted[last] >= self._shares[last] * predicted[ALONE]:
            last = ALONE
        self.last = NO_CHANGE if last == ALONE else self._choices[last]
        return predicted

    def _plan_trial(self, predicted: Mapping[str, float], load: float, may_try: bool) -> None:
        """Decide whether the next call is a trial, and of which option."""
        self._trial, self._since_trial = None, self._since_trial + 1
        # Pauses are alternately odd and even, since loads may alternate. They double, so that options whose times stay unclear
        # cost ever less.
        pause = self.settings.trial_every + self._trials % 2 + 2 ** min(self._trials // TRIALS, RAREST) - 1
        if not may_try or self._since_trial < pause:
            return
        different = {self._contents[name]: name for name in (*reversed(list(predicted)), self.last.name)}
        unsure = {each: predicted[each] for each in different.values()}
        is_sane = predicted[ALONE] < HOPELESS * min(predicted.values())
        knows_alone = self.times.ran(ALONE) or not is_sane
        name = self.times.worth_trying(unsure, self.last.name, load) if knows_alone else ALONE
        if name is None:
            return
        self._trial, self._since_trial, self._trials = self._choices[name], 0, self._trials + 1
        if self._trial.program in self._ran:
            self.times.try_out(name, self._trial.program, load)


def _load_of(replicas: Sequence[ReplicaLoad], alone: Option) -> float:
    """Return a measure of a call's load: the modelled seconds per copy if the call is left alone, which grow with skew."""
    return alone.seconds / max(1, sum(int(replica.copies.sum()) for replica in replicas))
