"""Whole steps: parts add up, gathering hides behind idle links, and estimates lie under the roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Host
from moesaic.planner.memory import Memory
from moesaic.planner.simulate import Simulator
from moesaic.planner.step import Estimate, StepCostModel, all_reduce_seconds, reduce_seconds
from moesaic.planner.step_model import StepModel
from moesaic.planner.timing import Simulated
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.shapes import ModelShape
from moesaic_lab.reproduce.fastermoe_model import ideal
from planner.clusters import DEVICE, flat

LAYER = Workload(tokens=1024, num_experts=8, top_k=2, dim=256, hidden=512)
MODEL = StepModel(num_layers=4, layer=LAYER, seq_len=256, moe_every=2, vocab=1000)
GRID = Grid(world=8, ep=4, ranks_per_node=4)
SPEC = flat(2, 4, intra=400, inter=40, intra_us=2, inter_us=5, device=DEVICE)


def runs(**plan: object) -> tuple[Simulated, Simulated]:
    compiled = compile_plan(Plan(**plan), GRID)  # type: ignore[arg-type]
    simulator = Simulator(SPEC)
    forward, backward = (
        simulator.run(program, LAYER, compiled.grid) for program in (compiled.forward, compiled.backward)
    )
    return forward, backward


def around(model: StepModel = MODEL, spec: ClusterSpec = SPEC) -> StepCostModel:
    return StepCostModel(model, GRID, Simulator(spec))


def step(model: StepModel = MODEL, **plan: object) -> Estimate:
    return around(model).estimate(*runs(**plan))


def test_parts_add_up() -> None:
    estimate = step()
    assert sum(estimate.parts.values()) == pytest.approx(estimate.seconds)
    assert set(estimate.parts) == {
        "attention", "dense", "moe forward", "moe backward", "unembed", "parameters", "optimizer"
    }  # fmt: skip


def test_moe_parts_are_the_simulated_programs_times_the_layers() -> None:
    forward = runs()[0].seconds
    assert step().parts["moe forward"] == pytest.approx(2 * forward)
    twice = step(replace(MODEL, micro_batches=2))
    assert twice.parts["moe forward"] == pytest.approx(4 * forward)
    recomputed = replace(MODEL, recomputed=("block",))
    assert step(recomputed).parts["moe forward"] == pytest.approx(4 * forward)
    assert memory(recomputed).activations < memory().activations


def test_a_pass_takes_one_part_forward_two_backward_and_one_more_where_it_is_recomputed() -> None:
    plain, again = around(), around(replace(MODEL, recomputed=("block",)))
    assert again.attention == pytest.approx(4 / 3 * plain.attention)
    assert again.dense == pytest.approx(4 / 3 * plain.dense)
    assert again.unembed == plain.unembed


@pytest.mark.parametrize(("layers", "every", "sparse"), [(4, 2, 2), (5, 2, 3), (4, 3, 2), (1, 1, 1)])
def test_moe_layers_are_counted_from_the_last_block_as_the_model_has_them(layers: int, every: int, sparse: int) -> None:
    shape = ModelShape(num_layers=layers, moe_every=every)
    assert sum(map(shape.is_sparse, range(layers))) == sparse
    assert replace(MODEL, num_layers=layers, moe_every=every).moe_layers == sparse


def test_gathering_parameters_hides_behind_computing_unless_one_thread_does_both() -> None:
    on_gpu = step().parts["parameters"]
    on_cpu = around(spec=replace(SPEC, host=Host(runs_compute=True))).estimate(*runs()).parts["parameters"]
    assert on_gpu < on_cpu == pytest.approx(sum(around().sharding.values()))


def test_dense_parameters_are_gathered_over_dp_and_experts_over_their_copies() -> None:
    per_block = 4 * 256 * 256 + 3 * 256 * 1024 / 2 + 256 * 8 / 2
    dense = reduce_seconds(SPEC, GRID, per_block * 4, 1, 8)
    experts = reduce_seconds(SPEC, GRID, 8 / 4 * 3 * 256 * 512 * 4, 4, 2)
    ends = reduce_seconds(SPEC, GRID, 2 * 1000 * 256 * 4, 1, 8)
    seconds = around().sharding
    assert (seconds["dense"], seconds["experts"]) == (
        pytest.approx(3 / 2 * 4 * dense),
        pytest.approx(3 / 2 * 2 * experts),
    )
    assert seconds["ends"] == pytest.approx(3 / 2 * ends)


def test_reductions_take_what_a_hierarchical_ring_takes() -> None:
    """2 (n - 1) / n of the bytes cross inside nodes and, at the same time, 2 (N - 1) / N of a rank's share between
    nodes."""
    size = 1e8
    inside, between = 2 * 3 / 4 * size / 50e9, 2 * 1 / 2 * size / 4 / 5e9
    assert reduce_seconds(SPEC, GRID, size, 1, 8) == pytest.approx(max(inside, between) + 5e-6, rel=1e-3)
    assert reduce_seconds(SPEC, GRID, size, 1, 4) == pytest.approx(inside + 2e-6, rel=1e-3)
    assert reduce_seconds(SPEC, GRID, size, 4, 2) == pytest.approx(2 * 1 / 2 * size / 5e9 + 5e-6, rel=1e-3)
    assert reduce_seconds(SPEC, GRID, size, 1, 1) == 0.0


def test_a_switch_that_adds_up_sends_every_value_once_and_every_sum_once() -> None:
    """Four ranks of a node at 50 GB/s take 1.25 of the bytes and two latencies rather than a ring's 1.5. A pair saves
    nothing, and groups that leave the node have no switch in common."""
    size, adding = 1e8, replace(SPEC, links=tuple(replace(link, adds=True) for link in SPEC.links))
    assert all_reduce_seconds(adding, GRID, size, 4) == pytest.approx(1.25 * size / 50e9 + 2 * 2e-6, rel=1e-6)
    for ranks in (1, 2, 8):
        assert all_reduce_seconds(adding, GRID, size, ranks) == reduce_seconds(SPEC, GRID, size, 1, ranks)
    assert all_reduce_seconds(adding, GRID, 8.0, 4) == reduce_seconds(SPEC, GRID, 8.0, 1, 4)
    assert all_reduce_seconds(SPEC, GRID, size, 4) == reduce_seconds(SPEC, GRID, size, 1, 4)


def memory(model: StepModel = MODEL) -> Memory:
    compiled = compile_plan(Plan(), GRID)
    return around(model).memory(compiled.forward, compiled.backward, compiled.grid)


def test_memory_counts_the_part_of_the_parameters_that_a_rank_holds() -> None:
    needed = memory()
    dense = 4 * 4 * 256**2 + 2 * 3 * 256 * 1024 + 2 * 256 * 8 + 2 * 1000 * 256
    parameters = dense / 8 + 2 * 8 * 3 * 256 * 512 / 8
    assert needed.weights == needed.gradients == pytest.approx(parameters * 4)
    assert needed.optimizer == pytest.approx(parameters * 8)
    assert needed.total == sum(vars(needed).values())


def test_simulated_layers_lie_under_the_roofline() -> None:
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
        ({"seq_len": 100}, "are not whole sequences of model.seq_len=100"),
        ({"vocab": -1}, "model.vocab=-1: must be at least 0"),
    ],
)
def test_impossible_models_are_refused(fields: dict, line: str) -> None:
    with pytest.raises(InputError, match=line):
        replace(MODEL, **fields)
