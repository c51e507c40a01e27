"""Replication: a helper computes some copies of a run instead of their expert's home, with weights
sent by the home.

One pass serves three policies. Shadowing (FasterMoE, He et al., PPoPP 2022, section 4.1): every
origin computes its own copies of a hot expert. Partial replication: some origins do. Spilling
(least-loaded expert parallelism): the copies that overload a home go to idle ranks, whatever their
origin. Which copies go where is an argument of `CallSizes`, call by call.

A run gets one more chunk per ep rank. The copies of these chunks are sent to their helpers in the
way that others are sent to their homes. The weights go over ep to the helpers that need them, once
to each node and then on inside it. The results are joined. The derived backward program sends the
gradients of the weights back the same way, summed on each node. The home adds them to its own
gradient once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.passes.split import StretchPart, chunk_part, split_stretch, to_experts_and_back
from moesaic.program.task import ONCE, Kind, Lane, Layout, Op, Program, Slot, Stage, State, Task

SUFFIX = ".replicated"
"""Added to the names of slots and tasks for replicated copies."""


def replicate(program: Program, num_chunks: int, grid: Grid | None = None) -> Program:
    """Return the program with the copies that stay at their experts' homes in chunks, and with
    replicated copies in addition.

    Args:
        program: a forward program, not chunked, that does not move weights.
        num_chunks: chunks of the copies that stay; `CallSizes` must be made with the same number.
        grid: the mesh; if `relays(grid)`, weights are relayed inside nodes. None: weights go
            straight to each helper.

    Raises:
        InputError: for a program in which copies are not sent to one home each.
    """
    if any(slot.layout.flow in ONCE for slot in program.slots):
        raise InputError(
            "replication clashes with plan.all_to_all=multicast: a token is sent to a node once "
            "for all its experts there, even if a helper computes some of its copies: choose "
            "another plan.all_to_all"
        )
    if any(
        task.op is Op.MOVE and program.slot(task.reads[0]).layout.flow == "weights"
        for task in program.tasks
    ):
        raise InputError(
            "replication clashes with plan.gather_weights, which moves weights in another "
            "way: leave gather_weights unset"
        )
    parts = [chunk_part(chunk) for chunk in range(num_chunks)]
    whole = split_stretch(
        program, to_experts_and_back(program), [*parts, StretchPart(SUFFIX, _replicated)]
    )
    whole = _with_weights(whole, "w", "w", State.SHARDED, relayed=grid is not None and relays(grid))
    if any(slot.name == "b_shards" for slot in whole.slots):
        whole = _with_weights(whole, "b_shards", "b", State.REPLICATED)
    return replace(whole, name=f"{program.name}, {num_chunks} chunks, replication")


def _replicated(layout: Layout) -> Layout:
    """Return a layout for replicated copies: with the helpers in place of the experts' homes."""
    if layout.experts == "rank":
        return replace(layout, experts="all", chunk="here")
    return replace(layout, chunk="replicated")


def relays(grid: Grid) -> bool:
    """Return whether replicated weights go to each node once, to the home's counterpart there,
    which sends them on.

    The gradients return the same way, summed on each node first. This needs more than one ep rank
    per node.
    """
    mates = ((mate, rank) for rank in range(grid.period) for mate in grid.group(rank, ("local",)))
    is_alone = all(
        grid.coordinate(mate, "ep") == grid.coordinate(rank, "ep") for mate, rank in mates
    )
    if grid.nodes_per_replica < 2 or is_alone:
        return False
    return all(_reached(grid, rank) == set(range(grid.ep)) for rank in range(grid.period))


def _reached(grid: Grid, rank: int) -> set[int]:
    """Return the ep ranks whose weights, of this rank's shard, reach its node through counterparts
    of its node's ranks."""

    def mates(peer: int, axis: Axis) -> list[int]:
        return [
            mate
            for mate in grid.group(peer, (axis,))
            if grid.coordinate(mate, "etp") == grid.coordinate(rank, "etp")
        ]

    return {
        grid.coordinate(far, "ep") for near in mates(rank, "local") for far in mates(near, "node")
    }


def _with_weights(
    program: Program, source: str, name: str, on_etp: State, *, relayed: bool = False
) -> Program:
    """Make the experts of replicated copies read weights that were sent to their ranks."""
    source_slot = program.slot(source)

    def sent(suffix: str, chunk: Literal["near", "here"], over: tuple[Axis, ...]) -> Slot:
        """Return a slot of replicated weights after a movement over some axes."""
        state = {**dict(source_slot.state), **dict.fromkeys(over, State.REPLICATED), "etp": on_etp}
        layout = replace(source_slot.layout, experts="all", chunk=chunk)
        listed_states = tuple(
            (axis, value) for axis, value in sorted(state.items()) if value is not State.SHARDED
        )
        return Slot(name=f"{name}_{suffix}", kind=Kind.WEIGHT, layout=layout, state=listed_states)

    def movement(read: str, slot: Slot, axis: Axis) -> Task:
        """Return the task that fetches weights along one axis."""
        lane = Lane.INTRA if axis == "local" else Lane.INTER
        return Task(
            name=slot.name,
            op=Op.MOVE,
            reads=(read,),
            writes=(slot.name,),
            stage=Stage.DISPATCH,
            lane=lane,
            group=(axis,),
        )

    here_slot = sent("here", "here", ("node", "local") if relayed else ("ep",))
    near_slots = [sent("near", "near", ("node",))] if relayed else []
    first = (
        movement(source, near_slots[0], "node") if relayed else movement(source, here_slot, "ep")
    )
    second = [movement(near_slots[0].name, here_slot, "local")] if relayed else []
    tasks = []
    for task in program.tasks:
        replicated = task.op is Op.EXPERT and task.name.endswith(SUFFIX)
        if replicated:
            task = replace(
                task, reads=tuple(here_slot.name if read == source else read for read in task.reads)
            )
        tasks.append(task)
    experts = [number for number, task in enumerate(tasks) if task.op is Op.EXPERT]
    first_reader = next(number for number in experts if here_slot.name in tasks[number].reads)
    # The first movement comes after the first dispatch, the second just before the experts that
    # read its weights.
    tasks = [
        *tasks[: experts[0]],
        first,
        *tasks[experts[0] : first_reader],
        *second,
        *tasks[first_reader:],
    ]
    return replace(program, slots=(*program.slots, *near_slots, here_slot), tasks=tuple(tasks))
