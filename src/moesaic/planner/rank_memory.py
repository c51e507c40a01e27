"""Memory that a plan needs on a rank: weights, gradients, optimizer state, activations kept for
backward, buffers.

What a layer keeps and needs is the runtime's own model of its calls (`program/call_memory.py`) on
the rows that the planner expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.movement import AbstractVolumes
from moesaic.program.call_memory import HeldBytes
from moesaic.program.expert_sizes import ExpertSizes
from moesaic.program.task import Program

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
    forward: Program,
    backward: Program,
    volumes: AbstractVolumes,
    memory_budget: int | None = None,
    *,
    kernel: str = "triton",
) -> tuple[float, float]:
    """Return the bytes that an MoE layer keeps for backward, and the most further bytes that it
    needs while it runs.

    Args:
        forward: the lowered program.
        backward: the lowered program of its gradients.
        volumes: the rows; among several actors, the one that needs most counts.
        memory_budget: most bytes that the layer may hold; None for no limit. Both results shrink by
            the same factor to fit it.
        kernel: what computes the experts: a key of `SCRATCH` in `program/expert_sizes.py`.
    """
    layer = volumes.layer
    units = max(1, layer.hidden // volumes.grid.etp)  # of each expert's hidden width, on a rank
    experts = ExpertSizes.stacked(
        layer.dim, units, layer.matrices, layer.element_bytes, kernel=kernel
    )
    held = HeldBytes((forward, backward), volumes, experts)
    kept, peak = held.kept_and_peak(volumes)  # (actors,) each
    actor = int(peak.argmax())
    factor = 1.0
    if memory_budget is not None:
        factor = min(1.0, memory_budget / max(float(peak[actor]), 1.0))
    return factor * float(kept[actor]), factor * float(peak[actor] - kept[actor])
