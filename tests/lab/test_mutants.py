"""Evidence that the suite notices: every planted bug is caught, by what is written beside it; clean cases pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from moesaic.testing.equivalence import failures, run_case
from moesaic.testing.processes import ProcessCase, run_on_gloo
from moesaic_lab.planted.mutants import CASES, GLOO, MUTANTS, judge, judge_on_gloo

IN_PROCESS = [mutant for mutant in MUTANTS if mutant.case != "gloo"]
FIRST_OF_A_KIND = {(mutant.caught_by, mutant.looks_like): mutant.name for mutant in reversed(IN_PROCESS)}.values()
"""Names of the first bug caught in each way and with each factor of each quantity; `make test-all` plants the others too."""
verdict_of = functools.cache(judge)
PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def planted() -> Iterator[ParameterSet]:
    """Yield the bugs: in `make test` each catcher, quantity and factor has one, in `make test-random` one of a kind."""
    met: set[tuple[str, str]] = set()
    for mutant in IN_PROCESS:
        quantity, factor = mutant.looks_like or ("", "")
        kinds = {("catcher", mutant.caught_by), ("quantity", quantity), ("factor", factor)}
        marks = () if kinds - met else pytest.mark.random if mutant.name in FIRST_OF_A_KIND else pytest.mark.slow
        met |= kinds
        yield pytest.param(mutant, id=mutant.name, marks=marks)


@pytest.mark.parametrize("name", CASES)
def test_the_cases_pass_without_a_bug(name):
    assert failures(CASES[name], run_case(CASES[name])) == {}


@pytest.mark.parametrize("mutant", list(planted()))
def test_a_planted_bug_is_caught_and_its_factor_named(mutant):
    verdict = verdict_of(mutant)
    assert verdict.caught_by == mutant.caught_by, verdict.how
    assert verdict.how
    assert verdict.looks_like == mutant.looks_like, [str(finding) for finding in verdict.findings]
    assert bool(verdict.findings) == (verdict.caught_by == "numbers")


@pytest.mark.parametrize("mutant", [m for m in IN_PROCESS if m.caught_by == "crash"], ids=lambda mutant: mutant.name)
def test_what_crashes_is_the_library_and_not_the_planting(mutant):
    """A planted function that no longer fits what it replaces would be "caught" for ever."""
    assert not verdict_of(mutant).how.startswith(("TypeError", "AttributeError", "NameError"))


@pytest.mark.parametrize("mutant", IN_PROCESS[::10], ids=lambda mutant: mutant.name)
def test_a_bug_goes_with_its_patch(mutant):
    with suppress(Exception):
        run_case(CASES[mutant.case], mutant.change, mutant.patch)
    assert failures(CASES[mutant.case], run_case(CASES[mutant.case])) == {}


def test_there_are_enough_and_most_are_caught_by_numbers():
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(mutant.caught_by == "numbers" for mutant in MUTANTS) > 0.8 * len(MUTANTS)
    assert sum(mutant.looks_like is not None for mutant in MUTANTS) >= 20
    sources = " ".join(mutant.source for mutant in MUTANTS)
    for thread in ("Megatron-LM#7452", "Megatron-LM#7165", "Megatron-LM#5916", "hyper-parallel#752", "DeepSpeed#5618"):
        assert thread in sources
    assert {"FastMoE", "Tutel, algorithm 2"} <= {mutant.source for mutant in MUTANTS}


def test_every_axis_is_the_factor_of_some_bug():
    factors = " ".join(mutant.looks_like[1] for mutant in MUTANTS if mutant.looks_like)
    named = factors.replace("/", " ").replace("*", " ").split()
    assert {"ep", "etp", "tp", "dp", "edp", "top_k", "chunks", "num_experts"} <= set(named)


def test_the_page_has_the_table_of_planted_bugs():
    def cell(mutant):
        return "" if mutant.looks_like is None else f"{mutant.looks_like[0]}: {mutant.looks_like[1]}"

    rows = [f"| {m.name} | {m.source} | {m.caught_by} | {cell(m)} |" for m in MUTANTS]
    lines = PAGE.read_text().splitlines()
    first = lines.index("| planted bug | seen in | caught by | factor named |") + 2
    assert lines[first : lines.index("", first)] == rows, "put these rows into docs/testing.md:\n" + "\n".join(rows)


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
        assert verdict.looks_like == mutant.looks_like, [str(finding) for finding in verdict.findings]
