"""Readers of the copies per expert that two published systems recorded. Neither file tells tokens
apart.

`read_laer` reads LAER-MoE's counts (ASPLOS 2026, its artifact): a CSV with the tokens that each
rank computed, by layer and iteration. It does not tell experts apart, so each rank becomes an
expert of the trace, `top_k` is 1, and the copies of all ranks become the tokens of one sequence.

    rank,method,model_name,layer,iter,token_num

`read_smartmoe` reads SmartMoE's gate tables (ATC 2023, its artifact): a folder with a file per
iteration and rank, `NAME_iter31_rank0.log`. A line is a layer: its number, a colon, and a JSON list
that has, for each micro-batch, the copies for each expert. A rank's copies become one sequence.

    0:[[120, 8, 64, 64], [118, 10, 63, 65]]
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.formats.base import DAMAGED, counts_segment, files_by_number, lines_of
from moesaic.traces.trace import TraceSegment

LAER_COLUMNS = ("rank", "method", "model_name", "layer", "iter", "token_num")
SMARTMOE_NAME = r".*_iter(\d+)_rank(\d+)\.log"


def read_laer(path: Path, *, method: str | None = None, model: str | None = None) -> TraceSegment:
    """Read the counts of one system and model; None for the only one in the file.

    Raises:
        InputError: not exactly one recording matches, a column is missing, or rows of some ranks
            are missing.
    """
    recordings: dict[tuple[str, str], dict[tuple[int, int, int], int]] = defaultdict(dict)
    rows = csv.DictReader(lines_of(path))
    try:
        if not set(LAER_COLUMNS) <= set(rows.fieldnames or ()):
            raise InputError(
                f"trace {path}: is not a LAER file: its first line must name "
                f"{', '.join(LAER_COLUMNS)}"
            )
        for row in rows:
            key = (int(row["iter"]), int(row["layer"]), int(row["rank"]))
            recordings[row["method"], row["model_name"]][key] = int(row["token_num"])
    except InputError:  # also a ValueError, one of `DAMAGED`
        raise
    except (*DAMAGED, csv.Error) as error:
        raise InputError(
            f"trace {path}: line {rows.line_num}: is not a row of numbers ({error})"
        ) from error
    matching = []
    for recorded_method, recorded_model in recordings:
        if method in (None, recorded_method) and model in (None, recorded_model):
            matching.append((recorded_method, recorded_model))
    if len(matching) != 1:
        listed = "; ".join(f"--method {method} --model {model}" for method, model in recordings)
        raise InputError(
            f"trace {path}: {len(matching)} of its recordings match the options: choose one of "
            f"{listed}"
        )
    ((found_method, found_model),) = matching
    cells = recordings[found_method, found_model]
    steps = sorted({step for step, _, _ in cells})
    layers = sorted({layer for _, layer, _ in cells})
    ranks = sorted({rank for _, _, rank in cells})
    if len(cells) < len(steps) * len(layers) * len(ranks):
        raise InputError(
            f"trace {path}: has rows for some ranks of a layer or iteration only: leave the "
            "iteration out"
        )
    by_step = [[[cells[step, layer, rank] for rank in ranks] for layer in layers] for step in steps]
    # (steps, micro-batches, layers, sequences, experts), with one micro-batch and one sequence
    table = np.array(by_step, dtype=object)[:, None, :, None, :]
    source = {"format": "laer", "method": found_method, "model": found_model, "layers": layers}
    return counts_segment(path, table, steps, 1, source)


def read_smartmoe(path: Path, *, top_k: int) -> TraceSegment:
    """Read all iterations and ranks of a folder.

    Raises:
        InputError: a file is missing, a line is not a table, or files have different sizes.
    """
    files = files_by_number(path, SMARTMOE_NAME)
    steps = sorted({step for step, _ in files})
    ranks = sorted({rank for _, rank in files})
    tables = {key: _gate_table(file) for key, file in files.items()}
    missing = [(step, rank) for step in steps for rank in ranks if (step, rank) not in tables]
    if missing:
        step, rank = missing[0]
        raise InputError(
            f"trace {path}: iteration {step} has no file of rank {rank}: leave the iteration out"
        )
    try:
        table = np.array([[tables[step, rank] for rank in ranks] for step in steps])
    except ValueError as error:
        raise InputError(
            f"trace {path}: files have different layers, micro-batches or experts: remove "
            "those that differ"
        ) from error
    # (steps, ranks, layers, micro-batches, experts) to (steps, micro-batches, layers, ranks,
    # experts)
    table = table.transpose(0, 3, 2, 1, 4)
    return counts_segment(path, table, steps, top_k, {"format": "smartmoe"})


def _gate_table(file: Path) -> np.ndarray:
    """Read the copies of a file, (layers, micro-batches, experts) int64."""
    layers = []
    for number, line in enumerate(lines_of(file), start=1):
        try:
            _, text = line.split(":", 1)
            layers.append(np.array(json.loads(text), dtype=np.int64))
        except DAMAGED as error:
            raise InputError(
                f"trace {file}: line {number}: is not a gate table ({error}): name a folder "
                "that SmartMoE wrote"
            ) from error
    try:
        table = np.array(layers)
    except ValueError as error:
        raise InputError(
            f"trace {file}: its layers have different micro-batches or experts: remove those "
            "that differ"
        ) from error
    if table.ndim != 3:
        raise InputError(
            f"trace {file}: is not a gate table: each line must hold a list of counts per "
            "micro-batch"
        )
    return table
