"""How much memory a plan needs on a rank: weights, gradients, optimizer, activations kept for backward, buffers.

What a layer keeps is what its backward program reads of the forward one; what it needs besides is the most that is alive at
once, slot by slot, in the program's order. So a plan that gathers weights, sends a token to more shards or cuts into chunks
shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.movement import AbstractVolumes, row_bytes
from moesaic.program.task import Kind, Op, Program

GIB = 2**30
FRAGMENTED = 1.05
"""Bytes that PyTorch's allocator takes of a device over those of tensors: the median of seven layouts that SimuMax 1.2 ran with
Megatron on eight B200, 1.03 to 1.07."""


def usable_bytes(cluster: ClusterSpec, reserve_gib: float) -> float:
    """Return how many bytes of tensors a device holds.

    Args:
        cluster: whose devices.
        reserve_gib: what the framework takes.
    """
    return (cluster.device.memory_gib - reserve_gib) * GIB / FRAGMENTED


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from forward to backward."""
    buffers: float
    """Alive for a while inside a layer."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def layer_memory(
    forward: Program, backward: Program, volumes: AbstractVolumes, memory_budget: int | None = None
) -> tuple[float, float]:
    """Return the bytes that an MoE layer keeps for backward, and the most that it needs besides while it runs.

    Args:
        forward: the lowered program.
        backward: the lowered program of its gradients.
        volumes: the rows; of several actors the one with the most counts.
        memory_budget: bytes that the layer holds at most; None for no limit. What it keeps is the same share of them.
    """
    there, back = (_slot_bytes(program, volumes) for program in (forward, backward))
    kept = {name for name in backward.inputs if name in there}
    saved = sum(there[name] for name in kept) + _hidden(forward, volumes)
    besides = 0.0
    for program, size in ((forward, there), (backward, back)):
        most = peak_bytes(program, size, {*kept, *program.outputs})
        besides = max(besides, most - sum(size[name] for name in kept))
    part = 1.0 if memory_budget is None else min(1.0, memory_budget / max(saved + besides, 1.0))
    return part * saved, part * besides


def _hidden(program: Program, volumes: AbstractVolumes) -> float:
    """Return the bytes of the experts' inner activations: the gate's and the rows' for SwiGLU, one for a plain expert."""
    slots = {slot.name: slot for slot in program.slots}
    total = 0.0
    for task in program.tasks:
        if task.op is Op.EXPERT:
            weights = next(slots[name] for name in task.reads if slots[name].layout.flow == "weights")
            rows = float(volumes.rows(slots[task.reads[0]].layout).max())
            units = volumes.layer.hidden * volumes.shards(weights.layout)
            total += rows * units * (volumes.layer.matrices - 1) * volumes.layer.element_bytes
    return total


def _slot_bytes(program: Program, volumes: AbstractVolumes) -> dict[str, float]:
    """Return the bytes of every slot on the rank where it is largest; stored weights count elsewhere."""
    slots = {slot.name: slot for slot in program.slots}
    carries = {name: (slots[task.of[0]], task.codec) for task in program.tasks if task.of for name in task.writes}
    stored = {slot.name for slot in program.slots if slot.kind is Kind.WEIGHT} & {*program.inputs, *program.outputs}
    found = {}
    for slot in program.slots:
        source, codec = carries.get(slot.name, (slot, "")) if slot.kind is Kind.PACKETS else (slot, "")
        rows = float(volumes.rows(slot.layout).max())
        found[slot.name] = 0.0 if slot.name in stored else row_bytes(source, codec, rows, volumes.layer)
    return found


def peak_bytes(program: Program, size: Mapping[str, float], stay: Iterable[str]) -> float:
    """Return the most bytes alive at once; slots live from their writing to their last reading.

    Args:
        program: in the order in which it runs.
        size: bytes of every slot, by name.
        stay: slots that live to the end.
    """
    last = {name: number for number, task in enumerate(program.tasks) for name in (*task.writes, *task.reads)}
    last.update(dict.fromkeys(stay, len(program.tasks)))
    alive = sum(size[name] for name in program.inputs)
    most = alive
    for number, task in enumerate(program.tasks):
        alive += sum(size[name] for name in task.writes)
        most = max(most, alive)
        alive -= sum(size[name] for name in {*task.reads, *task.writes} if last[name] == number)
    return most
