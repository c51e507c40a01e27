"""All-to-alls of rows for the layers of others: torch's own, and the same over our transport, receives posted before sends.

Gloo's own all-to-all runs a pair of ranks half-duplex at random, so a layer that is measured with it loses for a reason
that is none of its own. A layer here takes its exchange as an argument and is measured with both.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.comm.transport import AbstractTransport, Transfer


class AbstractExchange(ABC):
    """Sends consecutive rows to every rank and receives theirs; keeps a list of what it sent to others.

    Args:
        rank: whose end it is.
        world: number of ranks, all of which take part.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.sent: list[tuple[int, int, int]] = []
        """(this rank, target, bytes) of every message since the list was last cleared."""
        self.seconds = 0.0
        """Spent in here, waiting for slower ranks included, since it was last set to 0."""

    def __call__(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Exchange rows; differentiable, the gradient goes the same way back.

        Args:
            rows: (sum of sends, ...), those for rank 0 first.
            sends: rows for each rank.
            receives: rows from each rank.

        Returns:
            (sum of receives, ...), those from rank 0 first.
        """
        arrived: Tensor = _Exchange.apply(rows, self, tuple(sends), tuple(receives))
        return arrived

    def move(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Exchange rows without a gradient; see `__call__`."""
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
        for target, count in enumerate(sends):
            if target != self.rank and count:
                self.sent.append((self.rank, target, count * row_bytes))
        arrived = rows.new_empty(sum(receives), *rows.shape[1:])
        start = time.monotonic()
        self._run(rows.contiguous(), arrived, sends, receives)
        self.seconds += time.monotonic() - start
        return arrived

    @abstractmethod
    def _run(self, rows: Tensor, arrived: Tensor, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Fill `arrived`."""


class TorchExchange(AbstractExchange):
    """`torch.distributed.all_to_all_single`.

    Args:
        group: the process group; its ranks are those of the counts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def _run(self, rows: Tensor, arrived: Tensor, sends: Sequence[int], receives: Sequence[int]) -> None:
        dist.all_to_all_single(arrived, rows, list(receives), list(sends), group=self._group)


class ReceiveFirst(AbstractExchange):
    """Tagged messages over a transport, all receives posted before any send."""

    def __init__(self, transport: AbstractTransport) -> None:
        super().__init__(transport.rank, transport.world)
        self._transport = transport

    def _run(self, rows: Tensor, arrived: Tensor, sends: Sequence[int], receives: Sequence[int]) -> None:
        leaving = dict(enumerate(rows.split(list(sends))))
        buffers = dict(enumerate(arrived.split(list(receives))))
        buffers.pop(self.rank).copy_(leaving.pop(self.rank))
        self._transport.wait(self._transport.issue(Transfer(self.rank, self._transport.take_tags(1), leaving, buffers)))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AbstractExchange, sends: tuple, receives: tuple) -> Tensor:
        ctx.exchange, ctx.sends, ctx.receives = exchange, sends, receives
        return exchange.move(rows, sends, receives)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.move(gradient, ctx.receives, ctx.sends), None, None, None
