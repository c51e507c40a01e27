"""Slices of a call: where ranks would have more rows at their experts than a budget, the call runs in several parts.

Which rows a part holds follows from the counts that all ranks have, so all cut alike and nobody waits. The rows that arrive
at a rank, expert after expert, are cut at every so many rows as it may have: no part has more, whatever the skew, and the
number of parts is the smallest possible. A rank that is not overloaded has all its rows in the first part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Cut:
    """A call cut into slices. A cell is what of a run one place computes: the home, or a helper."""

    cells: np.ndarray
    """(world, num_experts, 1 or 1 + ep) int64: copies of each origin for each expert that stay, then by helper."""
    holders: np.ndarray
    """As `cells`: the first of the ranks at whose experts a cell's rows are."""
    limits: np.ndarray
    """(world,) int64: rows at the experts of each rank in one slice."""
    kept: int = 1
    """Slices, the first ones, that are kept for the backward pass; the others run again in it."""

    @cached_property
    def loads(self) -> np.ndarray:
        """Rows at the experts of each rank, (world,) int64; 0 for ranks that hold the same rows as one before them."""
        return np.bincount(self.holders.reshape(-1), weights=self.cells.reshape(-1), minlength=len(self.cells)).astype(
            np.int64
        )

    @property
    def share_again(self) -> float:
        """Which share of the busiest rank's rows are in slices that run again."""
        left = np.maximum(self.loads - self.kept * self.limits, 0)
        return float(left.max() / max(1, self.loads.max()))

    @cached_property
    def num_slices(self) -> int:
        """Slices that the call takes: 1 where everything fits."""
        return max(1, int((-(-self.loads // self.limits)).max(initial=0)))

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where each cell starts among the rows of its holder, experts in order, within one by origin."""
        by_expert = (1, 0, 2)
        cells, holders = (values.transpose(by_expert).reshape(-1) for values in (self.cells, self.holders))
        order = np.argsort(holders, kind="stable")
        before = cells[order].cumsum() - cells[order]
        first = np.searchsorted(holders[order], holders[order])
        starts = np.empty_like(before)
        starts[order] = before - before[first]
        shape = tuple(self.cells.shape[axis] for axis in by_expert)
        return starts.reshape(shape).transpose(by_expert)

    def part(self, number: int) -> np.ndarray:
        """Return what a slice has of each cell, in the shape of `cells`."""
        begin, end = self._range(number)
        return np.maximum(end - begin, 0)

    def copies(self, number: int) -> np.ndarray:
        """Return what a slice has of each run, (world, num_experts) int64."""
        found: np.ndarray = self.part(number).sum(2)
        return found

    def replicated(self, number: int) -> np.ndarray | None:
        """Return what of a slice is replicated, (world, num_experts, ep) int64; None where the program replicates nothing."""
        return self.part(number)[:, :, 1:] if self.cells.shape[2] > 1 else None

    def rows(self, number: int, origins: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows a slice has of what some origins send, expert after expert, then origin after origin.

        Args:
            number: of the slice.
            origins: those whose rows stand in the list: a rank, or the ranks of a tensor group that routes as one.

        Returns:
            their places in the list, ascending, and of each its origin; (rows,) int64 both.
        """
        chosen = list(origins)
        begin, end = (values[chosen].transpose(1, 0, 2).reshape(-1) for values in self._range(number))
        cells = self.cells[chosen].transpose(1, 0, 2).reshape(-1)
        taken = np.maximum(end - begin, 0)
        first = cells.cumsum() - cells + begin
        places = np.arange(int(taken.sum())) + np.repeat(first - (taken.cumsum() - taken), taken)
        of_cell = np.broadcast_to(
            np.array(chosen)[None, :, None], (self.cells.shape[1], len(chosen), self.cells.shape[2])
        )
        return places, np.repeat(of_cell.reshape(-1), taken)

    def _range(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where a slice begins and ends in each cell; beyond its end where it has nothing of it."""
        limits = self.limits[self.holders]
        begin = np.maximum(number * limits - self._starts, 0)
        end = np.minimum((number + 1) * limits - self._starts, self.cells)
        return begin, end


def cut(holders: np.ndarray, copies: np.ndarray, replicated: np.ndarray | None, budget: int | np.ndarray) -> Cut:
    """Cut a call.

    Args:
        holders: of the program that runs; as `plan/budget.py` finds them.
        copies: (world, num_experts) int64 that each origin has for each expert.
        replicated: (world, num_experts, ep) int64 of them that helpers compute; None for a program that replicates nothing.
        budget: rows at one rank's experts, at least 1; or (world,) int64, of each rank.
    """
    limits = np.broadcast_to(np.asarray(budget, dtype=np.int64), len(copies))
    assert (limits >= 1).all(), f"a budget of {budget} rows"
    staying = copies if replicated is None else copies - replicated.sum(2)
    cells = staying[:, :, None] if replicated is None else np.concatenate([staying[:, :, None], replicated], axis=2)
    assert ((holders >= 0) | (cells == 0)).all(), "rows that no rank computes"
    return Cut(cells, np.maximum(holders, 0), limits)
