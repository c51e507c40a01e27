"""Ranks of several machines, whose clocks count from different moments."""

from __future__ import annotations

import time

import torch.distributed as dist

from moesaic.measure import together
from moesaic.measure.together import elapsed, gathered, latest, shared_clock, start_together
from worlds import on_ranks

LATER = 1e6
"""Seconds by which the other machine has run for longer."""


def on_another_machine() -> tuple[float, float, float]:
    """Let the second rank run on another machine; return the reading of a shared clock before and
    after a barrier, and how far the machine's own clock is from it."""
    own = time.monotonic
    if dist.get_rank():
        time.monotonic = lambda: own() + LATER
        together.started_machine = lambda: "another"
    clock = shared_clock()
    barrier = start_together(latest, clock=clock)
    before = clock()
    barrier()
    return before, clock(), time.monotonic() - clock()


def test_ranks_of_several_machines_share_the_first_ones_clock() -> None:
    (before, after, first), (other_before, other_after, other) = on_ranks(2, on_another_machine)
    assert abs(first) < 1.0
    assert abs(other - LATER) < 1.0
    assert abs(other_before - before) < 60.0
    assert abs(other_after - after) < 60.0, "a barrier waits for no clock of another machine"


def test_ranks_of_one_machine_take_its_clock_as_it_is() -> None:
    assert shared_clock() is time.monotonic, "one process"
    assert elapsed([[(1.0, 2.0)], [(1.5, 3.0)]]) == (2.0,)
    assert gathered([1]) == [[1]]
    assert not dist.is_initialized()
