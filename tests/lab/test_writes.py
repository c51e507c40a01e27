"""Each command with a write that fails: what the trial notices, and a sample of the trials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic_lab.fuzz import writes
from moesaic_lab.fuzz.examples import GOES_ON, Example, named_examples
from moesaic_lab.fuzz.places import Place
from moesaic_lab.system_calls import STREAMS, Watched, Write, require_watching

try:
    require_watching()
except InputError as error:
    pytest.skip(str(error), allow_module_level=True)

SLOW = [name for name, example in named_examples().items() if example.is_slow]
LONG = [name for name, each in named_examples().items() if each.command in GOES_ON]
SHORT = [name for name in named_examples() if name not in (*SLOW, *LONG)]
WATCH = """
import errno, json, os, sys
from moesaic_lab.system_calls import watched

def child():
    os.chdir(sys.argv[1])
    try:
        with open("a", "wb", buffering=0) as file:
            file.write(b"one")
        os.rename("a", "b")
        os.write(1, b"done")
    except OSError as error:
        return error.errno
    return 0

def run(fails):
    found = watched(child, lambda write: errno.ENOSPC if write.number == fails else 0, 20)
    return found.code, [(write.call, os.path.basename(write.path)) for write in found.writes]

print(json.dumps([run(number) for number in range(6)]))
"""


def test_the_nth_write_fails_and_no_other(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WATCH, str(tmp_path)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.removeprefix("done").replace("done", ""))
    calls = [["create", "a"], ["write", "a"], ["rename", "b"], ["write", STREAMS[1]]]
    assert found[0] == [0, calls]
    assert found[1:5] == [[28, calls[:number]] for number in range(1, 5)]
    assert found[5] == [0, calls]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "bases" / "in").mkdir(parents=True)
    words = ("tokenize", "in", "--out", "out/packed.bin")
    place = Place(tmp_path / "bases", Example(folders=("in",), words=words, out=("out",)))
    place.made()
    (place.folder / "out").mkdir()
    return place


def ended(code: int | None, err: str = "", *written: str) -> writes.Ended:
    calls = tuple(Write(number, "create", path, 1) for number, path in enumerate(written, 1))
    return writes.Ended(watched=Watched(code, calls), out="", err=err)


LINE = "moesaic tokenize: out: the disk is full\n"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (ended(None), "had no end"),
        (ended(1, "Traceback (most recent call last)\n"), "code 1: Traceback"),
        (ended(2), "code 2 with 0 lines"),
        (ended(2, LINE + LINE), "code 2 with 2 lines"),
        (ended(3, LINE), "code 3"),
        (ended(2, LINE, "/elsewhere/file"), "wrote outside: create /elsewhere/file"),
    ],
)
def test_a_bad_end_is_noticed(place: Place, how: writes.Ended, said: str) -> None:
    failed = Write(1, "write", str(place.folder / "out" / "a"), 1)
    assert writes.problem_of(place, how, failed, ({}, {}, None)).startswith(said)


def test_temporary_files_are_not_outside(place: Place) -> None:
    made = place.folder.parent
    for given in ("/tmp/a/b", "/var/tmp/h2_b4x9a", f"{made}/tmp/a", f"{place.folder}/h2_b4x9a"):
        assert place.is_given(given), given
    for strange in (
        "/elsewhere/a",
        f"{made}/other/a",
        f"{place.folder}/h2.b4x9a",
        f"{made}/h2_b4x9a",
    ):
        assert not place.is_given(strange), strange


def test_what_is_half_written_or_left_over_is_noticed(place: Place) -> None:
    file = place.folder / "out" / "packed.bin"
    file.write_bytes(b"half")
    assert "out/packed.bin is half-written" in writes.problem_of(
        place, ended(2, LINE), None, ({}, {"out/packed.bin": "0"}, None)
    )
    file.rename(file.with_name(".writing-0123-packed.bin"))
    assert "is left over" in writes.problem_of(place, ended(2, LINE), None, ({}, {}, None))


def test_an_end_without_the_results_is_noticed(place: Place) -> None:
    problem = writes.problem_of(place, ended(0), None, ({}, {}, {"out/packed.bin": "0"}))
    assert problem == "code 0, and other results"
    stream = Write(1, "write", STREAMS[1], 1)
    problem = writes.problem_of(place, ended(141), stream, ({}, {}, {}))
    assert problem.startswith("code 141 for a lost stream")


@pytest.mark.parametrize("stays", [False, True])
def test_a_failure_is_one_or_stays(stays: bool) -> None:
    failure = writes.Failure(name="no space", number=28, stays=stays)
    failing = writes.Failing(2, failure)
    paths = ["/a", "/a", STREAMS[1], "/b"]
    found = [failing(Write(number, "write", path, 1)) for number, path in enumerate(paths, 1)]
    assert found == [0, 28, 0, 28 if stays else 0]


def crashes(bases: Path, names: list[str], **how: int) -> dict[str, dict[str, str]]:
    rows = writes.rows(bases, str, names, **how)
    assert [row["name"] for row in rows] == [f"writes of {name}" for name in names]
    assert all(row["inputs"] for row in rows)
    return {row["name"]: row["crashes"] for row in rows if row["crashes"]}


@pytest.mark.random
def test_nothing_is_lost_if_a_write_fails_somewhere(fuzz_bases: Path) -> None:
    assert crashes(fuzz_bases, ["train 2", "finetune 2", "convert 1"], every=97, first=40) == {}


@pytest.mark.random
def test_nothing_is_lost_if_any_write_of_a_short_command_fails(fuzz_bases: Path) -> None:
    assert crashes(fuzz_bases, SHORT) == {}


@pytest.mark.random
def test_nothing_is_lost_if_one_of_many_writes_fails(fuzz_bases: Path) -> None:
    assert crashes(fuzz_bases, LONG, every=31) == {}


@pytest.mark.slow
def test_nothing_is_lost_if_any_write_fails(fuzz_bases: Path) -> None:
    assert crashes(fuzz_bases, [*LONG, *SLOW]) == {}
