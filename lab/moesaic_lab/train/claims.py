"""What the training benchmark claims: ratios of paired steps, held against targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from moesaic_lab.claims import Claim
from moesaic_lab.measure import MANY, NEAR, Ratio
from moesaic_lab.peers.absence import absence
from moesaic_lab.train.run import Outcome, TrainCell, TrainResults, ratio

LEAST = 8
"""Pairs under any ratio."""
TARGET = 0.67
SWEEP = (2, 4, 8)
"""Experts per token of the cases whose median is claimed; without all of them there is no claim."""


def claims(results: TrainResults) -> list[Claim]:
    """Return all claims, also those that this run did not measure."""
    swept = [cell for cell in results.cells if cell.case.in_sweep]
    whole = swept if all(_swept(swept, top_k) for top_k in SWEEP) else []
    inference, beside = _case(results.cells, "demo inference"), _case(results.cells, "demo beside DeepSpeed")
    return [
        _over("train.step_over_torch_ep", whole, "plain", TARGET),
        _over("train.step_over_deepspeed", _alone(beside), "deepspeed", TARGET),
        _over("train.step_over_torch_ep_own_exchange", whole, "plain", None, exchange="torch's"),
        _over("train.step_over_deepspeed_own_exchange", _alone(beside), "deepspeed", None, exchange="torch's"),
        _over("train.coded_step_over_torch_ep", whole, "plain", None, coded=True),
        *(_over(f"train.top{k}.step_over_torch_ep", _alone(_swept(swept, k)), "plain", None) for k in SWEEP),
        _over("train.inference_over_torch_ep", _alone(inference), "plain", None),
        _flexible(results),
    ]


def coded(cell: TrainCell) -> Outcome | None:
    """Return our fastest coded plan that was timed."""
    found = [(o.timing.median, o) for o in cell.outcomes if not o.is_lossless and o.timing is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _case(cells: Sequence[TrainCell], name: str) -> TrainCell | None:
    return next((cell for cell in cells if cell.case.name == name), None)


def _swept(cells: Sequence[TrainCell], top_k: int) -> TrainCell | None:
    """Return the case of the sweep with so many experts per token; the demo's own number is 2."""
    return next((cell for cell in cells if (cell.case.top_k or 2) == top_k), None)


def _alone(cell: TrainCell | None) -> list[TrainCell]:
    return [] if cell is None else [cell]


def _over(
    name: str,
    cells: Sequence[TrainCell],
    kind: str,
    target: float | None,
    *,
    exchange: str = "receive-first",
    coded: bool = False,
) -> Claim:
    """Return our step over a peer's, the median of the cases; no value where one was not timed, or not often enough."""
    ratios = [_ratio(cell, kind, exchange, coded) for cell in cells]
    missing = [found for found in ratios if isinstance(found, str)]
    if missing or not ratios:
        reason = missing[0] if missing else "its cases were not all run"
        return Claim(name=name, value=None, unit="1", target=target, op="<=", reason=reason)
    value = statistics.median(found.median for found in ratios if not isinstance(found, str))
    return Claim(name=name, value=value, unit="1", target=target, op="<=", reason="")


def _ratio(cell: TrainCell, kind: str, exchange: str, of_coded: bool) -> Ratio | str:
    """Return the ratio, or why there is none."""
    ours, peer = coded(cell) if of_coded else cell.find("ours"), cell.find(kind, exchange)
    if peer is None:
        return (absence() if kind == "deepspeed" else None) or f"the case has no peer {kind}"
    if ours is None:
        return "the case has no such plan of ours"
    found = ratio(cell, ours, peer)
    if found.repeats < LEAST:
        return f"{found.repeats} pairs, {LEAST} are needed"
    if found.is_near and found.repeats < MANY:
        return f"{found.median:.2f} on {found.repeats} pairs; a ratio nearer to 1 than {NEAR:.2f} needs {MANY}"
    return found


def _flexible(results: TrainResults) -> Claim:
    """Return how much more throughput ordering by expert gives on the largest world, the ordering included."""
    name = "train.flexible_layout_speedup"
    if not results.layout:
        return Claim(name=name, value=None, unit="1", target=None, op=">=", reason="the layouts were left out")
    from moesaic_lab.train.layout import BY_SOURCE, ORDERED

    last = max(results.layout, key=lambda point: point.world)
    value = last.timings[BY_SOURCE].median / last.timings[ORDERED].median
    return Claim(name=name, value=value, unit="1", target=None, op=">=")
