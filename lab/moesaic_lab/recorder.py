"""Transports around another one, and one that writes down what crosses it: for tests of volumes, for benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.comm.transport import AbstractTransport, Handle, Transfer


@dataclass(frozen=True)
class RecordedMessage:
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
    messages: list[RecordedMessage] = field(default_factory=list)
    """Messages with a tag of the range, with the tag counted from its first."""


class AbstractPassing(AbstractTransport):
    """Passes everything on to a transport: a base of those that only look, or begin something around it.

    Args:
        transport: the one that moves the bytes.
    """

    def __init__(self, transport: AbstractTransport) -> None:
        super().__init__(transport.rank, transport.world, transport.device)
        self._transport = transport

    def issue(self, transfer: Transfer) -> Handle:
        """Start a transfer."""
        return self._transport.issue(transfer)

    def wait(self, handle: Handle) -> None:
        """Wait for a transfer."""
        self._transport.wait(handle)

    def take_tags(self, num_tags: int) -> int:
        """Take tags of the transport."""
        return self._transport.take_tags(num_tags)


class Recorder(AbstractPassing):
    """Keeps a list of this rank's messages.

    Args:
        transport: the one that moves the bytes.
    """

    def __init__(self, transport: AbstractTransport) -> None:
        super().__init__(transport)
        self.ranges: list[Range] = []
        """In the order in which tags were taken."""

    def issue(self, transfer: Transfer) -> Handle:
        held = next(r for r in reversed(self.ranges) if r.first <= transfer.tag < r.first + r.length)
        for peer, tensor in transfer.sends.items():
            num_bytes = tensor.numel() * tensor.element_size()
            held.messages.append(RecordedMessage(transfer.tag - held.first, transfer.rank, peer, num_bytes))
        return super().issue(transfer)

    def take_tags(self, num_tags: int) -> int:
        first = super().take_tags(num_tags)
        self.ranges.append(Range(first, num_tags))
        return first
