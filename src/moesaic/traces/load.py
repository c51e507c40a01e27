"""What a routing trace says when it is looked at: imbalance, how fast it moves, how much of it is in single sequences, and
what is wrong with it (sums, top-k, layers and gaps). A trace without faults may be replayed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from moesaic.traces.trace import Trace, steps_in_words


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """One MoE layer over the steps of a trace."""

    layer: int
    """From 0, MoE layers only."""
    max_violation: tuple[float, ...]
    """MaxVio of each step, over its micro-batches together."""
    busiest: tuple[int, ...]
    """The busiest expert of each step."""
    dead_experts: int
    """Experts without a copy in the whole trace."""
    drift: float
    """Share of the copies that change their expert from one recorded step to the next, mean; see `drift`."""
    locality: float
    """Within-sequence locality, mean over steps and micro-batches; see `locality`."""
    shares: np.ndarray
    """(steps, num_experts): share of the copies."""


def layer_loads(trace: Trace) -> list[LayerLoad]:
    """Return every layer's figures, in one pass over the trace."""
    shape, steps = trace.shape, trace.steps
    loads = np.zeros((shape.num_layers, len(steps), shape.num_experts), dtype=np.int64)
    local = np.zeros((shape.num_layers, len(steps), shape.accumulation))
    for place, step in enumerate(steps):
        for layer in range(shape.num_layers):
            for micro in range(shape.accumulation):
                samples = trace.samples(layer, step, micro)
                loads[layer, place] += samples.sum(0)
                local[layer, place, micro] = locality(samples, shape.top_k)
    return [_layer(layer, loads[layer], float(local[layer].mean())) for layer in range(shape.num_layers)]


def max_violation(loads: np.ndarray) -> np.ndarray:
    """Return MaxVio, the largest load over the mean load minus 1 (Wang et al. 2024, section 4.1); 0 without any load.

    Args:
        loads: (..., num_experts) copies.

    Returns:
        (...).
    """
    mean = loads.mean(axis=-1)
    violation: np.ndarray = loads.max(axis=-1) / np.where(mean > 0, mean, 1) - (mean > 0)
    return violation


def drift(loads: np.ndarray) -> float:
    """Return the mean distance of consecutive steps' loads: half the sum of the shares' differences, from 0 to 1.

    The noise of drawing tokens is part of it: about sqrt(num_experts / (pi * copies)) where nothing else changes.

    Args:
        loads: (steps, num_experts) copies.
    """
    if len(loads) < 2:
        return 0.0
    return float(np.abs(np.diff(_shares(loads), axis=0)).sum(axis=1).mean() / 2)


def locality(samples: np.ndarray, top_k: int) -> float:
    """Return how much of the choice of experts is a matter of the sequence: 0 if all have the same taste, 1 if each has
    `top_k` experts of its own.

    From the chance w that copies of two tokens of a sequence go to one expert, and the chance b that copies of two
    sequences do: (w - b) / (1 / top_k - b), where 1 / top_k is the largest w there can be. With one expert per token it is the
    intraclass correlation of a Dirichlet-multinomial (Mosimann 1962), 1 / (1 + c) if sequences draw their shares from
    Dirichlet(c * q). An estimate may fall a little below 0.

    Args:
        samples: (sequences, num_experts) copies; each token has all its `top_k`.
        top_k: copies of a token.
    """
    totals = samples.sum(axis=1, dtype=np.float64)
    squares = (samples.astype(np.float64) ** 2).sum()
    pairs = (totals * (totals - top_k)).sum()
    across = totals.sum() ** 2 - (totals**2).sum()
    if pairs <= 0 or across <= 0:
        return 0.0
    within = (squares - totals.sum()) / pairs
    between = ((samples.sum(axis=0, dtype=np.float64) ** 2).sum() - squares) / across
    return float((within - between) / (1 / top_k - between)) if between < 1 / top_k - 1e-9 else 0.0


def _shares(loads: np.ndarray) -> np.ndarray:
    shares: np.ndarray = loads / np.maximum(loads.sum(axis=-1, keepdims=True), 1)
    return shares


def _layer(layer: int, loads: np.ndarray, local: float) -> LayerLoad:
    return LayerLoad(
        layer=layer,
        max_violation=tuple(max_violation(loads).tolist()),
        busiest=tuple(loads.argmax(axis=1).tolist()),
        dead_experts=int((loads.sum(axis=0) == 0).sum()),
        drift=drift(loads),
        locality=local,
        shares=_shares(loads),
    )


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
