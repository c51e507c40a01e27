"""A wire that writes down what crosses another one: for tests of volumes, for benchmarks, for whoever wants to look."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.comm.wire import AbstractWire, Ticket, Transfer


@dataclass(frozen=True)
class Sent:
    """One message."""

    tag: int
    source: int
    target: int
    num_bytes: int


@dataclass
class Range:
    """Consecutive tags that were taken at once: those of a program's tasks."""

    first: int
    length: int
    messages: list[Sent] = field(default_factory=list)
    """Messages with a tag of the range, with the tag counted from its first."""


class Recorder(AbstractWire):
    """Passes everything on to a wire and keeps a list of this rank's messages.

    Args:
        wire: the one that moves the bytes.
    """

    def __init__(self, wire: AbstractWire) -> None:
        super().__init__(wire.rank, wire.world, wire.device)
        self._wire = wire
        self.ranges: list[Range] = []
        """In the order in which tags were taken."""

    def issue(self, transfer: Transfer) -> Ticket:
        """Write down the messages of a transfer, and start it."""
        held = next(r for r in reversed(self.ranges) if r.first <= transfer.tag < r.first + r.length)
        for peer, tensor in transfer.sends.items():
            num_bytes = tensor.numel() * tensor.element_size()
            held.messages.append(Sent(transfer.tag - held.first, transfer.rank, peer, num_bytes))
        return self._wire.issue(transfer)

    def wait(self, ticket: Ticket) -> None:
        """Wait for a transfer."""
        self._wire.wait(ticket)

    def take_tags(self, num_tags: int) -> int:
        """Take tags of the wire, and remember the range."""
        first = self._wire.take_tags(num_tags)
        self.ranges.append(Range(first, num_tags))
        return first
