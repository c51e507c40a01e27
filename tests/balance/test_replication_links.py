"""Tests of the cost of replication on a cluster: rates per pair, shared links, and weights that
each node gets once."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.balance.replication.cost import CallLoad, ReplicaLoad, replica_loads
from moesaic.balance.replication.tables import seconds_under
from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Device, Link, Tflops
from moesaic.planner.policy_rates import seen_by
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.passes.replicate import replicate
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications
from moesaic.program.sizes import CallSizes

DEVICE = Device(tflops=Tflops(bf16=50), memory_gib=80, memory_gigabytes_per_second=1000)


def cluster(nodes: int, per_node: int, *links: Link) -> ClusterSpec:
    return ClusterSpec(nodes=nodes, devices_per_node=per_node, device=DEVICE, links=links)


def board_of(
    costs: Rates, grid: Grid, copies: np.ndarray, units: int = 8, dim: int = 4
) -> ReplicaLoad:
    (replica,) = replica_loads(CallLoad(grid, copies, copies.shape[1], units, dim), costs)
    return replica


def costs_on(spec: ClusterSpec, grid: Grid) -> Rates:
    return seen_by(
        spec, grid, Workload(tokens=65536, num_experts=grid.ep, top_k=1, dim=4, hidden=8 * grid.etp)
    )


def test_ranks_that_share_a_link_between_nodes_share_its_rate() -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=2)
    inside = Link(name="nvlink", devices=1, gbps=(1e6,), carries="inside")
    own, shared = (
        Link(name="nic", devices=devices, gbps=(25,), carries="outside") for devices in (1, 2)
    )
    both = np.zeros((4, 4), dtype=np.int64)
    one = np.zeros((4, 4), dtype=np.int64)
    both[0, 2] = both[1, 3] = one[0, 2] = 1000
    seconds = {}
    for name, link in (("own", own), ("shared", shared)):
        costs = costs_on(cluster(2, 2, inside, link), grid)
        for which, copies in (("both", both), ("one", one)):
            replica = board_of(costs, grid, copies)
            compute = 1000 * replica.seconds_per_copy
            seconds[name, which] = seconds_under(replica, NOTHING) - compute
    bytes_of_rank = 4 * 1000 * 4 * 2
    assert seconds["own", "both"] == pytest.approx(bytes_of_rank * 8 / 25e9)
    assert seconds["shared", "both"] == pytest.approx(2 * seconds["own", "both"])
    assert seconds["shared", "one"] == pytest.approx(seconds["own", "one"]), (
        "a rank alone has the whole link"
    )


def test_a_slow_pair_is_told_from_a_fast_one() -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=1)
    uneven = cluster(4, 1, Link(name="nic", devices=1, gbps=(25, 25, 25, 1)))
    pairs = board_of(
        costs_on(uneven, grid), grid, np.ones((4, 4), dtype=np.int64)
    ).links.seconds_per_byte
    assert pairs[0, 1] == pytest.approx(8 / 25e9)
    assert pairs[0, 3] == pairs[3, 1] == pytest.approx(8 / 1e9)
    assert np.diag(pairs).tolist() == [0] * 4


GRIDS = [
    Grid(world=8, ep=8, ranks_per_node=4),
    Grid(world=8, ep=4, etp=2, ranks_per_node=4),
    Grid(world=8, ep=4, etp=2, innermost="ep", ranks_per_node=4),
    Grid(world=8, ep=4, etp=2, innermost="ep", ranks_per_node=2),
    Grid(world=4, ep=4),
    Grid(world=8, tp=2, ep=4, ranks_per_node=2),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_model_counts_the_weights_that_the_program_sends(grid: Grid) -> None:
    rng = np.random.default_rng(grid.world + grid.ep)
    num_experts = 2 * grid.ep
    copies = np.full((grid.world, num_experts), 9)
    for _ in range(5):
        load = CallLoad(grid, copies, num_experts, 6, 4)
        helped = rng.random((num_experts, grid.ep)) < rng.choice([0.1, 0.4])
        helped[np.arange(num_experts), load.home] = False
        replicated = np.zeros((*copies.shape, grid.ep), dtype=np.int64)
        replica = replica_loads(load, Rates())[0]
        replicated[replica.origins[0, 0]] = helped
        program = replicate(SCHEDULES["s1"](), 1, grid)
        slots = {slot.name: slot for slot in program.slots}
        sizes = CallSizes(
            grid, copies, copies.sum(1), replicated=Replications.of(replicated), units=6
        )
        places = np.zeros((grid.ep, grid.ep), dtype=np.int64)
        for task in program.tasks:
            if task.name in ("w_near", "w_here"):
                for source, target, rows in messages_of(task, slots, sizes):
                    if grid.coordinate(source, "etp") == 0:
                        places[grid.coordinate(source, "ep"), grid.coordinate(target, "ep")] += (
                            rows // 6
                        )
        assert (replica.sent(helped) == places).all()


def test_a_cluster_without_the_rate_of_the_dtype_is_refused() -> None:
    layer = Workload(tokens=8, num_experts=1, top_k=1, dim=4, hidden=8, dtype="fp32")
    with pytest.raises(
        InputError, match=r"tflops\.fp32 is not given: add it, or choose one of bf16"
    ):
        seen_by(cluster(1, 1), Grid(world=1), layer)
