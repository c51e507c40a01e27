"""Builds a program task by task, so that the code of a schedule reads like its description in the
paper.

Each method of `Builder` adds one task and the slot that it writes, a named value, and returns the
slot's name; the arguments are names of slots too. A slot has a layout, which says which rows it has
on each rank, and a state per axis, which says how its values on the ranks of the axis relate: S
sharded, R replicated, P partial, I identical (`task.py`).
"""

from __future__ import annotations

from moesaic.program.grid import Axis
from moesaic.program.task import Flow, Kind, Lane, Layout, Op, Program, Slot, Stage, State, Task

States = dict[Axis, State]
AT_EXPERTS = Layout(spread=("ep", "etp"), experts="rank")
"""Layout of rows at the ranks of their experts, all shards included."""


class Builder:
    """Collects the slots and tasks of a program.

    Args:
        bias: whether the experts also have parameters that their shards share.
    """

    def __init__(self, name: str, bias: bool = False) -> None:
        self.name = name
        self._bias = bias
        self._slots: dict[str, Slot] = {}
        self._tasks: list[Task] = []
        self._inputs: list[str] = []

    def input(self, name: str, kind: Kind, layout: Layout, states: States) -> str:
        """Declare an input slot."""
        self._inputs.append(name)
        return self._slot(name, kind, layout, states)

    def permute(
        self, tokens: str, index: str, name: str, layout: Layout, states: States | None = None
    ) -> str:
        """Copy tokens to rows, one for each entry of an index.

        Args:
            tokens: the slot of the tokens.
            index: the slot that says which token each row is.
            name: of the slot of the rows.
            layout: of the rows.
            states: of the rows, if ranks with the same tokens take different rows. None: those of
                the tokens.
        """
        row_states = self._states(tokens) if states is None else states
        return self._task(
            Op.PERMUTE,
            (tokens, index),
            name=name,
            kind=Kind.ROWS,
            layout=layout,
            states=row_states,
            stage=Stage.DISPATCH,
        )

    def combine(
        self, rows: str, index: str, name: str, layout: Layout, states: States | None = None
    ) -> str:
        """Sum rows to tokens, the inverse of `permute`.

        Args:
            rows: the slot of the rows.
            index: the slot that says which token each row is.
            name: of the slot of the sums.
            layout: of the sums.
            states: of the sums, if ranks sum different rows into the same tokens. None: those of
                the rows.
        """
        kind = Kind.TOKENS if layout.flow == "tokens" else Kind.ROWS
        summed_states = self._states(rows) if states is None else states
        return self._task(
            Op.COMBINE,
            (rows, index),
            name=name,
            kind=kind,
            layout=layout,
            states=summed_states,
            stage=Stage.COMBINE,
        )

    def expert(self, rows: str, gates: str, name: str) -> str:
        """Run the experts. Rows and gates are replicated over etp, the results are partial sums
        over etp."""
        weights = [self.input("w", Kind.WEIGHT, Layout(flow="weights", experts="rank"), {})]
        if self._bias:
            layout = Layout(flow="bias", experts="rank")
            bias = self.input("b", Kind.WEIGHT, layout, {"etp": State.IDENTICAL})
            # No rank sends anything; the transpose adds up what the shards contribute.
            bias_of_shards = self.move(
                bias,
                "b_shards",
                layout,
                group=("etp",),
                states={"etp": State.REPLICATED},
                stage=Stage.DISPATCH,
            )
            weights.append(bias_of_shards)
        states = self._states(rows) | {"etp": State.PARTIAL}
        reads = (rows, gates, *weights)
        return self._task(
            Op.EXPERT,
            reads,
            name=name,
            kind=Kind.ROWS,
            layout=self._slots[rows].layout,
            states=states,
            stage=Stage.EXPERT,
        )

    def move(
        self,
        source: str,
        name: str,
        layout: Layout,
        group: tuple[Axis, ...],
        states: States,
        stage: Stage,
    ) -> str:
        """Move rows to another layout over `group`.

        Args:
            source: the slot that is read.
            name: of the slot that is written.
            layout: of that slot.
            group: axes over which ranks exchange.
            states: the states that change.
            stage: the part of the layer to which the movement belongs.
        """
        kind = self._slots[source].kind
        merged = self._states(source) | states
        return self._task(
            Op.MOVE,
            (source,),
            name=name,
            kind=kind,
            layout=layout,
            states=merged,
            stage=stage,
            group=group,
        )

    def vary(self, source: str, name: str, axis: Axis) -> str:
        """Treat identical copies as different values: the identity forward, a multiplication by the
        axis's size backward."""
        return self._scale(source, name, axis, State.SHARDED, Stage.DISPATCH, dual_power=1)

    def agree(self, source: str, name: str, axis: Axis) -> str:
        """Treat redundantly computed copies as one value: the identity forward, a division by the
        axis's size backward."""
        return self._scale(source, name, axis, State.IDENTICAL, Stage.COMBINE, dual_power=-1)

    def flow(self, name: str) -> Flow:
        """Return the flow of a slot."""
        return self._slots[name].layout.flow

    def build(self, *outputs: str) -> Program:
        """Return the program with the given output slots."""
        return Program(
            name=self.name,
            slots=tuple(self._slots.values()),
            tasks=tuple(self._tasks),
            inputs=tuple(self._inputs),
            outputs=outputs,
        )

    def _scale(
        self, source: str, name: str, axis: Axis, state: State, stage: Stage, dual_power: int
    ) -> str:
        """Add a task that is the identity forward and whose transpose multiplies by the size of
        `axis`, raised to `dual_power`. The state on `axis` becomes `state`."""
        slot = self._slots[source]
        states = self._states(source) | {axis: state}
        return self._task(
            Op.SCALE,
            (source,),
            name=name,
            kind=slot.kind,
            layout=slot.layout,
            states=states,
            stage=stage,
            group=(axis,),
            dual_power=dual_power,
        )

    def _task(
        self,
        op: Op,
        reads: tuple[str, ...],
        name: str,
        kind: Kind,
        layout: Layout,
        states: States,
        stage: Stage,
        group: tuple[Axis, ...] = (),
        dual_power: int = 0,
    ) -> str:
        """Add a task and the slot that it writes; return the slot's name. The arguments are the
        fields of `Task` and `Slot`."""
        self._slot(name, kind, layout, states)
        lane = Lane.COMPUTE
        if op is Op.MOVE:  # groups over other axes than these count as inside nodes
            lane = Lane.INTER if {"ep", "node"}.intersection(group) else Lane.INTRA
        self._tasks.append(
            Task(
                name=name,
                op=op,
                reads=reads,
                writes=(name,),
                stage=stage,
                lane=lane,
                group=group,
                dual_power=dual_power,
            )
        )
        return name

    def _states(self, name: str) -> States:
        """Return the states of a slot by axis."""
        return dict(self._slots[name].state)

    def _slot(self, name: str, kind: Kind, layout: Layout, states: States) -> str:
        """Add a slot, an input or what a task writes, with its states but for the default, sharded;
        return its name."""
        assert name not in self._slots, f"slot {name} is written twice"
        listed = tuple(
            sorted((axis, state) for axis, state in states.items() if state is not State.SHARDED)
        )
        self._slots[name] = Slot(name=name, kind=kind, layout=layout, state=listed)
        return name


def declare(
    build: Builder,
    tokens: Layout,
    copies: Layout,
    states: States,
    gate_states: States | None = None,
) -> tuple[str, str, str]:
    """Declare the inputs of every schedule: tokens `x`, routing weights `gates`, and `index`, the
    token of each copy.

    Args:
        tokens: layout of `x`.
        copies: layout of `gates` and `index`.
        states: of `x`.
        gate_states: of `gates` and `index`; None: those of `x`.
    """
    copy_states = states if gate_states is None else gate_states
    return (
        build.input("x", Kind.TOKENS, tokens, states),
        build.input("gates", Kind.LANE, copies, copy_states),
        build.input("index", Kind.INDEX, copies, copy_states),
    )


def deliver(
    build: Builder,
    rows: str,
    gates: str,
    *,
    at_experts: Layout = AT_EXPERTS,
    group: tuple[Axis, ...] = ("ep", "etp"),
) -> str:
    """Send rows and gates to all shards of their experts (S -> R over etp) and run the experts (->
    P).

    Args:
        at_experts: layout of rows and gates at the experts.
        group: axes over which they must still move to be there.
    """
    shards: States = {"etp": State.REPLICATED}
    rows_there = build.move(rows, "h", at_experts, group=group, states=shards, stage=Stage.DISPATCH)
    gates_there = build.move(
        gates, "g", at_experts, group=group, states=shards, stage=Stage.DISPATCH
    )
    return build.expert(rows_there, gates_there, "out")


def collect(build: Builder, out: str, layout: Layout) -> str:
    """Return the shards' partial results to the origins and sum them there (P -> S over etp)."""
    return build.move(
        out, "z", layout, group=("ep", "etp"), states={"etp": State.SHARDED}, stage=Stage.COMBINE
    )
