"""How data-parallel ranks hold a model: the rule that chooses, and runs whose split changes at
every step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import NoTransport
from moesaic.models.config import ModelConfig
from moesaic.models.gpt import GPT
from moesaic.program.grid import Grid
from moesaic.train import holding
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.holding import Holding, bytes_held, choose_holding
from moesaic.train.ranks import Ranks
from runs import run_quietly, tiny
from train.worlds import assert_same_run, train_on

SPLITS: dict[str, dict[str, Any]] = {
    "ep 4": {"ep": 4},
    "stages": {"pp": 2, "parts_per_stage": 2, "ep": 2},
    "hsdp": {"ranks_per_node": 2, "shard": "node"},
    "replicated": {"ep": 2, "shard": "none"},
}
"""Name to mesh of four ranks."""
WALK = "ep 4,stages,ep 4,hsdp,ep 4,replicated,stages,hsdp,stages,replicated,hsdp,replicated,ep 4"
"""The split of each step: every change from one to another occurs once."""
BASE = {
    "batch_size": 4,
    "accumulation": 2,
    "precision": "float64",
    "evaluate": {"every": 100, "sequences": 5},
    "optimizer": {"final_share": 1.0, "warmup_steps": 0, "clip_norm": 0.1},
    "model": {
        "num_layers": 5,
        "moe_every": 2,
        "moe": {
            "num_experts": 4,
            "top_k": 2,
            "hidden": 16,
            "load_balance_level": "global_batch",
            "z_loss": 0.01,
        },
    },
}


@pytest.mark.random
def test_a_run_goes_on_as_one_process_while_its_split_changes_at_every_step(tmp_path: Path) -> None:
    steps = WALK.split(",")
    assert len({*pairwise(steps)}) == len(SPLITS) * (len(SPLITS) - 1)
    runs = [
        tiny(
            tmp_path,
            **BASE,
            steps=step,
            out=str(tmp_path / "walk"),
            existing="resume",
            mesh=SPLITS[name],
        )
        for step, name in enumerate(steps, start=1)
    ]
    for outcomes in train_on(4, runs):
        assert [outcome.refusal for outcome in outcomes] == [""] * 4
    run_quietly(tiny(tmp_path, **BASE, steps=len(steps), out=str(tmp_path / "one")))
    assert_same_run(tmp_path / "one", tmp_path / "walk", kinds=("train",))


GRID = Grid(world=4, ep=2, ranks_per_node=2)


@pytest.mark.parametrize(
    ("memory", "mesh", "chosen"),
    [
        (1e9, {}, Holding("node", "parameters")),
        (1.0, {}, Holding("all", "nothing")),
        (1.0, {"pp": 2}, Holding("all", "gradients")),
        (1.0, {"shard": "none", "hold": "parameters"}, Holding("none", "parameters")),
    ],
)
def test_what_fits_is_held(
    memory: float, mesh: dict[str, Any], chosen: Holding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_memory", lambda _: memory)
    config = TrainConfig(
        mesh=MeshConfig(ep=2, **mesh), accumulation=2, model=ModelConfig(num_layers=4)
    )
    with torch.device("meta"):
        model = GPT(config.model, 256)
    ranks = Ranks()
    ranks.mesh = Mesh(GRID, NoTransport(torch.device("cpu")))
    assert choose_holding(config, model, ranks) == chosen


def test_bytes_held_count_weights_gradients_moments_and_whole_copies() -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig(num_layers=1), 256)
    experts = sum(p.nbytes for p in model.blocks[0].ffn.experts.parameters())
    dense = sum(p.nbytes for p in model.parameters()) - experts
    transport = NoTransport(torch.device("cpu"))

    def held(shard: Any, hold: Any) -> int:
        return bytes_held(Holding(shard, hold), model, Mesh(GRID, transport, shard=shard))

    assert held("all", "nothing") == dense + experts / 2 * 4 / 2
    assert held("all", "parameters") == dense * 3 + experts / 2 * (4 / 2 + 2)
    assert held("node", "gradients") == dense * (4 / 2 + 1) + experts / 2 * 4
    assert held("none", "parameters") == dense * 4 + experts / 2 * 4


def test_the_stage_that_holds_most_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last stage have the whole embedding each, the others have none."""
    config = TrainConfig(
        mesh=MeshConfig(pp=4), accumulation=4, model=ModelConfig(num_layers=4, ffn="dense")
    )
    with torch.device("meta"):
        model = GPT(config.model, 1 << 16)
    ranks = Ranks()
    ranks.mesh = Mesh(Grid(world=2, ranks_per_node=1), NoTransport(torch.device("cpu")))
    embedding = model.embedding.weight.nbytes
    blocks = sum(parameter.nbytes for parameter in model.blocks.parameters()) / 4
    most = 4 * (embedding + blocks + model.norm.weight.nbytes)  # each node has a whole copy
    for memory, shard in ((2.01 * most, "node"), (1.99 * most, "all")):
        monkeypatch.setattr(holding, "_memory", lambda _, memory=memory: memory)
        assert choose_holding(config, model, ranks).shard == shard
