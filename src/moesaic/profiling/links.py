"""Movements as the library's own transport makes them, timed over sizes: inside nodes, between nodes, one sender and
all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.profiling.together import gathered

SIZES = (2048, 8192, 32768, 131072, 524288)
"""Bytes of one message."""


@dataclass(frozen=True)
class TimedMovements:
    """Movements of one kind over sizes."""

    num_bytes: tuple[float, ...]
    """That each rank sends in a movement."""
    seconds: tuple[tuple[float, ...], ...]
    """Per size, repeats, from the first rank's start to the last one's end."""
    messages: int
    """That each rank sends in a movement, and receives."""


def movements(
    transport: AbstractTransport, to: Sequence[int], source: Sequence[int], repeats: int, barrier: Callable[[], object]
) -> TimedMovements:
    """Time movements; all ranks call it together and get the same.

    Args:
        transport: this rank's.
        to: ranks that this one sends to.
        source: ranks that send to this one.
        repeats: of each size, after one more.
        barrier: lets all ranks go at one moment.
    """
    most = max(len(each[0]) for each in gathered([tuple(to)]))
    taken = []
    for size in SIZES:
        out = {peer: torch.zeros(size, dtype=torch.uint8) for peer in to}
        into = {peer: torch.empty(size, dtype=torch.uint8) for peer in source}
        mine = []
        for repeat in range(-1, repeats):
            tag = transport.take_tags(1)
            barrier()
            start = time.monotonic()
            if to or source:
                transport.wait(transport.issue(Transfer(transport.rank, tag, out, into)))
            if repeat >= 0:
                mine.append((start, time.monotonic()))
        spans = zip(*gathered(mine))
        taken.append(tuple(max(end for _, end in each) - min(start for start, _ in each) for each in spans))
    return TimedMovements(tuple(float(size * most) for size in SIZES), tuple(taken), most)


def partners(rank: int, world: int, ranks_per_node: int, *, inside: bool) -> tuple[int, ...]:
    """Return the other ranks of a rank's node, or those of all other nodes."""
    node = rank // ranks_per_node
    return tuple(peer for peer in range(world) if peer != rank and (peer // ranks_per_node == node) is inside)
