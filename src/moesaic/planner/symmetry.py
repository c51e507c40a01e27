"""`Digits` and `Box`: ranks as mixed-radix numbers, to count what one rank sends without listing
all ranks.

Every axis of a mesh, every node and every switch cuts the ranks into equal runs. If these runs
nest, they are the digits of the rank's number in a mixed radix. Each axis is then a set of digits.
The pieces that a layout holds on a rank form a box: some digits are fixed to the rank's, the others
are free. The number of pieces that two ranks share is a product over digits and depends only on
which digits of the two are equal. So peers fall into classes, and a movement among 100,000 ranks
costs as much as one among a hundred. The steps of a peer schedule tie the origin's digits of ep to
the expert's; those are counted by differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from moesaic.program.all_to_all.all_to_all import NodeMap
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import FLOWS, Layout


class UnlikeError(Exception):
    """Raised if one rank cannot stand for the others.

    Args:
        reason: how the ranks differ; a clause that follows "in which".
        advice: what to choose so that one rank can stand for the others.
    """

    def __init__(self, reason: str, advice: str = "axes that divide one another") -> None:
        super().__init__(reason)
        self.advice = advice


@dataclass(frozen=True)
class Pairs:
    """Classes of (source, target) pairs. Sources are the ranks of the first block; a target stands
    for others like it."""

    source: np.ndarray
    """(n,) ranks."""
    target: np.ndarray
    """(n,) ranks."""
    count: np.ndarray
    """(n,) number of targets that each target stands for."""


class Digits:
    """The mixed radix of a mesh.

    Args:
        grid: the mesh.
        cuts: lengths of further runs of ranks to distinguish, such as those behind a switch or
            those of a step.
        block: size of the block of ranks that stands for all blocks, in whole nodes; None: one
            node.

    Raises:
        UnlikeError: if the runs do not nest.
    """

    def __init__(self, grid: Grid, cuts: Iterable[int] = (), block: int | None = None) -> None:
        self.grid = grid
        self.per_node = grid.ranks_per_node or grid.world
        self.block = block or self.per_node
        inner = grid.etp if grid.innermost == "etp" else grid.ep
        etp_stride = 1 if grid.innermost == "etp" else grid.ep
        runs = {
            1,
            grid.tp,
            inner,
            etp_stride * grid.etp_inner,
            grid.ep * grid.etp,
            self.per_node,
            self.block,
            grid.world,
            *cuts,
        }
        bounds = sorted(run for run in runs if run <= grid.world)
        for short, long in pairwise(bounds):
            if long % short:
                raise UnlikeError(f"runs of {short} and {long} ranks do not nest")
        self.strides = np.array(bounds[:-1], dtype=np.int64)
        self.sizes = np.array([long // short for short, long in pairwise(bounds)], dtype=np.int64)
        self._bounds = bounds[:-1]
        self.axes, self.pairs = cache(self._axes), cache(self._pairs)
        """Functions of the same names with an underscore, whose results are kept."""

    def of(self, ranks: np.ndarray) -> np.ndarray:
        """Return the digits of ranks, (n, digits)."""
        return ranks[:, None] // self.strides % self.sizes

    def within(self, low: int, high: int) -> frozenset[int]:
        """Return the digits whose runs are at least `low` and less than `high` long."""
        return frozenset(digit for digit, stride in enumerate(self._bounds) if low <= stride < high)

    def axis(self, axis: Axis) -> frozenset[int]:
        """Return the digits of an axis."""
        replica = self.grid.ep * self.grid.etp
        if axis == "node":
            return self.within(self.per_node, max(replica, self.per_node))
        if axis == "local":
            return self.within(1, min(self.per_node, replica))
        return self.within(*self.grid.spans[axis])

    def _axes(self, axes: tuple[Axis, ...]) -> frozenset[int]:
        """Return the digits of several axes."""
        return frozenset().union(*(self.axis(axis) for axis in axes))

    @cached_property
    def local(self) -> frozenset[int]:
        """The digits inside a node."""
        return self.within(1, self.per_node)

    def product(self, digits: Iterable[int]) -> int:
        """Return the number of values that some digits have together."""
        return int(np.prod(self.sizes[sorted(digits)], dtype=np.int64)) if digits else 1

    def _pairs(self, group: frozenset[int], listed: frozenset[int] = frozenset()) -> Pairs:
        """Return the classes of pairs within groups.

        Digits inside a block are listed value by value, others as equal or different.

        Args:
            group: digits in which members of a group differ.
            listed: further digits to list value by value.
        """
        sources = np.arange(self.block)
        inside = self.within(1, self.block)
        offsets = []
        counts = []
        choices = []
        for digit in sorted(group):
            size = int(self.sizes[digit])
            if digit in inside or digit in listed:
                choices.append([(value, 1) for value in range(size)])
            else:
                choices.append([(0, 1), (1, size - 1)])
        for choice in itertools.product(*choices):
            offsets.append([value for value, _ in choice])
            counts.append(int(np.prod([count for _, count in choice], dtype=np.int64)))
        source = np.repeat(sources, len(offsets))
        digits = self.of(source)
        digits[:, sorted(group)] = np.tile(
            np.array(offsets, dtype=np.int64).reshape(len(offsets), -1), (len(sources), 1)
        )
        target = digits @ self.strides
        is_other = target != source
        return Pairs(
            source[is_other],
            target[is_other],
            np.tile(counts, len(sources))[is_other].astype(np.float64),
        )


@dataclass(frozen=True)
class Box:
    """The pieces of a layout on a rank: the digits of origin and of expert, and which of them are
    free."""

    origin: frozenset[int]
    expert: frozenset[int]
    free_origin: frozenset[int]
    free_expert: frozenset[int]

    @property
    def fixed(self) -> frozenset[int]:
        """Digits that are equal on all ranks that hold the same pieces."""
        return (self.origin - self.free_origin) | (self.expert - self.free_expert)


def box_of(digits: Digits, layout: Layout) -> Box:
    """Return the box of the pieces that a layout holds."""
    flow = FLOWS[layout.flow]
    spread = digits.axes(layout.spread) | (digits.axis("tp") if layout.whole_tp else frozenset())
    origin = (
        frozenset(range(len(digits.sizes))) if flow.origins is None else digits.axes(flow.origins)
    )
    expert = digits.axes(flow.homes)
    free = {"all": expert, "rank": frozenset(), "node": expert & digits.local}[layout.experts]
    return Box(origin, expert, free_origin=spread & origin, free_expert=free)


def steps_of(digits: Digits, layout: Layout) -> frozenset[int]:
    """Return the digits of ep that number the groups of a step; () without steps."""
    if layout.step is None:
        return frozenset()
    stride = digits.grid.etp if digits.grid.innermost == "etp" else 1
    group_size = digits.grid.ep // layout.step[1]
    return digits.axis("ep") & digits.within(stride * group_size, digits.grid.world)


def pieces_of_step(
    digits: Digits,
    ahead: frozenset[int],
    step: tuple[int, int],
    before: Box,
    after: Box,
    source_digits: np.ndarray,
    target_digits: np.ndarray,
) -> np.ndarray:
    """Return, for each pair, the number of (group of the origin, group of the expert's home)
    combinations among its rows."""
    order = sorted(ahead)
    products = np.cumprod(digits.sizes[order])
    radix = np.concatenate([[1], products[:-1]]).astype(np.int64)
    possible = np.ones(len(source_digits), dtype=bool)
    bases = []
    offsets = []
    for free_before, free_after in (
        (before.free_origin, after.free_origin),
        (before.free_expert, after.free_expert),
    ):
        base = np.zeros(len(source_digits), dtype=np.int64)
        offset = np.zeros(1, dtype=np.int64)
        for digit, weight in zip(order, radix):
            if digit in free_before and digit in free_after:
                offset = (offset[:, None] + weight * np.arange(digits.sizes[digit])).reshape(-1)
                continue
            base += weight * (target_digits if digit in free_before else source_digits)[:, digit]
            if digit not in free_before and digit not in free_after:
                possible &= source_digits[:, digit] == target_digits[:, digit]
        bases.append(base)
        offsets.append(offset)
    num_differences = np.bincount(
        ((offsets[1][:, None] - offsets[0]) % step[1]).reshape(-1), minlength=step[1]
    )
    pieces: np.ndarray = possible * num_differences[(step[0] - bases[1] + bases[0]) % step[1]]
    return pieces


class GroupPlaces(NodeMap):
    """The places of the ranks of one group, computed by arithmetic.

    Args:
        digits: of the mesh.
        group: digits in which the members differ.
    """

    def __init__(self, digits: Digits, group: frozenset[int]) -> None:
        self._digits = digits
        self._upper = self._radix(sorted(group - digits.local))
        self._lower = self._radix(sorted(group & digits.local))
        self.nodes = [[]] * digits.product(group - digits.local)
        self._base = 0

    def switch_to_group_of(self, member: int) -> GroupPlaces:
        """Switch to the group that contains a rank, and return self."""
        self._base = (
            member - self._value(member, self._upper, True) - self._value(member, self._lower, True)
        )
        return self

    @property
    def is_even(self) -> bool:
        """Whether every node holds equally many ranks of the group: always."""
        return True

    def node(self, rank: int) -> int:
        """Return the number of a rank's node within the group."""
        return self._value(rank, self._upper, False)

    def local(self, rank: int) -> int:
        """Return a rank's index among the group's ranks on its node."""
        return self._value(rank, self._lower, False)

    def rank(self, node: int, local: int) -> int:
        """Return the rank with an index on a node."""
        rank = self._base
        for number, radix in ((node, self._upper), (local, self._lower)):
            for stride, size, _ in radix:
                number, digit = divmod(number, size)
                rank += digit * stride
        return rank

    def _radix(self, digits: list[int]) -> list[tuple[int, int, int]]:
        """Return (stride among ranks, size, stride among the members) of each digit."""
        radix = []
        member_stride = 1
        for digit in digits:
            stride = int(self._digits.strides[digit])
            size = int(self._digits.sizes[digit])
            radix.append((stride, size, member_stride))
            member_stride *= size
        return radix

    def _value(self, rank: int, radix: list[tuple[int, int, int]], in_ranks: bool) -> int:
        return sum(
            rank // stride % size * (stride if in_ranks else member_stride)
            for stride, size, member_stride in radix
        )
