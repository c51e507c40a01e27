"""One optimizer step, the same for every system: forward, backward, one reduction of the dense
gradients, optimizer.

The compared systems differ only in their MoE layers; everything else is defined here once. Dense
gradients are joined into one tensor and summed first inside each node, then between nodes. So they
cross the slow links only once per node.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moesaic.comm.collectives import all_gather_rows, all_reduce_sum, share_of
from moesaic.comm.transport import AbstractTransport
from moesaic.program.grid import Grid
from moesaic_lab.across_ranks import sent
from moesaic_lab.bounds import Message
from moesaic_lab.peers.exchange import AbstractExchange
from moesaic_lab.recorder import Recorder

PHASES = ("forward", "backward", "reduce", "optimizer")
"""Phases of a step, in order."""


@dataclass(frozen=True, kw_only=True)
class GivenBatch:
    """The batch of one rank, the same in every step."""

    inputs: Tensor
    """(batch, positions) tokens."""
    targets: Tensor
    """Target tokens."""


class TimedStep:
    """A timed training or inference step of a model with its optimizer on one rank.

    Args:
        model: the model, called with inputs and targets; its output has an attribute `loss`.
        experts: parameters of this rank's experts; all other parameters are dense and the same on
            all ranks.
        transport: transport of the dense reduction, and of our MoE layers.
        grid: mesh that tells which ranks share a node.
        exchange: exchange of a layer of others, which records its own messages and seconds; None
            for our layers.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: Sequence[nn.Parameter],
        batch: GivenBatch,
        transport: Recorder,
        grid: Grid,
        exchange: AbstractExchange | None = None,
    ) -> None:
        self.model = model
        self.batch = batch
        self._transport = transport
        self._grid = grid
        self._exchange = exchange
        spread = {id(parameter) for parameter in experts}
        self.experts = list(experts)
        self.dense = [parameter for parameter in model.parameters() if id(parameter) not in spread]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, weight_decay=0.0, fused=True
        )
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        """Seconds of each step since the last `forget`, by phase."""
        self.exchanging: list[float] = []
        """Seconds of each step in exchanges and the dense reduction; empty without an
        `exchange`."""

    def train(self) -> float:
        """Run a training step and return this rank's loss."""
        self._clear()
        marks = [time.monotonic()]
        loss = self.model(self.batch.inputs, self.batch.targets).loss
        marks.append(time.monotonic())
        loss.backward()
        marks.append(time.monotonic())
        self.reduce()
        marks.append(time.monotonic())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.monotonic())
        for phase, start, end in zip(PHASES, marks, marks[1:]):
            self.seconds[phase].append(end - start)
        if self._exchange is not None:
            # between marks 2 and 3 lies the reduction
            self.exchanging.append(self._exchange.seconds + marks[3] - marks[2])
        return float(loss.detach())

    @torch.no_grad()
    def infer(self) -> float:
        """Run the forward pass only and return this rank's loss."""
        self._clear()
        start = time.monotonic()
        loss = self.model(self.batch.inputs, self.batch.targets).loss
        self.seconds["forward"].append(time.monotonic() - start)
        if self._exchange is not None:
            self.exchanging.append(self._exchange.seconds)
        return float(loss)

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace all gradients by those of the mean loss over all ranks' batches."""
        gradients = [gradient_of(parameter) for parameter in self.dense]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = sum_node_first(self._transport, self._grid, flat) / self._grid.world
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts):
            gradient.copy_(part.view_as(gradient))
        # experts' gradients are sums over all ranks already: their rows came from all ranks
        expert_gradients = [gradient_of(parameter) for parameter in self.experts]
        torch._foreach_mul_(expert_gradients, 1 / self._grid.world)

    def messages(self) -> list[Message]:
        """Return the messages that this rank sent in the last step."""
        messages = sent(self._transport)
        if self._exchange is not None:
            for source, target, num_bytes in self._exchange.sent:
                messages.append((source, target, float(num_bytes)))
        return messages

    def forget(self) -> None:
        """Delete the times of earlier steps."""
        self.seconds = {phase: [] for phase in PHASES}
        self.exchanging = []

    def _clear(self) -> None:
        """Forget the messages so far."""
        self._transport.ranges.clear()
        if self._exchange is not None:
            self._exchange.sent.clear()
            self._exchange.seconds = 0.0


def sum_node_first(transport: AbstractTransport, grid: Grid, flat: Tensor) -> Tensor:
    """Return the sum over all ranks. It is summed inside each node, then each rank sums its share
    between nodes.

    Args:
        transport: transport between all ranks.
        grid: mesh that tells which ranks share a node.
        flat: (n,) numbers, the same n on all ranks.
    """
    own_node = grid.node_of(transport.rank)
    own_index = grid.local_of(transport.rank)
    node = tuple(rank for rank in range(grid.world) if grid.node_of(rank) == own_node)
    # the ranks with this rank's index in their nodes
    rail = tuple(rank for rank in range(grid.world) if grid.local_of(rank) == own_index)

    sum_of_node = all_reduce_sum(transport, node, flat)
    own_share = share_of(len(flat), node.index(transport.rank), len(node))
    share = sum_of_node[own_share]
    total_of_share = all_reduce_sum(transport, rail, share)
    return all_gather_rows(transport, node, total_of_share, len(flat))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; if there is none, create one of zeros."""
    # an expert without rows, in a layer that runs each expert separately
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
