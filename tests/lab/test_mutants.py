"""Evidence that the suite notices: every planted bug is caught, by what is written beside it; clean
cases pass."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from moesaic.testing.equivalence import failures, run_case
from moesaic.testing.runner import ProcessCase, run_on_gloo
from moesaic_lab.planted.mutants import CASES, GLOO, MUTANTS, judge, judge_on_gloo

IN_PROCESS = [mutant for mutant in MUTANTS if mutant.case != "gloo"]
verdict_of = functools.cache(judge)
PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.mark.parametrize("mutant", IN_PROCESS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught_and_its_ratio_named(mutant):
    verdict = verdict_of(mutant)
    assert verdict.caught_by == mutant.caught_by, verdict.how
    assert verdict.how
    assert verdict.off_by == mutant.off_by, verdict.how


@pytest.mark.parametrize(
    "mutant", [m for m in IN_PROCESS if m.caught_by == "crash"], ids=lambda mutant: mutant.name
)
def test_what_crashes_is_the_library_and_not_the_planting(mutant):
    """A planted function that no longer fits what it replaces would be "caught" for ever."""
    assert not verdict_of(mutant).how.startswith(("TypeError", "AttributeError", "NameError"))


@pytest.mark.parametrize("name", CASES)
def test_the_cases_pass_without_a_bug_once_all_of_theirs_are_gone(name):
    for mutant in IN_PROCESS:
        if mutant.case == name:
            verdict_of(mutant)
    assert failures(CASES[name], run_case(CASES[name])) == {}


def test_there_are_enough_and_most_are_caught_by_numbers():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(mutant.caught_by == "numbers" for mutant in MUTANTS) > 0.8 * len(MUTANTS)
    assert sum(bool(mutant.off_by) for mutant in MUTANTS) >= 12
    sources = " ".join(mutant.source for mutant in MUTANTS)
    for thread in (
        "Megatron-LM#7452",
        "Megatron-LM#7165",
        "Megatron-LM#5916",
        "hyper-parallel#752",
        "DeepSpeed#5618",
    ):
        assert thread in sources
    assert {"FastMoE", "Tutel, algorithm 2"} <= {mutant.source for mutant in MUTANTS}


def test_the_page_has_the_table_of_planted_bugs():
    rows = [f"| {m.name} | {m.source} | {m.caught_by} | {m.off_by} |" for m in MUTANTS]
    lines = PAGE.read_text().splitlines()
    first = lines.index("| planted bug | seen in | caught by | ratio named |") + 2
    assert lines[first : lines.index("", first)] == rows, (
        "put these rows into docs/testing.md:\n" + "\n".join(rows)
    )


def test_the_bugs_that_need_processes_are_caught_by_the_gradient_norm():
    mutants = [mutant for mutant in MUTANTS if mutant.case == "gloo"]
    planted = [ProcessCase(case, mutant.patch) for mutant in mutants for case in GLOO]
    found = run_on_gloo([*map(ProcessCase, GLOO), *planted])
    assert [failures(ran.case, ran.errors) for ran in found[: len(GLOO)]] == [{}] * len(GLOO)
    for number, mutant in enumerate(mutants, 1):
        verdict = judge_on_gloo(mutant, found[number * len(GLOO) :][: len(GLOO)])
        assert verdict.caught_by == mutant.caught_by, mutant.name
        assert verdict.how.startswith("gradient norm")
        assert "," not in verdict.how  # nothing else is wrong
        assert verdict.off_by.startswith("gradient norm: "), verdict.how
