"""LAER-MoE's counts (ASPLOS 2026, its artifact): a CSV with the tokens that each rank computed, by layer and iteration.

    rank,method,model_name,layer,iter,token_num

The file does not tell experts apart, so each rank becomes an expert of the trace: `num_experts` is the number of ranks, and
`top_k` is 1. The copies of all ranks become the tokens of one sequence.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.formats.base import ReadOptions, TraceFormat, counts_segment, lines_of
from moesaic.traces.trace import Trace, TraceSegment

COLUMNS = ("rank", "method", "model_name", "layer", "iter", "token_num")


def read(path: Path, options: ReadOptions) -> TraceSegment:
    """Read the counts of one system and model.

    Raises:
        InputError: the options do not choose exactly one recording, a column is missing, or rows of some ranks are missing.
    """
    recordings: dict[tuple[str, str], dict[tuple[int, int, int], int]] = defaultdict(dict)
    rows = csv.DictReader(lines_of(path))
    if not set(COLUMNS) <= set(rows.fieldnames or ()):
        raise InputError(f"trace {path}: is not a LAER file: its first line must name {', '.join(COLUMNS)}")
    try:
        for row in rows:
            key = (int(row["iter"]), int(row["layer"]), int(row["rank"]))
            recordings[row["method"], row["model_name"]][key] = int(row["token_num"])
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"trace {path}: line {rows.line_num}: is not a row of numbers ({error})") from error
    chosen = [
        key for key in recordings if options.method in (None, key[0]) and options.model in (None, key[1])
    ]  # fmt: skip
    if len(chosen) != 1:
        listed = "; ".join(f"--method {method} --model {model}" for method, model in recordings)
        raise InputError(f"trace {path}: {len(chosen)} of its recordings match the options: choose one of {listed}")
    cells = recordings[chosen[0]]
    steps, layers, ranks = (sorted({key[axis] for key in cells}) for axis in range(3))
    if len(cells) < len(steps) * len(layers) * len(ranks):
        raise InputError(f"trace {path}: has rows for some ranks of a layer or iteration only: leave the iteration out")
    table = np.zeros((len(steps), 1, len(layers), 1, len(ranks)), dtype=np.int64)
    for (step, layer, rank), tokens in cells.items():
        table[steps.index(step), 0, layers.index(layer), 0, ranks.index(rank)] = tokens
    source = {"format": "laer", "method": chosen[0][0], "model": chosen[0][1], "layers": layers}
    return counts_segment(table, steps=steps, top_k=1, source=source)


def write(trace: Trace, path: Path) -> None:
    """Write the number of copies of each expert, as if each had its own rank; micro-batches are added up."""
    lines = [",".join(COLUMNS)]
    for step, step_loads in zip(trace.steps, trace.loads()):
        for layer, layer_loads in enumerate(step_loads):
            lines += [f"{rank},Moesaic,trace,{layer},{step},{tokens}" for rank, tokens in enumerate(layer_loads)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


FORMAT = TraceFormat(
    about="LAER-MoE: a CSV of the tokens that each rank computed, by layer and iteration", reader=read, write=write
)
