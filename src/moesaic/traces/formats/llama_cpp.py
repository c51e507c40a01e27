"""llama.cpp's `moe-trace` example: a CSV with a row `layer,expert` for each copy, in the order of routing.

    layer,expert
    0,12
    0,45

Within a layer of a micro-batch, rows go token by token, best expert first. Only `top_k` tells where the next token starts.
llama.cpp runs the last layer only on tokens whose output is needed. If layers have different numbers of tokens, the trace holds
counts, and `moesaic trace check` reports the layers that miss copies.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from moesaic.errors import InputError
from moesaic.traces.formats.base import (
    ReadOptions,
    TraceFormat,
    check_experts,
    counts_segment,
    lines_of,
    require_tokens,
    sent,
    tokens_segment,
)
from moesaic.traces.trace import Trace, TraceSegment


def read(path: Path, options: ReadOptions) -> TraceSegment:
    """Read a file as one step with one sequence.

    Raises:
        InputError: `top_k` is missing or does not fit, or a row is not two whole numbers.
    """
    if options.top_k is None:
        raise InputError(f"trace {path}: its rows do not tell tokens apart: give --top-k, the experts per token")
    experts_by_layer: dict[int, list[int]] = defaultdict(list)
    for number, line in enumerate(lines_of(path), start=1):
        try:
            layer, expert = map(int, line.split(","))
        except ValueError as error:
            if number == 1 or not line.strip():  # the header line, or an empty line
                continue
            raise InputError(
                f"trace {path}: line {number}: is not a row layer,expert: name the file that moe-trace wrote"
            ) from error
        experts_by_layer[layer].append(expert)
    layers = sorted(experts_by_layer)
    if not layers:
        raise InputError(f"trace {path}: has no rows: name the file that moe-trace wrote")
    source = {"format": "llama.cpp", "layers": layers}
    by_layer = [np.array(experts_by_layer[layer], dtype=np.int64) for layer in layers]
    if any(len(layer_experts) % options.top_k for layer_experts in by_layer):
        raise InputError(
            f"trace {path}: a layer's rows are not a multiple of top_k={options.top_k}: give the right --top-k"
        )
    if len({len(layer_experts) for layer_experts in by_layer}) == 1:
        table = np.stack(by_layer).reshape(1, 1, len(layers), -1, options.top_k)
        return tokens_segment(table, steps=[0], sequences=1, num_experts=options.num_experts, source=source)
    experts = options.num_experts or 1 + max(int(layer_experts.max(initial=0)) for layer_experts in by_layer)
    check_experts(experts)
    counts = np.stack([np.bincount(layer_experts, minlength=experts) for layer_experts in by_layer])
    return counts_segment(counts[None, None, :, None], steps=[0], top_k=options.top_k, source=source)


def write(trace: Trace, path: Path) -> None:
    """Write the steps in order, layer by layer."""
    require_tokens(trace, "llama.cpp")
    lines = ["layer,expert"]
    for step in trace.steps:
        for micro in range(trace.shape.accumulation):
            for layer in range(trace.shape.num_layers):
                experts = sent(trace.experts(layer, step, micro).astype(np.int64)).reshape(-1)
                lines += [f"{layer},{expert}" for expert in experts.tolist()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


FORMAT = TraceFormat(
    about="llama.cpp's moe-trace: a CSV with a row layer,expert for each copy", reader=read, write=write
)
