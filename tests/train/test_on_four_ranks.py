"""Training on four Gloo processes, with both meshes folded over each other and under several plans,
equals training on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.train.config import TrainConfig
from runs import run_quietly, tiny
from train.worlds import Outcome, assert_same_run, train_on

BASE = {
    "batch_size": 4,
    "precision": "float64",
    "evaluate": {"every": 100, "sequences": 5},
    "model": {"num_heads": 4},
}
PLANS = {
    "dp 2, tp 2, edp 2": ({"tp": 2, "ep": 2}, {"schedule": "s2"}),
    "dp 2, tp 2, ep 2, etp 2": (
        {"tp": 2, "ep": 2, "etp": 2},
        {"schedule": "s1", "all_to_all": "hier2d"},
    ),
    "two nodes": (
        {"ep": 2, "etp": 2, "ranks_per_node": 2},
        {"chunks": 3, "all_to_all": "pipelined"},
    ),
    "tp 4": (
        {"tp": 4, "ep": 2, "etp": 2, "innermost": "ep"},
        {"schedule": "s3", "order": "optsche"},
    ),
    "etp 4": ({"etp": 4}, {"gather_weights": 2}),
    "positions": ({"tp": 2, "ep": 2, "sequence_parallel": True}, {"schedule": "s2", "chunks": 2}),
    "ted": ({"tp": 2, "ep": 2, "etp": 2}, {"schedule": "ted"}),
    "baseline": ({"tp": 2, "ep": 2, "etp": 2}, {"schedule": "baseline"}),
    "overlap": (
        {"tp": 2, "ep": 2, "etp": 2},
        {"schedule": "s2", "overlap_gather": True, "order": "early"},
    ),
    "multicast": ({"ep": 4, "ranks_per_node": 2}, {"all_to_all": "multicast", "chunks": 2}),
    "a part of a batch for nobody": ({"ep": 4}, {"peer_groups": 2}),
}
"""Name to the mesh and the plan."""


def meshed(folder: Path, name: str) -> TrainConfig:
    mesh, plan = PLANS[name]
    return tiny(
        folder,
        **BASE,
        mesh=mesh,
        plan=plan,
        out=str(folder / name.replace(" ", "-").replace(",", "")),
    )


def trained(folder: Path, names: list[str], *more: TrainConfig) -> dict[str, list[Outcome]]:
    """Train on one process, then on four under some plans and what more is given; return the
    outcomes by name."""
    run_quietly(tiny(folder, **BASE, out=str(folder / "one")))
    outcomes = train_on(4, [*(meshed(folder, name) for name in names), *more])
    return dict(zip((*names, *(Path(config.out).name for config in more)), outcomes))


def test_four_ranks_train_as_one_process(tmp_path):
    """The mesh on which every kind of parameter is split over something and copied over something
    else."""
    name = "dp 2, tp 2, edp 2"
    assert [outcome.refusal for outcome in trained(tmp_path, [name])[name]] == [""] * 4
    assert_same_run(tmp_path / "one", Path(meshed(tmp_path, name).out))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train under every plan, and half a run; return the folder and the outcomes by name."""
    folder = tmp_path_factory.mktemp("four")
    half = replace(meshed(folder, "etp 4"), out=str(folder / "shrunk"), steps=2)
    return folder, trained(folder, list(PLANS), half)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_trains_as_one_process(world, name):
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes[name]] == [""] * 4
    assert_same_run(folder / "one", Path(meshed(folder, name).out))


@pytest.mark.slow
def test_a_world_may_shrink(world):
    folder, outcomes = world
    assert [outcome.refusal for outcome in outcomes["shrunk"]] == [""] * 4
    again = tiny(
        folder, **BASE, out=str(folder / "shrunk"), existing="resume", steps=3, mesh={"ep": 2}
    )
    for outcome in train_on(2, [again])[0]:
        assert outcome.refusal == ""
    for steps in (2, 3):
        run_quietly(
            tiny(folder, **BASE, out=str(folder / "expected"), existing="resume", steps=steps)
        )
    assert_same_run(folder / "expected", folder / "shrunk")
