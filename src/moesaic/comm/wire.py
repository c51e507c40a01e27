"""The interface of a wire: issue a movement's sends and receives, wait for them where the data is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Transfer:
    """One rank's part of one movement; transfers to oneself never reach a wire."""

    rank: int
    """Whose part it is."""
    tag: int
    """The same number on all ranks for one movement, different for two movements in flight."""
    sends: Mapping[int, Tensor]
    """Peer to contiguous tensor."""
    receives: Mapping[int, Tensor]
    """Peer to the contiguous buffer that will be filled."""


@dataclass
class Ticket:
    """A transfer under way."""

    transfer: Transfer
    works: list[Any] = field(default_factory=list)
    """What a wire waits on."""


class AbstractWire(ABC):
    """Moves tensors between ranks, asynchronously."""

    @abstractmethod
    def issue(self, transfer: Transfer) -> Ticket:
        """Start a transfer. Every rank issues the movements of a program in the program's order."""

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Return when the receive buffers are filled and the send buffers may be reused."""
