"""All-to-all algorithms: every packet arrives, on the links it should use, in as many messages as
the papers say.

The W ranks of a group are on N nodes, g on each. Nothing is executed: paths and hops are data, so
large meshes cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from moesaic.errors import InputError
from moesaic.planner.hops import check_regular
from moesaic.planner.symmetry import UnlikeError
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.algorithms import Hier2D, Linear
from moesaic.program.all_to_all.all_to_all import (
    PACKED,
    AbstractAllToAll,
    Hop,
    Leg,
    NodeMap,
    check_link,
    check_paths,
)
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import Lane

EVEN = [(1, 4), (2, 2), (3, 2), (4, 3), (8, 1), (9, 2)]
"""N and g, equal and different."""
GROUPS: list[tuple[Grid, tuple[Axis, ...]]] = [
    (Grid(world=16, ep=8, etp=2, ranks_per_node=4), ("ep", "etp")),
    (Grid(world=16, ep=8, etp=2, ranks_per_node=4, innermost="ep"), ("ep",)),
    (Grid(world=16, ep=4, etp=2, ranks_per_node=2), ("ep", "etp")),
    (Grid(world=24, ep=4, etp=6, ranks_per_node=6, etp_inner=3), ("ep", "etp_outer")),
]
UNEVEN: list[tuple[Grid, tuple[Axis, ...]]] = [
    (Grid(world=12, ep=6, ranks_per_node=4), ("ep",)),
    (Grid(world=12, ep=3, etp=2, ranks_per_node=4), ("ep", "etp")),
]
ANY_NODES = [name for name, link in ALL_TO_ALLS.items() if not link.needs_even_nodes]
LANES_APART = ("pipelined", "hier1d", "hier2d", "hier3d", "naive")
"""All-to-alls of this file whose hops on the lane between nodes carry nothing else."""
nodes_per_group = ALL_TO_ALLS["hier3d"].nodes_per_group


class Mine(AbstractAllToAll):
    """What somebody writes: hops as they are given, and one path for every pair of ranks."""

    def __init__(self, hops: Any, path: Callable[[int, int], list[tuple[int, int, int]]]) -> None:
        self._hops = hops
        self._path = path

    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        return self._hops

    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        return tuple(Leg(*leg) for leg in self._path(source, target) if leg[1] != leg[2])


INTER = Hop(Lane.INTER)
INTRA = Hop(Lane.INTRA)


@pytest.mark.parametrize(
    ("hops", "path", "words"),
    [
        (
            (Hop(Lane.INTER, (1,)), INTER),
            lambda a, b: [(0, a, b)],
            r"hop 0 reads \(1,\): give a tuple of numbers of earlier",
        ),
        ((Hop(Lane.INTER, (-2,)),), lambda a, b: [(0, a, b)], r"hop 0 reads \(-2,\): give"),
        ((Hop(Lane.INTER, 0),), lambda a, b: [(0, a, b)], "hop 0 reads 0: give a tuple"),
        ((), lambda a, b: [(0, a, b)], r"hops are \(\): return a tuple of at least one Hop"),
        ([INTER], lambda a, b: [(0, a, b)], r"hops are \[.*: return a tuple"),
        ((Hop(Lane.COMPUTE),), lambda a, b: [(0, a, b)], r"choose Lane\.INTRA or Lane\.INTER"),
        (
            (INTER,),
            lambda a, b: [(3, a, b)],
            "the leg 0 to 1 in hop 3 needs a hop after -1, of hops 0 to 0: change its hop",
        ),
        (
            (INTER,),
            lambda a, b: [(0, a, b + 100)],
            "the leg 0 to 101 in hop 0 does not start at 0, or not end at",
        ),
        (
            (INTER,),
            lambda a, b: [(0, a, 0)],
            "the path from rank 0 to 1 ends at rank 0: add the legs",
        ),
        (
            (INTER, INTER),
            lambda a, b: [(0, a, 0), (1, 0, b)],
            "passes on a packet of hop 0: add 0 to the reads of hop 1",
        ),
        (
            (INTRA,),
            lambda a, b: [(0, a, b)],
            r"from rank 0 to 2: .* leaves a node: put the hop on Lane\.INTER",
        ),
    ],
)
def test_what_is_wrong_with_hops_or_paths_is_one_line(hops: Any, path: Any, words: str) -> None:
    with pytest.raises(InputError, match=rf"^plan\.all_to_all=mine: .*{words}") as refusal:
        check_link(Mine(hops, path), "mine", Grid(world=4, ep=4, ranks_per_node=2), ("ep",))
    assert "\n" not in str(refusal.value)


def flat(nodes: int, g: int) -> tuple[Grid, NodeMap]:
    grid = Grid(world=nodes * g, ep=nodes * g, ranks_per_node=g)
    return grid, NodeMap(grid, tuple(range(nodes * g)))


def all_groups(grid: Grid, axes: tuple[Axis, ...]) -> Iterator[NodeMap]:
    for ranks in sorted({grid.group(rank, axes) for rank in range(grid.world)}):
        yield NodeMap(grid, ranks)


def legs(name: str, places: NodeMap) -> Iterator[tuple[int, int, tuple[Leg, ...]]]:
    for source in places.ranks:
        for target in places.ranks:
            if source != target:
                yield source, target, ALL_TO_ALLS[name].path(places, source, target)


def messages(name: str, places: NodeMap) -> Counter[tuple[int, int, int]]:
    """Return the packets in each message, by (hop, sender, receiver)."""
    return Counter(
        (leg.hop, leg.source, leg.target) for _, _, path in legs(name, places) for leg in path
    )


def per_rank(name: str, places: NodeMap, hop: int) -> list[int]:
    """Return the number of messages that each rank sends in a hop."""
    sent = Counter(source for number, source, _ in messages(name, places) if number == hop)
    return [sent[rank] for rank in places.ranks]


def crossings(grid: Grid, path: tuple[Leg, ...]) -> int:
    return sum(grid.node_of(leg.source) != grid.node_of(leg.target) for leg in path)


@pytest.mark.parametrize(("nodes", "g"), [(2, 2), (3, 1), (4, 3), (1, 4)])
@pytest.mark.parametrize("name", ALL_TO_ALLS)
def test_what_is_found_regular_does_the_same_for_all_nodes(name: str, nodes: int, g: int) -> None:
    """Every permutation of groups of nodes, and of the nodes within all groups, maps paths to
    paths."""
    grid, places = flat(nodes, g)
    link = ALL_TO_ALLS[name]
    try:
        check_regular(link, name, nodes, g)
    except UnlikeError:
        return
    size = link.nodes_per_group(nodes)
    for permuted in (*swaps(nodes // size, size, 1), *swaps(size, 1, nodes // size)):

        def moved(rank: int, permuted: list[int] = permuted) -> int:
            return places.rank(permuted[places.node(rank)], places.local(rank))

        def numbered(hop: int, permuted: list[int] = permuted) -> int:
            return permuted[hop] if link.hops_by_node and hop < nodes else hop

        for source, target, path in legs(name, places):
            expected = tuple(
                Leg(numbered(leg.hop), moved(leg.source), moved(leg.target)) for leg in path
            )
            assert link.path(places, moved(source), moved(target)) == expected
    assert grid.world == nodes * g


def swaps(count: int, run: int, times: int) -> Iterator[list[int]]:
    """Return permutations that swap the first two of `count` runs of nodes, and that shift all of
    them, in `times` copies."""
    for order in ([1, 0, *range(2, count)] if count > 1 else [0], [*range(1, count), 0]):
        yield [
            (copy * count + index) * run + place
            for copy in range(times)
            for index in order
            for place in range(run)
        ]


@pytest.mark.parametrize(("nodes", "g"), EVEN)
@pytest.mark.parametrize("name", LANES_APART)
def test_the_lane_between_nodes_carries_what_crosses(name: str, nodes: int, g: int) -> None:
    grid, places = flat(nodes, g)
    hops = ALL_TO_ALLS[name].hops(places)
    for source, target, path in legs(name, places):
        for leg in path:
            if hops[leg.hop].lane is Lane.INTER:
                assert grid.node_of(leg.source) != grid.node_of(leg.target)
        if grid.node_of(source) == grid.node_of(target):
            assert crossings(grid, path) == 0, "what stays on a node does not leave it"
        else:
            assert 1 <= crossings(grid, path) <= (2 if name == "hier3d" else 1)


@pytest.mark.parametrize(("nodes", "g"), EVEN)
@pytest.mark.parametrize("name", ALL_TO_ALLS)
def test_every_packet_goes_step_by_step_from_its_source_to_its_target(
    name: str, nodes: int, g: int
) -> None:
    check_paths(ALL_TO_ALLS[name], flat(nodes, g)[1], name)


@pytest.mark.parametrize("path", [None, ((0, 0, 1),), [Leg(0, 0, 1)]])
def test_a_path_that_is_no_tuple_of_legs_is_refused(
    path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Linear()
    monkeypatch.setattr(link, "path", lambda node_map, source, target: path)
    with pytest.raises(
        InputError, match=r"from rank 0 to 1 is .*: return a tuple of Leg\(hop, source, target\)"
    ):
        check_paths(link, flat(2, 2)[1], "")


def test_a_class_in_place_of_an_object_is_refused() -> None:
    with pytest.raises(InputError, match=r"plan.all_to_all=mine is <class .*: put an object"):
        check_link(Linear, "mine", Grid(world=2, ep=2), ("ep",))  # type: ignore[arg-type]


@pytest.mark.parametrize(("grid", "axes"), GROUPS, ids=str)
@pytest.mark.parametrize("name", ALL_TO_ALLS)
def test_packets_stay_in_their_group(name: str, grid: Grid, axes: tuple[Axis, ...]) -> None:
    check_link(ALL_TO_ALLS[name], name, grid, axes)
    for places in all_groups(grid, axes):
        check_paths(ALL_TO_ALLS[name], places, name)


@pytest.mark.parametrize(("grid", "axes"), UNEVEN, ids=str)
@pytest.mark.parametrize("name", ANY_NODES)
def test_those_that_need_no_even_nodes_run_on_uneven_ones(
    name: str, grid: Grid, axes: tuple[Axis, ...]
) -> None:
    check_link(ALL_TO_ALLS[name], name, grid, axes)
    for places in all_groups(grid, axes):
        check_paths(ALL_TO_ALLS[name], places, name)


@pytest.mark.parametrize(("grid", "axes"), UNEVEN, ids=str)
@pytest.mark.parametrize("name", [name for name in ALL_TO_ALLS if name not in ANY_NODES])
def test_the_others_refuse_uneven_nodes(name: str, grid: Grid, axes: tuple[Axis, ...]) -> None:
    with pytest.raises(
        InputError, match=f"plan.all_to_all={name} needs equally many ranks of every group"
    ):
        check_link(ALL_TO_ALLS[name], name, grid, axes)


@pytest.mark.parametrize(("nodes", "g"), EVEN)
def test_linear_sends_one_message_to_everyone(nodes: int, g: int) -> None:
    _, places = flat(nodes, g)
    assert per_rank("linear", places, 0) == [nodes * g - 1] * (nodes * g)
    assert set(messages("linear", places).values()) <= {1}


@pytest.mark.parametrize(("nodes", "g"), EVEN)
def test_pipelined_sends_the_same_messages_on_two_lanes(nodes: int, g: int) -> None:
    _, places = flat(nodes, g)
    by_lane = {
        hop.lane: per_rank("pipelined", places, number)
        for number, hop in enumerate(ALL_TO_ALLS["pipelined"].hops(places))
    }
    assert by_lane == {
        Lane.INTRA: [g - 1] * (nodes * g),
        Lane.INTER: [(nodes - 1) * g] * (nodes * g),
    }
    assert all(hop.reads == (PACKED,) for hop in ALL_TO_ALLS["pipelined"].hops(places)), (
        "neither waits for the other"
    )


@pytest.mark.parametrize(("nodes", "g"), EVEN)
def test_2dh_sends_g_times_fewer_and_larger_messages_between_nodes(nodes: int, g: int) -> None:
    """Tutel 4.3: N-fold blocks to g - 1 mates, then g-fold blocks to the N - 1 ranks with the same
    local rank."""
    _, places = flat(nodes, g)
    assert per_rank("hier2d", places, 0) == [g - 1] * (nodes * g)
    assert per_rank("hier2d", places, 1) == [nodes - 1] * (nodes * g)
    sizes = messages("hier2d", places)
    assert {count for (hop, *_), count in sizes.items() if hop == 0} == (
        {nodes} if g > 1 else set()
    )
    assert {count for (hop, *_), count in sizes.items() if hop == 1} == (
        {g} if nodes > 1 else set()
    )
    for hop, source, target in sizes:
        if hop == 1:
            assert places.local(source) == places.local(target)


@pytest.mark.parametrize(("nodes", "g"), EVEN)
def test_naive_aggregation_sends_a_message_inside_the_node_per_node(nodes: int, g: int) -> None:
    _, places = flat(nodes, g)
    inside = [per_rank("naive", places, hop) for hop in range(nodes)]
    assert [sum(hops) for hops in zip(*inside)] == [nodes * (g - 1)] * (nodes * g)
    assert per_rank("naive", places, nodes) == [nodes - 1] * (nodes * g)
    sizes = messages("naive", places)
    assert {count for (hop, *_), count in sizes.items() if hop < nodes} == ({1} if g > 1 else set())
    assert {count for (hop, *_), count in sizes.items() if hop == nodes} == (
        {g} if nodes > 1 else set()
    )


@pytest.mark.parametrize(("nodes", "g"), [(nodes, g) for nodes, g in EVEN if nodes > 1])
def test_1dh_crosses_nodes_through_one_rank_each(nodes: int, g: int) -> None:
    """Hetu: g² packets per pair of nodes in one message. Members send their packets to the leader
    and receive theirs from it."""
    _, places = flat(nodes, g)
    crossing = {key: count for key, count in messages("hier1d", places).items() if key[0] == 1}
    assert len(crossing) == nodes * (nodes - 1)
    assert set(crossing.values()) == {g * g}
    assert {rank for _, source, target in crossing for rank in (source, target)} == {
        node[0] for node in places.nodes
    }
    for node in places.nodes:
        for member in node[1:]:
            assert (
                messages("hier1d", places)[(0, member, node[0])] == (nodes - 1) * g + 1
            )  # including the leader's own packet
            assert messages("hier1d", places)[(2, node[0], member)] == (nodes - 1) * g


@pytest.mark.parametrize(("nodes", "g"), EVEN)
def test_3dh_goes_inside_nodes_then_inside_groups_of_nodes_then_between_them(
    nodes: int, g: int
) -> None:
    _, places = flat(nodes, g)
    size = nodes_per_group(nodes)
    assert [per_rank("hier3d", places, hop) for hop in range(3)] == [
        [g - 1] * (nodes * g),
        [size - 1] * (nodes * g),
        [nodes // size - 1] * (nodes * g),
    ]
    between = {count for (hop, *_), count in messages("hier3d", places).items() if hop == 2}
    assert between == ({g * size} if nodes > size else set()), (
        "the largest messages go between groups"
    )


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (8, 2), (9, 3), (12, 3), (16, 4)],
)
def test_groups_of_nodes_are_near_the_square_root(nodes: int, expected: int) -> None:
    assert nodes_per_group(nodes) == expected


def test_places_are_counted_within_the_group() -> None:
    grid = Grid(world=8, ep=4, etp=2, ranks_per_node=4)
    places = NodeMap(grid, grid.group(1, ("ep",)))
    assert places.ranks == (1, 3, 5, 7)
    assert places.nodes == [[1, 3], [5, 7]]
    assert [(places.node(rank), places.local(rank)) for rank in places.ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert places.rank(1, 0) == 5


@pytest.mark.parametrize(
    ("grid", "group"),
    [
        (Grid(world=64, tp=8, ep=8, etp=8, ranks_per_node=8), ("ep", "etp")),
        (Grid(world=32, tp=2, ep=8, etp=2, ranks_per_node=4), ("ep",)),
        (Grid(world=8, ep=8, ranks_per_node=8), ("ep",)),
    ],
    ids=str,
)
def test_all_paths_of_2dh_at_once_are_those_of_each_packet(
    grid: Grid, group: tuple[Axis, ...]
) -> None:
    for ranks in grid.kinds_of_groups(group):
        places = NodeMap(grid, ranks)
        at_once, each = Hier2D().paths(places), AbstractAllToAll.paths(Hier2D(), places)
        assert at_once.keys() == each.keys()
        assert all(np.array_equal(at_once[hop], each[hop]) for hop in each)
