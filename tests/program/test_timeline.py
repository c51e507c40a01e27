"""Timelines: when tasks run under both kinds of executor, the metrics of a timeline, and its Chrome
trace."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from moesaic.errors import InputError
from moesaic.program.build import SCHEDULES
from moesaic.program.passes.split import split_capacity
from moesaic.program.task import Lane, Program
from moesaic.program.timeline import LANES, Timeline, lay_out, to_trace
from program.schemoe import random_program, schemoe

SECONDS = {"C1": 1.0, "A1": 4.0, "D1": 1.0, "E": 3.0, "C2": 1.0, "A2": 2.0, "D2": 1.0}
TWO = {f"{word}.{chunk}": seconds for word, seconds in SECONDS.items() for chunk in range(2)}


def listed(program: Program, names: str) -> Program:
    tasks = {task.name: task for task in program.tasks}
    assert len(names.split()) == len(tasks)
    return replace(program, tasks=tuple(tasks[name] for name in names.split()))


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {span.task: (span.start, span.end) for span in timeline.spans}


OPTSCHE = "C1.0 A1.0 C1.1 A1.1 D1.0 E.0 C2.0 A2.0 D1.1 E.1 C2.1 A2.1 D2.0 D2.1"


@pytest.mark.parametrize("host_runs_compute", [False, True])
def test_an_order_without_waiting_movements_runs_alike_on_both(host_runs_compute: bool) -> None:
    laid_out = lay_out(listed(schemoe(2), OPTSCHE), TWO, host_runs_compute=host_runs_compute)
    assert times(laid_out) == {
        "C1.0": (0, 1),
        "C1.1": (1, 2),
        "A1.0": (1, 5),
        "A1.1": (5, 9),
        "D1.0": (5, 6),
        "E.0": (6, 9),
        "C2.0": (9, 10),
        "A2.0": (10, 12),
        "D1.1": (10, 11),
        "E.1": (11, 14),
        "C2.1": (14, 15),
        "A2.1": (15, 17),
        "D2.0": (15, 16),
        "D2.1": (17, 18),
    }
    assert laid_out.makespan == 18
    assert laid_out.busy == {Lane.COMPUTE: 14 / 18, Lane.INTER: 12 / 18}
    # A1.0 behind C1.1; A1.1 behind D1.0 and E.0; A2.0 behind D1.1 and E.1; A2.1 behind D2.0
    hidden = 1 + 3 + 2 + 1
    assert laid_out.communication == 12
    assert laid_out.overlap == pytest.approx((hidden + 1) / 12)


def test_a_computation_that_waits_holds_up_what_follows_only_where_the_thread_computes() -> None:
    order = "C1.0 A1.0 D1.0 E.0 C1.1 A1.1 C2.0 A2.0 D1.1 E.1 C2.1 A2.1 D2.0 D2.1"
    streams = times(lay_out(listed(schemoe(2), order), TWO))
    assert streams["C1.1"] == (9, 10)
    assert streams["A1.1"] == (10, 14)
    deferred_wgrad = "C1.0 C1.1 A1.0 D1.0 E.0 A1.1 C2.0 A2.0 D1.1 E.1 C2.1 A2.1 D2.0 D2.1"
    # right behind A1.0
    assert times(lay_out(listed(schemoe(2), deferred_wgrad), TWO))["A1.1"] == (5, 9)
    thread = times(lay_out(listed(schemoe(2), deferred_wgrad), TWO, host_runs_compute=True))
    assert thread["E.0"] == (7, 10)
    assert thread["A1.1"] == (10, 14)  # issued when E.0, which stands before it, has ended


@pytest.mark.parametrize("lanes", [(Lane.INTRA, Lane.INTER), (Lane.INTER, Lane.INTRA)])
def test_a_movement_that_reads_a_movement_makes_the_thread_wait(lanes: tuple[Lane, Lane]) -> None:
    program = schemoe(1)
    first, second, other = program.tasks[:3]
    tasks = (
        replace(first, lane=lanes[0]),
        replace(second, lane=lanes[1]),
        replace(other, reads=("x.0",)),
    )
    program = replace(program, tasks=tasks, outputs=())
    seconds = {"C1.0": 3.0, "A1.0": 1.0, "D1.0": 1.0}
    assert times(lay_out(program, seconds)) == {"C1.0": (0, 3), "A1.0": (3, 4), "D1.0": (0, 1)}
    thread = times(lay_out(program, seconds, host_runs_compute=True))
    assert thread == {"C1.0": (0, 3), "A1.0": (3, 4), "D1.0": (3, 4)}


def test_host_tasks_hold_up_the_issue_of_everything_behind_them() -> None:
    program = schemoe(1)
    tasks = {task.name: task for task in program.tasks}
    tasks["D1.0"] = replace(tasks["D1.0"], lane=Lane.HOST)
    other = replace(tasks["C1.0"], name="other", writes=("other",))
    slots = (*program.slots, replace(program.slots[0], name="other"))
    program = replace(program, slots=slots, tasks=(*tasks.values(), other))
    seconds = {"other": 1.0} | {f"{word}.0": length for word, length in SECONDS.items()}
    laid_out = lay_out(program, seconds)
    assert times(laid_out)["D1.0"] == (5, 6)
    early = replace(program, tasks=(*program.tasks[:2], other, *program.tasks[2:7]))
    assert times(lay_out(early, seconds))["other"] == (1, 2)
    deferred_wgrad = replace(program, tasks=(*program.tasks[:3], other, *program.tasks[3:7]))
    assert times(lay_out(deferred_wgrad, seconds))["other"] == (6, 7)


@pytest.mark.parametrize("host_runs_compute", [False, True])
def test_random_timelines_respect_lanes_and_dependencies(host_runs_compute: bool) -> None:
    rng = random.Random(3)
    for _ in range(30):
        program = random_program(rng, 9, tuple(Lane))
        seconds = {task.name: rng.choice((0.0, rng.random())) for task in program.tasks}
        laid_out = lay_out(program, seconds, host_runs_compute=host_runs_compute)
        spans_by_task = times(laid_out)
        for task in program.tasks:
            assert spans_by_task[task.name][1] - spans_by_task[task.name][0] == pytest.approx(
                seconds[task.name]
            )
            assert all(
                spans_by_task[name][1] <= spans_by_task[task.name][0]
                for name in task.reads
                if name != "x"
            )
        for lane in LANES:
            spans = laid_out.on(lane)
            assert all(one.end <= two.start for one, two in pairwise(spans))
        if host_runs_compute:
            thread = [span for span in laid_out.spans if span.lane in (Lane.COMPUTE, Lane.HOST)]
            assert all(one.end <= two.start for one, two in pairwise(thread))
        assert 0 <= laid_out.overlap <= 1
        assert all(share <= 1 + 1e-12 for share in laid_out.busy.values())


def test_spans_know_their_chunk() -> None:
    program = split_capacity(SCHEDULES["s2"](), 2)
    laid_out = lay_out(program, {task.name: 1.0 for task in program.tasks})
    chunks = {span.task: span.chunk for span in laid_out.spans}
    assert (chunks["h.0"], chunks["out.1"], chunks["take-rows"], chunks["y"]) == (0, 1, None, None)


def test_nothing_to_move_is_all_hidden_and_nothing_to_do_takes_no_time() -> None:
    program = schemoe(1)
    laid_out = lay_out(program, {task.name: 0.0 for task in program.tasks})
    assert (laid_out.makespan, laid_out.overlap, laid_out.busy) == (
        0.0,
        1.0,
        {Lane.COMPUTE: 0.0, Lane.INTER: 0.0},
    )


def test_trace_has_a_row_per_lane_and_microseconds() -> None:
    laid_out = lay_out(listed(schemoe(2), OPTSCHE), TWO)
    trace = json.loads(json.dumps(to_trace(laid_out), allow_nan=False))
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert rows == {LANES.index(Lane.COMPUTE): "compute", LANES.index(Lane.INTER): "inter"}
    spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert len(spans) == 14
    moved = spans["A1.1"]
    assert (moved["ts"], moved["dur"], rows[moved["tid"]], moved["cat"]) == (
        5e6,
        4e6,
        "inter",
        "dispatch",
    )
    assert moved["args"] == {"stage": "dispatch", "chunk": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"E.0": None}, "task E.0 has none: give the seconds of every task"),
        ({"E.0": -1.0}, r"task E.0 takes -1.0 s: give a finite number"),
        ({"E.0": float("nan")}, "task E.0 takes nan s"),
        ({"E.0": float("inf")}, "task E.0 takes inf s"),
    ],
)
def test_durations_that_are_none_are_refused(change: dict[str, float | None], words: str) -> None:
    seconds = {name: value for name, value in (TWO | change).items() if value is not None}
    with pytest.raises(InputError, match=words):
        lay_out(schemoe(1), seconds)
