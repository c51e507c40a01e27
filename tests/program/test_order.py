"""Orders: they are valid permutations, OptSche is optimal where it should be, and the exact search agrees with slow
searches."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest

from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.order import ORDERS
from moesaic.program.order.exact import exact, jobs_of, preemptive, search
from moesaic.program.order.graph import early, fifo
from moesaic.program.order.optsche import optsche
from moesaic.program.passes.route_all_to_all import compress, route_all_to_all
from moesaic.program.passes.split import split_capacity, split_peers
from moesaic.program.task import Lane, Op, Program, Stage
from moesaic.program.timeline import lay_out
from moesaic.program.transpose import transpose
from moesaic.program.validate import validate
from program.schemoe import (
    PASSES,
    best_of_all_lists,
    best_of_all_merges,
    best_of_lane_orders,
    durations_of,
    random_program,
    schemoe,
)

GRID = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=2)
FORWARD = {
    f"{name}-{chunks}": split_capacity(make(), chunks) for name, make in SCHEDULES.items() for chunks in (1, 2, 3)
}
FORWARD["s1-peers"] = split_peers(SCHEDULES["s1"](), 2, GRID)
FORWARD["s2-chunks-peers"] = split_peers(split_capacity(SCHEDULES["s2"](), 2), 2, GRID)
LOGICAL = FORWARD | {f"{name}-backward": transpose(program) for name, program in FORWARD.items()}
CODED = {f"{name}-int8": compress(program, "int8", GRID) for name, program in LOGICAL.items()}
HOPS = {
    f"s3-2-{link}{way}": route_all_to_all(LOGICAL[f"s3-2{way}"], link, GRID)
    for link in ("hier1d", "hier2d", "pipelined")
    for way in ("", "-backward")
}
PROGRAMS = LOGICAL | CODED | HOPS
LONG_DISPATCH = {
    f"{word}.{chunk}": length
    for word, length in zip(PASSES, (3.0, 10.0, 1.0, 1.0, 1.0, 1.0, 10.0))
    for chunk in range(2)
}


def makespan(program: Program, seconds: dict[str, float], host_runs_compute: bool = False) -> float:
    return lay_out(program, seconds, host_runs_compute=host_runs_compute).makespan


def some_seconds(program: Program, rng: random.Random) -> dict[str, float]:
    scale = {Lane.COMPUTE: 1.0, Lane.INTRA: 0.5, Lane.INTER: 3.0}
    return {task.name: scale[task.lane] * rng.choice((0.0, rng.random(), 2 * rng.random())) for task in program.tasks}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_a_legal_permutation_of_every_program(order: str) -> None:
    rng = random.Random(5)
    for program in PROGRAMS.values():
        for seconds in (None, some_seconds(program, rng)):
            kwargs = {"max_nodes": 20} if order == "exact" else {}
            ordered = ORDERS[order](program, None if seconds is None else partial(dict, seconds), **kwargs)
            validate(ordered)
            assert sorted(ordered.tasks, key=lambda task: task.name) == sorted(
                program.tasks, key=lambda task: task.name
            )
            assert (ordered.name, ordered.slots, ordered.inputs, ordered.outputs) == (
                program.name, program.slots, program.inputs, program.outputs,
            )  # fmt: skip


@pytest.mark.parametrize("host_runs_compute", [False, True])
def test_exact_is_never_worse_than_the_others_on_our_programs(host_runs_compute: bool) -> None:
    rng = random.Random(6)
    better = 0
    for program in PROGRAMS.values():
        seconds = some_seconds(program, rng)
        result = search(program, seconds, host_runs_compute=host_runs_compute, max_nodes=60)
        validate(result.program)
        others = min(makespan(order(program), seconds, host_runs_compute) for order in (fifo, early, optsche))
        assert result.makespan <= others
        assert result.makespan == makespan(result.program, seconds, host_runs_compute)
        better += result.makespan < others * (1 - 1e-9)
    assert better > len(PROGRAMS) / 4


def test_optsche_is_the_order_of_the_paper() -> None:
    names = [task.name for task in optsche(schemoe(3)).tasks]
    assert " ".join(name for name in names if name[0] != "A") == (
        "C1.0 C1.1 C1.2 D1.0 E.0 C2.0 D1.1 E.1 C2.1 D1.2 E.2 C2.2 D2.0 D2.1 D2.2"
    )
    assert " ".join(name for name in names if name[0] == "A") == "A1.0 A1.1 A1.2 A2.0 A2.1 A2.2"
    assert all(names.index(f"A{i}.{c}") == names.index(f"C{i}.{c}") + 1 for i in (1, 2) for c in range(3))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("s1-2-int8", "h.0@pack h.1@pack h.0 out.0 z.0@pack h.1 out.1 z.1@pack z.0 z.1"),
        (
            "s1-2-backward-int8",
            "out.0'@pack out.1'@pack z.0' out.0' rows.0'@pack z.1' out.1' rows.1'@pack w'+ h.0' h.1'",
        ),
    ],
)
def test_optsche_of_a_coded_program_and_its_transpose(name: str, order: str) -> None:
    first = order.split()[0]
    computed = [task.name for task in optsche(CODED[name]).tasks if task.lane is Lane.COMPUTE]
    start = computed.index(first)
    assert " ".join(computed[start : start + len(order.split())]) == order


def test_optsche_gathers_one_chunk_ahead_inside_a_node() -> None:
    names = [task.name for task in optsche(LOGICAL["s3-3"]).tasks]
    assert names.index("h.0") < names.index("out.0") < names.index("h.1") < names.index("reduced.0")
    assert names.index("z.0") < names.index("out.1") < names.index("h.2") < names.index("reduced.1")


def test_optsche_starts_a_hop_of_all_chunks_before_the_next_hop_of_one() -> None:
    hops = [task for task in optsche(HOPS["s3-2-hier1d"]).tasks if task.link and task.lane is not Lane.COMPUTE]
    dispatches = [task.name for task in hops if task.stage is Stage.DISPATCH and task.name.startswith("arrived")]
    assert dispatches[:4] == ["arrived.0@0", "arrived.1@0", "arrived.0@1", "arrived.1@1"]


def test_early_issues_hops_as_the_movements_they_are() -> None:
    program = schemoe(2)
    tasks = [task for task in program.tasks if not task.name.startswith("C1")]
    tasks = [replace(task, op=Op.HOP) if task.op is Op.MOVE else task for task in tasks]
    tasks = [replace(task, reads=(f"x.{task.name[-1]}",)) if task.name.startswith("A1") else task for task in tasks]
    names = [task.name for task in early(replace(program, tasks=tuple(tasks))).tasks]
    assert names[:3] == ["A1.0", "A1.1", "D1.0"]
    assert names.index("A2.0") == names.index("C2.0") + 1


@pytest.mark.parametrize(("num_chunks", "cases"), [(2, 40), (3, 12)])
def test_optsche_equals_brute_force_on_equal_chunks(num_chunks: int, cases: int) -> None:
    rng = random.Random(num_chunks)
    program = schemoe(num_chunks)
    for _ in range(cases):
        seconds = durations_of(rng, num_chunks, equal_chunks=True, equal_passes=True)
        best = best_of_lane_orders(seconds) if num_chunks == 2 else best_of_all_merges(seconds, num_chunks)
        assert makespan(optsche(program), seconds) == pytest.approx(best, rel=1e-12)


def test_the_two_slow_searches_agree() -> None:
    rng = random.Random(8)
    for _ in range(10):
        seconds = durations_of(rng, 2, equal_chunks=False, equal_passes=False)
        assert best_of_lane_orders(seconds) == pytest.approx(best_of_all_merges(seconds, 2), rel=1e-12)


@pytest.mark.parametrize(
    ("num_chunks", "equal_chunks", "cases", "improved"),
    [(2, True, 40, 0), (2, False, 60, 20), (3, True, 8, 0), (3, False, 8, 2)],
)
def test_exact_equals_brute_force(num_chunks: int, equal_chunks: bool, cases: int, improved: int) -> None:
    rng = random.Random(9)
    program = schemoe(num_chunks)
    count = 0
    for _ in range(cases):
        seconds = durations_of(rng, num_chunks, equal_chunks=equal_chunks, equal_passes=False)
        best = best_of_lane_orders(seconds) if num_chunks == 2 else best_of_all_merges(seconds, num_chunks)
        result = search(program, seconds)
        assert result.is_optimal
        assert result.makespan == pytest.approx(best, rel=1e-12)
        count += makespan(optsche(program), seconds) > best * (1 + 1e-9)
    assert count >= improved


@pytest.mark.parametrize("host_runs_compute", [False, True])
@pytest.mark.parametrize(("cases", "smallest", "largest"), [(150, 3, 5), (30, 6, 7)])
def test_exact_equals_all_lists_of_small_programs(
    cases: int, smallest: int, largest: int, host_runs_compute: bool
) -> None:
    rng = random.Random(10)
    for _ in range(cases):
        lanes = rng.choice((tuple(Lane), (Lane.COMPUTE, Lane.INTRA, Lane.INTER), (Lane.COMPUTE, Lane.INTER)))
        program = random_program(rng, rng.randint(smallest, largest), lanes)
        seconds = {task.name: rng.choice((0.0, 1.0, 2.0, 3 * rng.random())) for task in program.tasks}
        result = search(program, seconds, host_runs_compute=host_runs_compute)
        best = best_of_all_lists(program, seconds, host_runs_compute=host_runs_compute)
        assert result.is_optimal
        assert result.makespan == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("host_runs_compute", [False, True])
def test_the_search_starts_from_the_best_of_the_others(host_runs_compute: bool) -> None:
    rng = random.Random(12)
    winners = set()
    for _ in range(100):
        program = random_program(rng, 8, (Lane.COMPUTE, Lane.INTRA, Lane.INTER))
        seconds = {task.name: rng.random() for task in program.tasks}
        others = [makespan(order(program), seconds, host_runs_compute) for order in (fifo, early, optsche)]
        result = search(program, seconds, host_runs_compute=host_runs_compute, max_nodes=0)
        assert result.makespan == min(others)
        winners |= {place for place, length in enumerate(others) if others.count(length) == 1 and length == min(others)}
    assert winners == {0, 1, 2}


def test_a_lane_may_stay_idle_for_what_arrives_soon() -> None:
    """An order that never leaves a lane idle is not always the best: here `a` could run at once, but would delay `c`."""
    program = schemoe(2)
    a, arrives, c, last = (task for task in program.tasks if task.name in ("C1.0", "A1.1", "D1.1", "A2.1"))
    tasks = (a, replace(arrives, reads=("x.1",)), c, replace(last, reads=("D1.1",)))
    program = replace(program, tasks=tasks, outputs=())
    seconds = {"C1.0": 5.0, "A1.1": 1.0, "D1.1": 4.5, "A2.1": 20.0}
    assert makespan(program, seconds) == 29.5
    assert search(program, seconds).makespan == 25.5


@pytest.mark.parametrize("seed", range(50, 60))
def test_exact_equals_all_lists_where_movements_queue_and_the_thread_waits(seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng, 7, (Lane.COMPUTE, Lane.INTER, Lane.INTER))
    seconds = {task.name: float(rng.randrange(1, 9)) for task in program.tasks}
    best = best_of_all_lists(program, seconds, host_runs_compute=True)
    assert search(program, seconds, host_runs_compute=True).makespan == pytest.approx(best, rel=1e-12)


def test_exact_equals_all_lists_where_the_thread_computes() -> None:
    rng = random.Random(11)
    for equal in (True, False):
        seconds = durations_of(rng, 2, equal_chunks=equal, equal_passes=False)
        result = search(schemoe(2), seconds, host_runs_compute=True)
        assert result.is_optimal
        best = best_of_all_lists(schemoe(2), seconds, host_runs_compute=True)
        assert result.makespan == pytest.approx(best, rel=1e-12)


def test_a_long_dispatch_lets_the_first_result_go_before_the_second_dispatch() -> None:
    """If A1 is far longer than A2 and decoding takes long, it helps to send A2 of the first chunk before A1 of the second."""
    result = search(schemoe(2), LONG_DISPATCH)
    moves = [task.name for task in result.program.tasks if task.lane is Lane.INTER]
    assert moves == ["A1.0", "A2.0", "A1.1", "A2.1"]
    assert (makespan(optsche(schemoe(2)), LONG_DISPATCH), result.makespan) == (46, 41)
    assert result.is_optimal


def test_unequal_chunks_are_reordered() -> None:
    slow_there, slow_back = (5.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 9.0, 1.0, 5.0, 5.0)
    seconds = {
        f"{word}.{chunk}": length
        for chunk, lengths in enumerate((slow_there, slow_back))
        for word, length in zip(PASSES, lengths)
    }
    result = search(schemoe(2), seconds)
    assert result.program.tasks[0].name == "C1.1"
    assert result.makespan == pytest.approx(best_of_lane_orders(seconds))
    assert result.makespan < makespan(optsche(schemoe(2)), seconds)


def test_the_search_is_deterministic_and_its_limit_is_kept() -> None:
    program = LOGICAL["s3-3"]
    seconds = some_seconds(program, random.Random(14))
    one, two = (search(program, seconds, max_nodes=40) for _ in range(2))
    assert one == two
    limits = [search(program, seconds, max_nodes=limit) for limit in (0, 1, 40, 100_000)]
    assert [result.nodes <= limit for result, limit in zip(limits, (0, 1, 40, 100_000))] == [True] * 4
    assert all(before.makespan >= after.makespan for before, after in pairwise(limits))
    assert limits[0].makespan == min(makespan(order(program), seconds) for order in (fifo, early, optsche))
    assert not limits[0].is_optimal
    assert limits[-1].is_optimal


def test_exact_without_durations_is_optsche_and_with_them_the_search() -> None:
    program = schemoe(2)
    assert exact(program) == optsche(program)
    assert exact(program, lambda: LONG_DISPATCH) == search(program, LONG_DISPATCH).program
    assert exact(program, lambda: LONG_DISPATCH) != optsche(program)


def test_the_found_list_is_issued_by_starting_time() -> None:
    result = search(schemoe(2), LONG_DISPATCH)
    starts = [span.start for span in lay_out(result.program, LONG_DISPATCH).spans]
    assert result.nodes > 0
    assert starts == sorted(starts)


def test_twins_are_equal_chunks_and_no_others() -> None:
    equal = durations_of(random.Random(17), 3, equal_chunks=True, equal_passes=False)
    assert len(jobs_of(schemoe(3), equal, False).twins) == 3
    one_longer = equal | {"E.2": equal["E.2"] + 1}
    (pair,) = jobs_of(schemoe(3), one_longer, False).twins
    assert pair == (frozenset(range(7)), frozenset(range(7, 14)))
    for name in ("s2-2", "s2-2-backward", "s1-peers"):
        program = LOGICAL[name]
        assert len(jobs_of(program, {task.name: 1.0 for task in program.tasks}, False).twins) == 1


def test_the_bound_of_one_machine_preempts() -> None:
    assert preemptive([(0, 5, 0), (1, 1, 10)]) == 12
    assert preemptive([(0, 2, 3), (0, 1, 5), (7, 1, 0)]) == 8
    assert preemptive([]) == 0


def test_the_first_bound_never_exceeds_the_optimum() -> None:
    rng = random.Random(18)
    for program, host in [*((schemoe(2), flag) for flag in (False, True)), (LOGICAL["s1-2"], False)]:
        for _ in range(10):
            seconds = {task.name: rng.random() for task in program.tasks}
            count = len(program.tasks)
            bound = jobs_of(program, seconds, host).bound(0, (0.0,) * 4, (0.0,) * count)
            assert bound <= search(program, seconds, host_runs_compute=host, max_nodes=10**6).makespan * (1 + 1e-12)
            lanes = [sum(seconds[t.name] for t in program.tasks if t.lane is lane) for lane in Lane]
            assert bound >= max(lanes) * (1 - 1e-12)


def test_orders_differ_on_a_program_worth_ordering() -> None:
    program = CODED["s2-3-int8"]
    lists = [order(program).tasks for order in (fifo, early, optsche)]
    assert all(one != two for one, two in combinations(lists, 2))
