"""Tests of the measured times of options: ratios to the model, machines that drift, outliers, and the choice of trials."""

from __future__ import annotations

import math
import random

import pytest

from moesaic.balance.selector.times import KEPT, MOST_TRIALS, Times

LOAD = 1e-6


def told(times: Times, name: str, *ratios: float, program: int = 1, load: float = LOAD) -> Times:
    for ratio in ratios:
        times.note(name, program, load, 0.1, 0.1 * ratio)
    return times


def test_a_ratio_is_learned_and_one_that_is_not_known_leans_towards_its_program() -> None:
    times = told(Times(0.25), "spill", *[1.0] * KEPT)
    assert times.factor("spill", 1, LOAD) == pytest.approx(1.0)
    told(times, "steps", *[1.3] * KEPT, program=2)
    assert times.factor("steps", 2, LOAD) / times.factor("spill", 1, LOAD) == pytest.approx(1.3, rel=0.02)
    assert times.factor("steps+spill", 2, LOAD) == pytest.approx(1.3**0.5), "one option may be off, and its program not"
    told(times, "steps+shadow", *[1.3] * KEPT, program=2)
    assert times.factor("steps+spill", 2, LOAD) == pytest.approx(1.3 ** (2 / 3), rel=0.02)
    assert times.factor("shadow", 1, LOAD) == pytest.approx(1.3**0.5, rel=0.02), "between its program and the others"


def test_what_the_model_is_off_by_everywhere_cancels_out() -> None:
    times = told(told(Times(0.25), "a", *[40.0] * KEPT), "b", *[60.0] * KEPT)
    assert times.factor("b", 1, LOAD) / times.factor("a", 1, LOAD) == pytest.approx(1.5, rel=0.02)
    assert times.machine() == pytest.approx(40.0, rel=0.1)


def test_one_call_that_took_ten_times_as_long_decides_nothing() -> None:
    times = told(told(Times(0.25), "a", *[1.0] * 9), "b", *[1.0] * 9)
    told(times, "b", 10.0)
    assert times.factor("b", 1, LOAD) / times.factor("a", 1, LOAD) == pytest.approx(1.0, abs=0.01)
    few = told(told(Times(0.25), "a", *[1.0] * 9), "b", 10.0)
    assert few.factor("b", 1, LOAD) / few.factor("a", 1, LOAD) < 1.5, "a first call is not believed beyond a limit"


def test_a_machine_that_becomes_slower_makes_the_option_that_runs_no_worse() -> None:
    times = told(told(Times(0.25), "b", *[1.05] * 20), "a", *[1.0] * 20)
    before = times.factor("b", 1, LOAD) / times.factor("a", 1, LOAD)
    for step in range(200):
        told(times, "a", 1 + step / 400)
    after = times.factor("b", 1, LOAD) / times.factor("a", 1, LOAD)
    assert after == pytest.approx(before, rel=0.1), "of half as long again next to nothing is the option's"


def test_an_option_is_known_only_under_about_the_load_at_which_it_ran() -> None:
    times = told(Times(0.25), "a", 1.0, 1.0)
    assert [times.count("a", load) for load in (LOAD, 1.2 * LOAD, 1.5 * LOAD)] == [2, 2, 0]
    told(times, "a", *[1.2] * 9, load=2 * LOAD)
    assert times.factor("a", 1, 2 * LOAD) > times.factor("a", 1, LOAD)


def test_what_may_well_be_faster_is_tried_and_the_most_promising_first() -> None:
    times = told(Times(0.25), "best", *[1.0] * 9)
    assert times.worth_trying({"best": 1.0, "near": 1.2, "nearer": 1.1, "far": 1.4}, "best", LOAD) == "nearer"
    assert times.worth_trying({"best": 1.0, "far": 1.4}, "best", LOAD) is None
    told(times, "near", 1.2)
    assert times.worth_trying({"best": 1.0, "near": 1.2}, "best", LOAD) is None, "it was slower, and seen to be"


def test_trials_end_even_where_nobody_tells_what_they_took() -> None:
    times = told(Times(0.25), "best", 1.0)
    tried = 0
    while times.worth_trying({"best": 1.0, "same": 1.0}, "best", LOAD):
        times.try_out("same", 1, LOAD)
        tried += 1
    assert tried == MOST_TRIALS
    assert times.worth_trying({"best": 1.0, "same": 1.0}, "best", 3 * LOAD) == "same", "another load, another question"


def test_the_margin_is_wide_while_little_is_known() -> None:
    times = Times(0.25)
    assert times.margin(0.05, "a", "b", LOAD) == 0.05
    told(times, "a", *[0.93, 1.07] * 8)
    told(times, "b", 1.07)
    wide = times.margin(0.05, "a", "b", LOAD)
    told(times, "b", *[0.93, 1.07] * 7, 0.93)
    assert wide > 0.05 > times.margin(0.05, "a", "b", LOAD) > 0.01


def test_nonsense_is_not_taken_down() -> None:
    times = Times(0.25)
    times.note("a", 1, LOAD, 0.0, 1.0)
    times.note("a", 1, LOAD, 1.0, 0.0)
    assert times.is_empty


def test_noise_leaves_the_ratio_of_two_options_alone() -> None:
    rng, times = random.Random(0), Times(0.25)
    for _ in range(200):
        told(times, "a", math.exp(rng.gauss(0, 0.08)))
        told(times, "b", 1.1 * math.exp(rng.gauss(0, 0.08)))
    assert times.factor("b", 1, LOAD) / times.factor("a", 1, LOAD) == pytest.approx(1.1, abs=0.05)


def test_the_noise_of_calls_decides_how_long_trials_go_on_and_how_wide_the_margin_is() -> None:
    def after(deviation: float, trials: int = 3) -> Times:
        times, rng = Times(0.3), random.Random(0)
        for call in range(12 + trials):
            name, seconds = ("one", 1.0) if call < 12 else ("other", 1.04)
            times.note(name, 1, 1.0, 1.0, seconds * math.exp(rng.gauss(0, deviation)))
        return times

    quiet, loud = after(0.002), after(0.1)
    assert quiet.noise() == pytest.approx(0.002, rel=0.7)
    assert loud.noise() == pytest.approx(0.1, rel=0.7)
    thought = {"one": 1.0, "other": 1.04}
    assert quiet.worth_trying(thought, "one", 1.0) is None
    assert loud.worth_trying(thought, "one", 1.0) == "other"
    assert quiet.margin(0.05, "one", "other", 1.0) == 0.025
    assert loud.margin(0.05, "one", "other", 1.0) > 0.05
    assert Times(0.3).noise() is None
