"""Whether all nodes play the same role in an all-to-all: derived from its paths, never believed.

The paths are asked for with ranks and nodes that can be told equal or different, and nothing else: they have no number, no
order, no place in a list. A path that comes out without a look at any of these is the same for every two nodes, so a few nodes
stand for all of them. One that looks raises, and every rank is then simulated apart.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

from moesaic.cost.symmetry import UnlikeError
from moesaic.program.all_to_all.all_to_all import PACKED, AbstractAllToAll, Hop, Leg, NodeMap
from moesaic.program.task import Lane


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
    if in_steps and (link.hops_by_node or any(hops[read].lane is Lane.INTER for hop in hops for read in _before(hop))):
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


def _before(hop: Hop) -> list[int]:
    return [read for read in hop.reads if read != PACKED]


def _known(value: Any, kind: type[Any]) -> Any:
    """Return a rank or node that came from these places; TypeError for any other."""
    if type(value) is not kind:
        raise TypeError(f"no {kind.__name__}")
    return value


def _unlike(name: str) -> UnlikeError:
    return UnlikeError(
        f"{name} sends packets another way from node to node", "an all-to-all in which all nodes do the same"
    )
