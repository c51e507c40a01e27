"""The jobs of each part of the benchmark: meshes, plans, and the plans they are compared with. Jobs
are sent to the ranks.

A mesh has the axes tp (tensor parallelism), ep (experts are split over it) and etp (each expert is
split over it); the ranks along the innermost axis are neighbours, inside nodes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from moesaic.errors import InputError
from moesaic.planner.candidates import SearchSpace, candidates
from moesaic.planner.simulator import Simulator
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Codec, Plan
from moesaic_lab.layer.config import (
    Ablation,
    AdaptiveR,
    Codecs,
    LayerBenchConfig,
    LayerPlace,
    Orders,
    Pipelining,
    Schedules,
)
from moesaic_lab.layer.same import distinct

SINGLES = {
    "baseline": Plan(schedule="baseline"),
    "ted": Plan(schedule="ted"),
    "s1": Plan(schedule="s1"),
    "s2": Plan(schedule="s2"),
    "s2, saa": Plan(schedule="s2", overlap_gather=True),
    "s3": Plan(schedule="s3"),
}
"""Plans of a single schedule each, by name."""
COMPETE = ("ted", "s1", "s2")
"""Schedules that the best plan must not be slower than."""

BEST = "best"
"""Name that stands for the plan that a search chooses."""


@dataclass(frozen=True, kw_only=True)
class LayerJob:
    """Plans of one layer on one mesh, to be timed in turn on a running cluster."""

    section: str = ""
    """The part of the benchmark to which the job belongs."""
    label: str = ""
    """Name of the cell in tables and messages."""
    place: LayerPlace
    """Bed, virtual accelerators and sizes of the layer."""
    grid: Grid
    """The mesh over all ranks of the bed."""
    methods: dict[str, Compiled]
    """Plans to time, by name, in the order of the table. Tables compare the others with the first
    one."""
    same: dict[str, str] = field(default_factory=dict)
    """Further plans that do the same as a method on this mesh: name of the plan to name of the
    method."""
    candidates: dict[str, Compiled] = field(default_factory=dict)
    """Further plans that the search may choose."""
    compete: tuple[str, ...] = ()
    """Methods that the search may choose, the best by prediction first; empty for no search."""
    margin: float = 0.0
    """The search chooses the first of `compete` unless another plan's trial is shorter by more than
    this share."""
    trial_repeats: int = 0
    """Runs of each plan in the search."""
    reference: str = ""
    """Methods near this one are timed more often; "" for the first method, `BEST` for the plan that
    the search chose."""
    factor: float | None = None
    """Capacity factor of a padded capacity; None for a dropless layer without padding."""
    other_flops: dict[str, float] = field(default_factory=dict)
    """FLOPs of virtual products in a step in addition to those of the experts, by method."""
    counts_switches: bool = False
    """Whether to measure the cost of switching plans as well."""
    warmup: int = 1
    """Unmeasured rounds before the measured ones."""
    seed: int = 0
    """Seed of the routing."""

    @property
    def everything(self) -> dict[str, Compiled]:
        """Methods and candidates."""
        return {**self.methods, **self.candidates}

    @property
    def tokens(self) -> int:
        """Tokens of a tensor-parallel group."""
        return self.place.tokens_per_rank * self.grid.tp


def jobs(config: LayerBenchConfig) -> Iterator[LayerJob]:
    """Yield the jobs of a configuration, part by part. Each job's plans are compiled when it is
    yielded."""
    for part in config.cells:
        for job in MAKERS[part.section](part):
            yield replace(job, section=part.section, warmup=config.warmup, seed=config.seed)


def schedules(part: Schedules) -> Iterator[LayerJob]:
    """Yield a job for each tp, etp and innermost axis. With etp 1 both innermost axes give the same
    mesh and one job."""
    seconds_of = step_model(part)
    for etp, tp in itertools.product(part.etp, part.tp):
        for innermost in ("etp", "ep") if etp > 1 else ("etp",):
            grid = Grid(
                world=part.world,
                tp=tp,
                ep=part.world // etp,
                etp=etp,
                innermost=innermost,
                ranks_per_node=part.ranks_per_node,
            )
            methods, same = distinct(singles(grid))
            compete = {same.get(name, name) for name in COMPETE} & set(methods)
            predicted = {name: seconds_of(methods[name]) for name in compete}

            # the search also tries plans that differ from all methods and look no slower
            others = {described(compiled.plan): compiled for compiled in searched(grid)}
            different, _ = distinct(methods | others)
            simulated = {
                name: (seconds_of(plan), plan) for name, plan in others.items() if name in different
            }
            promising = most_promising(simulated, part, min(predicted.values()))
            where = f", {innermost} inside nodes" if etp > 1 else ""
            yield LayerJob(
                label=f"tp {tp}, etp {etp}{where}",
                place=part,
                grid=grid,
                methods=methods,
                candidates=promising,
                same=same,
                compete=tuple(sorted(compete, key=lambda name: predicted[name])),
                margin=part.margin,
                trial_repeats=part.trial_repeats,
                reference=BEST,
            )


def most_promising(
    plans: dict[str, tuple[float, Compiled]], part: Schedules, at_most: float
) -> dict[str, Compiled]:
    """Return the plans to try: those with the shortest simulated step, best first.

    Args:
        plans: simulated seconds and plan, by name.
        part: has the number of plans to try, `trial_plans`.
        at_most: seconds; plans with a longer simulated step are omitted.
    """
    ranked = []
    for name, (seconds, _) in plans.items():
        if seconds <= at_most:
            ranked.append((seconds, name))
    ranked.sort()
    return {name: plans[name][1] for _, name in ranked[: part.trial_plans]}


def adaptive_r(part: AdaptiveR) -> Iterator[LayerJob]:
    """Yield a job for each capacity factor, whose methods are the values of r
    (`Plan.gather_weights`): 0 and the divisors of etp, where r = etp gathers nothing."""
    grid = Grid(
        world=part.world,
        ep=part.world // part.etp,
        etp=part.etp,
        ranks_per_node=part.ranks_per_node,
    )
    plans = {
        f"r={r}": compile_plan(Plan(gather_weights=None if r == part.etp else r), grid)
        for r in range(part.etp, -1, -1)
        if r == 0 or part.etp % r == 0
    }
    for factor in part.factors:
        yield LayerJob(
            label=f"{part.name}, factor {factor:g}",
            place=part,
            grid=grid,
            methods=plans,
            factor=factor,
            counts_switches=factor == part.factors[0],
        )


def pipelining(part: Pipelining) -> Iterator[LayerJob]:
    """Yield a job for each codec, whose methods are the numbers of chunks."""
    grid = all_ep(part)
    for codec in part.codecs:
        yield LayerJob(
            label=f"chunks, {coded(codec)}",
            place=part,
            grid=grid,
            methods={str(n): compiled(grid, codec, chunks=n) for n in part.chunks},
        )


def orders(part: Orders) -> Iterator[LayerJob]:
    """Yield the job that compares orders of one program's tasks; identical orders are timed
    once."""
    grid = all_ep(part)
    plans = {
        str(name): compiled(
            grid, part.codec, chunks=part.chunks, all_to_all=part.all_to_all, order=name
        )
        for name in part.orders
    }
    methods, same = distinct(plans, in_order=True)
    yield LayerJob(
        label=f"{part.all_to_all}, {part.chunks} chunks, {coded(part.codec)}",
        place=part,
        grid=grid,
        methods=methods,
        same=same,
    )


def codecs(part: Codecs) -> Iterator[LayerJob]:
    """Yield the job that compares all codecs."""
    grid = all_ep(part)
    methods = {str(codec): compiled(grid, codec, chunks=part.chunks) for codec in part.codecs}
    yield LayerJob(label=f"{part.chunks} chunks", place=part, grid=grid, methods=methods)


def ablation(part: Ablation) -> Iterator[LayerJob]:
    """Yield the job that adds ScheMoE's steps one by one: a codec, both lanes at once, chunks in
    OptSche's order."""
    grid = all_ep(part)
    codec = part.codec
    methods = {
        "plain": compiled(grid, "none", order="fifo"),
        f"+ {codec}": compiled(grid, codec, order="fifo"),
        "+ pipelined all-to-all": compiled(grid, codec, order="fifo", all_to_all="pipelined"),
        "+ schedule": compiled(grid, codec, all_to_all="pipelined", chunks=part.chunks),
    }
    yield LayerJob(label=f"{codec}, {part.chunks} chunks", place=part, grid=grid, methods=methods)


MAKERS: dict[str, Callable[[Any], Iterator[LayerJob]]] = {
    "schedules": schedules,
    "adaptive_r": adaptive_r,
    "pipelining": pipelining,
    "orders": orders,
    "codecs": codecs,
    "ablation": ablation,
}
"""Functions that yield the jobs of a part, by part."""


def all_ep(place: LayerPlace) -> Grid:
    """Return the mesh that splits the experts over all ranks: ep is the world."""
    return Grid(world=place.world, ep=place.world, ranks_per_node=place.ranks_per_node)


def compiled(grid: Grid, codec: Codec, **choices: object) -> Compiled:
    """Compile a plan with the same codec in both directions; `choices` are further fields of
    `Plan`."""
    return compile_plan(Plan(codec=codec, backward_codec=codec, **choices), grid)  # type: ignore[arg-type]


def singles(grid: Grid) -> dict[str, Compiled]:
    """Compile the plans of `SINGLES` that are valid on a mesh."""
    plans = {}
    for name, plan in SINGLES.items():
        with suppress(InputError):
            plans[name] = compile_plan(plan, grid)
    return plans


def searched(grid: Grid) -> Iterator[Compiled]:
    """Yield the compiled plans among which the search looks for the best one on a mesh."""
    space = SearchSpace(
        schedules=("s1", "s2", "s3"),
        chunks=(1, 2),
        all_to_alls=("linear", "hier2d", "multicast"),
        gather_weights=(1,) if grid.etp > 1 else (),
        orders=("optsche",),
    )
    return iter(candidates(grid, space))


def step_model(place: LayerPlace) -> Callable[[Compiled], float]:
    """Return a function that simulates a plan's step and returns its seconds."""
    simulator = Simulator(place.cluster)

    def seconds(plan: Compiled) -> float:
        return simulator.layer_seconds(
            plan.forward, plan.backward, place.workload(plan.grid.tp), plan.grid
        )

    return seconds


def described(plan: Plan) -> str:
    """Return a plan in words: its schedule and all choices that are not the default."""
    words: list[str] = [plan.schedule]
    if plan.gather_weights is not None:
        words.append(f"r={plan.gather_weights}")
    if plan.overlap_gather:
        words.append("saa")
    if plan.all_to_all != "linear":
        words.append(plan.all_to_all)
    if plan.chunks > 1:
        words.append(f"{plan.chunks} chunks")
    return ", ".join(words)


def coded(codec: str) -> str:
    """Return a codec's name for labels."""
    return "no codec" if codec == "none" else codec
