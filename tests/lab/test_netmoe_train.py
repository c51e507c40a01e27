"""Steps of one model by every answer to skewed routing, in turn on the same batches; on four
processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.balance.samples import AbstractPlacer, Homes, SampleLoad, TwoStage
from moesaic.configfile import override
from moesaic.testing.runner import on_ranks
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.presets import demo
from moesaic_lab.beds import BedCell, Timed, joined
from moesaic_lab.relocate_train import (
    METHODS,
    StepFound,
    StepJob,
    StepMethod,
    configuration,
    step_times,
)
from moesaic_testbed.bed import Bed

SAMPLES: dict[str, Any] = {"samples": "two_stage"}
EXPERTS: dict[str, Any] = {"experts": "smartmoe", "experts_every": 1}
ARBITER: dict[str, Any] = {"replication": "arbiter"}


class Anywhere(AbstractPlacer):
    """Any placement at all, a function of the load."""

    def decide(self, load: SampleLoad) -> Homes:
        samples = load.homes.samples
        return Homes(
            np.random.default_rng(int(load.copies.max()))
            .permutation(samples.size)
            .reshape(samples.shape)
        )


def job(steps: int) -> StepJob:
    plain = demo()
    sizes = {"model": replace(plain.model, seq_len=32), "mesh": MeshConfig(ep=4, ranks_per_node=2)}
    config = replace(plain, precision="float32", **sizes)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(0, 8, (8, 33), generator=random)
        batches.append((tokens[:, :-1].clone(), tokens[:, 1:].clone()))

    def changed(**balance: Any) -> TrainConfig:
        return override(
            config, {"balance": balance, "planner": {"cluster": "bed-2x2"}}, source="the test"
        )

    methods = {
        "plain": StepMethod(config=config),
        "two_stage": StepMethod(config=changed(**SAMPLES), placer=TwoStage(least_gain=0.0)),
        "anywhere": StepMethod(config=changed(**SAMPLES), placer=Anywhere()),
        "all": StepMethod(config=changed(**SAMPLES, **EXPERTS, **ARBITER)),
    }
    return StepJob(methods=methods, vocab=256, batches=batches)


def test_every_method_can_be_configured() -> None:
    configs = {
        name: configuration(1, 8, {"balance": changes}).balance for name, changes in METHODS.items()
    }
    assert [name for name, balance in configs.items() if balance == configs["plain"]] == ["plain"]


@pytest.mark.slow
def test_steps_by_all_methods_are_of_one_model() -> None:
    of_ranks: list[tuple[Timed, dict[str, StepFound]]] = on_ranks(
        4, step_times, job(3), timeout_seconds=3000
    )
    cell = BedCell(**joined([timed for timed, _ in of_ranks], Bed()))
    found = of_ranks[0][1]
    assert {len(each.seconds) for each in cell.timings.values()} == {2}
    assert all(each == found for _, each in of_ranks)
    plain = found["plain"]
    moved = found["two_stage"]
    anywhere = found["anywhere"]
    across = {name: num_bytes for name, (num_bytes, _) in cell.across.items()}
    assert across["plain"] > 100_000
    assert moved.decided_saved > 0
    assert across["two_stage"] < across["anywhere"]
    assert 0.3 < anywhere.moved_nodes < 0.7
    assert anywhere.moved_ranks > anywhere.moved_nodes
    assert moved.predicted_right > 0.3
    assert -0.05 < moved.locality < 1
    assert plain.moved_ranks == 0
    assert [each.experts_moved > 0 for each in found.values()] == [False, False, False, True]
    assert sum(found["all"].options.values()) == 3 * 4
    assert plain.options == {}
