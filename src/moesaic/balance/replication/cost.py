"""The cost model of replication: the time of a layer's forward and backward pass, by which all policies choose.

The model follows equations 7 and 8 of FasterMoE (He et al., PPoPP 2022), with corrections. Tokens that stay at home cross no
link. Tokens that still travel are counted in addition to the weights. Bytes are counted as bytes. Each link has the rate of
its kind; the links between the places that hold experts are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import permutations, product
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Machine
from moesaic.planner.topology import Topology
from moesaic.program.grid import Grid
from moesaic.program.passes.replicate import relays


def ranks_by_place(grid: Grid) -> np.ndarray:
    """Return the rank at each coordinate (edp, ep, etp) of the experts' mesh, (edp, ep, etp) int64."""
    ranks = np.empty((grid.edp, grid.ep, grid.etp), dtype=np.int64)
    for rank in range(grid.world):
        ranks[tuple(grid.coordinate(rank, axis) for axis in ("edp", "ep", "etp"))] = rank
    return ranks


def nodes_of(grid: Grid) -> np.ndarray:
    """Return the node of each rank, (world,) int64."""
    return np.array([grid.node_of(rank) for rank in range(grid.world)])


def seconds_per_byte(machine: Machine, node: np.ndarray, node_links: tuple[float, ...] = ()) -> np.ndarray:
    """Return the seconds per byte from each place to each other place, (places, places); 0 within a place.

    Args:
        machine: the rates of one rank.
        node: (places,), the node of each place.
        node_links: rate of each node's link to the other nodes, relative to the machine's; the slower end counts. () if all
            nodes have the machine's rate.
    """
    link = np.array(node_links or (1.0,))[node % len(node_links or (1.0,))]
    between = machine.inter_gbps * np.minimum(link[:, None], link[None, :])
    gbps = np.where(node[:, None] == node[None, :], machine.intra_gbps, between)
    seconds: np.ndarray = 8 / (gbps * 1e9) * (1 - np.eye(len(node)))
    return seconds


@lru_cache(maxsize=64)
def links_of_places(
    cluster: ClusterSpec, grid: Grid, places: tuple[tuple[int, ...], ...], *, weights: bool
) -> np.ndarray:
    """Return the seconds for which a byte from place to place occupies each link, (ep, ep, links).

    Args:
        cluster: the cluster with the links.
        grid: the mesh.
        places: the ranks of each place of ep.
        weights: True for weights, of which each shard sends a byte to the same shard of the other place. False for rows, where
            every rank of the place has an equal part of the byte and sends it to all shards.

    Raises:
        InputError: if the mesh does not fit the cluster.
    """
    topology = Topology(cluster, grid.world, grid.ranks_per_node)
    seconds = np.zeros((len(places), len(places), topology.num_links))
    one, no_message = np.ones(1), np.zeros(1)
    for start, end in permutations(range(len(places)), 2):
        pairs = zip(places[start], places[end]) if weights else product(places[start], places[end])
        for source, target in pairs:
            load = topology.loads(np.array([source]), np.array([target]), one, no_message)
            seconds[start, end, load.links] += load.seconds / (1 if weights else len(places[start]))
    return seconds


@lru_cache(maxsize=64)
def relays_of(grid: Grid, places: tuple[tuple[int, ...], ...]) -> np.ndarray | None:
    """Return the place that relays the weights of each home to each helper, (home, helper) int64; None without relays.

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
LinkKind: TypeAlias = Literal["inside", "outside"]
LinkTimes: TypeAlias = Mapping[LinkKind, tuple[float, ...]]
"""Measured rate over described rate of the links of each kind: one value for all nodes, or one value per node. Kinds that are
left out have their described rates."""


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
        """For each replica of the experts, the ranks whose copies it computes, by place of ep: (ep, origins) int64 each."""
        return list(ranks_by_place(self.grid))


@dataclass(frozen=True, kw_only=True)
class ReplicationCosts:
    """The rates of a machine and the sizes of a layer from which the cost of a call is computed."""

    machine: Machine = field(default_factory=Machine)
    """Rates of one rank."""
    cluster: ClusterSpec | None = None
    """A cluster with rates of every pair of ranks, shared links and products, used instead of `machine`. For a measured
    `ClusterProfile` it is `profile.to_cluster()`."""
    relays: bool = True
    """Send replicated weights once to each node if the program does so (`program.passes.replicate.relays`). False: the home
    sends them to each helper."""
    element_bytes: int = 2
    """Bytes per element of activations and weights."""
    matrices: int = 3
    """Weight matrices of an expert: 3 for SwiGLU, 2 for a plain expert."""
    expert_us: float = 0.0
    """Host time in microseconds, forward and backward, for each expert that is replicated to a place: packing, placing, calls.
    Small if grouped products compute all experts at once. Only the arbiter counts it."""
    speeds: tuple[float, ...] = ()
    """Speed of each rank's products relative to the rates; () for the cluster's speeds or, without any, equal speeds. Measured
    speeds come from the times of a rank's experts in calls (`balance/run/clock.py`)."""
    node_links: tuple[float, ...] = ()
    """Rate of each node's link to the other nodes, in both directions, relative to `machine`; () if equal. Not used with a
    cluster, which describes its own links."""
    backward: bool = True
    """Count the backward pass too: twice the products, and every transfer again."""

    def __post_init__(self) -> None:
        for name in ("element_bytes", "matrices"):
            if getattr(self, name) < 1:
                raise InputError(f"replication.{name}={getattr(self, name)}: must be at least 1")
        if self.cluster is not None:
            self.cluster.device.tflops.of(self.dtype)

    def with_links(self, times: LinkTimes) -> ReplicationCosts:
        """Return the rates with links inside nodes, or between them, that are `times` times as fast.

        A machine has only one rate inside nodes: that of the node with the slowest links.
        """
        machine, cluster = self.machine, self.cluster
        inside, outside = times.get("inside", (1.0,)), times.get("outside", (1.0,))
        machine = replace(
            machine, intra_gbps=machine.intra_gbps * min(inside), inter_gbps=machine.inter_gbps * max(outside)
        )
        for kind, faster in times.items():
            cluster = None if cluster is None else cluster.with_links(kind, faster)
        node_links = tuple(each / max(outside) for each in outside) if min(outside) < max(outside) else ()
        return replace(self, machine=machine, cluster=cluster, node_links=node_links)

    @property
    def dtype(self) -> str:
        """The dtype of products, which follows from the bytes of an element."""
        return {2: "bf16", 4: "fp32", 8: "fp64"}.get(self.element_bytes, "fp8")

    @property
    def flops_per_second(self) -> float:
        """Operations per second of the experts' products."""
        return self.machine.tflops * 1e12 if self.cluster is None else self.cluster.device.tflops.of(self.dtype)


@dataclass(frozen=True)
class ReplicaLinks:
    """The places of one replica of the experts and the costs between them, which are the same in all calls."""

    grid: Grid
    origins: np.ndarray
    """(ep, origins): the ranks of each place."""
    costs: ReplicationCosts

    @cached_property
    def nodes(self) -> np.ndarray:
        """(ep,) int64: the node of each place."""
        of_places: np.ndarray = nodes_of(self.grid)[self.origins[:, 0]]
        return of_places

    @cached_property
    def slowness(self) -> np.ndarray:
        """(ep,): the time of a copy on the slowest rank of each place, relative to the rates."""
        costs = self.costs
        speeds = np.array(costs.speeds or (costs.cluster.speeds if costs.cluster is not None else ()) or (1.0,))
        of_places: np.ndarray = (1 / speeds[self.origins % len(speeds)]).max(1)
        return of_places

    @cached_property
    def fair(self) -> np.ndarray:
        """(ep,): the share of all copies that each place computes if all places take equally long."""
        speed = 1 / self.slowness
        of_places: np.ndarray = speed / speed.sum()
        return of_places

    @cached_property
    def seconds_per_byte(self) -> np.ndarray:
        """(ep, ep): seconds per byte from place to place; 0 within a place. On a cluster, those of the slowest link on the way,
        without other messages."""
        if self.costs.cluster is not None:
            alone: np.ndarray = self.row_links.max(2, initial=0.0)
            return alone
        return seconds_per_byte(self.costs.machine, self.nodes, self.costs.node_links)

    @cached_property
    def start_up(self) -> np.ndarray:
        """(ep, ep): seconds per message from place to place, whatever its size; 0 within a place."""
        machine, node = self.costs.machine, self.nodes
        micro = np.where(node[:, None] == node[None, :], machine.intra_latency_us, machine.inter_latency_us)
        seconds: np.ndarray = micro * 1e-6 * (1 - np.eye(len(node)))
        return seconds

    @cached_property
    def row_links(self) -> np.ndarray:
        """(ep, ep, links): seconds for which a byte of rows from place to place occupies each link."""
        return self._links(weights=False)

    @cached_property
    def weight_links(self) -> np.ndarray:
        """(ep, ep, links): the same for a byte of weights. If a place is a single rank, both take the same path."""
        return self.row_links if self.origins.shape[1] == 1 else self._links(weights=True)

    @cached_property
    def parts(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The nonzero entries of `row_links`, and those of `weight_links`: pair of places (source * ep + target), link,
        seconds."""
        parts = []
        for links in (self.row_links, self.weight_links):
            by_pair = links.reshape(-1, links.shape[2])
            pair, link = np.nonzero(by_pair)
            parts.append((pair, link, by_pair[pair, link]))
        return parts

    def _links(self, *, weights: bool) -> np.ndarray:
        """Return the seconds of a byte on each link, (ep, ep, links). Without a cluster the links of a place are one port out
        and one port in."""
        if self.costs.cluster is not None:
            return links_of_places(self.costs.cluster, self.grid, self.places, weights=weights)
        ep, rate = len(self.origins), self.seconds_per_byte
        identity = np.eye(ep)
        return np.concatenate([rate[:, :, None] * identity[:, None], rate[:, :, None] * identity[None]], axis=2)

    @cached_property
    def via(self) -> np.ndarray | None:
        """(home, helper): the place on the helper's node that relays the weights of each home to the helper; None without
        relays."""
        return relays_of(self.grid, self.places) if self.costs.relays else None

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each place, as tuples."""
        return tuple(map(tuple, self.origins.tolist()))


@dataclass(frozen=True)
class ReplicaLoad:
    """The load of one replica of the experts by place of ep, with the cost model that policies use."""

    load: CallLoad
    links: ReplicaLinks

    @property
    def origins(self) -> np.ndarray:
        """(ep, origins): the ranks of each place."""
        return self.links.origins

    @property
    def costs(self) -> ReplicationCosts:
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
        return flops * (3 if self.costs.backward else 1) / self.costs.flops_per_second

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one copy, one way."""
        return self.load.dim * self.costs.element_bytes

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights of one shard of an expert, one way."""
        return self.load.units * self.load.dim * self.costs.matrices * self.costs.element_bytes

    @property
    def seconds_per_byte(self) -> np.ndarray:
        """See `ReplicaLinks`."""
        return self.links.seconds_per_byte

    @property
    def passes(self) -> int:
        """How often a dispatched row crosses a link: to the expert and back, and again for gradients."""
        return 4 if self.costs.backward else 2

    def seconds(self, replicated: np.ndarray) -> float:
        """Return the modelled seconds under a table of replicated copies, (ep, num_experts, ep) int64: copies of a place, for
        an expert, that another place computes."""
        home = self.load.home
        computed = replicated.copy()
        computed[:, np.arange(self.load.num_experts), home] += self.copies - replicated.sum(2)
        rows = computed.sum(1)
        return self.seconds_of(rows, self.sent(replicated.sum(0) > 0))

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
        onward = np.bincount((via * ep + np.arange(ep)).reshape(-1), weights=straight.reshape(-1), minlength=ep * ep)
        weights: np.ndarray = first + onward.reshape(ep, ep).astype(np.int64)
        np.fill_diagonal(weights, 0)
        return weights

    def seconds_of(self, rows: np.ndarray, weights: np.ndarray) -> float:
        """Return the modelled seconds of a call.

        Args:
            rows: (ep, ep), copies of place i that place j computes.
            weights: (ep, ep), experts whose weights place i sends to place j, as returned by `sent`.
        """
        return self.closed_form(self.busiest(rows.sum(0)), self.fullest(rows, 0), self.fullest(weights, 1))

    def busiest(self, computed: np.ndarray) -> float:
        """Return the load of the place that takes longest, in the copies that a rank of the described speed computes in that
        time.

        Args:
            computed: (ep,), copies that each place computes.
        """
        return float((computed * self.links.slowness).max())

    def limits(self, limit: float) -> np.ndarray:
        """Return the copies that each place may compute, (ep,) int64: `limit` times its share if all places take equally
        long."""
        limits: np.ndarray = np.ceil(np.round(self.copies.sum() * self.links.fair * limit, 6)).astype(np.int64)
        return limits

    def closed_form(self, computed: Seconds, rows: Seconds, weights: Seconds) -> Seconds:
        """Return the modelled seconds of calls: the sum of products, transfer of rows and transfer of weights.

        Args:
            computed: copies at the busiest place, () or (calls,); see `busiest`.
            rows: seconds on the fullest link if each row were one byte, in the shape of `computed`.
            weights: seconds on the fullest link if each expert's weights were one byte, in the shape of `computed`.
        """
        return self.compute_seconds(computed) + self.travel_seconds(rows) + self.fetch_seconds(weights)

    def compute_seconds(self, computed: Seconds) -> Seconds:
        """Return the seconds of products; see `closed_form`."""
        return computed * self.seconds_per_copy

    def travel_seconds(self, rows: Seconds) -> Seconds:
        """Return the seconds of all transfers of rows on the fullest link; see `closed_form`."""
        return self.passes * self.row_bytes * rows

    def fetch_seconds(self, weights: Seconds) -> Seconds:
        """Return the seconds of weights and their gradients on the fullest link; see `closed_form`."""
        return self.passes / 2 * self.weight_bytes * weights

    def fullest(self, moved: np.ndarray, kind: int) -> float:
        """Return the seconds on the fullest link if every moved item were one byte.

        Args:
            moved: (ep, ep), items that place i sends to place j.
            kind: 0 if the items are rows, 1 if they are weights.
        """
        if self.costs.cluster is None:
            spent = moved * self.seconds_per_byte
            return float(max(spent.sum(0).max(), spent.sum(1).max()))
        pair, link, seconds = self.links.parts[kind]
        return float(np.bincount(link, moved.reshape(-1)[pair] * seconds).max(initial=0.0))


def replica_links(load: CallLoad, costs: ReplicationCosts) -> list[ReplicaLinks]:
    """Return the links of every replica of the experts, valid for all calls on the same mesh."""
    return [ReplicaLinks(load.grid, origins, costs) for origins in load.replicas]


def replica_loads(load: CallLoad, costs: ReplicationCosts) -> list[ReplicaLoad]:
    """Return the load of every replica of the experts."""
    return [ReplicaLoad(load, links) for links in replica_links(load, costs)]
