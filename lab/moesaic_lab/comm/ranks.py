"""The part of the communication benchmark that runs on the ranks: tensors, the interpreter on
sockets, checks and times.

Each method runs once before it is timed. This compares the received rows with the expected ones,
and the messages that a recorder saw with those of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
from moesaic_lab.beds import Timed
from moesaic_lab.bounds import Message
from moesaic_lab.comm.config import MULTICAST, TORCH, CommConfig, Sweep
from moesaic_lab.comm.programs import LANES, Work, all_ep, dispatch, exchange
from moesaic_lab.measure import in_turn
from moesaic_lab.recorder import Recorder

CYCLE = 2**18
"""Row numbers repeat after this many rows, so that row and column numbers are exact in float32."""


@dataclass(frozen=True, kw_only=True)
class CommMethod:
    """A program with this rank's inputs and expected outputs."""

    work: Work
    values: Mapping[str, Value]
    """Inputs of this rank, by slot."""
    expected: Mapping[str, Tensor]
    """Expected outputs on this rank, by slot."""


def measure(sweep: Sweep, size_kib: int, config: CommConfig) -> Timed:
    """Check and time the methods of one size of a sweep on this rank. All ranks call this together.

    Raises:
        RuntimeError: a method delivers wrong rows, or sends other messages than its program.
    """
    others = dict[str, Callable[[], object]]()
    extra = dict[str, list[Message]]()
    if sweep.kind == "dispatch":
        methods = dispatches(sweep, config.seed, config.dim)
    else:
        which = (
            LANES
            if sweep.kind == "lanes"
            else {name: "all" for name in sweep.methods if name != TORCH}
        )
        methods = {
            name: exchanged(
                sweep, size_kib, config.dim, "pipelined" if name in LANES else name, part
            )
            for name, part in which.items()
        }
    if TORCH in sweep.methods and sweep.kind != "lanes":
        straight = exchanged(sweep, size_kib, config.dim, "linear")
        sent_rows = straight.values["rows"]
        assert isinstance(sent_rows, Tensor)
        others[TORCH] = partial(torchs_own, sent_rows)
        _compare(TORCH, straight.expected, {"h": torchs_own(sent_rows)})
        extra[TORCH] = _planned(straight, config.dim)
    transport = open_transport(name="sockets")
    checked = {
        name: [_check(name, method, transport, config.dim)] for name, method in methods.items()
    }
    timed = {name: _runner(method, transport) for name, method in methods.items()}
    spans = in_turn(
        {**timed, **others}, sweep.repeats, barrier=start_together(latest), warmup=config.warmup
    )
    return Timed(spans=spans, sent=checked | {name: [messages] for name, messages in extra.items()})


def exchanged(
    sweep: Sweep, size_kib: int, dim: int, algorithm: str, which: str = "all"
) -> CommMethod:
    """Return an even all-to-all with this rank's rows and those that it must receive, numbered over
    all ranks."""
    work = exchange(
        all_ep(sweep.nodes, sweep.ranks_per_node), sweep.rows_of(size_kib, dim), algorithm, which
    )
    rows_per_rank = torch.from_numpy(work.copies.sum(axis=1))
    number = list(torch.arange(int(rows_per_rank.sum())).split(rows_per_rank.tolist()))
    rank = dist.get_rank()
    expected = numbered(arriving(work.copies, number, rank), dim)
    return CommMethod(
        work=work, values={"rows": numbered(number[rank], dim)}, expected={"h": expected}
    )


def dispatches(sweep: Sweep, seed: int, dim: int) -> dict[str, CommMethod]:
    """Return the dispatch of a layer by linear and by multicast, with this rank's tokens and the
    rows that it must receive."""
    grid = all_ep(sweep.nodes, sweep.ranks_per_node)
    rank = dist.get_rank()
    token, expert = zip(*(route(sweep, seed, origin) for origin in range(grid.world)))
    copies = torch.stack(
        [torch.bincount(of_rank, minlength=sweep.num_experts) for of_rank in expert]
    ).numpy()
    number = [origin * sweep.tokens + of_rank for origin, of_rank in enumerate(token)]
    x = numbered(rank * sweep.tokens + torch.arange(sweep.tokens), dim)
    values: dict[str, Value] = {"x": x, "gates": numbered(number[rank], 1)}
    methods = {}
    for name, (algorithm, chunks) in sweep.dispatches.items():
        node_tokens = None
        table = None
        indices = {"index": token[rank].unsqueeze(1)}
        if algorithm == MULTICAST:
            node_tokens = [
                find_node_tokens(
                    token[origin], expert[origin], sweep.num_experts, sweep.tokens, chunks, grid
                )
                for origin in range(grid.world)
            ]
            table = torch.stack([of_rank.counts for of_rank in node_tokens]).numpy()
            indices = dict(node_tokens[rank].indices)
        expected: dict[str, Tensor] = {}
        for chunk in range(chunks):
            suffix = f".{chunk}" if chunks > 1 else ""
            arriving_numbers = arriving(copies, number, rank, (chunk, chunks))
            expected |= {
                f"h{suffix}": numbered(arriving_numbers, dim),
                f"g{suffix}": numbered(arriving_numbers, 1),
            }
        work = dispatch(grid, copies, sweep.tokens, table, chunks)
        methods[name] = CommMethod(work=work, values=values | indices, expected=expected)
    return methods


def route(sweep: Sweep, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return (token, expert) of a rank's copies in expert order. Each token has `top_k` different
    experts, drawn uniformly."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    chosen = (
        torch.rand(sweep.tokens, sweep.num_experts, generator=generator)
        .topk(sweep.top_k)
        .indices.flatten()
    )
    order = chosen.argsort(stable=True)
    return torch.arange(sweep.tokens).repeat_interleave(sweep.top_k)[order], chosen[order]


def numbered(number: Tensor, dim: int) -> Tensor:
    """Return rows (n, dim) in which each value encodes the row's number and the column."""
    return (number % CYCLE).unsqueeze(1) + torch.arange(dim, dtype=torch.float32) / 32


def arriving(
    copies: np.ndarray, rows: Sequence[Tensor], rank: int, part: tuple[int, int] = (0, 1)
) -> Tensor:
    """Return the numbers of the rows that a rank must receive, ordered by (expert, source rank).

    Args:
        copies: (world, num_experts) rows that each rank holds per expert.
        rows: numbers of each rank's rows, in expert order.
        rank: the receiving rank; experts are split evenly over the ranks.
        part: (c, n) to return only chunk c of n of the rows that each rank holds for each expert.
    """
    experts_per_rank = copies.shape[1] // len(rows)
    chunk, chunks = part
    starts = copies.cumsum(axis=1) - copies
    pieces = []
    for expert in range(rank * experts_per_rank, (rank + 1) * experts_per_rank):
        for numbers, start, count in zip(rows, starts[:, expert], copies[:, expert]):
            pieces.append(
                numbers[start + count * chunk // chunks : start + count * (chunk + 1) // chunks]
            )
    return torch.cat(pieces)


def torchs_own(rows: Tensor) -> Tensor:
    """Exchange rows by `all_to_all_single`, with equal split sizes, and return the received
    rows."""
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows)
    return out


def _runner(method: CommMethod, transport: AbstractTransport) -> Callable[[], Environment]:
    """Return a function that runs a method once."""
    work = method.work
    call = Call(rank=transport.rank, sizes=method.work.sizes, experts=PlainExperts(1, 1, 1))

    def run() -> Environment:
        call.first_tag = transport.take_tags(len(work.program.tasks))
        return drive(interpret(work.program, method.values, call), transport)

    return run


def _planned(method: CommMethod, dim: int) -> list[Message]:
    """Return the messages that this rank sends by a method's program."""
    rank = dist.get_rank()
    return [
        (source, target, float(size))
        for source, target, size in method.work.messages(dim)
        if source == rank
    ]


def _check(name: str, method: CommMethod, transport: AbstractTransport, dim: int) -> list[Message]:
    """Run a method once, check its results and messages, and return the messages that this rank
    sent."""
    recorder = Recorder(transport)
    _compare(name, method.expected, _runner(method, recorder)())
    seen = sent(recorder)
    planned = _planned(method, dim)
    if sorted(seen) != sorted(planned):
        raise RuntimeError(
            f"{name}: rank {transport.rank} sent {sorted(seen)}, its program sends "
            f"{sorted(planned)}"
        )
    return seen


def _compare(name: str, expected: Mapping[str, Tensor], results: Mapping[str, Value]) -> None:
    """Refuse results that are not the rows that were sent."""
    for slot, rows in expected.items():
        received = results[slot]
        if not isinstance(received, Tensor) or not torch.equal(received, rows):
            raise RuntimeError(
                f"{name}: rank {dist.get_rank()} did not get the rows that were sent to it, "
                f"in slot {slot}"
            )
