"""`Slot`, `Task` and `Program` describe what a layer does, as data: no tensors, no process groups,
no callables.

A program does not depend on the rank: all ranks run the same one. A group is a tuple of axes. Row
counts follow from a slot's layout, which `sizes.py` evaluates per rank. Each slot has a state per
axis, from which the backward program is derived (`transpose.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from moesaic.program.grid import Axis

Flow = Literal["copies", "tokens", "node_tokens", "rank_tokens", "weights", "bias"]
ONCE: tuple[Flow, ...] = ("node_tokens", "rank_tokens")
"""Flows in which a token is sent to a destination once, however many of its copies are computed
there."""
Which = Literal["all", "rank", "node"]
NamedChunk = Literal["replicated", "here", "near"]
HELPERS: tuple[NamedChunk, ...] = ("near", "here")
"""Chunks that only ranks hold which help with replicated experts, or which pass on what helpers
need."""
Chunk = int | NamedChunk

INDEX_BYTES = 4
"""Bytes per index in a message: indices travel as int32."""


class State(str, Enum):
    """How the values of a slot on the ranks of one axis relate to each other."""

    SHARDED = "S"
    """Each rank has its own values."""
    REPLICATED = "R"
    """All ranks have the same values and use them differently, so their cotangents are partial."""
    PARTIAL = "P"
    """The value is the sum over the ranks."""
    IDENTICAL = "I"
    """All ranks have the same values and use them in the same way, so their cotangents are
    identical too."""

    @property
    def dual(self) -> State:
        """The state of the cotangent on the same axis."""
        return {State.REPLICATED: State.PARTIAL, State.PARTIAL: State.REPLICATED}.get(self, self)


class Kind(str, Enum):
    """What a slot holds."""

    TOKENS = "tokens"
    """(tokens, dim), in the order of the layer's input."""
    ROWS = "rows"
    """(rows, dim), one row per token copy."""
    LANE = "lane"
    """(rows, 1): one scalar per row, the routing weight, sent in float32 or a wider type."""
    INDEX = "index"
    """(rows, 1) integers: for each copy, the position of its token among its origin's tokens. An
    index has no cotangent and takes `INDEX_BYTES` per row in messages."""
    WEIGHT = "weight"
    """Parameters of the experts in the layout of their module. Movements pack them into rows."""
    PACKETS = "packets"
    """Messages in transit, each with its origin and destination. Only lowered programs have such
    slots."""


class Op(str, Enum):
    """What a task does. All movements are one operation, since they differ only in states and
    layouts."""

    PERMUTE = "permute"
    """tokens, index -> rows: copy each token to its rows."""
    COMBINE = "combine"
    """rows, index -> tokens: sum the rows of each token. The transpose of permute."""
    MOVE = "move"
    """Move rows to another layout over a group of ranks; sum them if the source is partial and the
    target is not."""
    SCALE = "scale"
    """Multiply by the size of the group raised to `power`. The transpose uses `dual_power`
    instead."""
    ADD = "add"
    """Sum slots of equal layout."""
    TAKE = "take"
    """Split one slot into its chunks."""
    JOIN = "join"
    """Concatenate chunks into one slot. The transpose of take."""
    EXPERT = "expert"
    """rows, gates, weights -> rows: run the rank's experts and multiply each result by its routing
    weight."""
    EXPERT_GRAD = "expert_grad"
    """cotangent, rows, gates, weights -> the cotangents of rows, gates and weights."""
    PACK = "pack"
    """rows -> packets: sort the rows of a movement into messages and encode them. Only in lowered
    programs."""
    HOP = "hop"
    """packets -> packets: one round of messages of an all-to-all. Only in lowered programs."""
    UNPACK = "unpack"
    """packets -> rows: decode the messages and sum them if the movement sums. Only in lowered
    programs."""


class Lane(str, Enum):
    """The resource on which a task runs. Tasks of one lane run one after the other."""

    COMPUTE = "compute"
    INTRA = "intra"
    INTER = "inter"
    HOST = "host"


class Stage(str, Enum):
    """The part of the layer to which a task belongs."""

    ROUTE = "route"
    DISPATCH = "dispatch"
    EXPERT = "expert"
    COMBINE = "combine"


class FlowSpec(NamedTuple):
    """How the pieces of a flow are indexed."""

    origins: tuple[Axis, ...] | None
    """Axes whose coordinate is the origin of a run. None: the origin is a rank. (): there is one
    origin."""
    homes: tuple[Axis, ...]
    """Axes whose coordinates, within one replica of the experts, give the destination of a run."""
    is_per_expert: bool
    """Whether each expert at a destination has its own run. If False, there is one run per
    destination."""
    is_cut: bool
    """Whether runs are cut into chunks."""


FLOWS: dict[Flow, FlowSpec] = {
    "copies": FlowSpec(None, ("ep",), is_per_expert=True, is_cut=True),
    "tokens": FlowSpec(None, (), is_per_expert=False, is_cut=False),
    "node_tokens": FlowSpec(None, ("node",), is_per_expert=False, is_cut=True),
    "rank_tokens": FlowSpec(None, ("ep",), is_per_expert=False, is_cut=True),
    "weights": FlowSpec(("etp",), ("ep",), is_per_expert=True, is_cut=False),
    "bias": FlowSpec((), ("ep",), is_per_expert=True, is_cut=False),
}
"""The one definition of each flow, used for pieces per rank (`program/sizes.py`) and for pieces
counted by symmetry (`planner/symmetry.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which rows a slot holds on a rank, and in which order.

    The rows that one rank (the origin) contributes for one expert are a run. A run may be cut into
    chunks. A piece is (origin, expert, chunk). A layout is a list of whole pieces, sorted by
    expert, then origin, then chunk. A movement matches the pieces of two layouts.
    """

    flow: Flow = "copies"
    """What the rows are:

    - copies: token copies, one per chosen expert.
    - tokens: the tokens themselves, one run per origin.
    - node_tokens: each token once per node on which it has a copy; the node stands for the expert.
    - rank_tokens: each token once per ep rank on which it has a copy; the ep rank stands for the
      expert.
    - weights: hidden units of experts; the etp rank is the origin.
    - bias: the parameters that all shards of an expert share, one row per expert."""
    spread: tuple[Axis, ...] = ()
    """Sparse axes: all ranks of the group over these axes are origins. (): only the rank itself
    is."""
    whole_tp: bool = False
    """Whether each origin stands for all ranks of its tensor-parallel group."""
    experts: Which = "all"
    """Which experts: those stored on the rank ("rank"), those on its node ("node"), or all."""
    chunk: Chunk | None = None
    """None: all chunks. A number: only this chunk of each run. "replicated": the chunks after the
    numbered ones, one for each ep rank that computes replicated copies. "here": of those, the one
    that this rank computes. "near", for weights only: those that replicated copies on the rank's
    node need, of experts whose home is this rank's counterpart on some node."""
    step: tuple[int, int] | None = None
    """(j, n): the ep ranks form n groups, and only runs are included whose expert lives j groups
    after their origin. None: all runs."""

    @property
    def is_on_demand(self) -> bool:
        """Whether the rows are parameters of those experts only that helpers need in a call."""
        return self.chunk in HELPERS and self.flow in ("weights", "bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A named value of a program."""

    name: str
    kind: Kind
    layout: Layout
    state: tuple[tuple[Axis, State], ...] = ()
    """The state per axis. Axes that are not listed are sharded."""

    def on(self, axis: Axis) -> State:
        """Return the slot's state on an axis."""
        return dict(self.state).get(axis, State.SHARDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One operation of a program."""

    name: str
    op: Op
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stage: Stage
    lane: Lane = Lane.COMPUTE
    group: tuple[Axis, ...] = ()
    """For a move: the axes over which ranks exchange. For a scale: the axes that give the group
    size."""
    link: str = ""
    """For a lowered movement: the name of its algorithm in `ALL_TO_ALLS`."""
    codec: str = ""
    """For a pack, unpack, or a move by a kernel that encodes rows in transit: the name of the
    codec, "" for none."""
    hop: int = 0
    """For a hop: its number within the all-to-all."""
    of: tuple[str, str] | None = None
    """For a pack, hop or unpack: the source and target slots of the whole movement. Also set for a
    move by a kernel that needs no copies before and after it: the source and target slots of this
    move."""
    power: int = 0
    """For a scale: the exponent of the group size."""
    dual_power: int = 0
    """For a scale: the exponent in the transpose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Tasks in an order in which they may be issued, the slots they read and write, and the inputs
    and outputs."""

    name: str
    slots: tuple[Slot, ...]
    tasks: tuple[Task, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __hash__(self) -> int:
        """Hash the name and the number of tasks only: layers look programs up in every call, and
        few share a name."""
        return hash((self.name, len(self.tasks)))

    @property
    def routes_slices(self) -> bool:
        """Whether each rank of a tensor-parallel group routes a slice of its tokens, as under S1
        (forward programs only)."""
        return (
            self.slot("x").on("tp") is State.IDENTICAL
            and self.slot("gates").on("tp") is State.SHARDED
        )

    @property
    def is_redundant(self) -> bool:
        """Whether each rank of a tensor-parallel group sends all tokens of the group, as under the
        baseline."""
        inputs = [self.slot(name) for name in self.inputs]
        # Ranks have the same index, and each is an origin of its own.
        return any(
            slot.kind is Kind.INDEX
            and slot.on("tp") is State.IDENTICAL
            and not slot.layout.whole_tp
            for slot in inputs
        )

    @property
    def delivers_at_once(self) -> bool:
        """Whether one movement over ep and etp sends rows to all shards of their experts, and one
        returns the sums."""
        groups = [
            task.group
            for task in self.moves()
            if self.slot(task.reads[0]).kind is Kind.ROWS and "ep" in task.group
        ]
        return groups == [("ep", "etp"), ("ep", "etp")]

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a row per task, in the order of issue."""
        from moesaic.program.notebook import html_table

        heads = ("task", "op", "stage", "lane", "group", "reads", "codec")
        rows = []
        for task in self.tasks:
            group = "+".join(task.group)
            reads = ", ".join(task.reads)
            values = (task.op.value, task.stage.value, task.lane.value)
            rows.append((task.name, *values, group, reads, task.codec))
        return html_table(f"program: {self.name}, {len(rows)} tasks", heads, rows)

    def slot(self, name: str) -> Slot:
        """Return the slot called `name`."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(name)

    def moves(self) -> tuple[Task, ...]:
        """Return the tasks that move data between ranks, including those whose group has one rank
        on this mesh."""
        return tuple(task for task in self.tasks if task.op is Op.MOVE)
