"""Simulated plans of a search. How a plan holds the model, and its memory, are computed when they
are asked for: most plans are slower than the best one in every way of holding it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from moesaic.planner.rank_memory import Memory
from moesaic.planner.split import WHOLE, JobSplit, SplitCostModel, layout_in_words
from moesaic.planner.step import Estimate
from moesaic.planner.task_times import Simulated
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A plan on a layout, with its predicted step time and memory."""

    plan: Plan
    grid: Grid
    """The mesh, with etp not factored."""
    estimate: Estimate
    memory: Memory
    bound_seconds: float
    """Step time of a perfect plan on this layout: the time of its computing or of its busiest link,
    whichever is longer."""
    split: JobSplit = WHOLE
    """How the job is split beyond the layout, which is that of a stage."""

    @property
    def layout(self) -> str:
        """The layout and the split in words."""
        return layout_in_words(self.grid, self.split)

    @property
    def seconds(self) -> float:
        """The predicted step time."""
        return self.estimate.seconds


def planned_step(
    compiled: Compiled,
    cost_model: SplitCostModel,
    passes: tuple[Simulated, Simulated],
    memory: Memory,
) -> PlannedStep:
    """Return the planned step of a plan under a layout and split, from its simulated passes."""
    return PlannedStep(
        plan=compiled.plan,
        grid=cost_model.grid,
        estimate=cost_model.estimate_of(compiled, *passes),
        memory=memory,
        bound_seconds=cost_model.bound_seconds,
        split=cost_model.split,
    )


class SimulatedPlan:
    """A plan on a layout whose passes have been simulated.

    Args:
        compiled: the plan.
        passes: its simulated forward and backward passes.
        options: the ways of holding the model, from the one that sends least to the one that holds
            least.
        usable_bytes: of a device.
        layer_bytes: returns the bytes of an MoE layer, as the function of this name.
    """

    def __init__(
        self,
        compiled: Compiled,
        passes: tuple[Simulated, Simulated],
        options: list[SplitCostModel],
        usable_bytes: float,
        layer_bytes: Callable[[], tuple[float, float]],
    ) -> None:
        self.plan = compiled.plan
        self.grid = options[0].grid
        self._compiled = compiled
        self._passes = passes
        self._options = options
        self._usable_bytes = usable_bytes
        self._layer_bytes = layer_bytes

    @cached_property
    def least_seconds(self) -> float:
        """Lower bound on `seconds`: the step time under the way of holding that sends least."""
        return self._options[0].estimate_of(self._compiled, *self._passes).seconds

    @cached_property
    def step(self) -> PlannedStep:
        """The step under the way of holding that sends least among those that fit the memory; under
        the leanest if none fits."""
        compiled = self._compiled
        kept_bytes, buffers = self._layer_bytes()
        found: list[tuple[SplitCostModel, Memory]] = []
        for cost_model in self._options:
            memory = cost_model.rank_memory(kept_bytes, buffers)
            found.append((cost_model, memory))
            if memory.total <= self._usable_bytes:
                return planned_step(compiled, cost_model, self._passes, memory)
        leanest, memory = min(found, key=lambda each: each[1].total)
        return planned_step(compiled, leanest, self._passes, memory)

    @property
    def seconds(self) -> float:
        """The predicted step time."""
        return self.step.seconds

    @property
    def fits(self) -> bool:
        """Whether some way of holding the model fits the memory."""
        return self.step.memory.total <= self._usable_bytes

    @property
    def cost(self) -> tuple[bool, float]:
        """What a search makes small: plans that fit come first, then those with short steps."""
        return not self.fits, self.seconds


def least_cost(plans: Iterable[SimulatedPlan]) -> tuple[bool, float]:
    """Return a lower bound on the costs of some plans, for which no memory is computed."""
    # a cost is (does not fit, seconds), so False is least
    return False, min(plan.least_seconds for plan in plans)


def cheapest(plans: Iterable[SimulatedPlan]) -> SimulatedPlan:
    """Return the plan with the smallest cost, the first of equal ones; at least one plan is
    given."""
    return smallest(plans, lambda plan: plan.cost, lambda plan: (False, plan.least_seconds))[0]


def fastest(plans: Iterable[SimulatedPlan]) -> SimulatedPlan:
    """Return the plan with the shortest step, whether it fits the memory or not; at least one plan
    is given."""
    return smallest(plans, lambda plan: plan.seconds, lambda plan: plan.least_seconds)[0]


def smallest(
    items: Iterable[Item], key: Callable[[Item], Any], bound: Callable[[Item], Any], most: int = 1
) -> list[Item]:
    """Return the items with the smallest keys, `most` at most, the smallest first, and of equal
    ones the first; `bound` is a lower bound on keys, which costs less to compute."""
    best: list[tuple[Any, int, Item]] = []  # (key, number of the item, item)
    for number, item in sorted(enumerate(items), key=lambda each: bound(each[1])):
        if len(best) == most and bound(item) > best[-1][0]:
            break  # the keys of all further items are larger
        insort(best, (key(item), number, item))
        del best[most:]
    return [item for _, _, item in best]


def by_seconds(plans: Iterable[SimulatedPlan]) -> Iterator[PlannedStep]:
    """Yield the steps that fit the memory, the shortest first."""
    return in_order(
        sorted(plans, key=lambda plan: plan.least_seconds),
        bound=lambda plan: plan.least_seconds,
        step_of=lambda plan: plan.step if plan.fits else None,
    )


def in_order(
    items: Iterable[Item],
    bound: Callable[[Item], float],
    step_of: Callable[[Item], PlannedStep | None],
) -> Iterator[PlannedStep]:
    """Yield the steps of items, the shortest first; no more are computed than are asked for.

    Args:
        items: with rising bounds.
        bound: returns a lower bound on the seconds of an item's step.
        step_of: returns an item's step; None leaves it out.
    """
    # a heap of (seconds, number of the item, step): steps that a later item may still undercut
    waiting: list[tuple[float, int, PlannedStep]] = []
    for number, item in enumerate(items):
        while waiting and waiting[0][0] < bound(item):
            _, _, shortest = heapq.heappop(waiting)
            yield shortest
        step = step_of(item)
        if step is not None:
            heapq.heappush(waiting, (step.seconds, number, step))
    while waiting:
        _, _, shortest = heapq.heappop(waiting)
        yield shortest
