"""No test of `tests/listed_tests.txt` is missing, and a test that is missing would be noticed."""

from __future__ import annotations

import pytest

import listed_tests
from listed_tests import LIST, Collected, case_of, collect_apart, is_whole, missing, read, written

NODES = {
    "tests/test_one.py::test_plain": "test",
    "tests/test_one.py::test_numbers[1]": "test",
    "tests/test_one.py::test_numbers[2-a b[]]": "test",
    "tests/test_one.py::test_numbers[3]": "random",
    "tests/deep/test_two.py::test_long": "slow",
}


def test_no_listed_test_is_missing(request: pytest.FixtureRequest) -> None:
    """A session of the whole suite has collected it already; any other collects it in a new
    process."""
    collected = request.config.pluginmanager.get_plugin("collected")
    assert isinstance(collected, Collected)
    found, skipped = (
        (collected.cases, collected.skipped) if is_whole(request.config) else collect_apart()
    )
    assert missing(read(LIST.read_text("utf-8")), found, skipped) == []


def test_the_list_reads_as_it_was_written() -> None:
    cases = {case_of(kind, node) for node, kind in NODES.items()}
    assert len(cases) == len(NODES)
    assert read(written(cases)) == cases


@pytest.mark.parametrize(
    ("lost", "line"),
    [
        (
            "tests/test_one.py::test_plain",
            "tests/test_one.py lacks 1 of 1 cases of test test_plain",
        ),
        (
            "tests/test_one.py::test_numbers[2-a b[]]",
            "tests/test_one.py lacks 1 of 2 cases of test test_numbers",
        ),
        (
            "tests/test_one.py::test_numbers[3]",
            "tests/test_one.py lacks 1 of 1 cases of random test_numbers",
        ),
        (
            "tests/deep/test_two.py::test_long",
            "tests/deep/test_two.py lacks 1 of 1 cases of slow test_long",
        ),
    ],
)
def test_a_test_that_is_lost_or_changes_its_set_is_named(lost: str, line: str) -> None:
    listed = {case_of(kind, node) for node, kind in NODES.items()}
    gone = listed - {case_of(NODES[lost], lost)}
    assert missing(listed, gone) == [line]
    assert missing(listed, gone | {case_of("slow" if NODES[lost] == "test" else "test", lost)}) == [
        line
    ]
    assert missing(listed, gone, {lost.partition("::")[0]}) == []
    assert missing(gone, listed) == []


def test_cases_that_depend_on_the_machine_count_as_one() -> None:
    for name in listed_tests.OF_THE_MACHINE:
        assert case_of("random", f"tests/a.py::{name}[3.7.1]") == case_of(
            "random", f"tests/a.py::{name}[NOTSET]"
        )
