"""The part of the communication benchmark that runs on the ranks: tensors, the interpreter on
sockets, checks and times.

Each method runs once before it is timed. This compares the received rows with the expected ones,
and the messages that a recorder saw with those of the program. To tell rows apart, all rows of all
ranks are numbered, and the values of a row encode its number (`numbered`).
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
    """Inputs of this rank, by slot: the rows of an exchange (`rows`); the tokens (`x`) of a
    dispatch, their routing weights (`gates`) and the indices of their copies."""
    expected: Mapping[str, Tensor]
    """Expected outputs on this rank, by slot: the received rows (`h`); of a dispatch also their
    routing weights (`g`), and per chunk if there are several."""


def measure(sweep: Sweep, size_kib: int, config: CommConfig) -> Timed:
    """Check and time the methods of one size of a sweep on this rank. All ranks call this together.

    Raises:
        RuntimeError: a method delivers wrong rows, or sends other messages than its program.
    """
    dim = config.dim
    methods: dict[str, CommMethod] = {}
    if sweep.kind == "dispatch":  # tokens to their experts, by linear and by multicast
        methods = dispatches(sweep, config.seed, dim)
    elif sweep.kind == "lanes":  # pipelined, with all rows and with those of one lane alone
        for name, which in LANES.items():
            methods[name] = exchanged(sweep, size_kib, dim, algorithm="pipelined", which=which)
    else:  # "exchange" or "limit": the all-to-alls that the sweep names
        for name in sweep.methods:
            if name != TORCH:
                methods[name] = exchanged(sweep, size_kib, dim, algorithm=name)

    # torch's all-to-all is no program: it sends the messages of the linear one. Lanes compare
    # pipelined with itself only, whatever methods their sweep names.
    torch_runs: dict[str, Callable[[], object]] = {}
    torch_sent: dict[str, list[list[Message]]] = {}
    if TORCH in sweep.methods and sweep.kind != "lanes":
        linear = exchanged(sweep, size_kib, dim, algorithm="linear")
        own_rows = linear.values["rows"]  # those that this rank has to send
        assert isinstance(own_rows, Tensor)
        torch_runs[TORCH] = partial(torchs_own, own_rows)
        _compare(TORCH, linear.expected, {"h": torchs_own(own_rows)})
        torch_sent[TORCH] = [_planned(linear, dim)]

    transport = open_transport(name="sockets")
    messages = {}
    runs = {}
    for name, method in methods.items():
        messages[name] = [_check(name, method, transport, dim)]
        runs[name] = _runner(method, transport)
    spans = in_turn(
        {**runs, **torch_runs}, sweep.repeats, barrier=start_together(latest), warmup=config.warmup
    )
    return Timed(spans=spans, sent=messages | torch_sent)


def exchanged(
    sweep: Sweep, size_kib: int, dim: int, algorithm: str, which: str = "all"
) -> CommMethod:
    """Return an even all-to-all with this rank's rows and those that it must receive.

    Args:
        size_kib: size of all rows of a rank.
        algorithm: a name in `ALL_TO_ALLS`.
        which: "all" to move all rows, "inside" for only those that stay in their node, "across" for
            only those that leave it.
    """
    grid = all_ep(sweep.nodes, sweep.ranks_per_node)
    work = exchange(grid, sweep.rows_of(size_kib, dim), algorithm, which)
    rows_per_rank = torch.from_numpy(work.copies.sum(axis=1))
    all_numbers = torch.arange(int(rows_per_rank.sum()))
    numbers_by_rank = list(all_numbers.split(rows_per_rank.tolist()))

    rank = dist.get_rank()
    rows = numbered(numbers_by_rank[rank], dim)
    expected = numbered(arriving(work.copies, numbers_by_rank, rank), dim)
    return CommMethod(work=work, values={"rows": rows}, expected={"h": expected})


def dispatches(sweep: Sweep, seed: int, dim: int) -> dict[str, CommMethod]:
    """Return the dispatch of a layer by linear and by multicast, with this rank's tokens and the
    rows that it must receive; a copy has the number of its token."""
    grid = all_ep(sweep.nodes, sweep.ranks_per_node)
    rank = dist.get_rank()
    # every rank draws the routing of all ranks, since it must know what they send to it
    routed = [route(sweep, seed, origin) for origin in range(grid.world)]
    copies = torch.stack(
        [torch.bincount(expert, minlength=sweep.num_experts) for _, expert in routed]
    ).numpy()
    numbers = [origin * sweep.tokens + token for origin, (token, _) in enumerate(routed)]
    x = numbered(rank * sweep.tokens + torch.arange(sweep.tokens), dim)
    values: dict[str, Value] = {"x": x, "gates": numbered(numbers[rank], 1)}

    methods = {}
    for name, (algorithm, chunks) in sweep.dispatches.items():
        table = None
        indices = {"index": routed[rank][0].unsqueeze(1)}
        if algorithm == MULTICAST:
            node_tokens = [
                find_node_tokens(token, expert, sweep.num_experts, sweep.tokens, chunks, grid)
                for token, expert in routed
            ]
            table = torch.stack([of_rank.counts for of_rank in node_tokens]).numpy()
            indices = dict(node_tokens[rank].indices)
        expected: dict[str, Tensor] = {}
        for chunk in range(chunks):
            suffix = f".{chunk}" if chunks > 1 else ""
            arriving_numbers = arriving(copies, numbers, rank, (chunk, chunks))
            expected[f"h{suffix}"] = numbered(arriving_numbers, dim)
            expected[f"g{suffix}"] = numbered(arriving_numbers, 1)
        work = dispatch(grid, copies, sweep.tokens, table, chunks)
        methods[name] = CommMethod(work=work, values=values | indices, expected=expected)
    return methods


def route(sweep: Sweep, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return (token, expert) of a rank's copies in expert order. Each token has `top_k` different
    experts, drawn uniformly."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    scores = torch.rand(sweep.tokens, sweep.num_experts, generator=generator)
    expert = scores.topk(sweep.top_k).indices.flatten()
    token = torch.arange(sweep.tokens).repeat_interleave(sweep.top_k)
    order = expert.argsort(stable=True)
    return token[order], expert[order]


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
    starts = copies.cumsum(axis=1) - copies  # of each expert's rows among those of its source
    pieces = []
    for expert in range(rank * experts_per_rank, (rank + 1) * experts_per_rank):
        for numbers, start, count in zip(rows, starts[:, expert], copies[:, expert]):
            first = start + count * chunk // chunks
            end = start + count * (chunk + 1) // chunks
            pieces.append(numbers[first:end])
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
    unused_experts = PlainExperts(1, 1, 1)  # the programs end before the experts
    call = Call(rank=transport.rank, sizes=work.sizes, experts=unused_experts)

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
    run = _runner(method, recorder)
    _compare(name, method.expected, run())
    messages = sent(recorder)
    planned = _planned(method, dim)
    if sorted(messages) != sorted(planned):
        raise RuntimeError(
            f"{name}: rank {transport.rank} sent {sorted(messages)}, its program sends "
            f"{sorted(planned)}"
        )
    return messages


def _compare(name: str, expected: Mapping[str, Tensor], results: Mapping[str, Value]) -> None:
    """Refuse results that are not the rows that were sent."""
    for slot, rows in expected.items():
        received = results[slot]
        if not isinstance(received, Tensor) or not torch.equal(received, rows):
            raise RuntimeError(
                f"{name}: rank {dist.get_rank()} did not get the rows that were sent to it, "
                f"in slot {slot}"
            )
