"""Megatron-Core's router trace (`--moe-routing-trace-path`): a folder with a JSONL file per rank,
`router_trace_rank0.jsonl`.

Each line holds the choices of one router in one forward pass on one rank:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 2, "top_indices": [[12, 45], ...]}

Layers of multi-token prediction have the block "mtp" and also an "mtp_idx". Repeated lines of a
layer in a step are micro-batches. A rank's tokens become one sequence. Ranks of a pipeline have
different layers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moesaic.errors import InputError
from moesaic.files import write as write_file
from moesaic.traces.formats.base import (
    DAMAGED,
    ReadOptions,
    TraceFormat,
    files_by_number,
    lines_of,
    require_tokens,
    sent,
    tokens_segment,
)
from moesaic.traces.trace import Trace, TraceSegment

NAME = r"router_trace_rank(\d+)\.jsonl"
Layer = tuple[str, int, int]
"""Block, index of the multi-token prediction (-1 in the decoder), layer number."""


def read(path: Path, options: ReadOptions) -> TraceSegment:
    """Read the files of all ranks.

    Raises:
        InputError: a line is not a record, a step lacks a layer, or the numbers of tokens differ
            between ranks, steps or layers.
    """
    # (step, layer) -> rank -> the experts of each micro-batch
    records: dict[tuple[int, Layer], dict[int, list[np.ndarray]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for file in files_by_number(path, NAME).values():
        for number, line in enumerate(lines_of(file), start=1):
            if line.strip():
                record = _record(line, f"trace {file}: line {number}")
                records[record.step, record.layer][record.rank].append(record.experts)
    if not records:
        raise InputError(
            f"trace {path}: has no records: name the folder that Megatron's router trace wrote"
        )
    steps = sorted({step for step, _ in records})
    layers = sorted({layer for _, layer in records})
    of_steps = []
    for step in steps:
        of_layers = []
        for layer in layers:
            by_rank = records.get((step, layer))
            if by_rank is None:
                block, _, layer_number = layer
                raise InputError(
                    f"trace {path}: step {step} has no layer {layer_number} ({block}): leave "
                    "the step out"
                )
            of_layers.append([by_rank[rank] for rank in sorted(by_rank)])
        of_steps.append(of_layers)
    try:
        table = np.array(of_steps)  # (steps, layers, ranks, accumulation, tokens, top_k)
    except ValueError as error:
        raise InputError(
            f"trace {path}: ranks, steps or layers have different numbers of tokens: remove "
            "those that differ"
        ) from error
    ranks = table.shape[2]
    table = table.transpose(0, 3, 1, 2, 4, 5)  # (steps, accumulation, layers, ranks, ...)
    table = table.reshape(*table.shape[:3], -1, table.shape[-1])  # the tokens of all ranks
    source = {"format": "megatron", "layers": [f"{block} {number}" for block, _, number in layers]}
    return tokens_segment(
        table, steps=steps, sequences=ranks, num_experts=options.num_experts, source=source
    )


def write(trace: Trace, path: Path) -> None:
    """Write a file per data-parallel group into a folder, created if missing; layers are numbered
    from 1, as in Megatron."""
    require_tokens(trace, "megatron")
    path.mkdir(parents=True, exist_ok=True)
    shape = trace.shape
    lines: dict[int, list[str]] = defaultdict(list)
    for segment in trace.segments():
        for row, step in enumerate(segment.steps.tolist()):
            for micro in range(shape.accumulation):
                for layer in range(shape.num_layers):
                    experts = sent(segment.table[row, micro, layer].astype(np.int64))
                    for rank, rank_experts in enumerate(np.split(experts, segment.groups)):
                        record: dict[str, Any] = {
                            "step": step,
                            "stage": "pre_dispatch",
                            "block": "decoder",
                            "layer": layer + 1,
                            "rank": rank,
                            "num_tokens": len(rank_experts),
                            "topk": shape.top_k,
                            "top_indices": rank_experts.tolist(),
                        }
                        lines[rank].append(json.dumps(record))
    for rank, rank_lines in lines.items():
        write_file(path / f"router_trace_rank{rank}.jsonl", "\n".join(rank_lines) + "\n")


class _Record(NamedTuple):
    """A line of a router trace."""

    step: int
    layer: Layer
    rank: int
    experts: np.ndarray
    """(tokens, topk) int64."""


def _record(line: str, where: str) -> _Record:
    """Parse a line; raise InputError if it is no record."""
    try:
        record = json.loads(line)
        experts = np.array(record["top_indices"], dtype=np.int64)
        experts = experts.reshape(int(record["num_tokens"]), int(record["topk"]))
        layer = (
            str(record.get("block", "decoder")),
            int(record.get("mtp_idx", -1)),
            int(record["layer"]),
        )
        return _Record(int(record["step"]), layer, int(record["rank"]), experts)
    except DAMAGED as error:
        raise InputError(
            f"{where}: is not a record of Megatron's router trace ({error!r}): name the "
            "folder that it wrote"
        ) from error


FORMAT = TraceFormat(software="Megatron-Core", reader=read, write=write)
