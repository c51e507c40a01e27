"""Groups: every rank is in exactly one group of each kind, and the groups are those in the
papers."""

from __future__ import annotations

import pytest

from moesaic.errors import InputError
from moesaic.program.grid import Grid


def test_parms_groups_are_contiguous_blocks_and_strided_and_copies_of_the_experts_are_outermost() -> (  # noqa: E501
    None
):
    grid = Grid(world=8, tp=2, ep=4, etp=2)
    assert grid.group(5, ("tp",)) == (4, 5)
    assert grid.group(5, ("etp",)) == (4, 5)
    assert grid.group(5, ("ep",)) == (1, 3, 5, 7)
    assert grid.group(5, ("ep", "etp")) == tuple(range(8))
    assert Grid(world=8, ep=4, etp=2, innermost="ep").group(5, ("ep",)) == (4, 5, 6, 7)
    assert Grid(world=8, ep=2, etp=2).group(1, ("edp",)) == (1, 5)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"world": 4, "tp": 3}, "mesh.tp=3 does not divide the 4 ranks"),
        ({"world": 4, "ep": 2, "etp": 4}, "mesh.ep=2 times mesh.etp=4 does not divide the 4 ranks"),
        ({"world": 4, "ep": 0}, "mesh.ep=0: must be a whole number of at least 1"),
        (
            {"world": 8, "ranks_per_node": 3},
            "mesh.ranks_per_node=3 does not divide the 8 ranks: choose a divisor of 8",
        ),
        (
            {"world": 8, "etp": 4, "etp_inner": 3},
            "mesh.etp=4 does not split into parts of 3: choose a divisor",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(sizes: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Grid(**sizes)
