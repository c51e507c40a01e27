"""Plain tables of counts: a CSV with a row per count of copies that a rank sent to an expert.

    step,layer,micro_batch,rank,expert,count
    0,0,0,0,3,17

`step` may be missing; then all rows are step 0. Columns may stand in any order, and others are
ignored. Numbers of layers, micro-batches and ranks may begin anywhere; they are taken in ascending
order. A count that is left out is zero. The copies of a rank become one sequence.
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
    rows = csv.DictReader(lines_of(path))
    missing = [name for name in (*AXES[1:], "count") if name not in (rows.fieldnames or ())]
    if missing:
        raise InputError(
            f"trace {path}: has no column {missing[0]}: its first line must name layer, "
            "micro_batch, rank, expert and count"
        )
    cells: dict[tuple[int, ...], int] = {}
    for row in rows:
        where = f"trace {path}: line {rows.line_num}"
        try:
            place = tuple(int(row.get(name, "0")) for name in AXES)
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
    *numbers, experts = (sorted({place[axis] for place in cells}) for axis in range(len(AXES)))
    num_experts = options.num_experts or experts[-1] + 1
    if experts[-1] >= num_experts or num_experts > MOST_EXPERTS:
        raise InputError(
            f"trace {path}: its experts are numbered up to {experts[-1]}: give --num-experts "
            f"between {experts[-1] + 1} and {MOST_EXPERTS}"
        )
    sizes = (*map(len, numbers), num_experts)
    if np.prod(sizes, dtype=float) > MOST_CELLS:
        raise InputError(f"trace {path}: its numbers span more than {MOST_CELLS:,} counts")
    table = np.zeros(sizes, dtype=object)
    at = [{number: index for index, number in enumerate(of_axis)} for of_axis in numbers]
    for (*places, expert), count in cells.items():
        table[(*(index[number] for index, number in zip(at, places)), expert)] = count
    return counts_segment(path, table, numbers[0], options.top_k or 1, {"format": "counts"})


def write(trace: Trace, path: Path) -> None:
    """Write the copies of every rank for every expert, zeros left out."""
    shape = trace.shape
    with writing(path, typed=True) as file:
        file.write(f"{','.join(AXES)},count\n".encode())
        for step in trace.steps:
            for micro in range(shape.accumulation):
                for layer in range(shape.num_layers):
                    counts = trace.counts(layer, step, micro)
                    for rank, expert in zip(*(axis.tolist() for axis in counts.nonzero())):
                        line = (step, micro, layer, rank, expert, int(counts[rank, expert]))
                        file.write(f"{','.join(map(str, line))}\n".encode())


FORMAT = TraceFormat(software="a table of counts", reader=read, write=write)
