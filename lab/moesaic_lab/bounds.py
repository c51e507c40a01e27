"""The least time in which links can carry given messages: bytes over rate, on the link where that is longest.

No method is faster, whatever it overlaps: the bound knows no order, no start-up cost and no computing. So a bound beside a
time says for how much of the time the slowest link was busy. An emulated link lets about 20 KB through at once before its
rate holds; all-to-alls of a few such messages may come in under the bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moesaic.cost.movement import coded_bytes
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.bundles import bundles
from moesaic.program.sizes import CallSizes
from moesaic.program.task import INDEX_BYTES, Kind, Op, Program, Slot
from moesaic_testbed.bed import Bed

Message = tuple[int, int, float]
"""Source rank, target rank, bytes."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What the slowest link allows."""

    seconds: float
    link: str
    """Which link it is, as "node 0 out"; "" where nothing crosses a link of known rate."""


def link_limit(messages: Iterable[Message], bed: Bed) -> Limit:
    """Return the least time in which a bed can carry messages.

    Args:
        messages: a rank's message to itself counts nowhere.
        bed: the cluster; a node's own traffic counts only where its `lo` is shaped.
    """
    seconds = link_seconds(messages, bed)
    if not seconds:
        return Limit(seconds=0.0, link="")
    link = max(seconds, key=lambda name: seconds[name])
    return Limit(seconds=seconds[link], link=link)


def link_seconds(messages: Iterable[Message], bed: Bed) -> dict[str, float]:
    """Return how long each link of a bed is busy with messages: its bytes over its rate.

    A bed's cost per message is counted once per pair of ranks: messages of one pair may share a packet. Links that
    change during the run are taken at the rate they begin with.

    Args:
        messages: as for `link_limit`.
        bed: the cluster.
    """
    of_pair: dict[tuple[int, int], float] = defaultdict(float)
    for source, target, num_bytes in messages:
        if source != target and num_bytes:
            of_pair[(source, target)] += num_bytes
    seconds: dict[str, float] = defaultdict(float)
    for (source, target), num_bytes in of_pair.items():
        here, there = bed.node_of(source), bed.node_of(target)
        if here == there:
            if bed.intra_bytes_per_second is not None:
                seconds[f"lo of node {here}"] += num_bytes / bed.intra_bytes_per_second
            continue
        charged = max(num_bytes, bed.per_message)
        seconds[f"node {here} out"] += charged / bed.inter_bytes_per_second(here)
        seconds[f"node {there} in"] += charged / bed.inter_bytes_per_second(there)
        if bed.uplink_bytes_per_second is not None and bed.leaf_of(here) != bed.leaf_of(there):
            seconds[f"leaf {bed.leaf_of(here)} up"] += num_bytes / bed.uplink_bytes_per_second
            seconds[f"leaf {bed.leaf_of(there)} down"] += num_bytes / bed.uplink_bytes_per_second
    return dict(seconds)


def crossing(messages: Iterable[Message], node_of: Callable[[int], int]) -> tuple[int, int]:
    """Return (bytes, messages) between nodes."""
    sizes = [num_bytes for source, target, num_bytes in messages if node_of(source) != node_of(target)]
    return round(sum(sizes)), len(sizes)


def program_messages(
    program: Program,
    sizes: CallSizes,
    *,
    dim: int,
    element_bytes: int,
    lane_bytes: int = 4,
    unit_columns: int = 0,
    coded: Callable[[str, float, int, int], float] = coded_bytes,
) -> list[Message]:
    """Return every message of a program, movement by movement and hop by hop; what travels as one counts as one.

    Args:
        program: forward or backward, lowered or not.
        sizes: of the call.
        dim: columns of tokens and rows.
        element_bytes: of tokens, rows and weights.
        lane_bytes: of a routing weight; an index takes `INDEX_BYTES`.
        unit_columns: columns of a hidden unit's weights, where weights travel; 3 * dim for SwiGLU. A bias has dim.
        coded: (codec, rows, dim, element bytes) to bytes. Packets that share a message count as one: a codec that
            rounds rows up to blocks may send a few bytes more.
    """
    slots = {slot.name: slot for slot in program.slots}
    codecs = {task.of: task.codec for task in program.tasks if task.op is Op.PACK}
    found: list[Message] = []
    for bundle in bundles(program):
        joint: dict[tuple[int, int], float] = {}
        for task in (program.tasks[place] for place in bundle):
            if task.op not in (Op.MOVE, Op.HOP):
                continue
            source = slots[(task.of or task.reads)[0]]
            codec = codecs.get(task.of, "") if task.op is Op.HOP else ""
            for here, there, rows in messages_of(task, slots, sizes):
                plain = rows * _row_bytes(source, dim, element_bytes, lane_bytes, unit_columns)
                num_bytes = coded(codec, rows, dim, element_bytes) if codec else plain
                joint[here, there] = joint.get((here, there), 0) + num_bytes
        found += [(here, there, num_bytes) for (here, there), num_bytes in joint.items()]
    return found


def _row_bytes(slot: Slot, dim: int, element_bytes: int, lane_bytes: int, unit_columns: int) -> int:
    if slot.layout.flow == "weights":
        return unit_columns * element_bytes
    return {Kind.LANE: lane_bytes, Kind.INDEX: INDEX_BYTES}.get(slot.kind, dim * element_bytes)
