"""Tests of task durations on a machine with only latencies and rates, against hand-computed sums;
rates are powers of ten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers import refused
from moesaic.planner.cluster import ClusterSpec, Device, Link, Tflops
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.rates import Rates
from moesaic.program.sizes import CallSizes
from planner.durations import durations

MACHINE = Rates(
    intra_gbps=8,
    inter_gbps=0.8,
    intra_latency_us=1,
    inter_latency_us=10,
    tflops=1e-6,
    memory_gbps=80,
)
"""1 ns per byte inside a node, 10 ns between nodes; a million operations per second; copies of 10
bytes per ns."""
LAYER = Workload(tokens=2, num_experts=4, top_k=2, dim=10, hidden=6)
ROW = 20
"""Bytes of a row."""


def cluster_of(machine: Rates, grid: Grid) -> ClusterSpec:
    """Return a cluster with these rates, in which each rank has a port inside its node and one
    between nodes."""
    per_node = grid.ranks_per_node or grid.world
    inside = Link(
        name="inside",
        devices=1,
        gbps=(machine.intra_gbps,),
        message_us=machine.intra_latency_us,
        carries="inside",
    )
    outside = Link(
        name="outside",
        devices=1,
        gbps=(machine.inter_gbps,),
        message_us=machine.inter_latency_us,
        carries="outside",
    )
    return ClusterSpec(
        name="nominal",
        nodes=grid.world // per_node,
        devices_per_node=per_node,
        device=Device(
            tflops=Tflops(bf16=machine.tflops),
            memory_gib=80.0,
            memory_gigabytes_per_second=machine.memory_gbps / 8,
            gemm_rows=(1,),
            gemm_share=(1.0,),
        ),
        links=(inside, outside),
    )


def seconds_of(
    plan: Plan,
    grid: Grid,
    copies: list[list[int]],
    backward: bool = False,
    machine: Rates = MACHINE,
) -> dict[str, float]:
    compiled = compile_plan(plan, grid)
    tokens = np.array([2] * grid.world)
    sizes = CallSizes(
        compiled.grid, np.array(copies), tokens, plan.chunks, units=LAYER.hidden // grid.etp
    )
    program = compiled.backward if backward else compiled.forward
    simulator = Simulator(cluster_of(machine, grid))
    return durations(simulator, program, LAYER, compiled.grid, sizes=sizes)


def moving(plan: Plan, grid: Grid, copies: list[list[int]]) -> dict[str, float]:
    """Return durations on a machine on which copies before and after a movement take no time."""
    return seconds_of(plan, grid, copies, machine=replace(MACHINE, memory_gbps=1e12))


NODES = Grid(world=4, ep=4, ranks_per_node=2)
COUNTS = [[1, 2, 3, 0], [0, 0, 0, 0], [0, 5, 0, 0], [0, 0, 0, 4]]
"""Rank 0 sends 2 rows to rank 1 and 3 to rank 2; rank 2 sends 5 to rank 1; rank 3 keeps its own."""


def test_a_movement_takes_what_its_fullest_port_sends_or_receives() -> None:
    """Between nodes rank 2 sends five rows to rank 1 and gets three from rank 0; two rows inside a
    node finish earlier."""
    seconds = moving(Plan(), NODES, COUNTS)
    assert seconds["h"] == pytest.approx(10e-6 + 5 * ROW * 10e-9)
    assert seconds["z"] == seconds["h"], "the way back: rank 1 is now the busiest sender"
    assert seconds["g"] == pytest.approx(10e-6 + 5 * 4 * 10e-9)


def test_experts_take_the_operations_of_the_busiest_rank() -> None:
    """Rank 1 has 7 rows of 2 operations, 10 columns, 6 units and 3 matrices each; the gradients
    take twice that."""
    assert seconds_of(Plan(), NODES, COUNTS)["out"] == pytest.approx(7 * 2 * 10 * 6 * 3 / 1e6)
    assert seconds_of(Plan(), NODES, COUNTS, backward=True)["out'"] == pytest.approx(
        2 * 7 * 2 * 10 * 6 * 3 / 1e6
    )


def test_copying_takes_bytes_read_and_written() -> None:
    seconds = seconds_of(Plan(), NODES, COUNTS)
    assert seconds["rows"] == pytest.approx(2 * 6 * ROW * 8 / 80e9), (
        "six rows of rank 0, read and written"
    )


def test_a_codec_shortens_what_crosses_and_costs_encoding() -> None:
    grid = Grid(world=2, ep=2, ranks_per_node=1)
    plain = moving(Plan(), grid, [[0, 4], [4, 0]])
    coded = moving(Plan(codec="int8"), grid, [[0, 4], [4, 0]])
    assert plain["h"] == pytest.approx(10e-6 + 4 * 20 * 10e-9)
    assert coded["h@0"] == pytest.approx(10e-6 + 4 * (10 + 4) * 10e-9), (
        "a byte an element, a float32 scale a row"
    )
    assert coded["h@pack"] > 0
    assert coded["g"] == plain["g"], "routing weights are not encoded"


def test_chunks_share_the_bytes_and_repeat_the_latency() -> None:
    grid = Grid(world=2, ep=2, ranks_per_node=1)
    whole = moving(Plan(), grid, [[0, 4], [4, 0]])["h"]
    parts = moving(Plan(chunks=2), grid, [[0, 4], [4, 0]])
    assert parts["h.0"] + parts["h.1"] == pytest.approx(whole + 10e-6)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"inter_gbps": 0}, "rates.inter_gbps=0: must be a finite number above 0"),
        ({"tflops": float("nan")}, "rates.tflops=nan: must be a finite number above 0"),
        (
            {"intra_latency_us": -1},
            "rates.intra_latency_us=-1: must be a finite number of at least 0",
        ),
        (
            {"inter_latency_us": float("nan")},
            "rates.inter_latency_us=nan: must be a finite number of at least 0",
        ),
    ],
)
def test_impossible_machines_are_refused(fields: dict, line: str) -> None:
    assert refused(Rates, **fields) == line
