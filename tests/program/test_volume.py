"""Bytes counted from the messages equal the closed forms of the papers' volumes, forward, even routing.

Notation: n the copies of a tensor group, p = ep, s = etp, m = tp; a node holds one ep index, so etp stays inside.
"""

from __future__ import annotations

import pytest

from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.passes.split_capacity import split_capacity
from moesaic.program.task import Kind
from moesaic.program.transpose import transpose
from moesaic.program.volume import even_sizes, traffic

TOKENS, EXPERTS, TOP_K = 64, 8, 2
COPIES = TOKENS * TOP_K
MESHES = [(m, p, s) for m in (1, 2, 4) for p in (1, 2, 4) for s in (1, 2, 4) if p * s % m == 0]


def rows_per_rank(schedule: str, grid: Grid, chunks: int = 1, backward: bool = False) -> dict[str, tuple[float, float]]:
    """Rows (inside, across nodes) per rank of each movement of rows or tokens."""
    program = split_capacity(SCHEDULES[schedule](), chunks)
    program = transpose(program) if backward else program
    sizes = even_sizes(grid, schedule, tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K, num_chunks=chunks)
    moved = traffic(program, sizes, lambda rank: grid.coordinate(rank, "ep"))
    world = grid.world
    return {t.task: (t.inside_rows / world, t.across_rows / world) for t in moved if t.kind in (Kind.ROWS, Kind.TOKENS)}


@pytest.mark.parametrize(("m", "p", "s"), MESHES)
def test_s1_and_s2_send_every_copy_to_all_shards(m: int, p: int, s: int) -> None:
    grid = Grid(world=p * s, tp=m, ep=p, etp=s)
    for schedule in ("s1", "s2"):
        rows = rows_per_rank(schedule, grid)
        assert rows["h"][1] == rows["z"][1] == pytest.approx(s * COPIES / m * (p - 1) / p)
        assert rows["h"][0] == rows["z"][0] == pytest.approx((s - 1) * COPIES / m / p)


@pytest.mark.parametrize(("m", "p", "s"), MESHES)
def test_s3_crosses_nodes_once_and_gathers_inside(m: int, p: int, s: int) -> None:
    rows = rows_per_rank("s3", Grid(world=p * s, tp=m, ep=p, etp=s))
    assert rows["arrived"] == rows["z"] == (0, pytest.approx(COPIES / m * (p - 1) / p))
    assert rows["h"] == rows["reduced"] == (pytest.approx((s - 1) * COPIES / m), 0)


@pytest.mark.parametrize(("m", "p", "s"), MESHES)
def test_the_last_gather_is_of_tokens_in_s1_and_of_copies_in_s2(m: int, p: int, s: int) -> None:
    grid = Grid(world=p * s, tp=m, ep=p, etp=s)
    first, second = rows_per_rank("s1", grid)["y"], rows_per_rank("s2", grid)["z_full"]
    assert sum(first) == pytest.approx((m - 1) * TOKENS / m)
    assert sum(second) == pytest.approx((m - 1) * COPIES / m)


@pytest.mark.parametrize(("m", "p", "s"), MESHES)
def test_the_baseline_gathers_and_sends_for_all_shards(m: int, p: int, s: int) -> None:
    rows = rows_per_rank("baseline", Grid(world=p * s, tp=m, ep=p, etp=s))
    assert sum(rows["x_wide"]) == pytest.approx((s - 1) * TOKENS)
    assert rows["h"] == rows["back"] == (0, pytest.approx(s * COPIES * (p - 1) / p))
    assert rows["own"] == (0, 0)


@pytest.mark.parametrize(("p", "s"), [(1, 2), (2, 2), (4, 2), (2, 4)])
def test_ted_sends_each_token_once(p: int, s: int) -> None:
    rows = rows_per_rank("ted", Grid(world=p * s, tp=s, ep=p, etp=s))
    assert rows["h_same"] == rows["back"] == (0, pytest.approx(COPIES * (p - 1) / p))
    assert rows["h"] == (0, 0)


@pytest.mark.parametrize("schedule", ["s1", "s2", "s3"])
def test_backward_moves_as_much_between_nodes_as_forward(schedule: str) -> None:
    grid = Grid(world=8, tp=2, ep=4, etp=2)
    forward, backward = rows_per_rank(schedule, grid), rows_per_rank(schedule, grid, backward=True)
    over_ep = [name for name in forward if name in ("h", "z", "arrived")]
    assert sum(forward[name][1] for name in over_ep) == pytest.approx(sum(backward[f"{n}'"][1] for n in over_ep))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunks_move_the_same_bytes(schedule: str) -> None:
    grid = Grid(world=8, tp=2, ep=4, etp=2)
    whole, cut = rows_per_rank(schedule, grid), rows_per_rank(schedule, grid, chunks=4)
    assert sum(sum(rows) for rows in cut.values()) == pytest.approx(sum(sum(rows) for rows in whole.values()))
