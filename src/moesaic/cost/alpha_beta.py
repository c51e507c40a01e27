"""Durations of tasks by latency and rate: the plainest model of a machine, the same on every rank.

A lane's time is what its busiest rank needs: a start-up cost per message in turn, and bytes over the link's rate; a
movement over both kinds of links takes one after the other. It ranks programs; it knows no contention and no topology.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.cost.coded import coded_bytes
from moesaic.errors import InputError
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.sizes import CallSizes
from moesaic.program.task import INDEX_BYTES, Kind, Op, Program, Slot, Task


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank."""

    intra_gbps: float = 100.0
    """Link inside a node, gigabits per second."""
    inter_gbps: float = 25.0
    """Link between nodes, gigabits per second."""
    intra_latency_us: float = 10.0
    """Start-up cost of a message inside a node, microseconds."""
    inter_latency_us: float = 30.0
    """Start-up cost of a message between nodes, microseconds."""
    tflops: float = 50.0
    """Of the experts' products."""
    memory_gbps: float = 4000.0
    """Of copies, gigabits per second."""

    def __post_init__(self) -> None:
        for name in ("intra_gbps", "inter_gbps", "tflops", "memory_gbps"):
            if not getattr(self, name) > 0:
                raise InputError(f"machine.{name}={getattr(self, name)}: must be above 0")
        for name in ("intra_latency_us", "inter_latency_us"):
            if getattr(self, name) < 0:
                raise InputError(f"machine.{name}={getattr(self, name)}: must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What decides how large rows, weights and products are."""

    dim: int
    """Width of a token."""
    hidden: int
    """Inner width of one expert."""
    element_bytes: int = 2
    """Of activations and weights."""
    matrices: int = 3
    """Of an expert: 3 for SwiGLU, 2 for a plain one."""


def estimate(program: Program, sizes: CallSizes, shape: LayerShape, machine: Machine) -> dict[str, float]:
    """Return the seconds of every task, by name, as its busiest rank needs them.

    Args:
        program: forward or backward.
        sizes: of the call.
        shape: of the layer.
        machine: the rates.
    """
    slots = {slot.name: slot for slot in program.slots}
    codecs = {task.of: task.codec for task in program.tasks if task.op is Op.PACK}
    found = {}
    for task in program.tasks:
        if task.op in (Op.MOVE, Op.HOP):
            found[task.name] = _moving(task, slots, codecs.get(task.of, ""), sizes, shape, machine)
        else:
            ranks = range(sizes.grid.world)
            found[task.name] = max(_computing(task, slots, sizes, shape, machine, rank) for rank in ranks)
    return found


def _moving(
    task: Task, slots: dict[str, Slot], codec: str, sizes: CallSizes, shape: LayerShape, machine: Machine
) -> float:
    """Return what the busiest rank needs to send, or to receive, whichever takes longer."""
    source = slots[task.of[0] if task.of else task.reads[0]]
    spent: dict[tuple[str, int], float] = {}
    for sender, receiver, rows in messages_of(task, slots, sizes):
        inside = sizes.grid.node_of(sender) == sizes.grid.node_of(receiver)
        gbps = machine.intra_gbps if inside else machine.inter_gbps
        latency = machine.intra_latency_us if inside else machine.inter_latency_us
        seconds = latency * 1e-6 + row_bytes(source, codec, rows, shape) * 8 / (gbps * 1e9)
        for key in (("out", sender), ("in", receiver)):
            spent[key] = spent.get(key, 0.0) + seconds
    return max(spent.values(), default=0.0)


def row_bytes(slot: Slot, codec: str, rows: float, shape: LayerShape) -> float:
    """Return the bytes of a message.

    Args:
        slot: that the rows come from.
        codec: of token rows; "" for none.
        rows: of the message; fractions are expected values.
        shape: of the layer.
    """
    if slot.kind is Kind.LANE:
        return rows * 4
    if slot.kind is Kind.INDEX:
        return rows * INDEX_BYTES
    if slot.kind is Kind.WEIGHT:
        return rows * shape.element_bytes * shape.dim * (shape.matrices if slot.layout.flow == "weights" else 1)
    return coded_bytes(codec, rows, shape.dim, shape.element_bytes)


def _computing(
    task: Task, slots: dict[str, Slot], sizes: CallSizes, shape: LayerShape, machine: Machine, rank: int
) -> float:
    rows_slot = next((slots[name] for name in task.reads if slots[name].kind in (Kind.ROWS, Kind.TOKENS)), None)
    rows = sizes.num_rows(rows_slot.layout, rank) if rows_slot else 0
    if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
        weights = next(slots[name] for name in task.reads if slots[name].layout.flow == "weights")
        shards = len(sizes.shapes.pieces(weights.layout, rank).number) / len(sizes.shapes.experts(weights.layout, rank))
        flops = 2 * rows * shape.dim * shape.hidden * shards / sizes.grid.etp * shape.matrices
        return flops * (2 if task.op is Op.EXPERT_GRAD else 1) / (machine.tflops * 1e12)
    moved = (
        rows * shape.dim * shape.element_bytes * (1 + (task.op in (Op.PERMUTE, Op.TAKE, Op.JOIN, Op.PACK, Op.UNPACK)))
    )
    return moved * 8 / (machine.memory_gbps * 1e9)
