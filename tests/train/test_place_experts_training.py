"""Training with moving experts equals training on one process: losses, parameters, optimizer,
checkpoints, resumed runs."""

from __future__ import annotations

import pickle
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers import refused
from moesaic.balance.expert_placement import AbstractExpertPlacer, ExpertLoad
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.rates import Rates
from moesaic.train import balance
from moesaic.train.config import BalanceConfig, PlannerConfig, SaveConfig, TrainConfig
from runs import lines, run_quietly, tiny
from train import worlds
from train.worlds import Outcome, assert_same_run
from worlds import start

BASE = {
    "batch_size": 4,
    "precision": "float64",
    "evaluate": {"every": 2, "sequences": 5},
    "log_every": 1,
    "steps": 4,
}
MOE = {"num_experts": 8, "router": "sigmoid", "router_options": {"bias_rate": 0.01}, "z_loss": 0.01}
MODEL = {"num_heads": 4, "moe": MOE}
CASES = {
    "solved, ep 4": (
        {"ep": 4, "ranks_per_node": 2},
        {"chunks": 2},
        {"experts": "balanced", "experts_every": 1},
        {},
    ),
    "random, edp 2": ({"ep": 2}, {}, {"experts": "smartmoe", "experts_every": 1}, {}),
    "random, replicas on two nodes": (
        {"ep": 2, "ranks_per_node": 2, "shard": "node"},
        {},
        {"experts": "smartmoe", "experts_every": 1},
        {"accumulation": 2},
    ),
    "random, tp, etp": (
        {"tp": 2, "ep": 2, "etp": 2},
        {"schedule": "s2"},
        {"experts": "smartmoe", "experts_every": 2},
        {"accumulation": 2, "model": {"checkpoint_activations": True}},
    ),
    "random, sliced tokens, replication": (
        {"tp": 2, "ep": 4, "innermost": "ep"},
        {"schedule": "s1"},
        {"replication": "eplb", "experts": "smartmoe", "experts_every": 1},
        {},
    ),
}
"""Name to mesh, plan, placement, more."""
QUICK = "random, edp 2"
"""The case of `make test`; each of the others takes four processes a second and more of
computing."""


class Random(AbstractExpertPlacer):
    """Takes no notice of the load."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(0)

    def decide(self, load: ExpertLoad) -> np.ndarray:
        return self._draw.permutation(len(load.order))


def train_on(world: int, runs: list[TrainConfig]) -> list[list[Outcome]]:
    """Train as `worlds.train_on` does, with random orders under the name of a policy."""
    per_rank = [[run] * world for run in runs]
    with tempfile.TemporaryDirectory() as folder:
        start(world, _process, world, per_rank, folder)
        found = [
            pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world)
        ]
    return [list(outcomes) for outcomes in zip(*found)]


def _process(rank: int, world: int, runs: list[list[TrainConfig]], folder: str) -> None:
    balance.EXPERT_PLACERS = {**balance.EXPERT_PLACERS, "smartmoe": lambda _: Random()}
    # so slow that any better balance pays for its move
    slow = Rates(tflops=1e-9)
    balance.costs_in = lambda config, grid: slow
    worlds._process(rank, world, runs, folder, lambda: None)


def one_and_four(folder: Path, name: str) -> tuple[TrainConfig, TrainConfig]:
    """Return a case's configuration for one process and for four."""
    mesh, plan, placing, more = CASES[name]
    more = {**BASE, **more, "model": {**MODEL, **more.get("model", {})}}
    slug = name.replace(" ", "-").replace(",", "")
    plain = tiny(folder, **more, out=str(folder / f"one-{slug}"))
    meshed = tiny(
        folder, **more, mesh=mesh, plan=plan, balance=placing, out=str(folder / f"four-{slug}")
    )
    return plain, meshed


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train everything on one process and on four; return the folder and the outcomes by name."""
    folder = tmp_path_factory.mktemp("placed")
    plain, whole = one_and_four(folder, QUICK)
    run_quietly(plain)
    runs = {QUICK: whole}
    constant = replace(whole.optimizer, final_share=1.0, warmup_steps=0)
    parts = replace(
        whole,
        out=str(folder / "parts"),
        existing="resume",
        save=SaveConfig(every=2),
        optimizer=constant,
    )
    runs |= {"first half": replace(parts, steps=2), "second half": parts}
    runs["without"] = replace(parts, out=str(folder / "without"), balance=BalanceConfig())
    outcomes = train_on(4, list(runs.values()))
    for out in ("parts", "without"):
        away = tiny(
            folder, **BASE | {"steps": 5}, model=MODEL, out=str(folder / out), existing="resume"
        )
        run_quietly(replace(away, optimizer=constant))
    return folder, dict(zip(runs, outcomes))


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Train the cases of `make test-random`, in the same way."""
    folder = tmp_path_factory.mktemp("others")
    pairs = {name: one_and_four(folder, name) for name in CASES if name != QUICK}
    for plain, _ in pairs.values():
        run_quietly(plain)
    return folder, dict(zip(pairs, train_on(4, [meshed for _, meshed in pairs.values()])))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == QUICK else pytest.mark.random) for name in CASES],
)
def test_training_with_moving_experts_is_training_on_one_process(request, name):
    folder, outcomes = request.getfixturevalue("world" if name == QUICK else "others")
    assert [outcome.refusal for outcome in outcomes[name]] == [""] * 4
    plain, meshed = one_and_four(folder, name)
    assert_same_run(Path(plain.out), Path(meshed.out))
    told = [
        line["place_experts"]
        for line in lines(Path(meshed.out), "train")
        if "place_experts" in line
    ]
    assert len(told) == 4 // meshed.balance.experts_every
    assert sum(each["experts"] for each in told) > 0
    assert sum(each["bytes"] for each in told) > 0
    for each in told:
        assert len(each["busiest_before"]) == 2
        if name.startswith("solved"):
            assert all(
                after <= before
                for before, after in zip(each["busiest_before"], each["busiest_after"])
            )
            assert 0 <= each["inter_node_bytes"] <= each["bytes"]
    if name.startswith("solved"):
        assert told[0]["busiest_after"] < told[0]["busiest_before"]


def test_a_run_goes_on_from_a_checkpoint_in_the_middle_and_on_one_process(world):
    """Half on four ranks, half on four again, the last step on one process, with every checkpoint
    loaded in between."""
    folder, outcomes = world
    assert [
        o.refusal for half in ("first half", "second half", "without") for o in outcomes[half]
    ] == [""] * 12
    moved = [
        line
        for line in lines(folder / "parts", "train")
        if line.get("place_experts", {}).get("experts")
    ]
    assert len(moved) == 4
    assert_same_run(
        folder / "parts", folder / "without", kinds=("train",)
    )  # the first half ends with an evaluation more


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {},
            r"balance\.experts=balanced with mesh\.ep=1, where every rank has all experts: choose",
        ),
        (
            {"mesh": {"ep": 2}, "model": {"ffn": "dense"}},
            r'model\.ffn="dense" has no experts to move: leave it none',
        ),
    ],
)
def test_configurations_that_cannot_place_experts_are_refused(tmp_path, changes, words):
    assert re.search(words, refused(tiny, tmp_path, balance={"experts": "balanced"}, **changes))


def test_one_process_is_told_what_to_start(tmp_path):
    with pytest.raises(
        InputError, match=r"mesh asks for 2 ranks, this is one process: start with torchrun"
    ):
        run_quietly(tiny(tmp_path, mesh={"ep": 2}, balance={"experts": "smartmoe"}))
    assert not (tmp_path / "run").exists()


def test_rates_are_those_of_the_cluster_that_the_run_names(tmp_path):
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    placing = {"experts": "balanced"}
    config = tiny(tmp_path, batch_size=4, mesh={"ep": 4, "ranks_per_node": 2}, balance=placing)
    assert balance.costs_in(config, grid) == Rates(element_bytes=4, matrices=3)
    named = balance.costs_in(replace(config, planner=PlannerConfig(cluster="bed-2x2")), grid)
    assert named.inter_gbps < 0.5 < named.intra_gbps
    with pytest.raises(
        InputError,
        match=r"planner\.cluster=dgx-h100 has nodes of 8 devices, this run 2 ranks on a node",
    ):
        balance.costs_in(replace(config, planner=PlannerConfig(cluster="dgx-h100")), grid)
