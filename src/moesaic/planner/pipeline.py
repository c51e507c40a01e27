"""The time of a pipeline's step: torch's schedules, simulated operation by operation.

Each rank runs the forward and backward passes of its parts of the model in the order of torch's
schedules (`torch.distributed.pipelining`, 2.13): 1F1B (Narayanan et al. 2021), interleaved 1F1B if
a rank has several parts, GPipe if a step has fewer micro-batches than stages. An operation starts
when its rank is free and its input has come. Messages between two parts follow each other on the
way between them.

A part is a run of consecutive blocks of the model. Rank r, which stands for all ranks of stage r,
has the parts r, r + pp, r + 2 pp and so on. A way is one direction between a part and the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

MOST_MICRO_BATCHES = 64
"""Further micro-batches take as long as the last of so many: the pipeline is full then."""


class Pass(NamedTuple):
    """One operation of a rank: the forward or the backward pass of a micro-batch through a part."""

    part: int
    micro_batch: int
    is_backward: bool


def order_of(rank: int, pp: int, parts: int, count: int) -> list[Pass]:
    """Return the operations of a rank in their order.

    Args:
        rank: the rank's stage.
        pp: number of stages.
        parts: parts of the model on each rank; those of rank r are r, r + pp, ...
        count: micro-batches.
    """
    total = count * parts  # passes of the rank in each direction
    # `warm_up` forward passes run before the first backward pass
    if parts > 1:
        # micro-batches that pass a part before the rank turns to the next one: about pp
        per_round = count // max(1, count // pp)
        # a round through all parts but the last, and two passes for each later stage
        warm_up = min((parts - 1) * per_round + 2 * (pp - 1 - rank), total)
    else:
        per_round = count
        is_gpipe = count < pp  # which runs all forward passes first
        warm_up = count if is_gpipe else min(count, pp - rank)

    def passes(is_backward: bool) -> list[Pass]:
        """Return a rank's passes in one direction: a round of micro-batches through each of its
        parts, then the next round."""
        next_micro_batch = [0] * parts
        found = []
        for number in range(total):
            local = number // per_round % parts  # the part's index among those of the rank
            if is_backward:
                local = parts - 1 - local
            found.append(Pass(local * pp + rank, next_micro_batch[local], is_backward))
            next_micro_batch[local] += 1
        return found

    forward = passes(is_backward=False)
    backward = passes(is_backward=True)
    order = forward[:warm_up]
    for number, backward_pass in enumerate(backward):
        next_forward = forward[warm_up + number : warm_up + number + 1]  # [] at the end
        if parts > 1:  # torch's interleaved schedule runs the forward pass of a pair first
            order += [*next_forward, backward_pass]
        else:
            order += [backward_pass, *next_forward]
    return order


class _Operation(NamedTuple):
    """An operation of a rank, with what it waits for."""

    rank: int
    operation: Pass
    waits_for: int
    """Index, among all operations, of the one whose message it needs; -1 if it needs none."""
    way: int
    """Number of the way on which it sends its result: 2 * part ahead, 2 * part + 1 back."""
    hop: int
    """The lower of the two parts that the way joins; -1 if it sends nothing."""


class Span(NamedTuple):
    """When a rank runs an operation."""

    rank: int
    operation: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timed:
    """A step of a pipeline."""

    seconds: float
    """From the first operation to the end of the last."""
    busy: tuple[float, ...]
    """Seconds for which each rank computes."""
    alive: tuple[float, ...]
    """Micro-batches, as shares of a rank's parts, that each rank keeps at once at most."""
    operations: tuple[_Operation, ...]
    """What the ranks compute, of at most `MOST_MICRO_BATCHES` micro-batches or two for each
    stage."""
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    """When each operation starts and ends."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """When the ranks compute what."""
        times = zip(self.operations, self.starts, self.ends)
        return tuple(Span(each.rank, each.operation, start, end) for each, start, end in times)


def simulate_pipeline(
    pp: int,
    count: int,
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[float],
    *,
    blocks_sender: bool,
) -> Timed:
    """Return the time of a pipeline's step.

    Beyond `MOST_MICRO_BATCHES` it grows as from `few` micro-batches to twice as many.

    Args:
        pp: number of stages.
        count: micro-batches.
        forward, backward: seconds of a micro-batch in each part.
        hops: seconds of the message from each part to the next one; a gradient takes as long back.
        blocks_sender: whether a rank computes nothing while it sends, as on CPUs.
    """

    def timed(micro_batches: int) -> Timed:
        """Return the time of a step of some micro-batches, each simulated."""
        seconds = tuple(forward), tuple(backward), tuple(hops)
        return _timed(pp, micro_batches, *seconds, blocks_sender=blocks_sender)

    if count <= MOST_MICRO_BATCHES:
        return timed(count)
    # simulate `few` micro-batches and twice as many, which are at most `MOST_MICRO_BATCHES` or two
    # for each stage; `few` is a multiple of pp, since schedules take whole rounds of stages
    few = max(MOST_MICRO_BATCHES // 2 // pp, 1) * pp
    short = timed(few)
    long = timed(2 * few)
    more = (count - 2 * few) / few  # how many times `few` the rest is: each adds long - short
    busy = [late + more * (late - early) for early, late in zip(short.busy, long.busy)]
    return Timed(
        seconds=long.seconds + more * (long.seconds - short.seconds),
        busy=tuple(busy),
        alive=long.alive,
        operations=long.operations,
        starts=long.starts,
        ends=long.ends,
    )


@lru_cache(maxsize=64)
def _timed(
    pp: int,
    count: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    hops: tuple[float, ...],
    *,
    blocks_sender: bool,
) -> Timed:
    """Run the operations of all ranks, each as early as it can; arguments as of
    `simulate_pipeline`. Ways of holding a model share the results."""
    operations, alive = _schedule(pp, parts=len(forward) // pp, count=count)
    rank_free = [0.0] * pp
    busy = [0.0] * pp
    way_free = [0.0] * (2 * len(forward))  # by way: of each part ahead, and back
    # when the message of each operation arrives; one more entry stays 0 and is that of index -1,
    # for operations that wait for none
    arrival = [0.0] * (len(operations) + 1)
    starts: list[float] = []
    ends: list[float] = []
    for index, (rank, (part, _, is_backward), waits_for, way, hop) in enumerate(operations):
        seconds = backward[part] if is_backward else forward[part]
        start = max(rank_free[rank], arrival[waits_for])
        end = start + seconds
        rank_free[rank] = end
        busy[rank] += seconds
        starts.append(start)
        ends.append(end)
        if hop >= 0:  # it sends its result
            arrival[index] = max(end, way_free[way]) + hops[hop]
            way_free[way] = arrival[index]
            if blocks_sender:
                rank_free[rank] = arrival[index]
    return Timed(
        seconds=max(rank_free),
        busy=tuple(busy),
        alive=alive,
        operations=operations,
        starts=tuple(starts),
        ends=tuple(ends),
    )


@lru_cache(maxsize=256)
def _schedule(pp: int, parts: int, count: int) -> tuple[tuple[_Operation, ...], tuple[float, ...]]:
    """Return the operations of all ranks in an order in which each can run, and the most
    micro-batches that each rank keeps.

    A way between two parts has one sender, whose order is fixed, so ranks can advance in any order.
    """
    orders = [order_of(rank, pp, parts, count) for rank in range(pp)]
    last_part = pp * parts - 1
    operations: list[_Operation] = []
    sent_by: dict[Pass, int] = {}
    """By operation, the index in `operations` of the one that sends its input."""
    next_of_rank = [0] * pp
    """Index of each rank's next operation in its order."""

    def advance(rank: int) -> bool:
        """Append a rank's next operation if its input has been sent; return whether it has."""
        each = orders[rank][next_of_rank[rank]]
        first_part = last_part if each.is_backward else 0
        waits_for = -1  # the first part needs no message
        if each.part != first_part:
            if each not in sent_by:
                return False
            waits_for = sent_by[each]
        target = each.part - 1 if each.is_backward else each.part + 1
        sends = 0 <= target <= last_part
        if sends:
            sent_by[Pass(target, each.micro_batch, each.is_backward)] = len(operations)
        # each part has two ways out, numbered 2 * part ahead and 2 * part + 1 back
        way = 2 * each.part + (1 if each.is_backward else 0)
        # a hop has the number of its lower part, in both directions
        hop = min(each.part, target) if sends else -1
        operations.append(_Operation(rank, operation=each, waits_for=waits_for, way=way, hop=hop))
        next_of_rank[rank] += 1
        return True

    while any(index < len(order) for index, order in zip(next_of_rank, orders)):
        before = list(next_of_rank)
        for rank in range(pp):
            while next_of_rank[rank] < len(orders[rank]) and advance(rank):
                pass
        assert next_of_rank != before, "a schedule waits for itself"
    return tuple(operations), tuple(map(_most_alive, orders))


def _most_alive(order: Sequence[Pass]) -> float:
    """Return the most micro-batches whose activations a rank keeps at once; a micro-batch in one of
    the rank's parts counts as 1 / parts."""
    parts = len({each.part for each in order})
    most = 0
    alive = 0  # passed forward through a part, not yet backward
    for each in order:
        alive += -1 if each.is_backward else 1
        most = max(most, alive)
    return most / parts
