"""All passes together: any valid combination gives programs that validate, print, and transpose by
the rule of the states."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helpers import thinned
from moesaic.errors import InputError
from moesaic.planner.candidates import SearchSpace
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Op, State
from moesaic.program.text import to_text
from moesaic.program.transpose import cotangent
from moesaic.program.validate import ProgramError, validate
from program_text import from_text

ALL_TO_ALLS = SearchSpace().all_to_alls


def draw_plan(rng: random.Random) -> Plan:
    return Plan(
        schedule=rng.choice(list(SCHEDULES)),  # type: ignore[arg-type]
        fuse=rng.random() < 0.3,
        gather_weights=rng.choice([None, None, 0, 1, 2, 4]),
        chunks=rng.choice([1, 2, 3]),
        peer_groups=rng.choice([1, 1, 2, 4]),
        overlap_gather=rng.random() < 0.3,
        all_to_all=rng.choice(ALL_TO_ALLS),  # type: ignore[arg-type]
        codec=rng.choice(["none", "int8", "bf16"]),  # type: ignore[arg-type]
        backward_codec=rng.choice(["none", "none", "fp16"]),  # type: ignore[arg-type]
        order=rng.choice(["fifo", "early", "optsche"]),  # type: ignore[arg-type]
    )


def draw_grid(rng: random.Random) -> Grid:
    world = rng.choice([2, 4, 8, 12, 16])
    sizes = [size for size in (1, 2, 3, 4, 8) if world % size == 0]
    ep, etp = rng.choice([(p, s) for p in sizes for s in sizes if world % (p * s) == 0])
    node = rng.choice([None, *sizes])
    return Grid(
        world=world,
        tp=rng.choice(sizes),
        ep=ep,
        etp=etp,
        innermost=rng.choice(["etp", "ep"]),
        ranks_per_node=node,
    )


@pytest.mark.parametrize("batch", thinned(range(6), every=3))
def test_any_legal_mix_validates_prints_and_parses_back(batch: int) -> None:
    rng = random.Random(batch)
    legal = 0
    lines = []
    while legal < 12:
        plan = draw_plan(rng)
        grid = draw_grid(rng)
        try:
            compiled = compile_plan(plan, grid, bias=rng.random() < 0.5)
        except InputError as refusal:
            lines.append(str(refusal))
            continue
        legal += 1
        for program in (compiled.logical, compiled.forward, compiled.backward):
            validate(program)
            assert from_text(to_text(program)) == program
        experts = {task.name for task in compiled.logical.tasks if task.op is Op.EXPERT}
        assert {cotangent(name) for name in experts} == {
            task.name for task in compiled.backward.tasks if task.op is Op.EXPERT_GRAD
        }
    assert lines
    for line in lines:
        assert "\n" not in line
        assert "plan." in line or "mesh." in line, line


def test_a_state_that_no_collective_reaches_is_refused() -> None:
    program = SCHEDULES["s2"]()
    slots = tuple(
        replace(s, state=(("etp", State.PARTIAL),)) if s.name == "h" else s for s in program.slots
    )
    with pytest.raises(ProgramError, match="task h: no collective takes etp from S to P"):
        validate(replace(program, slots=slots))
