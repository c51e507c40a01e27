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
from moesaic.program.sizes import Runs


def carry(
    transport: AbstractTransport, x: Tensor, before: Homes, after: Homes, rows: np.ndarray | None = None
) -> Tensor:
    """Return this rank's samples after a move; differentiable. All ranks call it; samples that stay cross no link.

    Args:
        transport: between all ranks.
        x: (rows of this rank, ...) what it has of the samples that are its own before, slot after slot.
        before: where the samples are.
        after: where they go.
        rows: (ranks, slots) int64 rows of each sample, by where it is before, the same on all ranks; None for one each.

    Returns:
        (rows, ...), in the order of the slots after; a sample's values are the same bits.
    """
    rows = np.ones(before.samples.shape, dtype=np.int64) if rows is None else rows
    assert len(x) == rows[transport.rank].sum(), f"{len(x)} rows for {before.slots} slots"
    if before.same_as(after):
        return x
    if not x.is_floating_point():
        return _exchange(transport, transport.take_tags(1), x, before, after, rows)
    out: Tensor = _Carry.apply(transport, before, after, rows, x)
    return out


class _Carry(torch.autograd.Function):
    """The exchange, whose transpose goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, transport: AbstractTransport, before: Homes, after: Homes, rows: np.ndarray, x: Tensor
    ) -> Tensor:
        tag = transport.take_tags(
            2
        )  # the backward pass has its own from the start: ranks may differ in what comes before it
        ctx.transport, ctx.before, ctx.after, ctx.tag, ctx.was_run = transport, before, after, tag + 1, False
        ctx.rows = rows_after(rows, before, after)
        return _exchange(transport, tag, x, before, after, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None, Tensor]:
        tag = ctx.transport.take_tags(1) if ctx.was_run else ctx.tag
        ctx.was_run = True
        return None, None, None, None, _exchange(ctx.transport, tag, gradient, ctx.after, ctx.before, ctx.rows)


def rows_after(rows: np.ndarray, before: Homes, after: Homes) -> np.ndarray:
    """Return rows per sample, (ranks, slots) int64, by where samples are after a move; `rows` has them by where they were."""
    found: np.ndarray = rows[after.targets(before)]
    return found


def _exchange(
    transport: AbstractTransport, tag: int, x: Tensor, before: Homes, after: Homes, rows: np.ndarray
) -> Tensor:
    """Send each sample to where it goes; a message holds samples in the order of the slots that they leave."""
    rank = transport.rank
    targets, _ = before.targets(after)
    sources, source_slots = after.targets(before)
    held, wanted = rows[rank], rows_after(rows, before, after)[rank]
    x = x.detach().contiguous()
    out = x.new_empty(int(wanted.sum()), *x.shape[1:])
    sends: dict[int, Tensor] = {}
    arriving: dict[int, tuple[Tensor, Tensor]] = {}
    for peer in range(transport.world):
        coming = np.flatnonzero(sources[rank] == peer)
        leaving = _places(held, np.flatnonzero(targets[rank] == peer)).to(x.device)
        places = _places(wanted, coming[np.argsort(source_slots[rank][coming])]).to(x.device)
        if peer == rank:
            out[places] = x[leaving]
            continue
        if len(leaving):
            sends[peer] = x[leaving]
        if len(places):
            arriving[peer] = places, x.new_empty(len(places), *x.shape[1:])
    receives = {peer: buffer for peer, (_, buffer) in arriving.items()}
    if x.shape[1:].numel() and (sends or receives):
        transport.wait(transport.issue(Transfer(rank, tag, sends, receives)))
    for places, buffer in arriving.values():
        out[places] = buffer
    return out


def _places(rows: np.ndarray, slots: np.ndarray) -> Tensor:
    """Return where the rows of some slots are, (rows,) int64, in the order of the slots; `rows` says how many each has."""
    return torch.from_numpy(Runs((rows.cumsum() - rows)[slots], rows[slots]).rows)


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
