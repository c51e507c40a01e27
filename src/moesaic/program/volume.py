"""What a program moves: bytes per rank and link, from the same messages that the interpreter sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moesaic.program.grid import Grid
from moesaic.program.sizes import Sizes
from moesaic.program.task import Kind, Program
from moesaic.program.validate import collective, reduces


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one movement sends in total, over all ranks; a rank's message to itself counts nowhere."""

    task: str
    collective: str
    kind: Kind
    inside_rows: int
    """Rows that stay inside a node."""
    across_rows: int
    """Rows that cross nodes."""

    def num_bytes(self, dim: int, element_bytes: int, lane_bytes: int = 4) -> tuple[int, int]:
        """Return bytes (inside nodes, across nodes).

        Args:
            dim: columns of tokens and rows.
            element_bytes: of tokens and rows.
            lane_bytes: of a routing weight; an index takes 8.
        """
        row = {Kind.LANE: lane_bytes, Kind.INDEX: 8}.get(self.kind, dim * element_bytes)
        return self.inside_rows * row, self.across_rows * row


def traffic(program: Program, sizes: Sizes, node_of: Callable[[int], int]) -> list[Traffic]:
    """Return the traffic of every movement.

    Args:
        program: forward or backward.
        sizes: of the call.
        node_of: rank to node.
    """
    slots = {slot.name: slot for slot in program.slots}
    found = []
    for task in program.moves():
        source, target = slots[task.reads[0]], slots[task.writes[0]]
        inside = across = 0
        for message in sizes.messages(source.layout, target.layout, task.group, reduces(source, target)):
            if message.source == message.target:
                continue
            if node_of(message.source) == node_of(message.target):
                inside += len(message.send_rows)
            else:
                across += len(message.send_rows)
        word = collective(program, task.name)
        found.append(Traffic(task=task.name, collective=word, kind=source.kind, inside_rows=inside, across_rows=across))
    return found


def even_sizes(grid: Grid, schedule: str, *, tokens: int, num_experts: int, top_k: int, num_chunks: int = 1) -> Sizes:
    """Return the sizes of a call in which every expert gets equally many copies from every origin.

    Args:
        grid: the mesh.
        schedule: its name; baseline lets every rank stand for all tokens of its tensor group.
        tokens: per data-parallel group; `tokens * top_k` should divide by `num_experts * tp`, or shares are rounded.
        num_experts: of the layer.
        top_k: copies per token.
        num_chunks: as the program was cut.
    """
    place = np.array([grid.coordinate(rank, "tp") for rank in range(grid.world)])
    if schedule == "baseline":
        share, own = np.full(grid.world, tokens * top_k // num_experts), np.full(grid.world, tokens)
    else:
        run = tokens * top_k // num_experts
        share = run * (place + 1) // grid.tp - run * place // grid.tp
        own = tokens * (place + 1) // grid.tp - tokens * place // grid.tp
    return Sizes(grid, np.repeat(share[:, None], num_experts, axis=1), own, num_chunks)
