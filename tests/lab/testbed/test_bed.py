"""Beds as data: what they derive, and that nonsense is refused in one line."""

from __future__ import annotations

import math

import pytest

from moesaic.errors import InputError
from moesaic_testbed.bed import Bed, Change, bytes_per_second


def test_what_a_bed_derives():
    bed = Bed(nodes=3, ranks_per_node=2, inter=("200mbit", "1gbit", "500kbit"), intra="2.5gbit")
    assert bed.world == 6
    assert [bed.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [bed.inter_bytes_per_second(node) for node in range(3)] == [25e6, 125e6, 62500]
    assert bed.intra_bytes_per_second == 312.5e6


def test_a_plain_bed_limits_only_links_between_nodes():
    bed = Bed()
    assert (bed.nodes, bed.ranks_per_node, bed.world) == (2, 2, 4)
    assert (bed.inter_bytes_per_second(1), bed.intra_bytes_per_second) == (25e6, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200mbit", 25e6),
        ("200 Mbit", 25e6),
        (" 1.5gbit", 187.5e6),
        ("100kbit", 12500),
        ("100gbit", 12.5e9),
    ],
)
def test_rates(text, expected):
    assert bytes_per_second(text, "inter") == expected


@pytest.mark.parametrize(
    "text",
    [
        "200mbps",
        "200",
        "mbit",
        "-1mbit",
        "1e3mbit",
        "200mbit/s",
        "",
        200,
        None,
        "99kbit",
        "101gbit",
        "0mbit",
    ],
)
def test_nonsense_rates_name_themselves(text):
    with pytest.raises(InputError, match="inter=") as error:
        bytes_per_second(text, "inter")
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 0}, "nodes=0: must be at least 1"),
        ({"ranks_per_node": -1}, "ranks_per_node=-1: must be at least 1"),
        ({"nodes": 251}, "nodes=251 x ranks_per_node=2: at most 250 nodes and 1024 ranks"),
        (
            {"nodes": 100, "ranks_per_node": 11},
            "nodes=100 x ranks_per_node=11: at most 250 nodes and 1024 ranks",
        ),
        ({"inter": ("1gbit",)}, "inter has 1 rates for 2 nodes: write one rate, or one per node"),
        (
            {"inter": ("1gbit", "fast")},
            "inter='fast' is no rate: write a number with kbit, mbit or gbit, as in 200mbit",
        ),
        (
            {"intra": "1"},
            "intra='1' is no rate: write a number with kbit, mbit or gbit, as in 200mbit",
        ),
        ({"per_message": -1}, "per_message=-1: write bytes from 0 to 65535"),
        ({"per_message": 65536}, "per_message=65536: write bytes from 0 to 65535"),
        (
            {"changes": (Change(at_seconds=1, node=2, rate="1mbit"),)},
            "change.node=2: nodes are 0 to 1",
        ),
    ],
)
def test_beds_that_make_no_sense(fields, message):
    with pytest.raises(InputError) as error:
        Bed(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_changes_that_make_no_sense(seconds):
    with pytest.raises(InputError, match="write seconds from the start, 0 or more"):
        Change(at_seconds=seconds, node=0, rate="1mbit")
    with pytest.raises(InputError, match=r"change\.rate='slow' is no rate"):
        Change(at_seconds=1, node=0, rate="slow")
