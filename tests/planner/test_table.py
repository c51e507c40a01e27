"""The plan table: what it holds, tries and refuses, on times that are made up."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.planner.plan_table import PlanTable, TableSettings
from moesaic.program.plan import Plan

PLANS = (Plan(), Plan(schedule="s2"), Plan(chunks=2), Plan(codec="int8"))
SETTINGS = TableSettings(rows_per_bucket=100, hysteresis=0.05)


def table(
    predicted: Sequence[float], settings: TableSettings = SETTINGS, **options: object
) -> PlanTable:
    return PlanTable(PLANS[: len(predicted)], lambda _: predicted, settings, load=50.0, **options)  # type: ignore[arg-type]


def drive(made: PlanTable, seconds: Sequence[float], steps: int, load: float = 50.0) -> list[int]:
    """Take steps in which plan i takes seconds[i]; returns the plans that ran."""
    ran = []
    for _ in range(steps):
        ran.append(made.choose())
        made.record(seconds[ran[-1]], load)
    return ran


def by_load(load: float) -> tuple[float, float]:
    """Return seconds of two plans, of which the second is faster at large loads."""
    return (1.0, 1.3) if load < 400 else (2.3, 2.0)


def test_it_starts_with_the_plan_that_is_predicted_best_and_times_those_that_are_near() -> None:
    made = table([3.0, 2.0, 2.5])
    ran = drive(made, [3.0, 2.0, 2.5], 60)
    assert ran[:6] == [1, 1, 1, 2, 2, 2], (
        "a warm-up step and two timed ones each, the best prediction first"
    )
    assert 0 not in ran, "it would be slower even if it were a quarter faster than predicted"
    assert set(ran[20:]) == {1}


def test_a_wrong_prediction_is_found_out_and_corrected() -> None:
    made = table([1.0, 1.1, 1.2])
    ran = drive(made, [1.0, 0.5, 2.0], 300)
    assert [(each.plan, each.why) for each in made.decisions[:2]] == [(0, "start"), (1, "trial")]
    assert made.decisions[-1].why == "fastest"
    assert ran.count(1) > 280


def test_what_a_plan_was_seen_to_take_counts_at_other_loads() -> None:
    made = PlanTable(
        PLANS[:2], lambda load: (1.0 + load / 1000, 1.1 + load / 1000), SETTINGS, load=50.0
    )
    assert set(drive(made, [1.0, 0.5], 50)) == {0, 1}
    before = made.explored
    assert drive(made, [1.0, 0.5], 5, load=850.0) == [1] * 5, "no trial at a load that is new"
    assert made.explored == before
    assert made.estimates()[0] == pytest.approx(1.85 / 1.05, rel=0.01)


def test_a_plan_that_disappoints_at_a_load_is_left_there_for_one_that_was_faster() -> None:
    """Both were timed at small loads; at large ones the second is predicted to be faster, and is
    not."""
    made = PlanTable(PLANS[:2], by_load, SETTINGS, load=50.0)
    drive(made, [1.0, 1.3], 30)
    ran = drive(made, [2.3, 2.6], 60, load=650.0)
    assert 1 in ran
    assert set(ran[30:]) == {0}
    assert made.races == 1


def test_predictions_off_by_one_factor_decide_nothing() -> None:
    made = table([1.0, 2.0, 3.0])
    assert set(drive(made, [100.0, 200.0, 300.0], 300)) == {0}
    assert made.estimates() == pytest.approx([100, 200, 300])


def test_after_a_change_plans_race_that_were_predicted_to_be_slow() -> None:
    made = table([1.0, 2.0, 3.0])
    assert set(drive(made, [1.0, 2.0, 3.0], 30)) == {0}
    assert drive(made, [3.0, 2.0, 1.0], 60)[-1] == 2
    assert made.races == 2


def test_hysteresis_keeps_a_plan_that_is_nearly_as_good() -> None:
    for other, expected in ((1.97, 0), (1.85, 1)):
        made = PlanTable(
            PLANS[:2],
            lambda load, other=other: (1.0, 1.2) if load < 100 else (2.0, other),
            SETTINGS,
            load=50.0,
        )
        assert set(drive(made, [1.0, 1.2], 30)[20:]) == {0}
        assert drive(made, [2.0, other], 6, load=350.0)[-1] == expected, other


def test_a_step_counts_at_the_load_that_it_had() -> None:
    """Steps of the two plans have loads at the two ends of a bucket; by rate over the bucket plans
    would seem a fifth apart."""

    def seconds(load: float) -> tuple[float, float]:
        return 1.0 + load / 100, 1.02 * (1.0 + load / 100)

    made = PlanTable(PLANS[:2], seconds, SETTINGS, load=150.0)
    for _ in range(60):
        plan = made.choose()
        load = 105.0 if plan == 1 else 195.0
        made.record(seconds(load)[plan], load)
    assert made.running == 0
    assert made.estimates() == pytest.approx(seconds(150.0))


def test_loads_that_may_be_either_are_planned_for_together() -> None:
    """Loads of 200 and of 800 take turns; the plan is the one that is good over both, not the best
    at one of them."""
    found = {250: (3.0, 1.0), 850: (3.0, 3.6)}
    made = PlanTable(
        PLANS[:2], lambda load: found[250 if load < 500 else 850], SETTINGS, load=250.0
    )
    ran = []
    for step in range(120):
        ran.append(made.choose())
        load = (250, 850)[step % 2]
        made.record(found[load][ran[-1]], load)
    assert ran[-40:] == [1] * 40


def test_noise_does_not_make_it_flap() -> None:
    draw = random.Random(3)
    made = table([1.0, 1.0, 1.0])
    for _ in range(1000):
        plan = made.choose()
        made.record([1.0, 1.02, 0.99][plan] * draw.uniform(0.97, 1.03), 50.0)
    assert made.races == 1
    assert sum(each.why == "faster" for each in made.decisions) <= 1


def test_one_slow_step_decides_nothing() -> None:
    made = table([1.0, 1.1])
    drive(made, [1.0, 1.1], 30)
    made.choose()
    made.record(50.0, 50.0)
    assert drive(made, [1.0, 1.1], 20) == [0] * 20


def test_each_load_has_its_own_plan_and_the_switch_says_why() -> None:
    made = PlanTable(PLANS[:2], by_load, SETTINGS, load=50.0)
    drive(made, by_load(50), 30)
    ran = []
    for step in range(90):
        load = (50.0, 650.0)[step // 15 % 2]
        ran.append((load, made.choose()))
        made.record(by_load(load)[ran[-1][1]], load)
    settled = [each for step, each in enumerate(ran) if step % 15 >= 5]
    assert all(plan == (load > 400) for load, plan in settled)
    assert {each.why for each in made.decisions[-5:]} == {"faster"}
    assert made.races == 1


def test_predictions_are_asked_once_per_load_at_the_middle_of_its_bucket() -> None:
    asked: list[float] = []
    made = PlanTable(PLANS[:1], lambda load: asked.append(load) or [1.0], SETTINGS)  # type: ignore[func-returns-value]
    for load in (0, 99.9, 100, 250, 199, 299):
        made.choose()
        made.record(1.0, load)
    assert len(asked) == len(set(asked))
    assert set(asked) <= {50, 150, 250, 350}


def test_a_lossy_plan_is_never_run_untested() -> None:
    predicted = [1.0, 1.0, 1.0, 0.01]
    seconds = [1.0, 1.0, 1.0, 0.01]
    made = table(predicted, TableSettings(rows_per_bucket=100, optimism=0.9))
    assert 3 not in drive(made, seconds, 500)
    tested = table(predicted, SETTINGS, tested={("int8", "none")})
    assert set(drive(tested, seconds, 50)) == {3}, (
        "the others would be slower even if a quarter faster"
    )
    other = table(predicted, SETTINGS, tested={("int8", "int8")})
    assert 3 not in drive(other, seconds, 100)
    with pytest.raises(InputError, match="no plan that may be run: name a lossless one"):
        PlanTable(PLANS[3:], lambda _: [1.0])


def test_the_same_loads_and_times_give_the_same_plans_on_every_rank() -> None:
    draw = random.Random(0)
    tables = [table([1.0, 1.1, 0.9]) for _ in range(3)]
    for _ in range(500):
        load = draw.uniform(0, 400)
        seconds = [draw.uniform(0.5, 1.5) for _ in PLANS]
        (chosen,) = {made.choose() for made in tables}
        for made in tables:
            made.record(seconds[chosen], load)


def test_it_goes_on_where_it_was_saved() -> None:
    draw = random.Random(1)
    made = table([1.0, 1.1, 0.9])
    for _ in range(200):
        plan = made.choose()
        made.record((1.0, 1.1, 0.9)[plan] * draw.uniform(0.98, 1.02), draw.uniform(0, 300))
    again = table([1.0, 1.1, 0.9])
    again.restore(json.loads(json.dumps(made.state())))
    assert again.entries == made.entries
    assert (again.steps, again.explored, again.switches, again.races) == (
        200,
        made.explored,
        made.switches,
        1,
    )
    assert again.estimates() == made.estimates()
    assert again.choose() == made.running


@pytest.mark.parametrize(
    "change", [{"version": 9}, {"rows_per_bucket": 1}, {"plans": "s1"}, {"plans": None}]
)
def test_a_table_of_another_kind_is_refused(change: dict) -> None:
    made = table([1.0])
    assert "start anew" in refused(lambda: made.restore({**made.state(), **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"measured": {"0": 0.5}},
        {"measured": {"0": [{}, []]}},
        {"measured": {"-1": []}},
        {"measured": {"0": [["x"]]}},
        {"measured": {"0": [[-1.0]]}},
        {"measured": {"0": [[0.0]]}},
        {"loads": [float("nan")]},
        {"loads": None},
        {"timed": None},
        {"timed": {"7": 1.0}},
        {"timed": {"0": 0.0}},
        {"counts": [1]},
        {"counts": [1, 2, -3, 1]},
    ],
)
def test_a_damaged_table_is_refused(change: dict) -> None:
    made = table([1.0])
    with pytest.raises(InputError, match=r"is damaged .*: delete the file to start anew"):
        table([1.0]).restore({**made.state(), **change})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimism": 1.0}, "optimism=1.0: choose a share"),
        ({"hysteresis": -0.1}, "hysteresis=-0.1: choose a share"),
        ({"rows_per_bucket": 0}, "rows_per_bucket=0: must be a finite number above 0"),
        ({"drift": 1.5}, "drift=1.5: choose a share of at least 0 and below 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        TableSettings(**changes)
