"""Orders: they are valid permutations, and OptSche is optimal where it should be."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.order import ORDERS
from moesaic.program.order.graph import early, fifo
from moesaic.program.order.optsche import optsche
from moesaic.program.passes.route_all_to_all import compress, route_all_to_all
from moesaic.program.passes.split import split_capacity, split_peers
from moesaic.program.task import Lane, Op, Program, Stage
from moesaic.program.timeline import lay_out
from moesaic.program.transpose import transpose
from moesaic.program.validate import validate
from program.schemoe import best_of_all_merges, durations_of, schemoe

GRID = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=2)
FORWARD = {
    f"{name}-{chunks}": split_capacity(make(), chunks)
    for name, make in SCHEDULES.items()
    for chunks in (2, 3)
}
FORWARD["s1-peers"] = split_peers(SCHEDULES["s1"](), 2, GRID)
FORWARD["s2-chunks-peers"] = split_peers(split_capacity(SCHEDULES["s2"](), 2), 2, GRID)
LOGICAL = FORWARD | {f"{name}-backward": transpose(program) for name, program in FORWARD.items()}
CODED = {
    f"{name}-int8": compress(LOGICAL[name], "int8", GRID)
    for name in ("s1-2", "s1-2-backward", "s2-3", "ted-2")
}
HOPS = {
    f"s3-2-{link}{way}": route_all_to_all(LOGICAL[f"s3-2{way}"], link, GRID)
    for link in ("hier1d", "hier2d", "pipelined")
    for way in ("", "-backward")
}
PROGRAMS = LOGICAL | CODED | HOPS


def makespan(program: Program, seconds: dict[str, float], host_runs_compute: bool = False) -> float:
    return lay_out(program, seconds, host_runs_compute=host_runs_compute).makespan


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_a_legal_permutation_of_every_program(order: str) -> None:
    for program in PROGRAMS.values():
        ordered = ORDERS[order](program)
        validate(ordered)
        assert sorted(ordered.tasks, key=lambda task: task.name) == sorted(
            program.tasks, key=lambda task: task.name
        )
        assert (ordered.name, ordered.slots, ordered.inputs, ordered.outputs) == (
            program.name,
            program.slots,
            program.inputs,
            program.outputs,
        )


def test_optsche_is_the_order_of_the_paper() -> None:
    names = [task.name for task in optsche(schemoe(3)).tasks]
    assert " ".join(name for name in names if name[0] != "A") == (
        "C1.0 C1.1 C1.2 D1.0 E.0 C2.0 D1.1 E.1 C2.1 D1.2 E.2 C2.2 D2.0 D2.1 D2.2"
    )
    assert " ".join(name for name in names if name[0] == "A") == "A1.0 A1.1 A1.2 A2.0 A2.1 A2.2"
    assert all(
        names.index(f"A{i}.{c}") == names.index(f"C{i}.{c}") + 1 for i in (1, 2) for c in range(3)
    )


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("s1-2-int8", "h.0@pack h.1@pack h.0 out.0 z.0@pack h.1 out.1 z.1@pack z.0 z.1"),
        (
            "s1-2-backward-int8",
            (
                "out.0'@pack out.1'@pack z.0' out.0' rows.0'@pack z.1' out.1' rows.1'@pack w'+ "
                "h.0' h.1'"
            ),
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
    hops = [
        task
        for task in optsche(HOPS["s3-2-hier1d"]).tasks
        if task.link and task.lane is not Lane.COMPUTE
    ]
    dispatches = [
        task.name
        for task in hops
        if task.stage is Stage.DISPATCH and task.name.startswith("arrived")
    ]
    assert dispatches[:4] == ["arrived.0@0", "arrived.1@0", "arrived.0@1", "arrived.1@1"]


def test_early_issues_hops_as_the_movements_they_are() -> None:
    program = schemoe(2)
    tasks = [task for task in program.tasks if not task.name.startswith("C1")]
    tasks = [replace(task, op=Op.HOP) if task.op is Op.MOVE else task for task in tasks]
    tasks = [
        replace(task, reads=(f"x.{task.name[-1]}",)) if task.name.startswith("A1") else task
        for task in tasks
    ]
    names = [task.name for task in early(replace(program, tasks=tuple(tasks))).tasks]
    assert names[:3] == ["A1.0", "A1.1", "D1.0"]
    assert names.index("A2.0") == names.index("C2.0") + 1


@pytest.mark.parametrize(("num_chunks", "cases"), [(2, 10), (3, 1)])
def test_optsche_equals_brute_force_on_equal_chunks(num_chunks: int, cases: int) -> None:
    rng = random.Random(num_chunks)
    program = schemoe(num_chunks)
    for _ in range(cases):
        seconds = durations_of(rng, num_chunks)
        best = best_of_all_merges(seconds, num_chunks)
        assert makespan(optsche(program), seconds) == pytest.approx(best, rel=1e-12)


def test_orders_differ_on_a_program_worth_ordering() -> None:
    program = CODED["s2-3-int8"]
    lists = [order(program).tasks for order in (fifo, early, optsche)]
    assert all(one != two for one, two in combinations(lists, 2))
