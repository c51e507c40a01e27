"""Ranks that are measured: held still, started at one moment, and told what the others measured.

Ranks that share cores are held still so that no thread of theirs interrupts another when it wakes up. Gloo's thread tries the
lock of a connection and polls again at once if it does not get it. Where it has interrupted the thread that holds the lock, on
the same core, it polls until the next tick of the clock: on a kernel of 250 Hz every small exchange then takes up to 4 ms in
place of 0.3. Under the batch policy a thread that wakes up waits until the running one waits or its time is over, and the lock
is free by then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def hold_still(rank: int) -> None:
    """Bind this process's threads to one of the cores that it may use, under the batch policy; Linux only, else nothing.

    Args:
        rank: of this process; rank r takes core r modulo their number.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {core})
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


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
