"""All-to-alls of rows for the layers of others: torch's own, and one over our transport that posts
receives before sends.

Gloo's all-to-all runs some pairs of ranks half-duplex, at random. That slows a layer for a reason
outside the layer. So each layer of others takes its exchange as an argument and is measured with
both exchanges.
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
    """An all-to-all of rows between all ranks that records messages and time.

    Args:
        world: number of ranks.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.sent: list[tuple[int, int, int]] = []
        """(this rank, target, bytes) of every message since the list was last cleared."""
        self.seconds = 0.0
        """Seconds spent in exchanges since it was last set to 0, including waits for slower
        ranks."""

    def __call__(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Exchange rows differentiably; backward sends the gradient through the reverse exchange.

        Args:
            rows: (sum of sends, ...) rows to send, those for rank 0 first.
            sends: number of rows for each rank.
            receives: number of rows from each rank.

        Returns:
            (sum of receives, ...) received rows, those from rank 0 first.
        """
        arrived: Tensor = _Exchange.apply(rows, self, tuple(sends), tuple(receives))
        return arrived

    def move(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Exchange rows without gradients; arguments and result are those of `__call__`."""
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
    def _run(
        self, rows: Tensor, arrived: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> None:
        """Exchange rows and write the received ones into `arrived`."""


class TorchExchange(AbstractExchange):
    """The exchange by `torch.distributed.all_to_all_single`.

    Args:
        group: the process group; its ranks index `sends` and `receives`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def _run(
        self, rows: Tensor, arrived: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> None:
        """Exchange rows with all ranks."""
        dist.all_to_all_single(arrived, rows, list(receives), list(sends), group=self._group)


class ReceiveFirst(AbstractExchange):
    """The exchange by tagged messages over our transport, which posts all receives before any
    send."""

    def __init__(self, transport: AbstractTransport) -> None:
        super().__init__(transport.rank, transport.world)
        self._transport = transport

    def _run(
        self, rows: Tensor, arrived: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> None:
        """Exchange rows with all ranks."""
        leaving = dict(enumerate(rows.split(list(sends))))
        buffers = dict(enumerate(arrived.split(list(receives))))
        buffers.pop(self.rank).copy_(leaving.pop(self.rank))
        tag = self._transport.take_tags(1)
        issued = self._transport.issue(Transfer(self.rank, tag, leaving, buffers))
        self._transport.wait(issued)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, exchange: AbstractExchange, sends: tuple, receives: tuple
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.sends = sends
        ctx.receives = receives
        return exchange.move(rows, sends, receives)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.move(gradient, ctx.receives, ctx.sends), None, None, None
