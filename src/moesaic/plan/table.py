"""Which plan to run at which load, learnt while training: Tutel's dictionary (Hwang et al. 2023, section 3.3), filled first.

The paper's dictionary tries every choice at every load that it meets. Here each load starts with simulated times; measured
ones replace and correct them, so that only plans near the best are ever tried, each a few times, in a bounded share of steps.

Where nothing was measured before, predictions say too little for that. Under `race` all plans are timed first, a few steps
each, and the faster half again, until one is left; and anew when steps take longer or shorter than they did.

Pure and deterministic: given the same loads and the same measured seconds, every rank comes to the same plan. Who uses it has
the ranks agree on both first. A plan whose codec loses precision is run only where the caller has named that codec as tested.
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
from moesaic.plan.plan import Codec, Plan

VERSION = 1
"""Of the saved form."""
Predict = Callable[[float], Sequence[float]]
"""From a load to the predicted seconds of a step under each plan."""


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """How a table learns."""

    rows_per_bucket: float = 128
    """Loads that differ by less share an entry: Tutel's R. A load is the copies that the busiest expert gets."""
    explore: float = 0.05
    """Largest share of steps under plans that are being tried, of the first two hundred and of every two hundred after."""
    hysteresis: float = 0.03
    """Leave a plan only for one that is faster by this share."""
    trial_steps: int = 2
    """Steps that a trial measures, after one that it does not."""
    optimism: float = 0.25
    """How much faster than predicted a plan may turn out: those that would then be best are worth a trial. Less once the
    plans that were measured turn out to be off alike."""
    race: bool = False
    """Time all plans before one is held, whatever is predicted and whatever the load, and again when times drift."""
    drift: float = 0.15
    """Under `race`, the share by which steps must take longer or shorter than they did; more where they vary by themselves."""

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
    """What is known of one plan at one load."""

    predicted: float
    """Seconds of a step."""
    measured: list[float] = field(default_factory=list)
    """Of the last steps, at most `KEPT`."""
    count: int = 0
    """Steps measured in all."""


WINDOW = 200
"""Steps of which `explore` is a share: what a share of them allows may be used at once."""
KEPT = 8
"""Measured steps that an entry remembers; their median counts, so that one slow step decides nothing."""
SURE = 0.2
"""Share of the hysteresis that is left between plans that were both measured many times."""
LIKELY = 5
"""Loads that a step may have, by how far loads were off before, over which plans are compared."""
REMEMBERED = 50
"""Steps over which what a load was said to be is held against what it was."""
TRUST = 8
"""Measured steps at a load that weigh as much as what predictions and other loads say of it."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of plan."""

    step: int
    """Steps decided before, this run and earlier ones together."""
    bucket: int
    """The load, in buckets."""
    plan: int
    """Which plan runs from now on."""
    why: str
    """start, trial, trial over, load, faster; under a race: trial, fastest."""


ROUNDS = (2, 3, 5)
"""Steps that each round of a race measures of every plan that is left, after one that it does not; the last again."""
RECENT = 7
"""Steps whose median is held against those before."""
LEVEL = 8
"""Steps after a race that say what a step takes, and how much steps vary by themselves."""


class Race:
    """Which of some plans is fastest, by a few steps of each. After a round the faster half goes on.

    Eight plans take 24 + 16 + 12 steps.

    Args:
        plans: their numbers, the most promising first.
        drift: see `TableSettings`.
    """

    def __init__(self, plans: Sequence[int], drift: float) -> None:
        self.left = list(plans)
        self.seconds: dict[int, list[list[float]]] = {plan: [[]] for plan in plans}
        self._drift, self._round, self._waiting = drift, 0, list(plans)
        self.is_void = False
        """Whether times drifted while it went on, so that its plans were not timed alike."""

    @property
    def steps(self) -> int:
        """Steps that are measured of each plan in this round."""
        return ROUNDS[min(self._round, len(ROUNDS) - 1)]

    def next(self) -> int | None:
        """Return the plan to time next; None once one is left."""
        if not self._waiting and len(self.left) > 1:
            self._end_round()
        return self._waiting.pop(0) if self._waiting and len(self.left) > 1 else None

    def record(self, plan: int, seconds: float) -> None:
        """Take down a step of a plan that is timed."""
        self.seconds[plan][-1].append(seconds)

    def median(self, plan: int) -> float:
        """Return what a step of a plan took, over all rounds; of two steps the faster, since what disturbs makes slower."""
        return median_low([each for of_round in self.seconds[plan] for each in of_round])

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
    """Chooses a plan before every step and is told afterwards how long the step took.

    Args:
        plans: to choose from; the first is the one to fall back on.
        predict: seconds of a step under each of them at a load.
        settings: how to learn.
        tested: pairs of codecs (forward, backward) that the user has tested; other lossy plans are never run.

    Raises:
        InputError: if no plan may be run.
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
        self._told = 0.0
        self._ratios: list[float] = []
        self._trial_left = self._unsettled = 0
        self.race = Race(self.allowed, self.settings.drift) if self.settings.race else None
        self.races = int(self.settings.race)
        self.timed: dict[int, float] = {}
        """Seconds of a step under each plan, of the last race that ended."""
        self._level: list[float] = []
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def is_racing(self) -> bool:
        """Whether plans are being timed, before one of them is held."""
        return self.race is not None

    def bucket_of(self, load: float) -> int:
        """Return the bucket of a load."""
        return 0 if self.settings.race else int(load // self.settings.rows_per_bucket)

    def choose(self, load: float) -> int:
        """Return the number of the plan for the next step.

        What is said of a load may be wrong: plans are compared over the loads that the step may have, by how far earlier steps'
        were off.

        Args:
            load: copies that the busiest expert is expected to get; the same on all ranks.
        """
        if self.settings.race:
            return self._choose_by_race()
        self._told = load
        ratios = _quantiles(self._ratios)
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
        """Take down how long the step took; the first one after a change of plan is left out, as it warms caches.

        Args:
            seconds: the same on all ranks: the slowest one's.
            load: that the step turned out to have; None takes what `choose` was told. A step counts at its own load, brought
                to the middle of the bucket by what predictions say of the way there: else two plans whose steps were at the
                two ends of a bucket would seem a tenth apart.
        """
        assert self.running is not None, "choose a plan first"
        if load is not None and self._told > 0:
            self._ratios = [*self._ratios, load / self._told][-REMEMBERED:]
        if self._unsettled:
            self._unsettled -= 1
            return
        if self.settings.race:
            self._record_in_race(seconds)
            return
        bucket = self._bucket if load is None else self.bucket_of(load)
        entry = self._filled(bucket)[self.running]
        if load is not None:
            seconds *= entry.predicted / self._predicted(load, self.running)
        entry.measured = [*entry.measured, seconds][-KEPT:]
        entry.count += 1
        others = [each for plan, each in enumerate(self.estimates(bucket)) if plan != self.running]
        if self._trial_left and seconds > (1 + self.settings.hysteresis) * min(others, default=math.inf):
            self._trial_left = 1  # slower, and seen to be: the rest of the trial would tell no more
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
                self.timed = {each: self.race.median(each) for each in self.race.seconds if self.race.seconds[each][0]}
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
        entry = self._filled(0)[self.running]
        entry.measured, entry.count = [*entry.measured, seconds][-KEPT:], entry.count + 1
        if self.race is not None:
            self.race.record(self.running, seconds)
        elif len(self._level) < LEVEL:
            self._level.append(seconds)
        else:
            self._recent.append(seconds)

    def _has_drifted(self) -> bool:
        """Whether steps take longer or shorter than they did after the race, by more than they vary by themselves."""
        if len(self._recent) < RECENT:
            return False
        level = median(self._level)
        spread = median(abs(math.log(each / level)) for each in self._level)
        return abs(math.log(median(self._recent) / level)) > max(math.log1p(self.settings.drift), 4 * spread)

    def estimates(self, bucket: int) -> list[float]:
        """Return what each plan is thought to take at a load: predicted and corrected, then measured as steps come in.

        Measured over predicted is taken as a factor of the plan times one of the load: what a plan was seen to take at other
        loads counts here too, and a plan that never ran is taken to be off as much as those that did. A few steps measured at
        this very load do not decide alone: loads differ within a bucket, and two plans' steps may have been at its two ends.
        """
        entries, of_plan = self._filled(bucket), self._plan_factors()
        usual = median(of_plan.values()) if of_plan else 1.0
        here = [
            median(entry.measured) / entry.predicted / of_plan[plan]
            for plan, entry in enumerate(entries) if entry.measured
        ]  # fmt: skip
        of_load = median(here) if here else 1.0
        found = []
        for plan, entry in enumerate(entries):
            thought, count = entry.predicted * of_plan.get(plan, usual) * of_load, len(entry.measured)
            seen = median(entry.measured) if entry.measured else thought
            found.append((count * seen + TRUST * thought) / (count + TRUST))
        return found

    def state(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return {
            "version": VERSION,
            "rows_per_bucket": self.settings.rows_per_bucket,
            "plans": [asdict(plan) for plan in self.plans],
            "entries": {str(bucket): [asdict(each) for each in entries] for bucket, entries in self.entries.items()},
            "held": {str(bucket): plan for bucket, plan in self.held.items()},
            "running": self.running,
            "last_run": {str(plan): step for plan, step in self._last_run.items()},
            "ratios": self._ratios,
            "counts": [self.steps, self.explored, self.switches],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned: of the plans that this table has too, what was measured; predictions are anew.

        Raises:
            InputError: if it is of another version, has other buckets, or is not as it was written.
        """
        if state.get("version") != VERSION or state.get("rows_per_bucket") != self.settings.rows_per_bucket:
            raise InputError(
                f"has version {state.get('version')} and buckets of {state.get('rows_per_bucket')} rows, this table version "
                f"{VERSION} and {self.settings.rows_per_bucket:g}: start anew, or set rows_per_bucket back"
            )
        try:
            self._take_up(state)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise InputError(f"is damaged ({error!r}): delete the file to start anew") from error

    def _take_up(self, state: dict[str, Any]) -> None:
        now = {plan: number for number, plan in enumerate(self.plans)}
        before = [now.get(override(Plan(), table, source="plan table")) for table in state["plans"]]
        for bucket, saved in state["entries"].items():
            entries = self._filled(_whole(bucket))
            for number, entry in zip(before, saved):
                if number is not None:
                    entries[number].measured, entries[number].count = (
                        _numbers(entry["measured"]),
                        _whole(entry["count"]),
                    )
        places = {_whole(bucket): before[plan] for bucket, plan in state["held"].items()}
        self.held = {bucket: plan for bucket, plan in places.items() if plan in self.allowed and plan is not None}
        last = {before[int(plan)]: step for plan, step in state["last_run"].items()}
        self._ratios = _numbers(state["ratios"])
        self.steps, self.explored, self.switches = map(_whole, state["counts"])
        self._last_run = {plan: min(_whole(step), self.steps) for plan, step in last.items() if plan is not None}

    def _filled(self, bucket: int) -> list[Entry]:
        """Return the entries of a load; a load that is new is given its predictions, taken at the middle of its bucket."""
        if bucket not in self.entries:
            predicted = list(self._predict((bucket + 0.5) * self.settings.rows_per_bucket))
            assert len(predicted) == len(self.plans), "a prediction for each plan"
            self.entries[bucket] = [Entry(predicted=seconds) for seconds in predicted]
        return self.entries[bucket]

    def _predicted(self, load: float, plan: int) -> float:
        """Return the predicted seconds of a plan at a load, on the line between the middles of two buckets."""
        at = max(load / self.settings.rows_per_bucket - 0.5, 0.0)
        low = int(at)
        before, after = (self._filled(bucket)[plan].predicted for bucket in (low, low + 1))
        return before + (at - low) * (after - before)

    def _plan_factors(self) -> dict[int, float]:
        """Return measured over predicted seconds of every plan that was measured, the median over loads."""
        ratios: dict[int, list[float]] = {}
        for entries in self.entries.values():
            for plan, entry in enumerate(entries):
                if entry.measured:
                    ratios.setdefault(plan, []).append(median(entry.measured) / entry.predicted)
        return {plan: median(each) for plan, each in ratios.items()}

    def _count(self, plan: int) -> int:
        """Return how many steps of a plan were measured, at any load."""
        return sum(entries[plan].count for entries in self.entries.values())

    def _weight(self, plan: int) -> float:
        """Return the measured steps of a plan, fewer the longer ago: what was seen at other loads may have misled."""
        return self._count(plan) / (1 + (self.steps - self._last_run.get(plan, 0)) // WINDOW)

    def _mean_estimates(self, buckets: Sequence[int]) -> list[float]:
        """Return what each plan is thought to take, the mean over loads that are as likely as one another."""
        each = {bucket: self.estimates(bucket) for bucket in set(buckets)}
        return [fmean(each[bucket][plan] for bucket in buckets) for plan in range(len(self.plans))]

    def _best(self, bucket: int, seconds: Sequence[float]) -> int:
        """Return the plan to hold at a load; a plan that was measured is left only for another that was, or for one that is
        faster even if its prediction is off as far as may be. The more steps of both were measured, the less it takes."""
        optimism = self._optimism()
        held = self.held.get(bucket)
        if held is None:
            held = self.running if self.running in self.allowed else self.allowed[0]
        assert held is not None
        known = [
            plan for plan in self.allowed
            if self._count(plan) or not self._count(held) or seconds[plan] * (1 + optimism) < seconds[held]
        ]  # fmt: skip
        best = min(known, key=lambda plan: (seconds[plan], plan))
        known_by = min(self._count(best), self._count(held))
        margin = self.settings.hysteresis * max(TRUST / (TRUST + known_by), SURE)
        self.held[bucket] = best if seconds[best] < (1 - margin) * seconds[held] else held
        return self.held[bucket]

    def _worth_trying(self, seconds: Sequence[float], best: int) -> int | None:
        """Return a plan to try next, the most promising of those tried least; None if none is, or it would be too often."""
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
        """Return how far a prediction may be off: what the settings say until plans were measured, then no more than twice
        what those that were measured are apart, the hysteresis at least."""
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
    """Return a whole number of at least 0; raises ValueError or TypeError for others."""
    if (found := int(value)) < 0:
        raise ValueError(f"{found} is below 0")
    return found


def _numbers(values: list[Any]) -> list[float]:
    """Return finite numbers above 0; raises ValueError or TypeError for others."""
    found = [float(value) for value in values]
    if not all(0 < value < math.inf for value in found):
        raise ValueError("seconds are not above 0")
    return found


def _quantiles(ratios: Sequence[float]) -> list[float]:
    """Return ratios at the middles of `LIKELY` equal parts of those seen; 1 where none was."""
    ascending = sorted(ratios)
    return [ascending[int((part + 0.5) * len(ascending) / LIKELY)] for part in range(LIKELY)] if ascending else [1.0]
