"""What `moesaic bench auto` measures, and what it claims."""

from __future__ import annotations

import pytest

from moesaic_lab import auto


def test_few_ranks_choose_with_three_seeds_quiet_and_beside_a_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "require_cluster", lambda: None)
    few = [
        case
        for case in auto.cases(auto.AutoOptions())
        if case.job.grid.world <= auto.FEW_RANKS and not case.changes
    ]
    for has_neighbour in (False, True):
        alike = [case.job.seed for case in few if case.has_neighbour == has_neighbour]
        assert alike == [0, 1, 2]
    assert len({case.name for case in few}) == 6


def test_claims_are_the_worst_quiet_and_beside_a_neighbour() -> None:
    rows = [
        {"bed": "4 ranks, links steady", "over_best": 1.01},
        {"bed": "4 ranks, neighbour, seed 0", "over_best": 1.2},
        {"bed": "4 ranks, neighbour, seed 1", "over_best": 1.1},
    ]
    quiet, beside = auto.claims(rows)
    assert (quiet.value, quiet.holds) == (1.01, True)
    assert (beside.value, beside.holds) == (1.2, False)
    assert auto.claims(rows[:1])[1].reason == "no such bed was measured"


def test_a_neighbour_is_busy_until_its_block_ends() -> None:
    with auto.neighbour() as process:
        assert process.poll() is None
    assert process.poll() is not None
