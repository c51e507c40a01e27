"""A budget of rows at each rank's experts: what skew would put there beyond it goes to helpers, or is run in slices.

Under `Plan.token_budget` a dropless layer never needs more memory than the budget allows. Where the plan replicates
copies, what is over the budget goes to ranks with room. Where no rank has room, or nothing may be replicated, or
replication costs more, the call runs in slices, dispatch to combine, of at most so many rows at any rank's experts
(`slices.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.balance.replication.bounded import fitting_tables, limits_of_ranks, seconds
from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.slices import Cut, cut
from moesaic.errors import InputError
from moesaic.plan import Compiled
from moesaic.program.task import Op

_Way = tuple[Compiled, np.ndarray | None, Cut]
"""What runs, what it replicates, and how it is cut."""


@dataclass
class BudgetUse:
    """What a layer's calls did about their budget, over all ranks; the same on every rank."""

    calls: int = 0
    """Calls of the layer, recomputations among them."""
    rows_over: int = 0
    """Rows beyond the budget of the rank that they were bound for, before anything was done about them."""
    rows_spilled: int = 0
    """Rows that were replicated to another rank for it."""
    sliced_calls: int = 0
    """Calls that ran in slices."""
    slices: int = 0
    """Slices of these calls."""


class TokenBudget:
    """Holds the calls of one layer to their plan's budget.

    Args:
        compiled: of the layer; its plan has the budget.
        num_experts: of the layer.
        dim: width of a token.
        costs: by which slices are weighed against replication; None for those of `cost.Machine`.
    """

    def __init__(self, compiled: Compiled, num_experts: int, dim: int, costs: ReplicationCosts | None = None) -> None:
        self.compiled, self.num_experts, self.dim = compiled, num_experts, dim
        self.costs = costs or ReplicationCosts()
        self.use = BudgetUse()
        self._holders: dict[bytes, np.ndarray] = {}

    def hold(
        self, compiled: Compiled, replicated: np.ndarray | None, copies: np.ndarray, units: int
    ) -> tuple[Compiled, np.ndarray | None, Cut | None]:
        """Return what a call runs, what it replicates, and how it is cut; None where it runs as a whole.

        Args:
            compiled: what it would run without a budget.
            replicated: (world, num_experts, ep) int64, what it would replicate; None for nothing.
            copies: (world, num_experts) int64 that each origin has for each expert.
            units: hidden units of one shard of an expert.
        """
        budget = self.compiled.plan.token_budget
        if budget is None:
            return compiled, replicated, None
        load = CallLoad(self.compiled.grid, copies, self.num_experts, units, self.dim)
        held = self._held(compiled)
        self.use.calls += 1
        self.use.rows_over += cut(held, load.copies, replicated, budget).rows_over
        wanted = 0 if replicated is None else int(replicated.sum())
        found = self._cut(compiled, replicated, load, budget)
        if found is None or found.num_slices > 1:
            compiled, replicated, found = self._cheapest(self._ways(compiled, replicated, found, load, budget), load)
        self.use.rows_spilled += max((0 if replicated is None else int(replicated.sum())) - wanted, 0)
        if found.num_slices == 1:
            return compiled, replicated, None
        self.use.sliced_calls += 1
        self.use.slices += found.num_slices
        return compiled, replicated, found

    def _cut(self, compiled: Compiled, replicated: np.ndarray | None, load: CallLoad, budget: int) -> Cut | None:
        """Return a call cut; None where replicated weights alone take the budget somewhere."""
        limits = budget if replicated is None else limits_of_ranks(load, replicated, budget)
        return cut(self._held(compiled), load.copies, replicated, limits) if np.min(limits) >= 1 else None

    def _ways(
        self, compiled: Compiled, replicated: np.ndarray | None, found: Cut | None, load: CallLoad, budget: int
    ) -> Iterator[_Way]:
        """Yield in which ways a call fits its budget: as it would run, with nothing replicated, with another table."""
        if found is not None:
            yield compiled, replicated, found
        if not self.compiled.replicates:
            return
        bare = self.compiled.unreplicated or self.compiled
        whole = self._cut(bare, None, load, budget)
        assert whole is not None, "without replication a budget can always be held"
        yield bare, None, whole
        replication = compiled if compiled.replicates else self.compiled
        none = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
        for table in fitting_tables(load, none if replicated is None else replicated, budget, whole.num_slices):
            other = self._cut(replication, table, load, budget)
            if other is not None:
                yield replication, table, other

    def _cheapest(self, ways: Iterable[_Way], load: CallLoad) -> _Way:
        """Return the way that takes least by the policies' model."""
        none = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)

        def cost(way: _Way) -> float:
            _, replicated, found = way
            return seconds(load, self.costs, none if replicated is None else replicated, found.num_slices)

        return min(ways, key=cost)

    def refuse_padding(self) -> None:
        """Raise InputError if there is a budget: with a padded capacity no rank has the counts that it is held by."""
        budget = self.compiled.plan.token_budget
        if budget is not None:
            raise InputError(
                f"a padded capacity clashes with token_budget={budget}, which is held by counts that no rank then has: "
                "leave token_budget unset, since a padded capacity bounds memory by itself, or do not pad"
            )

    def take(self) -> BudgetUse:
        """Return what was counted since the last `take`."""
        found, self.use = self.use, BudgetUse()
        return found

    def _held(self, compiled: Compiled) -> np.ndarray:
        if compiled.digest not in self._holders:
            self._holders[compiled.digest] = holders_of(compiled, self.num_experts)
        return self._holders[compiled.digest]


def holders_of(compiled: Compiled, num_experts: int) -> np.ndarray:
    """Return at whose experts the rows of each origin for each expert are, (world, num_experts, 1 or 1 + ep) int64.

    The shards of an expert see the same rows, so the first rank stands for all; -1 where there can be none.

    Args:
        compiled: the program.
        num_experts: of the layer.
    """
    grid, shapes = compiled.grid, compiled.shapes(num_experts)
    layouts = [compiled.logical.slot(task.reads[0]).layout for task in compiled.logical.tasks if task.op is Op.EXPERT]
    holders = np.full((grid.world, num_experts, 1 + grid.ep * compiled.replicates), -1)
    for rank in range(grid.world):
        pieces = [shapes.pieces(layout, rank) for layout in layouts]
        origin, expert, chunk = (
            np.concatenate([getattr(each, name) for each in pieces]) for name in ("origin", "expert", "chunk")
        )
        part = np.maximum(chunk - shapes.num_chunks + 1, 0)
        found = np.unique(holders[origin, expert, part])
        joined = rank if found.max(initial=-1) < 0 else int(found[found >= 0].min())
        holders[np.isin(holders, found[found >= 0])] = (
            joined  # ranks that share some rows are held to one budget together
        )
        holders[origin, expert, part] = joined
    return holders
