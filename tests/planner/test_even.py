"""One rank for all gives the times and loads of a simulation of every rank, for every schedule and
all-to-all."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from documented import block
from helpers import thinned
from moesaic.errors import InputError
from moesaic.planner.call_sizes import sizes_of
from moesaic.planner.candidates import SearchSpace
from moesaic.planner.cluster import Host, read_cluster
from moesaic.planner.even import Even
from moesaic.planner.hops import check_regular
from moesaic.planner.movement import ends_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.symmetry import Digits, UnlikeError
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import AbstractAllToAll, Hop, Leg, NodeMap, legs_of
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Axis, Grid
from moesaic.program.layouts import Move
from moesaic.program.plan import Plan
from moesaic.program.task import Lane, Layout, Op
from moesaic_lab.reproduce.sweep import sweep_simulator
from planner.clusters import tree

GRIDS = [
    Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4),
    Grid(world=8, tp=4, ep=4, etp=2, ranks_per_node=8),
    Grid(world=8, tp=2, ep=2, etp=4, ranks_per_node=4),
    Grid(world=16, tp=2, ep=4, etp=2, ranks_per_node=4),
    Grid(world=16, tp=1, ep=16, etp=1, ranks_per_node=4),
    Grid(world=16, tp=4, ep=8, etp=2, ranks_per_node=4),
    Grid(world=16, tp=2, ep=8, etp=2, ranks_per_node=2),
    Grid(world=16, tp=2, ep=4, etp=4, ranks_per_node=2, innermost="ep"),
]
SEARCHED = SearchSpace().all_to_alls
EXACT = ("linear", "hier2d", "pipelined", "hier3d")
WORKLOAD = Workload(tokens=512, num_experts=32, top_k=2, dim=64, hidden=64)


def compiled(grid: Grid, **plan: object) -> Compiled | None:
    try:
        return compile_plan(Plan(**plan), grid)  # type: ignore[arg-type]
    except InputError:
        return None


def tolerance(all_to_all: str) -> float:
    """Return the tolerance. With separate ranks, visits are rounded to whole rows. Under naive,
    nodes run the same hops in another order. Under hier1d, leaders share links with their node
    only, and shares are fixed link by link."""
    if all_to_all in ALL_TO_ALLS and ALL_TO_ALLS[all_to_all].hops_by_node:
        return 0.15
    return {"multicast": 2e-2, "hier1d": 2e-3, **dict.fromkeys(EXACT, 1e-9)}.get(all_to_all, 1e-2)


def regular(all_to_all: str) -> bool:
    """Return whether a few nodes stand for all of them under an all-to-all."""
    try:
        check_regular(ALL_TO_ALLS[all_to_all], all_to_all, 4, 4)
    except UnlikeError:
        return False
    return True


def compare(simulator: Simulator, compiled_plan: Compiled) -> None:
    for program in (compiled_plan.forward, compiled_plan.backward):
        by_one_rank = simulator.run(program, WORKLOAD, compiled_plan.grid)
        by_each_rank = simulator.run(
            program,
            WORKLOAD,
            compiled_plan.grid,
            sizes=sizes_of(program, WORKLOAD, compiled_plan.grid),
        )
        tolerated = tolerance(compiled_plan.plan.all_to_all)
        assert by_one_rank.seconds == pytest.approx(by_each_rank.seconds, rel=tolerated), (
            compiled_plan.grid,
            compiled_plan.plan,
            program.name,
        )
        assert by_one_rank.compute_seconds == pytest.approx(
            by_each_rank.compute_seconds, rel=max(tolerated, 1e-9)
        )
        busiest = [
            max(run.link_seconds.values(), default=0.0) for run in (by_one_rank, by_each_rank)
        ]
        assert busiest[0] == pytest.approx(busiest[1], rel=max(tolerated, 1e-9)), (
            compiled_plan.grid,
            compiled_plan.plan,
        )


@pytest.mark.parametrize("all_to_all", SEARCHED)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_every_all_to_all(schedule: str, all_to_all: str) -> None:
    seen = 0
    for grid in (GRIDS[0], GRIDS[6]):
        compiled_plan = compiled(grid, schedule=schedule, all_to_all=all_to_all)
        if compiled_plan is not None:
            seen += 1
            compare(
                Simulator(tree(grid.world // grid.ranks_per_node, grid.ranks_per_node)),
                compiled_plan,
            )  # type: ignore[operator]
    assert seen or all_to_all == "multicast"


@pytest.mark.random
def test_random_plans() -> None:
    draw = random.Random(5)
    space = list(
        itertools.product(
            GRIDS,
            SCHEDULES,
            SEARCHED,
            (1, 2),
            (1, 2),
            (None, 0, 1, 2),
            (False, True),
            (False, True),
        )
    )
    seen = 0
    for grid, schedule, links, chunks, groups, r, fuse, overlap in draw.sample(space, 100):
        if groups > 1 and (chunks > 1 or r is not None):
            continue
        compiled_plan = compiled(
            grid,
            schedule=schedule,
            all_to_all=links,
            chunks=chunks,
            peer_groups=groups,
            gather_weights=r,
            fuse=fuse,
            overlap_gather=overlap,
        )
        if compiled_plan is None:
            continue
        seen += 1
        compare(
            Simulator(tree(grid.world // (grid.ranks_per_node or 1), grid.ranks_per_node or 1)),
            compiled_plan,
        )
    assert seen > 10


@pytest.mark.parametrize(
    "all_to_all", [name for name in ALL_TO_ALLS if not ALL_TO_ALLS[name].hops_by_node]
)
def test_codecs_and_message_costs_count_identically(all_to_all: str) -> None:
    grid = GRIDS[3]
    simulator = Simulator(tree(4, 4))
    compiled_plan = compiled(
        grid, schedule="s2", all_to_all=all_to_all, codec="int8", backward_codec="fp8", chunks=2
    )
    assert compiled_plan is not None
    compare(simulator, compiled_plan)


@pytest.mark.parametrize(
    ("all_to_all", "runs_compute"),
    [("linear", False), ("linear", True), ("hier2d", True), ("pipelined", False)],
)
def test_costs_of_the_issuing_thread_count_identically(all_to_all: str, runs_compute: bool) -> None:
    """20 us per post is far more than the links take, so the threads decide: 30 sends and receives
    of a rank of 16.

    Routing weights travel with their rows and add no post.
    """
    host = Host(task_us=3.0, message_us=20.0, runs_compute=runs_compute)
    simulator = Simulator(tree(4, 4, host=host))
    compiled_plan = compiled(GRIDS[4], all_to_all=all_to_all)
    compare(simulator, compiled_plan)
    if all_to_all == "linear":
        run = simulator.run(compiled_plan.forward, WORKLOAD, compiled_plan.grid)
        moves = [
            task
            for task in compiled_plan.forward.tasks
            if task.op is Op.MOVE and "ep" in task.group
        ]
        assert [task.name for task in moves] == ["g", "h", "z"]
        assert run.seconds >= 2 * 30 * 20e-6
        assert runs_compute or run.seconds < 3 * 30 * 20e-6


@pytest.mark.parametrize(
    "all_to_all",
    [name for name in ALL_TO_ALLS if regular(name) and not ALL_TO_ALLS[name].hops_by_node],
)
def test_rows_and_messages_are_what_the_interpreter_sends(all_to_all: str) -> None:
    """Compares the total rows and messages of every task with `messages_of`: node 0's, times the
    nodes."""
    grid = GRIDS[4]
    compiled_plan = compiled(grid, schedule="s1", all_to_all=all_to_all)
    simulator = Simulator(tree(4, 4))
    slots = {slot.name: slot for slot in compiled_plan.forward.slots}
    even = simulator.volumes(compiled_plan.forward, WORKLOAD, compiled_plan.grid)
    sizes = sizes_of(compiled_plan.forward, WORKLOAD, compiled_plan.grid)
    moved = 0
    for task in compiled_plan.forward.tasks:
        if task.op not in (Op.MOVE, Op.HOP):
            continue
        sent = list(messages_of(task, slots, sizes))
        across = sum(grid.node_of(a) != grid.node_of(b) for a, b, _ in sent)
        for movement in even.movements(task, slots, ""):
            named = dict(zip(movement.load.links.tolist(), movement.load.messages.tolist()))
            on = {even.topology.names[link]: count for link, count in named.items()}
            assert on.get("nic out", 0.0) * 4 == pytest.approx(across)
            out = sum(count for name, count in on.items() if name.startswith("pcie out"))
            assert out * 4 == pytest.approx(len(sent))
            moved += 1
    assert moved >= 2


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_steps_go_to_the_ranks_that_the_interpreter_sends_to(groups: int) -> None:
    grid = GRIDS[5]
    compiled_plan = compiled(grid, schedule="s2", peer_groups=groups)
    even = Simulator(tree(4, 4)).volumes(compiled_plan.forward, WORKLOAD, compiled_plan.grid)
    assert isinstance(even, Even)
    sizes = sizes_of(compiled_plan.forward, WORKLOAD, compiled_plan.grid)
    slots = {slot.name: slot for slot in compiled_plan.forward.slots}
    seen = 0
    for task in compiled_plan.forward.tasks:
        if task.op is Op.MOVE:
            sent = {(a, b): float(rows) for a, b, rows in messages_of(task, slots, sizes)}
            for source, target, rows, _ in even.sent(ends_of(task, slots)[1]):
                assert rows == sent.get((source, target), 0.0), (task.name, source, target)
                seen += rows > 0
    assert seen > 10


def test_rows_of_every_slot_are_those_of_sizes() -> None:
    for grid in GRIDS:
        for groups, chunks in ((1, 2), (2, 1)):
            compiled_plan = compiled(grid, schedule="s3", chunks=chunks, peer_groups=groups)
            if compiled_plan is None:
                continue
            simulator = Simulator(
                tree(grid.world // (grid.ranks_per_node or 1), grid.ranks_per_node or 1)
            )
            even = simulator.volumes(compiled_plan.forward, WORKLOAD, compiled_plan.grid)
            sizes = sizes_of(compiled_plan.forward, WORKLOAD, compiled_plan.grid)
            for slot in compiled_plan.forward.slots:
                rows = even.rows(slot.layout)
                expected = [sizes.num_rows(slot.layout, rank) for rank in range(len(rows))]
                assert rows.tolist() == pytest.approx(expected), (grid, slot.name)


def test_axes_that_do_not_nest_are_simulated_rank_by_rank_or_refused() -> None:
    grid = Grid(world=12, tp=2, ep=2, etp=3, ranks_per_node=6)
    with pytest.raises(UnlikeError):
        Digits(grid)
    compiled_plan = compiled(grid, schedule="s1")
    simulator = Simulator(tree(2, 6))
    run = simulator.run(compiled_plan.forward, WORKLOAD, compiled_plan.grid)
    assert len(run.ends) == 12
    large = Grid(world=6000, tp=2, ep=2, etp=3, ranks_per_node=6)
    with pytest.raises(
        InputError, match="choose axes that divide one another, or at most 4096 ranks"
    ):
        Simulator(tree(1000, 6)).run(compiled_plan.forward, WORKLOAD, large)


@pytest.mark.parametrize(("nodes", "tp"), [(2, 1), (4, 2), (8, 1)])
def test_the_all_to_all_of_the_docs_takes_as_long_as_rank_by_rank(monkeypatch, nodes, tp):
    """The ring passes packets on from node to node: on eight nodes it takes four times as long as
    if all nodes did the same."""
    monkeypatch.setitem(ALL_TO_ALLS, "ring", block("An all-to-all")["NodeRing"]())
    cluster = read_cluster("25gbe", nodes=nodes)
    world = cluster.world
    grid = Grid(world=world, tp=tp, ep=world // tp, etp=tp, ranks_per_node=cluster.devices_per_node)
    layer = Workload(tokens=4096, num_experts=64, top_k=2, dim=1024, hidden=2816)
    for simulator in (Simulator(cluster), sweep_simulator(cluster)):
        compiled_plan = compiled(grid, all_to_all="ring")
        for program in (compiled_plan.forward, compiled_plan.backward):
            even = simulator.run(program, layer, grid).seconds
            exact = simulator.run(
                program, layer, grid, sizes=sizes_of(program, layer, grid)
            ).seconds
            assert even / exact == pytest.approx(1, abs=0.01)


class Numbered(AbstractAllToAll):
    """2DH that depends on a node's number."""

    def __init__(self, look: Callable[[NodeMap, int, int], object]) -> None:
        self.look = look

    def hops(self, places: NodeMap) -> tuple[Hop, ...]:
        return Hop(Lane.INTRA), Hop(Lane.INTER, (-1, 0))

    def path(self, places: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        detour = self.look(places, source, target)
        mate = places.rank(places.node(source), places.local(target)) if detour else source
        return legs_of((0, source, mate), (1, mate, target))


LOOKS: dict[str, Callable[[NodeMap, int, int], object]] = {
    "parity": lambda places, source, target: places.node(source) % 2,
    "order": lambda places, source, target: places.node(source) < places.node(target),
    "zero": lambda places, source, target: places.node(source) == 0,
    "truth": lambda places, source, target: bool(places.node(target)),
    "rank": lambda places, source, target: source > target,
    "rank's number": lambda places, source, target: target == 3,
    "list of ranks": lambda places, source, target: places.ranks.index(source) == 1,
    "list of nodes": lambda places, source, target: source in places.nodes[0],
    "all nodes": lambda places, source, target: next(iter(places.nodes)) == [source],
    "index": lambda places, source, target: [1, 0, 1, 0][places.node(source)],
    "key": lambda places, source, target: {0: 1}.get(places.node(source)),
    "text": lambda places, source, target: str(places.node(source)) == "1",
    "fixed node": lambda places, source, target: places.rank(1, 0) == source,
    "groups": lambda places, source, target: (
        places.node(source) == places.like(places.node(source), 0, 2)
    ),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whatever_looks_at_a_node_s_number_is_simulated_rank_by_rank(monkeypatch, look):
    monkeypatch.setitem(ALL_TO_ALLS, "numbered", Numbered(LOOKS[look]))
    compiled_plan = compiled(GRIDS[4], all_to_all="numbered")
    assert not isinstance(
        Simulator(tree(4, 4)).volumes(compiled_plan.forward, WORKLOAD, compiled_plan.grid), Even
    )


def test_an_irregular_all_to_all_is_refused_where_ranks_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ALL_TO_ALLS, "numbered", Numbered(LOOKS["parity"]))
    monkeypatch.setattr("moesaic.planner.simulator.MAX_RANKS_APART", 512)
    grid = Grid(world=1024, ep=1024, ranks_per_node=4)
    layer = Workload(tokens=512, num_experts=1024, top_k=2, dim=64, hidden=64)
    compiled_plan = compiled(grid, all_to_all="numbered")
    with pytest.raises(
        InputError,
        match="choose an all-to-all in which all nodes do the same, or at most 512 ranks",
    ):
        Simulator(tree(256, 4)).run(compiled_plan.forward, layer, grid)


LAYOUTS = [
    Layout(flow=flow, spread=spread, whole_tp=whole, experts=experts)
    for flow in ("copies", "tokens")
    for spread in ((), ("ep",), ("etp",), ("ep", "etp"), ("node",), ("local",))
    for whole in (False, True)
    for experts in (("all", "rank", "node") if flow == "copies" else ("all",))
]
AXES: tuple[tuple[Axis, ...], ...] = (
    ("tp",),
    ("ep",),
    ("etp",),
    ("ep", "etp"),
    ("node",),
    ("local",),
)


@pytest.mark.parametrize(
    "grid",
    thinned(
        [GRIDS[0], GRIDS[6], Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=2, innermost="ep")],
        every=3,
    ),
)
def test_any_movement_that_a_schedule_may_have_sends_what_the_interpreter_sends(grid: Grid) -> None:
    """Between any two layouts, over any axes, summed or not: either all nodes behave identically,
    or an error is raised."""
    compiled_plan = compiled(grid, schedule="s2")
    program = compiled_plan.forward
    per_node = grid.ranks_per_node or grid.world
    even = Simulator(tree(grid.world // per_node, per_node)).volumes(program, WORKLOAD, grid)
    assert isinstance(even, Even)
    sizes = sizes_of(program, WORKLOAD, grid)
    seen = 0
    space = [Move(*each) for each in itertools.product(LAYOUTS, LAYOUTS, AXES, (False, True))]
    for move in random.Random(7).sample([m for m in space if m.source.flow == m.target.flow], 600):
        try:
            splits = [sizes.outgoing(move, rank) for rank in range(grid.world)]
        except AssertionError:  # the target's pieces are nowhere in the group
            continue
        left = [
            sum(n for peer, n in zip(lot.peers, lot.counts) if peer != rank)
            for rank, lot in enumerate(splits)
        ]
        try:
            sent = even.sent(move)
        except UnlikeError:
            continue
        seen += 1
        by_source = Counter(dict.fromkeys(range(per_node), 0.0))
        for source, target, rows, count in sent:
            assert rows == sizes.num_moved(move, source, target), move
            by_source[source] += rows * count
        assert left == [by_source[rank % per_node] for rank in range(grid.world)], move
    assert seen > 40
