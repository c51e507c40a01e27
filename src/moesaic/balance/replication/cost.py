"""The cost model of replication: the time of a layer's forward and backward pass, by which all
policies choose.

The model follows equations 7 and 8 of FasterMoE (He et al., PPoPP 2022), with corrections. Tokens
that stay at home cross no link. Tokens that still travel are counted in addition to the weights.
Bytes are counted as bytes. Each link has the rate of its kind; the links between the places that
hold experts are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TypeVar

import numpy as np

from moesaic.program.grid import Grid
from moesaic.program.passes.replicate import relays
from moesaic.program.rates import Rates


def ranks_by_place(grid: Grid) -> np.ndarray:
    """Return the rank at each coordinate (edp, ep, etp) of the experts' mesh, (edp, ep, etp)
    int64."""
    ranks = np.empty((grid.edp, grid.ep, grid.etp), dtype=np.int64)
    for rank in range(grid.world):
        ranks[tuple(grid.coordinate(rank, axis) for axis in ("edp", "ep", "etp"))] = rank
    return ranks


def nodes_of(grid: Grid) -> np.ndarray:
    """Return the node of each rank, (world,) int64."""
    return np.array([grid.node_of(rank) for rank in range(grid.world)])


def seconds_per_byte(
    rates: Rates, node: np.ndarray, node_links: tuple[float, ...] = ()
) -> np.ndarray:
    """Return the seconds per byte from each place to each other place, (places, places); 0 within a
    place.

    Args:
        rates: those of one rank.
        node: (places,), the node of each place.
        node_links: rate of each node's link to the other nodes, relative to `rates`; the
            slower end counts. () if they are equal.
    """
    link = np.array(node_links or (1.0,))[node % len(node_links or (1.0,))]
    between = rates.inter_gbps * np.minimum(link[:, None], link[None, :])
    gbps = np.where(node[:, None] == node[None, :], rates.intra_gbps, between)
    seconds: np.ndarray = 8 / (gbps * 1e9) * (1 - np.eye(len(node)))
    return seconds


def slowness_of(speeds: tuple[float, ...], ranks: np.ndarray) -> np.ndarray:
    """Return the time of a copy on the slowest rank of each place, relative to the rates, from the
    ranks of each place."""
    speed = np.array(speeds or (1.0,))
    slowest: np.ndarray = (1 / speed[ranks % len(speed)]).max(-1)
    return slowest


@lru_cache(maxsize=64)
def relays_of(grid: Grid, places: tuple[tuple[int, ...], ...]) -> np.ndarray | None:
    """Return the place that relays the weights of each home to each helper, (home, helper) int64;
    None without relays.

    Args:
        grid: the mesh.
        places: the ranks of each place of ep.
    """
    if not relays(grid):
        return None
    via = np.zeros((len(places), len(places)), dtype=np.int64)
    for home, helper in product(range(len(places)), repeat=2):
        rails = grid.group(places[home][0], ("node",))
        mates = set(grid.group(places[helper][0], ("local",)))
        via[home, helper] = next(grid.coordinate(rank, "ep") for rank in rails if rank in mates)
    return via


Seconds = TypeVar("Seconds", float, np.ndarray)


@dataclass(frozen=True)
class CallLoad:
    """The work of one call of a layer: its copies and the sizes of its rows and experts."""

    grid: Grid
    copies: np.ndarray
    """(world, num_experts) int64: copies that each rank, as their origin, has for each expert."""
    num_experts: int
    """Number of experts of the layer."""
    units: int
    """Hidden units of one shard of an expert in its packed weights."""
    dim: int
    """Width of a token."""

    @cached_property
    def home(self) -> np.ndarray:
        """(num_experts,): the place of ep that is each expert's home."""
        return np.arange(self.num_experts) // (self.num_experts // self.grid.ep)

    @cached_property
    def replicas(self) -> list[np.ndarray]:
        """For each replica of the experts, the ranks whose copies it computes, by place of ep: (ep,
        origins) int64 each."""
        return list(ranks_by_place(self.grid))


@dataclass(frozen=True)
class ReplicaLinks:
    """The places of one replica of the experts and the costs between them, which are the same in
    all calls."""

    grid: Grid
    origins: np.ndarray
    """(ep, origins): the ranks of each place."""
    costs: Rates

    @cached_property
    def nodes(self) -> np.ndarray:
        """(ep,) int64: the node of each place."""
        of_places: np.ndarray = nodes_of(self.grid)[self.origins[:, 0]]
        return of_places

    @cached_property
    def slowness(self) -> np.ndarray:
        """(ep,): the time of a copy on the slowest rank of each place, relative to the rates."""
        return slowness_of(self.costs.speeds, self.origins)

    @cached_property
    def seconds_per_byte(self) -> np.ndarray:
        """(ep, ep): seconds per byte from place to place, without other messages; 0 within a
        place."""
        return seconds_per_byte(self.costs, self.nodes, self.costs.node_links)

    @cached_property
    def start_up(self) -> np.ndarray:
        """(ep, ep): seconds per message from place to place, whatever its size; 0 within a
        place."""
        rates = self.costs
        node = self.nodes
        micro = np.where(
            node[:, None] == node[None, :], rates.intra_latency_us, rates.inter_latency_us
        )
        seconds: np.ndarray = micro * 1e-6 * (1 - np.eye(len(node)))
        return seconds

    @cached_property
    def ends(self) -> np.ndarray:
        """(2, ep, ep) int64: numbers of the links over which bytes leave a place and arrive at
        another one.

        Ranks have links of their own inside nodes and between nodes, or share them with their
        neighbours.
        """
        rates = self.costs
        ep = len(self.origins)
        inside = self.nodes[:, None] == self.nodes[None, :]
        links = []
        for ranks in (rates.intra_ranks, rates.inter_ranks):
            group = np.unique(self.origins[:, 0] // ranks, return_inverse=True)[1]
            links.append(np.stack(np.broadcast_arrays(group[:, None], ep + group[None, :])))
        numbers: np.ndarray = np.where(inside, links[0], 2 * ep + links[1])
        return numbers

    @cached_property
    def end_seconds(self) -> np.ndarray:
        """(2, ep, ep): seconds for which a byte from place to place occupies each of its two links.

        Each shard of an expert gets a byte, so links that carry several of a place's shards carry
        as many bytes.
        """
        rates = self.costs
        first = self.origins[:, 0]
        links = self.costs.node_links or (1.0,)
        of_node = np.array(links)[self.nodes % len(links)]
        inside = self.nodes[:, None] == self.nodes[None, :]
        busy = []
        for ranks, gbps in (
            (rates.intra_ranks, np.full(len(first), rates.intra_gbps)),
            (rates.inter_ranks, rates.inter_gbps * of_node),
        ):
            together = (self.origins // ranks == (first // ranks)[:, None]).sum(1)
            seconds = 8 * together / (ranks * gbps * 1e9)
            busy.append(np.stack(np.broadcast_arrays(seconds[:, None], seconds[None, :])))
        of_ends: np.ndarray = np.where(inside, *busy) * (1 - np.eye(len(first)))
        return of_ends

    @cached_property
    def via(self) -> np.ndarray | None:
        """(home, helper): the place on the helper's node that relays the weights of each home to
        the helper; None where the program has no relays."""
        return relays_of(self.grid, tuple(map(tuple, self.origins.tolist())))

    def busy(self, moved: np.ndarray) -> np.ndarray:
        """Return the seconds on each link, (4 * ep,), if each of the items that places send, (ep,
        ep), were one byte."""
        seconds: np.ndarray = np.bincount(
            self.ends.reshape(-1), (moved * self.end_seconds).reshape(-1), 4 * len(self.origins)
        )
        return seconds

    def busy_by(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the seconds on each link, (n, 4 * ep), of a byte from each `source` place, (n,),
        to its `target`."""
        seconds = np.zeros((len(source), 4 * len(self.origins)))
        number = np.arange(len(source))
        for links, busy in zip(self.ends, self.end_seconds):
            seconds[number, links[source, target]] += busy[source, target]
        return seconds


@dataclass(frozen=True)
class ReplicaLoad:
    """The load of one replica of the experts by place of ep, with the cost model that policies
    use."""

    load: CallLoad
    links: ReplicaLinks

    @property
    def origins(self) -> np.ndarray:
        """(ep, origins): the ranks of each place."""
        return self.links.origins

    @property
    def costs(self) -> Rates:
        """The rates of the cost model."""
        return self.links.costs

    @cached_property
    def copies(self) -> np.ndarray:
        """(ep, num_experts) int64: copies that each place has for each expert."""
        copies: np.ndarray = self.load.copies[self.origins].sum(1)
        return copies

    @cached_property
    def seconds_per_copy(self) -> float:
        """Seconds of the products of one copy, forward and backward."""
        flops = 2 * self.load.dim * self.load.units * self.costs.matrices
        return flops * (3 if self.costs.backward else 1) / (self.costs.tflops * 1e12)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one copy, one way."""
        return self.load.dim * self.costs.element_bytes

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights of one shard of an expert, one way."""
        return self.load.units * self.load.dim * self.costs.matrices * self.costs.element_bytes

    def sent(self, helped: np.ndarray) -> np.ndarray:
        """Return how many experts' weights each place sends to each other place, (ep, ep) int64.

        Args:
            helped: (num_experts, ep) bool, whether an expert is replicated to a place.
        """
        ep = len(self.origins)
        by_home = helped.reshape(ep, -1, ep)
        straight: np.ndarray = by_home.sum(1)
        via = self.links.via
        if via is None:
            return straight
        home, expert, helper = np.nonzero(by_home)
        gets = np.zeros(by_home.shape, dtype=bool)
        gets[home, expert, via[home, helper]] = True
        first = gets.sum(1)
        onward = np.bincount(
            (via * ep + np.arange(ep)).reshape(-1), weights=straight.reshape(-1), minlength=ep * ep
        )
        weights: np.ndarray = first + onward.reshape(ep, ep).astype(np.int64)
        np.fill_diagonal(weights, 0)
        return weights

    def seconds_of(self, rows: np.ndarray, weights: np.ndarray) -> float:
        """Return the modelled seconds of a call.

        Args:
            rows: (ep, ep), copies of place i that place j computes.
            weights: (ep, ep), experts whose weights place i sends to place j, as returned by
                `sent`.
        """
        return self.closed_form(
            self.busiest(rows.sum(0)), self.fullest(rows), self.fullest(weights)
        )

    def busiest(self, computed: np.ndarray) -> float:
        """Return the load of the place that takes longest, in the copies that a rank of the
        described speed computes in that time.

        Args:
            computed: (ep,), copies that each place computes.
        """
        return float((computed * self.links.slowness).max())

    def limits(self, limit: float) -> np.ndarray:
        """Return the copies that each place may compute, (ep,) int64: `limit` times its share if
        all places take equally long."""
        speed = 1 / self.links.slowness
        fair = speed / speed.sum()
        loads = np.round(self.copies.sum() * fair * limit, 6)
        limits: np.ndarray = np.ceil(loads).astype(np.int64)
        return limits

    def closed_form(self, computed: Seconds, rows: Seconds, weights: Seconds) -> Seconds:
        """Return the modelled seconds of calls: the sum of products, transfer of rows and transfer
        of weights.

        Args:
            computed: copies at the busiest place, () or (calls,); see `busiest`.
            rows: seconds on the fullest link if each row were one byte, in the shape of `computed`.
            weights: seconds on the fullest link if each expert's weights were one byte, in the
                shape of `computed`.
        """
        return (
            self.compute_seconds(computed) + self.travel_seconds(rows) + self.fetch_seconds(weights)
        )

    def compute_seconds(self, computed: Seconds) -> Seconds:
        """Return the seconds of products; see `closed_form`."""
        return computed * self.seconds_per_copy

    def travel_seconds(self, rows: Seconds) -> Seconds:
        """Return the seconds of all transfers of rows on the fullest link; see `closed_form`."""
        return self.costs.passes * self.row_bytes * rows

    def fetch_seconds(self, weights: Seconds) -> Seconds:
        """Return the seconds of weights and their gradients on the fullest link; see
        `closed_form`."""
        return self.costs.passes / 2 * self.weight_bytes * weights

    def fullest(self, moved: np.ndarray) -> float:
        """Return the seconds on the fullest link if every item that places send, (ep, ep), were one
        byte."""
        return float(self.links.busy(moved).max())


def replica_links(load: CallLoad, costs: Rates) -> list[ReplicaLinks]:
    """Return the links of every replica of the experts, valid for all calls on the same mesh."""
    return [ReplicaLinks(load.grid, origins, costs) for origins in load.replicas]


def replica_loads(load: CallLoad, costs: Rates) -> list[ReplicaLoad]:
    """Return the load of every replica of the experts."""
    return [ReplicaLoad(load, links) for links in replica_links(load, costs)]
