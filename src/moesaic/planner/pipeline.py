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

MOST_MICRO_BATCHES = 64
"""Further micro-batches take as long as the last of so many: the pipeline is full then."""


@dataclass(frozen=True)
class Pass:
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


@dataclass(frozen=True)
class Timed:
    """A step of a pipeline."""

    seconds: float
    """From the first operation to the end of the last."""
    busy: tuple[float, ...]
    """Seconds for which each rank computes."""
    alive: tuple[float, ...]
    """Micro-batches, as shares of a rank's parts, that each rank keeps at once at most."""


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
    """Run the operations of all ranks, each as early as it can."""
    pp = len(orders)
    last = len(forward) - 1
    arrived: dict[Pass, float] = {}
    ended: dict[Pass, float] = {}
    way_free: dict[tuple[int, bool], float] = {}
    free = [0.0] * pp
    places = [0] * pp
    waiting = list(range(pp))

    def start_of(rank: int) -> float | None:
        """Return when a rank's next operation can start; None if its input is not sent yet."""
        each = orders[rank][places[rank]]
        if not each.is_backward:
            comes = 0.0 if each.part == 0 else arrived.get(each)
        elif each.part == last:
            comes = ended.get(Pass(each.part, each.micro_batch, is_backward=False))
        else:
            comes = arrived.get(each)
        return None if comes is None else max(free[rank], comes)

    while waiting:
        starts = {rank: start for rank in waiting if (start := start_of(rank)) is not None}
        rank = min(starts, key=lambda rank: (starts[rank], rank))
        each = orders[rank][places[rank]]
        end = starts[rank] + (backward if each.is_backward else forward)[each.part]
        ended[each] = end
        free[rank] = end
        target = each.part - 1 if each.is_backward else each.part + 1
        if 0 <= target <= last:
            way = (each.part, each.is_backward)
            sent = max(end, way_free.get(way, 0.0)) + hops[min(each.part, target)]
            way_free[way] = sent
            arrived[Pass(target, each.micro_batch, each.is_backward)] = sent
            if blocks_sender:
                free[rank] = sent
        places[rank] += 1
        if places[rank] == len(orders[rank]):
            waiting.remove(rank)
    busy = tuple(
        sum((backward if each.is_backward else forward)[each.part] for each in order)
        for order in orders
    )
    return Timed(
        seconds=max(max(ended.values()), *free), busy=busy, alive=tuple(map(_most_alive, orders))
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
