"""The messages of one hop of an all-to-all, from classes of packets: which packets travel together, how many such messages.

The paths are the algorithms' own (`program/all_to_all/`), asked for one packet of each class. Whether another packet of
the class takes the same leg is asked too, never assumed.

Whether all nodes play the same role in an all-to-all is derived from its paths too, never believed.

For that the paths are asked for with ranks and nodes that can be told equal or different, and nothing else: they have no
number, no order, no place in a list. A path that comes out without a look at any of these is the same for every two nodes, so
a few nodes stand for all of them. One that looks raises, and every rank is then simulated apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from moesaic.cost.symmetry import Digits, GroupPlaces, Pairs, UnlikeError
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import PACKED, AbstractAllToAll, Hop, Leg, NodeMap
from moesaic.program.task import Lane, Task


@dataclass(frozen=True, eq=False)
class HopPaths:
    """The messages of a hop, whatever their bytes."""

    message: np.ndarray
    """(pairs,) int64, the number of the message that carries the packets of each class of pairs; -1 where none does."""
    ends: np.ndarray
    """(n, 2) int64, source and target of each message."""
    count: np.ndarray
    """(n,) float64, how many such messages there are."""

    def num_bytes(self, of_pairs: np.ndarray) -> np.ndarray:
        """Return the bytes of each message, (n,), from those of each class of pairs."""
        sent = self.message >= 0
        return np.bincount(self.message[sent], of_pairs[sent], len(self.ends))


def hop_paths(task: Task, digits: Digits, group: frozenset[int], pairs: Pairs, classed: frozenset[int]) -> HopPaths:
    """Return the messages of a hop: packets that take one leg together are one.

    Args:
        task: the hop.
        digits: of the mesh.
        group: digits in which the ranks differ among which packets move.
        pairs: the classes of pairs that exchange packets.
        classed: of the group, the digits of which a class says only whether they are equal.
    """
    places, link = GroupPlaces(digits, group), ALL_TO_ALLS[task.link]
    upper = sorted(classed)

    def leg_of(source: int, target: int) -> Leg | None:
        path = link.path(places.of(source), source, target) if source != target else ()
        return next((leg for leg in path if leg.hop == task.hop), None)

    number: dict[tuple[int, int], int] = {}
    count: list[float] = []
    message = np.full(len(pairs.source), -1, dtype=np.int64)
    for pair, (source, target) in enumerate(zip(pairs.source.tolist(), pairs.target.tolist())):
        leg = leg_of(source, target)
        if leg is None:
            continue
        distinct = _distinct(digits, upper, source, target, leg, partial(leg_of, source))
        messages = distinct / _sharers(digits, upper, source, target, leg, partial(leg_of, target=target))
        at = message[pair] = number.setdefault((leg.source, leg.target), len(number))
        if at == len(count):
            count.append(0.0)
        count[at] = max(count[at], messages)
    return HopPaths(message, np.array(list(number), dtype=np.int64).reshape(-1, 2), np.array(count))


def _distinct(
    digits: Digits, upper: list[int], source: int, target: int, leg: Leg, leg_to: Callable[[int], Leg | None]
) -> int:
    """Return how many messages there are for the targets of a class: the product of the digits that change the leg."""
    count = 1
    for digit in upper:
        stride, base = int(digits.strides[digit]), int(digits.sizes[digit])
        mine, theirs = source // stride % base, target // stride % base
        if mine != theirs and base > 2:
            third = next(value for value in range(base) if value not in (mine, theirs))
            if leg_to(target + (third - theirs) * stride) != leg:
                count *= base - 1
    return count


def _sharers(
    digits: Digits, upper: list[int], source: int, target: int, leg: Leg, leg_from: Callable[[int], Leg | None]
) -> int:
    """Return from how many nodes packets for a target come together in a leg."""
    others = [(0, 1)]
    for digit in upper:
        stride, base = int(digits.strides[digit]), int(digits.sizes[digit])
        mine, theirs = source // stride % base, target // stride % base
        values = {mine: 1, theirs: 1}
        third = next((value for value in range(base) if value not in values), None)
        if third is not None:
            values[third] = base - len(values)
        others = [(moved + (v - mine) * stride, n * count) for moved, n in others for v, count in values.items()]
    return sum(count for moved, count in others if leg_from(source + moved) == leg)


class _Comparable:
    """What can be compared with others of its kind, and not be used otherwise."""

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
    """A node: its group of nodes, and which one of the group."""

    def __init__(self, group: int, place: int) -> None:
        super().__init__(group, place)
        self.group, self.place = group, place


class _Rank(_Comparable):
    """A rank: its node, and its place there."""

    def __init__(self, node: _Node, local: int) -> None:
        super().__init__(node.group, node.place, local)
        self.node, self.local = node, local


class _Number:
    """A list of nodes of which only the length is known."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class _AnyPlaces(NodeMap):
    """Where the ranks of any group stand whose nodes all look alike.

    Args:
        nodes: how many there are.
        size: of a group of neighbouring nodes.
    """

    def __init__(self, nodes: int, size: int) -> None:
        self.nodes = cast(Any, _Number(nodes))
        self._size = size

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
        if size != self._size:
            raise TypeError("groups of another size than the link's")
        return _Node(_known(node, _Node).group, _known(other, _Node).place)


def check_regular(link: AbstractAllToAll, name: str, nodes: int, per_node: int, *, in_steps: bool = False) -> None:
    """Raise UnlikeError unless what a packet does depends only on which nodes, and groups of nodes, are equal.

    Args:
        link: the all-to-all.
        name: its name, for the error.
        nodes: on which a group of ranks lies.
        per_node: ranks of the group on each.
        in_steps: only some pairs of ranks exchange in each movement: nodes must then also play one role only, so no message may
            hold packets that have crossed nodes before.
    """
    size = link.nodes_per_group(nodes)
    places = _AnyPlaces(nodes, size)
    try:
        hops = link.hops(places)
        for there in _others(nodes, size):
            for here, local in itertools.product(range(per_node), repeat=2):
                source, target = _Rank(_Node(0, 0), here), _Rank(there, local)
                if source != target:
                    _check_legs(link, hops, nodes, link.path(places, cast(Any, source), cast(Any, target)))
    except Exception as error:  # A link that is truly broken raises again where every rank is simulated apart.
        raise _unlike(name) from error
    before = [hops[read] for hop in hops for read in hop.reads if read != PACKED]
    if in_steps and (link.hops_by_node or any(hop.lane is Lane.INTER for hop in before)):
        raise _unlike(f"{name}, step by step,")


def _others(nodes: int, size: int) -> list[_Node]:
    """Return a node of each class that a target's node can be of, seen from the source's."""
    places, groups = ([0, 1] if count > 1 else [0] for count in (size, nodes // size))
    return [_Node(group, place) for group, place in itertools.product(groups, places)]


def _check_legs(link: AbstractAllToAll, hops: tuple[Hop, ...], nodes: int, path: tuple[Leg, ...]) -> None:
    for leg in path:
        _known(leg.source, _Rank)
        _known(leg.target, _Rank)
        if link.hops_by_node and isinstance(leg.hop, _Node):
            same = len(set(hops[:nodes])) == 1
            all_or_none = all(set(range(nodes)) <= set(hop.reads) for hop in hops[nodes:])
            if not (same and all_or_none):
                raise TypeError("hops of nodes that differ")
        elif type(leg.hop) is not int:
            raise TypeError("a hop that depends on a node")


def _known(value: Any, kind: type[Any]) -> Any:
    """Return a rank or node that came from these places; TypeError for any other."""
    if type(value) is not kind:
        raise TypeError(f"no {kind.__name__}")
    return value


def _unlike(name: str) -> UnlikeError:
    return UnlikeError(
        f"{name} sends packets another way from node to node", "an all-to-all in which all nodes do the same"
    )
