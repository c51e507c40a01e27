"""Controls the ranks of a measurement: binds them to cores, starts them together, and exchanges
their times.

Ranks that share cores are bound under the batch policy so that none of their threads preempts
another when it wakes up. Gloo's thread tries the lock of a connection and polls again at once if
the lock is taken. If this thread has preempted the thread that holds the lock, on the same core, it
polls until the next tick of the clock. On a kernel of 250 Hz, every small exchange then takes up to
4 ms rather than 0.3 ms. Under the batch policy, a thread that wakes up waits until the running one
blocks or has used its time slice, and the lock is free by then.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ASKED = 16
"""How often a rank of another machine asks for the time."""


def hold_still(rank: int) -> None:
    """Bind this process's threads to one of its cores, under the batch policy. Linux only;
    elsewhere nothing happens.

    Args:
        rank: rank of this process; rank r gets core r modulo the number of cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {core})
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def start_together(
    latest: Callable[[float], float],
    lead_seconds: float = 0.002,
    clock: Callable[[], float] | None = None,
) -> Callable[[], None]:
    """Return a barrier that releases all ranks at one moment, after the links have drained.

    After a plain barrier, whose last message crosses the slow links too, ranks start milliseconds
    apart: as long as a small all-to-all takes.

    Args:
        latest: an all-reduce: takes each rank's number and returns the largest of all ranks.
        lead_seconds: from the latest arrival to the start; the agreement must reach all ranks in
            this time.
        clock: a clock that all ranks share (`shared_clock`); None for that of the
            machine, if there is one.
    """
    clock = clock or time.monotonic

    def barrier() -> None:
        """Return on all ranks at the same moment, a little later than the last one came."""
        start = latest(clock()) + lead_seconds
        # when the last rank knew the start; a slow agreement postpones it
        all_informed = latest(clock())
        start = max(start, all_informed + lead_seconds)
        time.sleep(max(start - clock(), 0.0))

    return barrier


def shared_clock() -> Callable[[], float]:
    """Return a clock in seconds that shows the same on all ranks: the first rank's monotonic one.
    All ranks call this together.

    A machine counts from its own start. Ranks of other machines ask the first rank for the time and
    add what differs, by the exchange with the shortest way there and back (Cristian, Probabilistic
    Clock Synchronization, 1989); the error is at most half of that way.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return time.monotonic
    machines = [machine for (machine,) in gathered([started_machine()])]
    offset = 0.0
    for rank, machine in enumerate(machines):  # one after another
        if machine == machines[0]:
            continue
        if dist.get_rank() == rank:
            offset = _ask_for_time()
        elif dist.get_rank() == 0:
            _answer_with_time(rank)
    return lambda: time.monotonic() + offset


def started_machine() -> str:
    """Return what differs between machines, and between two starts of one: the kernel's random
    number, else the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return platform.node()


def _ask_for_time() -> float:
    """Return what to add to this machine's clock for that of the first rank."""
    import torch
    import torch.distributed as dist

    theirs = torch.zeros(1, dtype=torch.float64)
    answers = []
    for _ in range(ASKED):
        sent = time.monotonic()
        dist.send(theirs, 0)
        dist.recv(theirs, 0)
        received = time.monotonic()
        round_trip = received - sent
        offset = float(theirs) - (sent + received) / 2  # as if they answered halfway
        answers.append((round_trip, offset))
    _, offset_of_shortest = min(answers)
    return offset_of_shortest


def _answer_with_time(rank: int) -> None:
    """Tell a rank the time as often as it asks."""
    import torch
    import torch.distributed as dist

    for _ in range(ASKED):
        dist.recv(torch.zeros(1, dtype=torch.float64), rank)
        dist.send(torch.tensor([time.monotonic()], dtype=torch.float64), rank)


def latest(moment: float) -> float:
    """Return the largest of all ranks' numbers."""
    import torch  # here, since `hold_still` also serves processes that need no torch
    import torch.distributed as dist

    number = torch.tensor([moment], dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def gathered(own: list) -> list[list]:
    """Return the lists of all ranks, by rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [own]
    of_all_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, own)
    return of_all_ranks


def elapsed(of_ranks: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, ...]:
    """Return, per repeat, the seconds from the first rank's start to the last one's end, from each
    rank's (start, end) by a clock that all share."""
    seconds = []
    for spans_of_repeat in zip(*of_ranks):
        first_start = min(start for start, _ in spans_of_repeat)
        last_end = max(end for _, end in spans_of_repeat)
        seconds.append(last_end - first_start)
    return tuple(seconds)
