"""`Digits` and `Box`: ranks as mixed-radix numbers, to count what one rank sends without listing
all ranks.

Every axis of a mesh, every node and every switch cuts the ranks into equal runs. If these runs
nest, they are the digits of the rank's number in a mixed radix. Each axis is then a set of digits.
The pieces that a layout holds on a rank form a box: some digits are fixed to the rank's, the others
are free. The number of pieces that two ranks share is a product over digits and depends only on
which digits of the two are equal. So peers fall into classes, and a movement among 100,000 ranks
costs as much as one among a hundred. The steps of a peer schedule tie the origin's digits of ep to
the expert's; those are counted by differences.

A digit is named by its place, 0 for the lowest; its stride is the product of the lower sizes. The
origin of a row is the rank whose token it is, and the home of an expert the rank that stores it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

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
        inner = grid.etp if grid.innermost == "etp" else grid.ep  # size of the innermost axis
        etp_stride = 1 if grid.innermost == "etp" else grid.ep
        # lengths of the runs of consecutive ranks that the mesh and the links tell apart; etp may
        # be cut into two factors, of which `etp_inner` is the inner one
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
        # the last bound is the world, which is no stride
        self.strides = np.array(bounds[:-1], dtype=np.int64)
        """(digits,) distance of the ranks that differ by 1 in a digit."""
        self.sizes = np.array([long // short for short, long in pairwise(bounds)], dtype=np.int64)
        """(digits,) number of values of a digit."""
        self._bounds = bounds[:-1]
        """`strides` as ints."""
        self.axes = cache(self._axes)
        """`_axes`, whose results are kept."""
        self.pairs = cache(self._pairs)
        """`_pairs`, whose results are kept."""

    def of(self, ranks: np.ndarray) -> np.ndarray:
        """Return the digits of ranks, (n, digits)."""
        return ranks[:, None] // self.strides % self.sizes

    def within(self, low: int, high: int) -> frozenset[int]:
        """Return the digits whose runs are at least `low` and less than `high` long."""
        return frozenset(digit for digit, stride in enumerate(self._bounds) if low <= stride < high)

    def axis(self, axis: Axis) -> frozenset[int]:
        """Return the digits of an axis."""
        # "node" and "local" are the nodes of a replica of the experts, and its ranks on one of them
        replica = self.grid.ep * self.grid.etp
        if axis == "node":
            return self.within(self.per_node, max(replica, self.per_node))
        if axis == "local":
            return self.within(1, min(self.per_node, replica))
        stride, reach = self.grid.spans[axis]
        return self.within(stride, reach)

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
        group_digits = sorted(group)
        inside = self.within(1, self.block)
        # Of each digit the values that targets have, and the number of values that each stands for.
        # Sources are of the first block, so they have 0 in all digits outside it.
        choices = []
        for digit in group_digits:
            size = int(self.sizes[digit])
            if digit in inside or digit in listed:
                choices.append([(value, 1) for value in range(size)])
            else:  # equal to the source's 0, or any other value, for which 1 stands
                choices.append([(0, 1), (1, size - 1)])
        target_values = []
        counts = []
        for choice in itertools.product(*choices):
            target_values.append([value for value, _ in choice])
            counts.append(math.prod(count for _, count in choice))

        # every rank of the block with every choice of the target's digits in the group
        num_choices = len(target_values)
        source = np.repeat(np.arange(self.block), num_choices)
        values = np.array(target_values, dtype=np.int64).reshape(num_choices, -1)
        target_digits = self.of(source)
        target_digits[:, group_digits] = np.tile(values, (self.block, 1))
        target = target_digits @ self.strides
        count = np.tile(counts, self.block).astype(np.float64)
        is_other = target != source
        return Pairs(source[is_other], target[is_other], count[is_other])


@dataclass(frozen=True)
class Box:
    """The pieces of a layout on a rank: the digits of origin and of expert, and which of them are
    free."""

    origin: frozenset[int]
    """Digits that tell the origins of the flow apart."""
    expert: frozenset[int]
    """Digits that tell the homes of experts apart."""
    free_origin: frozenset[int]
    """Of `origin`, those in which the pieces on a rank differ; the others are the rank's."""
    free_expert: frozenset[int]
    """The same of `expert`."""

    @property
    def fixed(self) -> frozenset[int]:
        """Digits that are equal on all ranks that hold the same pieces."""
        return (self.origin - self.free_origin) | (self.expert - self.free_expert)


def box_of(digits: Digits, layout: Layout) -> Box:
    """Return the box of the pieces that a layout holds."""
    flow = FLOWS[layout.flow]
    # digits in which the origins of a rank's rows differ: those of the axes over which the layout
    # is spread, and of tp if each origin stands for its tensor-parallel group
    spread = digits.axes(layout.spread)
    if layout.whole_tp:
        spread |= digits.axis("tp")
    all_digits = frozenset(range(len(digits.sizes)))
    # None: every rank is an origin
    origin = all_digits if flow.origins is None else digits.axes(flow.origins)
    expert = digits.axes(flow.homes)
    # by whose experts' rows a rank has: those of all ranks, of its own, or of its node
    free_by_experts: dict[str, frozenset[int]] = {
        "all": expert,
        "rank": frozenset(),
        "node": expert & digits.local,
    }
    free_expert = free_by_experts[layout.experts]
    return Box(origin, expert, free_origin=spread & origin, free_expert=free_expert)


def steps_of(digits: Digits, layout: Layout) -> frozenset[int]:
    """Return the digits of ep that number the groups of a step; () without steps."""
    if layout.step is None:
        return frozenset()
    _, num_groups = layout.step
    # distance between ranks that are neighbours along ep
    ep_stride = digits.grid.etp if digits.grid.innermost == "etp" else 1
    group_size = digits.grid.ep // num_groups
    return digits.axis("ep") & digits.within(ep_stride * group_size, digits.grid.world)


class _Groups(NamedTuple):
    """The numbers of the groups of origins, or of experts' homes, among the rows of each pair: each
    base plus each offset."""

    base: np.ndarray
    """(n,) for each pair: its part by the digits that the pair fixes."""
    offsets: np.ndarray
    """(choices,) parts by the digits that are free, for each choice of these."""
    possible: np.ndarray
    """(n,) bool: whether the source holds rows that the target holds too."""


def group_pairs_of_step(
    digits: Digits,
    group_digits: frozenset[int],
    step: tuple[int, int],
    before: Box,
    after: Box,
    source_digits: np.ndarray,
    target_digits: np.ndarray,
) -> np.ndarray:
    """Return, for each pair of a source and a target rank, how many pairs (group of the origin,
    group of the expert's home) of a step the rows have that both ranks hold, (n,).

    Args:
        digits: of the mesh.
        group_digits: digits that number the groups (`steps_of`).
        step: (j, number of groups): a row is in the step if its expert's group is j after its
            origin's, cyclically (`Layout.step`).
        before: the pieces on the source.
        after: the pieces on the target.
        source_digits: (n, digits) of the sources.
        target_digits: (n, digits) of the targets.
    """
    distance, num_groups = step
    ends = (source_digits, target_digits)
    # The origins of a pair's rows have the groups `base` + each of `offsets`, and so have the
    # experts' homes.
    origins = _groups(digits, group_digits, before.free_origin, after.free_origin, ends)
    experts = _groups(digits, group_digits, before.free_expert, after.free_expert, ends)
    # Of all choices of two offsets, by the number of groups from the origin's to the expert's: how
    # many have this difference. It is the same count for all pairs of ranks.
    differences_of_offsets = (experts.offsets[:, None] - origins.offsets) % num_groups
    num_choices = np.bincount(differences_of_offsets.reshape(-1), minlength=num_groups)
    # The rows are in the step if the differences of bases and of offsets add up to `distance`.
    difference_of_bases = experts.base - origins.base
    difference_needed = (distance - difference_of_bases) % num_groups
    have_common_rows = origins.possible & experts.possible
    group_pairs: np.ndarray = have_common_rows * num_choices[difference_needed]
    return group_pairs


def _groups(
    digits: Digits,
    group_digits: frozenset[int],
    free_before: frozenset[int],
    free_after: frozenset[int],
    ends: tuple[np.ndarray, np.ndarray],
) -> _Groups:
    """Return the groups of the origins, or of the experts' homes, of the rows of each pair.

    Args:
        digits: of the mesh.
        group_digits: digits that number the groups.
        free_before, free_after: digits that are free on the source, and on the target.
        ends: (n, digits) of the sources, and of the targets.
    """
    source_digits, target_digits = ends
    base = np.zeros(len(source_digits), dtype=np.int64)
    offsets = np.zeros(1, dtype=np.int64)
    possible = np.ones(len(source_digits), dtype=bool)
    weight = 1  # what the digit counts in the number of a group: the product of the lower sizes
    for digit in sorted(group_digits):
        size = int(digits.sizes[digit])
        is_free_before = digit in free_before
        is_free_after = digit in free_after
        if is_free_before and is_free_after:  # rows of every value of the digit
            offsets = (offsets[:, None] + weight * np.arange(size)).reshape(-1)
        elif is_free_before:  # the target has rows of its own digit only
            base += weight * target_digits[:, digit]
        else:  # the source has; if both have, the two digits must be equal
            base += weight * source_digits[:, digit]
            if not is_free_after:
                possible &= source_digits[:, digit] == target_digits[:, digit]
        weight *= size
    return _Groups(base, offsets, possible)


class GroupPlaces(NodeMap):
    """The places of the ranks of one group, computed by arithmetic.

    Args:
        digits: of the mesh.
        group: digits in which the members differ.
    """

    def __init__(self, digits: Digits, group: frozenset[int]) -> None:
        self._digits = digits
        self._upper = self._radix(sorted(group - digits.local))
        """The group's digits outside a node, as `_radix` returns them."""
        self._lower = self._radix(sorted(group & digits.local))
        """Those inside a node."""
        self.nodes = [[]] * digits.product(group - digits.local)  # only their number is asked for
        self._base = 0
        """The first rank of the group."""

    def switch_to_group_of(self, member: int) -> GroupPlaces:
        """Switch to the group that contains a rank, and return self."""
        # the group's first rank: that with 0 in all digits of the group
        upper = sum(member // stride % size * stride for stride, size, _ in self._upper)
        lower = sum(member // stride % size * stride for stride, size, _ in self._lower)
        self._base = member - upper - lower
        return self

    @property
    def is_even(self) -> bool:
        """Whether every node holds equally many ranks of the group: always."""
        return True

    def node(self, rank: int) -> int:
        """Return the number of a rank's node within the group."""
        return self._number(rank, self._upper)

    def local(self, rank: int) -> int:
        """Return a rank's index among the group's ranks on its node."""
        return self._number(rank, self._lower)

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

    def _number(self, rank: int, radix: list[tuple[int, int, int]]) -> int:
        """Return the number that some of a rank's digits form by themselves."""
        return sum(rank // stride % size * member_stride for stride, size, member_stride in radix)
