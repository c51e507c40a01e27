"""Link probes: which speed is usual, which changes count, and which node's link is found."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.balance.replication.cost import LinkKind
from moesaic.planner.cluster import ClusterSpec
from moesaic.program.grid import Grid
from moesaic.train.link_rates import LinkRates, phases
from moesaic_lab.emulated import emulated
from moesaic_testbed.bed import Bed

FOUR = Grid(world=8, ep=8, ranks_per_node=2)


class OneRank:
    """The ranks of a mesh, as one of them sees them. Reductions return this rank's value."""

    def __init__(self, grid: Grid, rank: int = 0) -> None:
        self.rank, self.mesh = rank, SimpleNamespace(grid=grid, rank=rank)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return this rank's value."""
        return tensor


class Told(LinkRates):
    """Link probes with simulated times: a message takes one second divided by the slower node's rate."""

    def __init__(self, grid: Grid, cluster: ClusterSpec | None = None) -> None:
        super().__init__(OneRank(grid), cluster)  # type: ignore[arg-type]
        self.rates: Sequence[float] = (1.0,) * (grid.world // (grid.ranks_per_node or grid.world))

    def _measured_seconds(self, kind: LinkKind) -> np.ndarray:
        if kind == "inside":
            return np.ones(len(self.rates))
        mine = np.array(self.rates)
        edges = 1 / np.minimum(mine, np.roll(mine, 1))
        found: np.ndarray = np.minimum(edges, np.roll(edges, -1))
        return found


@pytest.mark.parametrize("nodes", range(2, 9))
def test_in_a_phase_no_node_gets_and_sends(nodes: int) -> None:
    found = phases(nodes)
    assert sorted(node for phase in found for node in phase) == list(range(nodes))
    for phase in found:
        assert not {(node - 1) % nodes for node in phase} & set(phase)


def test_a_link_that_became_slower_is_that_of_its_node_once_two_probes_agree() -> None:
    rates = Told(FOUR)
    assert rates.drift() == {}
    rates.rates = (1.0, 1.0, 0.5, 1.0)
    assert rates.drift() == {}, "one slow look is no drift"
    assert rates.drift() == {"outside": (1.0, 1.0, 0.5, 1.0)}
    assert rates.drift() == {}, "that is usual now"
    rates.rates = (0.5, 0.5, 0.25, 0.5)
    rates.drift()
    assert rates.drift() == {"outside": (0.5, 0.5, 0.5, 0.5)}


def test_a_link_that_is_slow_from_the_start_is_held_against_those_of_the_other_nodes() -> None:
    rates = Told(FOUR)
    rates.rates = (1.0, 1.0, 1.0, 0.5)
    assert rates.drift() == {}
    assert rates.drift() == {"outside": (1.0, 1.0, 1.0, 0.5)}
    two = Told(Grid(world=4, ep=4, ranks_per_node=2))
    two.rates = (1.0, 0.5)
    assert (two.drift(), two.drift()) == ({}, {}), "of two nodes nobody can say whose link is slow"


def test_what_the_cluster_says_of_its_nodes_is_no_change() -> None:
    spec = emulated(Bed(nodes=4, inter=("80mbit", "80mbit", "80mbit", "40mbit"), intra="1gbit"))
    said = Told(FOUR, spec)
    said.rates = (1.0, 1.0, 1.0, 0.5)
    assert (said.drift(), said.drift()) == ({}, {})
    said.rates = (1.0, 1.0, 1.0, 1.0)
    said.drift()
    (faster,) = said.drift().values()
    assert faster == pytest.approx((1.0, 1.0, 1.0, 2.0), rel=0.05)


def test_a_rank_tells_only_of_messages_that_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[LinkKind, range]] = []

    def message(self: LinkRates, kind: LinkKind, hears: range) -> float:
        asked.append((kind, hears))
        return 0.5 + len(asked)

    monkeypatch.setattr(LinkRates, "_message", message)
    monkeypatch.setattr(np, "roll", lambda heard, by: np.full_like(heard, np.inf))
    ranks: Any = OneRank(FOUR, rank=2)
    heard = LinkRates(ranks)._measured_seconds("outside")
    assert {kind for kind, _ in asked} == {"outside"}
    assert heard.tolist() == [0.0, 1.5, 0.0, 0.0], "the fastest message of the phase in which node 1 hears"
    assert torch.tensor(heard).dtype == torch.float64
