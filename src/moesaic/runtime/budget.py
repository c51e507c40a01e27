"""A budget of rows at each rank's experts: what skew would put there beyond it goes to helpers, or is run in slices.

Under `Plan.token_budget` a dropless layer never needs more memory than the budget allows. Where the plan lends copies, what
is over the budget goes to ranks with room. Where no rank has room, or nothing may be lent, the call runs in slices, dispatch
to combine, of at most so many rows at any rank's experts: messages and activations are those of a slice. Nothing of a slice
is kept for the backward pass, which runs each one again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.comm.collectives import all_gather
from moesaic.comm.wire import AbstractWire
from moesaic.errors import InputError
from moesaic.experts.experts import Weights
from moesaic.plan import Compiled
from moesaic.plan.lending.lender import Load
from moesaic.plan.lending.slices import Cut, cut, holders_of
from moesaic.plan.lending.spill import weights_held, within_budget
from moesaic.program.sizes import Sizes
from moesaic.runtime.function import Run, run_program
from moesaic.runtime.visits import Visits


@dataclass
class BudgetUse:
    """What a layer's calls did about their budget, over all ranks; the same on every rank."""

    calls: int = 0
    """Calls of the layer, recomputations among them."""
    rows_over: int = 0
    """Rows beyond the budget of the rank that they were bound for, before anything was done about them."""
    rows_spilled: int = 0
    """Rows that were lent to another rank for it."""
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
    """

    def __init__(self, compiled: Compiled, num_experts: int, dim: int) -> None:
        self.compiled, self.num_experts, self.dim = compiled, num_experts, dim
        self.use = BudgetUse()
        self._holders: dict[bytes, np.ndarray] = {}

    def hold(
        self, compiled: Compiled, lent: np.ndarray | None, copies: np.ndarray, units: int
    ) -> tuple[Compiled, np.ndarray | None, Cut | None]:
        """Return what a call runs, what it lends, and how it is cut; None where it runs as a whole.

        Args:
            compiled: what it would run without a budget.
            lent: (world, num_experts, ep) int64, what it would lend; None for nothing.
            copies: (world, num_experts) int64 that each origin has for each expert.
            units: hidden units of one shard of an expert.
        """
        budget = self.compiled.plan.token_budget
        if budget is None:
            return compiled, lent, None
        load = Load(self.compiled.grid, copies, self.num_experts, units, self.dim)
        found, over = self._cut(compiled, lent, load, budget)
        self.use.calls += 1
        self.use.rows_over += over
        wanted = 0 if lent is None else int(lent.sum())
        if found is None or found.num_slices > 1:
            for table in self._other_tables(lent, load, budget):
                other = self.compiled if table is not None else self.compiled.unlent or self.compiled
                cut_so, _ = self._cut(other, table, load, budget)
                fewest = None if found is None else found.num_slices + (table is None and lent is not None)
                if cut_so is not None and (fewest is None or cut_so.num_slices < fewest):  # of equals, none lent
                    compiled, lent, found = other, table, cut_so
        self.use.rows_spilled += max((0 if lent is None else int(lent.sum())) - wanted, 0)
        assert found is not None, "without lending a budget can always be held"
        if found.num_slices == 1:
            return compiled, lent, None
        self.use.sliced_calls += 1
        self.use.slices += found.num_slices
        return compiled, lent, found

    def _cut(self, compiled: Compiled, lent: np.ndarray | None, load: Load, budget: int) -> tuple[Cut | None, int]:
        """Return a call cut, None where lent weights alone take the budget, and its rows beyond it."""
        room = budget - (0 if lent is None else weights_held(load, lent))
        held = self._held(compiled)
        over = cut(held, load.copies, lent, budget).rows_over
        return (cut(held, load.copies, lent, room) if room > 0 else None), over

    def _other_tables(self, lent: np.ndarray | None, load: Load, budget: int) -> Iterator[np.ndarray | None]:
        """Yield what may be lent instead, so that the budget is held: more, a table of its own, nothing."""
        if self.compiled.lends:
            none = np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64)
            yield within_budget(load, none if lent is None else lent, budget)
            yield within_budget(load, none, budget)
            yield None

    def refuse_padding(self) -> None:
        """Raise InputError if there is a budget: with a padded capacity no rank has the counts that it is held by."""
        budget = self.compiled.plan.token_budget
        if budget is not None:
            raise InputError(
                f"a padded capacity clashes with plan.token_budget={budget}, which is held by counts that no rank then has: "
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


@dataclass(frozen=True)
class Slice:
    """What of a call one slice runs."""

    rows: Tensor
    """(rows,) int64: which of the call's routing weights are its own."""
    sizes: Callable[[], Sizes]
    """Made anew for each pass: what they work out grows with the rows."""
    indices: Mapping[str, Tensor]
    """The program's INDEX inputs by name."""


def slices_of(
    whole: Cut,
    origins: Sequence[int],
    wire: AbstractWire,
    routing: tuple[Tensor, Tensor],
    find: Callable[[Tensor, Tensor], Visits] | None,
    bind: Callable[[np.ndarray | None, np.ndarray, Visits | None], Sizes],
) -> list[Slice]:
    """Return the slices of a call. Under multicast all ranks call it together.

    Args:
        whole: the call, cut.
        origins: whose rows this rank's routing has: its own, or those of its tensor group.
        wire: between all ranks.
        routing: token and expert of each row, (rows,) int64, expert after expert.
        find: under multicast, finds the visits of this rank's own rows.
        bind: from lent copies, copies and visits to sizes.
    """
    token, expert = routing
    rows, visits = [], []
    for number in range(whole.num_slices):
        places, origin = whole.rows(number, origins)
        rows.append(torch.from_numpy(places).to(token.device))
        if find is not None:
            own = torch.from_numpy(places[origin == wire.rank]).to(token.device)
            visits.append(find(token[own], expert[own]))
    if visits:
        counts = torch.stack([each.counts for each in visits])
        told = torch.stack(all_gather(wire, tuple(range(wire.world)), counts)).cpu().numpy()
        visits = [replace(each, of_all=told[:, number]) for number, each in enumerate(visits)]

    def slice_of(number: int) -> Slice:
        lent, copies = whole.lent(number), whole.copies(number)
        if not visits:
            indices = {"index": token[rows[number]].unsqueeze(1)}
            return Slice(rows[number], lambda: bind(lent, copies, None), indices)
        seen = visits[number]
        indices = {"visit_index": seen.visit_index, "copy_index": seen.copy_index}
        return Slice(rows[number], lambda: bind(lent, copies, seen), indices)

    return [slice_of(number) for number in range(whole.num_slices)]


@dataclass(frozen=True)
class SlicedRun:
    """One call of a layer on one rank, in slices."""

    whole: Run
    """The call; its sizes, indices and tags are those of no slice."""
    slices: Sequence[Slice]

    @property
    def num_tags(self) -> tuple[int, int]:
        """Of a slice's forward and backward program."""
        return len(self.whole.compiled.forward.tasks), len(self.whole.compiled.backward.tasks)

    def take_tags(self, *, backward_only: bool = False) -> Iterator[int]:
        """Take tags for all passes of all slices; yields the first of each pass: forward ones, then the repeated ones."""
        forward, backward = self.num_tags
        passes = [forward] * (0 if backward_only else len(self.slices)) + [forward + backward] * len(self.slices)
        first = self.whole.wire.take_tags(sum(passes))
        for length in passes:
            yield first
            first += length

    def run(self, number: int, first_tag: int) -> Run:
        """Return the run of a slice."""
        part = self.slices[number]
        call = replace(self.whole.call, sizes=part.sizes(), first_tag=first_tag)
        return replace(self.whole, call=call, backward_tag=first_tag + self.num_tags[0], indices=part.indices)


def run_slices(work: SlicedRun, x: Tensor, gates: Tensor, sharded: Weights, common: Weights) -> Tensor:
    """Run dispatch, experts and combine slice by slice; see `run_program`, whose arguments and result these are."""
    y: Tensor = RunSlices.apply(work, len(sharded), x, gates, *sharded, *common)
    return y


class RunSlices(torch.autograd.Function):
    """See `run_slices`."""

    @staticmethod
    def forward(ctx: Any, work: SlicedRun, num_sharded: int, x: Tensor, gates: Tensor, *weights: Tensor) -> Tensor:
        """Run the slices and sum their results; keep only what goes in."""
        tags = list(work.take_tags())
        total = torch.zeros_like(x, dtype=_wide(x))
        ctx.surroundings = []
        for number, part in enumerate(work.slices):
            ctx.surroundings.append(_Surroundings.now(x))
            run = work.run(number, tags[number])
            total += run_program(run, x, gates[part.rows], weights[:num_sharded], weights[num_sharded:])
        ctx.save_for_backward(x, gates, *weights)
        ctx.work, ctx.num_sharded, ctx.tags = work, num_sharded, tags[len(work.slices) :]
        return total.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run each slice again, and its backward program."""
        x, gates, *weights = ctx.saved_tensors
        work: SlicedRun = ctx.work
        tags, ctx.tags = ctx.tags or list(work.take_tags(backward_only=True)), None
        leaves = [value.detach().requires_grad_() for value in (x, *weights)]
        totals = [torch.zeros_like(value, dtype=_wide(value)) for value in leaves]
        d_gates = torch.zeros_like(gates)
        for number, part in enumerate(work.slices):
            own = gates[part.rows].requires_grad_()
            run = work.run(number, tags[number])
            with ctx.surroundings[number].again(), torch.enable_grad():
                y = run_program(
                    run, leaves[0], own, tuple(leaves[1:][: ctx.num_sharded]), tuple(leaves[1:][ctx.num_sharded :])
                )
            d_own, *found = torch.autograd.grad(y, (own, *leaves), dy)
            del y
            d_gates[part.rows] = d_own
            for total, value in zip(totals, found):
                total += value
            del found
        d_x, *d_weights = (total.to(value.dtype) for total, value in zip(totals, leaves))
        return None, None, d_x, d_gates, *d_weights


@dataclass(frozen=True)
class _Surroundings:
    """What a slice's experts see besides their input: autocast, and the state of random numbers."""

    device: torch.device
    autocast: tuple[bool, torch.dtype]
    random_state: Tensor
    device_state: Tensor | None

    @classmethod
    def now(cls, x: Tensor) -> _Surroundings:
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        of_device = torch.cuda.get_rng_state(x.device) if x.is_cuda else None
        return cls(x.device, autocast, torch.get_rng_state(), of_device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have the same once more."""
        enabled, dtype = self.autocast
        with torch.random.fork_rng([self.device] if self.device_state is not None else []):
            torch.set_rng_state(self.random_state)
            if self.device_state is not None:
                torch.cuda.set_rng_state(self.device_state, self.device)
            with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
                yield


def _wide(value: Tensor) -> torch.dtype:
    """Return the dtype in which values are summed: at least float32."""
    return torch.promote_types(value.dtype, torch.float32)
