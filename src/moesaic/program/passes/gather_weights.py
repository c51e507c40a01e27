"""Adaptive r: gathers expert weights, all or in part, instead of sending tokens, without changing
how weights are stored.

Tutel (Hwang et al., MLSys 2023), section 4.1. Each expert is stored in etp shards.

- r = etp: every token visits all shards, and no weights move.
- 1 <= r < etp: groups of etp / r neighbours gather their shards and split the tokens, so a token
  visits r ranks.
- r = 0: every rank gathers all experts of its replica, and tokens stay on their rank.

Gradients are reduced back to the stored shards.
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
        r: 0 or a divisor of etp; etp returns the program unchanged.

    Raises:
        InputError: for another r, or for a program in which r cannot change.
    """
    if r < 0 or (r > 0 and grid.etp % r):
        divisors = [d for d in range(1, grid.etp + 1) if grid.etp % d == 0]
        raise InputError(
            f"plan.gather_weights={r} does not divide mesh.etp={grid.etp}: choose 0 or one of "
            f"{divisors}"
        )
    if r == grid.etp:
        return program, grid
    if any(slot.on("etp") is State.IDENTICAL for slot in program.slots if slot.kind is Kind.TOKENS):
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
        return _fetch(_stay_home(program), ("ep", "etp"), ("etp",), "r=0"), grid
    factored = replace(grid, etp_inner=grid.etp // r)
    return _fetch(_visit_outer(program), ("etp_inner",), ("etp_inner",), f"r={r}"), factored


def _visit_outer(program: Program) -> Program:
    """Restrict the movements of rows to etp_outer."""

    def renamed(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple("etp_outer" if axis == "etp" else axis for axis in axes)

    def changed(slot: Slot) -> Slot:
        """Return a slot whose rows are spread over the outer part of etp."""
        if slot.kind is Kind.WEIGHT:
            return slot
        state = tuple(("etp_outer" if axis == "etp" else axis, value) for axis, value in slot.state)
        return replace(
            slot, layout=replace(slot.layout, spread=renamed(slot.layout.spread)), state=state
        )

    weights = {slot.name for slot in program.slots if slot.kind is Kind.WEIGHT}
    tasks = tuple(
        task if task.writes[0] in weights else replace(task, group=renamed(task.group))
        for task in program.tasks
    )
    return replace(program, slots=tuple(map(changed, program.slots)), tasks=tasks)


def _stay_home(program: Program) -> Program:
    """Remove all movements of rows to experts and back."""

    def changed(slot: Slot) -> Slot:
        """Return a slot whose rows are spread over the outer part of etp."""
        if slot.kind is Kind.WEIGHT:
            return slot
        spread = tuple(axis for axis in slot.layout.spread if axis not in ("ep", "etp"))
        state = tuple((axis, value) for axis, value in slot.state if axis not in ("ep", "etp"))
        return replace(slot, layout=replace(slot.layout, spread=spread, experts="all"), state=state)

    slots = tuple(map(changed, program.slots))
    weights = {slot.name for slot in slots if slot.kind is Kind.WEIGHT}
    same: dict[str, str] = {}
    tasks = []
    for task in program.tasks:
        reads = tuple(same.get(name, name) for name in task.reads)
        travels = (
            task.op is Op.MOVE
            and task.writes[0] not in weights
            and {"ep", "etp"}.intersection(task.group)
        )
        if travels:
            same[task.writes[0]] = reads[0]
        else:
            tasks.append(replace(task, reads=reads))
    return replace(
        program, slots=tuple(slot for slot in slots if slot.name not in same), tasks=tuple(tasks)
    )


def _fetch(
    program: Program, group: tuple[Axis, ...], spread: tuple[Axis, ...], suffix: str
) -> Program:
    """Make the experts read weights that were gathered over `group`."""
    everywhere: Which = "all" if "ep" in group else "rank"
    gathered = tuple((axis, State.REPLICATED) for axis in sorted(group))
    layout = Layout(flow="weights", spread=spread, experts=everywhere)
    full = Slot(name="w_full", kind=Kind.WEIGHT, layout=layout, state=gathered)
    lane = Lane.INTER if "ep" in group else Lane.INTRA
    move = Task(
        name="w_full",
        op=Op.MOVE,
        reads=("w",),
        writes=("w_full",),
        stage=Stage.DISPATCH,
        lane=lane,
        group=group,
    )
    slots = [
        _shared_bias(slot) if slot.name == "b_shards" and everywhere == "all" else slot
        for slot in program.slots
    ]
    tasks = []
    for task in program.tasks:
        if task.op is Op.EXPERT:
            task = replace(
                task, reads=tuple("w_full" if name == "w" else name for name in task.reads)
            )
        elif task.writes == ("b_shards",) and everywhere == "all":
            task = replace(task, group=("ep", "etp"), lane=lane)
        tasks.append(task)
    name = f"{program.name}, {suffix}"
    return replace(program, name=name, slots=(*slots, full), tasks=(move, *tasks))


def _shared_bias(slot: Slot) -> Slot:
    """Return the slot of all experts' bias, in place of the bias of the rank's own experts."""
    state: tuple[tuple[Axis, State], ...] = (("ep", State.REPLICATED), ("etp", State.REPLICATED))
    return replace(slot, layout=replace(slot.layout, experts="all"), state=state)
