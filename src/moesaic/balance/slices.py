"""Slices of a call: if ranks would have more rows at their experts than a memory budget allows, the
call runs in several parts.

The slices follow from the counts that all ranks have, so all ranks cut identically and none waits.
The rows of a rank, sorted by expert, are cut into runs as long as the rank's limit. No slice
exceeds the limit, whatever the skew, and the number of slices is the smallest possible. A rank that
is not overloaded has all its rows in the first slice.

An *origin* is a rank that has tokens, a *copy* a token for one expert, and its *holder* the rank
that computes it. A *cell* is the part of an origin's copies for an expert that one place computes:
the expert's home or, if the program replicates, a helper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.program.replications import Replications


@dataclass(frozen=True)
class Cut:
    """A call cut into slices."""

    cells: np.ndarray
    """(world, num_experts, 1 or 1 + ep) int64: for each origin and expert, the copies that the home
    computes, then those of each helper, which is a place of ep."""
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
        world = len(self.cells)
        holders = self.holders.reshape(-1)
        rows = np.bincount(holders, weights=self.cells.reshape(-1), minlength=world)
        return rows.astype(np.int64)

    @property
    def share_again(self) -> float:
        """The share of the busiest rank's rows that are in slices that run again."""
        rows_again = np.maximum(self.loads - self.kept * self.limits, 0)
        return float(rows_again.max() / max(1, self.loads.max()))

    @cached_property
    def num_slices(self) -> int:
        """The number of slices of the call; 1 if the whole call fits."""
        slices_of_rank = -(-self.loads // self.limits)  # rounded up
        return max(1, int(slices_of_rank.max(initial=0)))

    @cached_property
    def _starts(self) -> np.ndarray:
        """The start of each cell among the rows of its holder, which are sorted by expert and then
        by origin."""
        by_expert = (1, 0, 2)  # swaps origins and experts; twice gives the order of `cells` again
        cells = self.cells.transpose(by_expert)
        rows = cells.reshape(-1)
        holders = self.holders.transpose(by_expert).reshape(-1)

        # all rows, holder by holder: those before each cell, less those before its holder's first
        order = np.argsort(holders, kind="stable")
        before = rows[order].cumsum() - rows[order]
        first_of_holder = np.searchsorted(holders[order], holders[order])
        starts = np.empty_like(before)
        starts[order] = before - before[first_of_holder]
        return starts.reshape(cells.shape).transpose(by_expert)

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

        def by_expert(values: np.ndarray) -> np.ndarray:
            """Return the values of the chosen origins' cells, sorted by expert, then origin."""
            return values[chosen].transpose(1, 0, 2).reshape(-1)

        begin, end = (by_expert(values) for values in self._range(number))
        cells = by_expert(self.cells)
        num_rows = np.maximum(end - begin, 0)

        # the slice's rows of a cell are consecutive, from `first` on
        first = cells.cumsum() - cells + begin
        rows_before = num_rows.cumsum() - num_rows
        indices = np.arange(int(num_rows.sum())) + np.repeat(first - rows_before, num_rows)

        origin_of_rank = np.arange(len(self.cells))[:, None, None]
        origin_of_cell = by_expert(np.broadcast_to(origin_of_rank, self.cells.shape))
        return indices, np.repeat(origin_of_cell, num_rows)

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
    at_home = copies
    cells = at_home[:, :, None]
    if replicated is not None:
        num_helpers = holders.shape[2] - 1
        helped = replicated.table((*copies.shape, num_helpers))
        at_home = replicated.staying(copies)
        cells = np.concatenate([at_home[:, :, None], helped], axis=2)
    assert ((holders >= 0) | (cells == 0)).all(), "rows that no rank computes"
    # cells that no rank computes, -1, have no rows, so they may as well be rank 0's
    return Cut(cells, np.maximum(holders, 0), limits)
