"""What `moesaic bench auto` measures, and what it claims."""

from __future__ import annotations

import pytest

from moesaic.auto import AT_ONCE
from moesaic_lab import auto
from moesaic_lab.in_flight import ALONE


def test_few_ranks_choose_with_three_seeds_quiet_and_beside_a_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "require_cluster", lambda: None)
    few = [
        case
        for case in auto.cases(auto.AutoOptions())
        if isinstance(case, auto.AutoCase)
        and case.job.grid.world <= auto.FEW_RANKS
        and not case.changes
    ]
    for has_neighbour in (False, True):
        alike = [case.job.seed for case in few if case.has_neighbour == has_neighbour]
        assert alike == [0, 1, 2]
    assert len({case.name for case in few}) == 6


def test_claims_are_the_worst_quiet_and_beside_a_neighbour() -> None:
    rows = [
        {"bed": "4 ranks, links steady", "over_best": 1.01, "chosen": "s1"},
        {"bed": "4 ranks, neighbour, seed 0", "over_best": 1.2, "chosen": "s1"},
        {"bed": "4 ranks, neighbour, seed 1", "over_best": 1.1, "chosen": "s1"},
    ]
    two = f"s1, {AT_ONCE[2]}"
    in_flight_bed = {"bed": "in flight, 2 ranks, 2gbit, seed 0", "wire_share": 0.4}
    rows.append({**in_flight_bed, "over_best": 1.03, "chosen": two})
    quiet, beside, in_flight, wire_is_half = auto.claims(rows)
    assert (quiet.value, quiet.holds) == (1.01, True)
    assert (beside.value, beside.holds) == (1.2, False)
    assert (in_flight.value, in_flight.holds) == (1.03, False)
    assert (wire_is_half.value, wire_is_half.target) == (1.03, 0.75)
    assert auto.claims(rows[:1])[1].reason == "no such bed was measured"


def test_a_neighbour_is_busy_until_its_block_ends() -> None:
    with auto.neighbour() as process:
        assert process.poll() is None
    assert process.poll() is not None


def test_two_in_flight_are_judged_against_the_best_plan_without() -> None:
    (case,) = auto.cases_of_links(auto.AutoOptions(), links=("2gbit",), seeds=1)
    spans = {
        "linear, two micro-batches in flight": [(0.0, 0.9)] * 3,
        "linear, one micro-batch at a time": [(0.0, 1.0)] * 3,
        "2 chunks, one micro-batch at a time": [(0.0, 1.2)] * 3,
        ALONE: [(0.0, 0.6)] * 3,
    }
    chosen = "linear, two micro-batches in flight"
    best = "linear, one micro-batch at a time"
    result = auto.AutoResult(chosen=chosen, said=["so"], races=1, spans=spans)
    row = auto.row_of(case, [result, result])
    assert (row["best"], row["over_best"]) == (best, pytest.approx(0.9))
    assert row["wire_share"] == pytest.approx(0.4)
