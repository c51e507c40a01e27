"""Ranks and their coordinates: one world seen twice, dense `(dp, tp)` and sparse `(edp, ep, etp)`. No torch, no processes.

Ranks are numbered densely with tp innermost. In the sparse view edp is outermost, and `innermost` says whether etp or ep
changes fastest (which of the two stays inside a node).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from moesaic.errors import InputError

Axis = Literal["dp", "tp", "edp", "ep", "etp"]
DENSE: tuple[Axis, ...] = ("dp", "tp")
SPARSE: tuple[Axis, ...] = ("edp", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The sizes of the parallel axes; dp and edp follow from the world."""

    world: int
    """Ranks."""
    tp: int = 1
    """Tensor parallelism of the dense part: so many ranks hold the same tokens."""
    ep: int = 1
    """Expert parallelism: experts are split over so many ranks."""
    etp: int = 1
    """Expert-tensor parallelism: each expert's hidden width is split over so many ranks."""
    innermost: Literal["etp", "ep"] = "etp"
    """The sparse axis whose neighbours have consecutive ranks."""

    def __post_init__(self) -> None:
        for name in ("world", "tp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise InputError(f"mesh.{name}={getattr(self, name)}: must be at least 1")
        if self.world % self.tp:
            raise InputError(
                f"mesh.tp={self.tp} does not divide the {self.world} ranks: choose a divisor of {self.world}"
            )
        if self.world % (self.ep * self.etp):
            raise InputError(
                f"mesh.ep={self.ep} times mesh.etp={self.etp} does not divide the {self.world} ranks: "
                f"choose ep * etp as a divisor of {self.world}"
            )

    @property
    def dp(self) -> int:
        """Groups of ranks with tokens of their own."""
        return self.world // self.tp

    @property
    def edp(self) -> int:
        """Copies of the experts."""
        return self.world // (self.ep * self.etp)

    @property
    def shares_tp_and_etp(self) -> bool:
        """Whether the tensor groups are the expert-shard groups, as TED needs."""
        return all(self.group(rank, ("tp",)) == self.group(rank, ("etp",)) for rank in range(self.world))

    def size(self, axis: Axis) -> int:
        """Return how many ranks an axis has."""
        return int(getattr(self, axis))

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return a rank's place on an axis."""
        return self._coordinates[rank][axis]

    def group(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """Return the ranks that share `rank`'s place on all other axes of the view, ascending; it is one of them.

        Args:
            rank: a member.
            axes: axes of one view; () gives the rank alone.
        """
        return self._groups[(rank, axes)] if (rank, axes) in self._groups else self._find_group(rank, axes)

    @cached_property
    def _groups(self) -> dict[tuple[int, tuple[Axis, ...]], tuple[int, ...]]:
        return {}

    @cached_property
    def _coordinates(self) -> list[dict[Axis, int]]:
        table: list[dict[Axis, int]] = []
        inner, outer = (self.etp, self.ep) if self.innermost == "etp" else (self.ep, self.etp)
        for rank in range(self.world):
            edp, within = divmod(rank, inner * outer)
            high, low = divmod(within, inner)
            ep, etp = (high, low) if self.innermost == "etp" else (low, high)
            table.append({"dp": rank // self.tp, "tp": rank % self.tp, "edp": edp, "ep": ep, "etp": etp})
        return table

    def _find_group(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        view = next((v for v in (DENSE, SPARSE) if set(axes) <= set(v)), None)
        assert view is not None, f"{axes} are not axes of one view"
        fixed = [axis for axis in view if axis not in axes]
        mine = self._coordinates[rank]
        members = tuple(r for r, other in enumerate(self._coordinates) if all(other[a] == mine[a] for a in fixed))
        for member in members:
            self._groups[(member, axes)] = members
        return members
