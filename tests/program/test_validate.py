"""Errors of the validator for invalid programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Program
from moesaic.program.validate import ProgramError, validate


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


def test_compiled_programs_of_equal_ranks_agree() -> None:
    grid = Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4)
    compiled = [compile_plan(Plan(schedule="s2", chunks=2, all_to_all="hier2d"), grid) for _ in range(3)]
    assert len({(each.forward, each.backward) for each in compiled}) == 1
