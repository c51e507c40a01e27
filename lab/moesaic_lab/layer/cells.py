"""The jobs of each part of the benchmark: which meshes, which plans, compared with what."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from moesaic.cost.simulate import Simulator
from moesaic.errors import InputError
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.plan.candidates import SearchSpace, candidates
from moesaic.plan.compile import Durations
from moesaic.plan.plan import Codec
from moesaic.program.grid import Grid
from moesaic.program.task import Program
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
from moesaic_lab.layer.job import BEST, LayerJob
from moesaic_lab.layer.same import distinct

SINGLES = {
    "baseline": Plan(schedule="baseline"),
    "ted": Plan(schedule="ted"),
    "s1": Plan(schedule="s1"),
    "s2": Plan(schedule="s2"),
    "s2, saa": Plan(schedule="s2", overlap_gather=True),
    "s3": Plan(schedule="s3"),
}
"""The schedules, each by itself."""
RESOLUTION = 1e-4
"""Seconds: what an order gains below this is not worth leaving OptSche's for."""
COMPETE = ("ted", "s1", "s2")
"""What the best plan must not fall behind."""


def jobs(config: LayerBenchConfig) -> Iterator[LayerJob]:
    """Yield the jobs of a configuration, part by part; plans are compiled as they are needed."""
    found: list[Iterator[LayerJob]] = []
    if config.schedules:
        found.append(schedules(config.schedules, config))
    found += [adaptive_r(part, config) for part in config.adaptive_r]
    if config.pipelining:
        found.append(pipelining(config.pipelining, config))
    found += [orders(each, config) for each in config.orders]
    if config.codecs:
        found.append(codecs(config.codecs, config))
    if config.ablation:
        found.append(ablation(config.ablation, config))
    return itertools.chain.from_iterable(found)


def schedules(part: Schedules, config: LayerBenchConfig) -> Iterator[LayerJob]:
    """Yield a job for every tp, etp and innermost axis; with etp 1 either axis is the same mesh."""
    simulator = Simulator(part.cluster)

    def step_seconds(plan: Compiled) -> float:
        return simulator.layer_seconds(plan.forward, plan.backward, part.workload(plan.grid.tp), plan.grid)

    for etp, tp in itertools.product(part.etp, part.tp):
        for innermost in ("etp", "ep") if etp > 1 else ("etp",):
            grid = Grid(
                world=part.bed.world, tp=tp, ep=part.bed.world // etp, etp=etp, innermost=innermost,
                ranks_per_node=part.ranks_per_node,
            )  # fmt: skip
            methods = {name: fit for name, plan in SINGLES.items() if (fit := fitting(plan, grid)) is not None}
            methods, same = distinct(methods)
            space = SearchSpace(
                schedules=("s1", "s2", "s3"), chunks=(1, 2), all_to_alls=("linear", "hier2d", "multicast"),
                gather_weights=(1,) if etp > 1 else (),
            )  # fmt: skip
            names = {same.get(name, name) for name in COMPETE} & set(methods)
            predicted = {name: step_seconds(methods[name]) for name in names}
            others = {described(compiled.plan): compiled for compiled in candidates(grid, space)}
            new = [name for name in distinct(methods | others)[0] if name in others]
            found = most_promising(
                {n: (step_seconds(others[n]), others[n]) for n in new}, part, min(predicted.values())
            )
            where = f", {innermost} inside nodes" if etp > 1 else ""
            yield LayerJob(
                section="schedules", label=f"tp {tp}, etp {etp}{where}", place=part, grid=grid, methods=methods,
                candidates=found,
                compete=tuple(sorted(names, key=lambda name: predicted[name])), margin=part.margin, same=same,
                trial_repeats=part.trial_repeats, reference=BEST, warmup=config.warmup, seed=config.seed,
            )  # fmt: skip


def most_promising(plans: dict[str, tuple[float, Compiled]], part: Schedules, at_most: float) -> dict[str, Compiled]:
    """Return the plans that are worth a trial: those with the least simulated step, best first.

    Args:
        plans: name to simulated seconds and plan.
        part: says how many.
        at_most: seconds; plans that take longer are left out.
    """
    ranked = sorted((seconds, name) for name, (seconds, _) in plans.items() if seconds <= at_most)
    return {name: plans[name][1] for _, name in ranked[: part.trial_plans]}


def adaptive_r(part: AdaptiveR, config: LayerBenchConfig) -> Iterator[LayerJob]:
    """Yield a job for every capacity factor."""
    grid = Grid(world=part.bed.world, ep=part.bed.world // part.etp, etp=part.etp, ranks_per_node=part.ranks_per_node)
    plans = {
        f"r={r}": compile_plan(Plan(gather_weights=None if r == part.etp else r), grid)
        for r in range(part.etp, -1, -1)
        if r == 0 or part.etp % r == 0
    }
    for factor in part.factors:
        yield LayerJob(
            section="adaptive_r", label=f"{part.name}, factor {factor:g}", place=part, grid=grid, methods=plans,
            factor=factor, counts_switches=factor == part.factors[0], warmup=config.warmup, seed=config.seed,
        )  # fmt: skip


def pipelining(part: Pipelining, config: LayerBenchConfig) -> Iterator[LayerJob]:
    """Yield a job of numbers of chunks for every codec."""
    grid = all_ep(part)
    for codec in part.codecs:
        yield LayerJob(
            section="pipelining", label=f"chunks, {coded(codec)}", place=part, grid=grid, warmup=config.warmup,
            methods={str(n): compiled(part, grid, codec, chunks=n) for n in part.chunks}, seed=config.seed,
        )  # fmt: skip


def orders(part: Orders, config: LayerBenchConfig) -> Iterator[LayerJob]:
    """Yield the one job of a program's orders; those that come out alike are timed once."""
    grid = all_ep(part)
    plans = {
        str(name): compiled(part, grid, part.codec, chunks=part.chunks, all_to_all=part.all_to_all, order=name)
        for name in part.orders
    }
    methods, same = distinct(plans, in_order=True)
    yield LayerJob(
        section="orders", label=f"{part.all_to_all}, {part.chunks} chunks, {coded(part.codec)}", place=part, grid=grid,
        methods=methods, same=same, warmup=config.warmup, seed=config.seed,
    )  # fmt: skip


def codecs(part: Codecs, config: LayerBenchConfig) -> Iterator[LayerJob]:
    """Yield the one job of all codecs."""
    grid = all_ep(part)
    methods = {str(codec): compiled(part, grid, codec, chunks=part.chunks) for codec in part.codecs}
    yield LayerJob(
        section="codecs", label=f"{part.chunks} chunks", place=part, grid=grid, methods=methods, warmup=config.warmup,
        seed=config.seed,
    )  # fmt: skip


def ablation(part: Ablation, config: LayerBenchConfig) -> Iterator[LayerJob]:
    """Yield the one job of ScheMoE's steps: the plain layer, a codec, both lanes at once, chunks in OptSche's order."""
    grid, codec = all_ep(part), part.codec
    methods = {
        "plain": compiled(part, grid, "none", order="fifo"),
        f"+ {codec}": compiled(part, grid, codec, order="fifo"),
        "+ pipelined all-to-all": compiled(part, grid, codec, order="fifo", all_to_all="pipelined"),
        "+ schedule": compiled(part, grid, codec, all_to_all="pipelined", chunks=part.chunks),
    }
    yield LayerJob(
        section="ablation", label=f"{codec}, {part.chunks} chunks", place=part, grid=grid, methods=methods,
        warmup=config.warmup, seed=config.seed,
    )  # fmt: skip


def all_ep(place: LayerPlace) -> Grid:
    """Return the mesh in which every rank holds experts of its own."""
    return Grid(world=place.bed.world, ep=place.bed.world, ranks_per_node=place.ranks_per_node)


def compiled(place: LayerPlace, grid: Grid, codec: Codec, **choices: object) -> Compiled:
    """Return a plan with a codec in both directions; an exact order gets the durations of the bed and its accelerators."""
    plan = Plan(codec=codec, backward_codec=codec, **choices)  # type: ignore[arg-type]
    simulator = Simulator(place.cluster)
    durations: Durations | None = None
    if plan.order == "exact":

        def rounded(program: Program, of_grid: Grid) -> dict[str, float]:
            seconds = simulator.durations(program, place.workload(of_grid.tp), of_grid)
            return {name: round(length / RESOLUTION) * RESOLUTION for name, length in seconds.items()}

        durations = rounded
    return compile_plan(plan, grid, durations=durations, host_runs_compute=True)


def fitting(plan: Plan, grid: Grid) -> Compiled | None:
    """Return a compiled plan; None if it does not fit the mesh."""
    try:
        return compile_plan(plan, grid)
    except InputError:
        return None


def described(plan: Plan) -> str:
    """Return a plan as words: its schedule, and what is not as usual."""
    words: list[str] = [plan.schedule]
    words += [f"r={plan.gather_weights}"] if plan.gather_weights is not None else []
    words += ["saa"] if plan.overlap_gather else []
    words += [plan.all_to_all] if plan.all_to_all != "linear" else []
    words += [f"{plan.chunks} chunks"] if plan.chunks > 1 else []
    return ", ".join(words)


def coded(codec: str) -> str:
    """Return what is said of a codec."""
    return "no codec" if codec == "none" else codec
