"""A wire without tags: what matches, what hangs, what would swap data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moesaic.comm.loopback import run_ranks
from moesaic.comm.wire import AbstractWire, Lane, Ticket, Transfer

Message = tuple[int, int, int]
"""Tag, source, target."""


def issue(wire: AbstractWire, tag: int, pairs: list[tuple[int, int]], lane: Lane = "inter", size: int = 1) -> Ticket:
    sends = {target: torch.full((size,), float(tag)) for source, target in pairs if source == wire.rank}
    receives = {source: torch.empty(size) for source, target in pairs if target == wire.rank}
    return wire.issue(Transfer(wire.rank, tag, sends, receives, lane))


def run(function: Callable[[AbstractWire], None], world: int = 2, in_order: bool = True) -> None:
    for seed in range(4):
        run_ranks(world, function, seed=seed, in_order=in_order)


def check(wire: AbstractWire, ticket: Ticket) -> None:
    wire.wait(ticket)
    assert all(bool((buffer == ticket.transfer.tag).all()) for buffer in ticket.transfer.receives.values())


def test_one_order_on_all_ranks_runs_whatever_is_waited_for_first():
    def rank(wire: AbstractWire) -> None:
        tickets = [issue(wire, tag, [(0, 1), (1, 2), (2, 0), (2, 1)][tag:]) for tag in range(4)]
        for ticket in tickets if wire.rank else reversed(tickets):
            check(wire, ticket)

    run(rank, world=3)


def test_orders_that_differ_meet_the_wrong_tag():
    def rank(wire: AbstractWire) -> None:
        tickets = [issue(wire, tag, [(0, 1)]) for tag in ((5, 6) if wire.rank else (6, 5))]
        for ticket in tickets:
            check(wire, ticket)

    run(rank, in_order=False)
    with pytest.raises(AssertionError, match=r"without tags, what rank . does under tag . meets what rank . does"):
        run(rank)


def circle(first: Lane, second: Lane) -> Callable[[AbstractWire], None]:
    """Three ranks: tag r goes from rank r to the next; each rank begins with its own, so nobody's first meets its peer."""

    def rank(wire: AbstractWire) -> None:
        before = (wire.rank - 1) % 3
        sent = issue(wire, wire.rank, [(wire.rank, (wire.rank + 1) % 3)], first)
        came = issue(wire, before, [(before, wire.rank)], second)
        check(wire, came)
        check(wire, sent)

    return rank


def test_a_circle_of_first_batches_hangs():
    run(circle("inter", "inter"), world=3, in_order=False)
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1, 2\] wait for messages that nobody sends"):
        run(circle("inter", "inter"), world=3)


def test_lanes_have_queues_of_their_own():
    def rank(wire: AbstractWire) -> None:
        lanes: tuple[Lane, Lane] = ("intra", "inter") if wire.rank else ("inter", "intra")
        tickets = [issue(wire, {"intra": 1, "inter": 2}[lane], [(0, 1), (1, 0)], lane) for lane in lanes]
        for ticket in tickets:
            check(wire, ticket)

    run(rank)


def test_batches_without_bytes_hold_up_nothing():
    def rank(wire: AbstractWire) -> None:
        tickets = [issue(wire, 0, [(0, 1)]), issue(wire, 1, [(1, 0)], size=0), issue(wire, 2, [(1, 0)])]
        for ticket in reversed(tickets):
            check(wire, ticket)

    run(rank)
