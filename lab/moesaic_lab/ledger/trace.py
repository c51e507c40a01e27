"""Replay a published trace of one step, kernel by kernel, and compare its makespan with a replay
and with a prediction.

DeepSeek's trace (profile-data, `train.json`) has no licence, so it is not part of the repository.
An extract of it is read from a file with a line per kernel: stream, kind, start and duration in
whole microseconds. In the replay, each stream is a lane. A kernel waits for the previous kernel of
its stream, and for the last kernel of each other stream that had ended when it began. The gap
between two kernels of a stream is the time of a launch: the median gap on the stream with the most
kernels.
"""

from __future__ import annotations

import csv
import statistics
from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from moesaic.errors import InputError
from moesaic.planner.hub import read_shape
from moesaic.planner.job import DataShape, Job
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Grid
from moesaic.program.passes.multicast import in_pieces
from moesaic.program.plan import Plan
from moesaic.program.task import Kind, Lane, Layout, Op, Program, Slot, Stage, Task
from moesaic.program.timeline import lay_out
from moesaic_lab.ledger.parts import cluster_of
from moesaic_lab.ledger.records import Entry, read_published

COLUMNS = ("stream", "kind", "start_us", "duration_us")
LANES = (Lane.COMPUTE, Lane.INTER, Lane.INTRA)
"""Lanes of the streams, in the order of the streams' names. A trace has at most as many streams."""
LAYERS = 4
"""MoE layers in the trace, each with a forward and a backward pass."""


class Kernel(NamedTuple):
    """One kernel of a trace, with times in microseconds."""

    stream: str
    start: float
    end: float


def read_kernels(path: Path) -> list[Kernel]:
    """Return the kernels of a file, sorted by their starts.

    Raises:
        InputError: if the file cannot be read, lacks a column, has a malformed or negative time, or
            has no kernels or too many streams.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        kernels = []
        for row in rows:
            start = float(row["start_us"])
            kernels.append(Kernel(row["stream"], start, start + float(row["duration_us"])))
    except OSError as error:
        raise InputError(f"--trace {path}: cannot be read ({error.strerror or error})") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"--trace {path}: a line per kernel with {', '.join(COLUMNS)} is wanted ({error})"
        ) from error
    streams = {kernel.stream for kernel in kernels}
    has_negative = any(kernel.end < kernel.start for kernel in kernels)
    if not kernels or len(streams) > len(LANES) or has_negative:
        raise InputError(
            f"--trace {path}: {len(kernels)} kernels on {len(streams)} streams: give at least one "
            f"kernel, at most {len(LANES)} streams, and no duration below 0"
        )
    return sorted(kernels, key=lambda kernel: (kernel.start, kernel.end))


def laid_out(kernels: list[Kernel]) -> float:
    """Return the makespan in seconds when the kernels, sorted by start, are replayed with their
    measured durations and dependencies; see the head of this file."""
    streams = sorted({kernel.stream for kernel in kernels})
    numbers: dict[str, list[int]] = {stream: [] for stream in streams}
    for number, kernel in enumerate(kernels):
        numbers[kernel.stream].append(number)
    busiest = [kernels[number] for number in max(numbers.values(), key=len)]
    launch = 0.0
    if len(busiest) > 1:
        launch = statistics.median(after.start - before.end for before, after in pairwise(busiest))

    # a kernel is a task that writes a slot of its own, which the kernels that wait for it read
    tasks = []
    seconds = {}
    for number, kernel in enumerate(kernels):
        reads = []
        for other in streams:
            ends = [kernels[each].end for each in numbers[other]]
            last_ended = bisect_right(ends, kernel.start) - 1
            if other != kernel.stream and last_ended >= 0:
                reads.append(str(numbers[other][last_ended]))
        name = str(number)
        lane = LANES[streams.index(kernel.stream)]
        tasks.append(
            Task(
                name=name,
                op=Op.ADD,
                reads=tuple(reads),
                writes=(name,),
                stage=Stage.EXPERT,
                lane=lane,
            )
        )
        seconds[name] = (kernel.end - kernel.start + launch) * 1e-6
    slots = tuple(
        Slot(name=task.name, kind=Kind.TOKENS, layout=Layout(flow="tokens")) for task in tasks
    )
    program = Program(name="trace", slots=slots, tasks=tuple(tasks), inputs=(), outputs=())
    return lay_out(program, seconds).makespan


def predicted() -> float:
    """Return the predicted seconds of the trace's layers.

    The layers are DeepSeek-V3's in float8 on 64 H800 with 4,096 tokens per rank. Each layer's
    forward pass overlaps another one's backward pass. Kernels that forward rows between ranks
    dispatch tokens in float8 and combine sums in bfloat16.
    """
    table = read_published()["model"]["deepseek-v3"]
    shape = read_shape(table, "deepseek-v3", seq_len=4096)
    cluster = cluster_of("h800", nodes=8)
    job = Job(
        batch_size=64, precision="bfloat16", model=shape, data=DataShape(vocab_size=shape.vocab)
    )
    grid = Grid(world=64, ep=64, ranks_per_node=8)
    model = job.step_model(cluster, 64)
    layer = replace(model.layer, products="fp8")
    traced = replace(
        model,
        num_layers=LAYERS,
        sparse_layers=LAYERS,
        vocab=0,
        launches=(0.0, 0.0),
        overlapped=True,
        layer=layer,
    )
    costs = StepCostModel(traced, grid, Simulator(cluster))

    compiled = compile_plan(Plan(all_to_all="multicast", order="fifo"), grid)
    forward = in_pieces(compiled.forward, dispatched="fp8")
    backward = in_pieces(compiled.backward, dispatched="fp8")
    passes = costs.simulator.passes(forward, backward, layer, compiled.grid)
    return costs.busy_seconds(*passes)


def trace(path: Path) -> list[Entry]:
    """Return two entries that compare the trace's makespan with its replay and with the
    prediction."""
    kernels = read_kernels(path)
    start = min(kernel.start for kernel in kernels)
    end = max(kernel.end for kernel in kernels)
    measured = (end - start) * 1e-3
    return [
        Entry(
            kind="trace",
            what=what,
            machine="h800",
            measured=measured,
            predicted=seconds * 1e3,
            unit="ms",
            source="deepseek",
        )
        for what, seconds in (
            ("measured durations in their order", laid_out(kernels)),
            ("predicted durations", predicted()),
        )
    ]
