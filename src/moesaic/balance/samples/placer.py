"""The interface of sample placement: where samples live (`Homes`), what that costs (`SampleLoad`), and who decides it.

A sample is one sequence with everything that belongs to it. Attention never looks across samples, so a sample may be
anywhere, whole; what moves it stands elsewhere (`runtime/balance/relocate.py`).

NetMoE (Liu et al., ICLR 2025), sections 3 and 4: with num[i, e] copies of sample i bound for expert e, moving sample i after
a layer changes the gather of that layer and the scatter of the next, each by the copies whose expert is elsewhere. Three
things are counted that the paper leaves out: shards of an expert (each wants every copy), the residual that goes from
the old home to the new one where it cannot ride along with the experts' results, and programs whose results come back to the
old home first, so that a move changes the scatter of the next layer alone.

Where a tensor group works on a sample together, the sample has the home of the rank that answers for it: each rank for as
many of its group's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moesaic.balance.replication.links import nodes_of, ranks_by_place
from moesaic.cost.alpha_beta import Machine
from moesaic.errors import InputError
from moesaic.program.grid import Grid

LEAST_GAIN = 0.1
"""Share of the rows between nodes that moves must promise to save. Samples that hardly differ promise 6 to 9 % by chance, of
which nothing is left once the next layer has routed; those that do (locality 0.2 as `moesaic trace show` has it) promise 15 %
and more (`moesaic_lab/netmoe`, `moesaic_lab/relocate_train.py`)."""


REST = 15
"""Forward passes: with one asked after as many, deciding costs a sixteenth of what it does in every pass."""


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
    """The mesh."""
    homes: Homes
    """Where the samples are."""
    copies: np.ndarray
    """(samples, num_experts) int64: copies of each sample that this layer sends to each expert."""
    following: np.ndarray | None
    """The same of the next MoE layer, predicted; None after the last."""
    carried: int | np.ndarray = 0
    """Rows per sample, (samples,) int64 or one number, that a move sends from the old home to the new one: the sample's tokens
    where the residual travels on its own; where it rides along, those tokens that have no copy."""
    is_direct: bool = True
    """This layer's results go straight to the new homes; False: home first, whatever is decided."""

    def __post_init__(self) -> None:
        grid, samples = self.grid, self.homes.samples.size
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
        counted = [table for table in (self.copies if self.is_direct else None, self.following) if table is not None]
        total = np.concatenate([self.copies[:, :0], *counted], axis=1)
        holders = [self._holders([table.shape[1] for table in counted], links) for links in ("intra", "inter")]
        # Whole numbers in float64: exact below 2**53, and a product of those is many times faster than of int64.
        inside, across = (np.rint(total.astype(np.float64) @ table).astype(np.int64) for table in holders)
        now, ranks = self.homes.rank, np.arange(self.grid.world)
        leaves = now[:, None] != ranks[None, :]
        far = self.node[now][:, None] != self.node[None, :]
        carried = np.reshape(self.carried, (-1, 1))
        return inside + carried * (leaves & ~far), across + carried * far

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

    def _holders(self, widths: list[int], links: str) -> np.ndarray:
        """Return on how many other ranks a shard of each expert of some layers lives, seen from each rank.

        Args:
            widths: experts of each layer.
            links: "intra" or "inter".

        Returns:
            (experts of all layers, ranks) int64.
        """
        grid = self.grid
        table = np.zeros((sum(widths), grid.world), dtype=np.int64)
        for layer, num_experts in enumerate(widths):
            each = num_experts // grid.ep
            for ranks in self.replicas:
                for holder in ranks:
                    first = sum(widths[:layer]) + grid.coordinate(int(holder), "ep") * each
                    near = self.node[ranks] == self.node[holder]
                    seen = ranks[near & (ranks != holder)] if links == "intra" else ranks[~near]
                    table[first : first + each, seen] += 1
        return table


def check(least_gain: float, rest: int) -> None:
    """Raise InputError for what is no share, or no number of passes."""
    if not 0 <= least_gain < 1:
        raise InputError(f"placement least_gain={least_gain}: choose a share from 0 to below 1")
    if rest < 0:
        raise InputError(f"placement rest={rest}: choose 0 or more passes")


@dataclass(frozen=True, kw_only=True)
class PlacerOptions:
    """What a run tells the policy that it names; a policy takes what it needs of it."""

    machine: Machine = field(default_factory=Machine)
    """Rates of one rank's links."""
    least_gain: float = LEAST_GAIN
    """Share of what moves are to save that they must save, else nobody moves; from 0 to below 1."""
    rest: int = REST
    """As `AbstractPlacer.rest`."""


class AbstractPlacer(ABC):
    """A policy: where samples live after a layer. Every rank calls it with the same load and gets the same answer."""

    rest: int = 0
    """After forward passes in which it moved nobody, so many may go by in which it is not asked, and nothing is told for it;
    0: it is asked in every pass."""

    @abstractmethod
    def decide(self, load: SampleLoad) -> Homes:
        """Return where the samples go; each stays within its copy of the experts.

        Args:
            load: the same on all ranks.
        """


class Stay(AbstractPlacer):
    """Nobody moves."""

    def decide(self, load: SampleLoad) -> Homes:
        """Return the homes as they are."""
        return load.homes


class Given(AbstractPlacer):
    """Goes where it is told, call after call, and then starts over: for tests and replays.

    Args:
        homes: one per call.
    """

    def __init__(self, homes: list[Homes]) -> None:
        self._homes, self._calls = homes, 0

    def decide(self, load: SampleLoad) -> Homes:
        """Return the next homes."""
        found = self._homes[self._calls % len(self._homes)]
        self._calls += 1
        return found
