"""Schedules as data: they validate, survive a round trip through text, and their transposes are
those of the papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moesaic.errors import InputError
from moesaic.program.build import SCHEDULES
from moesaic.program.order.graph import early
from moesaic.program.passes.split import split_capacity
from moesaic.program.task import Layout, Program, State
from moesaic.program.text import to_text
from moesaic.program.transpose import transpose
from moesaic.program.validate import ProgramError, collective, validate, validate_schedule
from program_text import from_text

PROGRAMS = [split_capacity(make(), chunks) for make in SCHEDULES.values() for chunks in (1, 2)]
ALL = PROGRAMS + [transpose(program) for program in PROGRAMS]


def named(program: Program) -> str:
    return program.name.replace(" ", "_")


@pytest.mark.parametrize("program", ALL, ids=named)
def test_programs_validate_before_and_after_ordering_and_round_trip_as_text(
    program: Program,
) -> None:
    assert from_text(to_text(program)) == program
    validate(program)
    ordered = early(program)
    validate(ordered)
    assert sorted(task.name for task in ordered.tasks) == sorted(
        task.name for task in program.tasks
    )


BACKWARD = {
    "baseline": "gather exchange share exchange exchange reduce_scatter reduce_scatter",
    "ted": "exchange share all_reduce all_reduce exchange exchange",
    "s1": "slice deliver collect collect gather",
    "s2": "slice deliver collect collect gather gather",
    "s3": "slice exchange gather reduce_scatter reduce_scatter exchange exchange gather gather",
}


@pytest.mark.parametrize("schedule", BACKWARD)
def test_backward_collectives_follow_from_the_states(schedule: str) -> None:
    backward = transpose(SCHEDULES[schedule]())
    assert (
        " ".join(collective(backward, task.name) for task in backward.moves()) == BACKWARD[schedule]
    )


def test_early_issues_all_dispatches_before_the_first_expert() -> None:
    ordered = [task.name for task in early(split_capacity(SCHEDULES["s2"](), 3)).tasks]
    assert ordered.index("h.2") < ordered.index("out.0")
    assert ordered.index("z.0") == ordered.index("out.0") + 1
    backward = [task.name for task in early(transpose(split_capacity(SCHEDULES["s2"](), 3))).tasks]
    assert backward.index("z.2'") < backward.index("out.0'")


@pytest.mark.parametrize(
    ("program", "chunks", "words"),
    [(PROGRAMS[0], 0, "plan.chunks=0"), (PROGRAMS[1], 2, "chunked already")],
)
def test_impossible_chunks_are_refused(program: Program, chunks: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        split_capacity(program, chunks)


def _reversed(program: Program) -> Program:
    return replace(program, tasks=program.tasks[::-1])


def _twice(program: Program) -> Program:
    return replace(program, tasks=(*program.tasks, replace(program.tasks[-1], name="again")))


def _whole_output(program: Program) -> Program:
    return replace(
        program, slots=tuple(replace(s, state=()) if s.name == "out" else s for s in program.slots)
    )


def _unknown_output(program: Program) -> Program:
    return replace(program, outputs=("nobody",))


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_reversed, "before anything writes it"),
        (_twice, "which is written already"),
        (_whole_output, "partial sums over"),
        (_unknown_output, "is never written"),
    ],
)
def test_validation_names_what_is_wrong(plant: Callable[[Program], Program], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        validate(plant(SCHEDULES["s2"]()))


def _with(program: Program, slot: str, **changes: object) -> Program:
    slots = tuple(replace(each, **changes) if each.name == slot else each for each in program.slots)
    return replace(program, slots=slots)


def _moves(program: Program, task: str, **changes: object) -> Program:
    return replace(
        program, tasks=tuple(replace(t, **changes) if t.name == task else t for t in program.tasks)
    )


IDENTICAL = (("tp", State.IDENTICAL),)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda p: None, "a schedule returned None: return build.build"),
        (lambda p: _moves(p, "z", group="ep"), "task z moves over 'ep': give a tuple of axes"),
        (
            lambda p: _with(p, "mine", layout=Layout(whole_tp=True)),
            r"mine both have Layout\(whole_tp=True\)",
        ),
        (
            lambda p: _with(p, "mine", state=IDENTICAL),
            r"mine goes from Layout\(whole_tp=True\) to Layout\(\) without",
        ),
        (lambda p: _moves(p, "out", reads=("h", "gates_mine", "w")), "nothing reads g: read it"),
        (
            lambda p: _with(p, "y", state=()),
            "x has .* and tp IDENTICAL, but y has .* and sharded: let it be like x",
        ),
        (
            lambda p: _with(p, "y", layout=Layout(flow="tokens")),
            r"but y has Layout\(flow='tokens'\) and tp IDENTICAL",
        ),
    ],
)
def test_a_schedule_whose_states_and_layouts_disagree_is_refused(plant, words):
    with pytest.raises(ProgramError, match=words):
        validate_schedule(plant(SCHEDULES["s2"]()))


def test_a_cycle_is_named_task_by_task() -> None:
    program = SCHEDULES["s2"]()
    tasks = tuple(
        replace(t, reads=("z", *t.reads[1:])) if t.name == "h" else t for t in program.tasks
    )
    with pytest.raises(
        ProgramError, match=r"tasks wait for each other: \w+ -> \w+ -> \w+ -> \w+: let one"
    ):
        validate(replace(program, tasks=tasks))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("program 99 future", "version 99"),
        ("slot x tokens tp:Q tokens of own", "line 1: 'Q'"),
        ("slot x tokens - bytes of own", "line 1: 'bytes' is not a known flow"),
        ("slot x tokens - tokens of xp", "line 1: 'xp' is not a known axis"),
        ("slot x tokens xp:R tokens of own", "line 1: 'xp' is not a known axis"),
        ("nonsense", "line 1: 'nonsense' is not a kind of line"),
    ],
)
def test_text_that_does_not_parse_is_refused(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_text(line)
