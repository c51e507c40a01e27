"""The space of plans: what is in it, what fits a mesh, each program once."""

from __future__ import annotations

import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.planner.candidates import SearchSpace, candidates
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

GRIDS = [
    Grid(world=4, ep=4, ranks_per_node=2),
    Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4),
    Grid(world=8, tp=4, ep=2, etp=4, ranks_per_node=4, innermost="ep"),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_candidates_are_what_fits_each_program_once(grid: Grid):
    space = SearchSpace(
        chunks=(1, 2), orders=("optsche", "fifo"), all_to_alls=("linear", "hier2d", "multicast")
    )
    fitting = set()
    for plan in space.plans(grid):
        try:
            fitting.add(compile_plan(plan, grid).digest)
        except InputError:
            continue
    found = [compiled.digest for compiled in candidates(grid, space)]
    assert len(found) == len(set(found))
    assert set(found) == fitting
    assert 10 < len(found) < len(list(space.plans(grid)))


def test_the_default_space_is_lossless_and_holds_every_schedule_that_fits():
    plans = list(SearchSpace().plans(GRIDS[1]))
    assert all(plan.is_lossless for plan in plans)
    plainest = SearchSpace(
        gather_weights=(), chunks=(1,), overlap_gather=(False,), all_to_alls=("linear",)
    )
    assert {compiled.plan.schedule for compiled in candidates(GRIDS[1], plainest)} == set(SCHEDULES)
    assert {plan.chunks for plan in plans} == {1, 2, 4}
    assert {plan.all_to_all for plan in plans} >= {
        "linear",
        "pipelined",
        "hier1d",
        "hier2d",
        "multicast",
    }


def test_r_runs_over_zero_and_the_divisors_of_etp_below_it():
    plans = SearchSpace(
        schedules=("s2",), chunks=(1,), overlap_gather=(False,), all_to_alls=("linear",)
    )
    assert [plan.gather_weights for plan in plans.plans(GRIDS[2])] == [None, 0, 1, 2]
    assert [plan.gather_weights for plan in plans.plans(GRIDS[0])] == [None, 0]


def test_of_equal_programs_the_first_of_the_space_is_kept():
    one_node = Grid(world=2, ep=2)
    space = SearchSpace(
        schedules=("s1",), chunks=(1,), overlap_gather=(False, True), all_to_alls=("linear",)
    )
    kept = [compiled.plan for compiled in candidates(one_node, space)]
    assert Plan(schedule="s1") in kept
    assert len(kept) == len({compile_plan(plan, one_node).digest for plan in kept})


def test_a_space_without_a_fitting_plan_is_refused_with_the_reason():
    space = SearchSpace(schedules=("ted",), gather_weights=())
    with pytest.raises(
        InputError, match=r"no plan of the search space fits the mesh; the last one: .*ted"
    ):
        list(candidates(Grid(world=4, tp=4, ep=4), space))


def test_an_empty_choice_is_refused():
    assert "search.chunks is empty: name at least one value" in refused(SearchSpace, chunks=())
