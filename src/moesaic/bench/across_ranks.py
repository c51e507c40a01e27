"""What the ranks of a benchmark tell each other while they measure."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from moesaic.bench.measure import Span, over_ranks


def gathered(spans: Mapping[str, list[Span]]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of every method over all ranks, the same on each of them."""
    everyone: list[Mapping[str, list[Span]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(spans))
    return over_ranks([each for each in everyone if each is not None])


def latest(moment: float) -> float:
    """Return the largest of all ranks' numbers."""
    number = torch.tensor([moment], dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)
