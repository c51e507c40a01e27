"""The cost model of replication: the time of a layer's forward and backward pass, by which all
policies choose.

The model follows equations 7 and 8 of FasterMoE (He et al., PPoPP 2022), with corrections. Tokens
that stay at home cross no link. Tokens that still travel are counted in addition to the weights.
Bytes are counted as bytes. Each link has the rate of its kind; the links between the places that
hold experts are computed once.

A *place* is a coordinate of ep: the ranks of etp that hold shards of the same experts. An expert's
*home* is the place that has it; a *helper* is another place that computes some of its copies, with
weights fetched from home, perhaps through a *relay* on the helper's node. A *replica* is a group of
places that together hold all experts once, and an *origin* the rank or place that has the tokens.
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
        replica = grid.coordinate(rank, "edp")
        place = grid.coordinate(rank, "ep")
        shard = grid.coordinate(rank, "etp")
        ranks[replica, place, shard] = rank
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
        node_links: rate of each node's link to the other nodes, relative to `rates`, repeated if
            there are more nodes; the slower end counts. () if they are equal.
    """
    links = np.array(node_links or (1.0,))
    link = links[node % len(links)]  # of each place's node
    between = rates.inter_gbps * np.minimum(link[:, None], link[None, :])
    is_inside = node[:, None] == node[None, :]
    gbps = np.where(is_inside, rates.intra_gbps, between)
    is_other_place = 1 - np.eye(len(node))
    seconds: np.ndarray = 8 / (gbps * 1e9) * is_other_place
    return seconds


def slowness_of(speeds: tuple[float, ...], ranks: np.ndarray) -> np.ndarray:
    """Return the time of a copy on the slowest rank of each place, relative to the rates, (...).

    Args:
        speeds: the speed of each rank relative to the rates, repeated if there are more ranks; ()
            if all are equal.
        ranks: (..., ranks of a place), the ranks of each place.
    """
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
        # the rank with the home's number within its node, on the helper's node
        same_number = set(grid.group(places[home][0], ("node",)))
        on_node = set(grid.group(places[helper][0], ("local",)))
        (relay,) = same_number & on_node
        via[home, helper] = grid.coordinate(relay, "ep")
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
        is_inside = self.nodes[:, None] == self.nodes[None, :]
        # at most ep links of each kind: out inside nodes, in inside nodes, out between, in between
        intra_links = self._ends_of(rates.intra_ranks)
        inter_links = 2 * ep + self._ends_of(rates.inter_ranks)
        numbers: np.ndarray = np.where(is_inside, intra_links, inter_links)
        return numbers

    def _ends_of(self, ranks_per_link: int) -> np.ndarray:
        """Return the numbers of the links of one kind, (2, ep, ep) int64: those out of each place
        from 0, those into each from ep."""
        ep = len(self.origins)
        # places whose first ranks share a link have the same number
        _, link = np.unique(self.origins[:, 0] // ranks_per_link, return_inverse=True)
        out_of_place, into_place = np.broadcast_arrays(link[:, None], ep + link[None, :])
        return np.stack([out_of_place, into_place])

    @cached_property
    def end_seconds(self) -> np.ndarray:
        """(2, ep, ep): seconds for which a byte from place to place occupies each of its two links.

        Each shard of an expert gets a byte, so links that carry several of a place's shards carry
        as many bytes.
        """
        rates = self.costs
        ep = len(self.origins)
        node_links = np.array(rates.node_links or (1.0,))
        inter_gbps = rates.inter_gbps * node_links[self.nodes % len(node_links)]
        intra_gbps = np.full(ep, rates.intra_gbps)
        is_inside = self.nodes[:, None] == self.nodes[None, :]
        intra_seconds = self._seconds_at_ends(rates.intra_ranks, intra_gbps)
        inter_seconds = self._seconds_at_ends(rates.inter_ranks, inter_gbps)
        is_other_place = 1 - np.eye(ep)
        seconds: np.ndarray = np.where(is_inside, intra_seconds, inter_seconds) * is_other_place
        return seconds

    def _seconds_at_ends(self, ranks_per_link: int, gbps: np.ndarray) -> np.ndarray:
        """Return the seconds of a byte on the links out of and into a place, (2, ep, ep), for one
        kind of link with a rate per rank, (ep,)."""
        first = self.origins[:, 0]
        shares_link = self.origins // ranks_per_link == (first // ranks_per_link)[:, None]
        shards_on_link = shares_link.sum(1)
        # a link that ranks share has the rates of all of them
        seconds = 8 * shards_on_link / (ranks_per_link * gbps * 1e9)
        return np.stack(np.broadcast_arrays(seconds[:, None], seconds[None, :]))

    @cached_property
    def via(self) -> np.ndarray | None:
        """(home, helper): the place on the helper's node that relays the weights of each home to
        the helper; None where the program has no relays."""
        return relays_of(self.grid, tuple(map(tuple, self.origins.tolist())))

    def busy(self, moved: np.ndarray) -> np.ndarray:
        """Return the seconds on each link, (4 * ep,), if each of the items that places send, (ep,
        ep), were one byte."""
        num_links = 4 * len(self.origins)  # out of and into places, inside and between nodes
        spent = moved * self.end_seconds
        seconds: np.ndarray = np.bincount(self.ends.reshape(-1), spent.reshape(-1), num_links)
        return seconds

    def busy_by(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the seconds on each link, (n, 4 * ep), of a byte from each `source` place, (n,),
        to its `target`."""
        num_links = 4 * len(self.origins)  # out of and into places, inside and between nodes
        seconds = np.zeros((len(source), num_links))
        number = np.arange(len(source))
        for links, busy in zip(self.ends, self.end_seconds):  # out of the source, into the target
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
        # a product and a sum for each weight
        flops = 2 * self.load.dim * self.load.units * self.costs.matrices
        products = 3 if self.costs.backward else 1  # gradients of input and of weights
        return flops * products / (self.costs.tflops * 1e12)

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
        by_home = helped.reshape(ep, -1, ep)  # (home, expert of the home, helper)
        direct: np.ndarray = by_home.sum(1)
        via = self.links.via
        if via is None:
            return direct

        # each relay gets an expert once, whatever the number of helpers on its node
        home, expert, helper = np.nonzero(by_home)
        relay_gets = np.zeros(by_home.shape, dtype=bool)
        relay_gets[home, expert, via[home, helper]] = True
        to_relays = relay_gets.sum(1)

        relay_and_helper = via * ep + np.arange(ep)  # (home, helper): number of the pair
        from_relays = np.bincount(
            relay_and_helper.reshape(-1), weights=direct.reshape(-1), minlength=ep * ep
        )
        weights: np.ndarray = to_relays + from_relays.reshape(ep, ep).astype(np.int64)
        np.fill_diagonal(weights, 0)  # a home or a helper that is the relay
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
        share = speed / speed.sum()
        # rounded, so that rounding errors do not lift a whole number to the next one
        loads = np.round(self.copies.sum() * share * limit, 6)
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
        """Return the seconds of all transfers of rows on the fullest link, there, back, and again
        for gradients; see `closed_form`."""
        return self.costs.passes * self.row_bytes * rows

    def fetch_seconds(self, weights: Seconds) -> Seconds:
        """Return the seconds of weights and their gradients on the fullest link, half as many
        transfers as rows have; see `closed_form`."""
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
