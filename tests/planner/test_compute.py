"""Seconds of experts by their rows and of copies by their bytes, and the memory of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.cluster import Tflops
from moesaic.planner.compute import compute_seconds, rates_of, router_seconds, sort_seconds
from moesaic.planner.rank_memory import (
    GIB,
    Memory,
    about_fragments,
    layer_memory,
    usable_bytes,
    what_is_missing,
)
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.life import life_of
from moesaic.program.plan import Plan
from moesaic.program.task import Op
from planner.clusters import DEVICE, tree
from planner.durations import durations

WORKLOAD = Workload(tokens=1024, num_experts=8, top_k=2, dim=256, hidden=512)
GRID = Grid(world=4, ep=4)
SPEC = tree(1, 4)


def test_the_rate_of_a_product_is_interpolated_over_the_logarithm_of_rows() -> None:
    """The curve reaches 1 % of 100 TFLOP/s at 1 row, half at 100, all at 1000."""
    rates = rates_of(SPEC, "bf16")
    rows = np.array([0.0, 0.5, 1.0, 10.0, 100.0, 1000.0, 4000.0])
    seconds = rates.product_seconds(rows, flops_per_row=1e9, weight_bytes=0.0)
    one = 1e9 / 1e12
    assert seconds.tolist() == pytest.approx(
        [0.0, one, one, 10 * 1e9 / (100e12 * 0.255), 100e9 / 50e12, 1e12 / 100e12, 4e12 / 100e12]
    )


def test_no_product_is_faster_than_reading_its_weights() -> None:
    seconds = rates_of(SPEC, "bf16").product_seconds(np.array([1.0, 1000.0]), 1.0, weight_bytes=1e9)
    assert seconds.tolist() == pytest.approx([1e-3, 1e-3])


def test_grouped_products_have_a_rate_of_their_own() -> None:
    grouped = replace(SPEC, device=replace(SPEC.device, grouped_tflops=Tflops(bf16=80.0)))
    rows = np.array([1000.0])
    seconds = [
        rates_of(grouped, "bf16").product_seconds(rows, 1e9, 0.0, grouped=each)[0]
        for each in (False, True)
    ]
    assert seconds == pytest.approx([1e12 / 100e12, 1e12 / 80e12])
    assert rates_of(grouped, "fp32").grouped_flops == rates_of(grouped, "fp32").flops == 50e12, (
        "no other rate is given"
    )
    twice = grouped.device.with_products(2.0)
    assert (twice.flops("bf16"), twice.flops("bf16", grouped=True)) == (200e12, 160e12)
    narrow = grouped.device.with_products(3.0, ("fp32",))
    assert (narrow.flops("fp32"), narrow.flops("bf16", grouped=True)) == (150e12, 80e12)


def test_a_router_and_the_sort_by_hand() -> None:
    device = replace(
        SPEC.device,
        router_us=100.0,
        sort_us_per_1000_copies=0.5,
        memory_gigabytes_per_second=1000.0,
    )
    spec = replace(SPEC, device=device)
    assert sort_seconds(spec, 4096.0) == pytest.approx(4.096 * 0.5e-6)
    work = 2 * 1024 * 256 * 8 / 50e12 + 1024 * 256 * (2 + 4) / 1e12
    assert router_seconds(spec, 1024, 256, 8, 2) == pytest.approx((100e-6 + work, 50e-6 + 2 * work))


def test_one_rank_copies_nothing_before_and_behind_its_experts() -> None:
    """Its kernels read tokens in place; only the sum over a token's experts reads and writes
    rows."""
    spec = tree(1, 1)
    grid = Grid(world=1)
    compiled = compile_plan(Plan(), grid)
    moved = {Op.MOVE, Op.PERMUTE}
    for program in (compiled.forward, compiled.backward):
        seconds = durations(Simulator(spec), program, WORKLOAD, grid)
        assert {seconds[task.name] for task in program.tasks if task.op in moved} == {0.0}
        added = next(task for task in program.tasks if task.op is Op.COMBINE)
        values = (WORKLOAD.copies + WORKLOAD.tokens) * WORKLOAD.dim
        assert seconds[added.name] == pytest.approx(
            2 * values / spec.device.memory_gigabytes_per_second / 1e9, rel=0.01
        )
    assert seconds_of(Op.PERMUTE)[0] > 0, "the programs of several ranks copy"


def seconds_of(op: Op, counts: np.ndarray | None = None, **plan: object) -> np.ndarray:
    compiled = compile_plan(Plan(**plan), GRID)  # type: ignore[arg-type]
    program = compiled.backward if op is Op.EXPERT_GRAD else compiled.forward
    sizes = None if counts is None else sizes_of(program, WORKLOAD, GRID, counts)
    volumes = Simulator(SPEC).volumes(program, WORKLOAD, GRID, sizes=sizes)
    slots = {slot.name: slot for slot in program.slots}
    task = next(task for task in program.tasks if task.op is op)
    return compute_seconds(task, slots, volumes, rates_of(SPEC, "bf16"))


def test_experts_take_their_operations_and_backward_twice() -> None:
    rows = 1024.0
    per_row = 2 * 256 * 512 * 3
    expected = 2 * rows * per_row / 100e12
    assert seconds_of(Op.EXPERT)[0] == pytest.approx(expected)
    assert seconds_of(Op.EXPERT_GRAD)[0] == pytest.approx(2 * expected)


def test_copies_and_codecs_move_bytes() -> None:
    row = 256 * 2
    assert seconds_of(Op.PERMUTE)[0] == pytest.approx(2 * 2048 * row / 1e12)
    assert seconds_of(Op.COMBINE)[0] == pytest.approx(((2048 + 1024) * row + 2048 * 4) / 1e12), (
        "its index too"
    )
    assert seconds_of(Op.PACK, codec="int8")[0] == pytest.approx(2048 * (row + 256 + 4) / 1e12)


def test_memory_of_a_layer_is_what_backward_reads_and_what_is_alive() -> None:
    compiled = compile_plan(Plan(), GRID)
    volumes = Simulator(SPEC).volumes(compiled.forward, WORKLOAD, GRID)
    kept, buffers = layer_memory(compiled.forward, compiled.backward, volumes)
    rows = 2048
    assert kept == pytest.approx(rows * (256 * 2 + 4) + rows * 16 + rows * 512 * 2 * 2), (
        "h, g, two int64 indices, two inner ones"
    )
    assert buffers >= 2 * rows * 256 * 2
    gathered = compile_plan(Plan(schedule="s2", gather_weights=0), Grid(world=4, ep=2, etp=2))
    volumes = Simulator(SPEC).volumes(gathered.forward, WORKLOAD, gathered.grid)
    weights = 8 * 512 * 3 * 256 * 2
    assert layer_memory(gathered.forward, gathered.backward, volumes)[1] >= weights, (
        "all experts come to every rank"
    )


def test_slots_live_until_they_are_read_for_the_last_time() -> None:
    program = compile_plan(Plan(), GRID).forward
    life = life_of(program, frozenset({"y", "h"}))
    dies = {name: place for place, step in enumerate(life.steps) for name in step.dies}
    assert "y" not in dies
    assert "h" not in dies
    for name, place in dies.items():
        readers = [k for k, step in enumerate(life.steps) if name in (*step.reads, *step.born)]
        assert place == max(readers)
    born = {name: place for place, step in enumerate(life.steps) for name in step.born}
    for place, step in enumerate(life.steps):
        assert all(life.steps[sender].sends and sender < place for sender in step.lands)
        assert all(born.get(name, -1) < place for name in step.reads)


@pytest.mark.parametrize("all_to_all", ["linear", "hier2d", "multicast"])
def test_one_rank_for_all_needs_what_the_ranks_need(all_to_all: str) -> None:
    layer = replace(WORKLOAD, num_experts=16, tokens=4096)
    grid = Grid(world=8, ep=8, ranks_per_node=4)
    compiled = compile_plan(Plan(all_to_all=all_to_all, chunks=2), grid)  # type: ignore[arg-type]
    simulator = Simulator(tree(2, 4))
    sizes = sizes_of(compiled.forward, layer, grid)
    one, each = (
        layer_memory(
            compiled.forward,
            compiled.backward,
            simulator.volumes(compiled.forward, layer, grid, sizes=of_call),
        )
        for of_call in (None, sizes)
    )
    assert one == pytest.approx(each, rel=0.01)


def test_memory_does_not_depend_on_the_order_of_hashes() -> None:
    """Every rank hashes names with a seed of its own, and sums of fractional bytes depend on their
    order."""
    code = (
        "from moesaic.planner.cluster import read_cluster\nfrom moesaic.planner.rank_memory import "
        "layer_memory\nfrom moesaic.planner.simulator import Simulator\nfrom "
        "moesaic.planner.workload import Workload\nfrom moesaic.program.compile import "
        "compile_plan; from moesaic.program.plan import Plan\nfrom moesaic.program.grid import "
        "Grid\nlayer = Workload(tokens=1024, num_experts=32, top_k=4, dim=512, hidden=256, "
        "groups=4, top_groups=2)\ncompiled = compile_plan(Plan(all_to_all='multicast', "
        "chunks=2), Grid(world=16, ep=16, ranks_per_node=8))\nvolumes = "
        "Simulator(read_cluster('dgx-h100')).volumes(compiled.forward, layer, "
        "compiled.grid)\nprint(layer_memory(compiled.forward, compiled.backward, volumes))\n"
    )
    outputs = set()
    for seed in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_a_device_holds_less_than_its_memory_by_a_reserve_and_fragments() -> None:
    assert usable_bytes(tree(1, 4, device=replace(DEVICE, memory_gib=45.1)), 1.0) == pytest.approx(
        42 * GIB
    )


def test_fragments_are_told_apart_from_what_tensors_need() -> None:
    spec = replace(SPEC, device=replace(SPEC.device, memory_gib=100.0))

    def of(gib: float) -> Memory:
        return Memory(weights=gib * GIB, gradients=0.0, optimizer=0.0, activations=0.0, buffers=0.0)

    assert (
        about_fragments(of(80.0), spec)
        == "fragments: 5% in addition, 4.0 GiB: 84.0 of 100 GiB with them"
    )
    assert what_is_missing(of(95.0), spec) == ""
    assert (
        what_is_missing(of(98.0), spec)
        == ", which leaves less than 5% of a device of 100 for fragments"
    )
    assert what_is_missing(of(101.0), spec) == ", which a device of 100 does not have"
