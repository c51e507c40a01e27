"""Lowering: a movement over ep becomes a pack, the hops of an all-to-all algorithm, and an unpack.

Lowering and codecs run after the transpose, separately for each direction. They change how rows are
sent, not which.

Packing sorts rows into packets, one per target rank. A hop is one round of messages; it forwards
the packets that earlier hops brought. A slot is a named value of the program (`task.py`).
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.codecs import is_coded
from moesaic.errors import InputError
from moesaic.program.all_to_all import ALL_TO_ALLS, Linear
from moesaic.program.all_to_all.all_to_all import PACKED, Hop, NodeMap, check_link
from moesaic.program.grid import Grid
from moesaic.program.task import Kind, Lane, Op, Program, Slot, Task


def route_all_to_all(program: Program, algorithm: str, grid: Grid) -> Program:
    """Return the program with every movement of rows over ep or between nodes lowered to an
    all-to-all algorithm.

    Args:
        program: a forward or backward program, not lowered yet.
        algorithm: a name in `ALL_TO_ALLS`. "linear" returns the program unchanged: a movement
            without a codec is linear.

    Raises:
        InputError: for an unknown algorithm, or if the algorithm needs even groups and they are
            uneven over the nodes.
    """
    if algorithm not in ALL_TO_ALLS:
        raise InputError(
            f"plan.all_to_all={algorithm!r} is unknown: choose one of {', '.join(ALL_TO_ALLS)}"
        )
    if isinstance(ALL_TO_ALLS[algorithm], Linear):
        return program
    groups = [task.group for task in program.tasks if is_long(program, task)]
    for group in dict.fromkeys(groups):  # each once
        check_link(ALL_TO_ALLS[algorithm], algorithm, grid, group)
    slots: list[Slot] = list(program.slots)
    tasks: list[Task] = []
    for task in program.tasks:
        if is_long(program, task):
            lowered, new_slots = lower(program, task, link=algorithm, codec="", grid=grid)
            tasks += lowered
            slots += new_slots
        else:
            tasks.append(task)
    return replace(
        program, name=f"{program.name}, {algorithm}", slots=tuple(slots), tasks=tuple(tasks)
    )


def compress(program: Program, codec: str, grid: Grid) -> Program:
    """Return the program with the rows of every movement over ep or between nodes encoded in
    transit.

    ScheMoE (Shi et al., EuroSys 2024), section 3. Routing weights and indices are not encoded.
    Results that are summed are decoded first and summed in float32.

    Args:
        program: a forward or backward program; routed already, or not.
        codec: name of a codec; "none" returns the program unchanged.
    """
    if not is_coded(codec):
        return program
    kinds = {slot.name: slot.kind for slot in program.slots}
    slots: list[Slot] = list(program.slots)
    tasks: list[Task] = []
    for task in program.tasks:
        if task.op in (Op.PACK, Op.UNPACK) and task.of and kinds[task.of[0]] is Kind.ROWS:
            tasks.append(replace(task, codec=codec))
        elif is_long(program, task) and kinds[task.reads[0]] is Kind.ROWS:
            lowered, new_slots = lower(program, task, link="linear", codec=codec, grid=grid)
            tasks += lowered
            slots += new_slots
        else:
            tasks.append(task)
    return replace(program, name=f"{program.name}, {codec}", slots=tuple(slots), tasks=tuple(tasks))


def is_long(program: Program, task: Task) -> bool:
    """Return whether a task moves rows over ep or between nodes."""
    source = program.slot(task.reads[0])
    return (
        task.op is Op.MOVE
        and source.kind is not Kind.WEIGHT
        and bool({"ep", "node"}.intersection(task.group))
    )


def lower(
    program: Program, task: Task, link: str, codec: str, grid: Grid
) -> tuple[list[Task], list[Slot]]:
    """Return the tasks that perform a movement, and the slots between them.

    Args:
        task: the movement.
        link: name of the all-to-all algorithm in `ALL_TO_ALLS`.
        codec: name of the codec of rows in transit; "" for none.
    """
    source = task.reads[0]
    target = task.writes[0]
    # Any group will do: `check_link` saw that all have the same hops.
    node_map = NodeMap(grid, grid.group(0, task.group))
    hops: tuple[Hop, ...] = ALL_TO_ALLS[link].hops(node_map)
    packed = f"{target}@pack"
    hop_names = [f"{target}@{number}" for number in range(len(hops))]
    common = replace(task, link=link, of=(source, target))
    tasks = [
        replace(
            common,
            name=packed,
            op=Op.PACK,
            writes=(packed,),
            codec=codec,
            lane=Lane.COMPUTE,
            group=task.group,
        )
    ]
    for number, hop in enumerate(hops):
        reads = tuple(packed if read == PACKED else hop_names[read] for read in hop.reads)
        name = hop_names[number]
        tasks.append(
            replace(
                common, name=name, op=Op.HOP, reads=reads, writes=(name,), hop=number, lane=hop.lane
            )
        )
    # The rows that a rank sends itself stay in the packed slot, so unpacking reads all of these.
    names = (packed, *hop_names)
    tasks.append(replace(common, op=Op.UNPACK, reads=names, codec=codec, lane=Lane.COMPUTE))
    layout = program.slot(source).layout
    state = program.slot(source).state
    slots = [Slot(name=name, kind=Kind.PACKETS, layout=layout, state=state) for name in names]
    return tasks, slots
