"""Plans as files: they come back as they were, and whatever else a file may hold is refused in one
line."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest

from helpers import refused
from moesaic.planner.plan_files import FoundFor, read_found, read_planned, write_plan, write_planned
from moesaic.planner.rank_memory import Memory
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.step import Estimate
from moesaic.planner.workload import Workload
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

FOUND = PlannedStep(
    plan=Plan(schedule="s2", gather_weights=1, chunks=4, overlap_gather=True),
    grid=Grid(world=16, tp=2, ep=4, etp=2, innermost="ep", ranks_per_node=8),
    estimate=Estimate(
        seconds=0.5, parts={"attention": 0.5}, limits={"compute": 0.25, 'a "quoted" nic': 0.3}
    ),
    memory=Memory(weights=1, gradients=1, optimizer=2, activations=3, buffers=4),
    bound_seconds=0.4,
)

FOR = FoundFor(
    model='gpt "1".toml',
    cluster="25gbe",
    nodes=2,
    devices_per_node=8,
    layer=Workload(
        tokens=64, num_experts=8, top_k=2, dim=16, hidden=32, dtype="fp32", visits=((2, 1.5),)
    ),
)


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


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_plan_comes_back_as_it_was(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan.{ending}"
    for plan in map(plan_of, range(20)):
        write_plan(plan, path)
        assert read_planned(path) == ({}, plan)


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_mesh_and_plan_come_back(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan.{ending}"
    write_planned(FOUND, path, FOR)
    assert read_planned(path) == ({"tp": 2, "ep": 4, "etp": 2, "innermost": "ep"}, FOUND.plan)
    assert "simulated_step_seconds" in path.read_text()
    assert read_found(path) == FOR


def test_fields_that_are_left_out_keep_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('version = 1\n[plan]\nschedule = "s3"\nchunks = 2\ngather_weights = 0\n')
    assert read_planned(path)[1] == Plan(schedule="s3", chunks=2, gather_weights=0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"version": 2, "plan": {"warp": 9}},
            "has version 2, this Moesaic reads up to 1: upgrade it",
        ),
        ({"plan": {}}, "needs version = 1 and a table [plan]"),
        ({"version": "1", "plan": {}}, "needs version = 1"),
        ({"version": 1}, "needs version = 1 and a table [plan]"),
        ({"version": 1, "plan": []}, "needs version = 1 and a table [plan]"),
        ({"version": 1, "plan": {"chunk": 2}}, "unknown field plan.chunk: did you mean chunks?"),
        ({"version": 1, "plan": {"chunks": "2"}}, "plan.chunks must be a whole number, got '2'"),
        (
            {"version": 1, "plan": {"schedule": "s9"}},
            "plan.schedule='s9': choose one of baseline, ted, s1, s2, s3",
        ),
        ({"version": 1, "plan": {"chunks": 0}}, "plan.chunks=0: must be at least 1"),
        ([1], "must hold a table of fields, holds a list"),
    ],
    ids=str,
)
def test_what_holds_no_plan_is_refused(table: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    assert words in refused(read_planned, path)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"nodes": 0}, "found.nodes=0: must be a whole number of at least 1"),
        ({"nodes": "2"}, "found.nodes must be a whole number, got '2'"),
        ({"cluster": None}, "found.cluster must be text, got None"),
        ({"layer": {"tokens": 8}}, "found.layer.num_experts is missing"),
        ({"layer": []}, "found.layer must be a table"),
    ],
    ids=str,
)
def test_what_a_plan_was_found_for_is_refused_if_it_is_damaged(found, words, tmp_path) -> None:
    path = tmp_path / "plan.json"
    write_planned(FOUND, path, FOR)
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"found": table["found"] | found}))
    assert words in refused(read_found, path)
    path.write_text(json.dumps(table | {"found": {"model": "earlier"}}))
    assert read_found(path) is None


@pytest.mark.parametrize(
    "write", [partial(write_plan, FOUND.plan), partial(write_planned, FOUND, found=FOR)]
)
def test_what_could_not_be_read_back_is_not_written(write, tmp_path: Path) -> None:
    for name in ("plan", "plan.txt"):
        assert "choose a name that ends in .toml or .json" in refused(write, path=tmp_path / name)
    assert "cannot be written (No such file or directory): choose another" in refused(
        write, path=tmp_path / "no" / "a.json"
    )
    assert not list(tmp_path.iterdir())
