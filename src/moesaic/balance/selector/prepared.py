"""Prepared decisions: the choice and table of a layer's next call, prepared during a call and later fitted to the counts.

With many ranks and experts, building a table of replicated copies takes milliseconds. Therefore everything that does not need
the next call's counts is done in advance. The table is prepared as shares of the previous call's counts, by origin, expert and
helper (NetMoE and LAER-MoE also decide from the previous call), and its memory is allocated. The call itself then computes one
integer product per entry, so all ranks get the same table.

Some tables are built from the call's own counts instead. Small tables of shadows are, since that is as fast. Tables of a load
that has changed are too, if the shares of the previous call would leave some place busier than in that call. For such a load
the best options are also compared again, since another one may be better now.
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
"""The largest size of a call's counts, ranks times experts, for which shadows are chosen from the call's own counts. Comparing
options again would take as long as such a small call could gain."""

WORSE = 0.15
"""Share of the mean load by which the busiest place may exceed its load at the time when the table was prepared."""


@dataclass(frozen=True)
class Pick:
    """A choice that was made before a call's counts were known, with the table built from the counts."""

    choice: CallChoice
    replicas: tuple[ReplicaLoad, ...]
    """The call's loads, by replica of the experts."""
    table: np.ndarray | None
    """(world, num_experts, ep) int64: the replicated copies; None if nothing is replicated."""
    is_trial: bool = False
    """Whether the choice runs to measure its time."""
    cells: np.ndarray | None = None
    """(n,) int64: the only indices at which the flattened table may be nonzero; None for all indices."""

    @cached_property
    def replicated(self) -> tuple[Replications, ...]:
        """The replications within each replica of the experts."""
        if self.table is None:
            return (NOTHING,) * len(self.replicas)
        cells = np.flatnonzero(self.table) if self.cells is None else self.cells
        amounts = self.table.reshape(-1)[cells]
        cells, amounts = cells[amounts > 0], amounts[amounts > 0]
        rank, expert, helper = np.unravel_index(cells, self.table.shape)
        replications = []
        for replica in self.replicas:
            place = np.full(len(self.table), -1)
            place[replica.origins] = np.arange(len(replica.origins))[:, None]
            in_replica = place[rank] >= 0
            replications.append(
                Replications(place[rank][in_replica], expert[in_replica], helper[in_replica], amounts[in_replica])
            )
        return tuple(replications)


class Prepared:
    """The prepared choice and table of the next call, which itself only has to call `fit`.

    Args:
        weigher: builds tables and models options.
        choice: the choice for the next call.
        is_trial: whether the choice runs to measure its time.
        replicas: the loads of the previous call, by replica of the experts.
        factors: the choices that are about equally good, with `choice` first, and the factor on the modelled seconds of each.
            If the load has changed too much for the table, the fastest of these by the call's own counts runs. None or {} for
            `choice` only.
    """

    def __init__(
        self, weigher: Weigher, choice: CallChoice, is_trial: bool, replicas: Sequence[ReplicaLoad],
        factors: Mapping[CallChoice, float] | None = None,
    ) -> None:  # fmt: skip
        self.choice, self.is_trial, self._weigher = choice, is_trial, weigher
        self._links = [each.links for each in replicas]
        load = replicas[0].load
        is_small = load.copies.size <= SMALL
        self._factors = {choice: 1.0} if is_small or not factors else dict(factors)
        self._is_quick = is_small and choice.recipe.is_quick
        self._cells, self._amounts, self._copies_before = (np.zeros(0, dtype=np.int64),) * 3
        self._memory: np.ndarray | None = None
        self._busiest = np.inf
        self._places: tuple[np.ndarray, np.ndarray] | None = None
        text = hashlib.blake2b(f"{choice}{is_trial}".encode(), digest_size=6)
        text.update(repr(list(self._factors.items())).encode())
        replicated = None if self._is_quick else weigher.tables(choice.recipe, replicas)
        if replicated is not None:
            self._cells, self._amounts = _entries(replicas, replicated)
            self._copies_before = load.copies.reshape(-1)[self._cells // load.grid.ep]
            self._busiest = self._busiest_place(load, self._amounts)
            self._memory = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
            self._memory.reshape(-1)[self._cells] = (
                self._amounts
            )  # `fit` overwrites these; writing now makes the system map the memory pages in advance
            text.update(self._cells.tobytes() + self._amounts.tobytes())
        self.digest = int.from_bytes(text.digest(), "big")
        """An integer below 2^48, exact as a float64, which is equal on ranks that prepared the same."""

    @property
    def choices(self) -> tuple[CallChoice, ...]:
        """The choice, and the choices with which it is compared again if the load has changed."""
        return tuple(self._factors)

    def fit(self, load: CallLoad) -> Pick:
        """Return the choice and the table for a call.

        Args:
            load: the load of the call.
        """
        replicas = tuple(ReplicaLoad(load, links) for links in self._links)
        if not self.choice.recipe.policy:
            return Pick(self.choice, replicas, None, self.is_trial)
        if self._is_quick:
            return self._picked(self.choice, replicas, self._weigher.tables(self.choice.recipe, replicas))
        amounts = self._fitted(load)
        if amounts is None:
            return self._fastest(replicas)
        table = self._filled(load, amounts)
        return (
            Pick(NO_CHANGE, replicas, None)
            if table is None
            else Pick(self.choice, replicas, table, self.is_trial, self._cells)
        )

    def _fastest(self, replicas: tuple[ReplicaLoad, ...]) -> Pick:
        """Return the fastest of the prepared choices for a load that has changed too much for the prepared table."""
        tables = {choice: self._weigher.retuned(choice.recipe, replicas) for choice in self._factors}
        alone = self._weigher.alone(replicas)
        no_tables = alone.replicated
        seconds = {
            choice: self._factors[choice]
            * self._weigher.priced(choice, replicated or no_tables, replicas, alone).seconds
            for choice, replicated in tables.items()
            if replicated is not None or not choice.recipe.policy
        }
        best = min(seconds, key=lambda choice: round(seconds[choice], DECIMALS), default=NO_CHANGE)
        return self._picked(best, replicas, tables.get(best))

    def _picked(
        self, choice: CallChoice, replicas: tuple[ReplicaLoad, ...], replicated: tuple[Replications, ...] | None
    ) -> Pick:
        """Return a choice with its tables, or that of leaving the call alone if a policy's tables are empty."""
        table = None if replicated is None else spread(replicas, replicated)
        is_whole = table is not None or not choice.recipe.policy
        return (
            Pick(choice, replicas, table, self.is_trial and choice == self.choice)
            if is_whole
            else Pick(NO_CHANGE, replicas, None)
        )

    def _fitted(self, load: CallLoad) -> np.ndarray | None:
        """Return the copies that each entry replicates by its prepared share; None if the load has changed too much."""
        copies = load.copies.reshape(-1)[self._cells // load.grid.ep]
        amounts: np.ndarray = self._amounts * copies // self._copies_before
        return amounts if self._busiest_place(load, amounts) <= self._busiest + WORSE else None

    def _busiest_place(self, load: CallLoad, amounts: np.ndarray) -> float:
        """Return the load of the busiest place of ep under the entries, over all replicas, relative to the mean."""
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
        """Return the table with these amounts in the prepared cells; None if all are 0."""
        if not amounts.any():
            return None
        table, self._memory = self._memory, None
        if table is None:  # `fit` was called before, and that call may still need its table
            table = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
        table.reshape(-1)[self._cells] = amounts
        return table


def _entries(replicas: Sequence[ReplicaLoad], replicated: Sequence[Replications]) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the nonzero entries of the flattened table, (n,) int64 ascending, and their values."""
    load = replicas[0].load
    if any(replica.origins.shape[1] > 1 for replica in replicas):
        table = spread(replicas, replicated)
        cells = np.zeros(0, dtype=np.int64) if table is None else np.flatnonzero(table)
        return cells, cells if table is None else table.reshape(-1)[cells]
    parts = [
        (replica.origins[each.origin, 0] * load.num_experts + each.expert) * load.grid.ep + each.helper
        for replica, each in zip(replicas, replicated)
    ]
    cells, where = np.unique(np.concatenate(parts), return_inverse=True)
    amounts = np.zeros(len(cells), dtype=np.int64)
    np.add.at(amounts, where, np.concatenate([each.amount for each in replicated]))
    return cells, amounts
