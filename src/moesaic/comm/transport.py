"""The interface of a transport: issue a movement's sends and receives, wait for them where the data is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from moesaic.errors import InputError

Lane = Literal["intra", "inter"]
"""Which links a transfer uses: inside a node or between nodes. NCCL has a communicator and a stream per lane."""

TAG_LIMIT = 2**31
"""Tags are below this number: what every backend takes."""


class MessageSizeError(RuntimeError):
    """A peer sent a message of another size than this rank expects: the two do not run the same."""


@dataclass(frozen=True)
class Transfer:
    """One rank's part of one movement; transfers to oneself never reach a transport."""

    rank: int
    """Whose part it is."""
    tag: int
    """The same number on all ranks for one movement, different for two movements in flight."""
    sends: Mapping[int, Tensor]
    """Peer to contiguous tensor."""
    receives: Mapping[int, Tensor]
    """Peer to the contiguous buffer that will be filled."""
    lane: Lane = "inter"
    """The links that it uses; the same on all ranks of one movement."""


@dataclass
class Handle:
    """A transfer under way."""

    transfer: Transfer
    works: list[Any] = field(default_factory=list)
    """What a transport waits on."""


class AbstractTransport(ABC):
    """Moves tensors between ranks, asynchronously. One rank's end of it.

    Args:
        rank: the rank whose end it is.
        world: number of ranks.
        device: where tensors that it moves must be.
    """

    def __init__(self, rank: int, world: int, device: torch.device | None = None) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self.rank = rank
        self.world = world
        self.device = device or torch.device("cpu")
        self._next_tag = 0
        self.compute = 0.0
        """Seconds that programs worked between their messages, where the host does the work."""
        self.waited = [0.0] * world
        """Seconds that they waited for each rank's messages, where the host waits."""

    def __deepcopy__(self, memo: dict[int, object]) -> AbstractTransport:
        """Return this transport: connections are shared by what copies whoever uses them."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse: connections end with their process.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a layer on a mesh holds connections to other ranks, which no file or other process can take over: save its "
            "state_dict(), or copy it with copy.deepcopy"
        )

    @abstractmethod
    def issue(self, transfer: Transfer) -> Handle:
        """Start a transfer. Every rank issues the movements of a program in the program's order."""

    @abstractmethod
    def wait(self, handle: Handle) -> None:
        """Return when the receive buffers are filled and the send buffers may be reused."""

    def note_wait(self, transfer: Transfer, seconds: float) -> None:
        """Count how long a transfer was waited for, for each of those whose messages came in it.

        Args:
            transfer: that has ended.
            seconds: of the wait.
        """
        for peer in transfer.receives:
            self.waited[peer] += seconds / len(transfer.receives)

    @property
    def next_tag(self) -> int:
        """What the next range of tags starts with: it moves on with every call of a layer."""
        return self._next_tag

    def take_tags(self, num_tags: int) -> int:
        """Return the first of consecutive tags that no transfer in flight has.

        The counter is this transport's own: ranks agree because each of them takes the same numbers of tags in the same
        order, also where it has nothing to send. After `TAG_LIMIT` the numbers start again; a range is never split.

        Args:
            num_tags: how many, at least 0.
        """
        assert 0 <= num_tags <= TAG_LIMIT, f"{num_tags} tags"
        if self._next_tag + num_tags > TAG_LIMIT:
            self._next_tag = 0
        first = self._next_tag
        self._next_tag += num_tags
        return first


class NoTransport(AbstractTransport):
    """The transport of a world of one rank: nothing ever crosses it."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(0, 1, device)

    def issue(self, transfer: Transfer) -> Handle:
        """Accept a transfer without messages."""
        assert not {*transfer.sends, *transfer.receives}, "a world of one rank has nobody to talk to"
        return Handle(transfer)

    def wait(self, handle: Handle) -> None:
        """Return at once."""


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes (num_bytes,): backends refuse some dtypes.

    `view` refuses a tensor of one element with stride 0 (an expanded gradient, say), which counts as contiguous.
    """
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} is not contiguous"
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
