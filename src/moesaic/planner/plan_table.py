"""Tutel's dictionary (Hwang et al. 2023, section 3.3): learns during training which plan is fastest
at which load.

Loads share an entry by buckets. A race times the plans: each runs for a few steps, then the faster
half again, until one is left. That one and the first plan then run in turn, and the first plan
stays unless the other is faster in most pairs; so they do again when the other becomes slower than
the first plan was. Where a cluster is known, the entries are prefilled with predicted
seconds: plans that are predicted to be far slower stay out of the race, and its results, divided by
the predictions, correct the predictions at all other loads. A plan that seems faster at the current
loads takes over and is timed there. If steps no longer take what they took, a new race starts.

The table is deterministic: given the same loads and measured seconds, all ranks choose the same
plan. The caller must make the ranks agree on both first. A plan with a lossy codec runs only if the
caller lists the codec as tested.

A plan is named by its number in `PlanTable.plans`; the first plan is the first one that may run. A
load is the number of copies of the busiest expert, and a bucket the number of a range of loads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from moesaic.errors import InputError
from moesaic.planner.plan_race import ROUNDS, PairedSteps, Race
from moesaic.program.plan import Codec, Plan

VERSION = 2
"""Version of the saved state."""
KEPT = sum(ROUNDS)
"""Number of steps by which a plan counts as timed at a load: those of the winner of a race of eight
plans."""
RECENT = 7
"""Number of recent steps whose median is compared with the time that the plan had before."""
LOADS = 5
"""Number of recent loads over which plans are compared."""
Predict = Callable[[float], Sequence[float]]
"""Function of a load that returns the predicted seconds of a step under each plan."""


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Settings of a plan table."""

    rows_per_bucket: float = 128
    """Width of a bucket of loads that share an entry (Tutel's R). A load is the number of copies of
    the busiest expert."""
    hysteresis: float = 0.03
    """Share by which another plan must be faster to replace the running one."""
    optimism: float = 0.25
    """Share by which a plan may be faster than predicted: the first race leaves out plans that
    would still not be the best."""
    drift: float = 0.15
    """Relative change of step times that starts a new race; larger if step times vary a lot."""

    def __post_init__(self) -> None:
        if not (self.rows_per_bucket > 0 and math.isfinite(self.rows_per_bucket)):
            raise InputError(
                f"rows_per_bucket={self.rows_per_bucket}: must be a finite number above 0"
            )
        for name in ("hysteresis", "optimism", "drift"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(
                    f"{name}={getattr(self, name)}: choose a share of at least 0 and below 1"
                )


@dataclass
class Entry:
    """Times of one plan at one load."""

    predicted: float
    """Predicted seconds of a step."""
    measured: list[float] = field(default_factory=list)
    """Seconds of the first `KEPT` steps since the last race began. Their median is used, so that
    one slow step does not matter."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of plan."""

    step: int
    """Number of steps decided so far, in this run and earlier ones."""
    bucket: int
    """Bucket of the last load."""
    plan: int
    """Number of the plan that runs from this step on."""
    why: str
    """Reason: start, trial, fastest (of a race) or faster (at the current loads)."""


class PlanTable:
    """Chooses a plan before every step, and learns from the measured time of the step.

    Args:
        plans: the plans to choose from.
        predict: predicts the seconds of a step under each plan at a load; None if nothing is known
            about the machine, so that all plans race.
        settings: settings of the table; None for the defaults.
        load: the load that the first step probably has.
        tested: pairs of codecs (forward, backward) that the user has tested; other lossy plans
            never run.

    Raises:
        InputError: if no plan may run.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        predict: Predict | None = None,
        settings: TableSettings | None = None,
        *,
        load: float = 0.0,
        tested: Collection[tuple[Codec, Codec]] = (),
    ) -> None:
        self.plans = tuple(plans)
        self.settings = settings or TableSettings()
        self._predict = predict or (lambda _: [1.0] * len(self.plans))
        self._must_beat_first = predict is None
        """Whether the winner of a race must beat the first plan in turn; predictions that follow
        the load correct a disturbed race by themselves."""
        self.allowed = [
            number
            for number, plan in enumerate(self.plans)
            if plan.is_lossless or (plan.codec, plan.backward_codec) in tested
        ]
        if not self.allowed:
            raise InputError(
                "the plan table holds no plan that may be run: name a lossless one, or test "
                "the codec first"
            )
        self.entries: dict[int, list[Entry]] = {}
        """By bucket, an entry for each plan."""
        self.decisions: list[Decision] = []
        self.steps = 0
        """Number of steps so far."""
        self.explored = 0
        """Number of these that were part of a race."""
        self.switches = 0
        """Number of changes of plan."""
        self.races = 0
        """Number of races so far; more than one if step times drifted."""
        self.running: int | None = None
        """The plan of this step; None before the first step."""
        self.race: Race | PairedSteps | None = None
        self.timed: dict[int, float] = {}
        """Seconds of a step under each plan that the last finished race timed."""
        self._loads: deque[float] = deque([load], maxlen=LOADS)
        self._race_load = load
        """Load at which the plans of a race are compared."""
        self._trial_left = 0
        """Further steps of the plan that is being timed in a race."""
        self._unsettled = 0
        """Further steps that are not recorded, since the plan has just changed."""
        self._recent: deque[float] = deque(maxlen=RECENT)
        """Logarithms of the last step times over what the running plan took before."""

    def bucket_of(self, load: float) -> int:
        """Return the bucket of a load."""
        return int(load // self.settings.rows_per_bucket)

    def choose(self) -> int:
        """Return the number of the plan for the next step."""
        self.steps += 1
        if self.race is None and (not self.races or self._has_drifted()):  # a new race
            self.races += 1
            self._start_race()
        elif self.race is None and self._is_slower_than_the_first():
            # the running plan and the first one run in turn
            assert self.running is not None
            self.race = PairedSteps(self.running, self.allowed[0])
        if self.race is None:
            self._run_the_fastest()
        else:
            if not self._trial_left:
                self._next_trial(self.race)
            if self.race is not None:  # `_next_trial` may have ended it
                self._trial_left -= 1
                self.explored += 1
        assert self.running is not None
        return self.running

    def _run_the_fastest(self) -> None:
        """Let the plan that is estimated to be fastest take over if it is enough faster."""
        seconds = self.estimates()
        best = min(self.allowed, key=lambda plan: (seconds[plan], plan))
        if self.running is not None:
            limit = (1 - self.settings.hysteresis) * seconds[self.running]
            if seconds[best] >= limit:
                return
        self._run(best, "faster")

    def record(self, seconds: float, load: float = 0.0) -> None:
        """Record the time of the step; the first step after a change of plan is ignored, since it
        warms caches.

        Args:
            seconds: time of the slowest rank, the same on all ranks.
            load: load of the step. The time is scaled to the middle of the load's bucket, by the
                ratio of the predictions. Without that, two plans with steps at the two ends of a
                bucket would seem to differ by a tenth.
        """
        assert self.running is not None, "choose a plan first"
        self._loads.append(load)
        if self._unsettled:
            self._unsettled -= 1
            return
        entry = self._entries_of(self.bucket_of(load))[self.running]
        over_predicted = seconds / self._predicted(load, self.running)
        if self.race is not None:
            at_race_load = over_predicted * self._predicted(self._race_load, self.running)
            self.race.record(self.running, at_race_load)
        at_middle = over_predicted * entry.predicted  # of the bucket
        if len(entry.measured) < KEPT:
            entry.measured.append(at_middle)
        elif self.race is None:
            self._recent.append(math.log(at_middle / median(entry.measured)))

    def _start_race(self) -> None:
        """Forget all times, and let plans race: at first those that are predicted to be good, later
        all."""
        for entries in self.entries.values():
            for entry in entries:
                entry.measured.clear()
        self._race_load = fmean(self._loads)
        predicted = [self._predicted(self._race_load, plan) for plan in range(len(self.plans))]
        starters = self.allowed
        if self.races <= 1:  # the first race
            # a plan whose step takes (1 - optimism) of its prediction must still be the best
            limit = min(predicted[plan] for plan in self.allowed) / (1 - self.settings.optimism)
            starters = [plan for plan in self.allowed if predicted[plan] <= limit]
        self.race = Race(sorted(starters, key=lambda plan: predicted[plan]), self.settings.drift)
        self._trial_left = 0

    def _next_trial(self, race: Race | PairedSteps) -> None:
        """Run the plan that a race times next, or end a race that is over."""
        plan = race.next()
        if isinstance(race, Race) and race.is_void:  # step times drifted, so it begins anew
            self._start_race()
            assert self.race is not None
            self._next_trial(self.race)
        elif plan is not None:
            warm_up = 0 if plan == self.running else 1
            self._trial_left = race.steps + warm_up
            self._run(plan, "trial")
        else:
            self._recent.clear()
            self._end_race(race)

    def _end_race(self, race: Race | PairedSteps) -> None:
        """Let the winner of a race run beside the first plan, and after that the faster of both."""
        if isinstance(race, PairedSteps):
            self._settle(race)
            self.race = None
            self._run(race.faster, "fastest")
            return
        self.timed = race.times()
        winner = race.left[0]
        first = self.allowed[0]
        if winner == first or not self._must_beat_first:
            self.race = None
            self._run(winner, "fastest")
            return
        self.race = PairedSteps(winner, first)
        self._next_trial(self.race)

    def _settle(self, pairs: PairedSteps) -> None:
        """Replace the times of the two plans of the pairs by their times in the pairs, and multiply
        every other plan's times by the change of the winner's; in the entries of all buckets."""
        times = pairs.times()  # median seconds of the two plans
        change = times[pairs.winner] / self.timed[pairs.winner]
        self.timed = {plan: change * seconds for plan, seconds in self.timed.items()} | times
        for entries in self.entries.values():
            for plan, entry in enumerate(entries):
                if plan in pairs.seconds:
                    entry.measured = list(pairs.seconds[plan])
                else:
                    entry.measured = [change * seconds for seconds in entry.measured]

    def _is_slower_than_the_first(self) -> bool:
        """Return whether steps now take longer than they took under the first plan when it was
        timed."""
        first = self.allowed[0]
        if not self._must_beat_first or len(self._recent) < RECENT or self.running == first:
            return False
        if self.running is None or not {first, self.running} <= self.timed.keys():
            return False
        # `_recent` are logarithms of recent step times over the time that the plan had
        now = self.timed[self.running] * math.exp(median(self._recent))
        return now > (1 + self.settings.hysteresis) * self.timed[first]

    def _has_drifted(self) -> bool:
        """Return whether steps take another time than they took before, by more than their
        spread."""
        if len(self._recent) < RECENT or self.running is None:
            return False
        entries = self._entries_of(self.bucket_of(self._loads[-1]))
        before = entries[self.running].measured
        spread = 0.0
        if before:
            usual = median(before)
            spread = median(abs(math.log(seconds / usual)) for seconds in before)
        # times that vary a lot must change by more: by four times their median deviation
        return abs(median(self._recent)) > max(math.log1p(self.settings.drift), 4 * spread)

    def estimates(self) -> list[float]:
        """Return the estimated seconds of a step under each plan, the mean over the recent loads.

        At a load at which a plan was not timed, its prediction is corrected by the ratio of
        measured to predicted seconds that it has at other loads. A plan that never ran gets the
        usual ratio of the plans that did.
        """
        ratios: dict[int, list[float]] = {}
        for entries in self.entries.values():
            for plan, entry in enumerate(entries):
                if entry.measured:
                    ratios.setdefault(plan, []).append(median(entry.measured) / entry.predicted)
        ratio_of = {plan: median(at_loads) for plan, at_loads in ratios.items()}
        usual_ratio = median(ratio_of.values()) if ratio_of else 1.0

        def estimate(plan: int, load: float) -> float:
            """Return the estimated seconds of a plan at a load."""
            entry = self._entries_of(self.bucket_of(load))[plan]
            if len(entry.measured) >= KEPT:
                return median(entry.measured)
            return entry.predicted * ratio_of.get(plan, usual_ratio)

        return [
            fmean([estimate(plan, load) for load in self._loads]) for plan in range(len(self.plans))
        ]

    def state(self) -> dict[str, Any]:
        """Return the state of the table as plain data for JSON. A race that is running will begin
        anew."""
        measured = {
            str(bucket): [entry.measured for entry in entries]
            for bucket, entries in self.entries.items()
        }
        races = self.races if self.race is None else 0  # 0: a race begins with the next step
        return {
            "version": VERSION,
            "rows_per_bucket": self.settings.rows_per_bucket,
            "plans": [asdict(plan) for plan in self.plans],
            "measured": measured,
            "timed": {str(plan): seconds for plan, seconds in self.timed.items()},
            "loads": list(self._loads),
            "counts": [self.steps, self.explored, self.switches, races],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the measurements in a `state`; predictions are made again.

        Raises:
            InputError: if the state has another version, other buckets or other plans, or is
                damaged.
        """
        if (
            state.get("version") != VERSION
            or state.get("rows_per_bucket") != self.settings.rows_per_bucket
        ):
            raise InputError(
                f"has version {state.get('version')} and buckets of "
                f"{state.get('rows_per_bucket')} rows, but this table has version {VERSION} and "
                f"{self.settings.rows_per_bucket:g}: start anew, or set rows_per_bucket back"
            )
        if state.get("plans") != [asdict(plan) for plan in self.plans]:
            raise InputError("holds other plans than this table: start anew")
        try:
            self._read_measured(state)
        except (
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            OverflowError,
        ) as error:
            raise InputError(f"is damaged ({error!r}): delete the file to start anew") from error

    def _read_measured(self, state: dict[str, Any]) -> None:
        """Take over the measurements in a `state`; raises one of several errors if it is
        damaged."""
        above_zero = math.ulp(0.0)  # the smallest such number
        for bucket, measured in state["measured"].items():
            for entry, seconds in zip(self._entries_of(_whole(bucket)), measured, strict=True):
                entry.measured = _numbers(seconds, least=above_zero)[:KEPT]
        timed = state.get("timed", {})  # earlier states lack it
        plans = [_whole(plan) for plan in timed]
        for plan in plans:
            if plan not in self.allowed:
                raise ValueError(f"{plan} is not in list")
        self.timed = dict(zip(plans, _numbers(list(timed.values()), least=above_zero)))
        self._loads.extend(_numbers(state["loads"], least=0.0))
        self.steps, self.explored, self.switches, self.races = map(_whole, state["counts"])

    def _entries_of(self, bucket: int) -> list[Entry]:
        """Return the entries of a bucket; those of a new bucket are predicted at its middle."""
        if bucket not in self.entries:
            predicted = list(self._predict((bucket + 0.5) * self.settings.rows_per_bucket))
            assert len(predicted) == len(self.plans), "a prediction for each plan"
            self.entries[bucket] = [Entry(predicted=seconds) for seconds in predicted]
        return self.entries[bucket]

    def _predicted(self, load: float, plan: int) -> float:
        """Return the predicted seconds of a plan at a load, by linear interpolation between the
        middles of buckets."""
        # in widths of a bucket from the middle of the first one, so bucket k has its middle at k
        place = max(load / self.settings.rows_per_bucket - 0.5, 0.0)
        low = int(place)
        before = self._entries_of(low)[plan].predicted
        after = self._entries_of(low + 1)[plan].predicted
        return before + (place - low) * (after - before)

    def _run(self, plan: int, why: str) -> None:
        """Let a plan run from this step on."""
        if plan == self.running:
            return
        if self.running is None:
            why = "start"
        else:
            self.switches += 1
        self._unsettled = 1
        self.running = plan
        self.decisions.append(
            Decision(
                step=self.steps - 1, bucket=self.bucket_of(self._loads[-1]), plan=plan, why=why
            )
        )


def _whole(value: Any) -> int:
    """Return the value as an int of at least 0; raises ValueError or TypeError if it is none."""
    number = int(value)
    if number < 0:
        raise ValueError(f"{number} is below 0")
    return number


def _numbers(values: list[Any], *, least: float) -> list[float]:
    """Return the values as finite floats of at least `least`; raises ValueError or TypeError if one
    is none."""
    numbers = [float(value) for value in values]
    if not all(least <= value < math.inf for value in numbers):
        raise ValueError(f"a number is below {least:g}")
    return numbers
