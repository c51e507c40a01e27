"""Whole steps: parts add up, gathering hides behind idle links, and estimates lie under the
roofline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Host
from moesaic.planner.job import Job
from moesaic.planner.rank_memory import Memory
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import (
    LAUNCHES,
    NARROW_LAUNCHES,
    Estimate,
    LayerPass,
    StepCostModel,
    StepModel,
    alive_micro_batches,
    all_reduce_seconds,
    bubble_seconds,
    layer_passes,
    reduce_seconds,
)
from moesaic.planner.step_memory import step_memory
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.shapes import ModelShape
from planner.clusters import DEVICE, flat

LAYER = Workload(tokens=1024, num_experts=8, top_k=2, dim=256, hidden=512)
MODEL = StepModel(num_layers=4, layer=LAYER, seq_len=256, sparse_layers=2, vocab=1000)
GRID = Grid(world=8, ep=4, ranks_per_node=4)
SPEC = flat(2, 4, intra=400, inter=40, intra_us=2, inter_us=5, device=DEVICE)


def runs(**plan: object) -> tuple[Simulated, Simulated]:
    compiled = compile_plan(Plan(**plan), GRID)  # type: ignore[arg-type]
    simulator = Simulator(SPEC)
    forward, backward = (
        simulator.run(program, LAYER, compiled.grid)
        for program in (compiled.forward, compiled.backward)
    )
    return forward, backward


def around(model: StepModel = MODEL, spec: ClusterSpec = SPEC) -> StepCostModel:
    return StepCostModel(model, GRID, Simulator(spec))


def step(model: StepModel = MODEL, **plan: object) -> Estimate:
    return around(model).estimate(*runs(**plan))


def test_moe_parts_are_the_simulated_programs_times_the_layers() -> None:
    forward = runs()[0].seconds
    assert step().parts["moe forward"] == pytest.approx(2 * forward)
    twice = step(replace(MODEL, micro_batches=2))
    assert twice.parts["moe forward"] == pytest.approx(4 * forward)
    recomputed = replace(MODEL, recomputed=("block",))
    assert step(recomputed).parts["moe forward"] == pytest.approx(4 * forward)
    assert memory(recomputed).activations < memory().activations


def test_a_pass_takes_one_part_forward_two_backward_and_one_more_where_it_is_recomputed() -> None:
    plain = around()
    again = around(replace(MODEL, recomputed=("block",)))
    for part in ("attention", "dense", "launches"):
        assert again.around[part] == pytest.approx(4 / 3 * plain.around[part])
    assert again.around["unembed"] == plain.around["unembed"]


@pytest.mark.parametrize(
    ("layers", "every", "sparse"), [(4, 2, 2), (5, 2, 3), (4, 3, 2), (1, 1, 1)]
)
def test_moe_layers_are_counted_from_the_last_block_as_the_model_has_them(
    layers: int, every: int, sparse: int
) -> None:
    shape = ModelShape(num_layers=layers, moe_every=every)
    assert sum(map(shape.is_sparse, range(layers))) == sparse
    assert Job(model=shape).step_model(SPEC, 1).moe_layers == sparse


def test_gathering_parameters_hides_behind_computing_unless_one_thread_does_both() -> None:
    on_gpu = step().parts["parameters"]
    one_thread = around(spec=replace(SPEC, host=Host(runs_compute=True))).estimate(*runs())
    assert (
        on_gpu
        < one_thread.parts["parameters"]
        == pytest.approx(one_thread.limits["gathering parameters"])
    )


def test_dense_parameters_are_gathered_over_dp_and_experts_over_their_copies() -> None:
    """Gathered twice and scattered once, in float32; half of a reduction each."""
    per_block = 4 * 256 * 256 + 3 * 256 * 1024 / 2 + 256 * 8 / 2
    dense = reduce_seconds(SPEC, GRID, per_block * 4, 1, 8)
    experts = reduce_seconds(SPEC, GRID, 8 / 4 * 3 * 256 * 512 * 4, 4, 2)
    ends = reduce_seconds(SPEC, GRID, 2 * 1000 * 256 * 4, 1, 8)
    assert step().limits["gathering parameters"] == pytest.approx(
        3 / 2 * (4 * dense + 2 * experts + ends)
    )


def test_gradients_are_scattered_in_the_dtype_of_the_system() -> None:
    """Gathered twice at two bytes; scattered once at four or two."""
    wide, narrow = (
        step(replace(MODEL, gathered_bytes=2, gradient_bytes=size)).limits["gathering parameters"]
        for size in (4, 2)
    )
    assert narrow / wide == pytest.approx(3 / 4, rel=0.02)


def test_gathers_hide_behind_the_other_blocks_of_a_pass() -> None:
    """Dense blocks have time left behind which the experts of the others are gathered."""
    slow = replace(
        SPEC, links=tuple(replace(link, gbps=(0.3 * link.gbps[0],)) for link in SPEC.links)
    )
    bare = replace(MODEL, vocab=0)
    few, many = (
        around(replace(bare, num_layers=layers), slow)
        .estimate(*runs())
        .parts.get("parameters", 0.0)
        for layers in (4, 5)
    )
    assert few == pytest.approx(around(bare, slow).estimate(*runs()).parts.get("parameters", 0.0))
    extra = reduce_seconds(slow, GRID, (4 * 256**2 + 3 * 256 * 1024) * 4, 1, 8)
    assert many < few + 3 / 2 * extra


def test_every_layer_costs_launches_that_grow_with_the_experts_of_a_rank() -> None:
    of_layer, of_expert = LAUNCHES
    assert around().launches == of_layer + 2 * of_expert
    assert step().parts["launches"] == pytest.approx(2 * (of_layer + 2 * of_expert))
    assert around(replace(MODEL, micro_batches=3)).estimate(*runs()).parts[
        "launches"
    ] == pytest.approx(3 * step().parts["launches"])
    narrow = replace(MODEL, layer=replace(LAYER, products="bf16", dtype="fp32"))
    assert around(narrow).launches == pytest.approx(of_layer + 2 * NARROW_LAUNCHES * of_expert)
    assert around(spec=replace(SPEC, host=Host(runs_compute=True))).launches == 0


def test_overlapped_all_to_alls_take_the_longer_and_a_share_of_the_shorter() -> None:
    model = replace(MODEL, overlapped=True, vocab=0)
    spec = replace(SPEC, device=replace(SPEC.device, contention=0.4))
    forward = LayerPass(0.1, 0.3, {})
    backward = LayerPass(0.2, 0.4, {})
    plain, overlapped = (
        around(replace(model, overlapped=each), spec).estimate(forward, backward).parts
        for each in (False, True)
    )
    computing = 3 * around(model, spec).forward.attention + 0.1 + 0.2
    both = 0.7 + 0.4 * computing
    moe = [parts["moe forward"] + parts["moe backward"] for parts in (plain, overlapped)]
    assert moe[0] == pytest.approx(2 * 1.0)
    assert moe[0] - moe[1] == pytest.approx(2 * (computing + 0.7 - both))


@pytest.mark.parametrize(
    ("schedule", "runs_per_rank", "waits"),
    [
        ("1f1b", 1, 3 * 6.0),
        ("1f1b", 2, 3 * 3.0),
        ("zb-h1", 1, 3 * 2.0),
        ("zb-v", 2, 0.0),
        ("dualpipev", 2, 3 * 2.5),
    ],
)
def test_pipelines_wait_as_their_papers_say(schedule, runs_per_rank: int, waits: float) -> None:
    """Four stages; a micro-batch takes 1 forward, 3 backward for inputs and 2 for weights."""
    assert bubble_seconds(schedule, 4, runs_per_rank, 1.0, 3.0, 2.0) == pytest.approx(waits)
    assert bubble_seconds(schedule, 1, runs_per_rank, 1.0, 3.0, 2.0) == 0


def test_a_rank_keeps_as_many_micro_batches_as_its_schedule_says() -> None:
    assert [alive_micro_batches("1f1b", 4, 1, 16, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert alive_micro_batches("1f1b", 4, 2, 16, 0) == (4 + 8 - 1) / 2
    assert alive_micro_batches("zb-v", 4, 2, 16, 3) == 4
    assert alive_micro_batches("dualpipev", 4, 2, 16, 0) == 4.5
    assert alive_micro_batches("1f1b", 4, 1, 2, 0) == 2
    assert alive_micro_batches("1f1b", 1, 1, 2, 0) == 1


def test_a_pipeline_fills_and_drains_in_the_mean_time_of_its_ranks() -> None:
    model = replace(MODEL, vocab=0, stages=4, micro_batches=10)
    forward = LayerPass(0.1, 0.0, {})
    backward = LayerPass(0.2, 0.0, {})
    busy = around(model).busy_seconds(forward, backward)
    alike, slower = (
        around(model).estimate(forward, backward, mean_busy=each).parts for each in (None, 2 * busy)
    )
    hops = alike["pipeline"] - 3 * busy
    assert 0 < hops < 1e-3
    assert slower["pipeline"] == pytest.approx(2 * 3 * busy + hops)


def test_a_layer_of_another_system_by_hand() -> None:
    """Two experts of 1,024 rows; sorted four times; each rank sends a quarter of its copies to each
    of four."""
    device = replace(DEVICE, activation_traffic=1.0)
    spec = flat(2, 4, intra=400, inter=40, device=device)
    forward, backward = layer_passes(spec, GRID, LAYER, deepep=False)
    rows = 8 * 2048 / 8 / 2
    memory = device.memory_gigabytes_per_second * 1e9
    products = 2 * rows * 2 * 3 * 256 * 512 / (device.tflops.bf16 * 1e12)
    traffic = 2 * rows * (2 * 256 + 2 * 3 * 512) * 2 / memory
    copies = 4 * 2 * 2 * rows * 256 * 2 / memory
    assert forward.compute_seconds == pytest.approx(products + traffic + copies)
    assert backward.compute_seconds == pytest.approx(2 * (products + traffic) + copies)
    sent = 3 / 4 * 2048 * 256 * 2
    assert (
        forward.communication_seconds
        == backward.communication_seconds
        == pytest.approx(2 * sent / 50e9, rel=1e-3)
    )
    once, _ = layer_passes(spec, GRID, LAYER, deepep=True)
    assert once.communication_seconds < forward.communication_seconds
    assert once.compute_seconds == pytest.approx(products + traffic + copies / 2)
    whole, _ = layer_passes(spec, replace(GRID, ep=1), LAYER, deepep=False)
    assert (whole.communication_seconds, whole.link_seconds) == (0.0, {})


@pytest.mark.parametrize(
    "more",
    [
        {"num_layers": 6},
        {"vocab": 4000},
        {"micro_batches": 4},
        {"recomputed": ("moe",)},
        {"shared_hidden": 512},
        {"attention_copied": 512.0},
        {"loss_bytes": 52},
        {"launches": (2e-3, 1e-4)},
        {"stepwise": ("norms",)},
        {"score_operations": 1e7},
        {"stages": 2},
        {"dense_hidden": 4096},
        {"parameter_bytes": 8},
    ],
    ids=lambda more: next(iter(more)),
)
def test_more_of_anything_takes_longer(more: dict) -> None:
    whole = replace(MODEL, sharded="optimizer", hides_parameters=False, hides_gradients=False)
    assert step(replace(whole, **more)).seconds > step(whole).seconds


def test_reductions_take_what_a_hierarchical_ring_takes() -> None:
    """2 (n - 1) / n of the bytes cross inside nodes and, at the same time, 2 (N - 1) / N of a
    rank's share between nodes."""
    size = 1e8
    inside = 2 * 3 / 4 * size / 50e9
    between = 2 * 1 / 2 * size / 4 / 5e9
    assert reduce_seconds(SPEC, GRID, size, 1, 8) == pytest.approx(
        max(inside, between) + 5e-6, rel=1e-3
    )
    assert reduce_seconds(SPEC, GRID, size, 1, 4) == pytest.approx(inside + 2e-6, rel=1e-3)
    assert reduce_seconds(SPEC, GRID, size, 4, 2) == pytest.approx(
        2 * 1 / 2 * size / 5e9 + 5e-6, rel=1e-3
    )
    assert reduce_seconds(SPEC, GRID, size, 1, 1) == 0.0


def test_a_switch_that_adds_up_sends_every_value_once_and_every_sum_once() -> None:
    """Four ranks of a node at 50 GB/s take 1.25 of the bytes and two latencies rather than a ring's
    1.5. A pair saves nothing, and groups that leave the node have no switch in common."""
    size = 1e8
    adding = replace(SPEC, links=tuple(replace(link, adds=True) for link in SPEC.links))
    assert all_reduce_seconds(adding, GRID, size, 4) == pytest.approx(
        1.25 * size / 50e9 + 2 * 2e-6, rel=1e-6
    )
    for ranks in (1, 2, 8):
        assert all_reduce_seconds(adding, GRID, size, ranks) == reduce_seconds(
            SPEC, GRID, size, 1, ranks
        )
    assert all_reduce_seconds(adding, GRID, 8.0, 4) == reduce_seconds(SPEC, GRID, 8.0, 1, 4)
    assert all_reduce_seconds(SPEC, GRID, size, 4) == reduce_seconds(SPEC, GRID, size, 1, 4)


def memory(model: StepModel = MODEL) -> Memory:
    compiled = compile_plan(Plan(), GRID)
    return step_memory(around(model), compiled)


def test_memory_counts_the_part_of_the_parameters_that_a_rank_holds() -> None:
    needed = memory()
    dense = 4 * 4 * 256**2 + 2 * 3 * 256 * 1024 + 2 * 256 * 8 + 2 * 1000 * 256
    parameters = dense / 8 + 2 * 8 * 3 * 256 * 512 / 8
    assert needed.weights == pytest.approx(parameters * 4)
    assert needed.gradients == 0.0, "not yet at the last block's backward pass, which needs most"
    assert memory(replace(MODEL, micro_batches=2)).gradients == needed.weights
    assert needed.optimizer == pytest.approx(parameters * 8)
    assert needed.total == sum(vars(needed).values())


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"num_layers": 0}, "model.num_layers=0: must be at least 1"),
        ({"seq_len": 100}, "are not whole sequences of model.seq_len=100"),
        ({"vocab": -1}, "model.vocab=-1: must be at least 0"),
    ],
)
def test_impossible_models_are_refused(fields: dict, line: str) -> None:
    with pytest.raises(InputError, match=line):
        replace(MODEL, **fields)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 7, "sparse_layers": 3},
        {"micro_batches": 5, "alive": 3.0, "stages": 2, "runs": 2, "schedule": "zb-h1"},
        {"held": "gradients", "replicas": 2, "expert_replicas": 1},
        {"sharded": "none", "parameter_bytes": 2, "gradient_bytes": 2, "gathered_bytes": 2},
        {"recomputed": ("block",), "recomputed_blocks": 1, "recomputed_together": 2},
        {"embeddings": 1, "outputs": 3, "table_bytes": 5.0, "adapters": (1.0, 1.0)},
        {"attention_kept": 7.0, "attention_up_kept": 3.0, "attention_normed": 9.0},
        {"attention_result": 8.0, "stepwise": ("norms",), "launches": (1.0, 1.0)},
        {"loss_kept": 9.0, "loss_chunks": 2, "logits_kept": 2.0, "keeps_activated": True},
        {"overlapped": True, "graphs": True, "hides_parameters": False, "hides_gradients": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_parts_of_a_block_take_as_long_however_it_is_held(change: dict[str, Any]) -> None:
    """Layouts share them by the fields of a model that they depend on."""
    assert around(replace(MODEL, **change)).forward == around(MODEL).forward
