"""Wrappers of a transport, among them one that records all messages, for benchmarks and tests of
message volumes."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.comm.transport import AbstractTransport, Handle, Transfer


@dataclass(frozen=True)
class RecordedMessage:
    """One message that a rank sent."""

    tag: int
    source: int
    target: int
    num_bytes: int


@dataclass
class Range:
    """Consecutive tags that were taken together, for the tasks of one program."""

    first: int
    length: int
    messages: list[RecordedMessage] = field(default_factory=list)
    """Messages with a tag of this range; their tags are relative to `first`."""


class AbstractPassing(AbstractTransport):
    """Base of transports that forward everything to another transport and observe or extend it.

    Args:
        transport: the transport that moves the bytes.
    """

    def __init__(self, transport: AbstractTransport) -> None:
        super().__init__(transport.rank, transport.world, transport.device)
        self._transport = transport

    def issue(self, transfer: Transfer) -> Handle:
        """Start a transfer on the wrapped transport."""
        return self._transport.issue(transfer)

    def wait(self, handle: Handle) -> None:
        """Wait for a transfer of the wrapped transport."""
        self._transport.wait(handle)

    def take_tags(self, num_tags: int) -> int:
        """Take tags from the wrapped transport."""
        return self._transport.take_tags(num_tags)


class Recorder(AbstractPassing):
    """Records the messages that this rank sends.

    Args:
        transport: the transport that moves the bytes.
    """

    def __init__(self, transport: AbstractTransport) -> None:
        super().__init__(transport)
        self.ranges: list[Range] = []
        """Ranges of tags with their messages, in the order in which the tags were taken."""

    def issue(self, transfer: Transfer) -> Handle:
        """Record the messages under the range that their tag was taken in, and start them."""
        tag = transfer.tag
        ranges = [each for each in self.ranges if each.first <= tag < each.first + each.length]
        tag_range = ranges[-1]
        for peer, tensor in transfer.sends.items():
            num_bytes = tensor.numel() * tensor.element_size()
            tag_range.messages.append(
                RecordedMessage(tag - tag_range.first, transfer.rank, peer, num_bytes)
            )
        return super().issue(transfer)

    def take_tags(self, num_tags: int) -> int:
        first = super().take_tags(num_tags)
        self.ranges.append(Range(first, num_tags))
        return first
