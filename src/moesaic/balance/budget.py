"""Keeps each call of a layer within a memory budget, by replication to helper ranks or by running
the call in slices.

Under `Plan.memory_budget` a dropless layer holds no more bytes than the budget on any rank, forward
and backward, under any routing. The bytes of a call follow from its programs and its counts
(`program/call_memory.py`), so every rank knows those of all ranks before anything is sent. If the
plan replicates, copies beyond the budget go to ranks with room. If no rank has room, if the plan
does not replicate, or if replication costs more, the call runs in slices, each from dispatch to
combine. As many slices as fit are kept for the backward pass; the others are recomputed in it.

A *way* to run a call is a program and a table of replicated copies; an *option* is a way with a
*cut* into slices. Peaks are the most bytes that each rank holds at a time, (world,). Helpers and
replication tables are those of `replication/policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from moesaic.balance.replication.bounded import fitting_tables, seconds
from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.slices import Cut, cut
from moesaic.errors import InputError
from moesaic.program.compile import Compiled
from moesaic.program.plan import NO_REPLICATION
from moesaic.program.rates import Rates
from moesaic.program.replications import NOTHING, Replications
from moesaic.program.row_counts import RankRows
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Op
from moesaic.runtime.call_counts import CountedCall

TRIES = 16
"""Largest number of slice counts that are tried until a call fits."""
MORE_SLICES = (1.5, 2.0)
"""Multiples of the smallest fitting number of slices that are also tried: with smaller slices, more
rows can be kept."""

_Option = tuple[Compiled, Replications | None, Cut]
"""A way to run a call: the compiled plan, the replicated rows, and the slices."""


@dataclass
class BudgetUse:
    """Statistics about the memory budget of the calls of a layer, over all ranks; the same on every
    rank."""

    calls: int = 0
    """Calls of the layer, including recomputations."""
    bytes_over: int = 0
    """Bytes beyond the budget, summed over ranks, that the calls would hold without replication for
    the budget or slices."""
    rows_spilled: int = 0
    """Rows that were replicated to another rank because of the budget."""
    sliced_calls: int = 0
    """Calls that ran in slices."""
    slices: int = 0
    """Slices of these calls."""
    kept_slices: int = 0
    """Slices that were kept for the backward pass; the others ran twice."""


class MemoryBudget:
    """Decides how each call of one layer stays within the memory budget of its plan.

    Args:
        compiled: the compiled plan of the layer, which has the budget.
        costs: cost model that compares slices with replication; None for the usual one.
    """

    def __init__(self, compiled: Compiled, num_experts: int, costs: Rates | None = None) -> None:
        self.compiled = compiled
        self.num_experts = num_experts
        self.costs = costs or Rates()
        self.use = BudgetUse()
        """The statistics since the last `take`."""
        self._holders: dict[bytes, np.ndarray] = {}
        """`holders_of` the programs that were cut, by their digest."""

    def hold(
        self, compiled: Compiled, replicated: Replications | None, call: CountedCall
    ) -> tuple[Compiled, Replications | None, Cut | None]:
        """Return how a call runs within the budget: the compiled plan, the replicated rows, and the
        slices.

        The slices are None if the call runs as a whole.

        Args:
            compiled: the compiled plan that the call would run without a budget.
            replicated: rows that it would replicate without a budget; None for no rows.

        Raises:
            InputError: on every rank, if the call exceeds the budget even in the smallest slices.
        """
        if self.compiled.plan.memory_budget is None:
            return compiled, replicated, None
        self.use.calls += 1
        budget = self.budget(call)
        bytes_over = np.maximum(self.peak(compiled, replicated, call) - budget, 0)
        self.use.bytes_over += int(bytes_over.sum())
        if not bytes_over.any():
            return compiled, replicated, None

        rows_before = 0 if replicated is None else replicated.total
        experts = call.experts()  # sizes, from which the bytes follow
        load = CallLoad(self.compiled.grid, call.copies, self.num_experts, call.units, experts.dim)
        options = list(self._options(compiled, replicated, load, call, budget))
        if not options:
            raise InputError(
                f"plan.memory_budget={budget}: a call of {int(call.tokens.max())} tokens on a "
                f"rank holds {self.bytes_of_rows(1, call)} bytes even in slices of one row (sums, "
                "and gradients of the experts): give more, or fewer tokens a call"
            )
        compiled, replicated, slices = self._cheapest(options, load)
        rows_after = 0 if replicated is None else replicated.total
        self.use.rows_spilled += max(rows_after - rows_before, 0)
        if slices.num_slices == 1:
            return compiled, replicated, None
        self.use.sliced_calls += 1
        self.use.slices += slices.num_slices
        self.use.kept_slices += slices.kept
        return compiled, replicated, slices

    def budget(self, call: CountedCall) -> int:
        """Return the bytes that a call may hold on a rank: those of the plan, whatever the call. A
        subclass may let them depend on it."""
        del call
        assert self.compiled.plan.memory_budget is not None
        return self.compiled.plan.memory_budget

    def peak(
        self, compiled: Compiled, replicated: Replications | None, call: CountedCall
    ) -> np.ndarray:
        """Return the peak of the bytes that a call holds on each rank if it runs as a whole,
        (world,).

        Args:
            compiled: the compiled plan that the call runs.
            replicated: replicated rows; None for no rows.
        """
        memory = compiled.held(self.num_experts, call.experts())
        sizes = self._sizes(compiled, replicated, call.copies, call)
        return memory.peak(RankRows(sizes))

    def _sizes(
        self,
        compiled: Compiled,
        replicated: Replications | None,
        copies: np.ndarray,
        call: CountedCall,
    ) -> CallSizes:
        """Return the sizes of a call with the given copies, (world, num_experts): those of the
        whole call or of a slice of it. Under multicast they are an upper bound."""
        node_tokens = None
        if compiled.is_multicast:
            node_tokens = _most_node_tokens(compiled, copies, call.tokens)
        return compiled.sizes(
            copies, call.tokens, units=call.units, node_tokens=node_tokens, replicated=replicated
        )

    def _options(
        self,
        compiled: Compiled,
        replicated: Replications | None,
        load: CallLoad,
        call: CountedCall,
        budget: int,
    ) -> Iterator[_Option]:
        """Yield ways to run a call within the budget: as without a budget, without replication,
        with other replicated rows."""
        ways = [(compiled, replicated)]
        if self.compiled.replicates:
            bare = self.unreplicated
            # A program that may replicate holds more bytes even in calls that replicate nothing.
            if replicated is not None or compiled.digest != bare.digest:
                ways.append((bare, None))
            # a program that can replicate more: that of the call if it replicates, else the plan's
            replicating = compiled if compiled.replicates else self.compiled
            rows, most_slices = self._rows_that_fit(call, budget)
            tables = fitting_tables(load, replicated or NOTHING, rows, most_slices)
            ways += [(replicating, table) for table in tables]
        for program, table in ways:
            for slices in self._cuts(program, table, call, budget):
                yield program, table, slices

    @property
    def unreplicated(self) -> Compiled:
        """The compiled plan without replication."""
        plan = self.compiled.plan
        if not plan.replicates:
            return self.compiled
        return self.compiled.under(replace(plan, replication=NO_REPLICATION))

    def _rows_that_fit(self, call: CountedCall, budget: int) -> tuple[int, int]:
        """Return about how many rows at the experts of a rank fit the budget, and in how many
        slices of so many rows those of the busiest rank fit.

        Both are without replication.
        """
        bare = self.unreplicated
        whole = self._cut(bare, replicated=None, call=call, limit=None)
        busiest_rows = int(whole.loads.max())
        # as if bytes grew in proportion to rows, from those of a call without copies
        most_bytes = float(self.peak(bare, None, call).max())
        least_bytes = float(self.peak(bare, None, _without_copies(call)).max())
        bytes_for_rows = max(0.0, budget - least_bytes)
        rows = max(1, int(busiest_rows * bytes_for_rows / max(1.0, most_bytes - least_bytes)))
        num_slices = -(-busiest_rows // rows)  # rounded up
        return rows, num_slices

    def _cut(
        self,
        compiled: Compiled,
        replicated: Replications | None,
        call: CountedCall,
        limit: int | None,
    ) -> Cut:
        """Return a call cut into slices of at most `limit` rows at the experts of a rank; one slice
        if `limit` is None."""
        if compiled.digest not in self._holders:
            self._holders[compiled.digest] = holders_of(compiled, self.num_experts)
        # no rank has more rows than the call has copies
        most_rows = limit or max(1, int(call.copies.sum()))
        return cut(self._holders[compiled.digest], call.copies, replicated, most_rows)

    def _cuts(
        self, compiled: Compiled, replicated: Replications | None, call: CountedCall, budget: int
    ) -> Iterator[Cut]:
        """Yield cuts of a call whose slices fit the budget, that with the fewest slices first;
        nothing if no cut fits."""
        whole = self._cut(compiled, replicated, call, limit=None)
        whole_bytes = float(self.peak(compiled, replicated, call).max())
        if whole_bytes <= budget:
            yield whole
            return
        # what slices hold whatever their number of rows: more slices do not help against that
        no_rows = self._cut(compiled, replicated, _without_copies(call), limit=None)
        peaks_without_rows, _ = self._slices(compiled, no_rows, call)
        least_bytes = peaks_without_rows.max()
        if least_bytes >= budget:
            return
        num_rows = int(whole.loads.max())

        def cut_into(count: int) -> tuple[Cut, float]:
            """Return a cut into about `count` slices, with as many kept as fit, and the peak bytes
            of all slices."""
            rows_per_slice = -(-num_rows // count)  # rounded up
            slices = self._cut(compiled, replicated, call, rows_per_slice)
            peak, kept = self._slices(compiled, slices, call)
            return replace(slices, kept=_most_kept(peak, kept, budget)), float(peak.max())

        count = 2
        for _ in range(TRIES):
            fewest, peak_bytes = cut_into(count)
            if peak_bytes <= budget:
                break
            if count >= num_rows:  # not even slices of one row fit
                return
            # bytes of rows fall about in proportion to the number of slices
            estimate = int(count * (peak_bytes - least_bytes) / (budget - least_bytes))
            count = min(num_rows, max(count + 1, estimate))
        else:  # no try fitted
            return
        yield fewest
        for more in MORE_SLICES:
            another, peak_bytes = cut_into(int(more * fewest.num_slices))
            if peak_bytes <= budget:
                yield another

    def _slices(
        self, compiled: Compiled, slices: Cut, call: CountedCall
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the peak bytes of each slice on each rank, and the bytes that it keeps for
        backward, (slices, world) each."""
        memory = compiled.held(self.num_experts, call.experts())
        peaks = []
        kept = []
        for number in range(slices.num_slices):
            replicated = slices.replicated(number)
            sizes = self._sizes(compiled, replicated, slices.copies(number), call)
            slice_peak, slice_kept = memory.of_slice(RankRows(sizes))
            peaks.append(slice_peak)
            kept.append(slice_kept)
        return np.stack(peaks), np.stack(kept)

    def _cheapest(self, options: list[_Option], load: CallLoad) -> _Option:
        """Return the fastest way, by the cost model of the replication policies."""

        def cost(option: _Option) -> float:
            """Return the predicted seconds of a call under an option."""
            _, replicated, slices = option
            return seconds(
                load, self.costs, replicated or NOTHING, slices.num_slices, slices.share_again
            )

        return min(options, key=cost)

    def bytes_of_rows(self, rows: int, call: CountedCall) -> int:
        """Return the peak bytes of a call in slices of at most `rows` rows at the experts of a
        rank, without replication."""
        bare = self.unreplicated
        slices = self._cut(bare, replicated=None, call=call, limit=rows)
        if slices.num_slices == 1:  # a whole call, without the sums to which slices add results
            peak = self.peak(bare, None, call)
        else:
            peak, _ = self._slices(bare, slices, call)
        return int(np.ceil(peak.max()))

    def refuse_padding(self) -> None:
        """Raise InputError if the plan has a budget: with a padded capacity no rank has the counts
        that a budget needs."""
        budget = self.compiled.plan.memory_budget
        if budget is not None:
            raise InputError(
                f"a padded capacity clashes with memory_budget={budget}, which needs token counts "
                "that padding does not exchange: leave memory_budget unset, since a padded "
                "capacity bounds memory by itself, or do not pad"
            )

    def take(self) -> BudgetUse:
        """Return the statistics since the last `take`."""
        use = self.use
        self.use = BudgetUse()
        return use


def _without_copies(call: CountedCall) -> CountedCall:
    """Return a call whose tokens are sent to no expert."""
    return call._replace(copies=np.zeros_like(call.copies))


def _most_node_tokens(compiled: Compiled, copies: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return an upper bound on the tokens that each rank sends to each destination in each chunk,
    (world, sum of `Grid.cast_levels`, chunks): multicast sends a token once to a destination that
    has any of its experts, and the bound counts every copy as a separate token.

    Args:
        copies: (world, num_experts) copies of each rank's tokens for each expert.
        tokens: (world,) tokens of each rank.
    """
    copies_by_level = []
    # destinations of a level: nodes if there are two levels, and ep ranks
    for num_destinations in compiled.grid.cast_levels:
        # a destination has an equal run of the experts
        by_destination = copies.reshape(len(copies), num_destinations, -1)
        copies_by_level.append(by_destination.sum(2))
    copies_there = np.concatenate(copies_by_level, axis=1)
    visits = np.minimum(copies_there, tokens[:, None])  # a token visits a destination at most once
    chunks = compiled.plan.chunks
    visits_per_chunk = -(-visits // chunks)  # rounded up
    return np.repeat(visits_per_chunk[:, :, None], chunks, axis=2)


def _most_kept(peak: np.ndarray, kept: np.ndarray, budget: int) -> int:
    """Return how many of the first slices can be kept at the same time; the last of them runs first
    and ends last.

    Args:
        peak: (slices, world) peak bytes of each slice while it runs.
        kept: (slices, world) bytes that each slice keeps for backward.
        budget: bytes that each rank may hold.
    """
    for count in range(2, len(peak) + 1):  # the first one can always be kept
        # the last slice runs first: while a slice runs, those after it are kept
        kept_after = kept[:count].sum(0) - kept[:count].cumsum(0)
        if (peak[:count] + kept_after).max() > budget:
            return count - 1
    return len(peak)  # all fit


def holders_of(compiled: Compiled, num_experts: int) -> np.ndarray:
    """Return the rank that computes the rows of each origin for each expert, (world, num_experts, 1
    or 1 + ep) int64.

    All shards of an expert compute the same rows, so the first of their ranks stands for all.
    Entries are -1 if there can be no such rows.

    Args:
        compiled: the compiled plan.
        num_experts: number of experts of the layer.
    """
    grid = compiled.grid
    shapes = compiled.shapes(num_experts)
    # those of the rows that the experts read
    layouts = [
        compiled.logical.slot(task.reads[0]).layout
        for task in compiled.logical.tasks
        if task.op is Op.EXPERT
    ]

    # Ranks that hold the same rows get one number: each rank joins the lowest of those before it.
    num_helpers = grid.ep if compiled.replicates else 0
    holders = np.full((grid.world, num_experts, 1 + num_helpers), -1)
    for rank in range(grid.world):
        pieces = [shapes.pieces(layout, rank) for layout in layouts]
        origin = np.concatenate([piece.origin for piece in pieces])
        expert = np.concatenate([piece.expert for piece in pieces])
        chunk = np.concatenate([piece.chunk for piece in pieces])
        # 0 for copies at home, which have the chunks below num_chunks; 1 + p for those replicated
        # to place p, which have the chunk num_chunks + p
        part = np.maximum(chunk - shapes.num_chunks + 1, 0)
        # the ranks before this one that hold some of the same rows
        earlier = np.unique(holders[origin, expert, part])
        earlier = earlier[earlier >= 0]
        joined = int(earlier.min()) if len(earlier) else rank
        holders[np.isin(holders, earlier)] = joined
        holders[origin, expert, part] = joined
    return holders
