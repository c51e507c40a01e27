"""Random programs, meshes and workloads equal the reference; planted bugs do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.task import Op, Program, State
from moesaic.program.validate import ProgramError
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import run_case

BATCHES = 10
CASES_PER_BATCH = 60
TOLERANCE = 1e-10


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_cases_equal_the_reference(batch: int) -> None:
    rng = random.Random(batch)
    for number in range(CASES_PER_BATCH):
        case = draw_case(rng, seed=batch * CASES_PER_BATCH + number)
        errors = run_case(case)
        assert errors.worst < TOLERANCE, f"{case}: {errors}"


def case(schedule: str, *, chunks: int = 1) -> Case:
    """A case on 8 ranks in which tp, ep and etp all are 2."""
    grid = Grid(world=8, tp=2, ep=2, etp=2)
    return Case(schedule=schedule, grid=grid, num_chunks=chunks, num_experts=4, top_k=2, max_tokens=9, seed=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_cases_of_the_mutants_are_right_without_them(schedule: str) -> None:
    assert run_case(case(schedule, chunks=2)).worst < TOLERANCE


def restate(name: str, *state: tuple[str, State]) -> Callable[[Program], Program]:
    """Give a slot another state, in whichever program has it."""

    def change(program: Program) -> Program:
        return replace(program, slots=tuple(replace(s, state=state) if s.name == name else s for s in program.slots))

    return change


def retask(match: Callable[[object], bool], **changes: object) -> Callable[[Program], Program]:
    """Change fields of the tasks that match."""

    def change(program: Program) -> Program:
        return replace(program, tasks=tuple(replace(t, **changes) if match(t) else t for t in program.tasks))

    return change


def swap_gates(program: Program) -> Program:
    """Let each chunk's experts read the other chunk's gates."""
    other = {"g.0": "g.1", "g.1": "g.0"}
    return replace(
        program,
        tasks=tuple(
            replace(t, reads=tuple(other.get(name, name) for name in t.reads)) if t.op is Op.EXPERT else t
            for t in program.tasks
        ),
    )


R, P, I = State.REPLICATED, State.PARTIAL, State.IDENTICAL  # noqa: E741
MUTANTS = {
    "the shards' partial sums are not summed": ("s2", restate("out", ("etp", R))),
    "nor in TED": ("ted", restate("out", ("etp", R))),
    "input gradients of the shards are not summed": ("s1", restate("h'", ("etp", R))),
    "gate gradients of the shards are not summed": ("s2", restate("g'", ("etp", R))),
    "S3 does not reduce before the all-to-all": ("s3", restate("out", ("etp", I))),
    "the last gather transposes to a reduce-scatter": ("s1", restate("y'", ("tp", P))),
    "the same in S2": ("s2", restate("z_full'", ("tp", P))),
    "redundant copies count in full: experts get tp times the gradient": (
        "baseline",
        retask(lambda t: t.op is Op.SCALE and t.power == -1, power=0),
    ),
    "redundant copies are averaged twice": ("baseline", retask(lambda t: t.op is Op.SCALE and t.power == 1, power=0)),
    "two chunks swap their gates": ("s2", swap_gates),
    "the all-reduce of the baseline is left out": ("baseline", restate("out", ("etp", I))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_bugs_are_caught(mutant: str) -> None:
    schedule, change = MUTANTS[mutant]
    try:
        worst = run_case(case(schedule, chunks=2 if "chunk" in mutant else 1), change).worst
    except (AssertionError, ProgramError, RuntimeError):
        return
    assert worst > 1e-3, f"{mutant}: nobody noticed"


def test_the_same_case_gives_the_same_bits_whatever_rank_advances_first() -> None:
    assert run_case(case("s1")) == run_case(case("s1"))
