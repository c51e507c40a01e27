"""`Slot`, `Task`, `Program`: what a layer does, as data. No tensors, no process groups, no callables.

A program is rank-free: every rank runs the same one. A group is a tuple of axes; sizes come from flows, which `sizes.py`
binds to a rank. Each slot carries a state per axis, from which the transpose follows (`transpose.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from moesaic.program.grid import Axis

Flow = Literal["copies", "tokens", "node_tokens", "rank_tokens", "weights", "bias"]
ONCE: tuple[Flow, ...] = ("node_tokens", "rank_tokens")
"""Flows in which a token goes to a place once, whatever the number of its copies there."""
Which = Literal["all", "rank", "node"]
WHICH: tuple[Which, ...] = ("all", "rank", "node")
NamedChunk = Literal["replicated", "here", "near"]
Chunk = int | NamedChunk

INDEX_BYTES = 4
"""Of an index on its way: an int32."""


class State(str, Enum):
    """How a slot's values relate across the ranks of an axis."""

    SHARDED = "S"
    """Each rank has values of its own."""
    REPLICATED = "R"
    """All ranks have the same values and use them differently: their cotangents are partial."""
    PARTIAL = "P"
    """The value is the sum over the ranks."""
    IDENTICAL = "I"
    """All ranks have the same values and use them the same way: their cotangents are identical too."""

    @property
    def dual(self) -> State:
        """The state of the cotangent."""
        return {State.REPLICATED: State.PARTIAL, State.PARTIAL: State.REPLICATED}.get(self, self)


class Kind(str, Enum):
    """What a slot holds."""

    TOKENS = "tokens"
    """(tokens, dim) in the order of the layer's input."""
    ROWS = "rows"
    """(rows, dim): token copies."""
    LANE = "lane"
    """(rows, 1): a scalar that travels with each row in float32 or more, the routing weight."""
    INDEX = "index"
    """(rows, 1) integers: the place of each copy's token among its origin's tokens. It has no cotangent, and travels in
    `INDEX_BYTES` a row."""
    WEIGHT = "weight"
    """The experts' parameters, as their module stores them; a movement packs them into rows."""
    PACKETS = "packets"
    """Messages on their way, each with its origin and destination. They exist in lowered programs only."""


class Op(str, Enum):
    """What a task does. Movements differ in states and layouts only; the executor has one implementation for all."""

    PERMUTE = "permute"
    """tokens, visits or stops, index -> rows: copy each token to its rows."""
    COMBINE = "combine"
    """rows, index -> tokens: sum each token's rows. The transpose of permute."""
    MOVE = "move"
    """Rows to another layout, over a group; sums where the source is partial and the target is not."""
    SCALE = "scale"
    """Multiply by the size of the group to the power `power`; the transpose uses `dual_power`."""
    ADD = "add"
    """Sum of slots of one layout."""
    TAKE = "take"
    """One slot into its chunks."""
    JOIN = "join"
    """Chunks into one slot. The transpose of take."""
    EXPERT = "expert"
    """rows, gates, weights -> rows: the rank's experts, each result times its gate."""
    EXPERT_GRAD = "expert_grad"
    """cotangent, rows, gates, weights -> cotangents of rows, gates and weights."""
    PACK = "pack"
    """rows -> packets: what a movement sends, message by message, encoded. Lowered programs only."""
    HOP = "hop"
    """packets -> packets: one stretch of their way. Lowered programs only."""
    UNPACK = "unpack"
    """packets -> rows: decoded and, where the movement sums, summed. Lowered programs only."""


class Lane(str, Enum):
    """Where a task runs; tasks of one lane run one after the other."""

    COMPUTE = "compute"
    INTRA = "intra"
    INTER = "inter"
    HOST = "host"


class Stage(str, Enum):
    """Which part of the layer a task belongs to."""

    ROUTE = "route"
    DISPATCH = "dispatch"
    EXPERT = "expert"
    COMBINE = "combine"


class FlowSpec(NamedTuple):
    """How the pieces of a flow are told apart."""

    origins: tuple[Axis, ...] | None
    """Axes on which the origin of a run has a place; None: it is a rank."""
    homes: tuple[Axis, ...]
    """Axes on which what a run is bound for has a place within a copy of the experts."""
    is_per_expert: bool
    """There is a run for every expert at such a place; else one for the place."""
    is_cut: bool
    """Runs are cut into chunks."""


FLOWS: dict[Flow, FlowSpec] = {
    "copies": FlowSpec(None, ("ep",), is_per_expert=True, is_cut=True),
    "tokens": FlowSpec(None, (), is_per_expert=False, is_cut=False),
    "node_tokens": FlowSpec(None, ("node",), is_per_expert=False, is_cut=True),
    "rank_tokens": FlowSpec(None, ("ep",), is_per_expert=False, is_cut=True),
    "weights": FlowSpec(("etp",), ("ep",), is_per_expert=True, is_cut=False),
    "bias": FlowSpec((), ("ep",), is_per_expert=True, is_cut=False),
}
"""Pieces rank by rank (`program/sizes.py`) and those counted by symmetry (`cost/symmetry.py`) both follow this table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which rows a slot holds on a rank, and in which order: experts ascending, within one by origin, then by chunk.

    The rows that one rank (the origin) contributes for one expert are a run; a run may be cut into chunks. Every layout
    is a list of whole pieces (origin, expert, chunk), so a movement is a matching of pieces.
    """

    flow: Flow = "copies"
    """copies: token copies bound for experts. tokens: the tokens themselves (then there is one "expert"). visits: a
    token once per node on which it has a copy (the "expert" is the node). stops: a token once per place of ep at which it
    has a copy (the "expert" is the place). weights: hidden units of experts (the origin
    is the shard). bias: what the shards of an expert hold in common, a row an expert."""
    spread: tuple[Axis, ...] = ()
    """Origins: all ranks of the group over these sparse axes; () for the rank itself."""
    whole_tp: bool = False
    """Each origin stands for its whole tensor group."""
    experts: Which = "all"
    """Only the experts that live on the rank, or on its node; else all."""
    chunk: Chunk | None = None
    """Only this chunk of each run; "replicated": the chunks after these, one for each rank of ep that helps; "here": the one of
    these that the rank itself computes. "near", of weights: what replicated copies need on its node, of the experts
    whose home has its place on some node. Else all."""
    step: tuple[int, int] | None = None
    """(j, n): the ranks of ep form n groups; only runs whose expert lives j groups after their origin. Else all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A named value."""

    name: str
    kind: Kind
    layout: Layout
    state: tuple[tuple[Axis, State], ...] = ()
    """Per axis; an axis that is not listed is sharded."""

    def on(self, axis: Axis) -> State:
        """Return the state on an axis."""
        return dict(self.state).get(axis, State.SHARDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One step."""

    name: str
    op: Op
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stage: Stage
    lane: Lane = Lane.COMPUTE
    group: tuple[Axis, ...] = ()
    """Axes over which a movement goes, or whose size a scale takes."""
    link: str = ""
    """Of a lowered movement: the name of its all-to-all in `ALL_TO_ALLS`."""
    codec: str = ""
    """Of a pack or unpack: the name of its codec, "" for none; of a move whose kernel codes rows on the way, the same."""
    hop: int = 0
    """Of a hop: which one of the all-to-all's."""
    of: tuple[str, str] | None = None
    """Of a pack, hop or unpack: source and target slot of the movement that it is a part of; of a move by a kernel that needs
    no copies before and after it, its own."""
    power: int = 0
    """Of a scale."""
    dual_power: int = 0
    """Of its transpose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A list of tasks in a legal order, the slots they read and write, and what goes in and comes out."""

    name: str
    slots: tuple[Slot, ...]
    tasks: tuple[Task, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __hash__(self) -> int:
        """A cheap one: programs are looked up in every call of a layer, and few of one name are alive."""
        return hash((self.name, len(self.tasks)))

    @property
    def routes_slices(self) -> bool:
        """Of a forward program: whether each rank of a tensor group routes a slice of the group's tokens, as under S1."""
        return self.slot("x").on("tp") is State.IDENTICAL and self.slot("gates").on("tp") is State.SHARDED

    @property
    def is_redundant(self) -> bool:
        """Whether every rank of a tensor group sends all tokens of the group, as under the baseline."""
        indices = [slot for slot in map(self.slot, self.inputs) if slot.kind is Kind.INDEX]
        return any(slot.on("tp") is State.IDENTICAL and not slot.layout.whole_tp for slot in indices)

    @property
    def delivers_at_once(self) -> bool:
        """Whether rows go to all shards of their experts in one movement over ep and etp, and sums come back in one."""
        rows = [task for task in self.moves() if self.slot(task.reads[0]).kind is Kind.ROWS and "ep" in task.group]
        return [task.group for task in rows] == [("ep", "etp")] * 2

    def slot(self, name: str) -> Slot:
        """Return a slot by name."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(name)

    def moves(self) -> tuple[Task, ...]:
        """Return the tasks that move bytes between ranks, or would on a larger mesh."""
        return tuple(task for task in self.tasks if task.op is Op.MOVE)
