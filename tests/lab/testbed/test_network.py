"""The network of a bed: bytes cross the links that they should, by the links' own counters, never
by time."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from moesaic_testbed.bed import Bed
from moesaic_testbed.wiring import addressing, cables, changing, namespaces, queueing, shaping

SIZE = 1_000_000
OVERHEAD = 1.03
"""Headers of packets, acknowledgements of the other direction, and what ranks tell each other to
connect."""
CHATTER = 30_000
"""Bytes that connecting takes at most, where no data goes."""


def send(source, target):
    """Send SIZE bytes from one rank to another."""
    if dist.get_rank() == source:
        dist.send(torch.ones(SIZE, dtype=torch.uint8), target)
    elif dist.get_rank() == target:
        into = torch.zeros(SIZE, dtype=torch.uint8)
        dist.recv(into, source)
        return int(into.sum())
    return None


def device_settings():
    import subprocess

    words = (
        ["tc", "-d", "class", "show", "dev", "eth0"],
        ["tc", "class", "show", "dev", "lo"],
        ["ip", "-d", "link"],
    )
    shown = [subprocess.run(w, capture_output=True, text=True, check=True).stdout for w in words]
    with open("/proc/sys/net/ipv4/tcp_congestion_control", encoding="ascii") as file:
        return (*shown, file.read().strip())


def crossed(bed, source, target):
    """Return the bytes that each end of each link sent for one message."""
    before = bed.traffic()
    results = bed.run(send, source, target)
    assert results[target] == SIZE
    after = bed.traffic()
    assert sum(end.dropped for end in after.values()) == 0
    return {name: after[name].bytes - before[name].bytes for name in after}


def assert_crossed(moved, *names):
    """Check that the message went over these ends of links, and over no others."""
    for name, count in moved.items():
        if name in names:
            assert SIZE <= count < SIZE * OVERHEAD + CHATTER, name
        else:
            assert count < CHATTER, name


@pytest.mark.parametrize("intra", [None, "400mbit"])
def test_messages_between_nodes_cross_their_links_and_others_stay_inside(cluster, intra):
    bed = cluster(3, 2, intra=intra)
    assert set(bed.traffic()) == {
        f"node{node} {end}" for node in range(3) for end in ("up", "down", "inside")
    }
    assert_crossed(crossed(bed, 3, 4), "node1 up", "node2 down")
    assert_crossed(crossed(bed, 4, 0), "node2 up", "node0 down")
    assert_crossed(crossed(bed, 2, 3), "node1 inside")


def test_rates_and_charges_are_set_where_asked(cluster):
    found = cluster(2, 1, inter=("150mbit", "1.5gbit"), intra="300mbit", per_message=5000).run(
        device_settings
    )
    for (eth0, lo, links, control), rate in zip(found, ("150Mbit", "1500Mbit")):
        assert re.search(rf"rate {rate} .*ceil {rate} .*burst 20[2-4]\d\db.* mpu 5000b", eth0), eth0
        assert "rate 300Mbit ceil 300Mbit" in lo
        assert links.count("gso_max_size 16384") == 2
        assert links.count("mtu 9000") == 2
        assert control == "reno"


def test_a_bed_without_limit_inside_nodes_leaves_lo_alone(cluster):
    ((_, lo, links, _),) = cluster(1, 1).run(device_settings)
    assert lo == ""
    assert "mtu 65536" in links


def test_shaping_as_text():
    assert shaping("eth0", None) == []
    assert shaping("eth0", 25e6) == [
        "qdisc replace dev eth0 root handle 1: htb default 1",
        (
            "class replace dev eth0 parent 1: classid 1:1 htb rate 200000000bit burst 20kb cburst "
            "20kb quantum 16384"
        ),
        "qdisc replace dev eth0 parent 1:1 handle 2: bfifo limit 33554432",
    ]
    assert shaping("lo", 1.5, 5000)[1].endswith(
        "htb rate 12bit burst 20kb cburst 20kb quantum 16384 mpu 5000"
    )


def test_cables_as_data():
    bed = Bed(nodes=3, inter=("1mbit", "2mbit", "3mbit"), per_message=9)
    found = cables(bed)
    assert [(c.node, c.bytes_per_second, c.per_message) for c in found] == [
        (0, 125e3, 9),
        (1, 250e3, 9),
        (2, 375e3, 9),
    ]
    assert len({address for cable in found for _, _, address in cable.ends}) == 6
    assert namespaces(bed) == ["root", "node0", "node1", "node2"]


def rates_of(bed, name):
    """Return what each device of a namespace is limited to, with the charge per packet."""
    lines = [
        line.split(" parent 1: classid 1:1 htb rate ")
        for line in queueing(bed, name)
        if line.startswith("class")
    ]
    return {
        first.removeprefix("class replace dev "): second.replace(
            " burst 20kb cburst 20kb quantum 16384", ""
        )
        for first, second in lines
    }


def test_both_ends_of_every_link_have_its_rate():
    bed = Bed(nodes=3, inter=("1mbit", "2mbit", "3mbit"), intra="9mbit", per_message=7)
    assert {name: rates_of(bed, name) for name in namespaces(bed)} == {
        "root": {
            "node0": "1000000bit mpu 7",
            "node1": "2000000bit mpu 7",
            "node2": "3000000bit mpu 7",
        },
        "node0": {"eth0": "1000000bit mpu 7", "lo": "9000000bit"},
        "node1": {"eth0": "2000000bit mpu 7", "lo": "9000000bit"},
        "node2": {"eth0": "3000000bit mpu 7", "lo": "9000000bit"},
    }
    assert {name: rates_of(Bed(), name) for name in namespaces(Bed())} == {
        "root": {"node0": "200000000bit", "node1": "200000000bit"},
        "node0": {"eth0": "200000000bit"},
        "node1": {"eth0": "200000000bit"},
    }


def test_a_change_is_of_both_ends_and_keeps_the_charge():
    bed = Bed(inter=("1mbit", "2mbit"), per_message=7)
    assert {name: line.split(" htb ")[0] for name, line in changing(bed, 1, "5mbit").items()} == {
        "node1": "class replace dev eth0 parent 1: classid 1:1",
        "root": "class replace dev node1 parent 1: classid 1:1",
    }
    assert all(
        "rate 5000000bit" in line and "mpu 7" in line for line in changing(bed, 1, "5mbit").values()
    )
    assert all("rate 2000000bit" in line for line in changing(bed, 1, None).values())


def test_only_shaped_lo_gets_small_packets():
    assert addressing(Bed(), "node0")[0] == "link set dev lo up"
    assert (
        addressing(Bed(intra="1mbit"), "node0")[0]
        == "link set dev lo mtu 9000 gso_max_size 16384 gro_max_size 16384 up"
    )
    assert addressing(Bed(intra="1mbit"), "root")[0] == "link set dev lo up"
