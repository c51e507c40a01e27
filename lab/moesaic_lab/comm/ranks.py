"""The part of the communication benchmark that runs on the ranks: tensors, the interpreter on sockets, checks and times.

Each method runs once before it is timed. This compares the received rows with the expected ones, and the messages that a
recorder saw with those of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.comm.mesh import open_transport
from moesaic.comm.transport import AbstractTransport
from moesaic.experts import PlainExperts
from moesaic.measure.together import latest, start_together
from moesaic.routing.node_tokens import find_node_tokens
from moesaic.runtime.executor import drive, interpret
from moesaic.runtime.tasks import Call, Environment, Value
from moesaic_lab.across_ranks import sent
from moesaic_lab.bounds import Message
from moesaic_lab.comm.config import MULTICAST, TORCH, Sweep, in_chunks
from moesaic_lab.comm.programs import LANES, Work, all_ep, dispatch, exchange
from moesaic_lab.measure import Span, in_turn
from moesaic_lab.recorder import Recorder

CYCLE = 2**18
"""Row numbers repeat after this many rows, so that row and column numbers are exact in float32."""


@dataclass(frozen=True, kw_only=True)
class CommFound:
    """The measurements of one size on one rank."""

    spans: dict[str, list[Span]]
    """Spans by method."""
    sent: dict[str, list[Message]]
    """Messages that this rank sent as a recorder saw them, by method; without torch's own."""
    messages: dict[str, list[Message]]
    """Messages that all ranks send by the program, by method."""


@dataclass(frozen=True, kw_only=True)
class CommMethod:
    """A program with this rank's inputs and expected outputs."""

    work: Work
    values: Mapping[str, Value]
    """Inputs of this rank, by slot."""
    expected: Mapping[str, Tensor]
    """Expected outputs on this rank, by slot."""


def measure_exchange(sweep: Sweep, size_kib: int, dim: int, warmup: int) -> CommFound:
    """Check and time all-to-alls of one size on this rank. All ranks call this together.

    Raises:
        RuntimeError: a method delivers wrong rows, or sends other messages than its program.
    """
    grid, rows = all_ep(sweep.nodes, sweep.ranks_per_node), sweep.rows_of(size_kib, dim)
    works = {name: exchange(grid, rows, name) for name in sweep.methods if name != TORCH}
    straight = exchange(grid, rows, "linear")
    sent_rows, expected = _numbered_rows(straight, dim)
    methods = {
        name: CommMethod(work=work, values={"rows": sent_rows}, expected={"h": expected})
        for name, work in works.items()
    }
    if TORCH not in sweep.methods:
        return _measure(methods, {}, dim, sweep.repeats, warmup)
    _compare(TORCH, {"h": expected}, {"h": torchs_own(sent_rows)})
    measured = _measure(methods, {TORCH: lambda: torchs_own(sent_rows)}, dim, sweep.repeats, warmup)
    measured.messages[TORCH] = straight.messages(dim)
    return measured


def measure_lanes(sweep: Sweep, size_kib: int, dim: int, warmup: int) -> CommFound:
    """Check and time the pipelined all-to-all and each of its lanes alone, as `measure_exchange` does."""
    grid, rows = all_ep(sweep.nodes, sweep.ranks_per_node), sweep.rows_of(size_kib, dim)
    methods = {}
    for name, which in LANES.items():
        work = exchange(grid, rows, "pipelined", which)
        sent_rows, expected = _numbered_rows(work, dim)
        methods[name] = CommMethod(work=work, values={"rows": sent_rows}, expected={"h": expected})
    return _measure(methods, {}, dim, sweep.repeats, warmup)


def measure_dispatch(sweep: Sweep, seed: int, dim: int, warmup: int) -> CommFound:
    """Check and time the dispatch of a layer by linear and by multicast, as `measure_exchange` does."""
    grid, rank = all_ep(sweep.nodes, sweep.ranks_per_node), dist.get_rank()
    token, expert = zip(*(route(sweep, seed, origin) for origin in range(grid.world)))
    copies = torch.stack([torch.bincount(of_rank, minlength=sweep.num_experts) for of_rank in expert]).numpy()
    number = [origin * sweep.tokens + of_rank for origin, of_rank in enumerate(token)]
    x = numbered(rank * sweep.tokens + torch.arange(sweep.tokens), dim)
    values: dict[str, Value] = {"x": x, "gates": numbered(number[rank], 1)}
    methods = {}
    for name, chunks in sweep.dispatches:
        node_tokens, table, indices = None, None, {"index": token[rank].unsqueeze(1)}
        if name == MULTICAST:
            node_tokens = [
                find_node_tokens(token[origin], expert[origin], sweep.num_experts, sweep.tokens, chunks, grid)
                for origin in range(grid.world)
            ]
            table = torch.stack([of_rank.counts for of_rank in node_tokens]).numpy()
            indices = dict(node_tokens[rank].indices)
        expected: dict[str, Tensor] = {}
        for chunk in range(chunks):
            suffix = f".{chunk}" if chunks > 1 else ""
            arriving_numbers = arriving(copies, number, rank, (chunk, chunks))
            expected |= {f"h{suffix}": numbered(arriving_numbers, dim), f"g{suffix}": numbered(arriving_numbers, 1)}
        work = dispatch(grid, copies, sweep.tokens, table, chunks)
        methods[in_chunks(name, chunks)] = CommMethod(work=work, values=values | indices, expected=expected)
    return _measure(methods, {}, dim, sweep.repeats, warmup)


def route(sweep: Sweep, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return (token, expert) of a rank's copies in expert order. Each token has `top_k` different experts, drawn uniformly."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    chosen = torch.rand(sweep.tokens, sweep.num_experts, generator=generator).topk(sweep.top_k).indices.flatten()
    order = chosen.argsort(stable=True)
    return torch.arange(sweep.tokens).repeat_interleave(sweep.top_k)[order], chosen[order]


def numbered(number: Tensor, dim: int) -> Tensor:
    """Return rows (n, dim) in which each value encodes the row's number and the column."""
    return (number % CYCLE).unsqueeze(1) + torch.arange(dim, dtype=torch.float32) / 32


def arriving(copies: np.ndarray, rows: Sequence[Tensor], rank: int, part: tuple[int, int] = (0, 1)) -> Tensor:
    """Return the numbers of the rows that a rank must receive, ordered by (expert, source rank).

    Args:
        copies: (world, num_experts) rows that each rank holds per expert.
        rows: numbers of each rank's rows, in expert order.
        rank: the receiving rank; experts are split evenly over the ranks.
        part: (c, n) to return only chunk c of n of the rows that each rank holds for each expert.
    """
    experts_per_rank, (chunk, chunks) = copies.shape[1] // len(rows), part
    starts, pieces = copies.cumsum(axis=1) - copies, []
    for expert in range(rank * experts_per_rank, (rank + 1) * experts_per_rank):
        for numbers, start, count in zip(rows, starts[:, expert], copies[:, expert]):
            pieces.append(numbers[start + count * chunk // chunks : start + count * (chunk + 1) // chunks])
    return torch.cat(pieces)


def torchs_own(rows: Tensor) -> Tensor:
    """Exchange rows by `all_to_all_single`, with equal split sizes, and return the received rows."""
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows)
    return out


def _numbered_rows(work: Work, dim: int) -> tuple[Tensor, Tensor]:
    """Return the rows that this rank holds and those that it must receive in an exchange, numbered over all ranks."""
    rows_per_rank = torch.from_numpy(work.copies.sum(axis=1))
    number = list(torch.arange(int(rows_per_rank.sum())).split(rows_per_rank.tolist()))
    rank = dist.get_rank()
    return numbered(number[rank], dim), numbered(arriving(work.copies, number, rank), dim)


def _measure(
    methods: Mapping[str, CommMethod], others: Mapping[str, Callable[[], object]], dim: int, repeats: int, warmup: int
) -> CommFound:
    """Check each method, then time all methods in turn."""
    transport = open_transport(name="sockets")
    messages = {name: method.work.messages(dim) for name, method in methods.items()}
    checked = {name: _check(name, method, transport, messages[name]) for name, method in methods.items()}
    timed = {name: _runner(method, transport) for name, method in methods.items()}
    spans = in_turn({**timed, **others}, repeats, barrier=start_together(latest), warmup=warmup)
    return CommFound(spans=spans, sent=checked, messages=messages)


def _runner(method: CommMethod, transport: AbstractTransport) -> Callable[[], Environment]:
    """Return a function that runs a method once."""
    work, call = method.work, Call(rank=transport.rank, sizes=method.work.sizes, experts=PlainExperts(1, 1, 1))

    def run() -> Environment:
        call.first_tag = transport.take_tags(len(work.program.tasks))
        return drive(interpret(work.program, method.values, call), transport)

    return run


def _check(name: str, method: CommMethod, transport: AbstractTransport, messages: Sequence[Message]) -> list[Message]:
    """Run a method once, check its results and messages, and return the messages that this rank sent."""
    recorder = Recorder(transport)
    _compare(name, method.expected, _runner(method, recorder)())
    seen = sent(recorder)
    planned = [(source, target, float(size)) for source, target, size in messages if source == transport.rank]
    if sorted(seen) != sorted(planned):
        raise RuntimeError(f"{name}: rank {transport.rank} sent {sorted(seen)}, its program sends {sorted(planned)}")
    return seen


def _compare(name: str, expected: Mapping[str, Tensor], results: Mapping[str, Value]) -> None:
    for slot, rows in expected.items():
        received = results[slot]
        if not isinstance(received, Tensor) or not torch.equal(received, rows):
            raise RuntimeError(
                f"{name}: rank {dist.get_rank()} did not get the rows that were sent to it, in slot {slot}"
            )
