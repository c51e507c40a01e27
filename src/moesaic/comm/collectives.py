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
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

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
    own = _contiguous(transport, peers, tensor)
    return _all_gather(transport, transport.take_tags(1), peers, own)


def all_gather_rows(
    transport: AbstractTransport, peers: Peers, part: Tensor, num_rows: int
) -> Tensor:
    """Return the ranks' contiguous shares of the first dim (see `share_of`), joined to a new
    tensor, equal on all peers.

    (this rank's rows, ...) -> (num_rows, ...).
    """
    own = _contiguous(transport, peers, part)
    return _all_gather_rows(transport, transport.take_tags(1), peers, own, num_rows)


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
    flat = _contiguous(transport, peers, tensor).view(-1)
    return _sum(_exchange_shares(transport, tag, peers, flat))


def all_to_all(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> list[Tensor]:
    """Return every rank's share for this rank, that is this rank's `share_of` each of their
    tensors, in the order of `peers`.

    The tensors are (rows, ...) of one shape and dtype.
    """
    own = _contiguous(transport, peers, tensor)
    return _exchange_shares(transport, transport.take_tags(1), peers, own)


def all_reduce_max(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> Tensor:
    """Return the elementwise maximum over ranks; see `all_reduce_sum`. NaN wins. For booleans:
    whether any is true."""
    return _all_reduce(transport, peers, tensor, _maximum)


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
        """Return `forward(tensor)`, and keep `backward` for the gradient."""
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
    """Combine the tensors of all ranks, by a function of a list of equally large ones: small
    tensors whole, large ones in shares that are then gathered."""
    tag = transport.take_tags(2)  # as many for every size: one for each round of messages
    own = _contiguous(transport, peers, tensor)
    # Two ranks would send as much in shares: half a tensor in each of two rounds.
    if own.numel() * own.element_size() <= DIRECT_BYTES or len(peers) <= 2:
        return combine(_all_gather(transport, tag, peers, own))
    flat = own.view(-1)
    own_share = combine(_exchange_shares(transport, tag, peers, flat))
    whole = _all_gather_rows(transport, tag + 1, peers, own_share, len(flat))
    return whole.view(own.shape)


def _exchange_shares(
    transport: AbstractTransport, tag: int, peers: Peers, own: Tensor
) -> list[Tensor]:
    """Send each peer its share of this rank's tensor; return all peers' shares for this rank."""
    leaving = _shares(own, len(peers))  # by peer
    staying = leaving[peers.index(transport.rank)]
    arriving = [staying if peer == transport.rank else torch.empty_like(staying) for peer in peers]
    sends = _without_self(transport, peers, leaving)
    receives = _without_self(transport, peers, arriving)
    _exchange(transport, tag, sends, receives)
    return arriving


def _all_gather(transport: AbstractTransport, tag: int, peers: Peers, own: Tensor) -> list[Tensor]:
    """Send this rank's tensor to all peers; return all peers' tensors."""
    parts = [own if peer == transport.rank else torch.empty_like(own) for peer in peers]
    receives = _without_self(transport, peers, parts)
    sends = dict.fromkeys(receives, own)
    _exchange(transport, tag, sends, receives)
    return parts


def _all_gather_rows(
    transport: AbstractTransport, tag: int, peers: Peers, own: Tensor, num_rows: int
) -> Tensor:
    """Return the rows of all peers, of whom each has its share."""
    whole = own.new_empty(num_rows, *own.shape[1:])
    shares = _shares(whole, len(peers))  # views, into which the messages are received
    shares[peers.index(transport.rank)].copy_(own)
    receives = _without_self(transport, peers, shares)
    sends = dict.fromkeys(receives, own)
    _exchange(transport, tag, sends, receives)
    return whole


def _sum(parts: list[Tensor]) -> Tensor:
    """Return the sum of tensors in their dtype, added up in float32 at least."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = parts[0].to(wide, copy=True)  # this rank's own tensor may be the first part
    for part in parts[1:]:
        total += part.to(wide)
    return total.to(dtype)


def _maximum(parts: list[Tensor]) -> Tensor:
    """Return the elementwise maximum of tensors, as a new tensor."""
    return reduce(torch.maximum, parts).clone()  # `reduce` of a single part returns that part


def _contiguous(transport: AbstractTransport, peers: Peers, tensor: Tensor) -> Tensor:
    """Return a tensor ready to be sent, after a check of the peers."""
    assert transport.rank in peers, f"rank {transport.rank} is none of {peers}"
    assert list(peers) == sorted(set(peers)), f"{peers} do not ascend"
    return (tensor.detach() if tensor.requires_grad else tensor).contiguous()


def _shares(tensor: Tensor, count: int) -> list[Tensor]:
    """Return the shares of `count` ranks as views, by `share_of`."""
    slices = [share_of(len(tensor), index, count) for index in range(count)]
    return list(tensor.split([each.stop - each.start for each in slices]))


def _without_self(
    transport: AbstractTransport, peers: Peers, tensors: list[Tensor]
) -> dict[int, Tensor]:
    """Return the tensors of the other ranks, by rank."""
    return {peer: tensor for peer, tensor in zip(peers, tensors) if peer != transport.rank}


def _exchange(
    transport: AbstractTransport, tag: int, sends: dict[int, Tensor], receives: dict[int, Tensor]
) -> None:
    """Send and receive messages by peer, and wait until all have arrived."""
    transport.wait(transport.issue(Transfer(transport.rank, tag, sends, receives)))


MISSING = "nothing"
"""Stands in messages for the value of a field that a rank does not have."""
ADVICE = "start every rank with the same settings"
"""What to do about a difference, unless there is better advice."""
MOST_HOSTS = 4
"""Hosts that a message names at most."""


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
            ranks that have them, with their hosts if there are several.
    """
    values = {name: as_text(value) for name, value in fields.items()}
    text = json.dumps({"host": socket.gethostname(), "values": values}).encode()
    everyone = tuple(range(transport.world)) if peers is None else peers
    own_head = torch.tensor(_Head.of(values, text)).to(transport.device)
    heads = [_Head(*head.tolist()) for head in all_gather(transport, everyone, own_head)]
    # The texts may differ in length where fields have another order, which does not matter.
    if len({head._replace(text_bytes=0) for head in heads}) == 1:
        return
    # All ranks gather texts of the largest length.
    padded = torch.zeros(max(head.text_bytes for head in heads), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = all_gather(transport, everyone, padded.to(transport.device))
    values_of_ranks = {}
    hosts = {}
    for rank, head, padded_text in zip(everyone, heads, texts):
        received = json.loads(bytes(padded_text[: head.text_bytes].tolist()))
        values_of_ranks[rank] = received["values"]
        hosts[rank] = received["host"]
    raise InputError(_difference(values_of_ranks, hosts, advice or {}))


def as_text(value: object) -> str:
    """Return the text by which values are compared: `str(value)` in one line, without memory
    addresses."""
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", str(value)).split())


class _Head(NamedTuple):
    """What ranks exchange first of their settings, as int64 numbers."""

    num_fields: int
    text_bytes: int
    first_half: int
    """Of a digest of names and values, 16 bytes."""
    second_half: int

    @classmethod
    def of(cls, values: Mapping[str, str], text: bytes) -> _Head:
        """Return the head of a rank's settings, whose text is `text`."""
        in_order = json.dumps(sorted(values.items())).encode()
        digest = hashlib.blake2b(in_order, digest_size=16).digest()
        first_half = int.from_bytes(digest[:8], "little", signed=True)
        second_half = int.from_bytes(digest[8:], "little", signed=True)
        return cls(len(values), len(text), first_half, second_half)


def _difference(
    values_of_ranks: Mapping[int, Mapping[str, str]],
    hosts: Mapping[int, str],
    advice: Mapping[str, str],
) -> str:
    """Describe the first field that differs, in the order of the first rank's fields, then of the
    others' additional ones; `hosts` are those of the ranks."""
    names = dict.fromkeys(name for fields in values_of_ranks.values() for name in fields)
    for name in names:
        ranks_by_value: dict[str | None, list[int]] = {}
        for rank, fields in values_of_ranks.items():
            ranks_by_value.setdefault(fields.get(name), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = [
                f"{MISSING if value is None else value} on {ranks_in_words(ranks, hosts)}"
                for value, ranks in ranks_by_value.items()
            ]
            return f"{name} differs: {', '.join(parts)}: {advice.get(name, ADVICE)}"
    raise AssertionError("the digests differ and the fields do not")


def ranks_in_words(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return ascending ranks in words: "rank 3", "ranks 0-2", "ranks 0-2 and 5", or "ranks 4-7
    (box2)" if there are several hosts.

    Args:
        ranks: the ranks to name.
        hosts: the host of each rank of the run.
    """
    runs: list[list[int]] = []  # of consecutive ranks
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    noun = "rank" if len(ranks) == 1 else "ranks"
    words = f"{noun} {' and '.join(texts)}"
    if len(set(hosts.values())) == 1:
        return words
    named = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(named) - MOST_HOSTS} more" if len(named) > MOST_HOSTS else ""
    return f"{words} ({', '.join(named[:MOST_HOSTS])}{more})"
