"""The predicted memory of a training step is near the bytes of living tensors."""

from __future__ import annotations

import datetime
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from allocated import Allocated
from moesaic.planner.cluster import Host
from moesaic.planner.job import job_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.step_memory import step_memory
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.testing.runner import leave
from moesaic.train.loop import Trainer, train
from planner.clusters import tree
from runs import TINY, tiny
from worlds import start

TABLE: dict[str, Any] = {
    "batch_size": 8,
    "steps": 3,
    "optimizer": {"lr": 1e-9, "warmup_steps": 1},
    "data": {"vocab_size": 256},
    "model": {
        "dim": 128,
        "num_layers": 3,
        "num_heads": 2,
        "seq_len": 256,
        "moe": {"num_experts": 8, "top_k": 2, "hidden": 256, "router": "hash"},
    },
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"model": {"checkpoint_activations": True}},
    "accumulated": {"accumulation": 2},
    "both": {"accumulation": 2, "model": {"checkpoint_activations": True}},
}


def table_of(case: str) -> dict[str, Any]:
    changes = CASES[case]
    return {**TABLE, **changes, "model": {**TABLE["model"], **changes.get("model", {})}}


def measured(rank: int, world: int, folder: str) -> None:
    """Train every case on this rank, and keep the most bytes of tensors in steps after the
    first."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=300)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    one_step = Trainer._step
    peaks = {}
    with Allocated() as allocated:

        def step(trainer: Trainer) -> dict[str, Any]:
            allocated.most = 0
            values = one_step(trainer)
            if trainer.state.step > 1:  # the optimizer had its states
                in_steps.append(allocated.most)
            return values

        Trainer._step = step  # type: ignore[method-assign]
        for case in CASES:
            config = tiny(
                Path(folder),
                **table_of(case) | {"data": {"vocab_size": 256, "path": [f"{folder}/tokens.bin"]}},
                mesh={"ep": world, "hold": "nothing"},
                out=f"{folder}/{case}",
                evaluate={"every": 100, "sequences": 4},
            )
            in_steps: list[int] = []
            gc.collect()
            before = allocated.now
            train(config, console=Console(file=io.StringIO()))
            peaks[case] = max(in_steps) - before
    Path(f"{folder}/{rank}.pickle").write_bytes(pickle.dumps(peaks))
    leave()


def predicted(case: str, world: int) -> float:
    grid = Grid(world=world, ep=world)
    cluster = tree(1, world, host=Host(runs_compute=True))
    job = job_of({**TINY, **table_of(case)}, "here")
    cost_model = StepCostModel(job.step_model(cluster, grid.dp), grid, Simulator(cluster))
    compiled = compile_plan(Plan(), grid)
    return step_memory(cost_model, compiled).total


@pytest.mark.random
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_takes_the_predicted_memory(tmp_path: Path, world: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, 60_000)
    numbers.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    start(world, measured, world, str(tmp_path))
    peaks = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(world)]
    most = {case: max(of_rank[case] for of_rank in peaks) for case in CASES}
    ratios = {case: predicted(case, world) / most[case] for case in CASES}
    assert min(ratios.values()) >= 0.9, ratios
    assert max(ratios.values()) <= 1.1, ratios
