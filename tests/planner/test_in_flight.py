"""Two micro-batches in flight as the planner predicts them: against measured steps, chosen where
they pay, written for the trainer, with their memory, drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic.planner.candidates import Pins
from moesaic.planner.cluster import ClusterSpec, Device, Host, Link, Tflops
from moesaic.planner.in_flight import layers_in_flight
from moesaic.planner.job import DataShape, Job
from moesaic.planner.plan_files import FoundFor, read_step, write_planned
from moesaic.planner.search import FLIES, Result, Settings, search
from moesaic.planner.simulator import Simulator
from moesaic.planner.split import JobSplit, SplitCostModel
from moesaic.planner.workload import Workload
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Lane
from moesaic.report.gantt import in_flight_gantt
from moesaic.shapes import ModelShape, MoEShape
from planner.clusters import flat

TWO = Grid(world=2, tp=1, ep=2, etp=1, ranks_per_node=1)
TOKENS = 1000
HIDDEN = 64
EXPERT = 0.020
"""Seconds of a forward pass of the experts in the measured steps."""
JOB = Job(
    batch_size=4,
    accumulation=4,
    model=ModelShape(
        dim=256,
        num_layers=4,
        num_heads=4,
        seq_len=128,
        moe_every=1,
        moe=MoEShape(num_experts=8, hidden=512),
    ),
    data=DataShape(vocab_size=256),
)


def measured_cell(blocks: int, micro_batches: int, dense: float, in_turn: float) -> float:
    """Return the predicted seconds in flight over those of the best chunks in turn, on two ranks at
    50 Mbit/s whose messages are so large that one chunk in turn takes `in_turn` seconds."""
    count = blocks * micro_batches
    wire = (in_turn - 3 * count * (dense + EXPERT)) / (4 * count)
    dim = int(wire * 0.05e9 / 8 / (4 * TOKENS))  # half of the copies of two experts travel
    operations = 2 * 2 * 2 * TOKENS * dim * HIDDEN
    device = Device(
        tflops=Tflops(fp32=operations / EXPERT / 1e12, bf16=1),
        memory_gib=40,
        memory_gigabytes_per_second=1e6,
        gemm_rows=(1,),
        gemm_share=(1.0,),
    )
    cluster = ClusterSpec(
        nodes=2,
        devices_per_node=1,
        device=device,
        links=(Link(name="wire", devices=1, gbps=(0.05,)),),
        host=Host(runs_compute=True),
    )
    layer = Workload(
        tokens=TOKENS, num_experts=4, top_k=2, dim=dim, hidden=HIDDEN, matrices=2, dtype="fp32"
    )
    simulator = Simulator(cluster)

    def turns(chunks: int) -> float:
        compiled = compile_plan(Plan(chunks=chunks), TWO)
        passes = simulator.passes(compiled.forward, compiled.backward, layer, TWO)
        return count * (sum(each.seconds for each in passes) + 3 * dense)

    compiled = compile_plan(Plan(), TWO)
    flights = [
        layers_in_flight(simulator, program, layer, TWO, between=between, layers=blocks).seconds
        for program, between in ((compiled.forward, dense), (compiled.backward, 2 * dense))
    ]
    assert turns(1) == pytest.approx(in_turn, rel=0.01)
    return micro_batches / 2 * sum(flights) / min(map(turns, (1, 2, 4, 8)))


@pytest.mark.parametrize(
    ("cell", "seconds", "in_turn"),
    [((4, 4, 0.030, 5.55), 3.44, 4.51), ((8, 2, 0.040, 5.74), 3.56, 4.81)],
)
def test_a_step_in_flight_is_as_much_faster_as_was_measured(
    cell: tuple[int, int, float, float], seconds: float, in_turn: float
) -> None:
    assert measured_cell(*cell) == pytest.approx(seconds / in_turn, abs=0.01)


def boxes(gbps: float) -> ClusterSpec:
    """Return two machines of two ranks with a link between them."""
    whole = flat(2, 2, intra=max(8, gbps), inter=gbps, intra_us=5, inter_us=30)
    rates = Tflops(fp32=0.1, bf16=0.05)
    device = replace(whole.device, tflops=rates, gemm_rows=(1,), gemm_share=(1.0,))
    return replace(whole, device=device, host=Host(runs_compute=True))


def found(cluster: ClusterSpec, job: Job = JOB) -> Result:
    settings = Settings(
        pins=Pins(ep=4), keep=99, refine=1, paired=0, most_stages=1, may_fly=True, reserve_gib=0
    )
    return search(job, cluster, settings)


@pytest.mark.random
def test_two_are_chosen_where_a_link_takes_half_of_a_step_and_one_where_it_is_fast() -> None:
    slow = found(boxes(0.3))
    assert slow.best.split.in_flight == 2
    assert "two micro-batches in flight" in slow.best.layout
    in_turn = min(each.seconds for each in slow.ranking if each.split.in_flight == 1)
    assert slow.best.seconds <= FLIES * in_turn
    assert slow.best.seconds >= slow.best.bound_seconds
    assert sum(slow.best.estimate.parts.values()) == pytest.approx(slow.best.seconds)
    assert all(each.split.in_flight == 1 for each in found(boxes(10000)).ranking)


def test_a_step_of_one_micro_batch_has_none_in_flight() -> None:
    one = replace(JOB, accumulation=1)
    assert all(each.split.in_flight == 1 for each in found(boxes(0.3), one).ranking)
    with pytest.raises(InputError):
        SplitCostModel(one, TWO, JobSplit(in_flight=2), Simulator(boxes(0.3)))
    assert not JobSplit(pp=2, in_flight=2).fits(JOB)


def priced(in_flight: int) -> tuple[SplitCostModel, Compiled]:
    grid = Grid(world=4, tp=1, ep=4, etp=1, ranks_per_node=2)
    split = JobSplit(hold="gradients", in_flight=in_flight)
    return SplitCostModel(JOB, grid, split, Simulator(boxes(0.3))), compile_plan(Plan(), grid)


def test_two_in_flight_keep_the_activations_and_buffers_of_two() -> None:
    memories = []
    for number in (1, 2):
        cost_model, compiled = priced(number)
        memories.append(cost_model.memory(compiled))
    one, two = memories
    assert two.activations == 2 * one.activations
    assert two.buffers == 2 * one.buffers
    assert (two.weights, two.gradients, two.optimizer) == (
        one.weights,
        one.gradients,
        one.optimizer,
    )


def test_the_trainer_reads_how_many_are_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    best = found(boxes(0.3)).best
    layer = Workload(tokens=64, num_experts=8, top_k=2, dim=16, hidden=32)
    place = FoundFor(model="m", cluster="c", nodes=2, devices_per_node=1, layer=layer)
    write_planned(best, path, place)
    assert read_step(path) == (1, 2, False)
    path.write_text(path.read_text().replace("in_flight = 2", "in_flight = 0"))
    with pytest.raises(InputError, match="micro_batches_in_flight=0: must be a whole number"):
        read_step(path)


def test_the_picture_has_who_computes_and_whose_messages_travel() -> None:
    cost_model, compiled = priced(2)
    layer = cost_model.model.layer
    passes = cost_model.simulator.passes(compiled.forward, compiled.backward, layer, compiled.grid)
    flight, _ = cost_model.flights(compiled, *passes)
    computing = sorted((turn.start, turn.end) for turn in flight.turns if turn.lane is Lane.COMPUTE)
    # one device: no two tasks compute at once
    assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(computing))
    assert {turn.micro_batch for turn in flight.turns} == {0, 1}
    rows = in_flight_gantt(flight).layout.yaxis.categoryarray
    assert {"micro-batch 1: computing", "micro-batch 2: messages"} <= set(rows)
