"""`Even`: rows and messages of a workload in which every rank does the same.

One actor stands for all ranks, or for the ranks with the same place in every block. The rows that
go from one rank to another are counted by digits (`symmetry.py`). The all-to-all algorithms' own
paths say which ranks their packets pass. The cost does not grow with the number of ranks.

A piece is the rows that one rank (their origin) contributes for one expert, which is stored on its
home; a flow is a kind of rows (`program/task.py`). Ranks are numbers of several digits, so that
every axis of the mesh is a set of digits, named by their places. The pieces that a layout holds on
a rank form a box: in its free digits the origins, or the homes, of these pieces take all values; in
its fixed digits they have the rank's own. A class of pairs stands for all pairs of ranks with equal
digits in the same places (`symmetry.py`). A block is a node, or the ranks behind a switch, and
stands for all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial

import numpy as np

from moesaic.planner.call_sizes import chunks_of, node_tokens_per_node
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.hops import HopPaths, Route, check_regular, hop_paths, route_of
from moesaic.planner.movement import (
    AbstractVolumes,
    Movement,
    connected_components,
    of_each,
    row_bytes,
)
from moesaic.planner.symmetry import (
    Digits,
    Pairs,
    UnlikeError,
    box_of,
    group_pairs_of_step,
    steps_of,
)
from moesaic.planner.topology import Topology, check_fit
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.grid import Grid
from moesaic.program.layouts import Move, ends_of
from moesaic.program.row_counts import HopRows, Messages
from moesaic.program.task import FLOWS, Flow, Layout, Op, Program, Slot, Task

MAX_RANKS_APART = 4096
"""Largest number of ranks that are simulated separately if one cannot stand for the others."""


@dataclass(frozen=True, kw_only=True)
class PieceRows:
    """Rows of one piece of every flow: the rows that one rank contributes for one expert, before
    they are cut into chunks."""

    copies: float
    tokens: float
    node_tokens: float
    rank_tokens: float
    units: float
    """Hidden units of one shard of an expert."""
    chunks: int

    def of(self, layout: Layout) -> float:
        """Return the rows of one piece of a layout: all chunks of a run together, unless the layout
        holds one chunk only."""
        if isinstance(layout.chunk, str):
            return 0.0  # nothing is replicated if all experts have equal loads
        rows: dict[Flow, float] = {
            "copies": self.copies,
            "tokens": self.tokens,
            "node_tokens": self.node_tokens,
            "rank_tokens": self.rank_tokens,
            "weights": self.units,
            "bias": 1.0,
        }
        chunks = 1 if layout.chunk is None else self.chunks
        return rows[layout.flow] / chunks


@dataclass(frozen=True, eq=False)
class Exchange:
    """Which pairs of ranks exchange rows in a movement, whatever its number of rows."""

    pairs: Pairs
    """The classes of pairs that exchange rows."""
    factors: tuple[int, ...]
    """Numbers whose product, in this order, is the number of pieces of a pair."""
    steps: np.ndarray | None
    """(n,) further factors of each pair of a step; None without steps."""
    is_unlike: bool
    """Whether only some ranks of the block send, so that no rank stands for the others."""


@dataclass(frozen=True, eq=False)
class Known:
    """What the layers of a cluster share, by what it follows from; new results are added."""

    route: Callable[[str, Digits, frozenset[int]], Route] = field(
        default_factory=lambda: lru_cache(maxsize=64)(route_of)
    )
    """`route_of`, the last results of which are kept."""
    paths: dict[tuple[object, ...], HopPaths] = field(default_factory=dict)
    """Results of `Even._paths_of`."""
    exchanges: dict[tuple[object, ...], Exchange] = field(default_factory=dict)
    """Results of `_exchange`, by the digits and the movement, whatever its chunk."""
    movements: dict[tuple[object, ...], list[Movement]] = field(default_factory=dict)
    """Results of `Even._grouped`."""


class Even(AbstractVolumes):
    """Rows and messages if all ranks do the same.

    Args:
        grid: the mesh, with etp factored as the plan requires.
        topology: of the cluster, folded.
        layer: the layer of all ranks.
        piece: rows of a piece.
        known: what other meshes and layers share.
        digits: returns a mesh's digits, given what `Digits` is given; its results are kept, so that
            layers share them.
        apart: distinguish the ranks of a block, since in a step of a peer schedule only some of
            them send to other nodes.

    Raises:
        UnlikeError: if the axes, nodes and switches do not nest. `movements` raises it for an
            all-to-all whose nodes do not all do the same.
    """

    def __init__(
        self,
        grid: Grid,
        topology: Topology,
        layer: Workload,
        piece: PieceRows,
        known: Known,
        digits: Callable[[Grid, frozenset[int], int], Digits],
        *,
        apart: bool = False,
    ) -> None:
        self._apart = apart
        self._known = known
        self._digits = digits
        self.grid = grid
        self.topology = topology
        self.layer = layer
        self.piece = piece
        switch_ranks = _ranks_behind_switches(topology.spec, topology.ranks_per_node)
        self._cuts = frozenset(
            run for run in switch_ranks if topology.ranks_per_node < run < grid.world
        )
        """Numbers of ranks behind the switches that join several nodes."""
        # results of these are kept
        self._rows = cache(self._count_rows)
        self._hop_rows = cache(self._count_hop_rows)
        self._stays = cache(self._find_stays)
        self._ends = cache(self._find_ends)
        self._movements: dict[tuple[object, ...], list[Movement]] = {}
        """Results of `movements`, by kind of rows, movement, codec, all-to-all and hop."""

    @property
    def num_actors(self) -> int:
        return self.topology.block if self._apart else 1

    def rows(self, layout: Layout) -> np.ndarray:
        return self._rows(layout)

    def _count_rows(self, layout: Layout) -> np.ndarray:
        """Return the rows of a layout on each class of ranks, (num_actors,): the pieces there times
        the rows of a piece, which is what one origin has for one expert."""
        digits = self._radix(layout)  # ranks are numbers of these digits
        box = box_of(digits, layout)  # in which of them the pieces on a rank differ
        # In a step of a peer schedule a rank has only the pieces of some pairs of an origin's group
        # and an expert's group. The digits that number the groups are counted for themselves.
        group_digits = steps_of(digits, layout)  # none without steps
        num_origins = digits.product(box.free_origin - group_digits)
        num_homes = digits.product(box.free_expert - group_digits)
        num_pieces = num_origins * num_homes * self._experts_per_place(layout)
        rows = np.full(self.num_actors, num_pieces * self.piece.of(layout))
        if layout.step is None:
            return rows
        digits_of_ranks = digits.of(np.arange(self.num_actors))
        # Pairs of groups are counted for pairs of ranks, by what both ranks hold: here, a rank and
        # itself.
        rows *= group_pairs_of_step(
            digits,
            group_digits,
            step=layout.step,
            before=box,
            after=box,
            source_digits=digits_of_ranks,
            target_digits=digits_of_ranks,
        )
        return rows

    def rows_per_expert(self, layout: Layout) -> np.ndarray:
        digits = self._radix(layout)
        num_homes = digits.product(box_of(digits, layout).free_expert)
        num_experts = num_homes * self._experts_per_place(layout)
        # equally many of each expert
        return np.repeat(self.rows(layout)[:, None] / num_experts, num_experts, axis=1)

    def shards(self, weights: Layout) -> float:
        digits = self._radix(weights)
        # the origins of weights are the shards of an expert, of which etp are the whole one
        return digits.product(box_of(digits, weights).free_origin) / self.grid.etp

    def movements(self, task: Task, slots: Mapping[str, Slot], codec: str) -> list[Movement]:
        """Return the movement of a move or hop, as a list; an empty list if nothing moves."""
        source, move = ends_of(task, slots)
        move = _of_any_chunk(move)
        link = task.link if task.op is Op.HOP else ""  # the all-to-all that a hop is a step of
        key = (source.kind, move, codec, link, task.hop)
        if key not in self._movements:
            self._movements[key] = self._compute_movements(
                task, move, lambda rows: row_bytes(source, codec, rows, self.layer)
            )
        return self._movements[key]

    def sent(self, move: Move) -> list[tuple[int, int, float, float]]:
        """Return (source, target, rows, number of targets that the target stands for) of a movement
        before it is lowered."""
        pairs, rows = self._pair_rows(self._radix(move.source), move)
        return list(
            zip(pairs.source.tolist(), pairs.target.tolist(), rows.tolist(), pairs.count.tolist())
        )

    def _pair_rows(self, digits: Digits, move: Move) -> tuple[Pairs, np.ndarray]:
        """Return the classes of pairs that exchange rows, and the rows of one pair of each
        class."""
        key = (digits, _of_any_chunk(move))
        if key not in self._known.exchanges:
            groups = digits.pairs(digits.axes(move.group), steps_of(digits, move.source))
            self._known.exchanges[key] = _exchange(digits, move, groups)
        exchange = self._known.exchanges[key]
        rows = self._rows_of(exchange, move)
        if not rows.any():  # nothing is replicated, or no rank lacks rows
            nobody = np.zeros(0, dtype=np.int64)
            return Pairs(nobody, nobody, np.zeros(0)), np.zeros(0)
        if exchange.is_unlike:
            raise UnlikeError("only the first of several nodes that hold the same rows sends them")
        return exchange.pairs, rows

    def _rows_of(self, exchange: Exchange, move: Move) -> np.ndarray:
        """Return the rows that each pair exchanges in a movement, (pairs,)."""
        # a layout of one chunk and one of all have that chunk in common
        rows_of_piece = min(self.piece.of(move.source), self.piece.of(move.target))
        rows = float(self._experts_per_place(move.source) * rows_of_piece)
        for factor in exchange.factors:
            rows *= factor
        rows_of_pairs = np.full(len(exchange.pairs.source), rows)
        if exchange.steps is None:
            return rows_of_pairs
        return rows_of_pairs * exchange.steps

    def _compute_movements(
        self, task: Task, move: Move, num_bytes: Callable[[float], float]
    ) -> list[Movement]:
        """Return a task's messages between classes of ranks; `num_bytes` tells those of a number of
        rows."""
        digits = self._radix(move.source)
        if task.op is Op.HOP:
            digits = self._link_digits(task.link, move, digits)
        pairs, rows = self._pair_rows(digits, move)
        if not len(rows):
            return []
        class_bytes = of_each(rows, num_bytes) * pairs.count
        if task.op is not Op.HOP:
            return self._group_messages(pairs.source, pairs.target, class_bytes, pairs.count)
        paths = self._paths_of(task, digits, move, pairs)
        source = paths.ends[:, 0]
        target = paths.ends[:, 1]
        return self._group_messages(source, target, paths.num_bytes(class_bytes), paths.count)

    def hop_rows(self, hop: HopRows) -> np.ndarray:
        """See `AbstractRowCounts`."""
        return self._hop_rows(hop._replace(move=_of_any_chunk(hop.move)))

    def _count_hop_rows(self, hop: HopRows) -> np.ndarray:
        """Return the rows of a hop's messages, (num_actors,)."""
        digits = self._link_digits(hop.link, hop.move, self._radix(hop.move.source))
        pairs, rows = self._pair_rows(digits, hop.move)
        if not len(rows):
            return np.zeros(self.num_actors)
        paths = self._paths_of(hop, digits, hop.move, pairs)
        ranks = paths.ends[:, 1 if hop.arrives else 0]  # targets or sources
        return self._per_actor(ranks, paths.num_bytes(rows * pairs.count))

    def _per_actor(self, ranks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the rows of each actor, given rows of some ranks. One actor has the mean over the
        ranks of a block."""
        block = self.topology.block
        per_rank = np.bincount(ranks % block, rows, block)
        return per_rank if self.num_actors > 1 else per_rank.mean(keepdims=True)

    def stays(self, move: Move) -> bool:
        """See `AbstractRowsMoved`."""
        return self._stays(_of_any_chunk(move))

    def _find_stays(self, move: Move) -> bool:
        """Return `stays`."""
        pairs, _ = self._pair_rows(self._radix(move.source), move)
        return not len(pairs.source) and np.array_equal(
            self.rows(move.source), self.rows(move.target)
        )

    def messages(self, move: Move) -> tuple[Messages, Messages]:
        """See `AbstractRowsMoved`."""
        return self._ends(_of_any_chunk(move))

    def _find_ends(self, move: Move) -> tuple[Messages, Messages]:
        """Return what ranks send and receive in a movement.

        Peers ascend with the digits of expert or of origin in which they differ. A slot is sorted
        by expert first, so rows for peers that differ by origin are in its order only if it has one
        expert.
        """
        digits = self._radix(move.source)
        pairs, rows = self._pair_rows(digits, move)
        ranks = np.arange(self.topology.block)
        to_itself = Pairs(ranks, ranks, np.ones(len(ranks)))
        # the rows that stay where they are: those that a rank "exchanges" with itself in a movement
        # that sums, which does not leave out the rows that the target holds
        stay = _exchange(digits, replace(move, reduce=True), to_itself)
        staying_rows = self._per_actor(stay.pairs.source, self._rows_of(stay, move))
        group = digits.axes(move.group)

        def end(ranks: np.ndarray, layout: Layout, other: Layout) -> Messages:
            """Return the messages of one end of the pairs, whose rows have a layout there, and
            another one at the peers."""
            box = box_of(digits, layout)
            peers_box = box_of(digits, other)
            moved = self._per_actor(ranks, rows * pairs.count) + staying_rows
            # how often a row of the slot is used, at most; 1e-9: of a slot without rows, none is
            uses = float((moved / np.maximum(self.rows(layout), 1e-9)).max())
            # digits in which rows here have different origins, and those of one peer the same one
            fixed_at_peers = peers_box.origin - peers_box.free_origin
            differ_by_origin = group & box.free_origin & fixed_at_peers
            num_experts = digits.product(box.free_expert) * self._experts_per_place(layout)
            in_order = not differ_by_origin or num_experts == 1
            return Messages(uses, is_whole=abs(uses - 1) < 1e-9 and in_order)

        sent = end(pairs.source, move.source, move.target)
        received = end(pairs.target, move.target, move.source)
        return sent, received

    def _paths_of(self, task: Task | HopRows, digits: Digits, move: Move, pairs: Pairs) -> HopPaths:
        """Return the messages of a hop, computed once for all meshes whose ranks have the same
        digits.

        Args:
            task: the hop.
            digits: that distinguish the packets of the hop.
            move: the movement whose packets the all-to-all carries.
            pairs: classes of pairs that exchange packets.
        """
        group = digits.axes(move.group)
        # digits outside the block, of which a class only says whether they are equal
        classed = group - digits.within(1, digits.block) - steps_of(digits, move.source)
        arrays = (digits.strides, digits.sizes, pairs.source, pairs.target)
        contents = [array.tobytes() for array in arrays]
        key = (task.link, task.hop, digits.per_node, group, classed, *contents)
        paths = self._known.paths
        if key not in paths:
            route = self._known.route(task.link, digits, group)
            paths[key] = hop_paths(task, digits, route, pairs, classed)
        return paths[key]

    def _link_digits(self, name: str, move: Move, digits: Digits) -> Digits:
        """Return the digits that distinguish the packets of a movement that an all-to-all treats
        differently."""
        link = ALL_TO_ALLS[name]
        group = digits.axes(move.group)
        in_steps = move.source.step is not None
        outside_node = group - digits.local
        nodes = digits.product(outside_node)
        per_node = digits.product(group & digits.local)
        check_regular(link, name, nodes, per_node, in_steps=in_steps)
        # paths of some all-to-alls depend on groups of so many neighbouring nodes
        nodes_per_group = link.nodes_per_group(nodes)
        if nodes_per_group <= 1:
            return digits
        # distance between neighbouring nodes, which differ in the lowest digit outside a node
        node_stride = int(digits.strides[min(outside_node)])
        return self._radix(move.source, [node_stride * nodes_per_group])

    def _group_messages(
        self, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, messages: np.ndarray
    ) -> list[Movement]:
        """Return `_grouped` messages, computed once for all layers with equal ones."""
        ends = (source.tobytes(), target.tobytes())
        key = (self.topology, self._apart, *ends, num_bytes.tobytes(), messages.tobytes())
        movements = self._known.movements
        if key not in movements:
            movements[key] = self._grouped(source, target, num_bytes, messages)
        return movements[key]

    def _grouped(
        self, source: np.ndarray, target: np.ndarray, num_bytes: np.ndarray, messages: np.ndarray
    ) -> list[Movement]:
        """Group messages into movements: one, or, if ranks of a node are distinguished, one per
        connected set."""
        block = self.topology.block
        source_places = source % block
        target_places = target % block
        # sends and receives of each rank of the block
        posts = np.bincount(source_places, messages, block) + np.bincount(
            target_places, messages, block
        )
        if self.num_actors == 1:
            load = self.topology.loads(source, target, num_bytes, messages)
            return [Movement((0,), load, np.array([posts.max()]))]
        movements = []
        for indices in connected_components(source_places, target_places, block):
            actors = np.unique([source_places[indices], target_places[indices]])
            load = self.topology.loads(
                source[indices], target[indices], num_bytes[indices], messages[indices]
            )
            movements.append(Movement(tuple(actors.tolist()), load, posts[actors]))
        return movements

    def _experts_per_place(self, layout: Layout) -> int:
        """Return the number of experts with the same home; 1 for rows that are not of an expert."""
        if not FLOWS[layout.flow].is_per_expert:
            return 1
        return self.layer.num_experts // self.grid.ep

    def _radix(self, layout: Layout, cuts: list[int] | None = None) -> Digits:
        """Return the digits of the mesh, cut at switches, at the groups of a layout's steps, and at
        runs of some further lengths."""
        lengths = set(self._cuts)
        lengths.update(cuts or ())
        if layout.step is not None:
            _, num_groups = layout.step
            ep_stride = self.grid.etp if self.grid.innermost == "etp" else 1
            # ranks of one of the groups into which a step divides ep
            lengths.add(ep_stride * (self.grid.ep // num_groups))
        return self._digits(self.grid, frozenset(lengths), self.topology.block)


def _exchange(digits: Digits, move: Move, pairs: Pairs) -> Exchange:
    """Return which of some pairs of ranks exchange rows in a movement; `before` and `after` are the
    pieces that source and target hold."""
    step_digits = steps_of(digits, move.source)
    before = box_of(digits, move.source)
    after = box_of(digits, move.target)
    source_digits = digits.of(pairs.source)
    target_digits = digits.of(pairs.target)
    equal = source_digits == target_digits

    # A digit that is free on both sides multiplies the pieces that they share. One that is fixed on
    # both must be equal, and one that is fixed on a single side has one value.
    factors: list[int] = []
    sent = np.ones(len(source_digits), dtype=bool)
    for digit_set, free_before, free_after in (
        (before.origin, before.free_origin, after.free_origin),
        (before.expert, before.free_expert, after.free_expert),
    ):
        for digit in digit_set - step_digits:
            if digit in free_before and digit in free_after:
                factors.append(int(digits.sizes[digit]))
            elif digit not in free_before and digit not in free_after:  # fixed on both
                sent &= equal[:, digit]
    # the pieces of each pair as far as they depend on the digits of ep that number the groups
    steps: np.ndarray | None = None
    if move.source.step is not None:
        steps = group_pairs_of_step(
            digits,
            step_digits,
            step=move.source.step,
            before=before,
            after=after,
            source_digits=source_digits,
            target_digits=target_digits,
        )
        sent &= steps > 0

    is_unlike = False
    if not move.reduce:
        # rows are not sent to ranks that hold them, and the first of those that hold them sends
        holds_same = equal[:, sorted(before.fixed)].all(axis=1)
        # digits in which the ranks that hold the same rows differ; the first has 0 in all
        unfixed = digits.axes(move.group) - before.fixed
        is_first = (source_digits[:, sorted(unfixed)] == 0).all(axis=1)
        sent &= ~holds_same
        sent &= is_first
        differs_outside_block = bool(unfixed - digits.within(1, digits.block))
        is_unlike = differs_outside_block and bool(sent.any())
    return Exchange(
        pairs=Pairs(pairs.source[sent], pairs.target[sent], pairs.count[sent]),
        factors=tuple(factors),
        steps=None if steps is None else steps[sent],
        is_unlike=is_unlike,
    )


@lru_cache(maxsize=4096)
def _of_any_chunk(move: Move) -> Move:
    """Return a movement of chunk 0 in place of any other one, since even chunks are equal."""

    def layout(of: Layout) -> Layout:
        """Return a layout of chunk 0."""
        return replace(of, chunk=0) if isinstance(of.chunk, int) else of

    return replace(move, source=layout(move.source), target=layout(move.target))


def _ranks_behind_switches(cluster: ClusterSpec, ranks_per_node: int) -> list[int]:
    """Return the number of ranks behind a switch of each level; 0 for levels inside a node."""
    return [link.devices // cluster.devices_per_node * ranks_per_node for link in cluster.links]


class AbstractEvenLayers(ABC):
    """Source of the rows and messages of even layers for a simulator."""

    @abstractmethod
    def volumes(self, program: Program, workload: Workload, grid: Grid) -> AbstractVolumes:
        """Return the rows and messages of a program under even routing.

        Args:
            program: forward or backward.
            workload: the layer and its tokens.
            grid: the mesh, with etp factored as the plan requires.

        Raises:
            UnlikeError: if one rank cannot stand for the others.
            InputError: if the mesh does not fit the cluster.
        """


class EvenLayers(AbstractEvenLayers):
    """Computes every layer by itself, and caches what does not depend on the plan.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._topology = cache(partial(Topology, cluster))
        self._digits = cache(Digits)
        self._volumes: dict[tuple[Grid, Workload, int, bool, bool], AbstractVolumes] = {}
        """Results of `volumes`, by mesh, layer, chunks, whether the ranks of a tensor-parallel
        group each send all tokens, and whether ranks of a block are distinguished."""
        self._known = Known()

    def volumes(self, program: Program, workload: Workload, grid: Grid) -> AbstractVolumes:
        """Return the volumes of a program under even routing, the same object for equal
        arguments."""
        # steps of a peer schedule distinguish the ranks of a block
        apart = any(slot.layout.step is not None for slot in program.slots)
        chunks = chunks_of(program)
        redundant = program.is_redundant
        key = (grid, workload, chunks, redundant, apart)
        if key not in self._volumes:
            piece = piece_rows(workload, grid, chunks, redundant)
            topology = self._topology(
                grid.world, grid.ranks_per_node, block=self._block_size(grid, apart)
            )
            self._volumes[key] = Even(
                grid,
                topology,
                layer=workload,
                piece=piece,
                known=self._known,
                digits=self._digits,
                apart=apart,
            )
        return self._volumes[key]

    def _block_size(self, grid: Grid, apart: bool) -> int:
        """Return the size of the block of ranks that stands for all: a node, or, if ranks are
        distinguished, the ranks behind the largest switch."""
        per_node = check_fit(self._cluster, grid.world, grid.ranks_per_node)
        if not apart:
            return per_node
        most = min(grid.world, MAX_RANKS_APART)
        switch_ranks = _ranks_behind_switches(self._cluster, per_node)
        return max([per_node, *(run for run in switch_ranks if per_node < run <= most)])


def piece_rows(workload: Workload, grid: Grid, chunks: int, redundant: bool) -> PieceRows:
    """Return the rows of a piece under even routing; `redundant`: the ranks of a tensor-parallel
    group each send all of its tokens."""
    sharers = 1 if redundant else grid.tp  # ranks that divide a group's tokens
    # of one replica of the experts
    nodes = max(1, grid.ep * grid.etp // (grid.ranks_per_node or grid.world))
    return PieceRows(
        copies=workload.copies / workload.num_experts / sharers,
        tokens=workload.tokens / sharers,
        node_tokens=node_tokens_per_node(workload, nodes, chunks) / sharers,
        rank_tokens=node_tokens_per_node(workload, grid.ep, chunks) / sharers,
        units=workload.hidden / grid.etp,
        chunks=chunks,
    )
