"""`Topology`: a cluster's links as a graph, and the load that messages put on them.

Every directed link has a number. `loads` routes messages and adds up, per link, the seconds for
which the link is busy: bytes over its rate, plus its start-up cost per message. A movement alone
takes the seconds of its slowest link (FasterMoE, PPoPP 2022, eq. 2: the largest traffic over
bandwidth), plus the latency of its longest path.

A folded topology has only the links of one block of ranks: a node, or all nodes behind a switch. It
serves workloads in which all blocks do the same. A message then counts at the places of its two
ranks within their blocks, and a link above the block carries the messages of all blocks below it.

An entry is a number of equal messages from one rank to another (`loads`). A level is one `Link` of
the description, of which there are several links: unit u is the one behind the u-th run of devices.
"""

from __future__ import annotations

import math
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
        """The demand for each link, by its number."""
        parts = self.seconds / (self.longest or 1.0)  # 1: no link is in use
        demands = map(Use, parts.tolist(), self.messages.tolist())
        return dict(zip(self.links.tolist(), demands))


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

    def add(
        self,
        entries: np.ndarray,
        links: np.ndarray,
        seconds: np.ndarray,
        messages: np.ndarray,
        *,
        times: float = 1,
    ) -> None:
        """Add n entries to their links.

        Args:
            entries: which of the route's entries they are, (entries,) bool or (n,) numbers.
            links: (n,) number of each entry's link; may repeat.
            seconds: (n,) seconds for which each entry uses its link.
            messages: (n,) messages of each entry.
            times: how often they are added, once for each block whose messages the links carry.
        """
        np.add.at(self.seconds, links, seconds * times)
        np.add.at(self.messages, links, messages * times)
        self.slowest[entries] = np.maximum(self.slowest[entries], seconds)


def _users(links: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the number of devices that use the link of each entry, (n,).

    Args:
        links: (n,) number of each entry's link.
        source, target: (n,) the devices that send and receive.
    """
    used, index_of_entry = np.unique(links, return_inverse=True)
    num_users = []
    for link in used:
        on_link = links == link
        num_users.append(len({*source[on_link], *target[on_link]}))
    return np.array(num_users)[index_of_entry]


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
        """Nodes of a block."""
        self._devices = self._nodes * spec.devices_per_node
        """Devices of a block."""
        self.names: list[str] = []
        """Name of each link, by number."""
        self._seconds_per_byte: list[float] = []
        """Of each link at its full rate, by number; 0 for ports."""
        self._inbound: list[int] = []
        """Numbers of the links into units."""
        self._levels: list[tuple[Link, int]] = []
        """Each level, and the number of its first link."""
        self._number_tree()
        self._peers = self.num_links
        """Number of the first direct link between two devices."""
        self._number_peers()
        self._ports = self.num_links
        """Number of the first port, if ranks have ports."""
        if spec.host.messages == "in_turn":
            self._number_ports()
        self.seconds_per_byte = np.array(self._seconds_per_byte)
        self._all_reduces: dict[tuple[float, int, int], Load] = {}
        """Results of `all_reduce_load`, by its arguments."""
        self.arrives = np.isin(np.arange(self.num_links), self._inbound)
        """(links,) bool: whether messages arrive over the link, after leaving over others."""

    def _number_tree(self) -> None:
        """Number the links of the tree: of each unit the link out and then the link in, or the one
        shared medium."""
        for link in self.spec.links:
            self._levels.append((link, self.num_links))
            num_units = self._num_units(link)
            for unit in range(num_units):
                suffix = f" {unit}" if num_units > 1 else ""
                names = [f"{link.name}{suffix}"]
                if not link.shared:
                    names = [f"{link.name} out{suffix}", f"{link.name} in{suffix}"]
                    # the second of these two names
                    self._inbound.append(self.num_links + 1)
                self.names += names
                self._seconds_per_byte += [1 / self._rate(link, unit)] * len(names)

    def _number_peers(self) -> None:
        """Number the direct links between two devices, both directions of each, node by node."""
        for _ in range(self._nodes):
            for peer in self.spec.peers:
                first, second = peer.devices
                self.names += [f"peer {first}-{second}", f"peer {second}-{first}"]
                self._seconds_per_byte += [8 / (peer.gbps * 1e9)] * 2  # of both directions

    def _number_ports(self) -> None:
        """Number the ports of the ranks, in the order of SENDS, RECEIVES and INSIDE."""
        for rank in range(self.block):
            for suffix in ("", " inside its node"):
                self.names += [f"sends of rank {rank}{suffix}", f"receives of rank {rank}{suffix}"]
                self._seconds_per_byte += [0.0, 0.0]

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
        has_ports = self._ports < self.num_links
        if has_ports:
            self._add_ports(route, source, target, messages)
        links = np.flatnonzero(route.seconds)
        return Load(
            links,
            seconds=route.seconds[links],
            messages=route.messages[links],
            latency=float(route.latency.max()),
        )

    def _add_ports(
        self, route: Route, source: np.ndarray, target: np.ndarray, messages: np.ndarray
    ) -> None:
        """Add messages to the ports of the ranks that send and receive them, each for as long as it
        occupies its slowest link; arguments as of `loads`."""
        source_nodes = self.devices_of(source) // self.spec.devices_per_node
        target_nodes = self.devices_of(target) // self.spec.devices_per_node
        stays_inside = not (source_nodes != target_nodes).any()
        first_port = self._ports + (INSIDE if stays_inside else 0)
        link_seconds = route.seconds
        link_messages = route.messages
        for side, ranks in ((SENDS, source), (RECEIVES, target)):
            ports = first_port + PORTS_PER_RANK * (ranks % self.block) + side
            link_seconds += np.bincount(ports, weights=route.slowest, minlength=self.num_links)
            link_messages += np.bincount(ports, weights=messages, minlength=self.num_links)

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
        """Return the load of `all_reduce_load`.

        In a ring of n ranks each sends 2 (n - 1) messages of 1 / n of its bytes to the next one.
        Rings between nodes sum what those inside nodes have scattered.
        """
        per_node = self.ranks_per_node
        inside = min(ranks, max(1, per_node // stride))  # ranks of a group on a node
        nodes = ranks // inside
        devices = np.arange(per_node)
        targets = []
        sent_bytes = []
        messages = []
        if inside > 1:
            # the next rank of the group on the node, and the first one after the last; `reach`
            # consecutive ranks have the members of `stride` groups
            reach = stride * inside
            targets.append(devices // reach * reach + (devices + stride) % reach)
            sent_bytes.append(2 * (inside - 1) / inside * num_bytes)
            messages.append(2.0 * (inside - 1))
        if nodes > 1:
            # the rank of the group in the same place of its next node
            targets.append(devices + max(per_node, stride))
            sent_bytes.append(2 * (nodes - 1) / nodes * num_bytes / inside)
            messages.append(2.0 * (nodes - 1))
        return self.loads(
            np.tile(devices, len(targets)),
            np.concatenate(targets),
            np.repeat(sent_bytes, per_node),
            np.repeat(messages, per_node),
        )

    def _route(
        self, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, messages: np.ndarray
    ) -> Route:
        """Return what messages do to all links: those between two devices with a direct link take
        it, the others the tree; arguments as of `loads`."""
        devices = (self.devices_of(source), self.devices_of(target))
        moved = Moved(devices, num_bytes, messages, self.spec.devices_per_node)
        route = Route(
            seconds=np.zeros(self.num_links),
            messages=np.zeros(self.num_links),
            latency=np.zeros(len(source)),
            slowest=np.zeros(len(source)),
        )
        on_tree = np.ones(len(source), dtype=bool)
        for number, peer in enumerate(self.spec.peers):
            first, second = peer.devices
            for direction, ends in enumerate(((first, second), (second, first))):
                on_peer = moved.between(*ends)
                self._add_peer(route, moved, on_peer, peer, 2 * number + direction)
                on_tree &= ~on_peer
        for link, first_number in self._levels:
            used = on_tree & _messages_on(link, moved)
            if used.any():
                self._add_level(route, moved, used, link, first_number)
        return route

    def _add_peer(
        self, route: Route, moved: Moved, on_peer: np.ndarray, peer: Peer, number: int
    ) -> None:
        """Add the messages that take a direct link in one direction.

        Args:
            route: is changed.
            moved: all messages.
            on_peer: (n,) bool, which of them take the link.
            peer: the link.
            number: of the direction, among those of all direct links of a node.
        """
        num_bytes = moved.num_bytes[on_peer]
        messages = moved.messages[on_peer]
        seconds = num_bytes * 8e-9 / peer.gbps + messages * peer.message_us * 1e-6
        source_nodes, _ = moved.nodes
        node = source_nodes[on_peer] % self._nodes  # within the block
        directions_per_node = 2 * len(self.spec.peers)
        links = self._peers + node * directions_per_node + number
        route.add(on_peer, links, seconds, messages)
        route.latency[on_peer] += peer.latency_us * 1e-6

    def _add_level(
        self, route: Route, moved: Moved, used: np.ndarray, link: Link, first: int
    ) -> None:
        """Add the messages that use a level of the tree.

        Args:
            route: is changed.
            moved: all messages.
            used: (n,) bool, which of them use the level.
            link: the level.
            first: number of its first link.
        """
        num_blocks = self._num_blocks(link)
        devices = [ends[used] for ends in moved.devices]
        num_bytes = moved.num_bytes[used]
        messages = moved.messages[used]
        # out of the senders' units (side 0), and into the receivers' (side 1); a shared medium is
        # used once. The links of a unit have consecutive numbers, one for each side.
        sides = 1 if link.shared else 2
        for side in range(sides):
            links = first + self._unit_of(link, devices[side]) * sides + side
            byte_seconds = self.seconds_per_byte[links]
            # smaller movements, and fewer or more devices, reach a share of the rate
            if link.sizes:
                link_bytes = np.bincount(links, weights=num_bytes * num_blocks)
                share = np.interp(np.log(link_bytes[links]), np.log(link.sizes), link.size_share)
                byte_seconds = byte_seconds / share
            if link.users:
                num_users = _users(links, *devices)
                byte_seconds = byte_seconds / np.interp(num_users, link.users, link.users_share)
            byte_seconds, message_seconds = _slowed_by_connections(
                link, links, byte_seconds, messages * num_blocks
            )
            seconds = num_bytes * byte_seconds + messages * message_seconds
            route.add(used, links, seconds, messages, times=num_blocks)
        route.latency[used] += link.latency_us * 1e-6

    def devices_of(self, ranks: np.ndarray) -> np.ndarray:
        """Return the device of the cluster that each rank uses: ranks of a node use its first
        devices."""
        node = ranks // self.ranks_per_node
        place = ranks % self.ranks_per_node
        return node * self.spec.devices_per_node + place

    def _unit_of(self, link: Link, devices: np.ndarray) -> np.ndarray:
        """Return the unit of a level that each device is behind, (n,)."""
        if self._folded:
            devices = devices % self._devices  # its place in the block
        units: np.ndarray = devices // link.devices
        return units

    def _num_units(self, link: Link) -> int:
        """Return how many links in each direction a level has."""
        devices = self._devices if self._folded else self.spec.world
        return math.ceil(devices / link.devices)

    def _num_blocks(self, link: Link) -> int:
        """Return the number of blocks whose messages one of these links carries."""
        if not self._folded:
            return 1
        # as many as are behind the link and in use, or the one whose part is behind it
        return max(1, min(link.devices // self._devices, self.world // self.block))

    def _rate(self, link: Link, unit: int) -> float:
        """Return the bytes per second of a unit of a level; in a folded topology those of the
        slowest link that it stands for."""
        nodes = math.ceil(self.world / self.ranks_per_node)
        share = link.fabric_share(nodes)
        if not self._folded or len(link.gbps) == 1:
            return link.rate(unit) * share
        # the links in the same place of all blocks
        return min(link.gbps[unit :: self._num_units(link)]) * 1e9 / 8 * share


def _messages_on(link: Link, moved: Moved) -> np.ndarray:
    """Return which messages use a level, (n,) bool.

    These are the messages between different runs of `link.devices` devices, or on a shared medium
    those within a run; if the link carries only messages inside nodes, or only those between nodes,
    only such.
    """
    source, target = moved.devices
    used: np.ndarray = (source // link.devices != target // link.devices) != link.shared
    if link.carries != "all":
        used = used & (moved.inside == (link.carries == "inside"))
    return used


def _slowed_by_connections(
    link: Link, links: np.ndarray, byte_seconds: np.ndarray, messages: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds per byte and per message, (n,) both, given the connections that are open
    on each link.

    A link's rate is at most its connections times `connection_gbps`. Each open connection adds
    `connection_us` to every message.

    Args:
        link: the level.
        links: (n,) number of each entry's link; may repeat.
        byte_seconds: (n,) seconds per byte at the link's rate.
        messages: (n,) messages of each entry, each on a connection of its own.
    """
    message_seconds = np.full(len(links), link.message_us * 1e-6)
    if not link.connection_us and not link.connection_gbps:
        return byte_seconds, message_seconds
    # the messages on the link of each entry, at least one
    _, link_of_entry = np.unique(links, return_inverse=True)
    messages_by_link = np.bincount(link_of_entry, weights=messages)
    connections = np.maximum(messages_by_link, 1)[link_of_entry]
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
