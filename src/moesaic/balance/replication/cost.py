"""What a layer's forward and backward pass take under given replication: the one model by which policies choose.

FasterMoE (He et al., PPoPP 2022), equations 7 and 8, corrected: tokens that stay at home cross no link, tokens that still
travel are counted beside the weights, bytes are bytes, and links have the rates of their kind: those between the places that
hold experts, worked out once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import permutations, product
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from moesaic.cost.cluster import ClusterSpec, Machine
from moesaic.cost.topology import Topology
from moesaic.errors import InputError
from moesaic.program.grid import Grid
from moesaic.program.passes.replicate import relays


def ranks_by_place(grid: Grid) -> np.ndarray:
    """Return the rank of each shard of each place of ep of each copy of the experts, (edp, ep, etp) int64."""
    found = np.empty((grid.edp, grid.ep, grid.etp), dtype=np.int64)
    for rank in range(grid.world):
        found[tuple(grid.coordinate(rank, axis) for axis in ("edp", "ep", "etp"))] = rank
    return found


def nodes_of(grid: Grid) -> np.ndarray:
    """Return the node of each rank, (world,) int64."""
    return np.array([grid.node_of(rank) for rank in range(grid.world)])


def seconds_per_byte(machine: Machine, node: np.ndarray, node_links: tuple[float, ...] = ()) -> np.ndarray:
    """Return the seconds of a byte from each place to each other one, (places, places); nothing within one.

    Args:
        machine: rates of one rank.
        node: (places,) the node of each.
        node_links: of each node's link to the others, over the machine's, of which the slower end counts; () for all alike.
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
    """Return the seconds that a byte from place to place takes of each link, (ep, ep, links).

    Args:
        cluster: the links.
        grid: the mesh.
        places: ranks by place of ep.
        weights: each shard sends its own, a byte of each; else a byte of rows, which every origin has a part of and which goes
            to all shards.

    Raises:
        InputError: if the mesh does not fit the cluster.
    """
    topology = Topology(cluster, grid.world, grid.ranks_per_node)
    found = np.zeros((len(places), len(places), topology.num_links))
    one, no_message = np.ones(1), np.zeros(1)
    for i, j in permutations(range(len(places)), 2):
        pairs = zip(places[i], places[j]) if weights else product(places[i], places[j])
        for source, target in pairs:
            load = topology.loads(np.array([source]), np.array([target]), one, no_message)
            found[i, j, load.links] += load.seconds / (1 if weights else len(places[i]))
    return found


@lru_cache(maxsize=64)
def relays_of(grid: Grid, places: tuple[tuple[int, ...], ...]) -> np.ndarray | None:
    """Return the place by which the weights of each home come to each helper, (home, helper) int64; None where by none.

    Args:
        grid: the mesh.
        places: ranks by place of ep.
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
"""How many times as fast each node's links inside, or to the other nodes, are as somebody said: one value for every node, or
one for each; kinds that are left out are as said."""


@dataclass(frozen=True)
class CallLoad:
    """What one call of a layer has to do."""

    grid: Grid
    copies: np.ndarray
    """(world, num_experts) int64: copies that each origin has for each expert."""
    num_experts: int
    units: int
    """Hidden units of one shard of an expert, as its weights are packed."""
    dim: int
    """Width of a token."""

    @cached_property
    def home(self) -> np.ndarray:
        """Place in ep of each expert, (num_experts,)."""
        return np.arange(self.num_experts) // (self.num_experts // self.grid.ep)

    @cached_property
    def replicas(self) -> list[np.ndarray]:
        """The origins whose copies one replica of the experts computes, by place in ep: per replica (ep, origins) int64."""
        return list(ranks_by_place(self.grid))


@dataclass(frozen=True, kw_only=True)
class ReplicationCosts:
    """Rates, of one rank."""

    machine: Machine = field(default_factory=Machine)
    cluster: ClusterSpec | None = None
    """Rates of every pair of ranks, links that several share, and products, in place of those of `machine`; that of a
    measured `ClusterProfile` is `profile.to_cluster()`."""
    relays: bool = True
    """Replicated weights go once to each node where the program sends them so (`program.passes.replicate.relays`).
    False: the home sends them to each helper."""
    element_bytes: int = 2
    """Of activations and weights."""
    matrices: int = 3
    """Of an expert: 3 for SwiGLU, 2 for a plain one."""
    expert_us: float = 0.0
    """Microseconds of the host for each expert that a place is replicated, forward and backward: packing, placing,
    calls. Small where grouped products take all experts at once; the arbiter counts it."""
    speeds: tuple[float, ...] = ()
    """Of each rank's products, over that of the rates; () for what the cluster says, or all alike. Measured ones come from what
    a rank's experts took in calls (`runtime/balance/clock.py`)."""
    node_links: tuple[float, ...] = ()
    """Of each node's link to the others, over what `machine` says, both ways; () for all alike. Those of a cluster are in its
    description. Measured ones come from probes (`train/link_rates.py`)."""
    backward: bool = True
    """Count the backward pass too: twice the products, and everything that travelled travels again."""

    def __post_init__(self) -> None:
        for name in ("element_bytes", "matrices"):
            if getattr(self, name) < 1:
                raise InputError(f"replication.{name}={getattr(self, name)}: must be at least 1")
        if self.cluster is not None:
            self.cluster.device.tflops.of(self.dtype)

    def with_links(self, times: LinkTimes) -> ReplicationCosts:
        """Return the rates where links inside nodes, or between them, are so many times as fast.

        A machine has one rate inside nodes: that of the node whose links are slowest.
        """
        machine, cluster = self.machine, self.cluster
        inside, outside = times.get("inside", (1.0,)), times.get("outside", (1.0,))
        machine = replace(
            machine, intra_gbps=machine.intra_gbps * min(inside), inter_gbps=machine.inter_gbps * max(outside)
        )
        for kind, faster in times.items():
            cluster = None if cluster is None else cluster.with_links(kind, faster)
        unlike = tuple(each / max(outside) for each in outside) if min(outside) < max(outside) else ()
        return replace(self, machine=machine, cluster=cluster, node_links=unlike)

    @property
    def dtype(self) -> str:
        """Of products, by the bytes of an element."""
        return {2: "bf16", 4: "fp32", 8: "fp64"}.get(self.element_bytes, "fp8")

    @property
    def flops_per_second(self) -> float:
        """Operations per second of the experts' products."""
        return self.machine.tflops * 1e12 if self.cluster is None else self.cluster.device.tflops.of(self.dtype)


@dataclass(frozen=True)
class ReplicaLinks:
    """What of a replica stays the same from call to call: its places, and what bytes between them cost."""

    grid: Grid
    origins: np.ndarray
    """(ep, origins): ranks by place."""
    costs: ReplicationCosts

    @cached_property
    def nodes(self) -> np.ndarray:
        """Node of each place, (ep,) int64."""
        of_places: np.ndarray = nodes_of(self.grid)[self.origins[:, 0]]
        return of_places

    @cached_property
    def slowness(self) -> np.ndarray:
        """Time of a copy at each place over that of the rates, of the slowest of its ranks, (ep,)."""
        costs = self.costs
        speeds = np.array(costs.speeds or (costs.cluster.speeds if costs.cluster is not None else ()) or (1.0,))
        of_places: np.ndarray = (1 / speeds[self.origins % len(speeds)]).max(1)
        return of_places

    @cached_property
    def fair(self) -> np.ndarray:
        """Share of all copies that each place computes if all take equally long, (ep,)."""
        speed = 1 / self.slowness
        of_places: np.ndarray = speed / speed.sum()
        return of_places

    @cached_property
    def seconds_per_byte(self) -> np.ndarray:
        """From place to place, (ep, ep); nothing within one. On a cluster, of a message alone on its slowest link."""
        if self.costs.cluster is not None:
            alone: np.ndarray = self.row_links.max(2, initial=0.0)
            return alone
        return seconds_per_byte(self.costs.machine, self.nodes, self.costs.node_links)

    @cached_property
    def start_up(self) -> np.ndarray:
        """Seconds that a message from place to place needs whatever its size, (ep, ep); none within a place."""
        machine, node = self.costs.machine, self.nodes
        micro = np.where(node[:, None] == node[None, :], machine.intra_latency_us, machine.inter_latency_us)
        seconds: np.ndarray = micro * 1e-6 * (1 - np.eye(len(node)))
        return seconds

    @cached_property
    def row_links(self) -> np.ndarray:
        """Seconds that a byte of rows from place to place takes of each link, (ep, ep, links)."""
        return self._links(weights=False)

    @cached_property
    def weight_links(self) -> np.ndarray:
        """The same of a byte of weights; where places are single ranks both take the same way."""
        return self.row_links if self.origins.shape[1] == 1 else self._links(weights=True)

    @cached_property
    def parts(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """`row_links`, and `weight_links`, where they are not 0: pair of places (from times ep, plus to), link, seconds."""
        found = []
        for links in (self.row_links, self.weight_links):
            by_pair = links.reshape(-1, links.shape[2])
            pair, link = np.nonzero(by_pair)
            found.append((pair, link, by_pair[pair, link]))
        return found

    def _links(self, *, weights: bool) -> np.ndarray:
        """Without a cluster every place has a port out and one in."""
        if self.costs.cluster is not None:
            return links_of_places(self.costs.cluster, self.grid, self.places, weights=weights)
        ep, rate = len(self.origins), self.seconds_per_byte
        own = np.eye(ep)
        return np.concatenate([rate[:, :, None] * own[:, None], rate[:, :, None] * own[None]], axis=2)

    @cached_property
    def via(self) -> np.ndarray | None:
        """The place on a helper's node that gets the weights of each home for it, (home, helper); None where none does."""
        return relays_of(self.grid, self.places) if self.costs.relays else None

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by place, plain."""
        return tuple(map(tuple, self.origins.tolist()))


@dataclass(frozen=True)
class ReplicaLoad:
    """One replica's load by place in ep, and what moving a copy costs: what policies decide from."""

    load: CallLoad
    links: ReplicaLinks

    @property
    def origins(self) -> np.ndarray:
        """(ep, origins): ranks by place."""
        return self.links.origins

    @property
    def costs(self) -> ReplicationCosts:
        """Rates."""
        return self.links.costs

    @cached_property
    def copies(self) -> np.ndarray:
        """Copies that each place has for each expert, (ep, num_experts) int64."""
        found: np.ndarray = self.load.copies[self.origins].sum(1)
        return found

    @cached_property
    def seconds_per_copy(self) -> float:
        """Of products, forward and backward."""
        flops = 2 * self.load.dim * self.load.units * self.costs.matrices
        return flops * (3 if self.costs.backward else 1) / self.costs.flops_per_second

    @cached_property
    def row_bytes(self) -> int:
        """Of one copy, one way."""
        return self.load.dim * self.costs.element_bytes

    @cached_property
    def weight_bytes(self) -> int:
        """Of one shard of an expert, one way."""
        return self.load.units * self.load.dim * self.costs.matrices * self.costs.element_bytes

    @property
    def seconds_per_byte(self) -> np.ndarray:
        """See `ReplicaLinks`."""
        return self.links.seconds_per_byte

    @property
    def passes(self) -> int:
        """How often what is dispatched crosses a link: out and back, and again for gradients."""
        return 4 if self.costs.backward else 2

    def seconds(self, replicated: np.ndarray) -> float:
        """Return the modelled time under (ep, num_experts, ep) int64 copies of a place for an expert that another place
        computes."""
        home = self.load.home
        computed = replicated.copy()
        computed[:, np.arange(self.load.num_experts), home] += self.copies - replicated.sum(2)
        rows = computed.sum(1)
        return self.seconds_of(rows, self.sent(replicated.sum(0) > 0))

    def sent(self, helped: np.ndarray) -> np.ndarray:
        """Return how many experts' weights each place sends to each other one, (ep, ep) int64, where some places are replicated
        an expert, (num_experts, ep) bool."""
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
        """Return the modelled time, from copies of place i that place j computes, (ep, ep), and experts whose weights place i
        sends to place j, (ep, ep) as `sent` returns them."""
        return self.closed_form(self.busiest(rows.sum(0)), self.fullest(rows, 0), self.fullest(weights, 1))

    def busiest(self, computed: np.ndarray) -> float:
        """Return the copies of the place that takes longest, in copies of a rank that is as fast as the rates; (ep,) -> ()."""
        return float((computed * self.links.slowness).max())

    def limits(self, limit: float) -> np.ndarray:
        """Return the copies that each place may compute, `limit` times what it had if all took equally long, (ep,) int64."""
        found: np.ndarray = np.ceil(np.round(self.copies.sum() * self.links.fair * limit, 6)).astype(np.int64)
        return found

    def closed_form(self, computed: Seconds, rows: Seconds, weights: Seconds) -> Seconds:
        """Return the modelled time of calls, one after the other: products, rows, weights.

        Args:
            computed: copies at the busiest place, () or (calls,); see `busiest`.
            rows: seconds that a byte of every row takes of the fullest link, of the same shape.
            weights: the same of a byte of every expert's weights.
        """
        return self.compute_seconds(computed) + self.travel_seconds(rows) + self.fetch_seconds(weights)

    def compute_seconds(self, computed: Seconds) -> Seconds:
        """Return the seconds of products; see `closed_form`."""
        return computed * self.seconds_per_copy

    def travel_seconds(self, rows: Seconds) -> Seconds:
        """Return the seconds of rows on the fullest link, both ways; see `closed_form`."""
        return self.passes * self.row_bytes * rows

    def fetch_seconds(self, weights: Seconds) -> Seconds:
        """Return the seconds of weights, and of their gradients, on the fullest link; see `closed_form`."""
        return self.passes / 2 * self.weight_bytes * weights

    def fullest(self, moved: np.ndarray, kind: int) -> float:
        """Return the seconds that a byte each of what moves, (ep, ep), takes of the link where that is most.

        Args:
            moved: what place i sends to place j.
            kind: 0 for rows, 1 for weights.
        """
        if self.costs.cluster is None:
            spent = moved * self.seconds_per_byte
            return float(max(spent.sum(0).max(), spent.sum(1).max()))
        pair, link, seconds = self.links.parts[kind]
        return float(np.bincount(link, moved.reshape(-1)[pair] * seconds).max(initial=0.0))


def replica_links(load: CallLoad, costs: ReplicationCosts) -> list[ReplicaLinks]:
    """Return the links of every replica, for all calls on the mesh of this one."""
    return [ReplicaLinks(load.grid, origins, costs) for origins in load.replicas]


def replica_loads(load: CallLoad, costs: ReplicationCosts) -> list[ReplicaLoad]:
    """Return the load of every replica."""
    return [ReplicaLoad(load, links) for links in replica_links(load, costs)]
