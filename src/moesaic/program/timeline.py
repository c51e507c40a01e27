"""Computes when each task of a program runs, given the duration of each task: the program laid out
on its lanes.

A lane is a resource that runs tasks one after the other: computation, the links inside a node, the
links between nodes, the host. A single rule decides when a task starts (`place`). Contention
between lanes, launch costs and the sizes behind the durations belong to the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.errors import InputError
from moesaic.program.task import Lane, Program, Slot, Stage, Task

LANES: tuple[Lane, ...] = (Lane.COMPUTE, Lane.INTRA, Lane.INTER, Lane.HOST)
"""All lanes, in the order in which plots show them."""
MOVING = (Lane.INTRA, Lane.INTER)
"""Lanes of communication."""

Free = tuple[float, float, float, float]
"""Times at which each resource is free again: the issuing thread, the compute stream, the links
inside a node, the links between nodes."""
IDLE: Free = (0.0, 0.0, 0.0, 0.0)
THREAD = 0
"""Index of the issuing thread in `Free`."""
_RESOURCE = {Lane.HOST: THREAD, Lane.COMPUTE: 1, Lane.INTRA: 2, Lane.INTER: 3}
"""By lane, the index of its resource in `Free`."""


@dataclass(frozen=True, slots=True)
class Span:
    """When one task runs, in seconds from the start of the program."""

    task: str
    lane: Lane
    chunk: int | None
    """The chunk that the task works on. None if it works on none or on several."""
    stage: Stage
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The start and end of every task of a program."""

    program: str
    """Name of the program."""
    spans: tuple[Span, ...]
    """One span per task, in the order of issue."""

    @property
    def makespan(self) -> float:
        """Seconds until the last task ends."""
        return max((span.end for span in self.spans), default=0.0)

    def on(self, lane: Lane) -> tuple[Span, ...]:
        """Return the spans of a lane, in the order of issue."""
        return tuple(span for span in self.spans if span.lane is lane)

    @property
    def busy(self) -> dict[Lane, float]:
        """Fraction of the makespan during which each lane is busy. Lanes without tasks are left
        out."""
        total = self.makespan or 1.0  # tasks that take no time are busy for a fraction of 0
        spans_by_lane = {lane: self.on(lane) for lane in LANES}
        return {lane: _length(spans) / total for lane, spans in spans_by_lane.items() if spans}

    @property
    def communication(self) -> float:
        """Seconds of communication, summed over the lanes."""
        return sum(_length(self.on(lane)) for lane in MOVING)

    @property
    def overlap(self) -> float:
        """Fraction of the communication time during which the compute lane is busy; 1 if
        communication takes no time."""
        total = self.communication
        if total == 0:
            return 1.0
        moving = [span for lane in MOVING for span in self.on(lane)]
        shared = [
            min(move.end, compute.end) - max(move.start, compute.start)
            for move in moving
            for compute in self.on(Lane.COMPUTE)
        ]
        hidden = sum(max(0.0, seconds) for seconds in shared)  # negative: they do not overlap
        return hidden / total


def lay_out(
    program: Program, seconds: Mapping[str, float], *, host_runs_compute: bool = False
) -> Timeline:
    """Return the timeline of a program as its executor runs it: one thread issues the tasks in list
    order.

    Each lane runs its tasks one after the other, in list order. A task starts when its lane is free
    and all tasks whose output it reads have ended.

    Args:
        program: the program, in the order of issue.
        seconds: duration of each task by name; other names are ignored.
        host_runs_compute: True for CPUs: the issuing thread runs compute tasks, and before each
            task waits for everything it reads, including movements. False for CUDA: streams wait
            instead, and only tasks of the host lane hold up the thread.

    Raises:
        InputError: if the duration of a task is missing, negative or not finite.
    """
    slots = {slot.name: slot for slot in program.slots}
    ends: dict[str, float] = dict.fromkeys(program.inputs, 0.0)
    free = IDLE
    spans = []
    for task, length in zip(program.tasks, durations(program, seconds)):
        ready = max((ends[name] for name in task.reads), default=0.0)
        free, start = place(free, task.lane, length, ready, host_runs_compute)
        end = start + length
        ends.update(dict.fromkeys(task.writes, end))
        spans.append(Span(task.name, task.lane, chunk_of(task, slots), task.stage, start, end))
    return Timeline(program.name, tuple(spans))


def place(
    free: Free, lane: Lane, seconds: float, ready: float, host_runs_compute: bool
) -> tuple[Free, float]:
    """Return when the resources are free after one more task is issued, and when that task starts.

    Args:
        free: when the resources are free after the tasks before it.
        seconds: duration of the task.
        ready: when everything that the task reads is available.
        host_runs_compute: see `lay_out`.
    """
    index = resource(lane, host_runs_compute)
    issued = free[THREAD]
    if host_runs_compute or lane is Lane.HOST:  # the thread itself waits for what the task reads
        issued = max(issued, ready)
    start = max(issued, ready, free[index])
    after = [issued, *free[1:]]
    after[index] = start + seconds
    return (after[0], after[1], after[2], after[3]), start


def resource(lane: Lane, host_runs_compute: bool) -> int:
    """Return the index in `Free` of the resource that tasks of a lane occupy."""
    return THREAD if host_runs_compute and lane is Lane.COMPUTE else _RESOURCE[lane]


def durations(program: Program, seconds: Mapping[str, float]) -> list[float]:
    """Return the duration of each task, in the order of the program.

    Raises:
        InputError: if a duration is missing, negative or not finite.
    """
    lengths = []
    for task in program.tasks:
        length = seconds.get(task.name)
        if length is None:
            raise InputError(
                f"durations of {program.name}: task {task.name} has none: give the seconds of "
                "every task of the program"
            )
        if not (length >= 0 and math.isfinite(length)):
            raise InputError(
                f"durations of {program.name}: task {task.name} takes {length} s: give a "
                "finite number of at least 0"
            )
        lengths.append(float(length))
    return lengths


def chunk_of(task: Task, slots: Mapping[str, Slot]) -> int | None:
    """Return the one chunk that a task reads or writes; None if it works on none or on several."""
    chunks = {slots[name].layout.chunk for name in (*task.reads, *task.writes)} - {None}
    if len(chunks) != 1:
        return None
    chunk = chunks.pop()
    return chunk if isinstance(chunk, int) else None


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as a Chrome trace to be saved as JSON, with one row per lane and times in
    microseconds.

    chrome://tracing and ui.perfetto.dev open such files.
    """
    # The format's phase "M" stands for metadata, "X" for an event with a duration.
    events: list[dict[str, Any]] = [_label("process_name", 0, timeline.program)]
    for row, lane in enumerate(LANES):
        if timeline.on(lane):
            events.append(_label("thread_name", row, lane.value))
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": 0,
                    "tid": row,
                    "args": {"sort_index": row},
                }
            )
    for span in timeline.spans:
        events.append(
            {
                "ph": "X",
                "name": span.task,
                "cat": span.stage.value,
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "pid": 0,
                "tid": LANES.index(span.lane),
                "args": {"stage": span.stage.value, "chunk": span.chunk},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _label(kind: str, row: int, label: str) -> dict[str, Any]:
    """Return the event that labels the process or a row; `kind` is the format's name for it."""
    return {"ph": "M", "name": kind, "pid": 0, "tid": row, "args": {"name": label}}


def _length(spans: Iterable[Span]) -> float:
    """Return the seconds of some spans together."""
    return sum(span.end - span.start for span in spans)
