"""The model benchmark: its configuration, its plans, what is kept, its figures. No cluster is
made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.configfile import as_toml
from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Device, Host, Link, Tflops
from moesaic_lab.model.claims import case_rows, claims, panels, rows_of
from moesaic_lab.model.config import ModelBenchConfig, ModelCase, read_config
from moesaic_lab.model.run import ModelFound, _path, _profile_path, kept, plans_of, predict
from moesaic_lab.pictures import figure

CASE = ModelCase(name="tp 2", tp=2, dim=32, hidden=32)
FEW = replace(CASE, plans=6)
BED = CASE.bed
CONFIG = ModelBenchConfig(cells=(FEW,))
PROFILE = ClusterSpec(
    nodes=2,
    devices_per_node=2,
    device=Device(tflops=Tflops(fp32=0.03), memory_gib=8, memory_gigabytes_per_second=3),
    links=(
        Link(name="inside", devices=2, gbps=(0.4,), carries="inside", shared=True),
        Link(name="outside", devices=2, gbps=(0.2,), carries="outside"),
    ),
    host=Host(runs_compute=True, layer_us=2000, task_us=200, message_us=40),
)


def found(predicted: dict[str, float], measured: dict[str, float], **fields: object) -> ModelFound:
    times = {name: (seconds,) * 3 for name, seconds in measured.items()}
    return ModelFound(
        case=CASE, predicted=predicted, screened=times, confirmed=fields.get("confirmed", times)
    )  # type: ignore[arg-type]


def many(count: int, regret: float = 0.0, error: float = 0.1) -> list[ModelFound]:
    """Return cases of 40 plans; the last one's pick takes longer than its best plan."""
    made = []
    for number in range(count):
        measured = {f"plan {n}": 0.1 + 0.01 * n for n in range(40)}
        predicted = {name: (1 + error) * seconds for name, seconds in measured.items()}
        if number == count - 1:
            measured["plan 0"] *= 1 + regret
            measured["plan 1"] = 0.1
        made.append(found(predicted, measured))
    return made


def value(name: str, cases: list[ModelFound]) -> float | None:
    return next(claim.value for claim in claims(cases) if claim.name == name)


def test_the_committed_cases_are_enough_for_the_claims() -> None:
    config = read_config()
    ranked = [case for case in config.cells if case.compute == "virtual"]
    assert len(ranked) >= 10
    assert {case.shape for case in ranked} == {"2x2", "4x2"}
    assert any(case.compute == "real" for case in config.cells)


def test_every_plan_of_a_case_is_there_once() -> None:
    plans = plans_of(CASE)
    assert len(plans) >= 40
    assert {each.plan.chunks for each in plans.values()} == {1, 2, 4}
    assert {each.plan.all_to_all for each in plans.values()} == {
        "linear",
        "pipelined",
        "hier1d",
        "hier2d",
        "hier3d",
        "naive",
        "multicast",
    }
    assert {each.plan.gather_weights for each in plans_of(replace(CASE, etp=2)).values()} == {
        None,
        0,
        1,
    }
    assert {each.plan.overlap_gather for each in plans.values()} == {False, True}
    assert all(each.plan.is_lossless for each in plans.values())
    some = plans_of(replace(CASE, plans=7))
    assert len(some) == 7
    assert set(some) <= set(plans)


def test_parts_beds_and_cases_can_be_asked_for() -> None:
    config = read_config()
    assert config.narrowed() == config
    assert {case.compute for case in config.narrowed(only=("real",)).cells} == {"real"}
    assert {case.shape for case in config.narrowed(only=("4x2",)).cells} == {"4x2"}
    assert [case.name for case in config.narrowed(only=("tp 2 slow",)).cells] == ["tp 2 slow"]
    with pytest.raises(
        InputError, match=r"--only plan: the configuration has no such part: did you mean plans"
    ):
        config.narrowed(only=("plan",))


def test_predictions_come_from_the_profile_alone() -> None:
    plans = plans_of(replace(CASE, plans=6))
    usual = predict(CASE, plans, PROFILE)
    slow = predict(CASE, plans, replace(PROFILE, host=replace(PROFILE.host, task_us=1000)))
    quick = predict(replace(CASE, gflops=1e-3), plans, PROFILE)
    assert all(slow[name] > usual[name] and quick[name] > usual[name] for name in plans)


def test_what_is_kept_is_used_again_for_the_same_case_only(tmp_path: Path) -> None:
    plans = plans_of(FEW)
    table = {"screened": {name: [0.1, 0.2, 0.3] for name in plans}, "confirmed": {}}
    _profile_path(tmp_path, BED).write_text(as_toml(PROFILE))
    assert kept(CONFIG, tmp_path) == []
    _path(tmp_path, CONFIG, FEW).write_text(json.dumps(table))
    (again,) = kept(CONFIG, tmp_path)
    assert again.measured == dict.fromkeys(plans, 0.2)
    assert again.predicted == predict(FEW, plans, PROFILE)
    for other in ({"gflops": 1.0}, {"repeats": 9}, {"inter": "100mbit"}):
        assert kept(replace(CONFIG, cells=(replace(FEW, **other),)), tmp_path) == []  # type: ignore[arg-type]
    assert kept(replace(CONFIG, leaders=9), tmp_path) == []
    _path(tmp_path, CONFIG, FEW).write_text(json.dumps({"screened": {"x": [1.0]}, "confirmed": {}}))
    with pytest.raises(InputError, match="other plans than this version"):
        kept(CONFIG, tmp_path)


def test_errors_and_their_percentile() -> None:
    cases = many(10)
    assert value("model.median_error", cases) == pytest.approx(0.1)
    assert value("model.p95_error", cases) == pytest.approx(0.1)
    assert value("model.rank_correlation", cases) == pytest.approx(1.0, abs=1e-4)
    spread = [
        found(
            {f"{n}": (1 + n) * (1 + n / 100) for n in range(101)},
            {f"{n}": 1.0 + n for n in range(101)},
        )
    ]
    assert value("model.p95_error", spread) == pytest.approx(0.95)
    assert value("model.median_error", spread) == pytest.approx(0.5)
    wrong = [found({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 3.0, "b": 2.0, "c": 1.0})] * 20
    assert value("model.rank_correlation", wrong) == pytest.approx(-1.0)
    assert value("model.median_error", wrong) == pytest.approx(2 / 3)


def test_regret_is_the_worst_case_and_rests_on_enough_of_them() -> None:
    assert value("model.planner_regret", many(10)) == 0
    assert value("model.planner_regret", many(10, regret=0.05)) == pytest.approx(0.05)
    assert value("model.planner_regret_median", many(10, regret=0.05)) == 0
    few = next(claim for claim in claims(many(9)) if claim.name == "model.planner_regret")
    assert few.value is None
    assert "9 cases" in few.reason


def test_regret_is_among_the_plans_that_were_timed_again() -> None:
    measured = {"a": 0.10, "b": 0.09, "c": 0.20}
    confirmed = {"a": (0.10,) * 5, "b": (0.098,) * 5}
    each = found({"a": 1.0, "b": 2.0, "c": 3.0}, measured, confirmed=confirmed)
    assert each.pick == "a"
    assert each.regret == pytest.approx(0.10 / 0.098 - 1)
    other = replace(each, predicted={"a": 3.0, "b": 2.0, "c": 1.0})
    assert other.regret == pytest.approx(0.20 / 0.098 - 1)


def test_what_was_not_measured_is_listed_with_its_reason() -> None:
    made = {claim.name: claim for claim in claims([])}
    targets = {
        "model.median_error": 0.06,
        "model.p95_error": 0.15,
        "model.rank_correlation": 0.97,
        "model.planner_regret": 0.03,
    }
    assert {name: made[name].target for name in targets} == targets
    assert all(claim.value is None and claim.reason for claim in made.values())


def test_rows_and_picture_show_every_plan() -> None:
    cases = many(2)
    rows = rows_of(cases)
    assert len(rows) == 80
    assert rows[0]["error"] == pytest.approx(0.1)
    assert sum(row["is_pick"] for row in rows) == 2
    assert [row["plans"] for row in case_rows(cases)] == [40, 40]
    json.dumps([*rows, *case_rows(cases)])
    (panel,) = panels(cases)
    assert [len(series.x) for series in panel.series] == [2, 40, 40]
    assert figure("model", [panel]).axes


def test_regret_counts_cases_of_few_plans_too() -> None:
    few = found({"a": 1.0, "b": 2.0}, {"a": 0.3, "b": 0.2})
    assert value("model.planner_regret", [*many(10), few]) == pytest.approx(0.5)
