"""Cases on processes with Gloo, with DTensor parameters; the gradient norm that training computes
is compared too."""

from __future__ import annotations

import pytest

from moesaic.testing.cases import draw_case
from moesaic.testing.equivalence import failures
from moesaic.testing.runner import ProcessCase, run_on_gloo

CASES = {2: 8, 4: 6, 8: 4}
"""World size -> number of cases."""


def check(world: int) -> None:
    cases = [draw_case(seed, world=world) for seed in range(CASES[world])]
    found = run_on_gloo([ProcessCase(case) for case in cases])
    assert [(ran.case.seed, failures(ran.case, ran.errors)) for ran in found] == [
        (case.seed, {}) for case in cases
    ]
    assert any("gradient norm" in ran.errors for ran in found)


def test_two_processes():
    check(2)


@pytest.mark.slow
def test_eight_processes():
    check(8)


def test_four_processes():
    check(4)
