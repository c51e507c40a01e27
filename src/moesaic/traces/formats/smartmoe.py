"""SmartMoE's gate tables (ATC 2023, its artifact): a folder with a file per iteration and rank, `NAME_iter31_rank0.log`.

Each line is a layer: its number, a colon, and a JSON list that has, for each micro-batch, the copies for each expert:

    0:[[120, 8, 64, 64], [118, 10, 63, 65]]

A rank's copies become one sequence. Files do not tell tokens apart, so `top_k` must be given.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.formats.base import DAMAGED, ReadOptions, TraceFormat, counts_segment, files_by_number, lines_of
from moesaic.traces.trace import Trace, TraceSegment

NAME = r".*_iter(\d+)_rank(\d+)\.log"


def read(path: Path, options: ReadOptions) -> TraceSegment:
    """Read all iterations and ranks of a folder.

    Raises:
        InputError: `top_k` or a file is missing, a line is not a table, or files have different sizes.
    """
    if options.top_k is None:
        raise InputError(f"trace {path}: its tables do not tell tokens apart: give --top-k, the experts per token")
    files = files_by_number(path, NAME)
    steps, ranks = (sorted({key[axis] for key in files}) for axis in range(2))
    tables = {key: _table(file) for key, file in files.items()}
    missing = [(step, rank) for step in steps for rank in ranks if (step, rank) not in tables]
    if missing:
        raise InputError(
            f"trace {path}: iteration {missing[0][0]} has no file of rank {missing[0][1]}: leave the iteration out"
        )
    try:
        table = np.array([[tables[step, rank] for rank in ranks] for step in steps])
    except ValueError as error:
        raise InputError(
            f"trace {path}: files have different layers, micro-batches or experts: remove those that differ"
        ) from error
    table = table.transpose(0, 3, 2, 1, 4)  # (steps, ranks, layers, accumulation, experts) before
    return counts_segment(table, steps=steps, top_k=options.top_k, source={"format": "smartmoe"})


def write(trace: Trace, path: Path) -> None:
    """Write a file per step and data-parallel group into a folder, created if missing."""
    path.mkdir(parents=True, exist_ok=True)
    shape = trace.shape
    for step in trace.steps:
        table = np.array(
            [
                [trace.counts(layer, step, micro) for micro in range(shape.accumulation)]
                for layer in range(shape.num_layers)
            ]
        )
        for rank in range(table.shape[2]):
            lines = [f"{layer}:{json.dumps(counts.tolist())}" for layer, counts in enumerate(table[:, :, rank])]
            (path / f"trace_iter{step}_rank{rank}.log").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(file: Path) -> np.ndarray:
    """Read the copies of a file, (layers, accumulation, experts) int64."""
    layers = []
    for number, line in enumerate(lines_of(file), start=1):
        try:
            _, text = line.split(":", 1)
            layers.append(np.array(json.loads(text), dtype=np.int64))
        except DAMAGED as error:
            raise InputError(
                f"trace {file}: line {number}: is not a gate table ({error}): name a folder that SmartMoE wrote"
            ) from error
    try:
        table = np.array(layers)
    except ValueError as error:
        raise InputError(
            f"trace {file}: its layers have different micro-batches or experts: remove those that differ"
        ) from error
    if table.ndim != 3:
        raise InputError(f"trace {file}: is not a gate table: each line must hold a list of counts per micro-batch")
    return table


FORMAT = TraceFormat(
    about="SmartMoE: a folder of *_iter*_rank*.log, copies per expert, rank and micro-batch", reader=read, write=write
)
