"""Wgrad products run while the rows' gradient is sent between nodes, and always before they are
read."""

from __future__ import annotations

from collections import defaultdict
from threading import get_ident

import pytest
from meshes import make_layer, on_mesh, tokens_of

from moesaic.comm.loopback import run_ranks
from moesaic.comm.transport import AbstractTransport, Handle, Transfer
from moesaic.kernels import by_expert
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

TWO_NODES = Grid(world=4, ep=4, ranks_per_node=2)


class Diary(AbstractTransport):
    """A transport that forwards everything to another one, and records issues and waits in order.

    Args:
        transport: the transport that sends the bytes.
        events: the list to which records are appended.
    """

    def __init__(self, transport: AbstractTransport, events: list[str]) -> None:
        super().__init__(transport.rank, transport.world, transport.device)
        self._transport = transport
        self._events = events

    def issue(self, transfer: Transfer) -> Handle:
        self._events.append(f"issue {transfer.lane}")
        return self._transport.issue(transfer)

    def wait(self, handle: Handle) -> None:
        self._events.append(f"wait {handle.transfer.lane}")
        self._transport.wait(handle)

    def take_tags(self, num_tags: int) -> int:
        return self._transport.take_tags(num_tags)


def events_of_backward(plan: Plan, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return each rank's transfers and wgrad products, in the order of one backward pass."""
    products = by_expert._accumulate_products
    of_thread: dict[int, list[str]] = defaultdict(list)  # ranks are threads

    def written(*args: object) -> None:
        of_thread[get_ident()].append("product")
        products(*args)

    monkeypatch.setattr(by_expert, "_accumulate_products", written)

    def rank(transport: AbstractTransport) -> list[str]:
        events = of_thread[get_ident()]
        out = on_mesh(make_layer(), grid, Diary(transport, events), plan)(
            tokens_of(transport.rank).requires_grad_()
        )
        events.clear()
        out.sin().sum().backward()
        return events

    return run_ranks(grid.world, rank)


@pytest.mark.parametrize("all_to_all", ["linear", "multicast", "hier2d"])
def test_products_wait_until_a_message_is_on_its_way_between_nodes(all_to_all, monkeypatch):
    for events in events_of_backward(Plan(all_to_all=all_to_all), TWO_NODES, monkeypatch):
        first = events.index("product")
        before = events[:first]
        assert before.count("issue inter") > before.count("wait inter")
        assert "wait inter" in events[first:]


def test_within_one_node_they_wait_for_a_message_too(monkeypatch):
    for events in events_of_backward(Plan(), Grid(world=2, ep=2), monkeypatch):
        before = [event.split()[0] for event in events[: events.index("product")]]
        assert before.count("issue") > before.count("wait")


def test_alone_they_are_written_all_the_same(monkeypatch):
    (events,) = events_of_backward(Plan(), Grid(world=1), monkeypatch)
    assert set(events) == {"product"}
