"""A transport without tags: which messages match, which programs deadlock, which would swap
data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport, Handle, Lane, Transfer

Message = tuple[int, int, int]
"""Tag, source, target."""


def issue(
    transport: AbstractTransport,
    tag: int,
    pairs: list[tuple[int, int]],
    lane: Lane = "inter",
    size: int = 1,
) -> Handle:
    sends = {
        target: torch.full((size,), float(tag))
        for source, target in pairs
        if source == transport.rank
    }
    receives = {source: torch.empty(size) for source, target in pairs if target == transport.rank}
    return transport.issue(Transfer(transport.rank, tag, sends, receives, lane))


def run(
    function: Callable[[AbstractTransport], None], world: int = 2, in_order: bool = True
) -> None:
    for seed in range(3):
        run_ranks(world, function, seed=seed, in_order=in_order)


def check(transport: AbstractTransport, handle: Handle) -> None:
    transport.wait(handle)
    assert all(
        bool((buffer == handle.transfer.tag).all()) for buffer in handle.transfer.receives.values()
    )


def test_one_order_on_all_ranks_runs_whatever_is_waited_for_first():
    def rank(transport: AbstractTransport) -> None:
        handles = [
            issue(transport, tag, [(0, 1), (1, 2), (2, 0), (2, 1)][tag:]) for tag in range(4)
        ]
        for handle in handles if transport.rank else reversed(handles):
            check(transport, handle)

    run(rank, world=3)


def test_orders_that_differ_meet_the_wrong_tag():
    def rank(transport: AbstractTransport) -> None:
        handles = [
            issue(transport, tag, [(0, 1)]) for tag in ((5, 6) if transport.rank else (6, 5))
        ]
        for handle in handles:
            check(transport, handle)

    run(rank, in_order=False)
    with pytest.raises(
        AssertionError,
        match=r"without tags, a message of rank . with tag . meets one of rank . with tag .",
    ):
        run(rank)


def circle(first: Lane, second: Lane) -> Callable[[AbstractTransport], None]:
    """Three ranks: tag r goes from rank r to the next. Each rank begins with its own message, so no
    first message matches."""

    def rank(transport: AbstractTransport) -> None:
        before = (transport.rank - 1) % 3
        sent = issue(transport, transport.rank, [(transport.rank, (transport.rank + 1) % 3)], first)
        came = issue(transport, before, [(before, transport.rank)], second)
        check(transport, came)
        check(transport, sent)

    return rank


def test_a_circle_of_first_batches_hangs():
    run(circle("inter", "inter"), world=3, in_order=False)
    with pytest.raises(
        RuntimeError, match=r"ranks \[0, 1, 2\] wait for messages that nobody sends"
    ):
        run(circle("inter", "inter"), world=3)


def test_lanes_have_queues_of_their_own():
    def rank(transport: AbstractTransport) -> None:
        lanes: tuple[Lane, Lane] = ("intra", "inter") if transport.rank else ("inter", "intra")
        handles = [
            issue(transport, {"intra": 1, "inter": 2}[lane], [(0, 1), (1, 0)], lane)
            for lane in lanes
        ]
        for handle in handles:
            check(transport, handle)

    run(rank)


def test_batches_without_bytes_hold_up_nothing():
    def rank(transport: AbstractTransport) -> None:
        handles = [
            issue(transport, 0, [(0, 1)]),
            issue(transport, 1, [(1, 0)], size=0),
            issue(transport, 2, [(1, 0)]),
        ]
        for handle in reversed(handles):
            check(transport, handle)

    run(rank)
