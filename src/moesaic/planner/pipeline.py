"""The time of a pipeline's step: torch's schedules, simulated operation by operation.

Each rank runs the forward and backward passes of its parts of the model in the order of torch's
schedules (`torch.distributed.pipelining`, 2.13): 1F1B (Narayanan et al. 2021), interleaved 1F1B if
a rank has several parts, GPipe if a step has fewer micro-batches than stages. An operation starts
when its rank is free and its input has come. Messages between two parts follow each other on the
way between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    total = count * parts
    if parts == 1:
        per_round = count
        # GPipe runs all forward passes first
        ahead = min(count, pp - rank) if count >= pp else count
    else:
        per_round = count // max(1, count // pp)
        ahead = min((parts - 1) * per_round + 2 * (pp - 1 - rank), total)

    def passes(is_backward: bool) -> list[Pass]:
        seen: dict[int, int] = {}
        found = []
        for number in range(total):
            local = number // per_round % parts
            part = (parts - 1 - local if is_backward else local) * pp + rank
            seen[part] = seen.get(part, -1) + 1
            found.append(Pass(part, seen[part], is_backward))
        return found

    forward = passes(is_backward=False)
    backward = passes(is_backward=True)
    order = forward[:ahead]
    for number, each in enumerate(backward):
        if parts > 1:  # torch's interleaved schedule runs the forward pass of a pair first
            order += [*forward[ahead + number : ahead + number + 1], each]
        else:
            order += [each, *forward[ahead + number : ahead + number + 1]]
    return order


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
    spans: tuple[Span, ...]
    """What the ranks computed, of at most `MOST_MICRO_BATCHES` micro-batches."""


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

    Args:
        pp: number of stages.
        count: micro-batches.
        forward, backward: seconds of a micro-batch in each part.
        hops: seconds of the message from each part to the next one; a gradient takes as long back.
        blocks_sender: whether a rank computes nothing while it sends, as on CPUs.
    """
    if count > MOST_MICRO_BATCHES:
        few = MOST_MICRO_BATCHES // 2 // pp * pp or pp
        short, long = (
            simulate_pipeline(pp, each, forward, backward, hops, blocks_sender=blocks_sender)
            for each in (few, 2 * few)
        )
        more = (count - 2 * few) / few
        return Timed(
            seconds=long.seconds + more * (long.seconds - short.seconds),
            busy=tuple(late + more * (late - early) for early, late in zip(short.busy, long.busy)),
            alive=long.alive,
            spans=long.spans,
        )
    parts = len(forward) // pp
    orders = [order_of(rank, pp, parts, count) for rank in range(pp)]
    return _run(orders, forward, backward, hops, blocks_sender=blocks_sender)


def _run(
    orders: Sequence[Sequence[Pass]],
    forward: Sequence[float],
    backward: Sequence[float],
    hops: Sequence[float],
    *,
    blocks_sender: bool,
) -> Timed:
    """Run the operations of all ranks, each as early as it can.

    A way between two parts has one sender, whose order is fixed, so ranks can advance in any order.
    """
    pp = len(orders)
    last = len(forward) - 1
    arrived: dict[Pass, float] = {}
    way_free: dict[tuple[int, bool], float] = {}
    free = [0.0] * pp
    places = [0] * pp
    spans: list[Span] = []

    def advance(rank: int) -> bool:
        """Run a rank's next operation if its input has been sent; return whether it ran."""
        each = orders[rank][places[rank]]
        starts_chain = each.part == (last if each.is_backward else 0)
        comes = 0.0 if starts_chain else arrived.get(each)
        if comes is None:
            return False
        seconds = (backward if each.is_backward else forward)[each.part]
        start = max(free[rank], comes)
        free[rank] = start + seconds
        spans.append(Span(rank, each, start, free[rank]))
        target = each.part - 1 if each.is_backward else each.part + 1
        if 0 <= target <= last:
            way = (each.part, each.is_backward)
            sent = max(free[rank], way_free.get(way, 0.0)) + hops[min(each.part, target)]
            way_free[way] = sent
            arrived[Pass(target, each.micro_batch, each.is_backward)] = sent
            if blocks_sender:
                free[rank] = sent
        places[rank] += 1
        return True

    while any(place < len(order) for place, order in zip(places, orders)):
        before = list(places)
        for rank in range(pp):
            while places[rank] < len(orders[rank]) and advance(rank):
                pass
        assert places != before, "a schedule waits for itself"
    busy = tuple(
        sum((backward if each.is_backward else forward)[each.part] for each in order)
        for order in orders
    )
    return Timed(
        seconds=max(free), busy=busy, alive=tuple(map(_most_alive, orders)), spans=tuple(spans)
    )


def _most_alive(order: Sequence[Pass]) -> float:
    """Return the most micro-batches whose activations a rank keeps at once, as a share of its
    parts."""
    parts = len({each.part for each in order})
    most = 0
    alive = 0
    for each in order:
        alive += -1 if each.is_backward else 1
        most = max(most, alive)
    return most / parts
