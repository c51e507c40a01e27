"""Samples that change home change nothing: every case of residuals, capacities and padding, on
every kind of mesh."""

from __future__ import annotations

import itertools

import pytest

from helpers import thinned
from moesaic_lab.placement_cases import CASES, EXACT, MESHES, PlacementCase, claims, run_case

TRIED = [
    each for number, each in enumerate(itertools.product(CASES, MESHES)) if number % 5 in (0, 1, 3)
]


@pytest.mark.parametrize(("case", "mesh"), thinned(TRIED, every=3), ids=str)
def test_a_case_is_exact_and_residuals_ride_where_that_is_equal(
    case: PlacementCase, mesh: str
) -> None:
    found = run_case(case, mesh)
    assert found["error"] <= EXACT
    travels_alone = case.dropout > 0 or case.shared > 0 or case.apply_weight == "before"
    assert found["rides"] == (mesh.startswith("s1") and not travels_alone)


def test_one_case_that_is_wrong_fails_the_claim() -> None:
    rows = [{"error": 1e-16, "rides": True}, {"error": 1e-3, "rides": False}]
    assert [claim.value for claim in claims(rows)] == [0.5, 0.5]
    assert claims(rows)[0].holds is False
