"""What a program asks of the host, task by task: how many tasks of which kind, messages, bytes. Fitted and simulated alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from moesaic.cost.compute import Rates, compute_seconds
from moesaic.cost.movement import AbstractVolumes, Movement
from moesaic.cost.profile import HostCosts
from moesaic.program.bundles import bundles
from moesaic.program.task import Kind, Op, Program, Slot, Task

FEATURES = tuple(each.name for each in fields(HostCosts) if each.name != "sharing")
"""What costs are counted in."""
_BYTES = Rates(flops=1.0, rows=(1.0,), share=(1.0,), memory=1.0, codec=None)
"""Rates under which "seconds" are bytes."""


def host_features(program: Program, volumes: AbstractVolumes, movements: list[list[Movement]]) -> np.ndarray:
    """Return what each task asks of each actor's host, (tasks, actors, features); features as in `FEATURES`.

    Args:
        program: forward or backward.
        volumes: its rows.
        movements: of each task.
    """
    slots = {slot.name: slot for slot in program.slots}
    waits = _waits(program, movements)
    in_a_message = {number for bundle in bundles(program) for number in bundle[1:]}
    found = np.zeros((len(program.tasks), volumes.num_actors, len(FEATURES)))
    for number, task in enumerate(program.tasks):
        found[number, :, FEATURES.index("task")] = 1
        found[number, :, FEATURES.index("wait")] = waits[number]
        for moved in movements[number]:
            if number not in in_a_message:
                found[number, list(moved.actors), FEATURES.index("message")] += moved.posts
            found[number, list(moved.actors), FEATURES.index("transport_byte")] += _transport_bytes(moved, volumes)
        is_weight = any(slots[name].kind is Kind.WEIGHT for name in task.writes)
        if task.op in (Op.EXPERT, Op.EXPERT_GRAD):
            found[number, :, FEATURES.index("weight_byte")] = _gradient_bytes(task, slots, volumes)
        elif not is_lossy(task, slots):
            touched = compute_seconds(task, slots, volumes, _BYTES)
            found[number, :, FEATURES.index("weight_byte" if is_weight else "byte")] = touched
    return found


def is_lossy(task: Task, slots: Mapping[str, Slot]) -> bool:
    """Whether a task codes rows with a codec; what that takes is measured codec by codec, not per byte."""
    if task.op not in (Op.PACK, Op.UNPACK) or not task.codec:
        return False
    assert task.of is not None
    return slots[task.of[0] if task.op is Op.PACK else task.of[1]].kind is Kind.ROWS


def layer_features() -> np.ndarray:
    """Return what a layer asks of the host besides its programs, (features,)."""
    found = np.zeros(len(FEATURES))
    found[FEATURES.index("layer")] = 1
    return found


def costs_vector(costs: HostCosts, *, with_transport: bool = True) -> np.ndarray:
    """Return the costs of one of each feature, (features,) seconds of processor time.

    Args:
        costs: as measured.
        with_transport: also what the transport's own thread takes per byte, which the issuing thread need not wait for.
    """
    left_out = () if with_transport else ("transport_byte",)
    return np.array([0.0 if name in left_out else getattr(costs, name) for name in FEATURES])


def _transport_bytes(moved: Movement, volumes: AbstractVolumes) -> float:
    """Return the bytes that a rank sends and receives in a movement, the mean over its ranks."""
    topology, total = volumes.topology, 0.0
    for link, seconds in zip(moved.load.links.tolist(), moved.load.seconds.tolist()):
        ends = 2 if topology.names[link].startswith("inside") else 1  # between nodes a message leaves and arrives
        total += ends * seconds / topology.seconds_per_byte[link]
    return total / (topology.block if volumes.num_actors == 1 else len(moved.actors))


def _gradient_bytes(task: Task, slots: Mapping[str, Slot], volumes: AbstractVolumes) -> np.ndarray:
    """Return the bytes of weight gradients that an expert task writes."""
    total = np.zeros(volumes.num_actors)
    shape = volumes.shape
    for name in task.writes:
        slot = slots[name]
        if slot.kind is Kind.WEIGHT and slot.layout.flow == "weights":
            total += volumes.rows(slot.layout) * shape.element_bytes * shape.dim * shape.matrices
    return total


def _waits(program: Program, movements: list[list[Movement]]) -> list[bool]:
    """Return which tasks first need a movement that is further down the chain of movements than any before them."""
    depth: dict[str, int] = {}
    deepest, found = 0, []
    for task, moved in zip(program.tasks, movements):
        needed = max((depth.get(name, 0) for name in task.reads), default=0)
        found.append(needed > deepest)
        deepest = max(deepest, needed)
        depth.update(dict.fromkeys(task.writes, needed + bool(moved)))
    return found
