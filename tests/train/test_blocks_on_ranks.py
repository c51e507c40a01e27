"""Every kind of model and block trains the same on four ranks, some of them tensor-parallel, as in
one process."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moesaic.planner.algorithm1 import choose
from moesaic.planner.cluster import read_cluster
from moesaic.planner.job import job_of
from moesaic.planner.simulator import Simulator
from moesaic.program.grid import Grid
from moesaic.train.config import TrainConfig
from runs import lines, run_quietly, tiny
from train.worlds import Outcome, assert_same_run, train_on

GPT2 = {"norm": "layer", "positions": "learned", "bias": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "gpt2": {"block": GPT2, "ffn": "dense", "dense_hidden": 32},
    "modern": {
        "block": {"kv_heads": 2, "head_dim": 6, "qk_norm": True, "tied": False},
        "conv_width": 1,
    },
    "bert": {"block": GPT2 | {"kind": "encoder", "norm": "post_layer"}, "moe_every": 2},
    "pairs": {
        "block": GPT2 | {"kind": "encoder_decoder", "tied": False},
        "num_layers": 4,
        "moe_every": 2,
    },
}
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "ep": 2},
    "positions": {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True},
}

QUICK = [("modern", "tp"), ("pairs", "positions")]
OTHERS = [cell for cell in itertools.product(BLOCKS, MESHES) if cell not in QUICK]
"""Each mesh under one block in `make test`; every other pair of a block and a mesh in
`make test-random`."""


def write_pairs(path: Path) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcd", k=draw.randint(1, 5))) for _ in range(400)]
    path.write_text(
        "".join(json.dumps({"source": word, "target": word[::-1]}) + "\n" for word in words)
    )
    return path


def config_of(folder: Path, block: str, mesh: str = "") -> TrainConfig:
    more: dict[str, Any] = {"mesh": MESHES[mesh]} if mesh else {}
    if block == "pairs":
        more["data"] = {"path": [str(write_pairs(folder / "pairs.jsonl"))], "val_share": 0.2}
    model = {"num_heads": 4, **BLOCKS[block]}
    return tiny(
        folder,
        steps=2,
        batch_size=4,
        precision="float64",
        evaluate={"every": 100, "sequences": 5},
        model=model,
        out=str(folder / f"{block}-{mesh}"),
        **more,
    )


def trained(
    folder: Path, cells: list[tuple[str, str]]
) -> tuple[Path, dict[tuple[str, str], list[Outcome]]]:
    """Train on one process and on four; return the folder and the outcomes by block and mesh."""
    for block in {block for block, _ in cells}:
        run_quietly(config_of(folder, block))
    return folder, dict(zip(cells, train_on(4, [config_of(folder, *cell) for cell in cells])))


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[Path, dict[tuple[str, str], list[Outcome]]]:
    return trained(tmp_path_factory.mktemp("blocks"), QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> tuple[Path, dict[tuple[str, str], list[Outcome]]]:
    return trained(tmp_path_factory.mktemp("others"), OTHERS)


@pytest.mark.parametrize(
    ("block", "mesh"), [*QUICK, *(pytest.param(*cell, marks=pytest.mark.random) for cell in OTHERS)]
)
def test_blocks_train_on_four_ranks_as_alone(request, block, mesh):
    folder, outcomes = request.getfixturevalue("quick" if (block, mesh) in QUICK else "others")
    assert [outcome.refusal for outcome in outcomes[block, mesh]] == [""] * 4
    assert_same_run(Path(config_of(folder, block).out), Path(config_of(folder, block, mesh).out))
    losses = [line["loss"] for line in lines(Path(config_of(folder, block, mesh).out), "train")]
    assert len(set(losses)) == 2


@pytest.mark.slow
def test_a_rule_of_algorithm_1_chooses_the_schedule_that_runs(tmp_path):
    mesh = {"tp": 2, "ep": 2, "etp": 2, "ranks_per_node": 4}
    config = tiny(
        tmp_path,
        steps=2,
        batch_size=4,
        mesh=mesh,
        planner={"plan": "parm", "cluster": "25gbe"},
        out=str(tmp_path / "parm"),
    )
    (outcomes,) = train_on(4, [config])
    assert [outcome.refusal for outcome in outcomes] == [""] * 4
    run_quietly(tiny(tmp_path, steps=2, batch_size=4, out=str(tmp_path / "one")))
    expected = [line["loss"] for line in lines(tmp_path / "one", "train")]
    simulator = Simulator(read_cluster("25gbe", nodes=1))
    saved = json.loads((tmp_path / "parm" / "config.json").read_text())
    layer = job_of(asdict(config), "run").step_model(simulator.cluster, 2).layer
    chosen = choose(simulator, layer, Grid(world=4, **mesh))
    assert saved["plan"]["schedule"] == chosen.schedule
    assert [line["loss"] for line in lines(tmp_path / "parm", "train")] == pytest.approx(
        expected, rel=1e-5
    )
