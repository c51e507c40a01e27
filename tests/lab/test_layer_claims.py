"""The layer benchmark's claims by hand, and its rows, tables and pictures, from cells that nobody
measured."""

from __future__ import annotations

from typing import Any

import pytest
from layer_cells import cell
from rich.console import Console

from moesaic.program.grid import Grid
from moesaic_lab.layer.benchmark import BENCHMARK, all_rows, claims, panels, rows_of, tables
from moesaic_lab.layer.config import AdaptiveR
from moesaic_lab.layer.ranks import Switch
from moesaic_lab.pictures import figure

TP4 = Grid(world=16, tp=4, ep=4, etp=4, ranks_per_node=4)
STRIDED = Grid(world=16, tp=4, ep=4, etp=4, ranks_per_node=4, innermost="ep")


def value(name: str, *cells: Any) -> float | None:
    (found,) = [claim for claim in claims(cells) if claim.name == name]
    return found.value


def reason(name: str, *cells: Any) -> str:
    (found,) = [claim for claim in claims(cells) if claim.name == name]
    assert found.value is None
    return found.reason


def test_every_claim_is_listed_with_a_reason_where_nothing_was_measured() -> None:
    found = claims([])
    assert {claim.name: (claim.op, claim.target) for claim in found} == {
        "layer.best_over_baseline_tp4": (">=", 4.0),
        "layer.worst_over_best_single": ("<=", 1.03),
        "layer.switch_cost_share": ("<=", 0.01),
        "layer.first_switch_share": ("<=", None),
        "layer.fixed_r_over_adaptive": (">=", None),
        "layer.schemoe_ablation": (">=", 2.0),
    }
    assert all(claim.value is None and claim.reason.startswith("no case of ") for claim in found)


def test_best_over_baseline_is_the_median_over_meshes_of_tp_and_etp_4() -> None:
    cells = [
        cell("schedules", {"baseline": 6.0, "s1": 2.0, "s3": 1.0}, best="s3", grid=TP4),
        cell("schedules", {"baseline": 6.0, "s1": 2.0, "s3": 2.0}, best="s1", grid=STRIDED),
        cell("schedules", {"baseline": 9.0, "s1": 1.0}, best="s1"),
    ]
    assert value("layer.best_over_baseline_tp4", *cells) == pytest.approx((6 + 3) / 2)
    assert "at tp = etp = 4" in reason("layer.best_over_baseline_tp4", cells[-1])


def test_worst_over_single_is_one_where_the_best_plan_is_the_fastest_single() -> None:
    assert (
        value(
            "layer.worst_over_best_single",
            cell("schedules", {"baseline": 3.0, "s1": 1.0, "s2": 1.2}, best="s1"),
        )
        == 1
    )


def test_worst_over_single_takes_the_fastest_single_and_the_worst_cell() -> None:
    good = cell("schedules", {"ted": 3.0, "s1": 2.0, "s2": 2.5, "s3": 1.0}, best="s3")
    bad = cell("schedules", {"s1": 1.0, "s2": 1.25}, best="s2")
    assert value("layer.worst_over_best_single", good) == pytest.approx(0.5)
    assert value("layer.worst_over_best_single", good, bad) == pytest.approx(1.25)


def test_a_ratio_near_one_wants_many_pairs_and_is_taken_at_the_worse_end() -> None:
    few = cell("schedules", {"s1": 1.0, "s2": 1.02}, best="s2")
    assert (
        reason("layer.worst_over_best_single", few)
        == "a cell: 8 repeats, a ratio under 1.10 needs 30"
    )
    spread = [1.0, 1.04] * 20
    many = cell(
        "schedules", {"s1": [1.0] * 40, "s2": spread}, best="s2", near=("s1", "s2"), pairs=40
    )
    assert value("layer.worst_over_best_single", many) == pytest.approx(1.04)


def test_plans_that_do_the_same_are_no_slower_than_each_other() -> None:
    same = cell(
        "schedules", {"baseline": 1.0}, best="baseline", same={"s1": "baseline", "s2": "baseline"}
    )
    assert value("layer.worst_over_best_single", same) == 1


def switch(again: float, first: float = 0.2, first_call: float = 0.3) -> Switch:
    return Switch(
        first_seconds=first,
        first_call_seconds=first_call,
        again_seconds=again,
        messages=0,
        allocated_bytes=0,
    )


def test_a_switch_counts_as_a_share_of_its_own_step() -> None:
    found = cell(
        "adaptive_r", {"r=1": 10.0, "r=0": 5.0}, switches={"r=1": switch(0.01), "r=0": switch(0.02)}
    )
    assert value("layer.switch_cost_share", found) == pytest.approx(0.02 / 5)
    assert value("layer.first_switch_share", found) == pytest.approx(0.5 / 5)
    assert "that counts switches" in reason(
        "layer.switch_cost_share", cell("adaptive_r", {"r=1": 1.0})
    )


def test_adaptive_r_is_held_against_the_best_r_that_stays() -> None:
    cells = [
        cell("adaptive_r", {"r=0": 4.0, "r=1": 1.0, "r=2": 2.0}),
        cell("adaptive_r", {"r=0": 2.0, "r=1": 6.0, "r=2": 3.0}),
    ]
    assert value("layer.fixed_r_over_adaptive", *cells) == pytest.approx((2 + 3) / (1 + 2))


def test_the_ablation_compares_its_first_and_last_step() -> None:
    found = cell("ablation", {"plain": 6.0, "+ zfp": 4.0, "+ schedule": 2.5})
    assert value("layer.schemoe_ablation", found) == pytest.approx(2.4)


def test_a_bound_is_the_links_or_the_computing() -> None:
    found = cell("codecs", {"none": 1.0})
    assert found.bound("none") == 0.75
    found.charged["none"] = 2.0  # type: ignore[index]
    assert found.bound("none") == 2.0


def test_rows_say_virtual_compute_and_what_is_the_same() -> None:
    found = cell("schedules", {"baseline": 2.0, "s1": 1.0}, best="s1", same={"s2": "s1"})
    rows = {row["method"]: row for row in rows_of(found)}
    assert {row["compute"] for row in rows.values()} == {"virtual compute"}
    assert [name for name, row in rows.items() if row["is_best"]] == ["s1", "s2"]
    assert rows["s2"]["same_program_as"] == "s1"
    assert rows["s2"]["median_seconds"] == 1.0
    assert rows["s1"]["first_over_this"] == 2.0
    assert rows["baseline"]["bound_seconds"] == 0.75
    assert rows["baseline"]["across_bytes"] == 1000
    assert "virtual compute" in BENCHMARK.notes.lower()


def some_cells() -> list[Any]:
    sized = [
        cell(
            "adaptive_r",
            {"r=1": f, "r=0": 3.0},
            factor=f,
            place=AdaptiveR(name=name),
            switches={"r=1": switch(0.01)},
        )
        for name in ("base", "large")
        for f in (1.0, 8.0)
    ]
    schedules = [
        cell(
            "schedules",
            {"baseline": 4.0, "s1": 2.0},
            best="s1",
            grid=grid,
            label=str(n),
            same={"s2": "s1"},
        )
        for n, grid in enumerate((Grid(world=16, tp=2, ep=16, ranks_per_node=4), TP4, STRIDED))
    ]
    rest = [
        cell(part, {"a": 1.0, "b": 2.0}) for part in ("pipelining", "orders", "codecs", "ablation")
    ]
    return [*schedules, *sized, *rest]


def test_all_rows_and_tables_hold_everything() -> None:
    cells = some_cells()
    rows = all_rows(cells)
    assert len([row for row in rows if row["part"] == "schedules"]) == 9
    assert len([row for row in rows if row["part"] == "switching"]) == 4
    console = Console(width=250, record=True, quiet=False)
    for each in tables(cells):
        console.print(each)
    text = console.export_text()
    assert text.count("virtual compute") == 6
    assert "Switching plans" in text
    assert "share of step" in text
    assert "0.00125" in text


def test_panels_show_each_mesh_size_and_part_with_bounds() -> None:
    made = panels(some_cells())
    assert [panel.title for panel in made] == [
        "64 tokens, etp 1",
        "64 tokens, etp 4, ep inside nodes",
        "64 tokens, etp 4, etp inside nodes",
        "adaptive r, base",
        "adaptive r, large",
        "chunks",
        "orders",
        "codecs",
        "ScheMoE's steps",
    ]
    assert {panel.y_title for panel in made} == {"ms, virtual compute"}
    first = {series.name: series for series in made[0].series}
    assert list(first) == ["baseline", "s1", "s2", "best"]
    assert first["best"].y == first["s2"].y == (2000.0,)
    assert first["baseline"].bounds == (750.0,)
    assert made[3].series[0].x == (1.0, 8.0)
    assert any(
        "virtual compute" in on.get_ylabel() for on in figure("title", made, BENCHMARK.notes).axes
    )
