"""The messages of one hop of an all-to-all, and their number, derived from classes of packets.

A packet is what one rank sends to another. It takes a path of legs, one in each hop (step) of the
all-to-all; packets that take the same leg travel as one message. Packets of a class go between
pairs of ranks whose numbers have equal digits in the same places (`symmetry.py`).

The paths come from the algorithms themselves (`program/all_to_all/`), which are asked for one
packet of each class. Whether other packets of the class take the same leg is checked, not assumed.

Whether all nodes play the same role in an all-to-all is checked too. For this check, the paths are
computed with ranks and nodes that can only be compared for equality. They have no number, no order,
no index. If a path is computed without any of these, it is the same for every two nodes, so a few
nodes stand for all of them. If the algorithm uses one of them, an error is raised, and every rank
is then simulated separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, cast

import numpy as np

from moesaic.planner.symmetry import Digits, GroupPlaces, Pairs, UnlikeError
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import PACKED, AbstractAllToAll, Hop, Leg, NodeMap
from moesaic.program.row_counts import HopRows
from moesaic.program.task import Lane, Task


@dataclass(frozen=True, eq=False)
class HopPaths:
    """The messages of a hop, independent of their bytes."""

    message: np.ndarray
    """(pairs,) int64, number of the message that carries the packets of each class of pairs; -1 if
    none does."""
    ends: np.ndarray
    """(n, 2) int64, source and target of each message."""
    count: np.ndarray
    """(n,) float64, multiplicity of each message."""

    def num_bytes(self, of_pairs: np.ndarray) -> np.ndarray:
        """Return the bytes of each message, (n,), from the bytes of each class of pairs."""
        sent = self.message >= 0
        return np.bincount(self.message[sent], of_pairs[sent], len(self.ends))


Route = Callable[[int, int], tuple[Leg, ...]]
"""Function of two ranks that returns the path of a packet between them, () for one rank."""


def route_of(link: str, digits: Digits, group: frozenset[int]) -> Route:
    """Return the paths of an all-to-all among ranks that differ in some digits; they are kept."""
    places = GroupPlaces(digits, group)
    algorithm = ALL_TO_ALLS[link]

    def path(source: int, target: int) -> tuple[Leg, ...]:
        """Return the legs of a packet."""
        if source == target:
            return ()
        return algorithm.path(places.switch_to_group_of(source), source, target)

    return cache(path)


def hop_paths(
    task: Task | HopRows, digits: Digits, route: Route, pairs: Pairs, classed: frozenset[int]
) -> HopPaths:
    """Return the messages of a hop. Packets that take the same leg form one message.

    Args:
        task: the hop.
        digits: of the mesh.
        route: of the all-to-all among the ranks that exchange packets.
        pairs: the classes of pairs that exchange packets.
        classed: digits of the group of which a class only says whether they are equal.
    """
    classed_digits = sorted(classed)

    def leg_of(source: int, target: int) -> Leg | None:
        """Return the leg that a packet takes in the hop; None if it takes none."""
        for leg in route(source, target):
            if leg.hop == task.hop:
                return leg
        return None

    # as in `HopPaths`
    ends: list[tuple[int, int]] = []
    count: list[float] = []
    message = np.full(len(pairs.source), -1, dtype=np.int64)
    number_of: dict[tuple[int, int], int] = {}  # by the ends of a message
    for pair, (source, target) in enumerate(zip(pairs.source.tolist(), pairs.target.tolist())):
        leg = leg_of(source, target)
        if leg is None:
            continue
        leg_to = partial(leg_of, source)
        leg_from = partial(leg_of, target=target)
        distinct = _num_messages(digits, classed_digits, source, target, leg=leg, leg_to=leg_to)
        sharers = _num_sharers(digits, classed_digits, source, target, leg=leg, leg_from=leg_from)
        # Each pair stands for `distinct` messages, and `sharers` pairs for the same ones. Of
        # classes whose packets share a message, the one that makes most messages counts.
        leg_ends = (leg.source, leg.target)
        if leg_ends not in number_of:
            number_of[leg_ends] = len(ends)
            ends.append(leg_ends)
            count.append(0.0)
        number = number_of[leg_ends]
        message[pair] = number
        count[number] = max(count[number], distinct / sharers)
    return HopPaths(message, np.array(ends, dtype=np.int64).reshape(-1, 2), np.array(count))


def _num_messages(
    digits: Digits,
    classed: list[int],
    source: int,
    target: int,
    leg: Leg,
    leg_to: Callable[[int], Leg | None],
) -> int:
    """Return the number of messages for the targets of a class: the product over the digits that
    change the leg.

    Args:
        digits: of the mesh.
        classed: digits of which the class only says whether source and target have the same.
        source: a rank that sends.
        target: the target that stands for its class.
        leg: the leg of the packet between them.
        leg_to: returns the leg of the packet from `source` to another target.
    """
    count = 1
    for digit in classed:
        stride = int(digits.strides[digit])
        base = int(digits.sizes[digit])
        # the digit of both ranks, which has `base` values
        source_value = source // stride % base
        target_value = target // stride % base
        if source_value == target_value or base == 2:
            continue  # the class has one value of this digit
        # if a target with a third value is reached by another leg, each value is by its own
        values = range(base)
        other_value = next(v for v in values if v not in (source_value, target_value))
        other_target = target + (other_value - target_value) * stride
        if leg_to(other_target) != leg:
            count *= base - 1  # all values but the source's
    return count


def _num_sharers(
    digits: Digits,
    classed: list[int],
    source: int,
    target: int,
    leg: Leg,
    leg_from: Callable[[int], Leg | None],
) -> int:
    """Return the number of sources whose packets for a target share a leg; arguments as of
    `_num_messages`, but `leg_from` returns the leg from another source to `target`."""
    # (distance from the source to another one, number of sources that it stands for)
    others = [(0, 1)]
    for digit in classed:
        stride = int(digits.strides[digit])
        base = int(digits.sizes[digit])
        source_value = source // stride % base
        target_value = target // stride % base
        # the source's value, the target's, and a third one that stands for all others
        count_of_value = {source_value: 1, target_value: 1}
        third = next((value for value in range(base) if value not in count_of_value), None)
        if third is not None:
            count_of_value[third] = base - len(count_of_value)
        # every source so far, with each of these values as its digit
        others = [
            (offset + (value - source_value) * stride, multiplicity * count)
            for offset, multiplicity in others
            for value, count in count_of_value.items()
        ]
    return sum(count for offset, count in others if leg_from(source + offset) == leg)


class _Comparable:
    """Can be compared for equality with others of its type, and used for nothing else."""

    def __init__(self, *key: object) -> None:
        self._key = key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            raise TypeError("compared with something else")
        return self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("taken as a number")

    def __str__(self) -> str:
        raise TypeError("taken as text")

    __repr__ = __str__


class _Node(_Comparable):
    """A node: its group of nodes, and its index in the group."""

    def __init__(self, group: int, place: int) -> None:
        super().__init__(group, place)
        self.group = group
        self.place = place


class _Rank(_Comparable):
    """A rank: its node, and its index on the node."""

    def __init__(self, node: _Node, local: int) -> None:
        super().__init__(node.group, node.place, local)
        self.node = node
        self.local = local


class _Number:
    """A list of nodes of which only the length is known."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class _AnyPlaces(NodeMap):
    """The places of ranks in any group in which all nodes look identical.

    Args:
        nodes: number of nodes.
        size: nodes in a group of neighbouring nodes.
    """

    def __init__(self, nodes: int, size: int) -> None:
        self.nodes = cast(Any, _Number(nodes))  # only their number may be asked for
        self._group_size = size
        """Nodes in a group of neighbouring nodes."""

    @property
    def is_even(self) -> bool:
        return True

    def node(self, rank: Any) -> Any:
        return _known(rank, _Rank).node

    def local(self, rank: Any) -> int:
        return int(_known(rank, _Rank).local)

    def rank(self, node: Any, local: int) -> Any:
        return _Rank(_known(node, _Node), local)

    def like(self, node: Any, other: Any, size: int) -> Any:
        """Return the node in the group of `node` with the place that `other` has in its own."""
        if size != self._group_size:
            raise TypeError("groups of another size than the link's")
        return _Node(_known(node, _Node).group, _known(other, _Node).place)


@lru_cache(maxsize=1024)
def check_regular(
    link: AbstractAllToAll, name: str, nodes: int, per_node: int, *, in_steps: bool = False
) -> None:
    """Raise UnlikeError unless a packet's path depends only on which nodes, and groups of nodes,
    are equal. What has been found regular is not checked again.

    Args:
        link: the all-to-all.
        name: its name, for the error.
        nodes: nodes on which a group of ranks lies.
        per_node: ranks of the group on each node.
        in_steps: only some pairs of ranks exchange packets in each movement. All nodes must then
            also play the same role, so no message may hold packets that have crossed nodes before.
    """
    size = link.nodes_per_group(nodes)
    places = _AnyPlaces(nodes, size)
    try:
        hops = link.hops(places)
        for target_node in _target_nodes(nodes, size):
            for source_local, target_local in itertools.product(range(per_node), repeat=2):
                source: Any = _Rank(_Node(0, 0), source_local)
                target: Any = _Rank(target_node, target_local)
                if source != target:
                    _check_legs(link, hops, nodes, link.path(places, source, target))
    except Exception as error:
        # A link that is truly broken raises again where every rank is simulated apart.
        raise _unlike_error(name) from error
    if in_steps:
        # hops whose packets later hops forward; PACKED, not the number of a hop, is the input
        hops_read = [hops[read] for hop in hops for read in hop.reads if read != PACKED]
        forwards_packets = any(hop.lane is Lane.INTER for hop in hops_read)
        if link.hops_by_node or forwards_packets:
            raise _unlike_error(f"{name}, step by step,")


def _target_nodes(nodes: int, size: int) -> list[_Node]:
    """Return one node of each class that a target's node can belong to, seen from the source's
    node: the source's group or another one, and the source's place in a group or another one.

    Args:
        nodes: number of nodes.
        size: nodes in a group.
    """
    groups = range(2 if nodes // size > 1 else 1)
    places = range(2 if size > 1 else 1)
    return [_Node(group, place) for group in groups for place in places]


def _check_legs(
    link: AbstractAllToAll, hops: tuple[Hop, ...], nodes: int, path: tuple[Leg, ...]
) -> None:
    """Refuse a path whose hops depend on the node in a way that classes of ranks cannot stand
    for."""
    for leg in path:
        _known(leg.source, _Rank)
        _known(leg.target, _Rank)
        if link.hops_by_node and isinstance(leg.hop, _Node):
            # the first `nodes` hops are of one destination node each, and must be equal; each later
            # one must read all of these
            are_equal = len(set(hops[:nodes])) == 1
            all_are_read = all(set(range(nodes)) <= set(hop.reads) for hop in hops[nodes:])
            if not (are_equal and all_are_read):
                raise TypeError("hops of nodes that differ")
        elif type(leg.hop) is not int:
            raise TypeError("a hop that depends on a node")


def _known(value: Any, kind: type[Any]) -> Any:
    """Return a rank or node that was made by these classes; raise TypeError for any other value."""
    if type(value) is not kind:
        raise TypeError(f"no {kind.__name__}")
    return value


def _unlike_error(name: str) -> UnlikeError:
    """Return the error that nodes differ in an all-to-all."""
    return UnlikeError(
        f"{name} sends packets along paths that differ between nodes",
        "an all-to-all in which all nodes do the same",
    )
