"""Evidence that the suite notices: every planted bug is caught, by what is written beside it; clean cases pass."""

from __future__ import annotations

import pytest

from moesaic.testing.equivalence import failures, run_case
from moesaic.testing.mutants import CASES, MUTANTS, judge

IN_PROCESS = [mutant for mutant in MUTANTS if mutant.case != "gloo"]


@pytest.mark.parametrize("name", CASES)
def test_the_cases_pass_without_a_bug(name):
    assert failures(CASES[name], run_case(CASES[name])) == {}


@pytest.mark.parametrize("mutant", IN_PROCESS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant):
    verdict = judge(mutant)
    assert verdict.caught_by == mutant.caught_by, verdict.how
    assert verdict.how


@pytest.mark.parametrize("mutant", IN_PROCESS[:12], ids=lambda mutant: mutant.name)
def test_a_bug_goes_with_its_patch(mutant):
    judge(mutant)
    assert failures(CASES[mutant.case], run_case(CASES[mutant.case])) == {}


def test_there_are_enough_and_most_are_caught_by_numbers():
    assert len(MUTANTS) >= 25
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(mutant.caught_by == "numbers" for mutant in MUTANTS) > len(MUTANTS) / 2
    assert {f"users A{n}" for n in (1, 2, 3, 6, 7, 8, 9, 10, 11)} <= {m.source.split(",")[0] for m in MUTANTS}
    assert {"FastMoE", "users B14", "Tutel, algorithm 2"} <= {mutant.source for mutant in MUTANTS}
