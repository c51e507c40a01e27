"""Features of links and devices in presets of measured machines: shares by size and by users,
traffic, contention."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Link, presets, read_cluster
from moesaic.planner.compute import rates_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.topology import Topology
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from planner.clusters import DEVICE, flat


def bus(**fields: Any) -> ClusterSpec:
    link = Link(name="bus", devices=1, gbps=(8.0,), **fields)
    return ClusterSpec(nodes=1, devices_per_node=4, device=DEVICE, links=(link,))


def seconds(cluster: ClusterSpec, num_bytes: float, pairs: list[tuple[int, int]]) -> float:
    source, target = (np.array(each) for each in zip(*pairs))
    count = len(pairs)
    return (
        Topology(cluster, 4, 4)
        .loads(source, target, np.full(count, num_bytes), np.ones(count))
        .alone
    )


def test_a_link_reaches_a_share_of_its_rate_by_the_bytes_of_a_movement_on_it() -> None:
    cluster = bus(sizes=(1e6, 1e8), size_share=(0.5, 1.0))
    assert seconds(cluster, 1e6, [(0, 1)]) == pytest.approx(2e-3)
    assert seconds(cluster, 1e8, [(0, 1)]) == pytest.approx(0.1)
    assert seconds(cluster, 1e7, [(0, 1)]) == pytest.approx(1e-2 / 0.75)
    # Two messages of a movement are added up.
    assert seconds(cluster, 5e7, [(0, 1), (0, 2)]) == pytest.approx(0.1)
    assert seconds(cluster, 1e3, [(0, 1)]) == pytest.approx(2e-6)


def test_a_shared_medium_gives_less_to_more_users() -> None:
    cluster = bus(users=(2, 4), users_share=(1.0, 0.4))
    shared = replace(cluster, links=(replace(cluster.links[0], devices=4, shared=True),))
    assert seconds(shared, 1e6, [(0, 1), (1, 0)]) == pytest.approx(2e-3)
    assert seconds(shared, 1e6, [(0, 1), (2, 3)]) == pytest.approx(2e-3 / 0.4)
    assert seconds(shared, 1e6, [(0, 1), (1, 2)]) == pytest.approx(2e-3 / 0.7)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"sizes": (1.0, 2.0), "size_share": (1.0,)},
            "sizes has 2 values and size_share 1: give one share for each",
        ),
        (
            {"sizes": (2.0, 1.0), "size_share": (1.0, 1.0)},
            "sizes=[2.0, 1.0]: must be finite, above 0 and ascending",
        ),
        (
            {"sizes": (math.nan, 2.0), "size_share": (1.0, 1.0)},
            "sizes=[nan, 2.0]: must be finite, above 0 and ascending",
        ),
        (
            {"users": (2.0,), "users_share": (0.0,)},
            "users_share=0.0: must be a finite number above 0",
        ),
    ],
)
def test_an_invalid_curve_is_refused_in_one_line(fields: dict[str, Any], words: str) -> None:
    assert words in refused(bus, **fields)


def test_activations_take_their_traffic_between_products() -> None:
    cluster = flat(1, 4, device=replace(DEVICE, activation_traffic=0.5))
    rates = rates_of(cluster, "fp32")
    seconds = rates.traffic_seconds(np.array([10.0, 0.0]), 8, 32, 3, 4)
    assert seconds == pytest.approx(
        np.array([0.5 * 10 * (2 * 8 + 2 * 3 * 32) * 4 / rates.memory, 0.0])
    )


GRID = Grid(world=8, ep=8, ranks_per_node=4)
LAYER = Workload(tokens=4096, num_experts=8, top_k=2, dim=1024, hidden=2048, dtype="fp32")


def runs(contention: float, chunks: int) -> Any:
    device = replace(DEVICE, contention=contention)
    cluster = flat(2, 4, intra=400, inter=100, device=device)
    compiled = compile_plan(Plan(chunks=chunks, order="early"), GRID)
    return Simulator(cluster).run(compiled.forward, LAYER, compiled.grid)


def test_contention_costs_a_part_of_the_time_in_which_messages_and_computing_run_at_once() -> None:
    plain = runs(0.0, 4)
    slowed = runs(0.5, 4)
    spans = plain.timeline.spans
    edges = sorted({each for span in spans for each in (span.start, span.end)})
    both = 0.0
    for start, end in itertools.pairwise(edges):
        lanes = {
            span.lane.value
            for span in spans
            if span.start < (start + end) / 2 < span.end and span.end > span.start
        }
        both += (end - start) * ("compute" in lanes and len(lanes - {"compute", "host"}) > 0)
    assert both > 0.05 * plain.seconds
    assert slowed.seconds == pytest.approx(plain.seconds + 0.5 * both, rel=1e-6)
    assert slowed.timeline.makespan == pytest.approx(slowed.seconds)


def test_contention_costs_nothing_where_nothing_overlaps() -> None:
    assert runs(0.5, 1).seconds == pytest.approx(runs(0.0, 1).seconds, rel=0.02)


def test_presets_say_which_numbers_were_measured() -> None:
    assert {name for name in presets() if read_cluster(name).measured} == {
        "dgx-b200",
        "dgx-h100",
        "dgx-h200",
        "8xl40s-pcie",
        "8x4090-pcie",
    }


def test_a_cluster_of_some_devices_is_whole_nodes_or_a_part_of_one() -> None:
    spec = read_cluster("dgx-h100")
    assert [(each.nodes, each.devices_per_node) for each in map(spec.of_devices, (64, 8, 4))] == [
        (8, 8),
        (1, 8),
        (1, 4),
    ]
    assert "12 devices are not whole nodes of dgx-h100, which have 8: try 8" in refused(
        spec.of_devices, 12
    )


def test_a_job_uses_whole_hosts_of_equal_parts_of_large_switches() -> None:
    spec = read_cluster("gb200-nvl72")
    sizes = {count: (1, count) for count in (4, 64, 72)} | {144: (2, 72), 256: (4, 64), 96: (2, 48)}
    for count, (nodes, per_node) in sizes.items():
        part = spec.of_devices(count)
        assert (part.nodes, part.devices_per_node, part.world) == (nodes, per_node, count)
    for count in (73, 76, 100):
        with pytest.raises(
            InputError,
            match=f"{count} devices are not whole nodes of gb200-nvl72, which have 72: try 72",
        ):
            spec.of_devices(count)


def test_products_of_blackwell_are_faster_than_whole_published_steps() -> None:
    """Model TFLOP/s per device in bf16 and mxfp8 (Megatron-Bridge's performance summary, 25.11 and
    26.08)."""
    for name, steps in (("gb200-nvl72", (782, 1276)), ("gb300-nvl72", (961, 1635))):
        device = read_cluster(name).device
        for dtype, step in zip(("bf16", "mxfp8"), steps):
            assert (
                device.flops(dtype) / 1e12 > device.flops(dtype, grouped=True) / 1e12 > 1.2 * step
            )
            assert device.flops(dtype) / 1e12 < device.peak_tflops * (2 if dtype == "mxfp8" else 1)


@pytest.mark.parametrize(
    "name", [name for name in presets() if read_cluster(name).devices_per_node > 2]
)
def test_a_part_of_a_node_is_any_number_of_devices_that_its_links_hold(name: str) -> None:
    """Fewer devices are behind a node-wide link, and bridges to missing devices are dropped."""
    spec = read_cluster(name)
    for count in (1, 2, 3):
        part = spec.of_devices(count)
        assert (part.nodes, part.devices_per_node) == (1, count)
        assert [(link.name, link.gbps[0]) for link in part.links] == [
            (link.name, link.gbps[0]) for link in spec.links
        ]
        assert all(max(peer.devices) < count for peer in part.peers)
    assert spec.of_devices(spec.devices_per_node).links == spec.links


def test_links_inside_and_between_nodes_are_scaled_separately() -> None:
    spec = read_cluster("dgx-h100")
    rates = {
        kind: [link.gbps[0] for link in spec.with_links(kind, 2.0).links]
        for kind in ("inside", "outside")
    }
    nvlink, nic = (link.gbps[0] for link in spec.links)
    assert rates == {"inside": [2 * nvlink, nic], "outside": [nvlink, 2 * nic]}


def test_links_of_one_node_can_be_scaled_alone() -> None:
    spec = read_cluster("100gbe", nodes=3)
    pcie, ethernet, leaf = (link.gbps[0] for link in spec.links)
    slow = spec.with_links("outside", (1.0, 0.5, 1.0))
    assert [link.gbps for link in slow.links] == [
        tuple(pcie * (0.5 if device // 4 == 1 else 1) for device in range(12)),
        (ethernet, ethernet / 2, ethernet),
        (leaf,),
    ], "a link of every message counts; a switch of several nodes is as fast as the fastest of them"
    assert spec.with_links("outside", (0.5, 0.5, 0.5)) == spec.with_links("outside", 0.5)
    with pytest.raises(
        InputError, match="2 links' times for 3 nodes of 100gbe: give one, or one per node"
    ):
        spec.with_links("outside", (1.0, 0.5))
