"""What the ranks of a benchmark tell each other while they measure."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from moesaic_lab.measure import Span, over_ranks


def gathered(spans: Mapping[str, list[Span]]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of every method over all ranks, the same on each of them."""
    everyone: list[Mapping[str, list[Span]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(spans))
    return over_ranks([each for each in everyone if each is not None])
