"""Replication: a helper computes some copies of a run instead of their expert's home, with weights
sent by the home.

One pass serves three policies. Shadowing (FasterMoE, He et al., PPoPP 2022, section 4.1): every
origin computes its own copies of a hot expert. Partial replication: some origins do. Spilling
(least-loaded expert parallelism): the copies that overload a home go to idle ranks, whatever their
origin. Which copies go where is an argument of `CallSizes`, call by call.

A run is the copies that one rank sends to one expert; the home is the ep rank that stores the
expert. A run gets one more chunk per ep rank. The copies of these chunks are sent to their helpers
in the way that others are sent to their homes. The weights go over ep to the helpers that need
them, once to each node and then on inside it. The results are joined. The derived backward program
sends the gradients of the weights back the same way, summed on each node. The home adds them to its
own gradient once.
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
    moved_flows = {program.slot(task.reads[0]).layout.flow for task in program.moves()}
    if "weights" in moved_flows:
        raise InputError(
            "replication clashes with plan.gather_weights, which moves weights in another "
            "way: leave gather_weights unset"
        )
    parts = [chunk_part(chunk) for chunk in range(num_chunks)]
    parts.append(StretchPart(SUFFIX, _replicated))
    cut = split_stretch(program, to_experts_and_back(program), parts)
    relayed = grid is not None and relays(grid)
    cut = _with_weights(cut, source="w", name="w", on_etp=State.SHARDED, relayed=relayed)
    if any(slot.name == "b_shards" for slot in cut.slots):
        cut = _with_weights(cut, source="b_shards", name="b", on_etp=State.REPLICATED)
    return replace(cut, name=f"{program.name}, {num_chunks} chunks, replication")


def _replicated(layout: Layout) -> Layout:
    """Return a layout for replicated copies: with the helpers in place of the experts' homes."""
    if layout.experts == "rank":
        return replace(layout, experts="all", chunk="here")
    return replace(layout, chunk="replicated")


def relays(grid: Grid) -> bool:
    """Return whether replicated weights are relayed: sent to each node once, to the home's
    counterpart there, which sends them on inside the node.

    The gradients return the same way, summed on each node first.
    """
    if grid.nodes_per_replica < 2:  # 1: weights stay on their node; 0: spread unevenly over nodes
        return False
    # These ranks stand for all: after `period` ranks, what is on a node repeats.
    ranks = range(grid.period)
    if all(_has_one_ep_rank_on_node(grid, rank) for rank in ranks):  # nobody to send on to
        return False
    # on every node, the weights of every home must arrive at a counterpart
    all_ep_ranks = set(range(grid.ep))
    return all(_reached(grid, rank) == all_ep_ranks for rank in ranks)


def _has_one_ep_rank_on_node(grid: Grid, rank: int) -> bool:
    """Return whether the ranks of the rank's replica on its node have the same ep coordinate."""
    neighbours = grid.group(rank, ("local",))
    return len({grid.coordinate(neighbour, "ep") for neighbour in neighbours}) == 1


def _reached(grid: Grid, rank: int) -> set[int]:
    """Return the ep ranks whose weights, of this rank's shard, reach its node through counterparts
    of its node's ranks."""
    shard = grid.coordinate(rank, "etp")
    reached = set[int]()
    for neighbour in grid.group(rank, ("local",)):
        if grid.coordinate(neighbour, "etp") != shard:
            continue
        for counterpart in grid.group(neighbour, ("node",)):
            if grid.coordinate(counterpart, "etp") == shard:
                reached.add(grid.coordinate(counterpart, "ep"))
    return reached


def _sent_slot(
    stored: Slot, name: str, chunk: Literal["near", "here"], changed: dict[Axis, State]
) -> Slot:
    """Return the slot of replicated weights after a movement, from that of the stored ones and the
    states that change. Its chunk says who has them: "near", the helpers' node; "here", a helper."""
    states = dict(stored.state) | changed
    listed_states = tuple(
        (axis, state) for axis, state in sorted(states.items()) if state is not State.SHARDED
    )
    layout = replace(stored.layout, experts="all", chunk=chunk)
    return Slot(name=f"{name}_{chunk}", kind=Kind.WEIGHT, layout=layout, state=listed_states)


def _fetch(source: str, target: Slot, axis: Axis) -> Task:
    """Return the task that fetches weights from a slot to another along one axis."""
    return Task(
        name=target.name,
        op=Op.MOVE,
        reads=(source,),
        writes=(target.name,),
        stage=Stage.DISPATCH,
        lane=Lane.INTRA if axis == "local" else Lane.INTER,
        group=(axis,),
    )


def _with_weights(
    program: Program, source: str, name: str, on_etp: State, *, relayed: bool = False
) -> Program:
    """Make the experts of replicated copies read weights that were sent to their ranks.

    Args:
        source: the slot of the stored weights.
        name: with which the names of the new slots begin.
        on_etp: state of the new slots on etp.
        relayed: whether the weights go to each node once, and then on inside it.
    """
    stored = program.slot(source)
    same = State.REPLICATED
    if relayed:
        near_slot = _sent_slot(stored, name, "near", {"node": same, "etp": on_etp})
        here_slot = _sent_slot(stored, name, "here", {"node": same, "local": same, "etp": on_etp})
        new_slots = [near_slot, here_slot]
        first = _fetch(source, near_slot, "node")
        second = [_fetch(near_slot.name, here_slot, "local")]
    else:
        here_slot = _sent_slot(stored, name, "here", {"ep": same, "etp": on_etp})
        new_slots = [here_slot]
        first = _fetch(source, here_slot, "ep")
        second = []

    # The first movement comes before the first expert task, whose computing hides it. The second,
    # which waits for the first, comes just before the first task that reads its weights.
    tasks = list[Task]()
    is_first_placed = False
    for task in program.tasks:
        if task.op is Op.EXPERT and not is_first_placed:
            tasks.append(first)
            is_first_placed = True
        if task.op is Op.EXPERT and task.name.endswith(SUFFIX):  # computes replicated copies
            tasks += second
            second = []  # now it is placed
            reads = tuple(here_slot.name if read == source else read for read in task.reads)
            task = replace(task, reads=reads)
        tasks.append(task)
    return replace(program, slots=(*program.slots, *new_slots), tasks=tuple(tasks))
