"""Bytes counted from the messages equal the closed forms of the papers (forward, even routing).

Notation: n copies per tensor-parallel group, p = ep, s = etp, m = tp. A node holds one ep index, so
etp stays inside nodes.
"""

from __future__ import annotations

import pytest

from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import NodeMap
from moesaic.program.all_to_all.volume import Traffic, traffic
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Kind, Op
from program.even import even_node_tokens, even_sizes

TOKENS = 64
EXPERTS = 8
TOP_K = 2
COPIES = TOKENS * TOP_K
MESHES = [(1, 1, 4), (1, 4, 1), (2, 2, 2), (4, 2, 4), (2, 4, 1)]


def rows_per_rank(schedule: str, grid: Grid) -> dict[str, tuple[float, float]]:
    """Return the rows (inside nodes, across nodes) per rank of each movement of rows or tokens."""
    program = SCHEDULES[schedule]()
    sizes = even_sizes(
        grid, redundant=program.is_redundant, tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K
    )
    moved = traffic(program, sizes, lambda rank: grid.coordinate(rank, "ep"))
    world = grid.world
    return {
        t.task: (t.inside_rows / world, t.across_rows / world)
        for t in moved
        if t.kind in (Kind.ROWS, Kind.TOKENS)
    }


@pytest.mark.parametrize(("m", "p", "s"), MESHES)
def test_each_schedule_moves_the_rows_of_its_closed_form(m: int, p: int, s: int) -> None:
    """S1 and S2 send every copy to all shards; S3 crosses nodes once and gathers inside; the
    baseline sends for all shards."""
    grid = Grid(world=p * s, tp=m, ep=p, etp=s)
    rows = {schedule: rows_per_rank(schedule, grid) for schedule in ("s1", "s2", "s3", "baseline")}
    inside = (s - 1) * COPIES / m / p
    across = COPIES / m * (p - 1) / p
    for schedule in ("s1", "s2"):
        assert rows[schedule]["h"] == rows[schedule]["z"] == pytest.approx((inside, s * across))
    assert sum(rows["s1"]["y"]) == pytest.approx((m - 1) * TOKENS / m), (
        "the last gather is of tokens"
    )
    assert sum(rows["s2"]["z_full"]) == pytest.approx((m - 1) * COPIES / m), (
        "the last gather is of copies"
    )
    assert rows["s3"]["arrived"] == rows["s3"]["z"] == pytest.approx((0, across))
    assert rows["s3"]["h"] == rows["s3"]["reduced"] == pytest.approx(((s - 1) * COPIES / m, 0))
    assert sum(rows["baseline"]["x_wide"]) == pytest.approx((s - 1) * TOKENS)
    assert rows["baseline"]["h"] == rows["baseline"]["back"] == pytest.approx((0, s * m * across))
    assert rows["baseline"]["own"] == (0, 0)


@pytest.mark.parametrize(("p", "s"), [(1, 2), (2, 2), (4, 2), (2, 4)])
def test_ted_sends_each_token_once(p: int, s: int) -> None:
    rows = rows_per_rank("ted", Grid(world=p * s, tp=s, ep=p, etp=s))
    assert rows["h_same"] == rows["back"] == (0, pytest.approx(COPIES * (p - 1) / p))
    assert rows["h"] == (0, 0)


def bound_sizes(plan: Plan, grid: Grid, units: int = 0) -> tuple[Compiled, CallSizes]:
    """Compile a plan and return it with even sizes."""
    compiled = compile_plan(plan, grid)
    node_tokens = None
    if compiled.is_multicast:
        node_tokens = even_node_tokens(
            grid, tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K, num_chunks=plan.chunks
        )
    sizes = even_sizes(
        compiled.grid,
        redundant=compiled.is_redundant,
        tokens=TOKENS,
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_chunks=plan.chunks,
        node_tokens=node_tokens,
        units=units,
    )
    return compiled, sizes


def crossing(compiled: Compiled, sizes: CallSizes, backward: bool = False) -> dict[str, Traffic]:
    program = compiled.backward if backward else compiled.forward
    return {t.task: t for t in traffic(program, sizes, compiled.grid.node_of)}


@pytest.mark.parametrize(("p", "s"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("schedule", ["s1", "s2", "s3", "baseline"])
def test_weights_move_by_tutels_closed_form_whatever_the_schedule(
    schedule: str, p: int, s: int
) -> None:
    """(q - 1) P / W per rank for r = s / q, P (W - 1) / W for r = 0, with P all parameters of W = p
    s ranks. The same backward."""
    grid = Grid(world=p * s, ep=p, etp=s)
    hidden = 8
    parameters = EXPERTS * hidden
    for r in [0, *(r for r in range(1, s + 1) if s % r == 0)]:
        compiled, sizes = bound_sizes(
            Plan(schedule=schedule, gather_weights=r), grid, units=hidden // s
        )  # type: ignore[arg-type]
        expected = (
            parameters * (p * s - 1) / (p * s) if r == 0 else (s // r - 1) * parameters / (p * s)
        )
        for backward, name in ((False, "w_full"), (True, "w_full"), (True, "w_full'")):
            moved_rows = crossing(compiled, sizes, backward).get(name)
            rows = 0 if moved_rows is None else moved_rows.inside_rows + moved_rows.across_rows
            assert rows == expected * p * s


@pytest.mark.parametrize("schedule", ["s1", "s2", "s3", "baseline"])
@pytest.mark.parametrize(("m", "p", "s"), [(1, 2, 4), (2, 4, 2), (4, 1, 4)])
def test_flops_of_every_rank_do_not_depend_on_r(schedule: str, m: int, p: int, s: int) -> None:
    grid = Grid(world=p * s, tp=m, ep=p, etp=s)
    hidden = 8
    flops = set()
    for r in [0, *(r for r in range(1, s + 1) if s % r == 0)]:
        for chunks in (1, 2):
            plan = Plan(schedule=schedule, gather_weights=r, chunks=chunks)  # type: ignore[arg-type]
            compiled, sizes = bound_sizes(plan, grid, units=hidden // s)
            flops |= {expert_flops(compiled, sizes, rank) for rank in range(grid.world)}
    redundant = m if schedule == "baseline" else 1
    assert flops == {COPIES * hidden * redundant / m}


def expert_flops(compiled: Compiled, sizes: CallSizes, rank: int) -> float:
    """Return rows times hidden units of a rank's experts, forward."""
    total = 0.0
    for task in compiled.forward.tasks:
        if task.op is Op.EXPERT:
            rows, weights = (compiled.forward.slot(task.reads[index]).layout for index in (0, 2))
            units = sizes.num_rows(weights, rank) / sizes.num_held(weights, rank)
            total += sizes.num_rows(rows, rank) * units
    return total


@pytest.mark.parametrize("schedule", ["ted", "baseline"])
def test_an_all_reduce_in_halves_takes_two_n_minus_one_over_n(schedule: str) -> None:
    for p, s in ((2, 2), (2, 4), (1, 4)):
        grid = Grid(world=p * s, tp=s, ep=p, etp=s)
        rows = rows_per_rank(schedule, grid)
        assert sum(rows["summed"]) == pytest.approx(
            (s - 1) * COPIES * (s if schedule == "baseline" else 1)
        )
        compiled, sizes = bound_sizes(Plan(schedule=schedule), grid)  # type: ignore[arg-type]
        halves = [
            t.inside_rows + t.across_rows
            for name, t in crossing(compiled, sizes).items()
            if "summed" in name
        ]
        n = COPIES * (s if schedule == "baseline" else 1)
        assert sum(halves) / grid.world == pytest.approx(2 * (s - 1) / s * n)


@pytest.mark.parametrize(("p", "s", "g"), [(4, 2, 4), (2, 2, 2), (4, 1, 2), (8, 1, 2), (4, 2, 2)])
@pytest.mark.parametrize("schedule", ["s1", "s2"])
def test_multicast_crosses_once_per_token_and_node(schedule: str, p: int, s: int, g: int) -> None:
    grid = Grid(world=p * s, tp=1, ep=p, etp=s, ranks_per_node=g)
    compiled, sizes = bound_sizes(Plan(schedule=schedule, all_to_all="multicast"), grid)  # type: ignore[arg-type]
    table = even_node_tokens(grid, tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K)
    nodes = p * s // g
    node_tokens = int(table[0, 0, 0])
    rank_tokens = int(table[0, -1, 0])
    assert table.shape == (grid.world, p if nodes == p else nodes + p, 1)
    elsewhere = EXPERTS - EXPERTS // nodes
    assert node_tokens == round(
        TOKENS * (1 - elsewhere * (elsewhere - 1) / (EXPERTS * (EXPERTS - 1)))
    )
    arrived = "rank_tokens_here" if nodes == p else "node_tokens_here"
    for backward, dispatch, combine in ((False, arrived, "z"), (True, "z'", f"{arrived}'")):
        rows = crossing(compiled, sizes, backward)
        for name in (dispatch, combine):
            assert (rows[name].inside_rows, rows[name].across_rows) == (
                0,
                grid.world * node_tokens * (nodes - 1),
            )
        # without the copies that stay on the mate itself
        once_per_rank = grid.world * rank_tokens * (p * s - nodes)
        inside = [
            t for name, t in rows.items() if name.startswith(("rank_tokens_in", "z_rank_tokens"))
        ]
        assert [(t.inside_rows, t.across_rows) for t in inside] == [(once_per_rank, 0)] * 2


@pytest.mark.parametrize("nodes", [1, 4])
def test_multicast_sends_a_token_once_to_a_rank_where_nodes_make_no_difference(nodes: int) -> None:
    grid = Grid(world=4, ep=4, ranks_per_node=4 // nodes)
    compiled, sizes = bound_sizes(Plan(all_to_all="multicast"), grid)
    rank_tokens = int(
        even_node_tokens(grid, tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K)[0, 0, 0]
    )
    assert rank_tokens < COPIES // 4
    for backward, names in ((False, ("rank_tokens_in", "z")), (True, ("z'", "rank_tokens_in'"))):
        rows = crossing(compiled, sizes, backward)
        sent = [rows[name].inside_rows + rows[name].across_rows for name in names]
        assert sent == [4 * 3 * rank_tokens] * 2


SHAPES = [(2, 4), (4, 2), (1, 4), (8, 1)]


def carried(link: str, nodes: int, g: int) -> tuple[int, int]:
    """Return the rows (inside nodes, across nodes) of a dispatch in which every rank has one row
    for every rank."""
    grid = Grid(world=nodes * g, ep=nodes * g, ranks_per_node=g)
    compiled = compile_plan(Plan(schedule="s1", all_to_all=link), grid)
    sizes = even_sizes(grid, tokens=1, num_experts=grid.world, top_k=grid.world)
    hops = [t for name, t in crossing(compiled, sizes).items() if name.split("@")[0] == "h"]
    return sum(t.inside_rows for t in hops), sum(t.across_rows for t in hops)


@pytest.mark.parametrize(("nodes", "g"), SHAPES)
@pytest.mark.parametrize("link", ALL_TO_ALLS)
def test_every_row_is_counted_on_every_leg_of_its_path_and_nowhere_else(
    link: str, nodes: int, g: int
) -> None:
    grid = Grid(world=nodes * g, ep=nodes * g, ranks_per_node=g)
    places = NodeMap(grid, tuple(range(grid.world)))
    expected = [0, 0]
    for source in places.ranks:
        for target in places.ranks:
            for leg in ALL_TO_ALLS[link].path(places, source, target) if source != target else ():
                expected[grid.node_of(leg.source) != grid.node_of(leg.target)] += 1
    assert carried(link, nodes, g) == tuple(expected)


def test_bytes_of_each_kind() -> None:
    """Rows have dim elements, routing weights and indices 4 bytes, hidden units their columns, a
    bias dim elements."""
    row = {
        "task": "t",
        "collective": "exchange",
        "codec": "",
        "inside_messages": 1,
        "across_messages": 1,
    }
    counts = {"inside_rows": 3, "across_rows": 5}
    expected = {
        (Kind.ROWS, "copies"): 32,
        (Kind.TOKENS, "tokens"): 32,
        (Kind.LANE, "copies"): 4,
        (Kind.INDEX, "copies"): 4,
        (Kind.WEIGHT, "weights"): 2 * 48,
        (Kind.WEIGHT, "bias"): 32,
    }
    for (kind, flow), each in expected.items():
        moved = Traffic(kind=kind, flow=flow, **row, **counts)  # type: ignore[arg-type]
        assert moved.num_bytes(16, 2, unit_columns=48) == (3 * each, 5 * each)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_of_an_even_layer_are_those_by_hand(schedule: str) -> None:
    """For every slot on every rank; with multicast up to the rounding of expected tokens."""
    chunks = 2
    grid = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)
    layer = Workload(tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K, dim=4, hidden=8)
    for all_to_all in ("linear", "multicast") if schedule in ("s1", "s2") else ("linear",):
        plan = compile_plan(Plan(schedule=schedule, chunks=chunks, all_to_all=all_to_all), grid)  # type: ignore[arg-type]
        by_hand = even_sizes(
            grid,
            redundant=plan.is_redundant,
            tokens=TOKENS,
            num_experts=EXPERTS,
            top_k=TOP_K,
            num_chunks=chunks,
            node_tokens=even_node_tokens(
                grid, tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K, num_chunks=chunks
            ),
            units=4,
        )
        for program in (plan.forward, plan.backward):
            sizes = sizes_of(program, layer, grid)
            for slot in program.slots:
                for rank in range(grid.world):
                    assert sizes.num_rows(slot.layout, rank) == by_hand.num_rows(
                        slot.layout, rank
                    ), slot.name
