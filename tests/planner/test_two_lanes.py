"""Overlap of messages inside nodes and between them: Pipe-A2A in ScheMoE's formulas and on the
emulated cluster."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moesaic.planner.cluster import Host
from moesaic.planner.simulator import Simulator
from moesaic.planner.topology import Topology
from moesaic.planner.workload import Workload
from moesaic_lab.comm.programs import all_ep, exchange
from moesaic_lab.emulated import emulated
from moesaic_testbed.bed import Bed
from planner.clusters import flat
from planner.schemoe_forms import in_turn_all_to_all, pipelined_all_to_all

COMM = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "comm.json"
RATES = [(80.0, 8.0), (8.0, 8.0), (4.0, 40.0)]
"""Gb/s inside nodes and between them."""


def seconds(
    algorithm: str, intra: float, inter: float, messages: str, nodes: int = 4, per_node: int = 4
) -> float:
    """Return the time of an even all-to-all of 16 rows of 1 KiB per pair of ranks."""
    grid = all_ep(nodes, per_node)
    work = exchange(grid, 16 * grid.world, algorithm)
    layer = Workload(
        tokens=16 * grid.world,
        num_experts=grid.world,
        top_k=1,
        dim=256,
        hidden=1,
        matrices=2,
        dtype="fp32",
    )
    spec = flat(nodes, per_node, intra=intra, inter=inter, host=Host(messages=messages))  # type: ignore[arg-type]
    return Simulator(spec).run(work.program, layer, grid, sizes=work.sizes).seconds


@pytest.mark.parametrize(("intra", "inter"), RATES)
def test_in_turn_one_lane_sends_one_message_at_a_time_and_two_lanes_one_each(
    intra: float, inter: float
) -> None:
    """ScheMoE, eq. 16 and 17, as times of whole programs. The formulas count the copy to the rank
    itself as a message inside."""
    t1, t2 = (16 * 1024 * 8 / (rate * 1e9) for rate in (intra, inter))
    linear, pipelined = (seconds(name, intra, inter, "in_turn") for name in ("linear", "pipelined"))
    assert linear == pytest.approx(in_turn_all_to_all(16, 4, t1, t2) - t1, rel=1e-6)
    assert pipelined == pytest.approx(max(3 * t1, 12 * t2), rel=1e-6)
    assert pipelined_all_to_all(16, 4, t1, t2) == pytest.approx(max(4 * t1, 12 * t2)), (
        "eq. 16 itself"
    )


@pytest.mark.parametrize(("intra", "inter"), RATES)
def test_messages_that_run_together_gain_nothing_by_two_lanes(intra: float, inter: float) -> None:
    linear, pipelined = (
        seconds(name, intra, inter, "together") for name in ("linear", "pipelined")
    )
    assert linear == pytest.approx(pipelined, rel=1e-6)


def test_ports_are_told_apart_by_whether_a_movement_leaves_nodes() -> None:
    topology = Topology(flat(2, 2, intra=8.0, inter=8.0, host=Host(messages="in_turn")), 4, 2)
    one = np.ones(1)
    size = np.array([1e9])

    def ports(source: int, *targets: int) -> dict[str, float]:
        count = len(targets)
        load = topology.loads(
            np.full(count, source), np.array(targets), np.repeat(size, count), np.repeat(one, count)
        )
        named = {
            topology.names[link]: spent
            for link, spent in zip(load.links.tolist(), load.seconds.tolist())
        }
        return {name: spent for name, spent in named.items() if "sends" in name}

    assert ports(0, 1) == pytest.approx({"sends of rank 0 inside its node": 1.0})
    assert ports(0, 2) == pytest.approx({"sends of rank 0": 1.0})
    assert ports(3, 2) == pytest.approx({"sends of rank 3 inside its node": 1.0})
    assert ports(0, 1, 2, 3) == pytest.approx({"sends of rank 0": 3.0}), (
        "one movement, one message after the other"
    )


def test_the_emulated_cluster_ran_both_lanes_at_once_as_simulated() -> None:
    """Recorded times of the test bed: both lanes together take as long as the longer one alone."""
    rows = [
        row
        for row in json.loads(COMM.read_text(encoding="utf-8"))["rows"]
        if row["what"] == "lanes"
    ]
    spec = emulated(Bed(intra="100mbit"), host=Host(runs_compute=True))
    grid = all_ep(2, 2)
    assert len(rows) == 6
    for row in rows:
        count = row["size_bytes"] // 1024
        which = {"pipelined": "all", "intra alone": "inside", "inter alone": "across"}[
            row["method"]
        ]
        work = exchange(grid, count, "pipelined", which)
        layer = Workload(
            tokens=count, num_experts=4, top_k=1, dim=256, hidden=1, matrices=2, dtype="fp32"
        )
        simulated = Simulator(spec).run(work.program, layer, grid, sizes=work.sizes).seconds
        assert simulated == pytest.approx(row["median_seconds"], rel=0.06), row["method"]
