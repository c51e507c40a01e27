"""Plans as files: they come back as they were, and whatever else a file may hold is refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.planner.files import read_planned, write_plan
from moesaic.program.build import SCHEDULES
from moesaic.program.plan import Plan


def plan_of(seed: int) -> Plan:
    rng = random.Random(seed)
    return Plan(
        schedule=rng.choice([*SCHEDULES]),
        fuse=rng.random() < 0.5,
        gather_weights=rng.choice([None, 0, 1, 4]),
        chunks=rng.randint(1, 9),
        peer_groups=rng.randint(1, 4),
        overlap_gather=rng.random() < 0.5,
        all_to_all=rng.choice(["linear", "hier2d", "multicast"]),  # type: ignore[arg-type]
        codec=rng.choice(["none", "zfp"]),  # type: ignore[arg-type]
        backward_codec=rng.choice(["none", "fp8"]),  # type: ignore[arg-type]
        order=rng.choice(["early", "fifo", "optsche"]),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_comes_back_as_it_was(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan_of(seed), path)
    assert read_planned(path)[1] == plan_of(seed)


def test_toml_is_read_and_fields_that_are_left_out_keep_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('version = 1\n[plan]\nschedule = "s3"\nchunks = 2\ngather_weights = 0\n')
    assert read_planned(path)[1] == Plan(schedule="s3", chunks=2, gather_weights=0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"version": 2, "plan": {}}, "has version 2, this Moesaic reads up to 1: upgrade it"),
        ({"version": 2, "plan": {"warp": 9}}, "has version 2"),
        ({"plan": {}}, "needs version = 1 and a table [plan]"),
        ({"version": "1", "plan": {}}, "needs version = 1"),
        ({"version": 1}, "needs version = 1 and a table [plan]"),
        ({"version": 1, "plan": []}, "needs version = 1 and a table [plan]"),
        ({"version": 1, "plan": {"chunk": 2}}, "unknown field plan.chunk: did you mean chunks?"),
        ({"version": 1, "plan": {"warp": 2}}, "unknown field plan.warp"),
        ({"version": 1, "plan": {"chunks": "2"}}, "plan.chunks must be a whole number, got '2'"),
        ({"version": 1, "plan": {"chunks": 2.5}}, "plan.chunks must be a whole number, got 2.5"),
        ({"version": 1, "plan": {"chunks": True}}, "plan.chunks must be a whole number, got True"),
        ({"version": 1, "plan": {"fuse": 1}}, "plan.fuse must be true or false, got 1"),
        ({"version": 1, "plan": {"schedule": "s9"}}, "plan.schedule='s9': choose one of baseline, ted, s1, s2, s3"),
        ({"version": 1, "plan": {"schedule": None}}, "plan.schedule=None: choose one of"),
        ({"version": 1, "plan": {"codec": ["int8"]}}, "plan.codec must be text, got ['int8']"),
        ({"version": 1, "plan": {"chunks": 0}}, "plan.chunks=0: must be at least 1"),
        ([1], "must hold a table of fields, holds a list"),
    ],
    ids=str,
)
def test_what_holds_no_plan_is_refused(table: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    assert words in refused(lambda: read_planned(path)[1])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("plan.json", b"{", "does not parse"),
        ("plan.toml", b"= 3", "does not parse"),
        ("plan.json", b"\xff\xfe\x00", "cannot be read"),
        ("plan.yaml", b"", "unknown kind of file, use .toml or .json"),
        ("plan.json", None, "no such file"),
    ],
)
def test_what_is_no_such_file_is_refused(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    line = refused(lambda: read_planned(path)[1])
    assert words in line
    assert str(path) in line


@pytest.mark.parametrize("name", ["plan", "plan.txt"])
def test_a_name_that_could_not_be_read_back_is_refused(name: str, tmp_path: Path) -> None:
    assert "choose a name that ends in .toml or .json" in refused(lambda: write_plan(Plan(), tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written \(No such file or directory\): choose another path"):
        write_plan(Plan(), tmp_path / "no" / "plan.json")
