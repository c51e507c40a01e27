"""Groups found in one pass over the world are those of the definition: ranks alike on every other axis of the view."""

from __future__ import annotations

import pytest

from moesaic.program.grid import VIEWS, Axis, Grid

GRIDS = [
    Grid(world=16, tp=2, ep=4, etp=4, ranks_per_node=4, etp_inner=2),
    Grid(world=24, tp=3, ep=2, etp=4, innermost="ep", ranks_per_node=8),
    Grid(world=8, ep=8, ranks_per_node=2),
]


def by_definition(grid: Grid, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """Compare every rank with every other."""
    view = next(each for each in VIEWS if set(axes) <= set(each))
    others = [axis for axis in view if axis not in axes]
    return tuple(
        other for other in range(grid.world)
        if all(grid.coordinate(other, axis) == grid.coordinate(rank, axis) for axis in others)
    )  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_are_those_of_the_definition(grid: Grid) -> None:
    wanted: list[tuple[Axis, ...]] = [
        (), ("dp",), ("tp",), ("ep",), ("etp",), ("ep", "etp"), ("edp",), ("etp_inner",), ("ep", "etp_outer"), ("node",),
        ("local",), ("node", "local"),
    ]  # fmt: skip
    for axes in wanted:
        for rank in reversed(range(grid.world)):
            assert grid.group(rank, axes) == by_definition(grid, rank, axes)


def test_coordinates_are_read_once_per_rank_and_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, read = Grid(world=512, tp=4, ep=32, etp=2, ranks_per_node=8), []
    coordinate = Grid.coordinate
    monkeypatch.setattr(Grid, "coordinate", lambda self, rank, axis: read.append(1) or coordinate(self, rank, axis))
    for rank in range(512):
        grid.group(rank, ("ep",))
    assert len(read) == 2 * 512, "edp and etp of each rank, whatever the number of groups"
