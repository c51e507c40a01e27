"""Statistics of a routing trace: imbalance, drift, within-sequence locality, and faults that
prevent a replay.

A layer's loads are its copies for each expert; a copy is a token on its way to one of its experts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moesaic.traces.trace import Trace, steps_in_words


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Statistics of one MoE layer over the steps of a trace."""

    layer: int
    """The layer's number among the MoE layers, from 0."""
    max_violation: tuple[float, ...]
    """MaxVio of each step, its micro-batches added up."""
    busiest: tuple[int, ...]
    """The busiest expert of each step."""
    dead_experts: int
    """The number of experts without a copy in the whole trace."""
    drift: float
    """Mean share of the copies that change their expert from one recorded step to the next; see
    `drift`."""
    locality: float
    """Mean within-sequence locality over steps and micro-batches; see `locality`."""
    shares: np.ndarray
    """(steps, num_experts): each expert's share of the copies."""


def layer_loads(trace: Trace) -> list[LayerLoad]:
    """Return the statistics of every layer, in one pass over the trace."""
    shape = trace.shape
    steps = trace.steps
    loads = np.zeros((shape.num_layers, len(steps), shape.num_experts), dtype=np.int64)
    localities = np.zeros((shape.num_layers, len(steps), shape.accumulation))
    for row, step in enumerate(steps):
        for layer in range(shape.num_layers):
            for micro in range(shape.accumulation):
                samples = trace.samples(layer, step, micro)
                loads[layer, row] += samples.sum(0)
                localities[layer, row, micro] = locality(samples, shape.top_k)
    return [
        LayerLoad(
            layer=layer,
            max_violation=tuple(max_violation(of_layer).tolist()),
            busiest=tuple(of_layer.argmax(axis=1).tolist()),
            dead_experts=int((of_layer.sum(axis=0) == 0).sum()),
            drift=drift(of_layer),
            locality=float(localities[layer].mean()),
            shares=_shares(of_layer),
        )
        for layer, of_layer in enumerate(loads)
    ]


def max_violation(loads: np.ndarray) -> np.ndarray:
    """Return MaxVio, the largest load over the mean load minus 1 (Wang et al. 2024, section 4.1); 0
    if all loads are 0.

    Args:
        loads: (..., num_experts) copies.

    Returns:
        (...).
    """
    mean = loads.mean(axis=-1)
    has_copies = mean > 0
    largest_over_mean = loads.max(axis=-1) / np.where(has_copies, mean, 1)
    violation: np.ndarray = largest_over_mean - np.where(has_copies, 1, 0)
    return violation


def drift(loads: np.ndarray) -> float:
    """Return the mean distance of consecutive steps' loads: half the sum of the shares' absolute
    differences, from 0 to 1.

    The distance includes sampling noise, about sqrt(num_experts / (pi * copies)) for independently
    drawn copies.

    Args:
        loads: (steps, num_experts) copies.
    """
    if len(loads) < 2:
        return 0.0
    changes = np.abs(np.diff(_shares(loads), axis=0))
    return float(changes.sum(axis=1).mean() / 2)


def locality(samples: np.ndarray, top_k: int) -> float:
    """Return how much the choice of experts depends on the sequence.

    It is 0 if all sequences choose from the same distribution, and 1 if each sequence has its own
    `top_k` experts. Let w be the probability that copies of two tokens of one sequence have the
    same expert, and b the probability for copies of two sequences. The locality is (w - b) / (1 /
    top_k - b), 1 / top_k being the largest possible w. For top_k = 1 it is the intraclass
    correlation of a Dirichlet-multinomial (Mosimann 1962): 1 / (1 + c) if sequences draw their
    shares from Dirichlet(c * q). Estimates may be slightly below 0.

    Args:
        samples: (sequences, num_experts) copies; no copies of a token are missing.
        top_k: copies per token.
    """
    copies = samples.astype(np.float64)
    totals = copies.sum(axis=1)
    of_experts = copies.sum(axis=0)
    squares = (copies**2).sum()
    # ordered pairs of copies: of two tokens of one sequence, and of two sequences
    pairs_within = (totals * (totals - top_k)).sum()
    pairs_across = totals.sum() ** 2 - (totals**2).sum()
    if pairs_within <= 0 or pairs_across <= 0:  # sequences of one token, or a single sequence
        return 0.0
    # Of these, the share with the same expert: w and b above. A token's copies go to different
    # experts, so of the pairs in a sequence only those of a copy with itself are taken away.
    within = (squares - totals.sum()) / pairs_within
    between = ((of_experts**2).sum() - squares) / pairs_across
    largest = 1 / top_k
    # all sequences have the same `top_k` experts, so that none can have its own
    if between >= largest - 1e-9:
        return 0.0
    return float((within - between) / (largest - between))


def _shares(loads: np.ndarray) -> np.ndarray:
    """Return loads as shares of their sum over experts; 0 where this is 0."""
    shares: np.ndarray = loads / np.maximum(loads.sum(axis=-1, keepdims=True), 1)
    return shares


def faults(trace: Trace) -> list[str]:
    """Return one line per kind of fault and layer; an empty list if the trace can be replayed. The
    checks are:

    sums    every sequence has `seq_len * top_k` copies
    top-k   the experts of a token are distinct
    layers  every layer has copies
    gaps    all steps are equally far apart
    """
    lines = []
    for layer in range(trace.shape.num_layers):
        lines += _layer_faults(trace, layer)
    gaps = _gaps(trace.steps)
    if gaps:
        lines.append(f"gaps: {gaps}")
    return lines


def _layer_faults(trace: Trace, layer: int) -> list[str]:
    """Return the faults of one layer."""
    if trace.holds == "tokens":
        return _faults_of_experts(trace, layer)
    return _faults_of_counts(trace, layer)


def _faults_of_experts(trace: Trace, layer: int) -> list[str]:
    """Return the faults of one layer of a trace of tokens' experts."""
    repeated_tokens = 0
    num_copies = 0
    for step in trace.steps:
        for micro in range(trace.shape.accumulation):
            experts = trace.experts(layer, step, micro)
            # what was not sent was chosen too
            chosen = np.where(experts < 0, -1 - experts.astype(np.int64), experts)
            # sorted, equal experts of a token are neighbours
            in_order = np.sort(chosen, axis=1)
            repeats = (in_order[:, 1:] == in_order[:, :-1]).any(axis=1)
            repeated_tokens += int(repeats.sum())
            num_copies += experts.size
    if not num_copies:
        return [f"layers: layer {layer} has no copies at all"]
    if repeated_tokens:
        return [f"top-k: layer {layer}: {repeated_tokens} tokens chose an expert twice"]
    return []


def _faults_of_counts(trace: Trace, layer: int) -> list[str]:
    """Return the faults of one layer of a trace of counts."""
    copies_per_sequence = trace.shape.seq_len * trace.shape.top_k
    wrong_sequences = 0
    num_copies = 0
    first_wrong = ""
    for step in trace.steps:
        for micro in range(trace.shape.accumulation):
            copies = trace.samples(layer, step, micro).sum(axis=1)
            num_copies += int(copies.sum())
            wrong = np.flatnonzero(copies != copies_per_sequence)
            if len(wrong) and not first_wrong:
                first_wrong = f"first in step {step}, sequence {wrong[0]}: {copies[wrong[0]]}"
            wrong_sequences += len(wrong)
    if not num_copies:
        return [f"layers: layer {layer} has no copies at all"]
    if wrong_sequences:
        return [
            f"sums: layer {layer}: {wrong_sequences} sequences do not have "
            f"{copies_per_sequence} copies, {first_wrong}"
        ]
    return []


def _gaps(steps: list[int]) -> str:
    """Describe the steps that are not followed at the usual distance; return an empty string if
    there are none."""
    distances = np.diff(steps)
    if not len(distances):
        return ""
    usual_distance, _ = Counter(distances.tolist()).most_common(1)[0]
    gaps = [
        f"{step} to {following}"
        for step, following in pairwise(steps)
        if following - step != usual_distance
    ]
    if not gaps:
        return ""
    examples = ", ".join(gaps[:4])
    if len(gaps) > 4:
        examples += ", ..."
    return (
        f"{len(gaps)} in steps {steps_in_words(steps)} that are {usual_distance} apart: {examples}"
    )
