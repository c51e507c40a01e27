"""n ranks in one process: a mailbox. The driver runs the ranks in lock step, so tests need no spawning."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.comm.wire import AbstractWire, Ticket, Transfer


class Loopback(AbstractWire):
    """Keeps each message until its receiver waits for it; counts what crossed.

    Receive buffers hold NaN until then, so a task that reads too early shows.
    """

    def __init__(self) -> None:
        self._mail: dict[tuple[int, int, int], Tensor] = {}
        self.bytes_sent: dict[tuple[int, int], int] = {}
        """(source, target) to bytes, over the wire's life."""

    def issue(self, transfer: Transfer) -> Ticket:
        """Post the sends; fill the receive buffers with NaN (the largest integer for integers)."""
        for peer, tensor in transfer.sends.items():
            key = (transfer.tag, transfer.rank, peer)
            assert key not in self._mail, f"two messages with tag {transfer.tag} from {transfer.rank} to {peer}"
            self._mail[key] = tensor.clone()
            pair = (transfer.rank, peer)
            self.bytes_sent[pair] = self.bytes_sent.get(pair, 0) + tensor.numel() * tensor.element_size()
        for buffer in transfer.receives.values():
            buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)
        return Ticket(transfer)

    def is_ready(self, ticket: Ticket) -> bool:
        """Whether every message that a transfer waits for was posted."""
        transfer = ticket.transfer
        return all((transfer.tag, peer, transfer.rank) in self._mail for peer in transfer.receives)

    def wait(self, ticket: Ticket) -> None:
        """Deliver the messages; they must be there (`is_ready`)."""
        transfer = ticket.transfer
        for peer, buffer in transfer.receives.items():
            message = self._mail.pop((transfer.tag, peer, transfer.rank))
            assert message.shape == buffer.shape, (
                f"rank {transfer.rank} expects {buffer.shape} of {peer}: {message.shape}"
            )
            buffer.copy_(message)

    @property
    def is_empty(self) -> bool:
        """True when every message was received."""
        return not self._mail
