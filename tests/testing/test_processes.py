"""Cases where every rank is a process on Gloo, parameters are DTensors, and training's own gradient norm is compared."""

from __future__ import annotations

import pytest

from moesaic.testing.equivalence import failures
from moesaic.testing.mutants import GLOO, MUTANTS
from moesaic.testing.processes import Job, cases_for, run_on_gloo

CASES = {2: 8, 4: 6, 8: 4}
"""World size to how many cases it runs."""


def check(world: int) -> None:
    cases = cases_for(world, CASES[world])
    found = run_on_gloo([Job(case) for case in cases])
    assert [(case.seed, failures(case, errors)) for case, errors in zip(cases, found)] == [(c.seed, {}) for c in cases]
    assert any("gradient norm" in errors for errors in found)


def test_two_processes():
    check(2)


@pytest.mark.slow
def test_eight_processes():
    check(8)


def test_four_processes_and_the_bugs_that_need_them():
    mutants = [mutant for mutant in MUTANTS if mutant.case == "gloo"]
    cases = cases_for(4, CASES[4])
    jobs = [*map(Job, cases), Job(GLOO), *(Job(GLOO, mutant.patch) for mutant in mutants)]
    found = run_on_gloo(jobs)
    clean = len(cases) + 1
    assert [failures(job.case, errors) for job, errors in zip(jobs[:clean], found)] == [{}] * clean
    for mutant, errors in zip(mutants, found[clean:]):
        assert set(failures(GLOO, errors)) == {"gradient norm"}, mutant.name
