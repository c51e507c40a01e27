"""The search for the layout and the plan with the shortest simulated step that fits the memory of a
device.

The floor of a layout is a cheap lower bound on the step time of all plans on it. Layouts with a
floor above the best step so far are left out. On the others a few plans of every schedule are
simulated. On the most promising layouts, single choices of the best plan of each schedule are
changed as long as the step gets shorter. On the best of these, two choices are changed at once,
since many choices help only together. Trying every combination (`exhaustive`) takes minutes instead
of seconds.

A choice is a field of `Plan`. A layout has several cost models, one for each way in which its ranks
can hold the model's states; the first of these that fits is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from moesaic.codecs import CODECS, DTYPES, is_coded
from moesaic.errors import InputError
from moesaic.planner.candidates import Pins, SearchSpace, layouts, name_of
from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.even import MAX_RANKS_APART
from moesaic.planner.job import Job
from moesaic.planner.loads import (
    fit_counts,
    memory_under_counts,
    memory_under_skew,
    simulate_counts,
)
from moesaic.planner.movement import coded_bytes
from moesaic.planner.rank_memory import FRAGMENTED, GIB, Memory, usable_bytes
from moesaic.planner.simulated_plans import (
    PlannedStep,
    SimulatedPlan,
    by_seconds,
    cheapest,
    fastest,
    in_order,
    least_cost,
    planned_step,
    smallest,
)
from moesaic.planner.simulator import Simulator
from moesaic.planner.split import (
    WHOLE,
    JobSplit,
    SplitCostModel,
    holdings,
    layout_in_words,
    near_splits,
    split_choices,
)
from moesaic.planner.step import mean_of
from moesaic.planner.step_memory import layer_bytes
from moesaic.planner.task_times import Simulated
from moesaic.planner.workload import Workload
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Codec, Plan, Schedule
from moesaic.program.task import Program

LOSSLESS = SearchSpace(fuse=(False, True), chunks=(1, 2, 4, 8))
"""The default search space."""
GIVE_UP = 1.5
REFINED = 4
"""`give_up` and `refine` of `Settings` that suffice: 64 devices take five seconds, and searching
longer found no better plan."""
LOSSY: tuple[Codec, ...] = tuple(CODECS)
"""Codecs that are searched, forward and backward, if losses are allowed."""
_MANY = 1 << 20
"""Rows and columns of a message so large that what codecs send per message, row or column hardly
counts."""
COMPRESSION = float(
    max(
        math.ceil(_MANY**2 * size / coded_bytes(codec, _MANY, _MANY, size))
        for codec in CODECS
        for size in DTYPES
    )
)
"""Upper bound on the compression ratio of all codecs; only floors use it."""
FLIES = 0.95
"""Largest ratio of the step with two micro-batches in flight to the same plan's in turn at which
two are chosen: simulated and measured ratios differ by less than 0.01 (docs/log.md)."""
PAIRED = 2
"""Number of layouts on which two choices are changed at once."""
PAIRED_SHARE = 0.2
"""The share of `Settings.give_up` beyond 1 by which a choice may slow a plan and still be combined
with a second one."""


@dataclass(frozen=True, kw_only=True)
class EpResults:
    """Results of a search for the layouts with one size of ep."""

    floor_seconds: float
    """Lower bound on the step time of all plans on these layouts."""
    best: PlannedStep | None
    """The best simulated plan that fits the memory; None if there is none."""
    is_too_large: bool
    """Whether no layout fits the memory: by its parameters alone, or with any plan that was
    simulated."""
    is_searched: bool
    """Whether these layouts were searched as far as with ep pinned; else `best` may be far from
    their best plan."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a search."""

    ranking: tuple[PlannedStep, ...]
    """The best plans that fit the memory, best first."""
    by_ep: dict[int, EpResults]
    """Results by size of ep."""
    bound_seconds: float
    """The smallest bound of the layouts and splits that were tried and fit the memory."""
    num_layouts: int
    """Number of layouts that split the model, the batch and the ranks evenly."""
    num_left_out: int
    """Number of these layouts on which no plan was simulated, because of their floor or memory."""
    num_simulated: int
    """Number of simulated plans."""
    too_large: PlannedStep | None = None
    """The fastest simulated plan if it does not fit the memory, else None."""
    lacks_memory: bool = False
    """Whether a step that does not fit the memory, simulated or bounded, may be faster."""
    kept_seconds: float | None = None
    """Seconds of the best step that recomputes nothing, infinite if none fits, where the search
    chose to recompute blocks; None where it did not."""

    @property
    def best(self) -> PlannedStep:
        """The plan to use."""
        return self.ranking[0]

    @property
    def why_recomputed(self) -> Iterator[str]:
        """Why the search chose to recompute blocks, as a clause; nothing where it did not."""
        if self.kept_seconds == math.inf:
            yield "activations are recomputed: otherwise no layout fits the memory"
        elif self.kept_seconds is not None:
            yield (
                "activations are recomputed: the best step that fits the memory without takes "
                f"{self.kept_seconds / self.best.seconds:.2f} times as long"
            )


class TooLargeError(InputError):
    """Raised if no layout fits the memory of a device.

    Args:
        message: the message; says by how much the smallest layout exceeds the memory.
        job: the job, with blocks recomputed if that was tried.
        grid: the smallest layout.
        num_bytes: bytes per rank of the smallest layout.
    """

    def __init__(self, message: str, job: Job, grid: Grid, num_bytes: float) -> None:
        super().__init__(message)
        self.job = job
        self.grid = grid
        self.num_bytes = num_bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a search."""

    space: SearchSpace = LOSSLESS
    """The choices that are combined."""
    pins: Pins = field(default_factory=Pins)
    """Fixed sizes of mesh axes."""
    keep: int = 10
    """Number of plans in the ranking."""
    refine: int = 6
    """Number of layouts on which choices are changed."""
    finished_eps: int = 0
    """Number of further sizes of ep, those with the fastest plans so far, that are searched as if
    they were pinned."""
    paired: int = PAIRED
    """Number of layouts on which two choices are changed at once."""
    exhaustive: bool = False
    """Try every combination on these layouts instead."""
    give_up: float = math.inf
    """Ratio of step times above which a plan is hopeless. A layout gets no further start after one
    that is this many times slower than the best step so far. Choices are changed only from
    schedules within this ratio of the best one on the layout, and in pairs only if neither alone
    makes a plan slower by more than a fifth of it. Smaller values search faster and may miss a
    plan."""
    reserve_gib: float = 1.0
    """Memory set aside for the framework, in addition to allocator fragmentation
    (`planner/rank_memory.py`)."""
    max_vio: float = 0.0
    """A plan must also fit if one ep rank's load is 1 + this times the mean in every layer."""
    most_stages: int = 0
    """Most pipeline stages that are tried, and what data-parallel ranks hold is chosen too; 0: no
    stages, and everything is sharded over all ranks and gathered for every micro-batch."""
    pp: int | None = None
    """Number of pipeline stages; None tries powers of two."""
    may_fly: bool = False
    """Whether two micro-batches in flight are tried with the best plans."""

    @property
    def compression(self) -> float:
        """Compression ratio of codecs that a floor must allow for."""
        codecs = (*self.space.codecs, *self.space.backward_codecs)
        return COMPRESSION if any(map(is_coded, codecs)) else 1.0


def search(
    job: Job,
    cluster: ClusterSpec,
    settings: Settings | None = None,
    *,
    counts: Sequence[np.ndarray] = (),
    simulator: Simulator | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    to_beat: float = math.inf,
) -> Result:
    """Search layouts and plans.

    Args:
        job: the training job.
        cluster: the cluster; the job uses all of its devices.
        settings: settings of the search; None for the defaults.
        counts: tables of copies, (groups, num_experts) each: a row per data-parallel group, a
            column per expert. The best plans are ranked again by their mean time under the tables.
            Empty for even routing.
        simulator: a simulator of this cluster that keeps what it computes for the caller; None for
            a new one.
        progress: called from time to time with (current activity, items done, all items).
        to_beat: seconds of a known step; layouts that cannot be faster are passed over.

    Raises:
        InputError: if no layout splits the job, or if no plan of the space fits a layout.
        TooLargeError: if no layout fits the memory; the message says by how much.
    """
    settings = settings or Settings()
    simulator = simulator or Simulator(cluster)
    splits = [WHOLE]
    if settings.most_stages:
        splits = split_choices(job, cluster, settings.most_stages, settings.pp)
    searches, refused = _searches_of(splits, job, simulator, settings, progress)
    results: list[Result] = []
    too_large: list[TooLargeError] = []
    floors = [floor for each in searches for floor in each.floors_of_larger]
    promising = [each for each in searches if each.fitting]
    # the most promising first, since its steps rule out layouts of the others
    for each in sorted(promising, key=lambda each: each.floor):
        # the best step of the searches so far
        each.best = min([to_beat, *(result.best.seconds for result in results)])
        try:
            results.append(each.run(counts))
        except TooLargeError as error:
            too_large.append(error)
            floors.append(each.floor)
        except InputError as error:
            refused.append(error)
    if results:
        return _merged(results, settings.keep, floors)
    too_large += [each.too_large() for each in searches if not each.fitting]
    if too_large:
        raise min(too_large, key=lambda error: error.num_bytes)
    raise refused[0]


def search_recomputing(job: Job, find: Callable[..., Result]) -> tuple[Job, Result]:
    """Search, and once more with recomputed blocks if nothing fits without, or if what does not fit
    may be faster; returns the job with the faster step, and its result.

    Args:
        job: the training job; one that recomputes blocks already goes on doing so.
        find: searches for a job, and takes `to_beat`, as `search` does.

    Raises:
        InputError: as `search` does.
    """
    if job.model.checkpoint_activations:
        return job, find(job)
    recomputing = job.recomputing
    try:
        kept = find(job)
    except TooLargeError:
        return recomputing, replace(find(recomputing), kept_seconds=math.inf)
    seconds = kept.best.seconds
    if kept.lacks_memory:
        with suppress(InputError):
            recomputed = find(recomputing, to_beat=seconds)
            if recomputed.best.seconds < seconds:
                bound = min(kept.bound_seconds, recomputed.bound_seconds)
                found = replace(recomputed, kept_seconds=seconds, bound_seconds=bound)
                return recomputing, found
    return job, kept


def _searches_of(
    splits: Sequence[JobSplit],
    job: Job,
    simulator: Simulator,
    settings: Settings,
    progress: Callable[[str, int, int], None],
) -> tuple[list[_Search], list[InputError]]:
    """Return a search for each split, with the arguments of `search`, and why others have none."""
    searches = []
    refused = []
    # a short search for each number of stages, since there are many
    of_stages = replace(settings, refine=1, paired=0, finished_eps=0)
    for split in splits:
        used = settings if split.pp == 1 else of_stages
        try:
            searches.append(_Search(job, simulator, settings=used, progress=progress, split=split))
        except InputError as error:
            refused.append(error)
    return searches, refused


def _merged(results: Sequence[Result], keep: int, floors: Sequence[float]) -> Result:
    """Return the results of several splits as one, with the best `keep` plans; `floors` are lower
    bounds on the steps of layouts of which no plan fits the memory."""
    steps = [step for result in results for step in result.ranking]
    ranking = sorted(steps, key=lambda step: step.seconds)

    larger = [result.too_large for result in results if result.too_large is not None]
    fastest_larger = min(larger, key=lambda step: step.seconds, default=None)
    best_seconds = ranking[0].seconds
    if fastest_larger is not None and fastest_larger.seconds >= best_seconds:
        fastest_larger = None

    # results by ep are those of the search without stages
    without_stages = [result.by_ep for result in results if result.best.split.pp == 1]
    return Result(
        ranking=tuple(ranking[:keep]),
        by_ep=without_stages[0] if without_stages else {},
        bound_seconds=min(result.bound_seconds for result in results),
        num_layouts=sum(result.num_layouts for result in results),
        num_left_out=sum(result.num_left_out for result in results),
        num_simulated=sum(result.num_simulated for result in results),
        too_large=fastest_larger,
        lacks_memory=fastest_larger is not None or min(floors, default=math.inf) < best_seconds,
    )


_Layer = tuple[Grid, Workload, Program, Program]
"""A layout, the MoE layers and their two programs: plans that have the same are one."""


def _layer_of(cost_model: SplitCostModel, compiled: Compiled) -> _Layer:
    """Return the MoE layers of a plan on a layout, however the model is held."""
    return cost_model.grid, cost_model.model.layer, compiled.forward, compiled.backward


class _Search:
    """The state of a running search for the layouts of one number of stages.

    Args:
        split: says how many stages; what ranks hold is chosen if `Settings.most_stages` says so.

    Raises:
        InputError: if no layout has so many stages.
    """

    def __init__(
        self,
        job: Job,
        simulator: Simulator,
        settings: Settings,
        progress: Callable[[str, int, int], None],
        split: JobSplit,
    ) -> None:
        self.job = job
        self.simulator = simulator
        self.settings = settings
        self.progress = progress
        self.split = split
        self.best = math.inf
        """Seconds of the best step of an earlier search."""
        self._ways = cache(self._find_ways)
        """Returns the ways of holding the model on a layout, in any order."""
        self.floors: dict[tuple[Grid, JobSplit], float] = {}
        """Results of `_floor`."""
        self.cluster = simulator.cluster
        self._step_model = cache(partial(split.of(job).step_model, self.cluster))
        """Returns the model of a step on some data-parallel groups, before it is split."""
        self.tried: dict[tuple[Grid, Plan], SimulatedPlan | None] = {}
        """Results of `_simulate`; None for plans that do not fit their layout."""
        self.times: dict[_Layer, tuple[Simulated, Simulated]] = {}
        """Results of `_run`."""
        self.needs: dict[_Layer, tuple[float, float]] = {}
        """Results of `_layer_bytes`."""
        self.loaded: dict[tuple[JobSplit, _Layer], Memory] = {}
        """Results of `_loaded`."""
        self.refusal = ""
        """Why the last plan that does not fit its layout does not."""

        grids = layouts(split.of(job), self.cluster, settings.pins, split.pp)
        self.cost_models: list[SplitCostModel] = []
        """Of each layout, the one that `_cost_model` returns."""
        for number, grid in enumerate(grids):
            progress("bounding layouts", number, len(grids))
            self.cost_models.append(self._cost_model(grid))

    @cached_property
    def floor(self) -> float:
        """Lower bound on the step time of all plans."""
        return min(map(self._floor, self.cost_models))

    @cached_property
    def fitting(self) -> list[SplitCostModel]:
        """Of `cost_models`, those whose states fit the memory."""
        return [each for each in self.cost_models if each.least_bytes <= self._usable_bytes]

    @property
    def floors_of_larger(self) -> list[float]:
        """Lower bounds on the step times of the layouts whose states do not fit the memory."""
        larger = [each for each in self.cost_models if each.least_bytes > self._usable_bytes]
        return [self._floor(each) for each in larger]

    def too_large(self) -> TooLargeError:
        """Return the error that no states fit."""
        return self._too_large(*smallest_layout(self.cost_models))

    def run(self, counts: Sequence[np.ndarray]) -> Result:
        """Run the search, of which some layouts are `fitting`; returns its result. `counts` is that
        of `search`."""
        cost_models = self.cost_models
        fitting = self.fitting
        started = self._promising_layouts(fitting, self.settings.refine)
        if not started:
            raise InputError(
                f"no plan of the search space fits any layout; the last one: {self.refusal}"
            )
        self._refine(started)
        searched_eps = self._finish_eps(fitting)
        ranking = self._ranking(counts)
        if not ranking:
            raise self._too_large(*self._smallest_simulated())
        if not counts:  # other splits are tried under even routing only
            found = [*self._resplit(ranking[0]), *self._flying(ranking), *ranking]
            ranking = sorted(found, key=lambda step: step.seconds)

        simulated_grids = {grid for grid, _ in self.tried}
        bounds = [each.bound_seconds for each in fitting]
        # of splits that were tried last, too
        bounds += [step.bound_seconds for step in ranking]
        return Result(
            ranking=tuple(ranking[: self.settings.keep]),
            by_ep=self._by_ep(cost_models, ranking, searched_eps, has_counts=bool(counts)),
            bound_seconds=min(bounds),
            num_layouts=len(cost_models),
            num_left_out=len(cost_models) - len(simulated_grids),
            num_simulated=len(self._simulated()),
            too_large=self._too_large_and_faster(),
        )

    def _smallest_simulated(self) -> tuple[Grid, float]:
        """Return the layout of the simulated plan that needs the fewest bytes per rank, and these
        bytes: under the given loads if there are any."""
        needs = [(memory.total, grid) for (_, (grid, *_)), memory in self.loaded.items()]
        if not needs:
            needs = [(each.step.memory.total, each.grid) for each in self._simulated()]
        num_bytes, smallest = min(needs, key=lambda need: need[0])
        return smallest, num_bytes

    def _simulated(self, grids: Container[Grid] | None = None) -> list[SimulatedPlan]:
        """Return the simulated plans on some layouts; None: on all."""
        return [
            plan
            for (grid, _), plan in self.tried.items()
            if plan is not None and (grids is None or grid in grids)
        ]

    def _of_ep(self, ep: int) -> list[SimulatedPlan]:
        """Return the simulated plans with a size of ep."""
        return [plan for plan in self._simulated() if plan.grid.ep == ep]

    def _finish_eps(self, fitting: list[SplitCostModel]) -> set[int]:
        """Search the best sizes of ep as if each was pinned, on its two best layouts; returns these
        sizes and the best one, which `_refine` has searched."""
        simulated_eps = dict.fromkeys(plan.grid.ep for plan in self._simulated())
        cost_of = {ep: cheapest(self._of_ep(ep)).cost for ep in simulated_eps}
        sizes = sorted(cost_of, key=lambda ep: cost_of[ep])[: 1 + self.settings.finished_eps]
        for ep in sizes[1:]:
            of_ep = [each for each in fitting if each.grid.ep == ep]
            for cost_model in self._promising_layouts(of_ep, 2):
                self._climb_from_starts(cost_model)
        return set(sizes)

    def _by_ep(
        self,
        cost_models: list[SplitCostModel],
        ranking: list[PlannedStep],
        searched_eps: set[int],
        *,
        has_counts: bool,
    ) -> dict[int, EpResults]:
        """Return for each ep what the search found: a lower bound, the best layout, and whether
        none fits."""
        results = {}
        for ep in sorted({each.grid.ep for each in cost_models}):
            of_ep = [each for each in cost_models if each.grid.ep == ep]
            simulated = self._of_ep(ep)
            # the ranking and the plans that fit are sorted, so the first one is the best
            best = next((step for step in ranking if step.grid.ep == ep), None)
            if best is None and not has_counts:
                best = next(self._that_fit(simulated), None)
            states_fit = any(each.least_bytes <= self._usable_bytes for each in of_ep)
            no_plan_fits = bool(simulated) and not cheapest(simulated).fits
            results[ep] = EpResults(
                floor_seconds=min(map(self._floor, of_ep)),
                best=best,
                is_too_large=not states_fit or no_plan_fits,
                is_searched=ep in searched_eps,
            )
        return results

    def _too_large_and_faster(self) -> PlannedStep | None:
        """Return the fastest simulated plan if it does not fit the memory, else None."""
        best = fastest(self._simulated())
        return None if best.fits else best.step

    @property
    def _usable_bytes(self) -> float:
        """Bytes of a device that a plan may use."""
        return usable_bytes(self.cluster, self.settings.reserve_gib)

    def _promising_layouts(
        self, cost_models: list[SplitCostModel], most: int
    ) -> list[SplitCostModel]:
        """Simulate a few plans on every layout with a floor below the best step so far; returns the
        best of these layouts, `most` at most, best first."""
        best = self.best
        # plans of each layout, and the layout
        judged: list[tuple[list[SimulatedPlan], SplitCostModel]] = []
        for number, cost_model in enumerate(sorted(cost_models, key=self._floor)):
            self.progress("judging layouts", number, len(cost_models))
            # Layouts with whole experts on every rank are always simulated, since users ask when
            # those pay off.
            shares_experts = cost_model.grid.ep * cost_model.grid.etp > 1
            if self._floor(cost_model) > best and shares_experts:
                continue
            plans = list(self._simulate_starts(cost_model, best))
            if not plans:
                continue
            judged.append((plans, cost_model))
            if least_cost(plans) < (False, best):  # else no plan is faster, fit or not
                best_here = cheapest(plans)
                if best_here.fits:
                    best = min(best, best_here.seconds)
        promising = smallest(
            judged,
            key=lambda item: cheapest(item[0]).cost,
            bound=lambda item: least_cost(item[0]),
            most=most,
        )
        return [cost_model for _, cost_model in promising]

    def _simulate_starts(self, cost_model: SplitCostModel, best: float) -> Iterator[SimulatedPlan]:
        """Simulate the starting plans of a layout; stops after a plan that is hopeless compared
        with the best step so far."""
        for plan in self._starting_plans(cost_model.grid):
            simulated = self._simulate(cost_model, plan)
            if simulated is not None:
                yield simulated
                if simulated.least_seconds > self.settings.give_up * best:
                    return

    def _starting_plans(self, grid: Grid) -> Iterator[Plan]:
        """Yield the plans with which every layout is tried first."""
        space = self.settings.space
        # the first value of each choice
        first = {name: values[0] for name, values in space.values(grid).items()}
        # Every layout is tried with the all-to-alls that are best on some links, and with
        # multicast, which has no algorithm in `ALL_TO_ALLS` that could say so.
        judging = [
            name
            for name in space.all_to_alls
            if name not in ALL_TO_ALLS or ALL_TO_ALLS[name].judges_layouts
        ]
        if not judging:
            judging = [space.all_to_alls[0]]
        for schedule in _schedules(space, grid):
            for all_to_all in judging:
                yield Plan(**first | {"schedule": schedule, "all_to_all": all_to_all})

    def _refine(self, layouts: list[SplitCostModel]) -> None:
        """Simulate more plans on the most promising layouts, by changed choices or exhaustively."""
        if self.settings.exhaustive:
            for cost_model in layouts:
                self._simulate_all(cost_model)
            return
        climbed: list[tuple[SimulatedPlan, SplitCostModel]] = []
        for number, cost_model in enumerate(layouts):
            self.progress("changing choices", number, len(layouts))
            climbed.append((self._climb_from_starts(cost_model), cost_model))
        if not climbed:
            return
        climbed.sort(key=lambda item: item[0].cost)
        best, _ = climbed[0]
        hopeless = self.settings.give_up * best.seconds
        near = [item for item in climbed[: self.settings.paired] if item[0].seconds <= hopeless]
        for number, (plan, cost_model) in enumerate(near):
            self.progress("changing pairs of choices", number, len(near))
            self._climb(cost_model, plan, choices=2)

    def _simulate_all(self, cost_model: SplitCostModel) -> None:
        """Simulate every plan of the space on a layout."""
        plans = list(self.settings.space.plans(cost_model.grid))
        activity = f"trying every plan on {name_of(cost_model.grid)}"
        for number, plan in enumerate(plans):
            self.progress(activity, number, len(plans))
            self._simulate(cost_model, plan)

    def _climb_from_starts(self, cost_model: SplitCostModel) -> SimulatedPlan:
        """Return the best plan that single changes reach from the best plan of each schedule on a
        layout."""
        by_schedule: dict[str, list[SimulatedPlan]] = {}
        for simulated in self._simulated([cost_model.grid]):
            by_schedule.setdefault(simulated.plan.schedule, []).append(simulated)
        starts = [cheapest(plans) for plans in by_schedule.values()]
        hopeless = self.settings.give_up * cheapest(starts).seconds
        near = [start for start in starts if start.least_seconds <= hopeless]
        return cheapest([self._climb(cost_model, start) for start in near])

    def _climb(
        self, cost_model: SplitCostModel, best: SimulatedPlan, *, choices: int = 1
    ) -> SimulatedPlan:
        """Return the plan that steepest descent reaches from `best`; each step changes at most
        `choices` choices.

        A choice that made a plan too slow to change a second one is not tried again on the way. If
        two choices may change, all are tried at its end.
        """
        grid = cost_model.grid
        avoided: set[tuple[str, Any]] = set()
        """(name, value) of the choices that are not tried again."""
        changed = 1  # choices that the current step changes
        while changed <= choices:
            # seconds up to which a plan with one changed choice may get a second one
            near = best.seconds * (1 + (self.settings.give_up - 1) * PAIRED_SHARE)
            # whether a choice, by its name and value, is tried: of a pair, and alone
            keep = partial(self._may_pair, grid, near, best.plan)
            if changed == 1:
                keep = partial(_is_not_in, avoided)
            simulated = [
                self._simulate(cost_model, plan)
                for plan in neighbours(best.plan, self.settings.space, grid, changed, keep=keep)
            ]
            found = [each for each in simulated if each is not None]
            best_near = cheapest([best, *found])
            if best_near is not best:
                if changed == 1:
                    for each in found:
                        if each.least_seconds > near:
                            names = changes_of(each.plan, best.plan)
                            avoided.update((name, getattr(each.plan, name)) for name in names)
                best = best_near
                changed = 1
            elif avoided and choices > 1:  # single changes are at their end: try all once more
                avoided.clear()
            else:
                changed += 1
        return best

    def _may_pair(self, grid: Grid, near: float, plan: Plan, name: str, value: Any) -> bool:
        """Return whether a plan with another choice takes at most `near` seconds, or an unknown
        number, so that a second choice may be changed too."""
        simulated = self.tried.get((grid, replace(plan, **{name: value})))
        return simulated is None or simulated.least_seconds <= near

    def _simulate(self, cost_model: SplitCostModel, plan: Plan) -> SimulatedPlan | None:
        """Simulate a plan on the layout of a cost model, once for all calls. None: it does not
        fit the layout."""
        grid = cost_model.grid
        # all cost models of a layout have the same MoE layers, so the same passes
        key = (grid, plan)
        if key in self.tried:
            return self.tried[key]
        try:
            compiled = compile_plan(plan, grid)
            forward_and_backward = self._run(cost_model, compiled)
        except InputError as error:  # the plan does not fit the layout
            self.refusal = str(error)  # for the user, if no plan fits any layout
            self.tried[key] = None
            return None
        simulated = SimulatedPlan(
            compiled,
            forward_and_backward,
            self._options(grid),
            self._usable_bytes,
            layer_bytes=partial(self._layer_bytes, cost_model, compiled),
        )
        self.tried[key] = simulated
        return simulated

    def _options(self, grid: Grid) -> list[SplitCostModel]:
        """Return the ways of holding the model on a layout, from the one that sends least to the
        one that holds least."""
        return sorted(self._ways(grid), key=_sent_and_held)

    def _find_ways(self, grid: Grid) -> list[SplitCostModel]:
        """Return `_ways`."""
        alike = _alike(grid)
        if alike != grid:
            return [each.on(grid) for each in self._ways(alike)]
        splits = list(holdings(grid, self.split)) if self.settings.most_stages else [self.split]
        model = self._step_model(grid.dp)
        first = SplitCostModel(self.job, grid, splits[0], self.simulator, model=model)
        return [first, *map(first.held, splits[1:])]

    def _floor(self, cost_model: SplitCostModel) -> float:
        """Return the lower bound on the step time of all plans of the space on a layout."""
        key = _alike(cost_model.grid), cost_model.split
        if key not in self.floors:
            self.floors[key] = cost_model.floor(compression=self.settings.compression)
        return self.floors[key]

    def _run(self, cost_model: SplitCostModel, compiled: Compiled) -> tuple[Simulated, Simulated]:
        """Simulate the programs of a plan; plans with equal programs are simulated once."""
        key = _layer_of(cost_model, compiled)
        if key not in self.times:
            self.times[key] = self.simulator.passes(
                compiled.forward, compiled.backward, cost_model.model.layer, compiled.grid
            )
        return self.times[key]

    def _layer_bytes(self, cost_model: SplitCostModel, compiled: Compiled) -> tuple[float, float]:
        """Return the bytes that an MoE layer keeps and needs (`layer_bytes`) under a plan and even
        routing, however the model is held."""
        key = _layer_of(cost_model, compiled)
        if key not in self.needs:
            self.needs[key] = layer_bytes(self.simulator, cost_model.model.layer, compiled)
        return self.needs[key]

    def _ranking(self, counts: Sequence[np.ndarray]) -> list[PlannedStep]:
        """Return the best plans that fit the memory, best first; with counts, the best under even
        routing, ranked again."""
        if not counts:
            return list(itertools.islice(self._that_fit(self._simulated()), self.settings.keep))
        if self.cluster.world > MAX_RANKS_APART:
            raise InputError(
                f"counts: {self.cluster.world} ranks cannot be simulated one by one: plan without "
                f"them, or use at most {MAX_RANKS_APART} ranks"
            )
        best: list[PlannedStep] = []
        for planned in _distinct(by_seconds(self._simulated())):
            loaded = self._under_load(planned, counts)
            if loaded is not None:
                best.append(loaded)
            if len(best) == 3 * self.settings.keep:  # more than are kept: counts change the order
                break
        reranked = []
        for number, planned in enumerate(best):
            self.progress("simulating under counts", number, len(best))
            reranked.append(self._estimated_under(planned, counts))
        return sorted(reranked, key=lambda planned: planned.seconds)

    def _estimated_under(self, planned: PlannedStep, counts: Sequence[np.ndarray]) -> PlannedStep:
        """Return a planned step with the mean of its estimates under tables of copies."""
        cost_model = self._model_of(planned)
        layer = cost_model.model.layer
        compiled = compile_plan(planned.plan, planned.grid)
        estimates = []
        for table in counts:
            fitted = fit_counts(table, planned.grid.dp, layer)
            forward, backward = simulate_counts(self.simulator, compiled, layer, fitted)
            estimates.append(cost_model.estimate(forward, backward))
        return replace(planned, estimate=mean_of(estimates))

    def _that_fit(self, plans: Iterable[SimulatedPlan]) -> Iterator[PlannedStep]:
        """Yield the plans that fit the memory, best first, also under the MaxVio of the
        settings."""
        fitting = _distinct(by_seconds(plans))
        if self.settings.max_vio == 0:
            return fitting
        return in_order(
            fitting,
            bound=lambda step: step.seconds,
            step_of=lambda step: self._under_load(step, ()),
        )

    def _under_load(self, planned: PlannedStep, counts: Sequence[np.ndarray]) -> PlannedStep | None:
        """Return a planned step held so that it fits under a load, with its memory under counts if
        they are given; None if it fits in no way. The load is that of `_loaded`."""
        compiled = compile_plan(planned.plan, planned.grid)
        options = self._options(planned.grid)
        splits = [each.split for each in options]
        # the ways before it hold more and did not fit under even routing
        for cost_model in options[splits.index(planned.split) :]:
            loaded = self._loaded(cost_model, compiled, counts)
            if not self._fits(loaded):
                continue
            if cost_model.split != planned.split:
                passes = self._run(cost_model, compiled)
                memory = self._memory(cost_model, compiled)
                planned = planned_step(compiled, cost_model, passes, memory)
            return replace(planned, memory=loaded) if counts else planned
        return None

    def _loaded(
        self, cost_model: SplitCostModel, compiled: Compiled, counts: Sequence[np.ndarray]
    ) -> Memory:
        """Return the memory of a plan under counts, or without any under the MaxVio of the
        settings."""
        key = cost_model.split, _layer_of(cost_model, compiled)
        if key not in self.loaded:
            layer = cost_model.model.layer
            memory_of = cost_model.memory
            if counts:
                tables = [fit_counts(table, cost_model.grid.dp, layer) for table in counts]
                memory = memory_under_counts(memory_of, self.simulator, compiled, layer, tables)
            else:
                max_vio = self.settings.max_vio
                memory = memory_under_skew(memory_of, self.simulator, compiled, layer, max_vio)
            self.loaded[key] = memory
        return self.loaded[key]

    def _memory(self, cost_model: SplitCostModel, compiled: Compiled) -> Memory:
        """Return the memory of a plan under even routing."""
        return cost_model.rank_memory(*self._layer_bytes(cost_model, compiled))

    def _fits(self, memory: Memory) -> bool:
        """Return whether a rank's memory fits a device."""
        return memory.total <= self._usable_bytes

    def _cost_model(self, grid: Grid) -> SplitCostModel:
        """Return the way of holding the model that sends least among those whose states fit, else
        the leanest."""
        ways = self._ways(grid)
        least = min(each.least_bytes for each in ways)
        fitting = [each for each in ways if each.least_bytes <= self._usable_bytes]
        candidates = fitting or [each for each in ways if each.least_bytes == least]
        if len(candidates) == 1:  # what it sends need not be computed
            return candidates[0]
        return min(candidates, key=_sent_and_held)

    def _resplit(self, planned: PlannedStep) -> list[PlannedStep]:
        """Return the plan with other parts of a stage and other micro-batches, as long as these
        make its step shorter; [] if none does."""
        found: list[PlannedStep] = []
        compiled = compile_plan(planned.plan, planned.grid)
        best = planned
        while True:
            shorter = []
            for split in near_splits(best.split, self.job):
                step = self._under(split, best.grid, compiled)
                if step is not None and step.seconds < best.seconds:
                    shorter.append(step)
            if not shorter:
                return found
            best = min(shorter, key=lambda step: step.seconds)
            found.append(best)

    def _flying(self, ranking: Sequence[PlannedStep]) -> Iterator[PlannedStep]:
        """Yield the best plans, with their chunks and without, with two micro-batches in flight,
        where that is faster and fits."""
        # recomputed blocks do not take turns with those of another micro-batch
        recomputes = self.job.model.checkpoint_activations
        if not self.settings.may_fly or self.split.pp > 1 or recomputes:
            return
        choices: list[tuple[Grid, Plan, JobSplit]] = []  # what is tried in flight
        for planned in ranking[: self.settings.keep]:
            for plan in (planned.plan, replace(planned.plan, chunks=1)):
                choice = (planned.grid, plan, planned.split)
                has_all_to_alls = planned.grid.ep > 1
                if has_all_to_alls and choice not in choices:
                    choices.append(choice)
        best = ranking[0].seconds
        for grid, plan, split in choices:
            compiled = compile_plan(plan, grid)
            in_turn = self._under(split, grid, compiled)
            flying = self._under(replace(split, in_flight=2), grid, compiled)
            if in_turn and flying and flying.seconds <= FLIES * min(in_turn.seconds, best):
                yield flying

    def _under(self, split: JobSplit, grid: Grid, compiled: Compiled) -> PlannedStep | None:
        """Return the step of a plan under another split; None if it does not fit."""
        try:
            cost_model = SplitCostModel(self.job, grid, split, self.simulator)
        except InputError:
            return None
        memory = self._memory(cost_model, compiled)
        if not self._fits(memory):
            return None
        if self.settings.max_vio > 0 and not self._fits(self._loaded(cost_model, compiled, ())):
            return None
        return planned_step(compiled, cost_model, self._run(cost_model, compiled), memory)

    def _model_of(self, planned: PlannedStep) -> SplitCostModel:
        """Return the cost model of the way in which a planned step holds the model."""
        return next(each for each in self._options(planned.grid) if each.split == planned.split)

    def _too_large(self, grid: Grid, num_bytes: float) -> TooLargeError:
        """Return the error that no layout fits; the smallest is `grid`, with `num_bytes`."""
        device = self.cluster.device.memory_gib
        reserve = self.settings.reserve_gib
        # `_usable_bytes` are the device's less the reserve, over FRAGMENTED: the bytes that the
        # allocator reserves for each byte of tensors
        over = (num_bytes - self._usable_bytes) * FRAGMENTED / GIB
        over = math.ceil(10 * over) / 10  # to a tenth, never 0.0
        recomputes = self.job.model.checkpoint_activations
        recomputed = ", even with blocks recomputed" if recomputes else ""
        under = " under the given loads" if self.loaded else ""
        return TooLargeError(
            f"the model fits no layout of {self.cluster.world} ranks{recomputed}{under}: the "
            f"smallest, {layout_in_words(grid, self.split)}, needs {num_bytes / GIB:.1f} GiB, plus "
            f"{FRAGMENTED - 1:.0%} for fragments and {reserve:g} in reserve: {over:.1f} more than "
            f"a device of {self.cluster.name} has ({device:g})",
            self.job,
            grid,
            num_bytes,
        )


def _alike(grid: Grid) -> Grid:
    """Return the layout that stands for those that differ in which axis is innermost: they send and
    hold as much of the model."""
    return replace(grid, innermost="etp")


def _sent_and_held(cost_model: SplitCostModel) -> tuple[float, float]:
    """Return the seconds in which parameters and gradients move, to six digits, so that they are
    equal if they differ by rounding only, and the least bytes that a rank needs."""
    return float(f"{cost_model.moving_seconds:.6g}"), cost_model.least_bytes


def smallest_layout(cost_models: Sequence[SplitCostModel]) -> tuple[Grid, float]:
    """Return the layout that needs the fewest bytes per rank, and these bytes.

    The layouts have the simplest plan, since others need more: they cut into chunks or gather
    weights.
    """
    best = cost_models[0].grid
    least = math.inf
    # Which axis is innermost changes no size, so the first one of each size stands for both.
    by_size: dict[tuple[int, int, int], SplitCostModel] = {}
    for cost_model in reversed(cost_models):  # so the first one of a size is written last
        by_size[cost_model.grid.tp, cost_model.grid.ep, cost_model.grid.etp] = cost_model
    for cost_model in sorted(by_size.values(), key=lambda each: each.least_bytes):
        if cost_model.least_bytes >= least:
            break  # all others need at least as much
        compiled = compile_plan(Plan(order="fifo"), cost_model.grid)
        num_bytes = cost_model.memory(compiled).total
        if num_bytes < least:
            best = cost_model.grid
            least = num_bytes
    return best, least


def neighbours(
    plan: Plan,
    space: SearchSpace,
    grid: Grid,
    changed: int = 1,
    *,
    keep: Callable[[str, Any], bool] | None = None,
) -> Iterator[Plan]:
    """Yield the plans of a space that differ from a plan in some choices.

    Args:
        plan: the plan.
        space: the search space.
        grid: the mesh.
        changed: number of choices in which the plans differ from `plan`.
        keep: returns whether a choice is changed, given its name and its value; None: all are.
    """
    values = space.values(grid) | {"schedule": _schedules(space, grid)}
    other_values: dict[str, list[Any]] = {}
    for name, choices in values.items():
        others = [value for value in choices if value != getattr(plan, name)]
        if keep is not None:
            others = [value for value in others if keep(name, value)]
        other_values[name] = others
    for names in itertools.combinations(values, changed):
        for chosen in itertools.product(*(other_values[name] for name in names)):
            yield replace(plan, **dict(zip(names, chosen)))


def _is_not_in(avoided: set[tuple[str, Any]], name: str, value: Any) -> bool:
    """Return whether a choice, by its name and value, is none of those to avoid: `keep` of
    `neighbours`."""
    return (name, value) not in avoided


def changes_of(plan: Plan, other: Plan) -> list[str]:
    """Return the names of the choices in which two plans differ."""
    return [name for name, value in vars(plan).items() if value != getattr(other, name)]


def _schedules(space: SearchSpace, grid: Grid) -> tuple[Schedule, ...]:
    """Return the schedules of a space; only one if tp and etp are 1, under which all schedules are
    equal."""
    if grid.tp == grid.etp == 1:
        default = Plan().schedule
        return (default,) if default in space.schedules else space.schedules[:1]
    return space.schedules


def _distinct(steps: Iterable[PlannedStep]) -> Iterator[PlannedStep]:
    """Yield one plan per layout and step time, the plan with the fewest choices that are not the
    default; the steps are given the shortest first."""
    # times that agree to six digits are equal but for rounding
    for _, alike in itertools.groupby(steps, lambda step: f"{step.seconds:.6g}"):
        plainest: dict[Grid, PlannedStep] = {}
        for step in alike:
            known = plainest.get(step.grid)
            if known is None or _num_choices(step.plan) < _num_choices(known.plan):
                plainest[step.grid] = step
        yield from sorted(plainest.values(), key=lambda step: step.seconds)


def _num_choices(plan: Plan) -> int:
    """Return the number of choices of a plan that are not the default."""
    return len(changes_of(plan, Plan()))
