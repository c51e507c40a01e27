"""The interface of a transport: issue a movement's sends and receives, and wait for them where the
data is read.

A transfer is one rank's messages of a movement of rows between ranks; a handle is a transfer in
flight. All ranks give a movement the same tag. A turn belongs to one of several micro-batches that
take turns: one computes while the messages of another travel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from moesaic.errors import InputError

Lane = Literal["intra", "inter"]
"""The links that a transfer uses: inside a node or between nodes. NCCL has one communicator and one
stream per lane."""

TAG_LIMIT = 2**31
"""Tags are below this number, which every backend accepts."""


@dataclass(frozen=True)
class Transfer:
    """One rank's part of one movement. A rank's rows for itself are not part of a transfer."""

    rank: int
    """The rank whose part this is."""
    tag: int
    """Equal on all ranks for one movement; different for two movements in flight."""
    sends: Mapping[int, Tensor]
    """The contiguous tensor for each peer."""
    receives: Mapping[int, Tensor]
    """The contiguous buffer to fill from each peer."""
    lane: Lane = "inter"
    """The links to use, equal on all ranks of one movement."""


@dataclass
class Handle:
    """A transfer in flight."""

    transfer: Transfer
    works: list[Any] = field(default_factory=list)
    """The objects that the transport waits for."""


class AbstractTransport(ABC):
    """Moves tensors between ranks asynchronously. Each rank has its own instance.

    Args:
        world: number of ranks.
        device: the device of the tensors to move.
    """

    def __init__(self, rank: int, world: int, device: torch.device | None = None) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self.rank = rank
        self.world = world
        self.device = device or torch.device("cpu")
        self._next_tag = 0
        """See `next_tag`."""
        self._num_layers = 0
        """Layers that were made on these ranks."""
        self.doing = ""
        """What this rank does, in words, for the error if a message does not come; "" outside calls
        of layers and averages."""
        self.compute = 0.0
        """Seconds that programs computed between their messages, if the host does the computing."""
        self.waited = [0.0] * world
        """Seconds that programs waited for each rank's messages, if the host waits."""

    def number_layer(self) -> int:
        """Return the number of a layer that is made on these ranks, from 0 in the order in which
        all ranks make them."""
        self._num_layers += 1
        return self._num_layers - 1

    def __deepcopy__(self, memo: dict[int, object]) -> AbstractTransport:
        """Return this transport itself, so that copies of a layer share its connections."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: connections end with their process.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a layer on a mesh holds connections to other ranks, which no file or other process "
            "can take over: save its state_dict(), or copy it with copy.deepcopy"
        )

    @abstractmethod
    def issue(self, transfer: Transfer) -> Handle:
        """Start a transfer. Every rank issues the movements of a program in the program's order."""

    @abstractmethod
    def wait(self, handle: Handle) -> None:
        """Block until the receive buffers are filled and the send buffers may be reused."""

    def note_wait(self, transfer: Transfer, seconds: float) -> None:
        """Add the time waited for a transfer to `waited`, in equal shares for the peers whose
        messages it received.

        Args:
            transfer: a transfer that has ended.
        """
        for peer in transfer.receives:
            self.waited[peer] += seconds / len(transfer.receives)

    @property
    def next_tag(self) -> int:
        """The first tag of the next range, which advances with every call of a layer."""
        return self._next_tag

    def take_tags(self, num_tags: int) -> int:
        """Return the first of consecutive tags that no transfer in flight uses.

        Each transport counts on its own. Ranks agree because they all take the same numbers of tags
        in the same order, even if they send nothing. After `TAG_LIMIT` the count starts again from
        0; a range is never split.

        Args:
            num_tags: number of tags, at least 0.
        """
        assert 0 <= num_tags <= TAG_LIMIT, f"{num_tags} tags"
        if self._next_tag + num_tags > TAG_LIMIT:
            self._next_tag = 0
        first = self._next_tag
        self._next_tag += num_tags
        return first


class AbstractSuspended(ABC):
    """A context that is left while another micro-batch has its turn, and entered again after it."""

    @abstractmethod
    def suspend(self) -> None:
        """Restore what the context found."""

    @abstractmethod
    def resume(self) -> None:
        """Set what the context sets."""


class AbstractTurn(ABC):
    """A micro-batch whose turn others take while its messages travel; see `moesaic.in_flight`.

    Args:
        number: the place of the micro-batch in its step.
        at_once: how many micro-batches run at a time, one or two; None for two, unless the layers'
            plan "auto" chooses before the first message.
    """

    def __init__(self, number: int, at_once: int | None = None) -> None:
        self.number = number
        self.at_once = at_once
        self.contexts: list[AbstractSuspended] = []
        """The contexts that it is in, and that set attributes of modules, the outermost first."""
        self.injecting: dict[int, Any] = {}
        """The layers that inject its auxiliary losses, by identity."""

    @abstractmethod
    def hand_over(self) -> None:
        """Let another micro-batch compute, and return when it is this one's turn again."""


TURN: ContextVar[AbstractTurn | None] = ContextVar("moesaic.turn", default=None)
"""The turn of the micro-batch that computes here; None if no others are in flight."""


def current_turn() -> AbstractTurn | None:
    """Return the turn of the micro-batch that computes here, if it may be handed over: not where
    one runs at a time, in a backward pass or in inference mode, whose states belong to the
    thread."""
    turn = TURN.get()
    if turn is None or turn.at_once == 1:
        return None
    if torch._C._current_graph_task_id() != -1:  # a backward pass runs
        return None
    return None if torch.is_inference_mode_enabled() else turn


def number_in_flight() -> int | None:
    """Return the number of the micro-batch that computes here; None if no others are in flight."""
    turn = TURN.get()
    return None if turn is None or turn.at_once == 1 else turn.number


class NoTransport(AbstractTransport):
    """The transport of a world of one rank, which sends nothing."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(0, 1, device)

    def issue(self, transfer: Transfer) -> Handle:
        """Accept a transfer without messages."""
        assert not {*transfer.sends, *transfer.receives}, (
            "a world of one rank has nobody to talk to"
        )
        return Handle(transfer)

    def wait(self, handle: Handle) -> None:
        """Return at once."""


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, (num_bytes,): backends refuse some dtypes.

    `view` refuses a tensor of one element with stride 0 (an expanded gradient, for example), which
    counts as contiguous.
    """
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} is not contiguous"
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
