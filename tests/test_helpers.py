"""How test cases are divided: `make test` covers every pair of values and the first seeds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from helpers import pairwise, seed_ranges, thinned


def values(cases: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the values of the cases that `make test` runs, and of the others."""
    given = [case if hasattr(case, "marks") else pytest.param(case) for case in cases]
    quick = [case.values for case in given if not case.marks]
    return quick, [case.values for case in given if case.marks]


def pairs(rows: list[tuple[Any, ...]]) -> set[Any]:
    return set().union(*(itertools.combinations(enumerate(row), min(2, len(row))) for row in rows))


@pytest.mark.parametrize("sizes", [(3,), (5, 11, 4), (2, 2, 3, 2, 2, 5), (1, 4, 4)], ids=str)
def test_every_pair_is_met_and_as_many_other_combinations_are_cases(sizes: tuple[int, ...]) -> None:
    axes = [range(size) for size in sizes]
    quick, others = values(pairwise(*axes))
    every = list(itertools.product(*axes))
    assert set(quick) | set(others) <= set(every)
    assert len({*quick, *others}) == len(quick) + len(others)
    assert min(len(quick), len(every) - len(quick)) / 2 <= len(others) <= len(quick)
    assert pairs(quick) == pairs(every)
    assert len(quick) < 2 * max(
        (a * b for a, b in itertools.combinations(sizes, 2)), default=max(sizes)
    )


def test_values_that_do_not_go_together_are_left_out_and_their_others_are_met() -> None:
    quick, others = values(
        pairwise("abc", range(4), (False, True), fits=lambda a, b, _: a != "a" or b < 2)
    )
    every = [
        row
        for row in itertools.product("abc", range(4), (False, True))
        if row[0] != "a" or row[1] < 2
    ]
    assert set(quick + others) <= set(every)
    assert pairs(quick) == pairs(every)


def test_what_is_met_where_nothing_is_computed_is_met_elsewhere_too() -> None:
    axes = ((0, 3, 5), "abc", (False, True))
    quick, _ = values(pairwise(*axes, empty=lambda size, *_: size == 0))
    for is_empty in (False, True):
        every = list(itertools.product(*axes))
        met = [
            {*pairs([row for row in rows if (row[0] == 0) == is_empty])} for rows in (quick, every)
        ]
        assert met[0] == met[1]


def test_seeds_are_divided_and_none_is_lost() -> None:
    quick, others = values(seed_ranges(10, quick=3))
    assert [list(each) for (each,) in (*quick, *others)] == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]]
    quick, others = values(thinned(range(10), every=4))
    assert [each for (each,) in quick] == [0, 4, 8]
    assert sorted(quick + others) == [(each,) for each in range(10)]
