"""Clusters: presets load, errors name the field, and links and routes match the tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers import refused
from moesaic.configfile import as_json, build
from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Link, Peer, Tflops, presets, read_cluster
from moesaic.planner.loads import simulate_counts, simulate_even
from moesaic.planner.simulator import Simulator
from moesaic.planner.topology import Topology
from moesaic.planner.workload import Workload, uniform_counts
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.emulated import emulated
from moesaic_testbed.bed import Bed
from planner.clusters import DEVICE, tree

PLAIN = {
    "nodes": 2,
    "devices_per_node": 4,
    "device": {"memory_gib": 16, "memory_gigabytes_per_second": 500, "tflops": {"bf16": 50}},
    "links": [
        {"name": "pcie", "devices": 1, "gbps": 100},
        {"name": "nic", "devices": 4, "gbps": 25, "carries": "outside"},
    ],
}


def changed(**fields: object) -> dict:
    return {**PLAIN, **fields}


@pytest.mark.parametrize("name", presets())
def test_presets_read_say_where_they_come_from_and_survive_a_round_trip(
    name: str, tmp_path: Path
) -> None:
    spec = read_cluster(name)
    assert spec.name == name
    assert len(spec.source) > 20
    assert len(spec.description) > 20
    path = tmp_path / "again.json"
    path.write_text(as_json(spec), encoding="utf-8")
    assert read_cluster(str(path)) == spec
    many = read_cluster(name, nodes=32)
    assert many.nodes == 32
    Topology(many, many.world, many.devices_per_node)


def test_the_papers_test_beds_and_common_machines_are_presets() -> None:
    assert {
        "parm-a",
        "parm-b",
        "schemoe",
        "tutel",
        "fastermoe-johnny",
        "fastermoe-trevor",
        "netmoe",
        "dgx-h100",
        "dgx-h200",
        "8x4090-pcie",
        "25gbe",
        "100gbe",
    } <= set(presets())
    johnny = read_cluster("fastermoe-johnny")
    trevor = read_cluster("fastermoe-trevor")
    assert [link.gbps for link in johnny.links] == [(88.0,), (180.0,), (50.0,)]
    assert (johnny.world, trevor.world) == (16, 64)
    assert {peer.gbps for peer in trevor.peers} == {171.0, 317.0, 88.0}


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (changed(nodse=3), "here: unknown field nodse: did you mean nodes?"),
        (
            changed(device={**PLAIN["device"], "memory_gb": 3}),
            "here: unknown field device.memory_gb: did you mean memory_gib?",
        ),
        (
            changed(links=[{"name": "a", "devices": 1, "gbs": 3}]),
            "here: unknown field links[0].gbs: did you mean gbps?",
        ),
        (
            changed(links=[{"name": "a", "devices": 1}]),
            "here: links[0].gbps is missing: add it, for example 2484 for NVLink of H100",
        ),
        (changed(links=[{"gbps": 1, "devices": 1}]), "here: links[0].name is missing"),
        (
            changed(device={"memory_gib": 1, "tflops": {"bf16": 1}}),
            (
                "device.memory_gigabytes_per_second is missing: add it, for example 2850 for "
                "H100, 850 for RTX 4090"
            ),
        ),
        (
            changed(links=[{"name": "a", "devices": 1, "gbps": -3}]),
            "cluster link 'a': gbps=-3.0: must be a finite",
        ),
        (
            changed(links=[{"name": "a", "devices": 3, "gbps": 3}]),
            (
                "cluster link 'a': devices=3 does not fit nodes of 4 devices: choose a divisor or "
                "a multiple"
            ),
        ),
        (
            changed(links=[{"name": "a", "devices": 1, "gbps": 3, "carries": "in"}]),
            "here: links[0].carries='in': choose one of all, inside, outside",
        ),
        (changed(nodes=0), "cluster.nodes=0: must be at least 1"),
        (changed(nodes="two"), "here: nodes must be a whole number, got 'two'"),
        (
            changed(device={"memory_gib": 1, "memory_gigabytes_per_second": 1, "tflops": {}}),
            "tflops is missing",
        ),
        (
            changed(device={**PLAIN["device"], "tflops": {"bf16": -1}}),
            "cluster.device.tflops.bf16=-1.0",
        ),
        (changed(device={**PLAIN["device"], "router_us": -1}), "cluster.device.router_us=-1.0"),
        (changed(devices_per_host=-1), "cluster.devices_per_host=-1"),
        (
            changed(device={**PLAIN["device"], "gemm_rows": [1, 2], "gemm_share": [1]}),
            "gemm_rows has 2 values and gemm_share 1: give one share for each",
        ),
        (
            changed(links=PLAIN["links"][:1] and [PLAIN["links"][1]]),
            "devices = 1 and gbps = 2484 for NVLink",
        ),
        (
            changed(links=[{**PLAIN["links"][0], "carries": "inside"}]),
            "between its 2 nodes: add one with devices = 4, ",
        ),
        (
            changed(peers=[{"devices": [0, 4], "gbps": 1}]),
            "cluster peers: devices=[0, 4]: a node has devices 0 to 3",
        ),
        (
            changed(host={"message_us": float("nan")}),
            "cluster.host.message_us=nan: must be a finite number",
        ),
        (
            changed(host={"layer_us": -1}),
            "cluster.host.layer_us=-1.0: must be a finite number of at least 0",
        ),
        (
            changed(
                device={**PLAIN["device"], "codecs": [{"name": "int9", "gigabytes_per_second": 1}]}
            ),
            "int9",
        ),
        (
            changed(
                device={
                    **PLAIN["device"],
                    "codecs": [{"name": "int8", "gigabytes_per_second": float("inf")}],
                }
            ),
            (
                "cluster.device.codecs, int8: gigabytes_per_second=inf: must be a finite number "
                "above 0"
            ),
        ),
        (
            changed(collectives=[{"what": "saa everywhere", "beta": -1}]),
            "saa everywhere: beta=-1.0: must be a finite",
        ),
        (
            changed(host={"messages": "in turn"}),
            "host.messages='in turn': choose one of together, in_turn, eager",
        ),
        (
            changed(links=[{"name": "a", "devices": 1, "gbps": [1, 2, 3]}]),
            "gbps has 3 values: give one",
        ),
    ],
)
def test_errors_name_the_wrong_field_in_one_line(table: dict, line: str) -> None:
    assert line in refused(build, ClusterSpec, table, source="here")


def test_unknown_clusters_and_files(tmp_path: Path) -> None:
    assert "did you mean dgx-h100" in refused(read_cluster, "dgx-h10")
    assert "no such file" in refused(lambda: read_cluster(str(tmp_path / "none.toml")))
    (tmp_path / "profile.json").write_text('{"format": 1, "versions": {}, "host": {"task": 1e-4}}')
    with pytest.raises(
        InputError,
        match=r"profile\.json is a profile of an earlier version: run moesaic profile again",
    ):
        read_cluster(str(tmp_path / "profile.json"))
    with pytest.raises(
        InputError, match=r"tflops\.fp8 is not given: add it, or choose one of bf16"
    ):
        Tflops(bf16=3.0).of("fp8")


def on_links(topology: Topology, source: int, target: int) -> dict[str, float]:
    load = topology.loads(np.array([source]), np.array([target]), np.array([1e9]), np.ones(1))
    return {topology.names[link]: float(seconds) for link, seconds in zip(load.links, load.seconds)}


def test_a_message_climbs_to_the_first_switch_above_both_ends() -> None:
    topology = Topology(tree(4, 2), 8, 2)
    assert on_links(topology, 0, 1) == pytest.approx(
        {"pcie out 0": 0.08 + 1e-6, "pcie in 1": 0.08 + 1e-6}
    )
    near = on_links(topology, 0, 2)
    far = on_links(topology, 0, 7)
    assert set(near) == {"pcie out 0", "pcie in 2", "nic out 0", "nic in 1"}
    assert set(far) == {
        "pcie out 0",
        "pcie in 7",
        "nic out 0",
        "nic in 3",
        "leaf out 0",
        "leaf in 1",
    }
    assert far["nic out 0"] == pytest.approx(8 / 50 + 5e-6)
    assert far["leaf out 0"] == pytest.approx(8 / 60)
    load = topology.loads(np.array([0]), np.array([7]), np.array([0.0]), np.ones(1))
    assert load.latency == pytest.approx(13e-6)


def test_ports_carry_what_leaves_and_bridges_replace_the_tree() -> None:
    spec = ClusterSpec(
        nodes=2,
        devices_per_node=2,
        device=DEVICE,
        links=(
            Link(name="nvlink", devices=1, gbps=(800.0,), carries="inside"),
            Link(name="port", devices=1, gbps=(8.0, 4.0), carries="outside"),
        ),
    )
    topology = Topology(spec, 4, 2)
    assert set(on_links(topology, 0, 1)) == {"nvlink out 0", "nvlink in 1"}
    assert on_links(topology, 1, 2) == pytest.approx({"port out 1": 2.0, "port in 2": 1.0})
    bridged = Topology(replace(spec, peers=(Peer(devices=(0, 1), gbps=80.0),)), 4, 2)
    assert on_links(bridged, 3, 2) == pytest.approx({"peer 1-0": 0.1})
    folded = Topology(spec, 4, 2, block=2)
    assert on_links(folded, 1, 2) == pytest.approx({"port out 1": 2.0, "port in 0": 1.0})


def test_ranks_may_leave_devices_idle_but_not_outnumber_them() -> None:
    spec = tree(4, 4, leaf=False)
    topology = Topology(spec, 4, 2)
    assert set(on_links(topology, 1, 2)) == {"pcie out 1", "pcie in 4", "nic out 0", "nic in 1"}
    assert "set ranks_per_node to at most 4" in refused(Topology, spec, 8, 8)
    assert "use at most 16 ranks, or a cluster of 5 nodes" in refused(Topology, spec, 20, 4)


def test_the_emulated_bed_has_its_fields_as_links() -> None:
    bed = emulated(Bed(nodes=4, inter=("200mbit", "200mbit", "100mbit", "50mbit"), intra="400mbit"))
    lo, eth = bed.links
    assert (lo.shared, lo.carries, lo.gbps) == (True, "inside", (0.4,))
    assert eth.gbps == (0.2, 0.2, 0.1, 0.05)
    topology = Topology(bed, 8, 2)
    assert on_links(topology, 0, 1) == pytest.approx({"lo 0": 20.0})
    assert on_links(topology, 0, 7) == pytest.approx({"eth out 0": 40.0, "eth in 3": 160.0})
    assert bed.host.runs_compute


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bed-2x2", {}),
        ("bed-2x2-shaped", {"intra": "400mbit"}),
        ("bed-4x2", {"nodes": 4}),
        ("bed-4x2-shaped", {"nodes": 4, "intra": "400mbit"}),
        ("bed-4x4", {"nodes": 4, "ranks_per_node": 4}),
        ("bed-4x4-messages", {"nodes": 4, "ranks_per_node": 4, "per_message": 5000}),
    ],
)
def test_preset_beds_are_what_their_fields_say(name: str, fields: dict) -> None:
    assert replace(emulated(Bed(**fields)), name=name) == read_cluster(name)


def test_a_charge_per_packet_costs_rate_and_messages() -> None:
    """Measured: 155 of 200 Mbit/s at 5,000 bytes; 48 messages of 1 KiB from each of 4 nodes in 45
    ms."""
    eth = emulated(Bed(nodes=4, ranks_per_node=4, per_message=5000)).links[1]
    assert eth.gbps[0] == pytest.approx(0.155, rel=0.02)
    assert 48 * eth.message_us == pytest.approx(45_000, rel=0.2)


def of_nodes(nodes: int, **link: float) -> Topology:
    """Return nodes of two devices, each with a port of 80 Gb/s and the given fields."""
    ports = (
        Link(name="nvlink", devices=1, carries="inside", gbps=(800,)),
        Link(name="port", devices=1, carries="outside", gbps=(80,), **link),
    )
    return Topology(
        ClusterSpec(nodes=nodes, devices_per_node=2, device=DEVICE, links=ports), 2 * nodes, 2
    )


def sent_to(topology: Topology, targets: list[int], num_bytes: float = 1e7) -> float:
    """Return the seconds in which rank 0 sends equally much to each of some ranks."""
    ones = np.ones(len(targets))
    return topology.loads(0 * ones.astype(int), np.array(targets), num_bytes * ones, ones).alone


def test_messages_take_longer_the_more_connections_their_device_holds_open() -> None:
    message_seconds = 1e7 / 1e10  # seconds, at 80 Gb/s
    for targets in ([2], [2, 3], [2, 3, 4, 5]):
        count = len(targets)
        assert sent_to(of_nodes(3), targets) == pytest.approx(count * message_seconds)
        assert sent_to(of_nodes(3, connection_us=5), targets) == pytest.approx(
            count * (message_seconds + count * 5e-6)
        )
    inside = sent_to(of_nodes(3, connection_us=5), [1])
    assert inside == sent_to(of_nodes(3), [1]), "NVLink has none"


def test_few_connections_do_not_fill_a_port() -> None:
    narrow = of_nodes(3, connection_gbps=32)
    for targets, gbps in (([2], 32), ([2, 3], 64), ([2, 3, 4], 80), ([2, 3, 4, 5], 80)):
        assert sent_to(narrow, targets) == pytest.approx(len(targets) * 8e7 / (gbps * 1e9))


def test_the_rate_of_a_fabric_falls_with_the_nodes_in_use() -> None:
    times = [sent_to(of_nodes(nodes, fabric=0.5), [2]) for nodes in (2, 8, 32)]
    assert times == pytest.approx([1e-3, 2e-3, 4e-3])
    wide = of_nodes(32, fabric=0.5)
    few = Topology(wide.spec, 4, 2)
    assert sent_to(few, [2]) == pytest.approx(1e-3), "two nodes are in use"


@pytest.mark.parametrize("gpus", [16, 32])
def test_one_rank_for_all_has_as_many_connections_as_each_by_itself(gpus: int) -> None:
    cluster = read_cluster("tutel", nodes=gpus // 8)
    layer = Workload(
        tokens=4096, num_experts=gpus, top_k=2, dim=1024, hidden=1024, matrices=2, dtype="fp16"
    )
    grid = Grid(world=gpus, ep=gpus, ranks_per_node=8)
    simulator = Simulator(cluster)
    for all_to_all in ("linear", "hier2d"):
        compiled_plan = compile_plan(Plan(all_to_all=all_to_all, order="fifo"), grid)
        even = simulate_even(simulator, compiled_plan, layer)
        by_each_rank = simulate_counts(simulator, compiled_plan, layer, uniform_counts(gpus, layer))
        assert [run.seconds for run in even] == pytest.approx(
            [run.seconds for run in by_each_rank], rel=2e-3
        )


def test_cards_of_a_preset_and_machines_of_them_have_names() -> None:
    four = read_cluster("4x4090-pcie")
    two_machines = read_cluster("2x4x4090-25gbe")
    assert (four.nodes, four.devices_per_node, four.device) == (
        1,
        4,
        read_cluster("8x4090-pcie").device,
    )
    assert (two_machines.nodes, two_machines.devices_per_node) == (2, 4)
    rates = {link.name: (link.devices, link.gbps) for link in two_machines.links}
    assert rates == {"pcie": (1, (200.0,)), "host memory": (4, (327.0,)), "nic": (4, (0.92 * 25,))}
    assert read_cluster("3x2x5090-10gbe").world == 6
    assert read_cluster("2x2x3090-10gbe", nodes=4).world == 8
    for unknown in ("4x4080-pcie", "3x4090-pcie", "4x4090-40gbe", "0x4x4090-25gbe"):
        assert "or give cards" in refused(read_cluster, unknown)
