"""Small collectives over any transport, by point-to-point messages between an explicit tuple of
ranks.

They work identically on loopback, sockets and NCCL, accept any dtype and empty tensors, and add in
the order of the ranks. So the result has the same bits on every rank and in every run. Use programs
for activations; these are for counts, losses and gradients of small parameters.

All ranks of the transport must call the same collectives in the same order, each with its own
group, even if it is alone in that group: tags are counted per transport. The number of tags of a
collective does not depend on sizes, so sizes may differ between groups. In every function,
`transport` is this rank's, and `peers` are the ranks that take part, ascending, including this one.
`check_same` checks, before the first such collective, whether all ranks have the same settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.comm.transport import AbstractTransport, Transfer
from moesaic.errors import InputError

DIRECT_BYTES = 16 * 1024
"""Up to this size a reduction sends whole tensors, in one round of messages. Larger tensors are
sent as segments, in two rounds."""

Peers = tuple[int, ...]


def all_gather(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> list[Tensor]:
    """Return every rank's tensor, in the order of `peers`. All have one shape and dtype.

    This rank's entry is `tensor` itself (detached, contiguous).
    """
    return _all_gather(
        transport, transport.take_tags(1), peers, _contiguous(transport, peers, tensor)
    )


def all_gather_rows(
    transport: AbstractTransport, peers: Peers, part: Tensor, num_rows: int
) -> Tensor:
    """Return the ranks' contiguous shares of the first dim (see `share_of`), joined to a new
    tensor, equal on all peers.

    (this rank's rows, ...) -> (num_rows, ...).
    """
    return _all_gather_rows(
        transport, transport.take_tags(1), peers, _contiguous(transport, peers, part), num_rows
    )


def all_reduce_sum(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> Tensor:
    """Return the sum over ranks, added in the order of `peers`. Types narrower than float32 are
    added in float32.

    The tensors have one shape and dtype, which the result has too. Large tensors are sent as
    segments, so each rank sends 2 (n - 1) / n times the tensor. Small tensors are sent whole to
    each peer. Both give the same bits.
    """
    return _all_reduce(transport, peers, tensor, _sum)


def reduce_scatter_sum(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> Tensor:
    """Return this rank's share (see `share_of`) of the flattened sum over ranks, added in the order
    of `all_reduce_sum`."""
    tag = transport.take_tags(1)
    return _sum(
        _exchange_shares(transport, tag, peers, _contiguous(transport, peers, tensor).view(-1))
    )


def all_to_all(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> list[Tensor]:
    """Return every rank's share for this rank, that is this rank's `share_of` each of their
    tensors, in the order of `peers`.

    The tensors are (rows, ...) of one shape and dtype.
    """
    return _exchange_shares(
        transport, transport.take_tags(1), peers, _contiguous(transport, peers, tensor)
    )


def all_reduce_max(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> Tensor:
    """Return the elementwise maximum over ranks; see `all_reduce_sum`. NaN wins. For booleans:
    whether any is true."""
    return _all_reduce(transport, peers, tensor, lambda parts: reduce(torch.maximum, parts).clone())


def broadcast(transport: AbstractTransport, peers: Peers, tensor: Tensor, source: int) -> Tensor:
    """Return a copy of the tensor of rank `source` on all ranks. On other ranks `tensor` gives
    shape and dtype."""
    assert source in peers, f"source {source} is none of {peers}"
    whole = _contiguous(transport, peers, tensor).clone()
    others = [peer for peer in peers if peer != source]
    tag = transport.take_tags(1)
    if transport.rank == source:
        _exchange(transport, tag, dict.fromkeys(others, whole), {})
    else:
        _exchange(transport, tag, {}, {source: whole})
    return whole


def share_of(num_rows: int, index: int, count: int) -> slice:
    """Return the slice of `num_rows` rows that belongs to the `index`-th of `count` ranks. Slices
    differ by at most one row."""
    return slice(num_rows * index // count, num_rows * (index + 1) // count)


def share(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> Tensor:
    """Mark a tensor that is equal on all peers, and that each of them uses on different data.

    Forward it is the identity. Backward it sums the gradients of all peers. Every peer's loss must
    depend on it, if only through empty tensors: if one rank's backward pass omits it, the other
    ranks wait forever.
    """
    return with_gradient(
        tensor, lambda whole: whole.view_as(whole), partial(all_reduce_sum, transport, peers)
    )


def slice_rows(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> Tensor:
    """Return this rank's contiguous share of a tensor that all peers have and use identically.

    (rows, ...) -> (this rank's rows, ...); see `share_of`. Forward no bytes move. Backward the
    shares of the gradient are gathered, so every peer has the whole gradient. Like `share`, it
    needs every peer in the backward pass.
    """
    mine = share_of(len(tensor), peers.index(transport.rank), len(peers))
    num_rows = len(tensor)
    return with_gradient(
        tensor,
        lambda whole: whole[mine].clone(),
        lambda part: all_gather_rows(transport, peers, part, num_rows),
    )


def gather_rows(transport: AbstractTransport, peers: Peers, part: Tensor, num_rows: int) -> Tensor:
    """Join the shares of a tensor that all peers then use identically: the inverse of `slice_rows`.

    (this rank's rows, ...) -> (num_rows, ...), equal on all peers. Forward the shares are gathered.
    Backward no bytes move, since every peer has the whole gradient.
    """
    mine = share_of(num_rows, peers.index(transport.rank), len(peers))
    return with_gradient(
        part,
        lambda part: all_gather_rows(transport, peers, part, num_rows),
        lambda whole: whole[mine],
    )


def with_gradient(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `forward(tensor)`, with `backward` applied to the gradient."""
    out: Tensor = _WithGradient.apply(tensor, forward, backward)
    return out


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Communicate forward by one function, and backward by the other."""
        ctx.gradient_function = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient_function(gradient), None, None


def _all_reduce(
    transport: AbstractTransport,
    peers: Peers,
    tensor: Tensor,
    combine: Callable[[list[Tensor]], Tensor],
) -> Tensor:
    """Combine the tensors of all ranks: small ones whole, large ones in shares that are then
    gathered."""
    tag = transport.take_tags(2)
    mine = _contiguous(transport, peers, tensor)
    if mine.numel() * mine.element_size() <= DIRECT_BYTES or len(peers) <= 2:
        return combine(_all_gather(transport, tag, peers, mine))
    flat = mine.view(-1)
    parts = _exchange_shares(transport, tag, peers, flat)
    return _all_gather_rows(transport, tag + 1, peers, combine(parts), len(flat)).view(mine.shape)


def _exchange_shares(
    transport: AbstractTransport, tag: int, peers: Peers, mine: Tensor
) -> list[Tensor]:
    """Send each peer its share of a tensor; return all peers' shares for this rank."""
    segments = _shares(mine, len(peers))
    index = peers.index(transport.rank)
    parts = [
        segments[index] if peer == transport.rank else torch.empty_like(segments[index])
        for peer in peers
    ]
    _exchange(
        transport,
        tag,
        _without_self(transport, peers, segments),
        _without_self(transport, peers, parts),
    )
    return parts


def _all_gather(transport: AbstractTransport, tag: int, peers: Peers, mine: Tensor) -> list[Tensor]:
    parts = [mine if peer == transport.rank else torch.empty_like(mine) for peer in peers]
    others = _without_self(transport, peers, parts)
    _exchange(transport, tag, dict.fromkeys(others, mine), others)
    return parts


def _all_gather_rows(
    transport: AbstractTransport, tag: int, peers: Peers, mine: Tensor, num_rows: int
) -> Tensor:
    """Return the rows of all peers, of whom each has its share."""
    whole = mine.new_empty(num_rows, *mine.shape[1:])
    pieces = _shares(whole, len(peers))
    pieces[peers.index(transport.rank)].copy_(mine)
    others = _without_self(transport, peers, pieces)
    _exchange(transport, tag, dict.fromkeys(others, mine), others)
    return whole


def _sum(parts: list[Tensor]) -> Tensor:
    """Return the sum of tensors in their dtype, added up in float32 at least."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part.to(wide)
    return total.to(dtype)


def _contiguous(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> Tensor:
    assert transport.rank in peers, f"rank {transport.rank} is none of {peers}"
    assert list(peers) == sorted(set(peers)), f"{peers} do not ascend"
    return tensor.detach().contiguous()


def _shares(tensor: Tensor, count: int) -> list[Tensor]:
    return [tensor[share_of(len(tensor), index, count)] for index in range(count)]


def _without_self(
    transport: AbstractTransport, peers: Peers, tensors: list[Tensor]
) -> dict[int, Tensor]:
    return {peer: tensor for peer, tensor in zip(peers, tensors) if peer != transport.rank}


def _exchange(
    transport: AbstractTransport, tag: int, sends: dict[int, Tensor], receives: dict[int, Tensor]
) -> None:
    transport.wait(transport.issue(Transfer(transport.rank, tag, sends, receives)))


MISSING = "nothing"
"""Stands in messages for the value of a field that a rank does not have."""
ADVICE = "start every rank with the same settings"
"""What to do about a difference, unless there is better advice."""


def check_same(
    transport: AbstractTransport,
    fields: Mapping[str, object],
    *,
    peers: tuple[int, ...] | None = None,
    advice: Mapping[str, str] | None = None,
) -> None:
    """Compare settings over the ranks of a transport.

    Each rank first sends a message of fixed size: the number of fields, a digest of their names and
    values, and the length of their text. If these differ, the texts are exchanged too, so that all
    ranks raise the same error. This cannot hang, whatever fields the ranks have.

    Args:
        transport: this rank's transport.
        fields: values by dotted name. Two values are equal if `as_text` returns the same for both.
            The order is ignored.
        peers: ranks that compare, ascending, including this one; None for all.
        advice: what to do about a difference, by the name of the field; `ADVICE` for other fields.

    Raises:
        InputError: on every rank, with the name of the first field that differs, its values and the
            ranks that have them.
    """
    values = {name: as_text(value) for name, value in fields.items()}
    text = json.dumps(values).encode()
    everyone = tuple(range(transport.world)) if peers is None else peers
    heads = [
        tuple(head.tolist())
        for head in all_gather(transport, everyone, _head(values, text).to(transport.device))
    ]
    if len({(count, *digest) for count, _, *digest in heads}) == 1:
        return
    longest = max(length for _, length, *_ in heads)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = all_gather(transport, everyone, padded.to(transport.device))
    values_of_ranks = [
        json.loads(bytes(text[: head[1]].tolist())) for head, text in zip(heads, texts)
    ]
    raise InputError(_difference(dict(zip(everyone, values_of_ranks)), advice or {}))


def as_text(value: object) -> str:
    """Return the text by which values are compared: `str(value)` in one line, without memory
    addresses."""
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", str(value)).split())


def _head(values: Mapping[str, str], text: bytes) -> torch.Tensor:
    digest = hashlib.blake2b(json.dumps(sorted(values.items())).encode(), digest_size=16).digest()
    halves = [int.from_bytes(digest[start : start + 8], "little", signed=True) for start in (0, 8)]
    return torch.tensor([len(values), len(text), *halves])


def _difference(values_of_ranks: Mapping[int, Mapping[str, str]], advice: Mapping[str, str]) -> str:
    """Describe the first field that differs, in the order of the first rank's fields, then of the
    others' additional ones."""
    names = dict.fromkeys(name for fields in values_of_ranks.values() for name in fields)
    for name in names:
        holders: dict[str | None, list[int]] = {}
        for rank, fields in values_of_ranks.items():
            holders.setdefault(fields.get(name), []).append(rank)
        if len(holders) > 1:
            values = (
                f"{MISSING if value is None else value} on {_ranks_text(ranks)}"
                for value, ranks in holders.items()
            )
            return f"{name} differs: {', '.join(values)}: {advice.get(name, ADVICE)}"
    raise AssertionError("the digests differ and the fields do not")


def _ranks_text(ranks: Sequence[int]) -> str:
    """Write ascending ranks: "rank 3", "ranks 0-2", "ranks 0-2 and 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + " and ".join(texts)
