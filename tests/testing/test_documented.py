"""The schedule and the all-to-all of docs/extending.md compute what the dense reference computes,
in all cases with them."""

from __future__ import annotations

import pytest

from documented import block
from helpers import seed_ranges
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.build import SCHEDULES
from moesaic.testing.cases import draw_case
from moesaic.testing.equivalence import failures, run_case

drawn = pytest.mark.parametrize("seeds", seed_ranges(160, quick=40))


@drawn
def test_the_schedule_of_the_docs_in_random_cases(
    monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    """The schedule routes slices, as S1 does, but has a name that appears nowhere else."""
    monkeypatch.setitem(SCHEDULES, "s4", block("A schedule")["s4"])
    cases = [case for case in map(draw_case, seeds) if case.plan.schedule == "s4"]
    assert sum(case.grid.tp > 1 for case in cases) >= len(seeds) / 40
    assert sum(case.grid.etp > 1 for case in cases) >= len(seeds) / 40
    for case in cases:
        assert failures(case, run_case(case)) == {}, case


@pytest.mark.parametrize(
    "part", [slice(4), pytest.param(slice(4, None), marks=pytest.mark.random)], ids=str
)
def test_the_all_to_all_of_the_docs_in_random_cases(
    monkeypatch: pytest.MonkeyPatch, part: slice
) -> None:
    monkeypatch.setitem(ALL_TO_ALLS, "ring", block("An all-to-all")["NodeRing"]())
    cases = [case for case in map(draw_case, range(160)) if case.plan.all_to_all == "ring"]
    cases.sort(key=lambda case: case.grid.world <= (case.grid.ranks_per_node or case.grid.world))
    assert cases[3].grid.world > (cases[3].grid.ranks_per_node or cases[3].grid.world), (
        "the first are of several nodes"
    )
    for case in cases[part]:
        assert failures(case, run_case(case)) == {}, case
