"""Ranks that start at one moment and tell each other what they measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def start_together(latest: Callable[[float], float], lead_seconds: float = 0.002) -> Callable[[], None]:
    """Return a barrier that lets all ranks go at one moment, and the links drain before it.

    A plain barrier's last message crosses the slow links too, and ranks leave it milliseconds apart: as long as a small
    all-to-all takes.

    Args:
        latest: from each rank's number to the largest of all ranks: an all-reduce.
        lead_seconds: from the latest arrival to the start; the agreement must have reached all ranks by then.
    """

    def barrier() -> None:
        moment = latest(time.monotonic()) + lead_seconds
        deferred_wgrad = latest(time.monotonic())  # when the last rank knew the moment: a slow agreement puts it off
        moment = max(moment, deferred_wgrad + lead_seconds)
        time.sleep(max(moment - time.monotonic(), 0.0))

    return barrier


def latest(moment: float) -> float:
    """Return the largest of all ranks' numbers."""
    number = torch.tensor([moment], dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def gathered(mine: list) -> list[list]:
    """Return what every rank brings, by rank."""
    if not dist.is_initialized():
        return [mine]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
