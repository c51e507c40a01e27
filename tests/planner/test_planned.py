"""Files of a mesh and a plan: they come back, plans alone are read too, and what cannot be written is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic.planner.files import read_planned, write_plan, write_planned
from moesaic.planner.memory import Memory
from moesaic.planner.search import PlannedStep
from moesaic.planner.step import Estimate
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

FOUND = PlannedStep(
    plan=Plan(schedule="s2", gather_weights=1, chunks=4, overlap_gather=True),
    grid=Grid(world=16, tp=2, ep=4, etp=2, innermost="ep", ranks_per_node=8),
    estimate=Estimate(seconds=0.5, parts={"attention": 0.5}, limits={"compute": 0.25, 'a "quoted" nic': 0.3}),
    memory=Memory(weights=1, gradients=1, optimizer=2, activations=3, buffers=4),
    bound_seconds=0.4,
)


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_mesh_and_plan_come_back(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan.{ending}"
    write_planned(FOUND, path, model='gpt "1".toml', cluster="25gbe")
    assert read_planned(path) == ({"tp": 2, "ep": 4, "etp": 2, "innermost": "ep"}, FOUND.plan)
    assert read_planned(path)[1] == FOUND.plan, "readers of plans alone take it too"
    assert "simulated_step_seconds" in path.read_text()


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_plan_alone_has_no_mesh(ending: str, tmp_path: Path) -> None:
    write_plan(FOUND.plan, tmp_path / f"plan.{ending}")
    assert read_planned(tmp_path / f"plan.{ending}") == ({}, FOUND.plan)


@pytest.mark.parametrize(
    ("name", "words"),
    [("plan.txt", "choose a name that ends in .toml or .json"), ("no/plan.json", r"cannot be written \(No such file")],
)
def test_what_cannot_be_written_is_one_line(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        write_planned(FOUND, tmp_path / name, model="m", cluster="c")
