"""The plan table: what it holds, tries and refuses, on times that are made up."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from moesaic.errors import InputError
from moesaic.planner.table import PlanTable, TableSettings
from moesaic.program.plan import Plan

PLANS = (Plan(), Plan(schedule="s2"), Plan(chunks=2), Plan(codec="int8"))
SETTINGS = TableSettings(rows_per_bucket=100, explore=0.1, hysteresis=0.05, trial_steps=2)


def table(predicted: Sequence[float], settings: TableSettings = SETTINGS, **options: object) -> PlanTable:
    return PlanTable(PLANS[: len(predicted)], lambda _: predicted, settings, **options)  # type: ignore[arg-type]


def drive(made: PlanTable, seconds: Sequence[float], steps: int, load: float = 50.0) -> list[int]:
    """Take steps in which plan i takes seconds[i]; returns the plans that ran."""
    ran = []
    for _ in range(steps):
        ran.append(made.choose(load))
        made.record(seconds[ran[-1]])
    return ran


def test_it_starts_with_the_plan_that_is_predicted_best() -> None:
    assert table([3.0, 2.0, 2.5]).choose(0) == 1
    assert table([3.0, 2.9, 2.95]).choose(0) == 0, "too little to leave the first plan"


def test_a_wrong_prediction_is_found_out_by_a_trial_and_corrected() -> None:
    made = table([1.0, 1.1, 1.2])
    ran = drive(made, [1.0, 0.5, 2.0], 300)
    assert ran[:3] == [0, 0, 0], "measured before anything is tried"
    assert ran[-1] == 1
    assert [(each.plan, each.why) for each in made.decisions][:2] == [(0, "start"), (1, "trial")]
    assert ran.count(1) > 280


def test_what_a_plan_was_seen_to_take_counts_at_other_loads() -> None:
    made = PlanTable(PLANS[:2], lambda load: (1.0 + load / 1000, 1.1 + load / 1000), SETTINGS)
    assert set(drive(made, [1.0, 0.5], 50)) == {0, 1}
    before = made.explored
    assert drive(made, [1.0, 0.5], 5, load=550.0) == [1] * 5, "no trial at a load that is new"
    assert made.explored == before
    assert made.estimates(8)[1] == pytest.approx((1.1 + 0.85) * 0.5 / 1.15, rel=0.2)


def test_predictions_that_are_off_alike_end_the_trials() -> None:
    good, bad = (table([1.0, 1.1, 1.2], SETTINGS) for _ in range(2))
    drive(good, [2.0, 2.2, 2.4], 1000)
    drive(bad, [2.0, 2.2 * 0.85, 2.4], 1000)
    assert good.explored == 2, "one trial, cut short: the second plan's prediction was as far off as the first's"
    assert bad.explored > 2


def test_predictions_off_by_one_factor_decide_nothing() -> None:
    made = table([1.0, 2.0, 3.0])
    ran = drive(made, [100.0, 200.0, 300.0], 300)
    assert set(ran) == {0}, "plans that are slower by more than the optimism are not tried"
    assert made.estimates(0) == pytest.approx([100, 200, 300])


@pytest.mark.parametrize("explore", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("trial_steps", [1, 4])
def test_no_more_than_the_share_of_steps_is_tried(explore: float, trial_steps: int) -> None:
    draw = random.Random(trial_steps)
    settings = TableSettings(rows_per_bucket=10, explore=explore, trial_steps=trial_steps, optimism=0.9)
    made = table([1.0, 1.0, 1.0], settings)
    for step in range(1, 600):
        made.choose(draw.uniform(0, 50))
        made.record(draw.uniform(0.5, 1.5))
        assert made.explored <= explore * 200 * (1 + step // 200) + 1e-9
    assert (made.explored > 0) == (explore > 0)


def test_each_trial_measures_its_steps_and_leaves_out_the_first() -> None:
    made = table([1.0, 1.0], TableSettings(rows_per_bucket=100, explore=0.1, trial_steps=3))
    ran = drive(made, [1.0, 1.0], 45)
    first = ran.index(1)
    assert ran[first : first + 4] == [1] * 4
    assert ran[first + 4] == 0
    assert made.entries[0][1].count == 3
    # Of the other steps, the first of the run and the first after each trial are left out too.
    assert made.entries[0][0].count == 45 - 4 - 2


def test_hysteresis_keeps_a_plan_that_is_nearly_as_good() -> None:
    for faster, at_first, in_the_end in ((0.94, 1, 1), (0.97, 0, 1), (0.995, 0, 0)):
        made = table([1.0, 1.0])
        ran = drive(made, [1.0, faster], 1500)
        after = ran.index(1) + 3
        assert (ran[after], ran[-1]) == (at_first, in_the_end), faster


def test_a_step_counts_at_the_load_that_it_had() -> None:
    """Told the middle of bucket 0, steps have loads at its two ends; by rate over the bucket plans would seem a fifth apart."""

    def seconds(load: float) -> tuple[float, float]:
        return 1.0 + load / 100, 1.1 * (1.0 + load / 100)

    for knows in (True, False):
        made = PlanTable(PLANS[:2], seconds, TableSettings(rows_per_bucket=100, explore=0.2))
        for _ in range(60):
            plan = made.choose(150.0)
            load = 105.0 if plan == 1 else 195.0
            made.record(seconds(load)[plan], load if knows else None)
        factors = made._plan_factors()
        assert factors[0] == pytest.approx(1.0 if knows else 2.95 / 2.5)
        if knows:
            assert set(factors) == {0} or factors[1] == pytest.approx(1.0)
        else:
            assert factors[1] < 0.85


@pytest.mark.parametrize("error", [0.5, 2.0])
def test_loads_that_are_told_wrong_are_corrected_by_what_they_were(error: float) -> None:
    best = {False: (1.0, 1.3), True: (2.3, 2.0)}
    made = PlanTable(PLANS[:2], lambda load: best[load > 400], SETTINGS)
    ran = []
    for step in range(100):
        load = (350.0, 650.0)[step // 10 % 2]
        ran.append((load, made.choose(error * load)))
        made.record(best[load > 400][ran[-1][1]], load)
    assert [plan for _, plan in ran[10:]] == [int(load > 400) for load, _ in ran[10:]]
    assert {each.bucket for each in made.decisions[1:]} == {3, 6}
    assert sorted(bucket for bucket, each in made.entries.items() if each[0].measured or each[1].measured) == [3, 6]


def test_loads_that_may_be_either_are_planned_for_together() -> None:
    """Told 400 for loads of 200 and of 800; the plan is the one that is good over both, not that of 400 or of either."""
    found = {200: (3.0, 1.0), 400: (1.0, 2.0), 800: (3.0, 3.6)}
    made = PlanTable(PLANS[:2], lambda load: found[min(found, key=lambda each: abs(each - load))], SETTINGS)
    assert made.choose(400.0) == 0
    ran = []
    for step in range(120):
        ran.append(made.choose(400.0))
        load = (200.0, 800.0)[step % 2]
        made.record(found[int(load)][ran[-1]], load)
    assert ran[-40:] == [1] * 40


def test_a_trial_that_shows_a_slower_plan_ends_at_once() -> None:
    made = table([1.0, 1.0], TableSettings(rows_per_bucket=100, explore=0.1, trial_steps=5))
    ran = drive(made, [1.0, 1.5], 40)
    assert ran.count(1) == 2, "one step that is left out, one that says enough"


def test_noise_does_not_make_it_flap() -> None:
    draw = random.Random(3)
    made = table([1.0, 1.0, 1.0])
    for _ in range(1000):
        plan = made.choose(50.0)
        made.record([1.0, 1.02, 0.99][plan] * draw.uniform(0.97, 1.03))
    assert sum(each.why == "faster" for each in made.decisions) <= 2


def test_one_slow_step_decides_nothing() -> None:
    made = table([1.0, 1.1], TableSettings(rows_per_bucket=100, explore=0.0))
    drive(made, [1.0, 1.1], 6)
    made.choose(50.0)
    made.record(50.0)
    assert drive(made, [1.0, 1.1], 20) == [0] * 20


def test_each_load_has_its_own_plan_and_the_switch_says_why() -> None:
    made = PlanTable(PLANS[:2], lambda load: (1.0, 2.0) if load < 100 else (2.0, 1.0), SETTINGS)
    assert [made.choose(load) for load in (10, 20, 110, 190, 10)] == [0, 0, 1, 1, 0]
    assert [(each.plan, each.why, each.bucket) for each in made.decisions] == [
        (0, "start", 0),
        (1, "load", 1),
        (0, "load", 0),
    ]
    assert made.switches == 2


def test_a_measured_plan_is_left_for_another_only_without_doubt() -> None:
    settings = TableSettings(rows_per_bucket=100, explore=0.0, optimism=0.25)
    for other, expected in ((1.0, 1), (1.59, 1), (1.61, 0), (1.9, 0)):
        made = PlanTable(PLANS[:2], lambda load: (1.0, 1.2) if load < 100 else (2.0, other), settings)  # noqa: B023
        drive(made, [3.0, 3.0], 5)
        assert made.choose(150.0) == expected, other


def test_predictions_are_asked_once_per_load_at_the_middle_of_its_bucket() -> None:
    asked: list[float] = []
    made = PlanTable(PLANS[:1], lambda load: asked.append(load) or [1.0], SETTINGS)  # type: ignore[func-returns-value]
    for load in (0, 99.9, 100, 250, 199, 299):
        made.choose(load)
    assert asked == [50, 150, 250]


def test_a_lossy_plan_is_never_run_untested() -> None:
    predicted, seconds = [1.0, 1.0, 1.0, 0.01], [1.0, 1.0, 1.0, 0.01]
    made = table(predicted, TableSettings(rows_per_bucket=100, explore=0.3, optimism=0.9))
    assert 3 not in drive(made, seconds, 500)
    tested = table(predicted, SETTINGS, tested={("int8", "none")})
    assert drive(tested, seconds, 5) == [3] * 5
    other = table(predicted, SETTINGS, tested={("int8", "int8")})
    assert 3 not in drive(other, seconds, 100)
    with pytest.raises(InputError, match="no plan that may be run: name a lossless one"):
        PlanTable(PLANS[3:], lambda _: [1.0])


def test_the_same_loads_and_times_give_the_same_plans_on_every_rank() -> None:
    draw = random.Random(0)
    tables = [table([1.0, 1.1, 0.9]) for _ in range(3)]
    for _ in range(500):
        load, seconds = draw.uniform(0, 400), [draw.uniform(0.5, 1.5) for _ in PLANS]
        chosen = {made.choose(load) for made in tables}
        assert len(chosen) == 1
        for made in tables:
            made.record(seconds[chosen.copy().pop()])


def test_it_goes_on_where_it_was_saved() -> None:
    draw = random.Random(1)
    whole, part = table([1.0, 1.1, 0.9]), table([1.0, 1.1, 0.9])
    steps = [(draw.uniform(0, 300), [draw.uniform(0.5, 1.5) for _ in PLANS]) for _ in range(400)]
    for load, seconds in steps[:200]:
        for made in (whole, part):
            made.record_of = made.choose(load)  # type: ignore[attr-defined]
            made.record(seconds[made.record_of])  # type: ignore[attr-defined]
    again = table([1.0, 1.1, 0.9])
    again.restore(json.loads(json.dumps(part.state())))
    assert again.entries == part.entries
    assert (again.held, again.steps, again.explored, again.switches) == (
        part.held,
        part.steps,
        part.explored,
        part.switches,
    )
    assert again.estimates(1) == whole.estimates(1)
    load = steps[200][0]
    assert again.choose(load) in (again.held[again.bucket_of(load)], again.running)


def test_other_plans_keep_what_they_share_with_a_saved_table() -> None:
    saved = table([1.0, 2.0])
    drive(saved, [7.0, 8.0], 5)
    other = PlanTable((PLANS[2], PLANS[0]), lambda _: [3.0, 4.0], SETTINGS)
    other.restore(saved.state())
    assert other.entries[0][1].measured == [7.0] * 4
    assert (other.entries[0][0].measured, other.entries[0][1].predicted) == ([], 4.0)
    assert other.held == {0: 1}


@pytest.mark.parametrize("change", [{"version": 9}, {"rows_per_bucket": 1}])
def test_a_table_of_another_kind_is_refused(change: dict) -> None:
    made = table([1.0])
    with pytest.raises(InputError, match="start anew, or set rows_per_bucket back"):
        made.restore({**made.state(), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"plans": "s1"}, {"plans": None}, {"entries": {"0": 0.5}}, {"entries": {"0": [{}]}}, {"entries": {"-1": []}},
        {"entries": {"0": [{"measured": ["x"], "count": 1}]}}, {"entries": {"0": [{"measured": [-1.0], "count": 1}]}},
        {"entries": {"0": [{"measured": [1.0], "count": -4}]}}, {"held": {"0": 7}}, {"last_run": {"0": None}},
        {"ratios": [float("nan")]}, {"counts": [1]}, {"counts": [1, 2, -3]},
    ],
)  # fmt: skip
def test_a_damaged_table_is_refused(change: dict) -> None:
    made = table([1.0])
    with pytest.raises(InputError, match=r"is damaged .*: delete the file to start anew"):
        table([1.0]).restore({**made.state(), **change})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"explore": 1.0}, "explore=1.0: choose a share"),
        ({"hysteresis": -0.1}, "hysteresis=-0.1: choose a share"),
        ({"rows_per_bucket": 0}, "rows_per_bucket=0: must be a finite number above 0"),
        ({"trial_steps": 0}, "trial_steps=0: must be at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        TableSettings(**changes)
