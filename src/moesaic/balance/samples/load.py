"""What placing samples costs: which rows cross which links for each sample and each rank that it might live on.

NetMoE (Liu et al., ICLR 2025), sections 3 and 4: with num[i, e] copies of sample i bound for expert e, moving sample i after
a layer changes the gather of that layer and the scatter of the next, each by the copies whose expert is elsewhere. Two
things are counted that the paper leaves out: shards of an expert (each wants every copy), and the residual that goes from
the old home to the new one where it cannot ride along with the experts' results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moesaic.balance.replication.links import nodes_of, ranks_by_place
from moesaic.balance.samples.homes import Homes
from moesaic.errors import InputError
from moesaic.program.grid import Grid


class Volume(NamedTuple):
    """Rows of one movement out and one back, over all ranks; rows that stay on a rank count nowhere."""

    intra: int
    """Between ranks of one node."""
    inter: int
    """Between nodes."""


@dataclass(frozen=True, eq=False)
class SampleLoad:
    """What a placer decides from, the same on all ranks."""

    grid: Grid
    """With tp = 1: every rank has samples of its own."""
    homes: Homes
    """Where the samples are."""
    copies: np.ndarray
    """(samples, num_experts) int64: copies of each sample that this layer sends to each expert."""
    following: np.ndarray | None
    """The same of the next MoE layer, predicted; None after the last."""
    carried: int = 0
    """Rows per sample that a move sends from the old home to the new one: the sample's tokens where the residual travels on
    its own, 0 where it rides along."""

    def __post_init__(self) -> None:
        grid, samples = self.grid, self.homes.samples.size
        if grid.tp > 1:
            raise InputError(f"sample placement needs mesh.tp=1, got {grid.tp}: a sample must be whole on its rank")
        if self.homes.ranks != grid.world:
            raise InputError(f"a placement over {self.homes.ranks} ranks does not fit a mesh of {grid.world}")
        for name in ("copies", "following"):
            table = getattr(self, name)
            if table is not None and (table.ndim != 2 or len(table) != samples or table.shape[1] % grid.ep):
                raise InputError(
                    f"{name} of shape {table.shape} does not fit {samples} samples and mesh.ep={grid.ep}: give "
                    "(samples, num_experts)"
                )

    @cached_property
    def node(self) -> np.ndarray:
        """The node of each rank, (ranks,) int64."""
        return nodes_of(self.grid)

    @cached_property
    def replicas(self) -> list[np.ndarray]:
        """The ranks of each copy of the experts, ascending: samples never leave theirs."""
        return [np.sort(ranks, axis=None) for ranks in ranks_by_place(self.grid)]

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that cross links (intra, inter) if a sample lives on a rank, (samples, ranks) int64 each.

        A rank outside the sample's copy of the experts has meaningless entries: no sample goes there.
        """
        total = self.copies if self.following is None else np.concatenate([self.copies, self.following], axis=1)
        holders = [np.concatenate([self._holders(n, links) for n in self._widths]) for links in ("intra", "inter")]
        # Whole numbers in float64: exact below 2**53, and a product of those is many times faster than of int64.
        inside, across = (np.rint(total.astype(np.float64) @ table).astype(np.int64) for table in holders)
        now, ranks = self.homes.rank, np.arange(self.grid.world)
        leaves = now[:, None] != ranks[None, :]
        far = self.node[now][:, None] != self.node[None, :]
        return inside + self.carried * (leaves & ~far), across + self.carried * far

    def volume(self, homes: Homes) -> Volume:
        """Return the rows that cross links when this layer's results, and the next layer's copies, use these homes."""
        every = np.arange(homes.samples.size)
        intra, inter = (table[every, homes.rank].sum() for table in self.rows)
        return Volume(int(intra), int(inter))

    def seconds(self, homes: Homes, intra: float, inter: float) -> float:
        """Return the modelled time of a placement: the slower kind of link (NetMoE, section 3, equation 1).

        Args:
            homes: the placement.
            intra: seconds per row within a node, over all of them.
            inter: seconds per row between nodes.
        """
        rows = self.volume(homes)
        return max(rows.intra * intra, rows.inter * inter)

    @property
    def _widths(self) -> tuple[int, ...]:
        """Experts of this layer, and of the next."""
        return (self.copies.shape[1],) if self.following is None else (self.copies.shape[1], self.following.shape[1])

    def _holders(self, num_experts: int, links: str) -> np.ndarray:
        """Return on how many other ranks a shard of each expert lives, seen from each rank, (num_experts, ranks) int64."""
        grid = self.grid
        table = np.zeros((num_experts, grid.world), dtype=np.int64)
        each = num_experts // grid.ep
        for ranks in self.replicas:
            for holder in ranks:
                first = grid.coordinate(int(holder), "ep") * each
                near = self.node[ranks] == self.node[holder]
                seen = ranks[near & (ranks != holder)] if links == "intra" else ranks[~near]
                table[first : first + each, seen] += 1
        return table
