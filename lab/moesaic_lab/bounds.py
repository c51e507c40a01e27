"""Lower bounds of the time in which links can carry given messages: bytes over rate, on the link
where this takes longest.

No method is faster, whatever it overlaps, since the bound ignores order, start-up costs and
compute. Compared with a measured time, it shows for how much of the time the slowest link was busy.
An emulated link passes about 20 KB at once before its rate applies, so all-to-alls of a few such
messages may be faster than the bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moesaic.planner.movement import coded_bytes
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.joined_messages import bundles
from moesaic.program.sizes import CallSizes
from moesaic.program.task import INDEX_BYTES, Kind, Op, Program, Slot
from moesaic_testbed.bed import Bed

Message = tuple[int, int, float]
"""Source rank, target rank, bytes."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The bound that the slowest link sets."""

    seconds: float
    link: str
    """Name of that link, such as "node 0 out"; "" if nothing crosses a link of known rate."""


def link_limit(messages: Iterable[Message], bed: Bed) -> Limit:
    """Return the least time in which a bed can carry messages.

    Args:
        messages: messages; those from a rank to itself are ignored.
        bed: the cluster; traffic inside a node counts only if the node's `lo` is shaped.
    """
    seconds = link_seconds(messages, bed)
    if not seconds:
        return Limit(seconds=0.0, link="")
    link = max(seconds, key=lambda name: seconds[name])
    return Limit(seconds=seconds[link], link=link)


def link_seconds(messages: Iterable[Message], bed: Bed) -> dict[str, float]:
    """Return the time that each link of a bed is busy with messages: its bytes over its rate.

    A bed's cost per message is counted once per pair of ranks, since messages of one pair may share
    a packet. Links that change during the run count with their initial rate.

    Args:
        messages: as for `link_limit`.
        bed: the cluster.
    """
    bytes_of_pair: dict[tuple[int, int], float] = defaultdict(float)
    for source, target, num_bytes in messages:
        if source != target and num_bytes:
            bytes_of_pair[(source, target)] += num_bytes

    seconds: dict[str, float] = defaultdict(float)
    for (source, target), num_bytes in bytes_of_pair.items():
        source_node = bed.node_of(source)
        target_node = bed.node_of(target)
        if source_node == target_node:
            if bed.intra_bytes_per_second is not None:
                seconds[f"lo of node {source_node}"] += num_bytes / bed.intra_bytes_per_second
            continue
        charged = max(num_bytes, bed.per_message)
        seconds[f"node {source_node} out"] += charged / bed.inter_bytes_per_second(source_node)
        seconds[f"node {target_node} in"] += charged / bed.inter_bytes_per_second(target_node)
    return dict(seconds)


def crossing(messages: Iterable[Message], node_of: Callable[[int], int]) -> tuple[int, int]:
    """Return (bytes, messages) between nodes."""
    sizes = [
        num_bytes for source, target, num_bytes in messages if node_of(source) != node_of(target)
    ]
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
    """Return every message of a program, movement by movement and hop by hop; bundled movements
    count as one message.

    Args:
        program: a forward or backward program, lowered or not.
        dim: columns of tokens and rows.
        element_bytes: bytes per element of tokens, rows and weights.
        lane_bytes: bytes of a routing weight; an index takes `INDEX_BYTES`.
        unit_columns: columns of a hidden unit's weights, if weights are sent: 3 * dim for SwiGLU. A
            bias has dim columns.
        coded: maps (codec, rows, dim, element bytes) to bytes. Packets that share a message count
            as one. A codec that rounds rows up to blocks may therefore send a few more bytes.
    """
    slots = {slot.name: slot for slot in program.slots}
    # A hop carries what a PACK task encoded before; both name the slots of the movement in `of`.
    codecs = {task.of: task.codec for task in program.tasks if task.op is Op.PACK}
    messages: list[Message] = []
    for bundle in bundles(program):
        bytes_of_pair: dict[tuple[int, int], float] = {}
        for place in bundle:
            task = program.tasks[place]
            if task.op not in (Op.MOVE, Op.HOP):
                continue
            moved_slots = task.of or task.reads
            row_bytes = _row_bytes(
                slots[moved_slots[0]], dim, element_bytes, lane_bytes, unit_columns
            )
            codec = codecs.get(task.of, "") if task.op is Op.HOP else ""
            for sender, receiver, rows in messages_of(task, slots, sizes):
                plain = rows * row_bytes
                num_bytes = coded(codec, rows, dim, element_bytes) if codec else plain
                pair = (sender, receiver)
                bytes_of_pair[pair] = bytes_of_pair.get(pair, 0) + num_bytes
        for (sender, receiver), num_bytes in bytes_of_pair.items():
            messages.append((sender, receiver, num_bytes))
    return messages


def _row_bytes(slot: Slot, dim: int, element_bytes: int, lane_bytes: int, unit_columns: int) -> int:
    """Return the bytes of a row in a slot."""
    if slot.layout.flow == "weights":
        return unit_columns * element_bytes
    return {Kind.LANE: lane_bytes, Kind.INDEX: INDEX_BYTES}.get(slot.kind, dim * element_bytes)
