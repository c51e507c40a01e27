"""What the validator says of programs that nobody may run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.plan import Plan, compile_plan
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.passes.split import split_capacity
from moesaic.program.task import Program
from moesaic.program.transpose import transpose
from moesaic.program.validate import ProgramError, validate, validate_pair, validate_ranks


def waiting_for_itself() -> Program:
    program = SCHEDULES["s2"](False)
    tasks = tuple(replace(t, reads=("z", *t.reads[1:])) if t.name == "h" else t for t in program.tasks)
    return replace(program, tasks=tasks)


def test_a_cycle_is_named_task_by_task() -> None:
    with pytest.raises(ProgramError, match=r"tasks wait for each other: \w+ -> \w+ -> \w+ -> \w+$"):
        validate(waiting_for_itself())


def test_a_wrong_order_is_no_cycle() -> None:
    program = SCHEDULES["s2"](False)
    with pytest.raises(ProgramError, match="before anything writes it"):
        validate(replace(program, tasks=program.tasks[::-1]))


def test_ranks_must_issue_the_movements_of_a_group_in_one_order() -> None:
    program = split_capacity(SCHEDULES["s1"](False), 2)
    names = [task.name for task in program.tasks]
    a, b = names.index("h.0"), names.index("h.1")
    tasks = list(program.tasks)
    tasks[a], tasks[b] = tasks[b], tasks[a]
    validate_ranks([program, program])
    with pytest.raises(ProgramError, match=r"movement 0 over ep\+etp is h.0 on rank 0 and h.1 on rank 1"):
        validate_ranks([program, replace(program, tasks=tuple(tasks))])
    with pytest.raises(ProgramError, match=r"is z.1 on rank 0 and nothing on rank 1"):
        validate_ranks([program, replace(program, tasks=tuple(t for t in program.tasks if t.name != "z.1"))])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_missing_or_changed_transpose_is_named(schedule: str) -> None:
    forward = SCHEDULES[schedule](False)
    backward = transpose(forward)
    validate_pair(forward, backward)
    with pytest.raises(ProgramError, match=f"task {backward.tasks[0].name} is missing"):
        validate_pair(forward, replace(backward, tasks=backward.tasks[1:]))
    changed = replace(backward.tasks[0], power=backward.tasks[0].power + 1)
    with pytest.raises(ProgramError, match="is not the transpose of what"):
        validate_pair(forward, replace(backward, tasks=(changed, *backward.tasks[1:])))
    extra = replace(backward.tasks[0], name="more")
    with pytest.raises(ProgramError, match="task more is no transpose"):
        validate_pair(forward, replace(backward, tasks=(*backward.tasks, extra)))


def test_compiled_programs_of_equal_ranks_agree() -> None:
    grid = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)
    compiled = [compile_plan(Plan(schedule="s2", chunks=2, all_to_all="hier2d"), grid) for _ in range(3)]
    validate_ranks([each.forward for each in compiled])
    validate_ranks([each.backward for each in compiled])
