"""Memory that a plan needs on a rank: weights, gradients, optimizer state, activations kept for
backward, buffers.

A layer keeps what its backward program reads of the forward program's slots. Its buffers are the
largest sum of slots alive at once, in the program's order. So the estimate reflects plans that
gather weights, send a token to more shards, or cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.movement import AbstractVolumes, row_bytes
from moesaic.program.task import Kind, Op, Program

GIB = 2**30
FRAGMENTED = 1.05
"""Bytes that PyTorch's allocator reserves on a device, over the bytes of tensors. Median of seven
layouts that SimuMax 1.2 ran with Megatron on eight B200; the range is 1.03 to 1.07."""


def usable_bytes(cluster: ClusterSpec, reserve_gib: float) -> float:
    """Return the bytes of tensors that fit on a device.

    Args:
        cluster: describes the devices.
        reserve_gib: memory that the framework uses.
    """
    return (cluster.device.memory_gib - reserve_gib) * GIB / FRAGMENTED


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one rank, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from the forward to the backward pass."""
    buffers: float
    """Temporary memory inside a layer."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def of_calls(calls: Sequence[Memory]) -> Memory:
    """Return the memory of a rank in a step whose layers have the loads of some calls, one result
    of each.

    A rank keeps the activations of all layers, so their mean counts, and has the buffers of one
    layer at a time, so the largest count.
    """
    activations = sum(call.activations for call in calls) / len(calls)
    return replace(calls[0], activations=activations, buffers=max(call.buffers for call in calls))


def about_fragments(memory: Memory, cluster: ClusterSpec) -> str:
    """Return a line with the memory that the allocator reserves in addition to tensors."""
    whole = memory.total * FRAGMENTED / GIB
    device = cluster.device.memory_gib
    added = whole - memory.total / GIB
    return (
        f"fragments: {FRAGMENTED - 1:.0%} in addition, {added:.1f} GiB: {whole:.1f} of {device:g} "
        "GiB with them"
    )


def what_is_missing(memory: Memory, cluster: ClusterSpec) -> str:
    """Return a clause that says whether tensors exceed a device, or exceed it only with fragments;
    "" if both fit."""
    if memory.total <= usable_bytes(cluster, 0):
        return ""
    device = cluster.device.memory_gib
    if memory.total <= device * GIB:
        return (
            f", which leaves less than {FRAGMENTED - 1:.0%} of a device of {device:g} for fragments"
        )
    return f", which a device of {device:g} does not have"


def layer_memory(
    forward: Program, backward: Program, volumes: AbstractVolumes, memory_budget: int | None = None
) -> tuple[float, float]:
    """Return the bytes that an MoE layer keeps for backward, and the most further bytes that it
    needs while it runs.

    Args:
        forward: the lowered program.
        backward: the lowered program of its gradients.
        volumes: the rows; among several actors, the one with the most rows counts.
        memory_budget: most bytes that the layer may hold; None for no limit. Both results shrink by
            the same factor to fit it.
    """
    forward_bytes, backward_bytes = (
        _slot_bytes(program, volumes) for program in (forward, backward)
    )
    # in order: sums are of floats
    kept = [name for name in dict.fromkeys(backward.inputs) if name in forward_bytes]
    saved = sum(forward_bytes[name] for name in kept) + _hidden(forward, volumes)
    buffers = 0.0
    for program, slot_bytes in ((forward, forward_bytes), (backward, backward_bytes)):
        peak = peak_bytes(program, slot_bytes, {*kept, *program.outputs})
        buffers = max(buffers, peak - sum(slot_bytes[name] for name in kept))
    factor = 1.0 if memory_budget is None else min(1.0, memory_budget / max(saved + buffers, 1.0))
    return factor * saved, factor * buffers


def _hidden(program: Program, volumes: AbstractVolumes) -> float:
    """Return the bytes of the experts' inner activations: gate and up rows for SwiGLU, one matrix's
    rows for plain experts."""
    slots = {slot.name: slot for slot in program.slots}
    total = 0.0
    for task in program.tasks:
        if task.op is Op.EXPERT:
            weights = next(
                slots[name] for name in task.reads if slots[name].layout.flow == "weights"
            )
            rows = float(volumes.rows(slots[task.reads[0]].layout).max())
            units = volumes.layer.hidden * volumes.shards(weights.layout)
            total += rows * units * (volumes.layer.matrices - 1) * volumes.layer.element_bytes
    return total


def _slot_bytes(program: Program, volumes: AbstractVolumes) -> dict[str, float]:
    """Return the bytes of every slot on the rank where it is largest. Stored weights are 0, since
    they are counted elsewhere."""
    slots = {slot.name: slot for slot in program.slots}
    packet_contents = {
        name: (slots[task.of[0]], task.codec)
        for task in program.tasks
        if task.of
        for name in task.writes
    }
    stored = {slot.name for slot in program.slots if slot.kind is Kind.WEIGHT} & {
        *program.inputs,
        *program.outputs,
    }
    slot_bytes = {}
    for slot in program.slots:
        source, codec = (
            packet_contents.get(slot.name, (slot, "")) if slot.kind is Kind.PACKETS else (slot, "")
        )
        rows = float(volumes.rows(slot.layout).max())
        slot_bytes[slot.name] = (
            0.0 if slot.name in stored else row_bytes(source, codec, rows, volumes.layer)
        )
    return slot_bytes


def peak_bytes(program: Program, size: Mapping[str, float], stay: Iterable[str]) -> float:
    """Return the most bytes that are alive at once.

    A slot lives from the task that writes it to the last task that reads it.

    Args:
        program: in the order in which it runs.
        size: bytes of every slot, by name.
        stay: slots that live to the end.
    """
    last_use = {
        name: number
        for number, task in enumerate(program.tasks)
        for name in (*task.writes, *task.reads)
    }
    last_use.update(dict.fromkeys(stay, len(program.tasks)))
    alive = sum(size[name] for name in program.inputs)
    peak = alive
    for number, task in enumerate(program.tasks):
        alive += sum(size[name] for name in task.writes)
        peak = max(peak, alive)
        alive -= sum(
            size[name]
            for name in dict.fromkeys((*task.reads, *task.writes))
            if last_use[name] == number
        )
    return peak
