"""Plain tables of counts: a CSV with a row per count of copies that a rank sent to an expert.

    step,layer,micro_batch,rank,expert,count
    0,0,0,0,3,17

`step` may be missing; then all rows are step 0. Columns may stand in any order, and others are
ignored. Numbers of layers, micro-batches and ranks may begin anywhere; they are taken in ascending
order. A count that is left out is zero. The copies of a rank become one sequence. `typed` says that
a user typed the path, which may then be a link.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.files import writing
from moesaic.traces.formats.base import (
    MOST_EXPERTS,
    ReadOptions,
    TraceFormat,
    counts_segment,
    lines_of,
)
from moesaic.traces.trace import Trace, TraceSegment

AXES = ("step", "micro_batch", "layer", "rank", "expert")
"""Columns in the order of a table's axes."""
MOST_CELLS = 1 << 28
"""The most counts, zeros included, that are believed; a file with more is damaged."""


def read(path: Path, options: ReadOptions) -> TraceSegment:
    """Read a table.

    Raises:
        InputError: a column is missing, a row is not of numbers or stands twice, or an expert's
            number is out of range.
    """
    cells = _cells(path)
    last_expert = max(expert for *_, expert in cells)
    num_experts = options.num_experts or last_expert + 1
    if last_expert >= num_experts or num_experts > MOST_EXPERTS:
        raise InputError(
            f"trace {path}: its experts are numbered up to {last_expert}: give --num-experts "
            f"between {last_expert + 1} and {MOST_EXPERTS}"
        )
    table, steps = _table(path, cells, num_experts)
    return counts_segment(path, table, steps, options.top_k or 1, {"format": "counts"})


def _cells(path: Path) -> dict[tuple[int, ...], int]:
    """Return the counts of a file by their numbers on `AXES`; at least one."""
    rows = csv.DictReader(lines_of(path))
    required = (*AXES[1:], "count")  # all but the step
    missing = [name for name in required if name not in (rows.fieldnames or ())]
    if missing:
        raise InputError(
            f"trace {path}: has no column {missing[0]}: its first line must name layer, "
            "micro_batch, rank, expert and count"
        )
    cells: dict[tuple[int, ...], int] = {}
    for row in rows:
        where = f"trace {path}: line {rows.line_num}"
        try:
            place = tuple(int(row.get(name, "0")) for name in AXES)  # the step may be missing
            count = int(row["count"])
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: is not a row of whole numbers: correct it") from error
        if min(count, *place) < 0:
            raise InputError(f"{where}: has a number below 0: correct it")
        if place in cells:
            raise InputError(f"{where}: this rank and expert stand twice in one micro-batch")
        cells[place] = count
    if not cells:
        raise InputError(f"trace {path}: has no rows: name a table of counts")
    return cells


def _table(
    path: Path, cells: dict[tuple[int, ...], int], num_experts: int
) -> tuple[np.ndarray, list[int]]:
    """Return all counts, an axis for each of `AXES`, and the numbers of the steps. The numbers on
    the other axes become places in ascending order; experts keep theirs."""
    axes_but_expert = range(len(AXES) - 1)
    numbers = [sorted({place[axis] for place in cells}) for axis in axes_but_expert]
    sizes = (*(len(on_axis) for on_axis in numbers), num_experts)
    if np.prod(sizes, dtype=float) > MOST_CELLS:
        raise InputError(f"trace {path}: its numbers span more than {MOST_CELLS:,} counts")

    # Python's whole numbers have no limit: `counts_segment` refuses those that int64 cannot hold.
    table = np.zeros(sizes, dtype=object)
    index_of = [{number: index for index, number in enumerate(on_axis)} for on_axis in numbers]
    for (*place, expert), count in cells.items():
        index = [index_of[axis][number] for axis, number in enumerate(place)]
        table[(*index, expert)] = count
    steps = numbers[0]
    return table, steps


def write(trace: Trace, path: Path) -> None:
    """Write the copies of every rank for every expert, zeros left out."""
    shape = trace.shape
    with writing(path, typed=True) as file:
        file.write(f"{','.join(AXES)},count\n".encode())
        for step in trace.steps:
            for micro in range(shape.accumulation):
                for layer in range(shape.num_layers):
                    counts = trace.counts(layer, step, micro)
                    for rank, expert in np.argwhere(counts).tolist():
                        count = int(counts[rank, expert])
                        line = f"{step},{micro},{layer},{rank},{expert},{count}\n"
                        file.write(line.encode())


FORMAT = TraceFormat(software="a table of counts", reader=read, write=write)
