"""The same programs over real processes on Gloo."""

from __future__ import annotations

import pytest

from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.testing.cases import Case
from moesaic.testing.processes import run_on_gloo


@pytest.mark.parametrize(
    "grid",
    [
        Grid(world=2, tp=2, ep=1, etp=2),
        Grid(world=4, tp=2, ep=2, etp=2),
        Grid(world=4, tp=1, ep=2, etp=2, innermost="ep"),
    ],
    ids=str,
)
def test_schedules_on_gloo_equal_the_reference(grid: Grid) -> None:
    names = [name for name in SCHEDULES if name != "ted" or grid.tp == grid.etp]
    cases = [
        Case(schedule=name, grid=grid, num_chunks=chunks, num_experts=4, top_k=2, max_tokens=9, seed=7)
        for name in names
        for chunks in (1, 2)
    ]
    for case, errors in zip(cases, run_on_gloo(cases)):
        assert errors.worst < 1e-10, f"{case}: {errors}"
