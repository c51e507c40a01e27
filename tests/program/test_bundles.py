"""Movements that are sent together: which ones are, and that nothing else of a program changes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from moesaic.errors import InputError
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.joined_messages import bundles, side_by_side
from moesaic.program.order.graph import in_order
from moesaic.program.plan import Plan
from moesaic.program.task import Kind, Op, Program, Task
from moesaic.program.validate import validate

GRIDS = (Grid(world=4, ep=4, ranks_per_node=2), Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4))


def compiled() -> list[Compiled]:
    programs = []
    choices = itertools.product(
        tuple(SCHEDULES),
        (
            ("linear", 1, "none", "fifo"),
            ("hier2d", 2, "bf16", "optsche"),
            ("multicast", 2, "none", "optsche"),
        ),
    )
    for (schedule, (all_to_all, chunks, codec, order)), grid in itertools.product(choices, GRIDS):
        try:
            plan = Plan(
                schedule=schedule, all_to_all=all_to_all, chunks=chunks, codec=codec, order=order
            )
            programs.append(compile_plan(plan, grid))
        except InputError:
            continue
    assert len(programs) > 15
    return programs


PROGRAMS = [program for each in compiled() for program in (each.forward, each.backward)]


def kinds(program: Program, bundle: tuple[int, ...]) -> list[Kind]:
    return [program.slot(program.tasks[place].writes[0]).kind for place in bundle]


def test_what_travels_as_one_goes_the_same_way_and_waits_for_nothing_in_it() -> None:
    joint = 0
    for program in PROGRAMS:
        for bundle in (each for each in bundles(program) if len(each) > 1):
            tasks = [program.tasks[place] for place in bundle]
            assert {(task.op, task.lane, task.group, task.stage) for task in tasks} == {
                (Op.MOVE, tasks[0].lane, tasks[0].group, tasks[0].stage)
            }
            assert not {name for task in tasks for name in task.reads} & {
                name for task in tasks for name in task.writes
            }
            assert not {Kind.ROWS, Kind.TOKENS, Kind.WEIGHT} & set(kinds(program, bundle)[:-1])
            assert Kind.WEIGHT not in kinds(program, bundle)
            joint += 1
    assert joint > len(PROGRAMS)


def test_chunks_of_rows_do_not_wait_for_each_other() -> None:
    for program in PROGRAMS:
        for bundle in bundles(program):
            assert sum(kind in (Kind.ROWS, Kind.TOKENS) for kind in kinds(program, bundle)) <= 1


def test_only_weights_and_indices_change_their_place() -> None:
    changed = 0
    for program in PROGRAMS:
        early = in_order(program, lambda task: task.op is not Op.MOVE)
        loose = replace(program, tasks=early)
        tight = side_by_side(loose)
        small = {
            task.name
            for task in early
            if task.op is Op.MOVE and kind_of(program, task) in (Kind.LANE, Kind.INDEX)
        }
        assert [task for task in tight.tasks if task.name not in small] == [
            t for t in early if t.name not in small
        ]
        assert sorted(task.name for task in tight.tasks) == sorted(task.name for task in early)
        validate(tight)
        changed += tight.tasks != early
    assert changed > 5


def kind_of(program: Program, task: Task) -> Kind:
    return program.slot(task.writes[0]).kind


@pytest.mark.parametrize(
    ("all_to_all", "forward", "backward"),
    [
        (
            "multicast",
            [
                ["rank_token_index_here", "copy_index_here", "gates_here", "node_tokens_here"],
                ["copy_index_in", "g", "rank_tokens_in"],
            ],
            [["gates_here'", "rank_tokens'"], ["gates'", "node_tokens'"]],
        ),
        ("linear", [["g", "h"]], [["gates'", "rows'"]]),
    ],
)
def test_routing_weights_leave_with_their_rows(all_to_all, forward, backward):
    work = compile_plan(Plan(all_to_all=all_to_all), GRIDS[0])  # type: ignore[arg-type]
    for program, expected in ((work.forward, forward), (work.backward, backward)):
        joint = [bundle for bundle in bundles(program) if len(bundle) > 1]
        assert [
            [program.tasks[place].writes[0] for place in bundle] for bundle in joint
        ] == expected
