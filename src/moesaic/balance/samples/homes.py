"""`Homes`: which samples each rank has at a point of a forward pass, as numbers that all ranks share.

A sample is one sequence with everything that belongs to it. Attention never looks across samples, so a sample may be
anywhere, whole; what moves it is decided elsewhere (`two_stage.py`) and done elsewhere (`runtime/balance/samples/relocate.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.errors import InputError


@dataclass(frozen=True, eq=False)
class Homes:
    """Every rank has equally many samples, in slots."""

    samples: np.ndarray
    """(ranks, slots) int64: which sample is in each slot; each of 0 to ranks * slots - 1 stands once."""

    def __post_init__(self) -> None:
        wanted = np.arange(self.samples.size)
        if self.samples.ndim != 2 or not np.array_equal(np.sort(self.samples, axis=None), wanted):
            raise InputError(
                f"a placement must name each of its {self.samples.size} samples once, in (ranks, slots): "
                f"got shape {self.samples.shape}"
            )

    @classmethod
    def start(cls, ranks: int, slots: int) -> Homes:
        """Return where samples are before any has moved: sample rank * slots + slot."""
        return cls(np.arange(ranks * slots).reshape(ranks, slots))

    @classmethod
    def of_ranks(cls, rank: np.ndarray, ranks: int) -> Homes:
        """Return the homes in which each sample is on a given rank, samples of a rank in ascending order.

        Args:
            rank: (samples,) int64, each rank equally often.
            ranks: how many there are.

        Raises:
            InputError: if the samples are not split evenly.
        """
        counts = np.bincount(rank, minlength=ranks)
        if len(counts) != ranks or (counts != len(rank) // ranks).any():
            raise InputError(
                f"{len(rank)} samples do not split evenly over {ranks} ranks when ranks get {counts.min()} to "
                f"{counts.max()}: give each rank {len(rank) // ranks}"
            )
        return cls(np.argsort(rank, kind="stable").reshape(ranks, -1))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return int(self.samples.shape[0])

    @property
    def slots(self) -> int:
        """Samples that each rank has."""
        return int(self.samples.shape[1])

    @cached_property
    def place(self) -> np.ndarray:
        """Where each sample is, (samples,) int64: rank * slots + slot."""
        found = np.empty(self.samples.size, dtype=np.int64)
        found[self.samples.reshape(-1)] = np.arange(self.samples.size)
        return found

    @cached_property
    def rank(self) -> np.ndarray:
        """The rank that each sample is on, (samples,) int64."""
        return self.place // self.slots

    def targets(self, after: Homes) -> tuple[np.ndarray, np.ndarray]:
        """Return where the sample in each slot goes: the rank and the slot there, (ranks, slots) int64 each."""
        place = after.place[self.samples]
        return place // self.slots, place % self.slots

    def moved(self, after: Homes, groups: np.ndarray | None = None) -> int:
        """Return how many samples go to another rank, or to another group of ranks.

        Args:
            after: where they go.
            groups: (ranks,) the group of each rank, such as its node; None for each rank its own.
        """
        of = np.arange(self.ranks) if groups is None else groups
        return int((of[self.rank] != of[after.rank]).sum())

    def same_as(self, other: Homes) -> bool:
        """Whether every sample is in the same slot."""
        return np.array_equal(self.samples, other.samples)
