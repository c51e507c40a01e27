"""The demo's model with samples that move has the losses that it has without, once both route alike; on four processes."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore
from torch.multiprocessing.spawn import spawn

from moesaic.bench.netmoe_train import Found, Job, curves, step_times
from moesaic.plan.placement import AbstractPlacer, Homes, SampleLoad, TwoStage
from moesaic.testing.processes import leave
from moesaic.train.config import MeshConfig
from moesaic.train.presets import demo

STEPS = 12


class Anywhere(AbstractPlacer):
    """Any placement at all, a function of the load."""

    def decide(self, load: SampleLoad) -> Homes:
        samples = load.homes.samples
        return Homes(np.random.default_rng(int(load.copies.max())).permutation(samples.size).reshape(samples.shape))


def job(steps: int) -> Job:
    plain = demo()
    config = replace(plain, model=replace(plain.model, seq_len=32), mesh=MeshConfig(ep=4, ranks_per_node=2))
    random = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(0, 8, (8, 33), generator=random)  # that there are only eight is learnt at once
        batches.append((tokens[:, :-1].clone(), tokens[:, 1:].clone()))
    methods = {"plain": None, "two_stage": TwoStage(), "anywhere": Anywhere()}
    return Job(config=config, vocab=256, methods=methods, batches=batches)


def on_processes(function: Callable[[Job], Any], asked: Job) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, args=(folder, function, asked), nprocs=4)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(4)]


def _process(rank: int, folder: str, function: Callable[[Job], Any], asked: Job) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=datetime.timedelta(seconds=3000))
    torch.save(function(asked), Path(folder) / f"{rank}.pt")
    leave()


@pytest.mark.slow
def test_replayed_routing_gives_the_same_loss_curve_whoever_moves() -> None:
    found = on_processes(curves, job(STEPS))
    assert all(each == found[0] for each in found)
    plain = found[0]["plain"]
    assert len(plain) == STEPS
    assert plain[-1] < plain[0] - 0.5, "the model learns, so the curve says something"
    for name in ("two_stage", "anywhere"):
        assert max(abs(a - b) for a, b in zip(found[0][name], plain, strict=True)) < 1e-4
    assert found[0]["anywhere"] != plain, "sums in another order: samples did move"


@pytest.mark.slow
def test_steps_by_all_methods_are_of_one_model() -> None:
    found: dict[str, Found] = on_processes(step_times, job(3))[0]
    assert {len(each.seconds) for each in found.values()} == {2}
    plain, moved, anywhere = found["plain"], found["two_stage"], found["anywhere"]
    assert plain.inter_bytes > 100_000
    assert moved.decided_saved > 0
    assert moved.inter_bytes < anywhere.inter_bytes
    assert 0.3 < anywhere.moved_nodes < 0.7
    assert anywhere.moved_ranks > anywhere.moved_nodes
    assert moved.predicted_right > 0.3
    assert -0.05 < moved.locality < 1
    assert plain.moved_ranks == 0
