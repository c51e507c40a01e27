"""Which copies of a call are computed elsewhere than at the home of their expert, as a sparse
table.

Few of all combinations of origin, expert and helper occur: at 64 ranks a dense table takes longer
to fill than a decision.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Replications(NamedTuple):
    """A sparse table of replicated copies. Several entries may have the same origin, expert and
    helper."""

    origin: np.ndarray
    """(n,) int64: the rank from which the copies come; in tables of one replica of the experts, the
    place of ep."""
    expert: np.ndarray
    """(n,) int64: the expert of the copies."""
    helper: np.ndarray
    """(n,) int64: the place of ep that computes the copies."""
    amount: np.ndarray
    """(n,) int64: the number of copies, above 0."""

    @classmethod
    def of(cls, table: np.ndarray) -> Replications:
        """Return the nonzero entries of a dense table, (origins, num_experts, ep) int64."""
        origin, expert, helper = np.nonzero(table)
        return cls(origin, expert, helper, table[origin, expert, helper])

    def table(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the dense table, int64 of the shape (origins, num_experts, ep)."""
        replicated = np.zeros(shape, dtype=np.int64)
        np.add.at(replicated, (self.origin, self.expert, self.helper), self.amount)
        return replicated

    def joined(self, *others: Replications) -> Replications:
        """Return the entries of all these tables."""
        return Replications(*(np.concatenate(parts) for parts in zip(self, *others)))

    def where(self, chosen: np.ndarray) -> Replications:
        """Return the entries that a mask or an index, an array, chooses."""
        return Replications(*(each[chosen] for each in self))

    def staying(self, copies: np.ndarray) -> np.ndarray:
        """Return how many of the copies, (origins, num_experts) int64, are not replicated."""
        staying = copies.copy()
        np.subtract.at(staying, (self.origin, self.expert), self.amount)
        return staying

    def helped(self, num_experts: int, ep: int) -> np.ndarray:
        """Return whether an expert is replicated to a place, (num_experts, ep) bool."""
        helped = np.zeros((num_experts, ep), dtype=bool)
        helped[self.expert, self.helper] = True
        return helped

    @property
    def is_empty(self) -> bool:
        """Whether nothing is replicated."""
        return len(self.amount) == 0

    @property
    def total(self) -> int:
        """Number of replicated copies."""
        return int(self.amount.sum())


NOTHING = Replications(*np.zeros((4, 0), dtype=np.int64))
