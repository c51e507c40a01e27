"""Replication: some copies of a run are computed by another rank than their expert's home, which gets the expert's weights.

One pass for three policies. Shadowing (FasterMoE, He et al., PPoPP 2022, section 4.1): every origin computes its own copies
of a hot expert. Partial replication: some origins do. Spilling (least-loaded expert parallelism): what overloads a home
goes to idle ranks, from whatever origin. Which copies go where is data: `CallSizes` takes it, call by call.

A run gets one more chunk per rank of ep. The copies of these chunks travel to their helpers as others do to their homes,
the weights travel over ep to the helpers that need them (once to each node, then on inside it), and what comes back is
joined. The backward program, derived, sends the gradients of the weights back the same way, summed on each node, to the home,
which adds them to its own once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.passes.split import StretchPart, chunk_part, split_stretch, to_experts_and_back
from moesaic.program.task import ONCE, Kind, Lane, Layout, Op, Program, Slot, Stage, State, Task

SUFFIX = ".replicated"
"""Of slots and tasks that work on replicated copies."""


def replicate(program: Program, num_chunks: int, grid: Grid | None = None) -> Program:
    """Return the program with the copies that stay at their experts' homes in chunks, and the replicated ones beside them.

    Args:
        program: a forward program, not chunked, in which weights stay where they are stored.
        num_chunks: of the copies that stay. `CallSizes` must be made for the same number.
        grid: the mesh; where a copy of the experts is spread over nodes, weights go by `relays`. None: straight to each helper.

    Raises:
        InputError: for a program in which copies do not travel to one home each.
    """
    if any(slot.layout.flow in ONCE for slot in program.slots):
        raise InputError(
            "replication clashes with plan.all_to_all=multicast: a token visits a node for all its experts there, also "
            "where another rank computes some: choose another plan.all_to_all"
        )
    if any(task.op is Op.MOVE and program.slot(task.reads[0]).layout.flow == "weights" for task in program.tasks):
        raise InputError(
            "replication clashes with plan.gather_weights, which moves weights in another way: leave gather_weights unset"
        )
    parts = [chunk_part(chunk) for chunk in range(num_chunks)]
    whole = split_stretch(program, to_experts_and_back(program), [*parts, StretchPart(SUFFIX, _replicated)])
    whole = _with_weights(whole, "w", "w", State.SHARDED, relayed=grid is not None and relays(grid))
    if any(slot.name == "b_shards" for slot in whole.slots):
        whole = _with_weights(whole, "b_shards", "b", State.REPLICATED)
    return replace(whole, name=f"{program.name}, {num_chunks} chunks, replication")


def _replicated(layout: Layout) -> Layout:
    """Where copies were at their experts' homes, they are at their helpers."""
    if layout.experts == "rank":
        return replace(layout, experts="all", chunk="here")
    return replace(layout, chunk="replicated")


def relays(grid: Grid) -> bool:
    """Whether replicated weights go to each node once, to the rank with the place of their home there, and are passed
    on inside.

    The gradients come back so, summed on each node first. It needs more than one rank of ep on a node.
    """
    if grid.nodes_per_replica < 2 or _is_alone(grid):
        return False
    return all(_reached(grid, rank) == set(range(grid.ep)) for rank in range(grid.period))


def _is_alone(grid: Grid) -> bool:
    """Whether no rank shares its node with another place of ep."""
    return all(
        grid.coordinate(m, "ep") == grid.coordinate(r, "ep")
        for r in range(grid.period)
        for m in grid.group(r, ("local",))
    )


def _reached(grid: Grid, rank: int) -> set[int]:
    """Return the places of ep whose weights, of a rank's shard, come to its node by ranks of one place on every node."""

    def mates(of: int, axis: Axis) -> list[int]:
        return [m for m in grid.group(of, (axis,)) if grid.coordinate(m, "etp") == grid.coordinate(rank, "etp")]

    return {grid.coordinate(far, "ep") for near in mates(rank, "local") for far in mates(near, "node")}


def _with_weights(program: Program, source: str, name: str, on_etp: State, *, relayed: bool = False) -> Program:
    """Let the experts that compute replicated copies read weights that were sent to them."""
    held = program.slot(source)

    def sent(suffix: str, chunk: Literal["near", "here"], over: tuple[Axis, ...]) -> Slot:
        state = {**dict(held.state), **dict.fromkeys(over, State.REPLICATED), "etp": on_etp}
        layout = replace(held.layout, experts="all", chunk=chunk)
        kept = tuple((axis, value) for axis, value in sorted(state.items()) if value is not State.SHARDED)
        return Slot(name=f"{name}_{suffix}", kind=Kind.WEIGHT, layout=layout, state=kept)

    def movement(read: str, slot: Slot, axis: Axis) -> Task:
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

    here = sent("here", "here", ("node", "local") if relayed else ("ep",))
    near = [sent("near", "near", ("node",))] if relayed else []
    first = movement(source, near[0], "node") if relayed else movement(source, here, "ep")
    second = [movement(near[0].name, here, "local")] if relayed else []
    tasks = []
    for task in program.tasks:
        replicated = task.op is Op.EXPERT and task.name.endswith(SUFFIX)
        if replicated:
            task = replace(task, reads=tuple(here.name if read == source else read for read in task.reads))
        tasks.append(task)
    experts = [number for number, task in enumerate(tasks) if task.op is Op.EXPERT]
    at = next(number for number in experts if here.name in tasks[number].reads)
    # Behind the first tokens; what is passed on inside nodes goes just before it is read.
    tasks = [*tasks[: experts[0]], first, *tasks[experts[0] : at], *second, *tasks[at:]]
    return replace(program, slots=(*program.slots, *near, here), tasks=tuple(tasks))
