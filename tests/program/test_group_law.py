"""The group law: every axis of every view partitions the world, into the groups of Parm, Tutel and rails.

The expected groups are computed by index arithmetic that is independent of the grid's coordinates.
"""

from __future__ import annotations

from itertools import product

import pytest

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


WORLDS = (1, 2, 3, 4, 6, 8, 12, 16)


def meshes(world: int) -> list[Grid]:
    return [
        Grid(world=world, ep=p, etp=s, innermost=inner)
        for p in divisors(world)
        for s in divisors(world // p)
        for inner in ("etp", "ep")
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_sparse_groups_are_blocks_and_strides(world: int) -> None:
    for grid in meshes(world):
        p, s = grid.ep, grid.etp
        near, far = (s, p) if grid.innermost == "etp" else (p, s)
        for r in range(world):
            start = p * s * (r // (p * s))
            block = tuple(near * (r // near) + j for j in range(near))
            strided = tuple(start + (r - start) % near + near * j for j in range(far))
            by_name = {"etp": block, "ep": strided} if grid.innermost == "etp" else {"etp": strided, "ep": block}
            assert grid.group(r, ("etp",)) == by_name["etp"], grid
            assert grid.group(r, ("ep",)) == by_name["ep"], grid
            assert grid.group(r, ("ep", "etp")) == tuple(range(start, start + p * s)), grid
            assert grid.group(r, ("edp",)) == tuple(range(r % (p * s), world, p * s)), grid
            assert grid.group(r, ()) == (r,)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12])
def test_dense_groups_do_not_depend_on_the_sparse_ones(world: int) -> None:
    for m, (p, s) in product(divisors(world), [(1, 1), (world, 1), (1, world)]):
        grid = Grid(world=world, tp=m, ep=p, etp=s)
        assert (grid.dp, grid.tp) == (world // m, m)
        for r in range(world):
            assert grid.group(r, ("tp",)) == tuple(range(m * (r // m), m * (r // m) + m))
            assert grid.group(r, ("dp",)) == tuple(range(r % m, world, m))


@pytest.mark.parametrize("inner", ["etp", "ep"])
@pytest.mark.parametrize(("p", "s", "q"), [(p, s, q) for p in (1, 2, 3) for s in (1, 2, 4, 6) for q in divisors(s)])
def test_etp_factors_into_neighbours_that_gather_and_shards_that_tokens_node_token(
    p: int, s: int, q: int, inner: str
) -> None:
    grid = Grid(world=2 * p * s, ep=p, etp=s, innermost=inner, etp_inner=q)
    assert grid.etp_outer == s // q
    for r in range(grid.world):
        shards = grid.group(r, ("etp",))
        place = shards.index(r)
        assert grid.group(r, ("etp_inner",)) == shards[place // q * q : place // q * q + q]
        assert grid.group(r, ("etp_outer",)) == shards[place % q :: q]


@pytest.mark.parametrize(
    ("p", "s", "g"), [(p, s, g) for p in (1, 2, 4) for s in (1, 2, 4) for g in divisors(2 * p * s)]
)
def test_rails_and_nodes_of_one_copy_of_the_experts(p: int, s: int, g: int) -> None:
    """Even nodes: a `local` group is the part of a replica on one node, a `node` group the ranks with equal local rank."""
    grid = Grid(world=2 * p * s, ep=p, etp=s, ranks_per_node=g)
    inside = min(g, p * s)
    assert grid.nodes_per_replica == p * s // inside
    assert (grid.size("node"), grid.size("local")) == (p * s // inside, inside)
    for r in range(grid.world):
        start = p * s * (r // (p * s))
        assert grid.group(r, ("local",)) == tuple(range(r // inside * inside, r // inside * inside + inside))
        assert grid.group(r, ("node",)) == tuple(range(start + (r - start) % inside, start + p * s, inside))
        assert {grid.node_of(peer) for peer in grid.group(r, ("local",))} == {grid.node_of(r)}


@pytest.mark.parametrize(
    ("world", "p", "s", "g", "nodes"),
    [
        (12, 6, 1, 4, 0),  # copies of 6 ranks on nodes of 4: 4 + 2, then 2 + 4
        (12, 2, 1, 3, 0),  # pairs: on one node, on two, on one, ...
        (12, 4, 1, 6, 0),  # copies of 4 on nodes of 6: 4, then 2 + 2, then 4
        (12, 4, 3, 6, 2),
        (12, 3, 1, 6, 1),
        (12, 3, 1, None, 1),
        (16, 2, 4, 2, 4),
    ],
)
def test_irregular_nodes_are_recognised(world: int, p: int, s: int, g: int | None, nodes: int) -> None:
    grid = Grid(world=world, ep=p, etp=s, ranks_per_node=g)
    assert grid.nodes_per_replica == nodes
    groups = [grid.group(r, ("local",)) for r in range(world)]
    assert all(r in group for r, group in enumerate(groups))
    assert all(len({grid.node_of(peer) for peer in group}) == 1 for group in groups)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"ep": 2, "etp": 2, "ranks_per_node": 4}, True),
        ({"ep": 2, "etp": 2, "ranks_per_node": 2}, True),
        ({"ep": 2, "etp": 2, "ranks_per_node": 1}, False),
        ({"ep": 4, "etp": 2, "ranks_per_node": 4, "innermost": "ep"}, False),
        ({"ep": 2, "etp": 4, "ranks_per_node": 2}, False),
        ({"ep": 8, "ranks_per_node": 1}, True),
    ],
)
def test_shards_inside_nodes(mesh: dict, expected: bool) -> None:
    assert Grid(world=8, **mesh).has_shards_inside_nodes is expected


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"tp": 2, "etp": 2}, True),
        ({"tp": 2, "etp": 2, "innermost": "ep", "ep": 2}, False),
        ({"tp": 4, "etp": 2}, False),
    ],
)
def test_ted_needs_the_same_groups_not_only_the_same_sizes(mesh: dict, expected: bool) -> None:
    assert Grid(world=8, **mesh).shares_tp_and_etp is expected


@pytest.mark.parametrize(
    ("axes", "rank", "expected"),
    [(("etp", "ep"), 5, tuple(range(8))), (("node",), 5, (1, 5)), (("local", "node"), 2, tuple(range(8)))],
)
def test_the_order_of_axes_does_not_matter(axes: tuple[Axis, ...], rank: int, expected: tuple[int, ...]) -> None:
    grid = Grid(world=8, ep=4, etp=2, ranks_per_node=4)
    assert grid.group(rank, axes) == expected
    assert grid.group(rank, axes[::-1]) == expected


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"world": 8, "ranks_per_node": 3}, "mesh.ranks_per_node=3 does not divide the 8 ranks: choose a divisor of 8"),
        ({"world": 8, "ranks_per_node": 0}, "mesh.ranks_per_node=0 does not divide the 8 ranks: choose a divisor of 8"),
        ({"world": 8, "etp": 4, "etp_inner": 3}, "mesh.etp=4 does not split into parts of 3: choose a divisor"),
        ({"world": 0}, "mesh.world=0: must be at least 1"),
    ],
)
def test_refusals_are_one_line(sizes: dict, line: str) -> None:
    with pytest.raises(InputError) as refusal:
        Grid(**sizes)
    assert str(refusal.value) == line
