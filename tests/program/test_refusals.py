"""Passes and choices that clash: the error is one line that names both and says what to choose
instead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers import refused
from moesaic.errors import InputError
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.passes.gather_weights import gather_weights
from moesaic.program.passes.route_all_to_all import route_all_to_all
from moesaic.program.passes.split import split_peers
from moesaic.program.plan import Plan

GRID = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)


UNEVEN = {"world": 12, "tp": 1, "ep": 6, "etp": 1, "ranks_per_node": 4}
REFUSED = [
    (
        {"schedule": "s2", "all_to_all": "multicast", "peer_groups": 2},
        {},
        ["split_peers", "multicast"],
    ),
    (
        {"schedule": "s2", "all_to_all": "multicast", "gather_weights": 0},
        {},
        ["gather_weights=0", "multicast"],
    ),
    ({"schedule": "s3", "all_to_all": "multicast"}, {}, ["multicast", "s3"]),
    (
        {"schedule": "s2", "all_to_all": "multicast"},
        {"innermost": "ep"},
        ["multicast", "mesh.etp=2", "nodes of 4"],
    ),
    ({"schedule": "s2", "all_to_all": "multicast"}, UNEVEN, ["multicast", "nodes of 4 ranks"]),
    ({"schedule": "ted", "gather_weights": 1}, {}, ["gather_weights", "ted"]),
    (
        {"schedule": "s2", "gather_weights": 3},
        {},
        ["plan.gather_weights=3", "mesh.etp=2", "[1, 2]"],
    ),
    ({"schedule": "s1", "overlap_gather": True}, {}, ["overlap_gather", "s1"]),
    (
        {"schedule": "s2", "overlap_gather": True, "peer_groups": 2},
        {},
        ["overlap_gather", "split_peers"],
    ),
    (
        {"schedule": "s2", "overlap_gather": True, "gather_weights": 0},
        {},
        ["overlap_gather", "gather_weights=0"],
    ),
    (
        {"schedule": "s2", "overlap_gather": True, "all_to_all": "multicast"},
        {},
        ["overlap_gather", "multicast"],
    ),
    ({"schedule": "s2", "peer_groups": 3}, {}, ["plan.peer_groups=3", "mesh.ep=4"]),
    ({"schedule": "ted"}, {"tp": 1}, ["plan.schedule=ted", "mesh.tp", "mesh.etp"]),
    ({"schedule": "ted"}, {"tp": 4}, ["plan.schedule=ted", "4 and 2"]),
    ({"schedule": "ted"}, {"innermost": "ep"}, ["plan.schedule=ted", "ep innermost"]),
    *[
        ({"schedule": "s2", "all_to_all": link}, UNEVEN, [link, "nodes of 4 ranks"])
        for link in ("hier2d", "hier3d", "naive")
    ],
]


@pytest.mark.parametrize(
    ("plan", "mesh", "words"), REFUSED, ids=lambda value: "-".join(map(str, value))
)
def test_what_clashes_is_refused_in_one_line_that_names_both(
    plan: dict, mesh: dict, words: list[str]
) -> None:
    grid = replace(GRID, **mesh)
    line = refused(lambda: compile_plan(Plan(**plan), grid))
    assert "\n" not in line
    assert all(word in line for word in words), line
    assert "choose" in line, f"says not what to do instead: {line}"


def test_naive_aggregation_is_refused_where_groups_lie_on_different_numbers_of_nodes() -> None:
    """Pairs of neighbours on nodes of three ranks: (0, 1) share a node, (2, 3) do not, so their
    hops would differ."""
    grid = Grid(world=12, ep=2, ranks_per_node=3)
    with pytest.raises(
        InputError, match=r"all_to_all=naive needs every group over ep\+etp on equally many nodes"
    ):
        compile_plan(Plan(all_to_all="naive"), grid)
    compile_plan(Plan(all_to_all="hier2d"), grid)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: route_all_to_all(SCHEDULES["s2"](), "2dh", GRID),
            "plan.all_to_all='2dh' is unknown: choose one of linear",
        ),
        (lambda: split_peers(SCHEDULES["s2"](), 0, GRID), "plan.peer_groups=0"),
        (lambda: gather_weights(SCHEDULES["s2"](), -1, GRID), "plan.gather_weights=-1"),
    ],
)
def test_passes_refuse_by_themselves(make: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()  # type: ignore[operator]
