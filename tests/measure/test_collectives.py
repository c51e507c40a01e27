"""Collectives that a profile times: their groups, the result of SAA, and Algorithm 1 with measured
lines."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from helpers import refused
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.measure import links as timed
from moesaic.measure.links import COLLECTIVES, all_to_all_gathered, collectives, rate_of, spans
from moesaic.planner.algorithm1 import choose, measured_operations
from moesaic.planner.cluster import ClusterSpec, Device, Link, Tflops
from moesaic.planner.fit import Fit
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid

GRID = Grid(world=8, tp=4, ep=2, etp=4, ranks_per_node=4)
LAYER = Workload(tokens=2048, num_experts=8, top_k=2, dim=512, hidden=512, matrices=2, dtype="fp32")


def test_groups_are_the_node_one_rank_of_each_and_all() -> None:
    assert spans(5, 8, 4) == {
        "inside": (4, 5, 6, 7),
        "outside": (1, 5),
        "everywhere": tuple(range(8)),
    }
    assert spans(1, 4, 4) == {"inside": (0, 1, 2, 3)}
    assert spans(1, 4, 1) == {"outside": (0, 1, 2, 3)}
    assert spans(0, 1, 1) == {}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (2, 2), (3, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("in_order", [False, True])
def test_saa_gives_every_rank_what_was_sent_to_its_node(
    nodes: int, per_node: int, in_order: bool
) -> None:
    world = nodes * per_node
    rows = 3
    sent = torch.randn(world, world, rows)

    def rank(transport: AbstractTransport) -> None:
        first = transport.rank // per_node * per_node
        inside = tuple(range(first, first + per_node))
        whole = all_to_all_gathered(transport, inside, sent[transport.rank].flatten())
        for place, peer in enumerate(inside):
            assert torch.equal(whole[place], sent[:, peer])

    run_ranks(world, rank, seed=nodes, in_order=in_order)


def test_everything_is_timed_over_every_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "SIZES", (1 << 10, 1 << 11, 1 << 12))
    monkeypatch.setattr(timed, "gathered", lambda own: [own])  # each thread times for itself
    lines_of_ranks = run_ranks(4, lambda transport: collectives(transport, 2, 3, lambda: None))
    names = [
        f"{name} {span}" for span in ("inside", "outside", "everywhere") for name in COLLECTIVES
    ]
    assert [list(lines) for lines in lines_of_ranks] == [[*names, "saa everywhere"]] * 4
    assert all(
        len(line.residuals) == 3 and line.what == name for name, line in lines_of_ranks[0].items()
    )


def test_times_that_a_neighbour_spoiled_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three repeats of each size take equally long, more of them longer and longer."""
    counts = defaultdict[int, int](int)
    most = 3

    def spoiled(of_ranks: list[list[tuple[float, float]]]) -> tuple[float, ...]:
        counts[threading.get_ident()] += 1
        repeats = len(of_ranks[0])
        seconds = 1e-3 if repeats <= most else 1e-3 * counts[threading.get_ident()]
        return (seconds,) * repeats

    monkeypatch.setattr(timed, "gathered", lambda own: [own])
    monkeypatch.setattr(timed, "elapsed", spoiled)
    monkeypatch.setattr(timed, "COLLECTIVES", {"all_to_all": COLLECTIVES["all_to_all"]})
    for flat in (3, 9):
        most = flat
        (lines, _) = run_ranks(2, lambda transport: collectives(transport, 2, 3, lambda: None))
        assert rate_of(lines["all_to_all inside"]) > 0
    most = 100
    (lines, _) = run_ranks(2, lambda transport: collectives(transport, 2, 3, lambda: None))
    said = refused(rate_of, lines["all_to_all inside"])
    assert "longer transfers take no longer, measured 3 times: measure again while" in said


LINKS = tuple(
    Link(name=span, devices=1, gbps=(8.0,), carries=span) for span in ("inside", "outside")
)  # type: ignore[arg-type]
DEVICE = Device(tflops=Tflops(fp32=1.0), memory_gib=1, memory_gigabytes_per_second=10)


@pytest.mark.parametrize(("saa", "schedule"), [(1e-9, "s2"), (1e-6, "s1")])
def test_algorithm_1_takes_the_measured_lines(saa: float, schedule: str) -> None:
    """The simulated links are equal in both cases; only the measured line of SAA differs."""
    lines = (
        Fit(alpha=1e-4, beta=1e-8, what="all_to_all everywhere"),
        Fit(alpha=1e-4, beta=1e-9, what="all_gather inside"),
        Fit(alpha=1e-4, beta=saa, what="saa everywhere"),
    )
    operations = measured_operations(lines, GRID, "fp32")
    assert operations.overlapped.seconds(10) == pytest.approx(1e-4 + 40 * saa)
    measured = ClusterSpec(
        nodes=2, devices_per_node=4, device=DEVICE, links=LINKS, collectives=lines
    )
    assert choose(Simulator(measured), LAYER, GRID).schedule == schedule


def test_unmeasured_groups_are_simulated() -> None:
    names = ("all_to_all everywhere", "all_gather inside", "saa everywhere")
    lines = [Fit(beta=1e-9, what=name) for name in names]
    assert measured_operations(lines, replace(GRID, tp=2), "fp32") is None
    assert measured_operations(lines, replace(GRID, ep=1, etp=4), "fp32") is None
    assert measured_operations((), GRID, "fp32") is None
