"""Commands on folders in which something else lies in place of a file: nothing outside changes, and
every command ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic_lab.fuzz import kinds
from moesaic_lab.fuzz.examples import named_examples


def test_a_command_that_writes_through_a_link_or_has_no_end_is_noticed(
    fuzz_bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = {"mine": "a", "theirs": "b"}
    assert (
        kinds._problem(kinds.Ended(0, ""), outside, outside | {"mine": "c"})
        == "wrote outside: mine"
    )
    assert kinds._problem(kinds.Ended(0, ""), outside, {"mine": "a"}) == "wrote outside: theirs"
    assert kinds._problem(kinds.Ended(3, "Traceback (most recent call last)"), {}, {}).startswith(
        "code 3"
    )
    assert kinds._problem(kinds.Ended(2, "moesaic report: is a pipe"), outside, outside) == ""
    monkeypatch.setattr(kinds, "MOST_SECONDS", 0.01)
    assert (
        kinds.tried(fuzz_bases, "why-hung 1", "run/hang.json", "folder", tmp_path / "one")
        == "had no end"
    )


def test_links_are_written_through_on_paths_that_were_typed_alone() -> None:
    words = ("tokenize", "text", "--out", "one/t.bin")
    assert kinds.is_typed("one", words)
    assert kinds.is_typed("one/t.bin", words)
    assert not kinds.is_typed("on", words)
    assert not kinds.is_typed("one/t.json", words)


def test_names_are_those_that_a_command_uses(fuzz_bases: Path, tmp_path: Path) -> None:
    assert set(kinds.names_of(fuzz_bases, "report 1", tmp_path / "one")) == {
        "run",
        "run/config.json",
        "run/metrics.jsonl",
        "run/report.html",
        "timeline.json",
    }


@pytest.mark.random
@pytest.mark.parametrize("command", ["report 1", "why-hung 1", "trace 1", "tokenize 2"])
def test_whatever_lies_in_place_of_a_file_nothing_outside_changes(
    command: str, fuzz_bases: Path
) -> None:
    row = kinds.row(fuzz_bases, command, str, every=5)
    assert row["inputs"] >= 1
    assert row["crashes"] == {}


@pytest.mark.random
@pytest.mark.parametrize("command", named_examples())
def test_no_command_changes_anything_outside(command: str, fuzz_bases: Path) -> None:
    assert kinds.row(fuzz_bases, command, str, every=29)["crashes"] == {}
