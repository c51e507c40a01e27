"""Cases where every rank is a process on Gloo, parameters are DTensors, and training's own gradient norm is compared."""

from __future__ import annotations

import pytest

from moesaic.testing.equivalence import failures
from moesaic.testing.mutants import GLOO, MUTANTS, judge_on_gloo
from moesaic.testing.processes import Job, cases_for, run_on_gloo

CASES = {2: 8, 4: 6, 8: 4}
"""World size to how many cases it runs."""


def check(world: int) -> None:
    cases = cases_for(world, CASES[world])
    found = run_on_gloo([Job(case) for case in cases])
    assert [(ran.case.seed, failures(ran.case, ran.errors)) for ran in found] == [(case.seed, {}) for case in cases]
    assert any("gradient norm" in ran.errors for ran in found)


def test_two_processes():
    check(2)


@pytest.mark.slow
def test_eight_processes():
    check(8)


def test_four_processes_and_the_bugs_that_need_them():
    mutants = [mutant for mutant in MUTANTS if mutant.case == "gloo"]
    clean = [*cases_for(4, CASES[4]), *GLOO]
    planted = [Job(case, mutant.patch) for mutant in mutants for case in GLOO]
    found = run_on_gloo([*map(Job, clean), *planted])
    assert [failures(ran.case, ran.errors) for ran in found[: len(clean)]] == [{}] * len(clean)
    for number, mutant in enumerate(mutants):
        verdict = judge_on_gloo(mutant, found[len(clean) + number * len(GLOO) :][: len(GLOO)])
        assert verdict.caught_by == mutant.caught_by, mutant.name
        assert verdict.how.startswith("gradient norm")
        assert "," not in verdict.how  # nothing else is wrong
        assert verdict.looks_like == mutant.looks_like, [str(finding) for finding in verdict.findings]
