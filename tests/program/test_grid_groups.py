"""Coordinates and groups, which the grid computes by arithmetic, compared with tables of the whole
mesh."""

from __future__ import annotations

import itertools

import pytest

from moesaic.program.compile import compile_plan
from moesaic.program.grid import BY_NODE, DENSE, FACTORED, SPARSE, VIEWS, Axis, Grid
from moesaic.program.passes.split import _stay_inside, groups_inside_nodes
from moesaic.program.plan import Plan
from moesaic.program.text import to_text

GRIDS = [
    Grid(world=16, tp=2, ep=4, etp=4, ranks_per_node=4, etp_inner=2),
    Grid(world=24, tp=3, ep=2, etp=4, innermost="ep", ranks_per_node=8),
    Grid(world=8, ep=8, ranks_per_node=2),
    Grid(world=12, tp=2, ep=6, ranks_per_node=4),
    Grid(world=12, ep=2, etp=2, innermost="ep", ranks_per_node=3),
    Grid(world=12, ep=3, etp=2, innermost="ep", ranks_per_node=6),
    Grid(world=6, ep=2, ranks_per_node=3),
    Grid(world=4, tp=2, ep=2, etp=2, innermost="ep"),
    Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4),
]


def places(grid: Grid) -> list[dict[Axis, int]]:
    """Count through the axes of each view, rank by rank. Nodes and positions on them are listed per
    replica."""
    table: list[dict[Axis, int]] = [{} for _ in range(grid.world)]
    outer: tuple[Axis, ...] = ("ep", "etp") if grid.innermost == "etp" else ("etp", "ep")
    split = [("etp_outer", "etp_inner") if axis == "etp" else (axis,) for axis in outer]
    for view in (DENSE, ("edp", *outer), ("edp", *(axis for axes in split for axis in axes))):
        for rank, values in enumerate(
            itertools.product(*(range(grid.size(axis)) for axis in view))
        ):
            table[rank] |= dict(zip(view, values))
    replica = grid.ep * grid.etp
    for start in range(0, grid.world, replica):
        mates = range(start, start + replica)
        nodes = sorted({grid.node_of(rank) for rank in mates})
        for rank in mates:
            here = [mate for mate in mates if grid.node_of(mate) == grid.node_of(rank)]
            table[rank] |= {"node": nodes.index(grid.node_of(rank)), "local": here.index(rank)}
    return table


def by_definition(
    table: list[dict[Axis, int]], rank: int, axes: tuple[Axis, ...]
) -> tuple[int, ...]:
    """Return groups by comparing every rank with every other."""
    view = next(each for each in VIEWS if set(axes) <= set(each))
    others = [axis for axis in view if axis not in axes]
    return tuple(
        each
        for each, place in enumerate(table)
        if all(place[axis] == table[rank][axis] for axis in others)
    )


WANTED: list[tuple[Axis, ...]] = [
    (),
    ("dp",),
    ("tp",),
    ("ep",),
    ("etp",),
    ("ep", "etp"),
    ("edp",),
    ("edp", "ep"),
    ("etp_inner",),
    ("ep", "etp_outer"),
    ("node",),
    ("local",),
    ("node", "local"),
    ("edp", "local"),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_places_and_groups_are_those_of_the_definition(grid: Grid) -> None:
    table = places(grid)
    for rank, place in enumerate(table):
        assert {axis: grid.coordinate(rank, axis) for axis in place} == place
    assert set(table[0]) == {*DENSE, *SPARSE, *FACTORED, *BY_NODE}
    for axes in WANTED:
        for rank in reversed(range(grid.world)):
            assert grid.group(rank, axes) == by_definition(table, rank, axes)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_groups_have_in_common_is_told_without_looking_at_all(grid: Grid) -> None:
    table = places(grid)
    ranks = range(grid.world)
    shapes = set()
    for replica in {by_definition(table, rank, ("ep", "etp")) for rank in ranks}:
        nodes = [grid.node_of(rank) for rank in replica]
        shapes.add((len(set(nodes)), tuple(sorted({nodes.count(node) for node in nodes}))))
    is_even = len(shapes) == 1 and len(next(iter(shapes))[1]) == 1
    assert grid.nodes_per_replica == (next(iter(shapes))[0] if is_even else 0)
    of = {
        axes: [by_definition(table, rank, axes) for rank in ranks]
        for axes in (("tp",), ("etp",), ("ep",), ("ep", "etp"))
    }
    assert grid.shares_tp_and_etp == (of["tp",] == of["etp",])
    assert grid.has_shards_inside_nodes == all(
        len({*map(grid.node_of, group)}) == 1 for group in of["etp",]
    )
    for axes, groups in of.items():
        kinds = grid.kinds_of_groups(axes)
        assert kinds == list(dict.fromkeys(kinds))
        moved = {
            tuple(rank + step for rank in group)
            for group in kinds
            for step in range(0, grid.world, grid.period)
        }
        assert moved == set(groups), "the others are these, whole periods on"
    for parts in (n for n in range(1, grid.ep + 1) if grid.ep % n == 0):
        part = [place["ep"] // (grid.ep // parts) for place in table]
        inside = all(
            grid.node_of(rank) == grid.node_of(mate)
            for rank in ranks
            for mate in of["ep",][rank]
            if part[rank] == part[mate]
        )
        assert _stay_inside(grid, parts, ("ep",)) == inside
        assert (groups_inside_nodes(grid) > parts) <= (not inside or parts == grid.ep)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(schedule="s2", chunks=4, all_to_all="hier2d"),
        Plan(schedule="s2", chunks=4, all_to_all="multicast"),
        Plan(all_to_all="hier3d", peer_groups=2),
    ],
    ids=lambda plan: plan.all_to_all,
)
def test_a_compile_looks_at_one_period_of_the_mesh(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    group = Grid.group
    monkeypatch.setattr(
        Grid, "group", lambda self, rank, axes: asked.append(rank) or group(self, rank, axes)
    )
    results = []
    for world in (256, 4096, 131_072):
        asked.clear()
        compiled = compile_plan(plan, Grid(world=world, tp=8, ep=32, etp=8, ranks_per_node=8))
        results.append((to_text(compiled.forward), to_text(compiled.backward), len(asked)))
    assert results[0] == results[1] == results[2], "the same programs, after as much work"
