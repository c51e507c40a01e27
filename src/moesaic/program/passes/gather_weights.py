"""Adaptive r: gathers expert weights, all or in part, instead of sending tokens, without changing
how weights are stored.

Tutel (Hwang et al., MLSys 2023), section 4.1. Each expert is stored in etp shards.

- r = etp: every token visits all shards, and no weights move.
- 1 <= r < etp: groups of etp / r neighbours gather their shards and split the tokens, so a token
  visits r ranks.
- r = 0: every rank gathers all experts of its replica, and tokens stay on their rank.

Gradients are reduced back to the stored shards.

A slot is a named value of the program, `w` the stored weights. Its layout says of which origins
(`spread`, axes) and experts it has rows, its state how its values on the ranks of an axis relate
(`task.py`).
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import (
    ONCE,
    Kind,
    Lane,
    Layout,
    Op,
    Program,
    Slot,
    Stage,
    State,
    Task,
    Which,
)


def gather_weights(program: Program, r: int, grid: Grid) -> tuple[Program, Grid]:
    """Return the program for a value of r, and the grid to run it on (with etp factored).

    Args:
        program: a forward program to which no r was applied yet.
        r: number of shards of an expert that a token visits: 0 or a divisor of etp; etp returns the
            program unchanged.

    Raises:
        InputError: for another r, or for a program in which r cannot change.
    """
    if r < 0 or (r > 0 and grid.etp % r):
        divisors = [size for size in range(1, grid.etp + 1) if grid.etp % size == 0]
        raise InputError(
            f"plan.gather_weights={r} does not divide mesh.etp={grid.etp}: choose 0 or one of "
            f"{divisors}"
        )
    if r == grid.etp:
        return program, grid
    tokens = [slot for slot in program.slots if slot.kind is Kind.TOKENS]
    if any(slot.on("etp") is State.IDENTICAL for slot in tokens):
        raise InputError(
            f"gather_weights clashes with {program.name}, under which all shards of an expert get "
            f"the same tokens: choose plan.gather_weights={grid.etp}, or the schedule s1, s2 or s3"
        )
    if r == 0:
        if any(slot.layout.flow in ONCE for slot in program.slots):
            raise InputError(
                "gather_weights=0 clashes with multicast: no token is sent, so there is nothing "
                "to multicast: choose plan.all_to_all=linear"
            )
        at_home = _stay_home(program)
        return _fetch(at_home, group=("ep", "etp"), spread=("etp",), suffix="r=0"), grid
    factored = replace(grid, etp_inner=grid.etp // r)
    visiting = _visit_outer(program)
    inner: tuple[Axis, ...] = ("etp_inner",)
    return _fetch(visiting, group=inner, spread=inner, suffix=f"r={r}"), factored


def _visit_outer(program: Program) -> Program:
    """Restrict the movements of rows to etp_outer, in place of etp."""

    def outer(axis: Axis) -> Axis:
        return "etp_outer" if axis == "etp" else axis

    slots = list[Slot]()
    for slot in program.slots:
        if slot.kind is not Kind.WEIGHT:
            spread = tuple(outer(axis) for axis in slot.layout.spread)
            state = tuple((outer(axis), value) for axis, value in slot.state)
            slot = replace(slot, layout=replace(slot.layout, spread=spread), state=state)
        slots.append(slot)

    weights = {slot.name for slot in program.slots if slot.kind is Kind.WEIGHT}
    tasks = list[Task]()
    for task in program.tasks:
        if task.writes[0] not in weights:
            task = replace(task, group=tuple(outer(axis) for axis in task.group))
        tasks.append(task)
    return replace(program, slots=tuple(slots), tasks=tuple(tasks))


def _stay_home(program: Program) -> Program:
    """Remove all movements of rows to experts and back, so that every rank has its own rows for all
    experts."""
    slots = list[Slot]()
    for slot in program.slots:
        if slot.kind is not Kind.WEIGHT:
            spread = tuple(axis for axis in slot.layout.spread if axis not in ("ep", "etp"))
            layout = replace(slot.layout, spread=spread, experts="all")
            state = tuple((axis, value) for axis, value in slot.state if axis not in ("ep", "etp"))
            slot = replace(slot, layout=layout, state=state)
        slots.append(slot)

    weights = {slot.name for slot in slots if slot.kind is Kind.WEIGHT}
    source_of: dict[str, str] = {}  # a slot that is left out -> the slot that replaces it
    tasks = []
    for task in program.tasks:
        reads = tuple(source_of.get(name, name) for name in task.reads)
        travels = (
            task.op is Op.MOVE
            and task.writes[0] not in weights
            and {"ep", "etp"}.intersection(task.group)
        )
        if travels:
            source_of[task.writes[0]] = reads[0]
        else:
            tasks.append(replace(task, reads=reads))
    remaining = tuple(slot for slot in slots if slot.name not in source_of)
    return replace(program, slots=remaining, tasks=tuple(tasks))


def _fetch(
    program: Program, group: tuple[Axis, ...], spread: tuple[Axis, ...], suffix: str
) -> Program:
    """Make the experts read weights that were gathered over `group`.

    Args:
        spread: axes whose ranks' shards are gathered.
        suffix: added to the program's name.
    """
    gathers_experts = "ep" in group
    experts: Which = "all" if gathers_experts else "rank"
    replicated = tuple((axis, State.REPLICATED) for axis in sorted(group))
    layout = Layout(flow="weights", spread=spread, experts=experts)
    full = Slot(name="w_full", kind=Kind.WEIGHT, layout=layout, state=replicated)
    lane = Lane.INTER if gathers_experts else Lane.INTRA
    move = Task(
        name="w_full",
        op=Op.MOVE,
        reads=("w",),
        writes=("w_full",),
        stage=Stage.DISPATCH,
        lane=lane,
        group=group,
    )
    slots = list[Slot]()
    for slot in program.slots:
        if slot.name == "b_shards" and gathers_experts:  # the bias that expert tasks read
            slot = _shared_bias(slot)
        slots.append(slot)
    tasks = []
    for task in program.tasks:
        if task.op is Op.EXPERT:
            reads = tuple("w_full" if name == "w" else name for name in task.reads)
            task = replace(task, reads=reads)
        elif task.writes == ("b_shards",) and gathers_experts:  # brings all experts' bias too
            task = replace(task, group=("ep", "etp"), lane=lane)
        tasks.append(task)
    name = f"{program.name}, {suffix}"
    return replace(program, name=name, slots=(*slots, full), tasks=(move, *tasks))


def _shared_bias(slot: Slot) -> Slot:
    """Return the slot of all experts' bias, in place of the bias of the rank's own experts."""
    state: tuple[tuple[Axis, State], ...] = (("ep", State.REPLICATED), ("etp", State.REPLICATED))
    return replace(slot, layout=replace(slot.layout, experts="all"), state=state)
