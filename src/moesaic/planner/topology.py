"""`Topology`: a cluster's links as a graph, and the load that messages put on them.

Every directed link has a number. `loads` routes messages and adds up, per link, the seconds for
which the link is busy: bytes over its rate, plus its start-up cost per message. A movement alone
takes the seconds of its slowest link (FasterMoE, PPoPP 2022, eq. 2: the largest traffic over
bandwidth), plus the latency of its longest path.

A folded topology has only the links of one block of ranks: a node, or all nodes behind a switch. It
serves workloads in which all blocks do the same. A message then counts at the places of its two
ranks within their blocks, and a link above the block carries the messages of all blocks below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from moesaic.errors import InputError
from moesaic.planner.cluster import ClusterSpec, Link, Peer

PORTS_PER_RANK = 4
"""Ports of a rank that sends its messages one after the other: it sends and receives, and has
separate ports for movements of which no message leaves its node."""
SENDS = 0
RECEIVES = 1
INSIDE = 2
"""Place of a port among those of its rank: SENDS or RECEIVES, plus INSIDE if it is of movements
inside nodes."""


class Use(NamedTuple):
    """A movement's demand for a link."""

    part: float
    """Part of the link that the movement uses at speed 1, at which its slowest link is full."""
    messages: float
    """Messages that share that part."""


@dataclass(frozen=True)
class Load:
    """The load of a set of messages on the links."""

    links: np.ndarray
    """(n,) numbers of the links in use, ascending."""
    seconds: np.ndarray
    """(n,) seconds for which each link is busy at its full rate."""
    messages: np.ndarray
    """(n,) messages on each link."""
    latency: float
    """Seconds of latency on the longest path, paid once."""

    @cached_property
    def longest(self) -> float:
        """Seconds of the slowest link."""
        return float(self.seconds.max(initial=0.0))

    @property
    def alone(self) -> float:
        """Seconds that the messages take if nothing else uses the links."""
        return self.latency + self.longest

    @cached_property
    def use(self) -> dict[int, Use]:
        """The demand for each link."""
        parts = (self.seconds / (self.longest or 1.0)).tolist()
        return dict(zip(self.links.tolist(), map(Use, parts, self.messages.tolist())))


@dataclass(frozen=True)
class Moved:
    """Messages between devices; the entries of all arrays are those of `Topology.loads`."""

    devices: tuple[np.ndarray, np.ndarray]
    """The devices that send, and those that receive."""
    num_bytes: np.ndarray
    messages: np.ndarray
    devices_per_node: int

    @cached_property
    def nodes(self) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that send, and those that receive."""
        source, target = self.devices
        return source // self.devices_per_node, target // self.devices_per_node

    @cached_property
    def inside(self) -> np.ndarray:
        """Whether messages stay inside a node."""
        return self.nodes[0] == self.nodes[1]

    def between(self, first: int, second: int) -> np.ndarray:
        """Return whether messages go from the first to the second device of one node."""
        source, target = (each % self.devices_per_node for each in self.devices)
        return self.inside & (source == first) & (target == second)


@dataclass(frozen=True)
class Route:
    """What messages do to links, summed up link by link."""

    seconds: np.ndarray
    """(links,) seconds for which a link is used."""
    messages: np.ndarray
    """(links,) messages on a link."""
    latency: np.ndarray
    """(entries,) latency of an entry's path."""
    slowest: np.ndarray
    """(entries,) seconds of an entry's slowest link."""

    @classmethod
    def of(cls, num_links: int, num_entries: int) -> Route:
        """Return the route of no messages."""
        links = (np.zeros(num_links), np.zeros(num_links))
        return cls(*links, np.zeros(num_entries), np.zeros(num_entries))

    def add(
        self,
        entries: np.ndarray,
        links: np.ndarray,
        seconds: np.ndarray,
        messages: np.ndarray,
        *,
        times: float = 1,
    ) -> None:
        """Add entries to their links, `times` over; the other arrays have one number for each."""
        np.add.at(self.seconds, links, seconds * times)
        np.add.at(self.messages, links, messages * times)
        self.slowest[entries] = np.maximum(self.slowest[entries], seconds)


def _users(links: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the number of devices that use the link of each entry."""
    units, inverse = np.unique(links, return_inverse=True)
    counts = [len({*source[links == unit], *target[links == unit]}) for unit in units]
    return np.array(counts)[inverse]


class Topology:
    """The links of a cluster, and the device of each rank.

    Args:
        spec: the cluster.
        world: number of ranks in use.
        ranks_per_node: ranks on each node, which use its first devices; None: all ranks are on one
            node.
        block: keep only the links of one block of this many consecutive ranks (whole nodes); None
            keeps all links.

    Raises:
        InputError: if the ranks do not fit the cluster.
    """

    def __init__(
        self, spec: ClusterSpec, world: int, ranks_per_node: int | None, *, block: int | None = None
    ) -> None:
        self.spec = spec
        self.world = world
        self.ranks_per_node = check_fit(spec, world, ranks_per_node)
        self.block = world if block is None else block
        assert self.block % self.ranks_per_node == 0, "a block is whole nodes"
        self._folded = block is not None
        self._nodes = self.block // self.ranks_per_node
        self._devices = self._nodes * spec.devices_per_node
        self.names: list[str] = []
        """Name of each link, by number."""
        seconds_per_byte: list[float] = []
        inbound: set[int] = set()
        self._levels: list[tuple[Link, int]] = []
        for link in spec.links:
            self._levels.append((link, len(self.names)))
            for unit in range(self._num_units(link)):
                rate = self._rate(link, unit)
                inbound |= set() if link.shared else {len(self.names) + 1}
                for name in (
                    (link.name,) if link.shared else (f"{link.name} out", f"{link.name} in")
                ):
                    self.names.append(f"{name} {unit}" if self._num_units(link) > 1 else name)
                    seconds_per_byte.append(1 / rate)
        self._peers = len(self.names)
        for _ in range(self._nodes):
            for peer in spec.peers:
                self.names += [f"peer {a}-{b}" for a, b in (peer.devices, peer.devices[::-1])]
                seconds_per_byte += [8 / (peer.gbps * 1e9)] * 2
        self._ports = len(self.names)
        if spec.host.messages == "in_turn":
            # The order of these names is that of SENDS, RECEIVES and INSIDE.
            for rank in range(self.block):
                for suffix in ("", " inside its node"):
                    self.names += [
                        f"sends of rank {rank}{suffix}",
                        f"receives of rank {rank}{suffix}",
                    ]
                    seconds_per_byte += [0.0, 0.0]
        self.seconds_per_byte = np.array(seconds_per_byte)
        self._all_reduces: dict[tuple[float, int, int], Load] = {}
        self.arrives = np.isin(np.arange(len(self.names)), list(inbound))
        """(links,) bool: whether messages arrive over the link, after leaving over others."""

    @property
    def num_links(self) -> int:
        """Number of directed links, including the ports of ranks if a rank sends its messages one
        after the other."""
        return len(self.names)

    def loads(
        self, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, messages: np.ndarray
    ) -> Load:
        """Return the load of messages on the links.

        Args:
            source: (n,) ranks.
            target: (n,) ranks, each different from its source.
            num_bytes: (n,) bytes of all messages of an entry together.
            messages: (n,) number of messages that an entry stands for; may be fractional.
        """
        if not len(source):
            return Load(
                np.zeros(0, dtype=np.int64), seconds=np.zeros(0), messages=np.zeros(0), latency=0.0
            )
        route = self._route(source, target, num_bytes, messages)
        seconds = route.seconds
        on_link = route.messages
        if self._ports < len(self.names):
            source_nodes, target_nodes = (
                self.devices_of(ends) // self.spec.devices_per_node for ends in (source, target)
            )
            stays_inside = not (source_nodes != target_nodes).any()
            first_port = self._ports + (INSIDE if stays_inside else 0)
            for side, ends in ((SENDS, source), (RECEIVES, target)):
                ports = first_port + PORTS_PER_RANK * (ends % self.block) + side
                seconds += np.bincount(ports, weights=route.slowest, minlength=len(seconds))
                on_link += np.bincount(ports, weights=messages, minlength=len(seconds))
        links = np.flatnonzero(seconds)
        return Load(
            links,
            seconds=seconds[links],
            messages=on_link[links],
            latency=float(route.latency.max()),
        )

    def all_reduce_seconds(self, num_bytes: float, stride: int, ranks: int) -> float:
        """Return the seconds of the all-reduces of `all_reduce_load`; 0 for a single rank."""
        if ranks == 1 or num_bytes == 0:
            return 0.0
        return self.all_reduce_load(num_bytes, stride, ranks).alone

    def all_reduce_load(self, num_bytes: float, stride: int, ranks: int) -> Load:
        """Return the load of an all-reduce in every group of ranks that are `stride` apart, all
        groups at once.

        It consists of a reduce-scatter inside nodes, an all-reduce between ranks of equal place,
        and an all-gather inside nodes, all three overlapping.

        Args:
            num_bytes: bytes of one rank's gradients.
            stride: distance from one rank of a group to the next.
            ranks: ranks of a group, at least two.
        """
        key = (num_bytes, stride, ranks)
        if key not in self._all_reduces:
            self._all_reduces[key] = self._load_of_rings(num_bytes, stride, ranks)
        return self._all_reduces[key]

    def _load_of_rings(self, num_bytes: float, stride: int, ranks: int) -> Load:
        """Return the load of `all_reduce_load`."""
        per_node = self.ranks_per_node
        inside = min(ranks, max(1, per_node // stride))
        nodes = ranks // inside
        devices = np.arange(per_node)
        mates = devices // (stride * inside) * (stride * inside) + (devices + stride) % (
            stride * inside
        )
        rings = [
            (target, 2 * (count - 1) / count * num_bytes / parts, 2.0 * (count - 1))
            for target, count, parts in (
                (mates, inside, 1),
                (devices + max(per_node, stride), nodes, inside),
            )
            if count > 1
        ]
        targets, sent, messages = zip(*rings)
        return self.loads(
            np.tile(devices, len(rings)),
            np.concatenate(targets),
            np.repeat(sent, per_node),
            np.repeat(messages, per_node),
        )

    def _route(
        self, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, messages: np.ndarray
    ) -> Route:
        """Return what messages do to all links: those with a link of their own take it, the others
        the tree."""
        devices = (self.devices_of(source), self.devices_of(target))
        moved = Moved(devices, num_bytes, messages, self.spec.devices_per_node)
        route = Route.of(len(self.names), len(source))
        on_tree = np.ones(len(source), dtype=bool)
        for number, peer in enumerate(self.spec.peers):
            for direction, ends in enumerate((peer.devices, peer.devices[::-1])):
                on_peer = moved.between(*ends)
                self._add_peer(route, moved, on_peer, peer, 2 * number + direction)
                on_tree &= ~on_peer
        for link, first in self._levels:
            used = on_tree & self._messages_on(link, *devices, moved.inside)
            if used.any():
                self._add_level(route, moved, used, link, first)
        return route

    def _add_peer(
        self, route: Route, moved: Moved, on_peer: np.ndarray, peer: Peer, number: int
    ) -> None:
        """Add the messages that take the own link of two devices; `number` is its place in a
        node."""
        num_bytes = moved.num_bytes[on_peer]
        messages = moved.messages[on_peer]
        seconds = num_bytes * 8e-9 / peer.gbps + messages * peer.message_us * 1e-6
        node = moved.nodes[0][on_peer] % self._nodes
        links = self._peers + node * 2 * len(self.spec.peers) + number
        route.add(on_peer, links, seconds, messages)
        route.latency[on_peer] += peer.latency_us * 1e-6

    def _add_level(
        self, route: Route, moved: Moved, used: np.ndarray, link: Link, first: int
    ) -> None:
        """Add the messages that use a level of the tree, whose links are numbered from `first`."""
        num_blocks = self._num_blocks(link)
        devices = [each[used] for each in moved.devices]
        num_bytes = moved.num_bytes[used]
        messages = moved.messages[used]
        sides = 1 if link.shared else 2
        for side in range(sides):
            at = first + self._unit_of(link, devices[side]) * sides + side
            byte_seconds = self.seconds_per_byte[at]
            if link.sizes:
                link_bytes = np.bincount(at, weights=num_bytes * num_blocks)
                share = np.interp(np.log(link_bytes[at]), np.log(link.sizes), link.size_share)
                byte_seconds = byte_seconds / share
            if link.users:
                num_users = _users(at, *devices)
                byte_seconds = byte_seconds / np.interp(num_users, link.users, link.users_share)
            byte_seconds, message_seconds = _slowed_by_connections(
                link, at, byte_seconds, messages * num_blocks
            )
            seconds = num_bytes * byte_seconds + messages * message_seconds
            route.add(used, at, seconds, messages, times=num_blocks)
        route.latency[used] += link.latency_us * 1e-6

    def devices_of(self, ranks: np.ndarray) -> np.ndarray:
        """Return the device of the cluster that each rank uses."""
        return (
            ranks // self.ranks_per_node * self.spec.devices_per_node + ranks % self.ranks_per_node
        )

    def _messages_on(
        self, link: Link, source_devices: np.ndarray, target_devices: np.ndarray, inside: np.ndarray
    ) -> np.ndarray:
        """Return which messages use a level, (n,) bool.

        These are the messages between different runs of `link.devices` devices, or on a shared
        medium those within a run; if the link carries only messages inside nodes, or only those
        between nodes, only such.

        Args:
            link: the level.
            source_devices: (n,) the devices that send.
            target_devices: (n,) the devices that receive.
            inside: (n,) whether messages stay inside a node.
        """
        differ = source_devices // link.devices != target_devices // link.devices
        used = ~differ if link.shared else differ
        if link.carries == "inside":
            used = used & inside
        if link.carries == "outside":
            used = used & ~inside
        return used

    def _unit_of(self, link: Link, devices: np.ndarray) -> np.ndarray:
        """Return the number of the level's link that each device is behind."""
        units: np.ndarray = (
            devices % self._devices // link.devices if self._folded else devices // link.devices
        )
        return units

    def _num_units(self, link: Link) -> int:
        return -(-(self._devices if self._folded else self.spec.world) // link.devices)

    def _num_blocks(self, link: Link) -> int:
        """Return the number of blocks whose messages one of these links carries."""
        if not self._folded:
            return 1
        return max(1, min(link.devices // self._devices, self.world // self.block))

    def _rate(self, link: Link, unit: int) -> float:
        share = link.fabric_share(-(-self.world // self.ranks_per_node))
        if not self._folded or len(link.gbps) == 1:
            return link.rate(unit) * share
        return min(link.gbps[unit :: self._num_units(link)]) * 1e9 / 8 * share


def _slowed_by_connections(
    link: Link, at: np.ndarray, byte_seconds: np.ndarray, messages: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds per byte and per message, (n,) both, given the connections that are open
    on each link.

    A link's rate is at most its connections times `connection_gbps`. Each open connection adds
    `connection_us` to every message.

    Args:
        link: the level.
        at: (n,) number of each entry's link; may repeat.
        byte_seconds: (n,) seconds per byte at the link's rate.
        messages: (n,) messages of each entry, each on a connection of its own.
    """
    message_seconds = np.full(len(at), link.message_us * 1e-6)
    if not link.connection_us and not link.connection_gbps:
        return byte_seconds, message_seconds
    _, inverse = np.unique(at, return_inverse=True)
    connections = np.maximum(np.bincount(inverse, weights=messages), 1)[inverse]
    if link.connection_gbps:
        byte_seconds = np.maximum(byte_seconds, 8e-9 / (connections * link.connection_gbps))
    return byte_seconds, message_seconds + connections * link.connection_us * 1e-6


@lru_cache(maxsize=64)
def one_node(spec: ClusterSpec, world: int, ranks_per_node: int | None) -> Topology:
    """Return the links of one node, which stands for all nodes."""
    return Topology(spec, world, ranks_per_node, block=ranks_per_node or world)


def check_fit(spec: ClusterSpec, world: int, ranks_per_node: int | None) -> int:
    """Return the number of ranks per node, after checking that a mesh fits a cluster.

    Raises:
        InputError: if it does not fit.
    """
    per_node = world if ranks_per_node is None else ranks_per_node
    if per_node > spec.devices_per_node:
        raise InputError(
            f"mesh.ranks_per_node={per_node} does not fit cluster {spec.name}, whose nodes have "
            f"{spec.devices_per_node} devices: set ranks_per_node to at most "
            f"{spec.devices_per_node}"
        )
    if world // per_node > spec.nodes:
        raise InputError(
            f"a mesh of {world} ranks, {per_node} per node, does not fit the {spec.nodes} nodes "
            f"of cluster {spec.name}: use at most {spec.nodes * per_node} ranks, or a cluster of "
            f"{world // per_node} nodes"
        )
    return per_node
