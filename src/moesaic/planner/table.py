"""Learns during training which plan to run at which load: Tutel's dictionary (Hwang et al. 2023, section 3.3), prefilled.

The dictionary of the paper tries every choice at every load. Here the entries of each load start with simulated times, which
measured times correct. So only plans close to the best are tried, a few steps each, in a bounded share of all steps.

If the machine was neither described nor measured, predictions are not good enough for that. Under `race` all plans are first
timed for a few steps, then the faster half again, until one is left. A new race starts when step times drift.

The table is deterministic: given the same loads and measured seconds, all ranks choose the same plan. The caller must make
the ranks agree on both first. A plan with a lossy codec runs only if the caller lists the codec as tested.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, median_low
from typing import Any

from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.program.plan import Codec, Plan

VERSION = 1
"""Version of the saved state."""
Predict = Callable[[float], Sequence[float]]
"""Function of a load that returns the predicted seconds of a step under each plan."""


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Settings of a plan table."""

    rows_per_bucket: float = 128
    """Width of a bucket of loads that share an entry (Tutel's R). A load is the number of copies of the busiest expert."""
    explore: float = 0.05
    """Largest share of trial steps among the first 200 steps, and among every further 200 steps."""
    hysteresis: float = 0.03
    """Share by which another plan must be faster to replace the plan that is used at a load."""
    trial_steps: int = 2
    """Steps that a trial measures, after one warm-up step."""
    optimism: float = 0.25
    """Share by which a plan may be faster than predicted. A plan is worth a trial if it would then be the best. The share
    shrinks if all measured plans have similar prediction errors."""
    race: bool = False
    """Time all plans before one is chosen, regardless of predictions and loads, and again when step times drift."""
    drift: float = 0.15
    """Under `race`, the relative change of step times that starts a new race; larger if step times vary a lot."""

    def __post_init__(self) -> None:
        if not (self.rows_per_bucket > 0 and math.isfinite(self.rows_per_bucket)):
            raise InputError(f"rows_per_bucket={self.rows_per_bucket}: must be a finite number above 0")
        for name in ("explore", "hysteresis", "optimism", "drift"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: choose a share of at least 0 and below 1")
        if self.trial_steps < 1:
            raise InputError(f"trial_steps={self.trial_steps}: must be at least 1")


@dataclass
class Entry:
    """Times of one plan at one load."""

    predicted: float
    """Predicted seconds of a step."""
    measured: list[float] = field(default_factory=list)
    """Seconds of the last measured steps, at most `KEPT`."""
    count: int = 0
    """Number of steps measured so far."""


WINDOW = 200
"""Number of steps of which `explore` is a share. The trial steps of one window need not be spread over it."""
KEPT = 8
"""Number of measured steps that an entry keeps. Their median is used, so that one slow step does not matter."""
SURE = 0.2
"""Share of the hysteresis that remains between two plans that were both measured many times."""
LIKELY = 5
"""Number of likely loads of a step, by the errors of earlier load forecasts, over which plans are compared."""
REMEMBERED = 50
"""Number of steps for which the ratio of actual to expected load is kept."""
TRUST = 8
"""Number of measured steps at a load that weigh as much as the corrected prediction."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of plan."""

    step: int
    """Number of steps decided before, in this run and earlier ones."""
    bucket: int
    """Bucket of the load."""
    plan: int
    """Number of the plan that runs from this step on."""
    why: str
    """Reason: start, trial, trial over, load or faster; under a race, trial or fastest."""


ROUNDS = (2, 3, 5)
"""Steps that each round of a race measures per remaining plan, after one warm-up step; further rounds are like the last."""
RECENT = 7
"""Number of recent steps whose median is compared with the level after the race."""
LEVEL = 8
"""Number of steps after a race that give the level and the spread of step times."""


class Race:
    """A race between plans: each round times a few steps of every remaining plan and drops the slower half.

    A race of eight plans takes 24 + 16 + 12 steps, including the warm-up steps.

    Args:
        plans: numbers of the plans, the most promising first.
        drift: see `TableSettings`.
    """

    def __init__(self, plans: Sequence[int], drift: float) -> None:
        self.left = list(plans)
        self.seconds: dict[int, list[list[float]]] = {plan: [[]] for plan in plans}
        self._drift, self._round, self._waiting = drift, 0, list(plans)
        self.is_void = False
        """Whether step times drifted during the race, so that the times of its plans are not comparable."""

    @property
    def steps(self) -> int:
        """Steps that this round measures per plan."""
        return ROUNDS[min(self._round, len(ROUNDS) - 1)]

    def next(self) -> int | None:
        """Return the plan to time next; None if only one plan is left."""
        if not self._waiting and len(self.left) > 1:
            self._end_round()
        return self._waiting.pop(0) if self._waiting and len(self.left) > 1 else None

    def record(self, plan: int, seconds: float) -> None:
        """Record the seconds of a step of a plan."""
        self.seconds[plan][-1].append(seconds)

    def median(self, plan: int) -> float:
        """Return the low median of all step times of a plan; the low one, since disturbances only make steps slower."""
        return median_low([seconds for of_round in self.seconds[plan] for seconds in of_round])

    def _end_round(self) -> None:
        if self._round:
            ratios = [median_low(self.seconds[plan][-1]) / median_low(self.seconds[plan][-2]) for plan in self.left]
            self.is_void = abs(math.log(median(ratios))) > math.log1p(self._drift)
        ranked = sorted(self.left, key=lambda plan: (self.median(plan), self.left.index(plan)))
        self.left = ranked[: max(len(ranked) // 2, 1)]
        self._round += 1
        self._waiting = list(self.left)
        for plan in self.left:
            self.seconds[plan].append([])


class PlanTable:
    """Chooses a plan before every step, and learns from the measured time of the step.

    Args:
        plans: the plans to choose from; the first allowed one is used until the table knows better.
        predict: predicts the seconds of a step under each plan at a load.
        settings: settings of the table; None for the defaults.
        tested: pairs of codecs (forward, backward) that the user has tested; other lossy plans never run.

    Raises:
        InputError: if no plan may run.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        predict: Predict,
        settings: TableSettings | None = None,
        *,
        tested: Collection[tuple[Codec, Codec]] = (),
    ) -> None:
        self.plans, self.settings = tuple(plans), settings or TableSettings()
        self._predict = predict
        self.allowed = [
            number for number, plan in enumerate(self.plans)
            if plan.is_lossless or (plan.codec, plan.backward_codec) in tested
        ]  # fmt: skip
        if not self.allowed:
            raise InputError(
                "the plan table holds no plan that may be run: name a lossless one, or test the codec first"
            )
        self.entries: dict[int, list[Entry]] = {}
        self.held: dict[int, int] = {}
        self.decisions: list[Decision] = []
        self._last_run: dict[int, int] = {}
        self.steps = self.explored = self.switches = 0
        self.running: int | None = None
        self._bucket = 0
        self._expected_load = 0.0
        self._load_ratios: list[float] = []
        self._trial_left = self._unsettled = 0
        self.race = Race(self.allowed, self.settings.drift) if self.settings.race else None
        self.races = int(self.settings.race)
        self.timed: dict[int, float] = {}
        """Seconds of a step under each plan that the last finished race timed."""
        self._level: list[float] = []
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def is_racing(self) -> bool:
        """Whether a race is running."""
        return self.race is not None

    def bucket_of(self, load: float) -> int:
        """Return the bucket of a load; under `race` all loads share one bucket."""
        return 0 if self.settings.race else int(load // self.settings.rows_per_bucket)

    def choose(self, load: float) -> int:
        """Return the number of the plan for the next step.

        The expected load may be wrong, so plans are compared over several likely loads, by the errors of earlier steps.

        Args:
            load: expected number of copies of the busiest expert, the same on all ranks.
        """
        if self.settings.race:
            return self._choose_by_race()
        self._expected_load = load
        ratios = _quantiles(self._load_ratios)
        bucket = self.bucket_of(load * ratios[len(ratios) // 2])
        seconds = self._mean_estimates([self.bucket_of(load * ratio) for ratio in ratios])
        moved, self._bucket = bucket != self._bucket, bucket
        was_trial, self._trial_left = self._trial_left, max(self._trial_left - 1, 0)
        if was_trial > 1 and self.running is not None:
            self.explored += 1
        else:
            best = self._best(bucket, seconds)
            tried = self._worth_trying(seconds, best)
            if tried is not None:
                self._trial_left = 1 + self.settings.trial_steps
                self.explored += 1
                self._run(tried, "trial")
            else:
                self._run(
                    best,
                    "start" if self.running is None else "trial over" if was_trial else "load" if moved else "faster",
                )
        self.steps += 1
        assert self.running is not None
        return self.running

    def record(self, seconds: float, load: float | None = None) -> None:
        """Record the time of the step; the first step after a change of plan is ignored, since it warms caches.

        Args:
            seconds: time of the slowest rank, the same on all ranks.
            load: actual load of the step; None for the load given to `choose`. The time is scaled to the middle of the load's
                bucket, by the ratio of the predictions. Without that, two plans with steps at the two ends of a bucket would
                seem to differ by a tenth.
        """
        assert self.running is not None, "choose a plan first"
        if load is not None and self._expected_load > 0:
            self._load_ratios = [*self._load_ratios, load / self._expected_load][-REMEMBERED:]
        if self._unsettled:
            self._unsettled -= 1
            return
        if self.settings.race:
            self._record_in_race(seconds)
            return
        bucket = self._bucket if load is None else self.bucket_of(load)
        entry = self._entries_of(bucket)[self.running]
        if load is not None:
            seconds *= entry.predicted / self._predicted(load, self.running)
        entry.measured = [*entry.measured, seconds][-KEPT:]
        entry.count += 1
        others = [each for plan, each in enumerate(self.estimates(bucket)) if plan != self.running]
        if self._trial_left and seconds > (1 + self.settings.hysteresis) * min(others, default=math.inf):
            self._trial_left = 1  # end the trial: the plan is slower, and more steps would not change that
        self._last_run[self.running] = self.steps

    def _choose_by_race(self) -> int:
        """Return the plan for the next step under `race`; see `choose`."""
        self.steps += 1
        if self.race is None and self._has_drifted():
            self.race, self._trial_left = Race(self.allowed, self.settings.drift), 0
            self.races += 1
        if self.race is not None and not self._trial_left:
            plan = self.race.next()
            if self.race.is_void:
                self.race = Race(self.allowed, self.settings.drift)
                plan = self.race.next()
            if plan is None:
                self._run(self.race.left[0], "fastest")
                self.timed = {
                    number: self.race.median(number) for number in self.race.seconds if self.race.seconds[number][0]
                }
                self.race, self._level = None, []
                self._recent.clear()
            else:
                self._trial_left = self.race.steps + (plan != self.running)
                self._run(plan, "trial")
        if self.race is not None:
            self._trial_left -= 1
            self.explored += 1
        assert self.running is not None
        return self.running

    def _record_in_race(self, seconds: float) -> None:
        assert self.running is not None
        entry = self._entries_of(0)[self.running]
        entry.measured, entry.count = [*entry.measured, seconds][-KEPT:], entry.count + 1
        if self.race is not None:
            self.race.record(self.running, seconds)
        elif len(self._level) < LEVEL:
            self._level.append(seconds)
        else:
            self._recent.append(seconds)

    def _has_drifted(self) -> bool:
        """Return whether the level of step times has changed since the race by more than their spread."""
        if len(self._recent) < RECENT:
            return False
        level = median(self._level)
        spread = median(abs(math.log(seconds / level)) for seconds in self._level)
        return abs(math.log(median(self._recent) / level)) > max(math.log1p(self.settings.drift), 4 * spread)

    def estimates(self, bucket: int) -> list[float]:
        """Return the estimated seconds of a step under each plan at a load.

        An estimate is the mean of a corrected prediction and the measured median, weighted by the number of measured steps.
        The correction is a factor of the plan times a factor of the load, so measurements at other loads count too. A plan
        that never ran gets the usual factor of the plans that did. A few measured steps do not decide alone, since loads
        differ within a bucket.
        """
        entries, plan_factors = self._entries_of(bucket), self._plan_factors()
        usual_factor = median(plan_factors.values()) if plan_factors else 1.0
        factors = [
            median(entry.measured) / entry.predicted / plan_factors[plan]
            for plan, entry in enumerate(entries) if entry.measured
        ]  # fmt: skip
        load_factor = median(factors) if factors else 1.0
        estimates = []
        for plan, entry in enumerate(entries):
            corrected, count = entry.predicted * plan_factors.get(plan, usual_factor) * load_factor, len(entry.measured)
            measured = median(entry.measured) if entry.measured else corrected
            estimates.append((count * measured + TRUST * corrected) / (count + TRUST))
        return estimates

    def state(self) -> dict[str, Any]:
        """Return the state of the table as plain data for JSON."""
        return {
            "version": VERSION,
            "rows_per_bucket": self.settings.rows_per_bucket,
            "plans": [asdict(plan) for plan in self.plans],
            "entries": {str(bucket): [asdict(each) for each in entries] for bucket, entries in self.entries.items()},
            "held": {str(bucket): plan for bucket, plan in self.held.items()},
            "running": self.running,
            "last_run": {str(plan): step for plan, step in self._last_run.items()},
            "ratios": self._load_ratios,
            "counts": [self.steps, self.explored, self.switches],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the measurements in a `state` for the plans that this table has too; predictions are made again.

        Raises:
            InputError: if the state has another version or other buckets, or is damaged.
        """
        if state.get("version") != VERSION or state.get("rows_per_bucket") != self.settings.rows_per_bucket:
            raise InputError(
                f"has version {state.get('version')} and buckets of {state.get('rows_per_bucket')} rows, but this table has "
                f"version {VERSION} and {self.settings.rows_per_bucket:g}: start anew, or set rows_per_bucket back"
            )
        try:
            self._restore_entries(state)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise InputError(f"is damaged ({error!r}): delete the file to start anew") from error

    def _restore_entries(self, state: dict[str, Any]) -> None:
        numbers = {plan: number for number, plan in enumerate(self.plans)}
        number_of_saved = [numbers.get(override(Plan(), table, source="plan table")) for table in state["plans"]]
        for bucket, saved in state["entries"].items():
            entries = self._entries_of(_whole(bucket))
            for number, entry in zip(number_of_saved, saved):
                if number is not None:
                    entries[number].measured, entries[number].count = (
                        _numbers(entry["measured"]),
                        _whole(entry["count"]),
                    )
        places = {_whole(bucket): number_of_saved[plan] for bucket, plan in state["held"].items()}
        self.held = {bucket: plan for bucket, plan in places.items() if plan in self.allowed and plan is not None}
        last = {number_of_saved[int(plan)]: step for plan, step in state["last_run"].items()}
        self._load_ratios = _numbers(state["ratios"])
        self.steps, self.explored, self.switches = map(_whole, state["counts"])
        self._last_run = {plan: min(_whole(step), self.steps) for plan, step in last.items() if plan is not None}

    def _entries_of(self, bucket: int) -> list[Entry]:
        """Return the entries of a bucket; those of a new bucket are predicted at its middle."""
        if bucket not in self.entries:
            predicted = list(self._predict((bucket + 0.5) * self.settings.rows_per_bucket))
            assert len(predicted) == len(self.plans), "a prediction for each plan"
            self.entries[bucket] = [Entry(predicted=seconds) for seconds in predicted]
        return self.entries[bucket]

    def _predicted(self, load: float, plan: int) -> float:
        """Return the predicted seconds of a plan at a load, by linear interpolation between the middles of buckets."""
        at = max(load / self.settings.rows_per_bucket - 0.5, 0.0)
        low = int(at)
        before, after = (self._entries_of(bucket)[plan].predicted for bucket in (low, low + 1))
        return before + (at - low) * (after - before)

    def _plan_factors(self) -> dict[int, float]:
        """Return the ratio of measured to predicted seconds of every measured plan, the median over loads."""
        ratios: dict[int, list[float]] = {}
        for entries in self.entries.values():
            for plan, entry in enumerate(entries):
                if entry.measured:
                    ratios.setdefault(plan, []).append(median(entry.measured) / entry.predicted)
        return {plan: median(of_loads) for plan, of_loads in ratios.items()}

    def _count(self, plan: int) -> int:
        """Return the number of measured steps of a plan, at all loads."""
        return sum(entries[plan].count for entries in self.entries.values())

    def _weight(self, plan: int) -> float:
        """Return the number of measured steps of a plan, reduced the longer ago it ran, since old measurements may mislead."""
        return self._count(plan) / (1 + (self.steps - self._last_run.get(plan, 0)) // WINDOW)

    def _mean_estimates(self, buckets: Sequence[int]) -> list[float]:
        """Return the estimate of each plan, averaged over equally likely loads."""
        by_bucket = {bucket: self.estimates(bucket) for bucket in set(buckets)}
        return [fmean(by_bucket[bucket][plan] for bucket in buckets) for plan in range(len(self.plans))]

    def _best(self, bucket: int, seconds: Sequence[float]) -> int:
        """Return the plan to use at a load.

        A measured plan is replaced only by another measured plan, or by one that would be faster even with the largest
        prediction error. The required margin shrinks with the number of measured steps of both.
        """
        optimism = self._optimism()
        current = self.held.get(bucket)
        if current is None:
            current = self.running if self.running in self.allowed else self.allowed[0]
        assert current is not None
        eligible = [
            plan for plan in self.allowed
            if self._count(plan) or not self._count(current) or seconds[plan] * (1 + optimism) < seconds[current]
        ]  # fmt: skip
        best = min(eligible, key=lambda plan: (seconds[plan], plan))
        steps_of_both = min(self._count(best), self._count(current))
        margin = self.settings.hysteresis * max(TRUST / (TRUST + steps_of_both), SURE)
        self.held[bucket] = best if seconds[best] < (1 - margin) * seconds[current] else current
        return self.held[bucket]

    def _worth_trying(self, seconds: Sequence[float], best: int) -> int | None:
        """Return the plan to try next: of the promising plans with the fewest measured steps, the fastest.

        Returns None if no plan is promising, or if the share of trial steps is used up.
        """
        cost, budget = 1 + self.settings.trial_steps, self.settings.explore * WINDOW * (1 + self.steps // WINDOW)
        if self.explored + cost > budget or self._count(best) < self.settings.trial_steps:
            return None
        optimism = self._optimism()
        to_beat = (1 - self.settings.hysteresis) * seconds[best]
        hopeful = [
            plan for plan in self.allowed
            if plan != best and seconds[plan] * (1 - optimism / (1 + self._weight(plan))) < to_beat
        ]  # fmt: skip
        return min(hopeful, key=lambda plan: (self._count(plan), seconds[plan], plan), default=None)

    def _optimism(self) -> float:
        """Return the share by which a prediction may be off.

        It is that of the settings until two plans are measured. Then it is at most twice the spread of their ratios of
        measured to predicted time, but at least the hysteresis.
        """
        factors = list(self._plan_factors().values())
        if len(factors) < 2:
            return self.settings.optimism
        apart = 1 - min(factors) / max(factors)
        return min(self.settings.optimism, max(2 * apart, self.settings.hysteresis))

    def _run(self, plan: int, why: str) -> None:
        if plan == self.running:
            return
        why = "start" if self.running is None else why
        self.switches += self.running is not None
        self._unsettled = 1
        self.running = plan
        self.decisions.append(Decision(step=self.steps, bucket=self._bucket, plan=plan, why=why))


def _whole(value: Any) -> int:
    """Return the value as an int of at least 0; raises ValueError or TypeError if it is none."""
    if (number := int(value)) < 0:
        raise ValueError(f"{number} is below 0")
    return number


def _numbers(values: list[Any]) -> list[float]:
    """Return the values as finite floats above 0; raises ValueError or TypeError if one is none."""
    numbers = [float(value) for value in values]
    if not all(0 < value < math.inf for value in numbers):
        raise ValueError("seconds are not above 0")
    return numbers


def _quantiles(ratios: Sequence[float]) -> list[float]:
    """Return `LIKELY` evenly spaced quantiles of the ratios; [1.0] if there are none."""
    ascending = sorted(ratios)
    return [ascending[int((part + 0.5) * len(ascending) / LIKELY)] for part in range(LIKELY)] if ascending else [1.0]
