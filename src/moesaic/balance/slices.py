"""Slices of a call: if ranks would have more rows at their experts than a memory budget allows, the
call runs in several parts.

The slices follow from the counts that all ranks have, so all ranks cut identically and none waits.
The rows of a rank, sorted by expert, are cut into runs as long as the rank's limit. No slice
exceeds the limit, whatever the skew, and the number of slices is the smallest possible. A rank that
is not overloaded has all its rows in the first slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.program.replications import Replications


@dataclass(frozen=True)
class Cut:
    """A call cut into slices. A cell is the part of one origin's copies for one expert that one
    place computes."""

    cells: np.ndarray
    """(world, num_experts, 1 or 1 + ep) int64: for each origin and expert, the copies that the home
    computes, then those of each helper."""
    holders: np.ndarray
    """int64, in the shape of `cells`: the first of the ranks that compute each cell."""
    limits: np.ndarray
    """(world,) int64: the most rows at the experts of each rank in one slice."""
    kept: int = 1
    """The number of first slices that are kept for the backward pass; the others run again in the
    backward pass."""

    @cached_property
    def loads(self) -> np.ndarray:
        """(world,) int64: rows at the experts of each rank; 0 for a rank with the same rows as an
        earlier rank."""
        return np.bincount(
            self.holders.reshape(-1), weights=self.cells.reshape(-1), minlength=len(self.cells)
        ).astype(np.int64)

    @property
    def share_again(self) -> float:
        """The share of the busiest rank's rows that are in slices that run again."""
        rows_again = np.maximum(self.loads - self.kept * self.limits, 0)
        return float(rows_again.max() / max(1, self.loads.max()))

    @cached_property
    def num_slices(self) -> int:
        """The number of slices of the call; 1 if the whole call fits."""
        return max(1, int((-(-self.loads // self.limits)).max(initial=0)))

    @cached_property
    def _starts(self) -> np.ndarray:
        """The start of each cell among the rows of its holder, which are sorted by expert and then
        by origin."""
        by_expert = (1, 0, 2)
        cells, holders = (
            values.transpose(by_expert).reshape(-1) for values in (self.cells, self.holders)
        )
        order = np.argsort(holders, kind="stable")
        before = cells[order].cumsum() - cells[order]
        first = np.searchsorted(holders[order], holders[order])
        starts = np.empty_like(before)
        starts[order] = before - before[first]
        shape = tuple(self.cells.shape[axis] for axis in by_expert)
        return starts.reshape(shape).transpose(by_expert)

    def part(self, number: int) -> np.ndarray:
        """Return the copies of each cell in a slice, in the shape of `cells`."""
        begin, end = self._range(number)
        return np.maximum(end - begin, 0)

    def copies(self, number: int) -> np.ndarray:
        """Return the copies of each origin for each expert in a slice, (world, num_experts)
        int64."""
        copies: np.ndarray = self.part(number).sum(2)
        return copies

    def replicated(self, number: int) -> Replications | None:
        """Return the replicated copies in a slice; None if the program replicates nothing."""
        if self.cells.shape[2] == 1:
            return None
        return Replications.of(self.part(number)[:, :, 1:])

    def rows(self, number: int, origins: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the rows that some origins send, sorted by expert and then by origin, are
        in a slice.

        Args:
            number: the index of the slice.
            origins: the ranks that send the rows: one rank, or the ranks of a tensor-parallel group
                that routes as one.

        Returns:
            the indices of the slice's rows in the sorted list, ascending, and the origin of each;
            (rows,) int64 both.
        """
        chosen = list(origins)
        begin, end = (
            values[chosen].transpose(1, 0, 2).reshape(-1) for values in self._range(number)
        )
        cells = self.cells[chosen].transpose(1, 0, 2).reshape(-1)
        num_rows = np.maximum(end - begin, 0)
        first = cells.cumsum() - cells + begin
        places = np.arange(int(num_rows.sum())) + np.repeat(
            first - (num_rows.cumsum() - num_rows), num_rows
        )
        of_cell = np.broadcast_to(
            np.array(chosen)[None, :, None], (self.cells.shape[1], len(chosen), self.cells.shape[2])
        )
        return places, np.repeat(of_cell.reshape(-1), num_rows)

    def _range(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the begin and end of a slice within each cell; begin >= end if the slice has no
        rows of the cell."""
        limits = self.limits[self.holders]
        begin = np.maximum(number * limits - self._starts, 0)
        end = np.minimum((number + 1) * limits - self._starts, self.cells)
        return begin, end


def cut(
    holders: np.ndarray,
    copies: np.ndarray,
    replicated: Replications | None,
    budget: int | np.ndarray,
) -> Cut:
    """Return a call cut into slices.

    Args:
        holders: the holders of the cells in the program that runs, as computed in
            `balance/budget.py`.
        copies: (world, num_experts) int64, copies of each origin for each expert.
        replicated: the copies that helpers compute; None if the program replicates nothing.
        budget: the most rows at the experts of a rank, at least 1; one number for all ranks, or
            (world,) int64.
    """
    limits = np.broadcast_to(np.asarray(budget, dtype=np.int64), len(copies))
    assert (limits >= 1).all(), f"a budget of {budget} rows"
    cells = copies[:, :, None]
    if replicated is not None:
        helped = replicated.table((*copies.shape, holders.shape[2] - 1))
        cells = np.concatenate([replicated.staying(copies)[:, :, None], helped], axis=2)
    assert ((holders >= 0) | (cells == 0)).all(), "rows that no rank computes"
    return Cut(cells, np.maximum(holders, 0), limits)
