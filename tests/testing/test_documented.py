"""The schedule and the all-to-all of docs/extending.md compute what the plain layer computes, in every case that draws them."""

from __future__ import annotations

import pytest

from documented import block
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.testing.cases import draw_case
from moesaic.testing.equivalence import failures, run_case

SEEDS = range(240)
parts = pytest.mark.parametrize(
    "part", [slice(0, None, 3), *(pytest.param(slice(n, None, 3), marks=pytest.mark.random) for n in (1, 2))]
)
"""Cases that `make test` runs, and those of `make test-random`."""


@parts
def test_the_schedule_of_the_docs_in_random_cases(monkeypatch: pytest.MonkeyPatch, part: slice) -> None:
    """It routes slices, as S1 does, under a name that no other file knows."""
    monkeypatch.setitem(SCHEDULES, "s4", block("A schedule")["s4"])
    cases = [case for case in map(draw_case, SEEDS) if case.plan.schedule == "s4"]
    assert sum(case.grid.tp > 1 for case in cases) >= 8
    assert sum(case.grid.etp > 1 for case in cases) >= 8
    for case in cases[part]:
        assert failures(case, run_case(case)) == {}, case


@parts
def test_the_all_to_all_of_the_docs_in_random_cases(monkeypatch: pytest.MonkeyPatch, part: slice) -> None:
    monkeypatch.setitem(ALL_TO_ALLS, "ring", block("An all-to-all")["NodeRing"]())
    cases = [case for case in map(draw_case, SEEDS) if case.plan.all_to_all == "ring"]
    assert sum(case.grid.world > (case.grid.ranks_per_node or case.grid.world) for case in cases) >= 4
    for case in cases[part]:
        assert failures(case, run_case(case)) == {}, case
