"""What belongs to a sample and is no result of an expert: residuals, masks, ids, labels, which go from rank to rank with
it, and random masks, which are the same wherever the sample is computed.

A dropout mask drawn from a rank's random generator would depend on which samples are there and in which order. Drawn from
the number of the sample it is a property of the batch, so a model with placement drops what the model without it drops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.balance.samples.placer import Homes
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


def sample_dropout(x: Tensor, p: float, samples: Tensor, seed: int) -> Tensor:
    """Zero entries with probability p and scale the others by 1 / (1 - p).

    Args:
        x: (samples, ...).
        p: from 0 to below 1.
        samples: (samples,) int64: the number of each sample in the whole batch, as `SampleTrip.samples` has it.
        seed: at least 0; of the place in the model, the micro-batch and the step: one that no other call has.

    Returns:
        of x's shape.
    """
    if not p:
        return x
    keep = torch.empty(x.shape, device=x.device)
    for row, sample in zip(keep, samples.tolist()):
        state = np.random.SeedSequence((seed, sample)).generate_state(1, np.uint64)
        generator = torch.Generator(x.device).manual_seed(int(state[0]))
        row.bernoulli_(1 - p, generator=generator)
    return x * keep.to(x.dtype) / (1 - p)
