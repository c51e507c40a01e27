"""Whole samples from rank to rank: residuals, masks, ids, labels; what belongs to a sample and is no result of an expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.balance.samples.homes import Homes
from moesaic.comm.transport import AbstractTransport, Transfer


def carry(transport: AbstractTransport, x: Tensor, before: Homes, after: Homes) -> Tensor:
    """Return this rank's samples after a move; differentiable. All ranks call it; samples that stay cross no link.

    Args:
        transport: between all ranks.
        x: (slots, ...) what this rank has of the samples that are its own before, of one shape on all ranks.
        before: where the samples are.
        after: where they go.

    Returns:
        (slots, ...), in the order of the slots after; a sample's values are the same bits.
    """
    assert len(x) == before.slots, f"{len(x)} samples for {before.slots} slots"
    if before.same_as(after):
        return x
    if not x.is_floating_point():
        return _exchange(transport, transport.take_tags(1), x, before, after)
    out: Tensor = _Carry.apply(transport, before, after, x)
    return out


class _Carry(torch.autograd.Function):
    """The exchange, whose transpose goes the other way."""

    @staticmethod
    def forward(ctx: Any, transport: AbstractTransport, before: Homes, after: Homes, x: Tensor) -> Tensor:
        tag = transport.take_tags(
            2
        )  # the backward pass has its own from the start: ranks may differ in what comes before it
        ctx.transport, ctx.before, ctx.after, ctx.tag, ctx.was_run = transport, before, after, tag + 1, False
        return _exchange(transport, tag, x, before, after)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        tag = ctx.transport.take_tags(1) if ctx.was_run else ctx.tag
        ctx.was_run = True
        return None, None, None, _exchange(ctx.transport, tag, gradient, ctx.after, ctx.before)


def _exchange(transport: AbstractTransport, tag: int, x: Tensor, before: Homes, after: Homes) -> Tensor:
    """Send each sample to where it goes; a message holds samples in the order of the slots that they leave."""
    rank = transport.rank
    targets, _ = before.targets(after)
    sources, source_slots = after.targets(before)
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    sends: dict[int, Tensor] = {}
    arriving: dict[int, tuple[np.ndarray, Tensor]] = {}
    for peer in range(transport.world):
        leaving = np.flatnonzero(targets[rank] == peer)
        coming = np.flatnonzero(sources[rank] == peer)
        coming = coming[np.argsort(source_slots[rank][coming])]
        if peer == rank:
            out[torch.from_numpy(coming)] = x[torch.from_numpy(leaving)]
            continue
        if len(leaving):
            sends[peer] = x[torch.from_numpy(leaving)]
        if len(coming):
            arriving[peer] = coming, x.new_empty(len(coming), *x.shape[1:])
    receives = {peer: buffer for peer, (_, buffer) in arriving.items()}
    if x[:1].numel() and (sends or receives):
        transport.wait(transport.issue(Transfer(rank, tag, sends, receives)))
    for slots, buffer in arriving.values():
        out[torch.from_numpy(slots)] = buffer
    return out
