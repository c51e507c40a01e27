"""The benchmark of schedules: counted bytes equal the formulas, wrong ones are noticed, the stored
results are complete."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.program.plan import Plan
from moesaic_lab import schedules

PUBLISHED = ("linear", "pipelined", "hier1d", "hier2d", "hier3d", "naive")
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    "plan",
    [
        Plan(schedule="s1"),
        Plan(schedule="ted"),
        Plan(schedule="baseline"),
        Plan(schedule="s3", all_to_all="hier1d"),
        Plan(schedule="s2", all_to_all="hier2d"),
        Plan(schedule="s2", all_to_all="multicast"),
        Plan(schedule="s2", gather_weights=0),
        Plan(schedule="s2", gather_weights=1),
    ],
    ids=lambda plan: f"{plan.schedule}-{plan.all_to_all}-{plan.gather_weights}",
)
def test_counted_bytes_equal_the_formulas_and_others_do_not(plan: Plan) -> None:
    grid = schedules.GRIDS["loopback"]
    counted = schedules.on_loopback(grid, plan)
    line = schedules.row("loopback", grid, plan, counted)
    assert line["wrong"] == ""
    assert line["forward_inside_bytes"] + line["forward_across_bytes"] > 0
    for key in [key for key in counted if key.startswith("forward")]:
        inside, across = counted[key]
        doctored = {**counted, key: (inside + 8, across)}
        assert (
            key.split()[1].split("/")[0] in schedules.row("loopback", grid, plan, doctored)["wrong"]
        )
        missing = {other: value for other, value in counted.items() if other != key}
        if inside + across:
            assert schedules.row("loopback", grid, plan, missing)["wrong"]


def test_formulas_depend_on_the_mesh_and_the_nodes() -> None:
    grid = schedules.GRIDS["loopback"]
    plan = Plan(schedule="s2", all_to_all="hier2d")
    plain = schedules.formulas(grid, plan)
    assert schedules.formulas(replace(grid, ranks_per_node=2), plan) != plain
    assert schedules.formulas(replace(grid, tp=1), plan) != plain
    assert schedules.formulas(grid, replace(plan, all_to_all="linear")) != plain


@pytest.mark.parametrize("link", PUBLISHED)
@pytest.mark.parametrize("schedule", ["s1", "s3"])
def test_paths_say_what_the_formulas_of_the_papers_say(schedule: str, link: str) -> None:
    """All-to-alls without a formula of their own are held against the legs of their paths."""
    grid = schedules.GRIDS["loopback"]
    plan = Plan(schedule=schedule, all_to_all=link)
    same, crossing = schedules.mean_legs(grid, link, ("ep", "etp") if schedule == "s1" else ("ep",))
    one = schedules.hops(plan, grid, (1.0, 0.0))
    other = schedules.hops(plan, grid, (0.0, 1.0))
    assert one == pytest.approx(same)
    assert other == pytest.approx(crossing)


def test_the_stored_results_cover_every_published_schedule_and_all_to_all_on_both_transports() -> (
    None
):
    found = json.loads(
        (ROOT / "benchmarks" / "results" / "schedules.json").read_text(encoding="utf-8")
    )
    for transport in ("loopback", "gloo"):
        rows = [row for row in found["rows"] if row["transport"] == transport]
        assert {row["schedule"] for row in rows} >= {"baseline", "ted", "s1", "s2", "s3"}
        assert {row["all_to_all"] for row in rows} >= {
            "linear",
            "pipelined",
            "hier1d",
            "hier2d",
            "hier3d",
            "naive",
            "multicast",
        }
    assert not [row for row in found["rows"] if row["wrong"]]
    assert all(claim["holds"] for claim in found["claims"])
