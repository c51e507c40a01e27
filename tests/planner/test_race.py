"""The plan table that knows nothing beforehand: it times all plans, and again when times drift.
Times are made up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial

import pytest

from moesaic.planner.plan_table import PlanTable
from moesaic.program.plan import Plan

PLANS = tuple(Plan(chunks=chunks) for chunks in range(1, 9))
LIMIT = 80
"""Steps within which the best plan must be found."""


def drive(made: PlanTable, seconds: Callable[[int, int], float], steps: int) -> list[int]:
    """Take steps in which a plan takes seconds(step, plan); returns the plans that ran."""
    ran = []
    for step in range(steps):
        ran.append(made.choose())
        made.record(seconds(step, ran[-1]))
    return ran


def table(plans: tuple[Plan, ...] = PLANS) -> PlanTable:
    return PlanTable(plans)


@pytest.mark.parametrize("best", range(8))
def test_it_ends_on_the_best_plan_whichever_that_is(best):
    made = table()
    ran = drive(made, lambda _, plan: 1.0 + 0.04 * ((plan - best) % 8), 300)
    assert set(ran[LIMIT:]) == {best}
    assert set(ran[:LIMIT]) == set(range(8)), "all were timed"
    assert made.race is None
    assert made.races == 1
    assert made.decisions[-1].why == "fastest"


def test_only_a_few_steps_are_spent_on_slow_plans():
    made = table()
    ran = drive(made, lambda _, plan: 1.0 + plan, 200)
    assert [ran.count(plan) for plan in range(4, 8)] == [3] * 4
    assert made.explored <= 52, "the first plan wins, so that no pairs are needed"
    assert ran.index(0, 40) < LIMIT


@pytest.mark.parametrize("slowed", range(0, 24, 3))
def test_a_neighbour_during_the_race_does_not_leave_a_plan_slower_than_the_first(slowed):
    """The first plan is the best; a neighbour doubles eight of the race's first steps."""
    made = table()
    neighbour = range(slowed, slowed + 8)
    ran = drive(
        made, lambda step, plan: (1.0 + 0.1 * plan) * (2.0 if step in neighbour else 1.0), 2 * LIMIT
    )
    assert ran[-1] == 0
    assert made.races == 1


def test_the_winner_of_a_race_runs_in_turn_with_the_first_plan():
    made = table()
    ran = drive(made, lambda _, plan: 1.0 if plan == 5 else 1.2, LIMIT)
    pairs = ran[52 : 52 + 20]
    assert pairs == [5, 5, 0, 0] * 5, "each after a step that warms up"
    assert set(ran[52 + 20 :]) == {5}
    assert made.timed[5] == 1.0
    assert made.timed[0] == 1.2


@pytest.mark.parametrize("resumes", [False, True])
def test_a_plan_that_becomes_slower_than_the_first_was_is_checked_again(resumes):
    made = table()
    moment = LIMIT + 20
    assert drive(made, lambda _, plan: 1.0 if plan == 5 else 1.05 + 0.05 * plan, moment)[-1] == 5
    if resumes:
        state = json.loads(json.dumps(made.state()))
        made = table()
        made.restore(state)
    ran = drive(made, lambda _, plan: 1.12 if plan == 5 else 1.05 + 0.05 * plan, 60)
    assert ran[0] == 5
    assert ran[-1] == 0
    assert made.races == 1, "only the two are timed again"


def noisy(seed: int) -> Callable[[float], float]:
    """Return what turns a time into a measured one: 4 % of noise, and one step in twenty that takes
    twice as long."""
    draw = random.Random(seed)
    return lambda seconds: (
        seconds * draw.lognormvariate(0.0, 0.04) * (2.0 if draw.random() < 0.05 else 1.0)
    )


@pytest.mark.parametrize("changes", [False, True])
def test_under_noise_it_ends_within_three_percent_of_the_best(changes):
    runs = 200
    over = [end_under_noise(seed, changes) for seed in range(runs)]
    assert sum(each <= 1.03 for each in over) >= 0.95 * runs, sorted(over)[::10]


def end_under_noise(seed: int, changes: bool) -> float:
    """Return the time of the plan that runs in the end over that of the best one."""
    draw = random.Random(1000 + seed)
    moment = LIMIT + 30
    before, after = ([draw.uniform(1.0, 1.6) for _ in PLANS] for _ in range(2))
    after = [2.0 * each for each in after] if changes else before
    noise = noisy(seed)
    ran = drive(
        table(),
        lambda step, plan: noise((before if step < moment else after)[plan]),
        moment + LIMIT + 1,
    )
    return after[ran[-1]] / min(after)


def test_a_change_while_plans_are_timed_starts_the_race_anew():
    def seconds(moment: int, step: int, plan: int) -> float:
        return 1.0 + 0.05 * plan if step < moment else 3.0 - 0.05 * plan

    for moment in range(26, 50):
        assert drive(table(), partial(seconds, moment), 200)[-1] == 7, moment


def test_steps_that_only_vary_start_no_race():
    made = table()
    noise = noisy(7)
    drive(made, lambda _, plan: noise(1.0 + 0.1 * plan), 2000)
    assert made.races == 1


def test_what_was_found_is_kept_with_the_run_and_a_race_that_was_cut_short_begins_anew():
    made = table()
    drive(made, lambda _, plan: 2.0 - 0.1 * plan, 80)
    again = table()
    again.restore(json.loads(json.dumps(made.state())))
    assert drive(again, lambda _, plan: 2.0 - 0.1 * plan, 20) == [7] * 20
    assert (again.steps, again.explored, again.races) == (100, made.explored, 1)
    cut = table()
    drive(cut, lambda _, plan: 2.0 - 0.1 * plan, 30)
    once_more = table()
    once_more.restore(json.loads(json.dumps(cut.state())))
    ran = drive(once_more, lambda _, plan: 2.0 - 0.1 * plan, LIMIT + 1)
    assert set(ran) == set(range(8))
    assert ran[-1] == 7


def test_a_run_that_goes_on_with_slower_links_races_again():
    made = table()
    again = table()
    drive(made, lambda _, plan: 2.0 - 0.1 * plan, 80)
    again.restore(made.state())
    ran = drive(again, lambda _, plan: 2.0 + 0.1 * plan, 80)
    assert ran[0] == 7
    assert ran[-1] == 0
    assert again.races == 2
