"""What is wrong with a routing trace: sums, top-k, layers and gaps. Without faults it may be replayed."""

from __future__ import annotations

from collections import Counter

import numpy as np

from moesaic.traces.trace import Trace, steps_in_words


def faults(trace: Trace) -> list[str]:
    """Return a line per kind of fault and layer, empty for none.

    sums    a sequence has `seq_len * top_k` copies
    top-k   a token's experts differ
    layers  each layer has copies, and as many as the others
    gaps    steps follow each other at one distance
    """
    found = []
    for layer in range(trace.shape.num_layers):
        found += _of_layer(trace, layer)
    gaps = _gaps(trace.steps)
    return [*found, *([f"gaps: {gaps}"] if gaps else [])]


def _of_layer(trace: Trace, layer: int) -> list[str]:
    """Return the faults of one layer over all steps."""
    shape, found = trace.shape, []
    wanted = shape.seq_len * shape.top_k
    short, twice, total, first = 0, 0, 0, ""
    for step in trace.steps:
        for micro in range(shape.accumulation):
            if trace.holds == "tokens":
                experts = trace.experts(layer, step, micro)
                chosen = np.sort(np.where(experts < 0, -1 - experts.astype(np.int64), experts), axis=1)
                repeats = (chosen[:, 1:] == chosen[:, :-1]).any(axis=1)
                twice += int(repeats.sum())
                total += experts.size
                continue
            copies = trace.samples(layer, step, micro).sum(axis=1)
            total += int(copies.sum())
            wrong = np.flatnonzero(copies != wanted)
            if len(wrong) and not first:
                first = f"first in step {step}, sequence {wrong[0]}: {copies[wrong[0]]}"
            short += len(wrong)
    if not total:
        return [f"layers: layer {layer} has no copies at all"]
    if short:
        found.append(f"sums: layer {layer}: {short} sequences do not have {wanted} copies, {first}")
    if twice:
        found.append(f"top-k: layer {layer}: {twice} tokens chose an expert twice")
    return found


def _gaps(steps: list[int]) -> str:
    """Return which steps are followed by a gap, in words; empty for none."""
    distances = np.diff(steps)
    if not len(distances):
        return ""
    usual = Counter(distances.tolist()).most_common(1)[0][0]
    wider = [(steps[place], steps[place + 1]) for place in np.flatnonzero(distances != usual)]
    listed = ", ".join(f"{one} to {other}" for one, other in wider[:4])
    if not wider:
        return ""
    return f"{len(wider)} in steps {steps_in_words(steps)} that are {usual} apart: {listed}{', ...' if len(wider) > 4 else ''}"
