"""What a program moves: rows and messages per link, from the same sizes that the interpreter sends by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import legs_by_hop
from moesaic.program.sizes import CallSizes, Move
from moesaic.program.task import INDEX_BYTES, Flow, Kind, Op, Program, Slot, Task
from moesaic.program.validate import collective, reduces


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one movement, or one hop of it, sends in total, over all ranks; a rank's message to itself counts nowhere."""

    task: str
    collective: str
    kind: Kind
    flow: Flow
    """Tells hidden units from biases, where weights travel."""
    codec: str
    """Of rows that travel encoded; "" for none."""
    inside_rows: int
    """Rows that stay inside a node."""
    across_rows: int
    """Rows that cross nodes."""
    inside_messages: int
    """Messages that stay inside a node."""
    across_messages: int
    """Messages that cross nodes."""

    def num_bytes(self, dim: int, element_bytes: int, lane_bytes: int = 4, unit_columns: int = 0) -> tuple[int, int]:
        """Return bytes (inside nodes, across nodes) of what is not encoded.

        Args:
            dim: columns of tokens and rows.
            element_bytes: of tokens, rows and weights.
            lane_bytes: of a routing weight; an index takes `INDEX_BYTES`.
            unit_columns: columns of a hidden unit's weights, where weights travel; 3 * dim for SwiGLU. A bias has dim.
        """
        row = {Kind.LANE: lane_bytes, Kind.INDEX: INDEX_BYTES}.get(self.kind, dim * element_bytes)
        if self.flow == "weights":
            row = unit_columns * element_bytes
        return self.inside_rows * row, self.across_rows * row


def traffic(program: Program, sizes: CallSizes, node_of: Callable[[int], int]) -> list[Traffic]:
    """Return the traffic of every movement, hop by hop where it is lowered.

    Args:
        program: forward or backward.
        node_of: rank to node.
    """
    slots = {slot.name: slot for slot in program.slots}
    codecs = {task.writes[0]: task.codec for task in program.tasks if task.op is Op.PACK}
    found = []
    for task in program.tasks:
        if task.op not in (Op.MOVE, Op.HOP):
            continue
        source, target = _ends(task, slots)
        rows, messages = [0, 0], [0, 0]
        for a, b, count in messages_of(task, slots, sizes):
            across = node_of(a) != node_of(b)
            rows[across] += count
            messages[across] += 1
        found.append(
            Traffic(
                task=task.name,
                collective=collective(program, task.name) if task.op is Op.MOVE else task.link,
                kind=source.kind,
                flow=source.layout.flow,
                codec=codecs.get(f"{target.name}@pack", ""),
                inside_rows=rows[0],
                across_rows=rows[1],
                inside_messages=messages[0],
                across_messages=messages[1],
            )
        )
    return found


def _ends(task: Task, slots: dict[str, Slot]) -> tuple[Slot, Slot]:
    """Return the slots between which a movement, or the movement that a hop is a part of, goes."""
    source, target = task.of or (task.reads[0], task.writes[0])
    return slots[source], slots[target]


def messages_of(task: Task, slots: dict[str, Slot], sizes: CallSizes) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, rows) of every message of a movement or hop that has a row.

    Args:
        task: a move or hop.
        slots: of its program, by name.
    """
    before, after = _ends(task, slots)
    move = Move(before.layout, after.layout, task.group, reduces(before, after))
    moved = sizes.moved(move)
    if task.op is Op.HOP:
        legs = legs_by_hop(ALL_TO_ALLS[task.link], sizes.grid, task.group)
        moved = moved.on_legs(legs.get(task.hop, np.zeros((4, 0), dtype=np.int64)))
    yield from zip(moved.source.tolist(), moved.target.tolist(), moved.rows.tolist())
