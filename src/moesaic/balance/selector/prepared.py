"""What the next call of a layer runs, prepared while this one runs, so that the next one only fits it to its own counts.

To make a table of replicated copies takes milliseconds where ranks and experts are many. So all that can be known before the
counts is done beforehand: which copies of which origin go to which helper, as shares of the counts of the call before (NetMoE
and LAER-MoE decide from the call before too), and the memory of the table. What is left is one product per entry, in whole
numbers, so that all ranks come to the same table. Small tables of shadows are made from the counts themselves, which is as
quick, and so are those of a load that moved so much that the shares of the call before leave some place busier than they did
then. Such a load is also weighed once more: what was about as good under the call before may be better now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicaLoad
from moesaic.balance.replication.tables import DECIMALS, NOTHING, Replications, spread
from moesaic.balance.selector.options import NO_CHANGE, CallChoice, Weigher

SMALL = 1024
"""Counts of a call, ranks times experts, up to which shadows are found among them; to weigh anything once more takes as long as
so small a call could gain by it."""

WORSE = 0.15
"""Share of the mean load by which the busiest place may be busier than when its table was prepared."""


@dataclass(frozen=True)
class Pick:
    """What a call runs, decided before its counts were known, and the table made from them."""

    choice: CallChoice
    found: tuple[ReplicaLoad, ...]
    table: np.ndarray | None
    """What is replicated, (world, num_experts, ep) int64; None for nothing."""
    is_trial: bool = False
    cells: np.ndarray | None = None
    """(n,) int64: where the flat table may not be 0; None for everywhere."""

    @cached_property
    def replicated(self) -> tuple[Replications, ...]:
        """By replica of the experts."""
        if self.table is None:
            return (NOTHING,) * len(self.found)
        cells = np.flatnonzero(self.table) if self.cells is None else self.cells
        amounts = self.table.reshape(-1)[cells]
        cells, amounts = cells[amounts > 0], amounts[amounts > 0]
        rank, expert, helper = np.unravel_index(cells, self.table.shape)
        found = []
        for replica in self.found:
            place = np.full(len(self.table), -1)
            place[replica.origins] = np.arange(len(replica.origins))[:, None]
            mine = place[rank] >= 0
            found.append(Replications(place[rank][mine], expert[mine], helper[mine], amounts[mine]))
        return tuple(found)


class Prepared:
    """The next call's choice and table. `fit` is all that is done in the way of the call.

    Args:
        weigher: makes tables.
        choice: what the next call runs.
        is_trial: whether it is run to learn what it takes.
        found: the loads of the call before.
        factors: what is about as good, the choice first, and what the model's seconds of each are multiplied by; {} for the
            choice alone. Where the load moved too much for the table, the fastest of them by its own counts runs.
    """

    def __init__(
        self, weigher: Weigher, choice: CallChoice, is_trial: bool, found: Sequence[ReplicaLoad],
        factors: Mapping[CallChoice, float] | None = None,
    ) -> None:  # fmt: skip
        self.choice, self.is_trial, self._weigher = choice, is_trial, weigher
        self._links = [each.links for each in found]
        load = found[0].load
        is_small = load.copies.size <= SMALL
        self._factors = {choice: 1.0} if is_small or not factors else dict(factors)
        self._is_quick = is_small and choice.recipe.is_quick
        self._cells, self._amounts, self._of = (np.zeros(0, dtype=np.int64),) * 3
        self._memory: np.ndarray | None = None
        self._busiest = np.inf
        self._places: tuple[np.ndarray, np.ndarray] | None = None
        text = hashlib.blake2b(f"{choice}{is_trial}".encode(), digest_size=6)
        text.update(repr(list(self._factors.items())).encode())
        replicated = None if self._is_quick else weigher.tables(choice.recipe, found)
        if replicated is not None:
            self._cells, self._amounts = _entries(found, replicated)
            self._of = load.copies.reshape(-1)[self._cells // load.grid.ep]
            self._busiest = self._busiest_place(load, self._amounts)
            self._memory = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
            self._memory.reshape(-1)[self._cells] = (
                self._amounts
            )  # written again by `fit`, in pages that are there by now
            text.update(self._cells.tobytes() + self._amounts.tobytes())
        self.digest = int.from_bytes(text.digest(), "big")
        """A whole number below 2^48 that two ranks share if they prepared the same; exact as a float64."""

    @property
    def choices(self) -> tuple[CallChoice, ...]:
        """What is decided, and what is weighed once more where the load moved."""
        return tuple(self._factors)

    def fit(self, load: CallLoad) -> Pick:
        """Return what a call runs.

        Args:
            load: of the call.
        """
        found = tuple(ReplicaLoad(load, links) for links in self._links)
        if not self.choice.recipe.policy:
            return Pick(self.choice, found, None, self.is_trial)
        if self._is_quick:
            return self._picked(self.choice, found, self._weigher.tables(self.choice.recipe, found))
        amounts = self._fitted(load)
        if amounts is None:
            return self._anew(found)
        table = self._filled(load, amounts)
        return (
            Pick(NO_CHANGE, found, None)
            if table is None
            else Pick(self.choice, found, table, self.is_trial, self._cells)
        )

    def _anew(self, found: tuple[ReplicaLoad, ...]) -> Pick:
        """Return what runs where the load moved too much for the table."""
        made = {choice: self._weigher.anew(choice.recipe, found) for choice in self._factors}
        alone = self._weigher.alone(found)
        nothing = alone.replicated
        seconds = {
            choice: self._factors[choice] * self._weigher.priced(choice, replicated or nothing, found, alone).seconds
            for choice, replicated in made.items()
            if replicated is not None or not choice.recipe.policy
        }
        best = min(seconds, key=lambda choice: round(seconds[choice], DECIMALS), default=NO_CHANGE)
        return self._picked(best, found, made.get(best))

    def _picked(
        self, choice: CallChoice, found: tuple[ReplicaLoad, ...], replicated: tuple[Replications, ...] | None
    ) -> Pick:
        """Return a choice with its tables; leaving alone where they are empty and it would replicate."""
        table = None if replicated is None else spread(found, replicated)
        is_whole = table is not None or not choice.recipe.policy
        return (
            Pick(choice, found, table, self.is_trial and choice == self.choice)
            if is_whole
            else Pick(NO_CHANGE, found, None)
        )

    def _fitted(self, load: CallLoad) -> np.ndarray | None:
        """Return what each entry replicates, the same shares of the call's copies; None if the load moved too much for that."""
        now = load.copies.reshape(-1)[self._cells // load.grid.ep]
        amounts: np.ndarray = self._amounts * now // self._of
        return amounts if self._busiest_place(load, amounts) <= self._busiest + WORSE else None

    def _busiest_place(self, load: CallLoad, amounts: np.ndarray) -> float:
        """Return the copies that the busiest place of ep computes under the entries, all replicas together, over the mean."""
        ep, experts = load.grid.ep, load.num_experts
        if self._places is None:
            self._places = load.home[self._cells // ep % experts], self._cells % ep
        loads = load.copies.sum(0).reshape(ep, -1).sum(1)
        slowness = self._links[0].slowness
        source, target = self._places
        moved = np.bincount(target, amounts, ep) - np.bincount(source, amounts, ep)
        total = int(loads.sum())
        return float(((loads + moved) * slowness).max()) * ep / total if total else 0.0

    def _filled(self, load: CallLoad, amounts: np.ndarray) -> np.ndarray | None:
        """Return the table with these entries; None for nothing."""
        if not amounts.any():
            return None
        table, self._memory = self._memory, None
        if table is None:  # asked for once more: the first call may still need its table
            table = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
        table.reshape(-1)[self._cells] = amounts
        return table


def _entries(found: Sequence[ReplicaLoad], replicated: Sequence[Replications]) -> tuple[np.ndarray, np.ndarray]:
    """Return where the flat table of all origins is not 0, (n,) int64 ascending, and what is there."""
    load = found[0].load
    if any(replica.origins.shape[1] > 1 for replica in found):
        table = spread(found, replicated)
        cells = np.zeros(0, dtype=np.int64) if table is None else np.flatnonzero(table)
        return cells, cells if table is None else table.reshape(-1)[cells]
    parts = [
        (replica.origins[each.origin, 0] * load.num_experts + each.expert) * load.grid.ep + each.helper
        for replica, each in zip(found, replicated)
    ]
    cells, where = np.unique(np.concatenate(parts), return_inverse=True)
    amounts = np.zeros(len(cells), dtype=np.int64)
    np.add.at(amounts, where, np.concatenate([each.amount for each in replicated]))
    return cells, amounts
