"""Ranks that share cores, held still: each on one core, and no thread of theirs interrupts another when it wakes up.

Gloo's thread tries the lock of a connection and polls again at once if it does not get it. Where it has interrupted the
thread that holds the lock, on the same core, it polls until the next tick of the clock: on a kernel of 250 Hz every small
exchange then takes up to 4 ms in place of 0.3. Under the batch policy a thread that wakes up waits until the running one
waits or its time is over, and the lock is free by then.
"""

from __future__ import annotations

import os


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
