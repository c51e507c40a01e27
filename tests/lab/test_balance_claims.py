"""The balance benchmark's claims by hand, and its rows, tables and pictures, from cells that nobody
measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from balance_cells import cell
from rich.console import Console

from moesaic.program.plan import Plan
from moesaic_lab.balance import page
from moesaic_lab.balance.benchmark import BENCHMARK, panels
from moesaic_lab.balance.cells import all_rows, share_rows, tables
from moesaic_lab.balance.claims import claims
from moesaic_lab.balance.config import BalancePlace, RecordedLoads
from moesaic_lab.balance.methods import (
    BOUNDED,
    LAER,
    NETMOE,
    OURS,
    OURS_PLACED,
    PLACED,
    PLAIN,
    SMART,
)
from moesaic_lab.balance.shares import MADE_UP, RECORDED, SLOW, Share
from moesaic_lab.balance.simulated import BEST, decisions
from moesaic_lab.balance.tracked_memory import BudgetHeld
from moesaic_lab.pictures import figure
from moesaic_lab.tables import Marks

LARGE = BalancePlace(name="4x2", nodes=4)


def value(
    name: str, *cells: Any, shares: Any = (), decided: Any = (), held: Any = ()
) -> float | None:
    (found,) = [claim for claim in claims(cells, shares, decided, held) if claim.name == name]
    return found.value


def reason(name: str, *cells: Any) -> str:
    (found,) = [claim for claim in claims(cells) if claim.name == name]
    assert found.value is None
    return found.reason


def of_forced(method: str, seconds: float, **fields: Any) -> Share:
    usual = {
        "cluster": "dgx-h100",
        "ranks": 64,
        "load": RECORDED,
        "layer": 5,
        "step": 10,
        "max_vio": 0.6,
        "ratio": 0.14,
        "forced_seconds": 1.0,
        "own_forced_seconds": 1.0,
        "decision_seconds": 5e-5,
        "replicated_experts": 3,
        "moving_seconds": 0.0,
        "moves_every": 50,
    }
    return Share(method=method, seconds=seconds, **{**usual, **fields})


def test_every_claim_is_listed_with_a_reason_where_nothing_was_measured() -> None:
    found = claims([])
    assert {claim.name: (claim.op, claim.target) for claim in found} == {
        "balance.speedup_maxvio2": (">=", 1.8),
        "balance.over_best_single": ("<=", 1.03),
        "balance.overhead_maxvio0": ("<=", 0.01),
        "balance.memory_worst": ("<=", 1.1),
        "balance.memory_worst_unbounded": ("<=", None),
        "balance.budget_speedup_maxvio4": (">=", None),
        "balance.decision_share": ("<=", 0.005),
        "balance.decision_us_64": ("<=", 100),
        "balance.equivalent_to_best_single": (">=", None),
        "balance.slow_rank_speedup": (">=", None),
        "balance.slow_link_speedup": (">=", None),
        "balance.simulated_slow_rank_speedup": (">=", None),
        "balance.share_of_forced_real": (">=", 0.97),
        "balance.share_of_forced_real_placed": (">=", None),
        "balance.simulated_share_of_forced": (">=", 0.94),
        "balance.simulated_share_of_forced_placed": (">=", 0.94),
        "balance.simulated_share_of_best_option": (">=", None),
        "balance.shares_over_best_single": ("<=", 1.03),
        "balance.recorded_speedup": (">=", None),
    }
    assert all(claim.value is None and claim.reason.startswith("no case ") for claim in found)


def test_speedup_is_of_the_bed_with_most_ranks_at_max_vio_2() -> None:
    small, large = (
        cell(2.0, {PLAIN: s, OURS: 1.0}, place=p) for s, p in ((9.0, None), (2.5, LARGE))
    )
    assert value("balance.speedup_maxvio2", large, small) == 2.5
    assert value("balance.speedup_maxvio2", small) == 9.0
    assert "MaxVio 2" in reason("balance.speedup_maxvio2", cell(1.0, {PLAIN: 2.0, OURS: 1.0}))


def test_over_best_single_is_the_worst_case_against_the_fastest_technique_by_itself() -> None:
    easy = cell(0.0, {PLAIN: 3.0, "spill": 2.0, "smart + shadow": 0.1, OURS: 1.0})
    hard = cell(2.0, {PLAIN: 3.0, PLACED: 1.0, "shadow": 2.0, OURS: 1.5})
    assert value("balance.over_best_single", easy) == 0.5
    assert value("balance.over_best_single", easy, hard) == 1.5
    close = cell(2.0, {PLAIN: 3.0, "shadow": 1.0, OURS: 1.05})
    assert (
        reason("balance.over_best_single", close)
        == "case 2.0: 8 repeats, a ratio under 1.10 needs 30"
    )


def test_a_ratio_near_one_is_the_worse_end_of_thirty_pairs() -> None:
    ours = [1.0, 1.04] * 15
    found = cell(0.0, {PLAIN: 1.0, "shadow": 2.0, OURS: 1.0}, near={OURS: ours, PLAIN: [1.0] * 30})
    overhead = value("balance.overhead_maxvio0", found)
    assert overhead is not None
    assert 0.03 < overhead < 0.0401
    worse = cell(0.0, {PLAIN: 1.0, OURS: 1.3}, place=LARGE)
    assert value("balance.overhead_maxvio0", found, worse) == pytest.approx(0.3)


def test_memory_is_the_bytes_held_over_those_of_the_budget_in_the_worst_case() -> None:
    usual = {
        "weights": "light weights",
        "load": "even",
        "replication": "none",
        "over_even": 1.25,
        "slices": 3,
        "kept_slices": 1,
    }
    held = [
        BudgetHeld(promised_bytes=1000, peak_bytes=peak, unbounded_bytes=unbounded, **usual)
        for peak, unbounded in ((900, 4000), (1050, 3000))
    ]
    assert value("balance.memory_worst", held=held) == 1.05
    assert value("balance.memory_worst_unbounded", held=held) == 4.0
    both = {PLAIN: 1.0, OURS: 1.0, BOUNDED: 2.0}
    skewed = cell(4.0, both, place=LARGE, peak={OURS: 1500, BOUNDED: 1100, PLAIN: 5000})
    bounded = replace(
        skewed.job.methods[BOUNDED], plan=Plan(replication="arbiter", memory_budget=500)
    )
    on_bed = replace(
        skewed, job=replace(skewed.job, methods={**skewed.job.methods, BOUNDED: bounded})
    )
    assert value("balance.memory_worst", on_bed, held=held) == 2.2
    assert value("balance.budget_speedup_maxvio4", skewed) == 0.5


def test_decision_share_is_the_median_decision_over_a_step_in_the_worst_case() -> None:
    quick = cell(0.0, {PLAIN: 1.0, OURS: 1.0}, decided={OURS: [0.001] * 3})
    slow = cell(2.0, {PLAIN: 1.0, OURS: 0.5}, decided={OURS: [0.01, 0.02, 9.0]})
    assert value("balance.decision_share", quick, slow) == 0.04


def test_recorded_figures() -> None:
    assert value("balance.recorded_speedup", cell(None, {PLAIN: 3.0, OURS: 2.0})) == 1.5


def test_ours_is_held_against_the_best_single_technique_in_rounds_that_did_not_choose_it() -> None:
    lucky = {PLAIN: [1.0] * 8, "shadow": [0.9] * 8, OURS: [1.0] * 8}
    later = [1.0, 1.001] * 15
    both = cell(2.0, lucky, near={"shadow": [0.9] * 8 + later, OURS: [1.0] * 8 + later})
    assert value("balance.over_best_single", both) == 1.0
    assert value("balance.equivalent_to_best_single", both) == 1.0
    behind = cell(
        4.0,
        lucky,
        near={"shadow": [0.9] * 8 + later, OURS: [1.0] * 8 + [1.05 * each for each in later]},
    )
    assert value("balance.over_best_single", both, behind) == pytest.approx(1.05)
    assert value("balance.equivalent_to_best_single", both, behind) == 0.5
    noisy = [0.9, 1.1] * 15
    unclear = cell(4.0, lucky, near={"shadow": [0.9] * 8 + [1.0] * 30, OURS: [1.0] * 8 + noisy})
    assert value("balance.equivalent_to_best_single", unclear) == 0.0, (
        "few pairs prove no equivalence"
    )
    over = value("balance.over_best_single", unclear)
    assert over is not None
    assert over > 1.03


def test_shares_of_forced_balance() -> None:
    place = RecordedLoads(name="laer", nodes=4)
    real = [
        cell(None, {PLAIN: 3.0, OURS: seconds, OURS_PLACED: 2.0}, place=place)
        for seconds in (2.0, 2.5, 4.0)
    ]
    even = cell(0.0, {PLAIN: 2.0, OURS: 2.0}, place=LARGE)
    assert value("balance.share_of_forced_real", even, *real) == 0.8
    assert value("balance.share_of_forced_real_placed", even, *real) == 1.0
    shares = [of_forced(OURS, seconds, step=step) for step, seconds in enumerate((2.0, 1.25, 1.0))]
    shares += [of_forced(LAER, 2.5, step=step) for step in range(3)]
    shares += [of_forced(OURS, 2.0, cluster="100gbe"), of_forced(LAER, 4.0, cluster="100gbe")]
    shares += [
        of_forced(OURS, 9.0, load=MADE_UP, decision_seconds=8e-5),
        of_forced(OURS, 1.0, ranks=32, step=7),
    ]
    shares += [
        of_forced(LAER, 2.0, ranks=32, step=7, ratio=5.0),
        of_forced(OURS, 3.0, ranks=32, step=7, ratio=5.0),
    ]
    shares += [of_forced(LAER, 2.0, ranks=32, step=7)]
    assert value("balance.simulated_share_of_forced", shares=shares) == 0.5
    assert value("balance.over_laer_policy_0.14", shares=shares) == 0.5
    assert value("balance.over_laer_policy_5", shares=shares) == 1.5
    best, best_placed = BEST
    known = [of_forced(best, 1.0, step=step) for step in range(3)] + [
        of_forced(best_placed, 1.0),
        of_forced(best, 9.9, load=SLOW),
    ]
    assert value("balance.simulated_share_of_best_option", shares=[*shares, *known]) == 0.8
    singles = [
        of_forced("shadow", 2.5, load=MADE_UP, max_vio=4.0),
        of_forced(OURS, 2.0, load=MADE_UP, max_vio=4.0),
    ]
    assert value("balance.shares_over_best_single", shares=singles) == 0.8
    singles += [
        of_forced("spill", 1.6, load=MADE_UP, max_vio=4.0),
        of_forced(PLACED, 0.1, load=MADE_UP, max_vio=4.0),
    ]
    assert value("balance.shares_over_best_single", shares=singles) == 1.25
    slow = [of_forced(name, seconds, load=SLOW) for name, seconds in ((PLAIN, 3.0), (OURS, 2.0))]
    assert value("balance.simulated_slow_rank_speedup", shares=[*shares, *slow]) == 1.5
    slower = replace(LARGE, name="slow", slow_rank=0.5)
    assert (
        value("balance.slow_rank_speedup", even, cell(0.0, {PLAIN: 3.0, OURS: 2.0}, place=slower))
        == 1.5
    )
    slower = replace(LARGE, name="slow", slow_link="40mbit")
    unlike = cell(2.0, {PLAIN: 3.0, OURS: 2.0}, place=slower)
    assert value("balance.slow_link_speedup", even, unlike) == 1.5
    assert value("balance.speedup_maxvio2", unlike) is None, "beds whose nodes are alike"


def test_decisions_by_themselves_are_counted_where_they_replicate() -> None:
    found = decisions(ranks=16, experts=64, calls=14)
    assert len(found) == 6
    assert all(each.seconds > 0 for each in found)
    one = replace(found[0], seconds=5e-5, replicates=True)
    assert value(
        "balance.decision_us_64", decided=[one, replace(one, seconds=9.0, replicates=False)]
    ) == pytest.approx(50)


def every_kind() -> list[Any]:
    seconds = {PLAIN: 2.0, "shadow": 1.0, SMART: 1.6, NETMOE: 2.1, OURS: 0.9}
    decided = {"shadow": [0.01], OURS: [0.02]}
    return [
        cell(0.0, seconds, place=LARGE, decided=decided, replicated=1),
        cell(2.0, seconds, place=LARGE, decided=decided, replicated=5),
        cell(None, seconds, decided=decided),
    ]


def test_rows_say_what_the_layer_is_and_what_each_method_did() -> None:
    rows = all_rows(every_kind(), [of_forced(PLAIN, 2.0)])
    assert len(rows) == 3 * 5 + 1
    ours = next(row for row in rows if row["method"] == OURS and row["max_vio"] == 2.0)
    wanted = {
        "tokens_per_rank": 128,
        "dim": 256,
        "hidden": 12,
        "experts_per_rank": 4,
        "compute": "virtual compute",
        "is_best": True,
        "median_seconds": 0.9,
        "replicated_experts": 5,
        "decision_seconds": 0.02,
        "options": "shadow",
        "bed": "4x2 100mbit, lo 1gbit",
    }
    assert {key: ours[key] for key in wanted} == wanted
    assert ours["plain_over_this"] == pytest.approx(2 / 0.9)
    assert rows[-1]["of_forced"] == 0.5
    assert rows[-1]["part"] == "shares"


def test_tables_and_pictures_show_every_part() -> None:
    cells = every_kind()
    console = Console(width=240, record=True, quiet=False)
    shares = [of_forced(name, 2.0, max_vio=load) for name in (PLAIN, OURS) for load in (0.5, 0.7)]
    for each in tables(cells, shares):
        console.print(each)
    text = console.export_text()
    assert (
        "4x2 100mbit, lo 1gbit, 128 tokens per rank, dim 256, hidden 12, 4 experts per rank, top 2"
        in text
    )
    assert "virtual compute" in text
    assert "share of forced balance" in text
    drawn = panels([], shares)
    assert [each.title for each in drawn] == ["dgx-h100, 64 ranks, recorded loads"]
    assert [series.name for series in drawn[0].series] == [PLAIN, OURS]
    assert (drawn[0].series[0].x, drawn[0].series[0].y) == ((0.5, 0.7), (0.5, 0.5))
    assert "Simulated" in text
    made = panels(cells)
    titles = [panel.title for panel in made]
    assert titles == [
        "4x2, speed-up",
        "4x2, memory",
        "recorded routing",
        "4x2, replicated experts per call",
        "gain of the smart schedule",
    ]
    replicated = {series.name: series.y for series in made[3].series}
    assert replicated == {"shadow": (1, 5), OURS: (1, 5)}
    gain = {series.name: (series.x, series.y) for series in made[4].series}
    assert gain["smart schedule, 4x2"] == ((1.5, 1.5), (1.25, 1.25))
    assert all("virtual compute" in panel.y_title for panel in (made[0], made[2], made[4]))
    assert any(
        "virtual compute" in on.get_ylabel() for on in figure("title", made, BENCHMARK.notes).axes
    )


def test_a_share_of_forced_balance_counts_a_call_s_part_of_moving_experts() -> None:
    stays = of_forced(OURS, 2.0)
    moves = of_forced(OURS_PLACED, 1.0, moving_seconds=50.0, moves_every=50)
    assert (stays.whole_seconds, moves.whole_seconds) == (2.0, 2.0)
    assert moves.of_forced == 0.5
    assert value("balance.simulated_share_of_forced_placed", shares=[moves]) == 0.5
    (row,) = share_rows([moves])
    assert (row["median"], row["of_own"]) == (0.5, 0.5)
    _, best_placed = BEST
    known = [moves, of_forced(best_placed, 0.5, moving_seconds=50.0)]
    assert value("balance.simulated_share_of_best_option", shares=known) == 0.75
    assert all_rows([], [moves])[0]["of_forced"] == 0.5


def test_the_page_has_a_line_for_each_method_and_a_column_for_each_load() -> None:
    shares = [
        of_forced(PLAIN, 2.0),
        of_forced(OURS, 1.25),
        of_forced(PLAIN, 4.0, load=MADE_UP, layer=-1, max_vio=1.0),
    ]
    aimed = {"name": "balance.aimed", "value": 0.5, "target": 0.4, "op": ">=", "holds": True}
    told = {"name": "balance.told", "value": 0.5, "target": None, "op": ">=", "holds": None}
    text = page.tables(
        {
            "date": "2026-11-28",
            "machine": {"cpu": "AMD EPYC", "cores": 2},
            "rows": [{"part": "shares", **asdict(each)} for each in shares],
            "claims": [aimed, told],
        }
    )
    assert (
        "| share of forced balance, `dgx-h100`, 64 ranks | synthetic, MaxVio 1 | recorded |" in text
    )
    assert "| plain ep | 0.25 | 0.50 |" in text
    assert "| ours |  | 0.80 |" in text
    assert "| `balance.aimed` | 0.5 | >= 0.4 | yes |" in text
    assert "balance.told" not in text


@pytest.mark.parametrize(
    ("name", "write", "marks"),
    [
        ("balance.md", page.headline, page.HEADLINE_MARKS),
        ("balance_figures.md", page.tables, page.MARKS),
    ],
)
def test_the_pages_hold_what_the_result_says(
    name: str, write: Callable[[dict[str, Any]], str], marks: Marks
) -> None:
    result = json.loads(
        (page.DOCS.parent / "benchmarks" / "results" / "balance.json").read_text(encoding="utf-8")
    )
    text = (page.DOCS / name).read_text(encoding="utf-8")
    written = write(result)
    assert written.count("| plain ep |") >= 1
    assert f"{marks[0]}\n\n{written.strip()}\n\n{marks[1]}" in text
