"""Whole steps: parts add up, gradients hide where links idle, points lie under the roofline."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cost.clusters import DEVICE, flat
from moesaic.cost.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    hierarchical_all_reduce,
    hierarchical_all_to_all,
    reduce,
    reduce_scatter,
)
from moesaic.cost.roofline import ideal, semi_ideal
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import Step, StepModel, fill_gaps, reduce_seconds, simulate_step
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan import Plan, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.task import Lane

LAYER = Workload(tokens=1024, num_experts=8, top_k=2, dim=256, hidden=512)
MODEL = StepModel(num_layers=4, layer=LAYER, seq_len=256, moe_every=2, vocab=1000)
GRID = Grid(world=8, ep=4, ranks_per_node=4)
SPEC = flat(2, 4, intra=400, inter=40, intra_us=2, inter_us=5, device=DEVICE)


def step(model: StepModel = MODEL, **plan: object) -> Step:
    compiled = compile_plan(Plan(**plan), GRID)  # type: ignore[arg-type]
    return simulate_step(model, compiled.forward, compiled.backward, SPEC, compiled.grid)


def test_parts_add_up_and_the_timeline_covers_the_step() -> None:
    found = step()
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.timeline.makespan == pytest.approx(found.seconds)
    assert set(found.parts) == {
        "attention", "dense", "moe forward", "moe backward", "unembed", "gradients", "optimizer"
    }  # fmt: skip
    names = {span.task.split(":")[0] for span in found.timeline.spans}
    assert {"layer1", "layer3", "layer1'", "layer3'", "dense0", "attention2", "gradients0", "optimizer"} <= names
    assert "layer0" not in names


def test_moe_parts_are_the_simulated_programs_times_the_layers() -> None:
    compiled = compile_plan(Plan(), GRID)
    forward = Simulator(SPEC).run(compiled.forward, LAYER, GRID).seconds
    assert step().parts["moe forward"] == pytest.approx(2 * forward)
    twice = step(replace(MODEL, micro_batches=2))
    assert twice.parts["moe forward"] == pytest.approx(4 * forward)
    again = step(replace(MODEL, checkpoint_activations=True))
    assert again.parts["moe forward"] == pytest.approx(4 * forward)
    assert again.memory.activations < step().memory.activations


def test_gradients_hide_behind_backward_and_never_gain_from_not_overlapping() -> None:
    hidden, exposed = step(), step(replace(MODEL, overlap_gradients=False))
    assert hidden.parts["gradients"] < exposed.parts["gradients"]
    per_layer = 4 * 256 * 256 + 3 * 256 * 1024 / 2 + 256 * 8 / 2 + 2 * 1000 * 256 / 4
    dense = reduce_seconds(SPEC, GRID, per_layer * 4, 1, 8)
    experts = reduce_seconds(SPEC, GRID, 8 / 4 * 3 * 256 * 512 * 4, 4, 2)
    assert exposed.parts["gradients"] == pytest.approx(4 * dense + 2 * experts)
    crossing = [span for span in hidden.timeline.spans if span.lane is Lane.INTER and ":" in span.task]
    assert crossing


def test_gradients_run_only_while_nothing_crosses() -> None:
    busy = [(1.0, 2.0), (3.0, 5.0)]
    assert fill_gaps(busy, 0.0, 0.5) == (0.0, 0.5)
    assert fill_gaps(busy, 0.5, 1.0) == (0.5, 2.5)
    assert fill_gaps(busy, 1.5, 1.5) == (2.0, 5.5)
    assert fill_gaps(busy, 6.0, 1.0) == (6.0, 7.0)


def test_reductions_take_what_a_hierarchical_ring_takes() -> None:
    """Inside a node 2 (n - 1) / n of the bytes, between nodes 2 (N - 1) / N of a rank's share, at the same time."""
    size = 1e8
    inside, between = 2 * 3 / 4 * size / 50e9, 2 * 1 / 2 * size / 4 / 5e9
    assert reduce_seconds(SPEC, GRID, size, 1, 8) == pytest.approx(max(inside, between) + 5e-6, rel=1e-3)
    assert reduce_seconds(SPEC, GRID, size, 1, 4) == pytest.approx(inside + 2e-6, rel=1e-3)
    assert reduce_seconds(SPEC, GRID, size, 4, 2) == pytest.approx(2 * 1 / 2 * size / 5e9 + 5e-6, rel=1e-3)
    assert reduce_seconds(SPEC, GRID, size, 1, 1) == 0.0


def test_collectives_by_hand() -> None:
    a, b = 1e-5, 1e-9
    assert all_to_all(4, 4000, a, b) == pytest.approx(3 * (a + 1000 * b))
    assert all_gather(4, 4000, a, b) == reduce_scatter(4, 4000, a, b) == pytest.approx(3 * a + 3000 * b)
    assert all_reduce(4, 4000, a, b) == pytest.approx(6 * a + 6000 * b)
    assert broadcast(8, 4000, a, b) == reduce(8, 4000, a, b) == pytest.approx(3 * a + 4000 * b)
    assert all_reduce(1, 4000, a, b) == broadcast(1, 4000, a, b) == 0
    both = hierarchical_all_to_all(2, 4, 4000, (a, b), (2 * a, 3 * b))
    assert both == pytest.approx(3 * (a + 1000 * b) + 1 * (2 * a + 2000 * 3 * b))
    assert hierarchical_all_reduce(2, 4, 4000, (a, b), (2 * a, 3 * b)) == pytest.approx(
        2 * (3 * a + 3000 * b) + 2 * (2 * a + 500 * 3 * b)
    )


def test_memory_counts_weights_by_their_shards() -> None:
    memory = step().memory
    dense = 4 * 4 * 256**2 + 2 * 3 * 256 * 1024 + 2 * 256 * 8 + 2 * 1000 * 256
    mine = dense + 2 * 8 / 4 * 3 * 256 * 512
    assert memory.weights == pytest.approx(mine * 2)
    assert memory.gradients == pytest.approx(mine * 4)
    assert memory.optimizer == pytest.approx(mine * 12)
    assert memory.total == sum(vars(memory).values())


def test_simulated_layers_lie_under_the_roofline() -> None:
    assert ideal(10.0, 0.5) == 5.0
    assert ideal(10.0, 2.0) == 10.0
    assert semi_ideal(10.0, 1.0) == 5.0
    assert semi_ideal(10.0, math.inf) == 10.0
    flops = 2 * 3 * 1024 * 2 * 256 * 512 * 3
    for all_to_all_name in ("linear", "hier2d", "multicast"):
        for chunks in (1, 4):
            compiled = compile_plan(Plan(chunks=chunks, all_to_all=all_to_all_name), GRID)  # type: ignore[arg-type]
            runs = [Simulator(SPEC).run(program, LAYER, GRID) for program in (compiled.forward, compiled.backward)]
            ratio = sum(run.compute_seconds for run in runs) / sum(run.communication_seconds for run in runs)
            throughput = flops / sum(run.seconds for run in runs)
            assert 0 < throughput <= ideal(100e12, ratio) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"num_layers": 0}, "model.num_layers=0: must be at least 1"),
        ({"seq_len": 100}, "are no whole sequences of model.seq_len=100"),
        ({"vocab": -1}, "model.vocab=-1: must be at least 0"),
    ],
)
def test_impossible_models_are_refused(fields: dict, line: str) -> None:
    with pytest.raises(InputError, match=line):
        replace(MODEL, **fields)
