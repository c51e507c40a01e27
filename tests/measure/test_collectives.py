"""Collectives that a profile times: their groups, the result of SAA, and Algorithm 1 with measured lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic.cli.profile import failings
from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.measure import links as timed
from moesaic.measure.links import COLLECTIVES, all_to_all_gathered, collectives, spans
from moesaic.planner.algorithm1 import choose, measured_operations
from moesaic.planner.fit import Fit
from moesaic.planner.profile import ClusterProfile, LinkCosts, MachineInfo, Versions, read_profile
from moesaic.planner.profile_simulate import profiled_simulator
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid

GRID = Grid(world=8, tp=4, ep=2, etp=4, ranks_per_node=4)
LAYER = Workload(tokens=2048, num_experts=8, top_k=2, dim=512, hidden=512, matrices=2, dtype="fp32")


def test_groups_are_the_node_one_rank_of_each_and_all() -> None:
    assert spans(5, 8, 4) == {"inside": (4, 5, 6, 7), "outside": (1, 5), "everywhere": tuple(range(8))}
    assert spans(1, 4, 4) == {"inside": (0, 1, 2, 3)}
    assert spans(1, 4, 1) == {"outside": (0, 1, 2, 3)}
    assert spans(0, 1, 1) == {}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (2, 2), (3, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("in_order", [False, True])
def test_saa_gives_every_rank_what_was_sent_to_its_node(nodes: int, per_node: int, in_order: bool) -> None:
    world, rows = nodes * per_node, 3
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
    monkeypatch.setattr(timed, "gathered", lambda mine: [mine])  # each thread times for itself
    lines_of_ranks = run_ranks(4, lambda transport: collectives(transport, 2, 3, lambda: None))
    names = [f"{name} {span}" for span in ("inside", "outside", "everywhere") for name in COLLECTIVES]
    assert [list(lines) for lines in lines_of_ranks] == [[*names, "saa everywhere"]] * 4
    assert all(len(line.residuals) == 3 and line.what == name for name, line in lines_of_ranks[0].items())


def profile(**lines: Fit) -> ClusterProfile:
    links = LinkCosts(one_sender=1e9, all_senders=1e9)
    named = {name.replace("_in", " in").replace("_every", " every"): line for name, line in lines.items()}
    return ClusterProfile(nodes=2, ranks_per_node=4, inside=links, outside=links, collectives=named)


@pytest.mark.parametrize(("saa", "schedule"), [(1e-9, "s2"), (1e-6, "s1")])
def test_algorithm_1_takes_the_measured_lines(saa: float, schedule: str) -> None:
    """The simulated links are equal in both cases; only the measured line of SAA differs."""
    measured = profile(
        all_to_all_everywhere=Fit(alpha=1e-4, beta=1e-8),
        all_gather_inside=Fit(alpha=1e-4, beta=1e-9),
        saa_everywhere=Fit(alpha=1e-4, beta=saa),
    )
    operations = measured_operations(measured.collectives, GRID, "fp32")
    assert operations is not None
    assert operations.overlapped.seconds(10) == pytest.approx(1e-4 + 40 * saa)
    assert choose(profiled_simulator(measured), LAYER, GRID).schedule == schedule
    assert profiled_simulator(measured, nodes=4).timing.collectives == {}


def test_unmeasured_groups_are_simulated() -> None:
    lines = {name: Fit(beta=1e-9) for name in ("all_to_all everywhere", "all_gather inside", "saa everywhere")}
    assert measured_operations(lines, replace(GRID, tp=2), "fp32") is None
    assert measured_operations(lines, replace(GRID, ep=1, etp=4), "fp32") is None
    assert measured_operations({}, GRID, "fp32") is None


def test_lines_are_read_back_and_bad_ones_refused(tmp_path: Path) -> None:
    noisy_profile = replace(
        profile(all_gather_inside=Fit(alpha=1e-4, beta=1e-9, r2=0.5, residuals=(0.1, -0.1), what="all_gather inside")),
        machine=MachineInfo.here(), versions=Versions.here(),
    )  # fmt: skip
    noisy_profile.write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == noisy_profile
    assert failings(noisy_profile, ()) == [noisy_profile.collectives["all_gather inside"].trouble]
    for table, line in (
        ({"x": {"alpha": -1.0}}, "alpha=-1.0"),
        ({"x": {"alpa": 1.0}}, r"unknown field collectives\.x\.alpa"),
        ({"x": 3}, r"collectives\.x must be a table"),
    ):
        with pytest.raises(InputError, match=line):
            override(ClusterProfile(), {"collectives": table}, source="profile p.json")
