"""`moesaic bench auto`: compare the plan that `plan="auto"` chooses with fixed plans, on the
emulated beds of `bench layer`.

A layer with plan="auto" runs 60 steps, in which it must choose a plan. Then its plan and fixed
plans are timed in turn. The fixed plans are the layer's own candidates, every single schedule, and
the plans with the best predicted times on the bed. Under "changed" every link gets another rate
after the first choice, and 60 more steps follow. Under "neighbour" another process keeps a core
busy while the layer chooses, not while plans are timed. Four ranks on two nodes choose with three
seeds, quiet and beside a neighbour; each choice is a first one. Virtual compute, real bytes.

    moesaic bench auto --json benchmarks/results/auto.json
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from moesaic.auto import AT_ONCE, AutoPlan
from moesaic.comm.mesh import Mesh, open_transport
from moesaic.measure.together import latest, start_together
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import plan_in_words
from moesaic_lab.benchmark import (
    Benchmark,
    KeptOptions,
    Shown,
    Told,
    notes_of,
    on_beds,
    require_cluster,
)
from moesaic_lab.claims import Claim, NotMeasuredError, claimed
from moesaic_lab.in_flight import ALONE, chosen_and_fixed
from moesaic_lab.in_flight import Options as InFlight
from moesaic_lab.layer.cells import LayerJob, all_ep, searched, singles, step_model
from moesaic_lab.layer.config import LayerPlace, Pipelining, Schedules, read_config
from moesaic_lab.layer.ranks import LayerRunner
from moesaic_lab.layer.same import distinct
from moesaic_lab.measure import Span, in_turn, over_ranks, paired
from moesaic_testbed.bed import Bed, Change

STEPS = 60
"""Steps after which the choice is judged."""
CHANGED = "50mbit"
"""Rate of every node's link after the change."""
AT_SECONDS = 90.0
"""Seconds until links change: late enough for the first choice, even if several ranks share a
core."""
PREDICTED = 3
"""Number of fixed plans that are chosen by predicted time."""
FEW_RANKS = 4
"""Ranks of a layer whose choice is judged with several seeds, and beside a neighbour."""
SEEDS = 3
"""Number of those seeds."""
LINKS = ("200mbit", "500mbit", "2gbit", "10gbit")
"""Rates of the link between two nodes where layers choose one or two micro-batches in flight."""
BUSY = "while True: pass"
"""What keeps a core busy."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(KeptOptions):
    """Beds and repeats."""

    repeats: int = 30
    """How often each plan is timed."""
    only: str | None = None
    """Measure only beds whose name contains this text."""


@dataclass(frozen=True, kw_only=True)
class AutoCase:
    """A layer on a mesh of a bed, with steady or changing links."""

    name: str
    job: LayerJob
    """The layer's job; its methods are the fixed plans."""
    changes: bool
    repeats: int
    has_neighbour: bool = False
    """Whether another process keeps a core busy while the layer chooses."""


@dataclass(frozen=True, kw_only=True)
class InFlightCase:
    """A model whose layers choose one or two micro-batches in flight, on a bed."""

    name: str
    bed: Bed
    seed: int
    options: InFlight
    changes: bool = False


@dataclass(frozen=True, kw_only=True)
class AutoResult:
    """The results of one rank."""

    chosen: str
    said: list[str]
    races: int
    spans: dict[str, list[Span]]


def cases(options: AutoOptions) -> list[AutoCase | InFlightCase]:
    """Return the beds of the layer benchmark, with steady and with changing links, then those of
    micro-batches in flight."""
    require_cluster()
    all_cases: list[AutoCase | InFlightCase] = [*_plan_cases(options), *cases_of_links(options)]
    return [case for case in all_cases if options.only is None or options.only in case.name]


def cases_of_links(
    options: AutoOptions, links: Sequence[str] = LINKS, seeds: int = SEEDS
) -> Iterator[InFlightCase]:
    """Yield a case of micro-batches in flight for each link and seed."""
    for link, seed in itertools.product(links, range(seeds)):
        yield InFlightCase(
            name=f"in flight, 2 ranks, {link}, seed {seed}",
            bed=Bed(nodes=2, ranks_per_node=1, inter=link),
            seed=seed,
            options=InFlight(steps=options.repeats // 3),
        )


def _plan_cases(options: AutoOptions) -> list[AutoCase]:
    """Return the beds of the layer benchmark."""
    all_cases = []
    for name, job in _jobs():
        for how in ("steady", "changed"):
            case = AutoCase(
                name=f"{name}, links {how}",
                job=job,
                changes=how == "changed",
                repeats=options.repeats,
            )
            all_cases.append(case)
        if job.grid.world > FEW_RANKS:
            continue
        steady = all_cases[-2]
        for seed in range(SEEDS):
            seeded = replace(job, seed=seed)
            if seed:
                named = replace(steady, name=f"{steady.name}, seed {seed}", job=seeded)
                all_cases.append(named)
            beside = replace(
                steady, name=f"{name}, neighbour, seed {seed}", job=seeded, has_neighbour=True
            )
            all_cases.append(beside)
    return all_cases


def _jobs() -> Iterator[tuple[str, LayerJob]]:
    """Yield the layers to measure, each with its label."""
    config = read_config()
    place, pipelining = (
        next(cell for cell in config.cells if isinstance(cell, kind))
        for kind in (Schedules, Pipelining)
    )
    for tp, etp in ((1, 1), (4, 4)):
        grid = Grid(
            world=place.world,
            tp=tp,
            ep=place.world // etp,
            etp=etp,
            ranks_per_node=place.ranks_per_node,
        )
        yield f"16 ranks, tp {tp}, etp {etp}", _job(place, grid)
    yield "4 ranks, large messages", _job(pipelining, all_ep(pipelining))


def _job(place: LayerPlace, grid: Grid) -> LayerJob:
    """Return the job of a layer: all single changes and the best predicted plans."""
    best = sorted(searched(grid), key=step_model(place))[:PREDICTED]
    fixed = (*singles(grid).values(), *best)
    methods, alike = distinct(_named(fixed))
    return LayerJob(place=place, grid=grid, methods=methods, same=alike)


def measure(
    options: AutoOptions, selected: list[AutoCase | InFlightCase], told: Told
) -> list[dict[str, Any]]:
    """Run every case on its bed."""

    def bed_of(case: AutoCase | InFlightCase) -> Bed:
        if isinstance(case, InFlightCase):
            return case.bed
        bed = case.job.place.bed
        changes = [
            Change(at_seconds=AT_SECONDS, node=node, rate=CHANGED) for node in range(bed.nodes)
        ]
        return replace(bed, changes=tuple(changes)) if case.changes else bed

    return on_beds(
        selected,
        bed_of,
        lambda case: case.name,
        lambda ranks, case: row_of(case, ranks.run(on_rank, case)),
        told=told,
        keep=options.keep,
    )


def on_rank(case: AutoCase | InFlightCase) -> AutoResult:
    """Let the layer choose its plan, then time this plan and the fixed ones; all ranks call this
    together."""
    if isinstance(case, InFlightCase):
        way, said, of_ways = chosen_and_fixed(case.options, seed=case.seed)
        return AutoResult(chosen=way, said=said, races=1, spans=of_ways)
    started = time.monotonic()
    transport = open_transport(name="sockets")
    runner = LayerRunner(case.job, transport)
    mesh = Mesh(case.job.grid, transport)
    layer = runner.layer
    assert layer.on_mesh is not None
    auto = AutoPlan.of(mesh)
    auto.join(layer.on_mesh, layer.experts, layer.hidden, layer.parameters)
    # it ends the steps that `auto` counts, and changes no weights
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)

    def train(steps: int) -> None:
        for _ in range(steps):
            layer(runner.x).backward(torch.ones_like(runner.x))
            optimizer.step()
            optimizer.zero_grad()

    is_first = transport.rank == 0
    with neighbour() if case.has_neighbour and is_first else nullcontext():
        train(STEPS)
    if case.changes:
        train(20)
        # until the links have changed
        time.sleep(max(started + AT_SECONDS + 1 - time.monotonic(), 0.0))
        train(STEPS)
    assert auto.table is not None
    chosen = layer.on_mesh.compiled
    own = [compile_plan(plan, case.job.grid) for plan in auto.table.plans]
    methods, alike = distinct(_named([chosen, *own]) | dict(case.job.methods))
    gc.collect()
    layer.on_mesh.auto = None  # from here on, each run says its plan
    run = {name: partial(runner.step, compiled) for name, compiled in methods.items()}
    spans = in_turn(run, case.repeats, barrier=start_together(latest), warmup=1)
    name = plan_in_words(chosen.plan)
    return AutoResult(
        chosen=alike.get(name, name), said=auto.said, races=auto.table.races, spans=spans
    )


@contextmanager
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """Keep a core busy inside the block."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _named(plans: Sequence[Compiled]) -> dict[str, Compiled]:
    """Return compiled plans by their text."""
    return {plan_in_words(each.plan): each for each in plans}


def row_of(case: AutoCase | InFlightCase, results: Sequence[AutoResult]) -> dict[str, Any]:
    """Return the row of a case from the results of all ranks."""
    seconds: Mapping[str, tuple[float, ...]] = over_ranks([each.spans for each in results])
    chosen = results[0].chosen
    assert all(each.chosen == chosen for each in results), "ranks agree"
    medians = {name: sorted(each)[len(each) // 2] for name, each in seconds.items()}
    alone = medians.pop(ALONE, None)
    # what is chosen with two in flight is compared with the best plan without
    best = min((name for name in medians if AT_ONCE[2] not in name), key=medians.__getitem__)
    ratio = paired(seconds[chosen], seconds[best])
    return {
        "bed": case.name,
        "chosen": chosen,
        "best": best,
        "over_best": 1.0 if chosen == best else ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "races": results[0].races,
        "plans": len(medians),
        "chosen_ms": 1e3 * medians[chosen],
        "wire_share": None if alone is None else 1 - alone / medians[best],
        "said": results[0].said[-1:],
    }


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims: the time of what was chosen over that of the best plan with one
    micro-batch after another, in the worst case of plans, beside a neighbour, and of two
    micro-batches in flight, where they were chosen and where the wire takes 40 to 60 % of a
    step."""

    def worst(selects: Callable[[dict[str, Any]], bool]) -> float:
        """Return the worst ratio of the selected rows."""
        ratios = [row["over_best"] for row in rows if selects(row)]
        if not ratios:
            raise NotMeasuredError("no such bed was measured")
        return max(ratios)

    def is_beside(row: dict[str, Any]) -> bool:
        """Return whether a neighbour kept a core busy."""
        return "neighbour" in row["bed"]

    def has_two(row: dict[str, Any]) -> bool:
        """Return whether two micro-batches in flight were chosen."""
        return AT_ONCE[2] in row["chosen"]

    def is_half(row: dict[str, Any]) -> bool:
        """Return whether the wire takes 40 to 60 % of a step."""
        return 0.4 <= (row.get("wire_share") or 0.0) <= 0.6

    def is_plan(row: dict[str, Any]) -> bool:
        """Return whether a plan was chosen, quiet."""
        return not is_beside(row) and not has_two(row)

    return [
        claimed("auto.over_best", lambda: worst(is_plan), 1.03),
        claimed("auto.over_best_beside_neighbour", lambda: worst(is_beside), 1.15),
        claimed("auto.two_in_flight_over_in_turn", lambda: worst(has_two), 1.02),
        claimed("auto.in_flight_where_wire_is_half", lambda: worst(is_half), 0.75),
    ]


BENCHMARK = Benchmark(
    name="auto",
    description=(
        "Let plan=auto choose a plan on emulated clusters, and time it against fixed plans."
    ),
    options=AutoOptions,
    cases=cases,
    measure=measure,
    claims=claims,
    notes=notes_of(__doc__),
    columns=(Shown(title="plan auto after 60 steps"),),
)
