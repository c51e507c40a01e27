"""Timing in turn, spans over ranks, medians, paired ratios: values by hand, clocks and barriers by
stand-ins."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.measure import together
from moesaic.measure.together import start_together
from moesaic_lab import measure
from moesaic_lab.measure import Timing, in_turn, over_ranks, paired


class Clock:
    """A clock that only moves when told; sleeping moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measure, "time", made)
    monkeypatch.setattr(together, "time", made)
    return made


def test_methods_run_in_turn_with_a_barrier_before_each(clock):
    calls = []

    def method(name, seconds):
        def run():
            calls.append(name)
            clock.now += seconds

        return run

    methods = {"a": method("a", 1.0), "b": method("b", 2.0), "c": method("c", 4.0)}
    spans = in_turn(methods, 3, barrier=lambda: calls.append("|"), warmup=1)
    runs = "".join(calls).split("|")[1:]
    # the warm-up first, then rotated
    assert runs == ["c", "a", "b", "a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {
        name: [end - start for start, end in of_method] for name, of_method in spans.items()
    } == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [4.0] * 3}


def test_a_barrier_is_outside_the_spans(clock):
    def barrier():
        clock.now += 50.0

    spans = in_turn({"a": lambda: clock.sleep(1.0)}, 2, barrier=barrier, warmup=0)
    assert spans == {"a": [(150.0, 151.0), (201.0, 202.0)]}


def test_no_warmup_and_no_methods(clock):
    assert in_turn({}, 3, barrier=lambda: None) == {}
    calls = []
    in_turn({"a": lambda: calls.append(1)}, 2, barrier=lambda: None, warmup=0)
    assert len(calls) == 2


def test_ranks_start_at_one_moment_after_the_last_arrival(clock):
    asked = []

    def latest(moment):
        asked.append(moment)
        return 103.0 if len(asked) == 1 else moment  # another rank came at 103

    start_together(latest, lead_seconds=0.5)()
    assert clock.now == 103.5


def test_a_slow_agreement_puts_the_start_off(clock):
    asked = []

    def latest(moment):
        asked.append(moment)
        clock.now += 2.0  # longer than the lead
        return moment

    start_together(latest, lead_seconds=2.5)()
    assert asked == [100.0, 102.0]
    assert clock.now == 104.5  # 2.5 after the last rank knew, not 2.5 after the last one came
    start_together(latest, lead_seconds=0.5)()
    assert clock.now == 108.5  # the second agreement ended past the start: nobody sleeps backwards


def test_a_repeat_takes_from_the_first_start_to_the_last_end():
    first = {"a": [(1.0, 2.0), (10.0, 11.0)], "b": [(0.0, 5.0), (0.0, 0.25)]}
    second = {"a": [(1.5, 2.5), (9.0, 10.0)], "b": [(1.0, 4.0), (0.5, 0.75)]}
    assert over_ranks([first, second]) == {"a": (1.5, 2.0), "b": (5.0, 0.75)}
    assert over_ranks([]) == {}


def test_median_and_quartiles():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)
    assert timing.seconds == (5.0, 1.0, 2.0, 4.0, 3.0)


def test_ratios_are_taken_within_a_repeat():
    # each pair has ratio 2, the medians' spread is 100
    ratio = paired([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.repeats) == (2.0, 2.0, 2.0, 3)
    assert paired([1.0, 2.0, 9.0], [1.0, 1.0, 1.0]).median == 2.0


def test_the_interval_is_that_of_the_median_and_repeats_itself():
    drawn = np.sort(np.random.default_rng(1).normal(1.0, 0.1, size=400))
    ratio = paired(drawn.tolist(), [1.0] * 400)
    # the median's place in the sample is binomial: deviation sqrt(400) / 2
    low = 200 - 1.96 * 10
    high = 200 + 1.96 * 10
    assert drawn[int(low - 6)] < ratio.low < drawn[int(low + 6)]
    assert drawn[int(high - 6)] < ratio.high < drawn[int(high + 6)]
    assert paired(drawn.tolist(), [1.0] * 400) == ratio


def test_an_interval_of_few_repeats_holds_all_of_them():
    ratio = paired([1.0, 3.0], [1.0, 1.0])
    assert (ratio.low, ratio.median, ratio.high) == (1.0, 2.0, 3.0)
