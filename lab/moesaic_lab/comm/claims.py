"""What the communication benchmark claims: figures of its cells, held against targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from moesaic_lab.claims import Claim
from moesaic_lab.comm.run import Cell
from moesaic_lab.measure import Ratio, paired

T = TypeVar("T")
MANY = 30
"""Pairs under a ratio nearer to 1 than 1.10."""
DOMINATES = 2
"""A charge per message dominates where it is at least so many times the bytes of linear's messages."""
FOUR_MIB_KIB = 4096


class NotMeasuredError(Exception):
    """There is no cell that a claim could rest on; says why."""


def claims(cells: Sequence[Cell]) -> list[Claim]:
    """Return all claims, also those that this run did not measure."""
    return [
        _claim("comm.receive_first.link_share_2x2_4MiB", link_share, cells, 0.95, at_least=True),
        _claim("comm.pipelined.over_longer_lane", over_longer_lane, cells, 1.05),
        _claim("comm.multicast.top8_bytes_over_linear", multicast_bytes, cells, 0.34),
        _claim("comm.multicast.top8_time_over_linear", multicast_time, cells, 0.34),
        _claim("comm.multicast.over_bound", multicast_over_bound, cells, 1.15),
        _claim("comm.hier2d.over_linear_small_messages", small_messages, cells, 0.7),
    ]


def link_share(cells: Sequence[Cell]) -> float:
    """Return the share of the link limit that the linear all-to-all reaches: the lower end of the 95 % interval."""
    cell = _only([c for c in cells if c.sweep.kind == "limit" and c.size_kib == FOUR_MIB_KIB], "of 4 MiB to the limit")
    seconds = cell.timings["linear"].seconds
    return _enough(paired([cell.limits["linear"].seconds] * len(seconds), seconds)).low


def over_longer_lane(cells: Sequence[Cell]) -> float:
    """Return pipelined over the longer of its own lanes alone: the upper end of the 95 % interval, median over sizes."""
    found = []
    for cell in _some([c for c in cells if c.sweep.kind == "lanes"], "of lanes"):
        longer = max(("intra alone", "inter alone"), key=lambda name: cell.timings[name].median)
        found.append(_enough(_ratio(cell, "pipelined", longer)).high)
    return statistics.median(found)


def multicast_bytes(cells: Sequence[Cell]) -> float:
    """Return the bytes between nodes that multicast sends at top_k 8 on 2x2, over linear's, as recorders counted."""
    cell = _top8(cells)
    return cell.across["multicast"][0] / cell.across["linear"][0]


def multicast_time(cells: Sequence[Cell]) -> float:
    """Return the time of multicast at top_k 8 on 2x2, over linear's."""
    return _ratio(_top8(cells), "multicast", "linear").median


def multicast_over_bound(cells: Sequence[Cell]) -> float:
    """Return the time of multicast over the limit of its links, median over all dispatches."""
    found = _some([c for c in cells if c.sweep.kind == "dispatch"], "of a dispatch")
    return statistics.median(c.timings["multicast"].median / c.limits["multicast"].seconds for c in found)


def small_messages(cells: Sequence[Cell]) -> float:
    """Return 2DH over linear on 4x4 ranks, median over the cells where the charge per message dominates."""
    found = [
        _ratio(cell, "hier2d", "linear").median
        for cell in cells
        if cell.sweep.kind == "exchange" and cell.sweep.shape == "4x4" and {"hier2d", "linear"} <= set(cell.timings)
        if cell.sweep.per_message >= DOMINATES * 1024 * cell.size_kib / cell.sweep.world
    ]
    return statistics.median(_some(found, "on 4x4 where a cost per message dominates"))


def _claim(
    name: str, value: Callable[[Sequence[Cell]], float], cells: Sequence[Cell], target: float, at_least: bool = False
) -> Claim:
    op: Literal[">=", "<="] = ">=" if at_least else "<="
    try:
        return Claim(name=name, value=value(cells), unit="1", target=target, op=op)
    except NotMeasuredError as reason:
        return Claim(name=name, value=None, unit="1", target=target, op=op, reason=str(reason))


def _ratio(cell: Cell, name: str, other: str) -> Ratio:
    return paired(cell.timings[name].seconds, cell.timings[other].seconds)


def _top8(cells: Sequence[Cell]) -> Cell:
    found = [c for c in cells if c.sweep.kind == "dispatch" and c.sweep.shape == "2x2" and c.sweep.top_k == 8]
    return _only(found, "of a dispatch with top_k 8 on 2x2")


def _enough(ratio: Ratio) -> Ratio:
    if ratio.repeats < MANY:
        raise NotMeasuredError(f"{ratio.repeats} repeats, a ratio under 1.10 needs {MANY}")
    return ratio


def _some(found: list[T], what: str) -> list[T]:
    if not found:
        raise NotMeasuredError(f"no cell {what} was run")
    return found


def _only(found: list[Cell], what: str) -> Cell:
    return _some(found, what)[0]
