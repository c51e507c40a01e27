"""What the communication benchmark claims: figures of its cells, held against targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from moesaic_lab.claims import Claim, claimed, enough, some
from moesaic_lab.comm.run import CommCell
from moesaic_lab.measure import paired

DOMINATES = 2
"""A charge per message dominates where it is at least so many times the bytes of linear's messages."""
FOUR_MIB_KIB = 4096


def claims(cells: Sequence[CommCell]) -> list[Claim]:
    """Return all claims, also those that this run did not measure."""
    return [
        claimed("comm.receive_first.link_share_2x2_4MiB", lambda: link_share(cells), 0.95, ">="),
        claimed("comm.pipelined.over_longer_lane", lambda: over_longer_lane(cells), 1.05),
        claimed("comm.multicast.top8_bytes_over_linear", lambda: multicast_bytes(cells), 0.34),
        claimed("comm.multicast.top8_time_over_linear", lambda: multicast_time(cells), 0.34),
        claimed("comm.multicast.over_bound", lambda: multicast_over_bound(cells), 1.15),
        claimed("comm.hier2d.over_linear_small_messages", lambda: small_messages(cells), 0.7),
    ]


def link_share(cells: Sequence[CommCell]) -> float:
    """Return the share of the link limit that the linear all-to-all reaches: the lower end of the 95 % interval."""
    cell = _only([c for c in cells if c.sweep.kind == "limit" and c.size_kib == FOUR_MIB_KIB], "of 4 MiB to the limit")
    seconds = cell.timings["linear"].seconds
    return enough(paired([cell.limits["linear"].seconds] * len(seconds), seconds)).low


def over_longer_lane(cells: Sequence[CommCell]) -> float:
    """Return pipelined over the longer of its own lanes alone: the upper end of the 95 % interval, median over sizes."""
    found = []
    for cell in some([c for c in cells if c.sweep.kind == "lanes"], "of lanes"):
        longer = max(("intra alone", "inter alone"), key=lambda name: cell.timings[name].median)
        found.append(enough(cell.ratio("pipelined", longer)).high)
    return statistics.median(found)


def multicast_bytes(cells: Sequence[CommCell]) -> float:
    """Return the bytes between nodes that multicast sends at top_k 8 on 2x2, over linear's, as recorders counted."""
    cell = _top8(cells)
    return cell.across["multicast"][0] / cell.across["linear"][0]


def multicast_time(cells: Sequence[CommCell]) -> float:
    """Return the time of multicast at top_k 8 on 2x2, over linear's."""
    return _top8(cells).ratio("multicast", "linear").median


def multicast_over_bound(cells: Sequence[CommCell]) -> float:
    """Return the time of multicast over the limit of its links, median over all dispatches."""
    found = some([c for c in cells if c.sweep.kind == "dispatch"], "of a dispatch")
    return statistics.median(c.timings["multicast"].median / c.limits["multicast"].seconds for c in found)


def small_messages(cells: Sequence[CommCell]) -> float:
    """Return 2DH over linear on 4x4 ranks, median over the cells where the charge per message dominates."""
    found = [
        cell.ratio("hier2d", "linear").median
        for cell in cells
        if cell.sweep.kind == "exchange" and cell.sweep.shape == "4x4" and {"hier2d", "linear"} <= set(cell.timings)
        if cell.sweep.per_message >= DOMINATES * 1024 * cell.size_kib / cell.sweep.world
    ]
    return statistics.median(some(found, "on 4x4 where a cost per message dominates"))


def _top8(cells: Sequence[CommCell]) -> CommCell:
    found = [c for c in cells if c.sweep.kind == "dispatch" and c.sweep.shape == "2x2" and c.sweep.top_k == 8]
    return _only(found, "of a dispatch with top_k 8 on 2x2")


def _only(found: list[CommCell], what: str) -> CommCell:
    return some(found, what)[0]
