"""Counts what a program moves: rows and messages per link, from the same sizes that the executor
uses.

A slot is a named value of a program, on every rank. A movement takes rows from one slot to another;
an all-to-all may do so in several hops, rounds of messages that forward each other's packets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import legs_by_hop
from moesaic.program.layouts import move_of
from moesaic.program.sizes import CallSizes
from moesaic.program.task import INDEX_BYTES, Flow, Kind, Op, Program, Slot, Task
from moesaic.program.validate import collective


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one movement, or one hop of it, sends in total over all ranks. Messages from a rank to
    itself are not counted."""

    task: str
    collective: str
    kind: Kind
    flow: Flow
    """Distinguishes hidden units from biases when weights are moved."""
    codec: str
    """The codec of encoded rows; "" for none."""
    inside_rows: int
    """Rows that stay inside a node."""
    across_rows: int
    """Rows that cross nodes."""
    inside_messages: int
    """Messages that stay inside a node."""
    across_messages: int
    """Messages that cross nodes."""

    def num_bytes(
        self, dim: int, element_bytes: int, lane_bytes: int = 4, unit_columns: int = 0
    ) -> tuple[int, int]:
        """Return the bytes (inside nodes, across nodes), without encoding.

        Args:
            dim: columns of tokens and rows.
            element_bytes: bytes per element of tokens, rows and weights.
            lane_bytes: bytes per routing weight; an index takes `INDEX_BYTES`.
            unit_columns: columns of a hidden unit's weights, for movements of weights; 3 * dim for
                SwiGLU. A bias has dim columns.
        """
        if self.kind is Kind.LANE:
            row_bytes = lane_bytes
        elif self.kind is Kind.INDEX:
            row_bytes = INDEX_BYTES
        elif self.flow == "weights":
            row_bytes = unit_columns * element_bytes
        else:
            row_bytes = dim * element_bytes
        return self.inside_rows * row_bytes, self.across_rows * row_bytes


def traffic(program: Program, sizes: CallSizes, node_of: Callable[[int], int]) -> list[Traffic]:
    """Return the traffic of every movement, hop by hop for lowered ones.

    Args:
        program: a forward or backward program.
        node_of: returns the node of a rank.
    """
    slots = {slot.name: slot for slot in program.slots}
    # By the slot of packed rows, called after the movement's target, their codec.
    codecs = {task.writes[0]: task.codec for task in program.tasks if task.op is Op.PACK}
    entries = []
    for task in program.tasks:
        if task.op not in (Op.MOVE, Op.HOP):
            continue
        source, target = task.of or (task.reads[0], task.writes[0])  # of the whole movement
        inside = list[int]()  # rows of each message inside a node
        across = list[int]()
        for sender, receiver, rows in messages_of(task, slots, sizes):
            if node_of(sender) == node_of(receiver):
                inside.append(rows)
            else:
                across.append(rows)
        entries.append(
            Traffic(
                task=task.name,
                collective=collective(program, task.name) if task.op is Op.MOVE else task.link,
                kind=slots[source].kind,
                flow=slots[source].layout.flow,
                codec=codecs.get(f"{target}@pack", ""),
                inside_rows=sum(inside),
                across_rows=sum(across),
                inside_messages=len(inside),
                across_messages=len(across),
            )
        )
    return entries


def messages_of(
    task: Task, slots: dict[str, Slot], sizes: CallSizes
) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, rows) of every message of a movement or hop that has rows.

    Args:
        task: a move or hop.
        slots: the slots of its program, by name.
    """
    moved = sizes.moved(move_of(task, slots))
    if task.op is Op.HOP:
        legs = legs_by_hop(ALL_TO_ALLS[task.link], sizes.grid, task.group)
        moved = moved.on_legs(legs.get(task.hop, np.zeros((4, 0), dtype=np.int64)))
    yield from zip(moved.source.tolist(), moved.target.tolist(), moved.rows.tolist())
