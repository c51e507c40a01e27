"""Tests that the rates of replication policies come from the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import InputError
from moesaic.planner.policy_rates import seen_by, simulator_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid

CLUSTER = """
nodes = 2
devices_per_node = 2
links = [
  { name = "bus", devices = 1, gbps = [40], carries = "inside", latency_us = 5 },
  { name = "card", devices = 2, gbps = [10], carries = "outside", latency_us = 20, message_us = 3 },
]
host = { message_us = 2 }

[device]
tflops = { fp32 = 0.5 }
memory_gib = 8
memory_gigabytes_per_second = 5
gemm_rows = [1, 64]
gemm_share = [0.1, 1]
"""
GRID = Grid(world=4, ep=4, ranks_per_node=2)
LAYER = Workload(tokens=512, num_experts=8, top_k=2, dim=64, hidden=128, dtype="fp32")


def cluster(folder: Path, text: str = CLUSTER) -> Simulator:
    path = folder / "cluster.toml"
    path.write_text(text)
    return simulator_of(str(path), GRID.world, GRID.ranks_per_node or GRID.world)


def test_rates_are_those_that_a_rank_sees_while_all_send(tmp_path: Path) -> None:
    machine = seen_by(cluster(tmp_path).cluster, GRID, LAYER)
    assert machine.intra_gbps == pytest.approx(40)
    assert machine.inter_gbps == pytest.approx(5), "two ranks share a card"
    assert machine.intra_latency_us == pytest.approx(5 + 2)
    # Four messages of 3 us on the network card, two from each rank; the latency of the path is paid
    # once.
    assert machine.inter_latency_us == pytest.approx((4 * 3 + 20) / 2 + 2)
    assert machine.tflops == pytest.approx(0.5), "512 rows per expert: the whole rate"


def test_small_products_reach_what_the_cluster_says(tmp_path: Path) -> None:
    few = Workload(tokens=2, num_experts=8, top_k=1, dim=64, hidden=128, dtype="fp32")
    assert seen_by(cluster(tmp_path).cluster, GRID, few).tflops == pytest.approx(0.05)


def test_one_node_keeps_the_usual_rates_between_nodes(tmp_path: Path) -> None:
    text = CLUSTER.replace("nodes = 2", "nodes = 1", 1).replace(
        "devices_per_node = 2", "devices_per_node = 4"
    )
    text = text.replace("devices = 2,", "devices = 4,")
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    grid = Grid(world=4, ep=4)
    machine = seen_by(
        simulator_of(str(path), grid.world, grid.ranks_per_node or grid.world).cluster, grid, LAYER
    )
    assert machine.intra_gbps == pytest.approx(40)
    assert machine.inter_gbps == 25.0


def test_costs_have_the_sizes_of_the_layer_and_the_host_of_the_cluster(tmp_path: Path) -> None:
    costs = seen_by(cluster(tmp_path).cluster, GRID, LAYER)
    assert (costs.element_bytes, costs.matrices, costs.expert_us, costs.part_us) == (4, 3, 4, 0)
    assert (costs.intra_ranks, costs.inter_ranks) == (1, 2)
    slow = cluster(tmp_path, CLUSTER.replace("message_us = 2 }", "task_us = 1000 }")).cluster
    assert seen_by(slow, GRID, LAYER).part_us == 3000


def test_clusters_of_other_nodes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    with pytest.raises(
        InputError, match=r"planner\.cluster=.* has nodes of 2 devices, this run 4 ranks on a node"
    ):
        simulator_of(str(tmp_path / "cluster.toml"), 4, 4)
