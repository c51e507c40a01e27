"""The ranking of `moesaic plan`: the plans with the shortest simulated steps, and what follows from
the best one.

Jobs, layouts and MaxVio are those of `plan_search.py`. `flags` are Megatron or torchtitan flags of
a layout to compare with the best one; None for none. A *skewed* step is one under a MaxVio.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from moesaic.cli.output import WIDEST, folded
from moesaic.cli.plan_search import TOP, SearchOptions
from moesaic.cli.plan_words import (
    about_parameters,
    answer,
    as_others_shard,
    best_speed,
    explained,
    further,
    table_of,
)
from moesaic.errors import InputError, in_one_line
from moesaic.files import require_writable
from moesaic.planner.answer import SkewedStep, Speed, in_words, remedies, under_skew
from moesaic.planner.candidates import name_of
from moesaic.planner.cluster import ClusterSpec, read_cluster
from moesaic.planner.fewer_machines import fewer_machines
from moesaic.planner.hub import HubShape
from moesaic.planner.job import Job
from moesaic.planner.plan_files import FoundFor, write_planned
from moesaic.planner.search import Result, Settings, TooLargeError, search
from moesaic.planner.simulated_plans import PlannedStep
from moesaic.planner.simulator import Simulator
from moesaic.planner.split import SplitCostModel
from moesaic.planner.workload import largest_max_vio
from moesaic.program.compile import compile_plan


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SearchOptions):
    """Options of `moesaic plan`."""

    price_per_hour: float | None = None
    """Price of one device per hour, in any currency, to print what training on a trillion tokens
    costs in it."""
    top: int = TOP
    """Number of plans in the ranking."""
    write: str | None = None
    """Write the best mesh and plan to this file (.toml or .json), for moesaic train --plan."""
    page: str | None = None
    """Write a page to share to this HTML file: results, time per part of a step, Gantt chart,
    memory and roofline."""
    verbose: bool = False
    """Print the parts of the best step, the cost of ep = 1, and where the cluster's numbers come
    from too."""
    json: bool = False
    """Print one JSON document."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise InputError(
                f"--price-per-hour {self.price_per_hour}: must be a finite number above 0"
            )
        if self.write is not None and Path(self.write).suffix not in (".toml", ".json"):
            raise InputError(f"--write {self.write}: choose a name that ends in .toml or .json")

    def settings(self) -> Settings:
        """Return the settings of the search, with the number of plans to keep."""
        return replace(super().settings(), keep=self.top)

    def require_writable(self) -> None:
        """Check that the files can be written.

        Raises:
            InputError: if one cannot.
        """
        require_writable(self.write, "--write")
        require_writable(self.page, "--page", makes_parents=True)


def ranked(options: PlanOptions, job: Job, simulator: Simulator, flags: str | None = None) -> int:
    """Search, and print the ranking; returns the exit code.

    Args:
        flags: Megatron or torchtitan flags of a layout to compare with the best one.
    """
    try:
        job, result = options.searched(job, simulator)
    except TooLargeError as error:
        return _print_without_layout(error, simulator.cluster, options, flags)
    if options.write is not None:
        found_for = _found_for(job, result.best, simulator, options)
        recomputes = job.model.checkpoint_activations
        write_planned(result.best, Path(options.write), found_for, recomputes=recomputes)
    return _print(job, simulator, result, options, flags)


def _found_for(job: Job, best: PlannedStep, simulator: Simulator, options: PlanOptions) -> FoundFor:
    """Return what a plan was found for, as its file says it."""
    cluster = simulator.cluster
    # `split.of` cuts the job's micro-batches as the split does
    return FoundFor(
        model=options.model,
        cluster=options.cluster,
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        layer=best.split.of(job).step_model(cluster, best.grid.dp).layer,
    )


def _print(
    job: Job, simulator: Simulator, result: Result, options: PlanOptions, flags: str | None
) -> int:
    """Print the answer on standard output, and write the page that --page asks for; returns the
    exit code. The caller has written the plan, to the file of --write."""
    cluster = simulator.cluster
    skewed = [] if options.max_vio is None else _under_skew(job, cluster, result, options.max_vio)
    lines = _lines(job, simulator, result, options, flags)

    if options.page is not None:
        # the last line, of `what_was_measured`, names the sources of the cluster's numbers; the
        # page lists them one by one
        _write_page(options, lines[:-1], job, result, simulator)

    if options.json:
        data = as_data(result, cluster, skewed)
        total, active = job.parameters(cluster)
        data["parameters"] = {"total": total, "active": active}
        data["recomputes_blocks"] = job.model.checkpoint_activations
        data["speed"] = asdict(best_speed(job, cluster, result.best))
        data["reasons"] = lines
        print(json.dumps(data, indent=2))
        return 0
    table = table_of(result, cluster, options.model, skewed, loads=options.trace or "")
    Console(width=WIDEST).print(table)
    print(*map(folded, lines), sep="\n")
    if options.write is not None:
        print(in_one_line(f"wrote {options.write}"))
    return 0


def _as_others(
    job: Job, cluster: ClusterSpec, options: PlanOptions, ours: Speed | None, flags: str | None
) -> list[str]:
    """Return lines about the best layout of Megatron, for a Hugging Face model on several devices,
    and about the layout of `flags`; `ours` is the speed of our best plan, None if none fits."""
    lines: list[str] = []
    if cluster.world > 1 and isinstance(job.model, HubShape):
        best = options.best_of("megatron", job, cluster)
        lines += as_others_shard("megatron", job, cluster, best, ours, options.asked)
    if flags is not None:
        lines += explained(job, cluster, ours, flags)
    return lines


def _fewer(job: Job, cluster: ClusterSpec, options: PlanOptions, seconds: float) -> list[str]:
    """Return a line about machines that could be left out of those on which the best step takes
    `seconds`; none if all are needed."""

    def best_of(machines: int) -> PlannedStep:
        """Return the best step on fewer machines."""
        part = cluster.of_devices(machines * cluster.devices_per_node)
        return search(job, part, options.settings()).best

    line = fewer_machines(cluster.nodes, cluster.world, seconds, best_of)
    return [] if line is None else [line]


def _print_without_layout(
    error: TooLargeError, cluster: ClusterSpec, options: PlanOptions, flags: str | None
) -> int:
    """Say what is known if no layout of the search fits the memory: single changes that make one
    fit, the best layout of Megatron, and the layout of `flags`.

    With `flags` their layout was asked for, so the answer is printed and the exit code is 0.

    Raises:
        InputError: if there are no `flags`: then that nothing fits is the run's error. The message
            is one line.
    """

    def on_devices(count: int) -> tuple[Job, ClusterSpec]:
        """Return the job and the cluster with this number of devices, in whole nodes."""
        devices_per_node = read_cluster(options.cluster).devices_per_node
        nodes = -(-count // devices_per_node)  # rounded up
        larger = read_cluster(options.cluster, nodes=nodes)
        return options.job(larger), larger

    changes = in_words(remedies(error.job, cluster, options.settings(), on_devices))
    lines = [f"{error}: {changes}", about_parameters(error.job, cluster)]
    lines += _as_others(error.job, cluster, options, ours=None, flags=flags)
    if flags is None:
        raise InputError("; ".join(map(str.strip, lines)))
    print(*map(folded, lines), sep="\n")
    return 0


def _lines(
    job: Job, simulator: Simulator, result: Result, options: PlanOptions, flags: str | None
) -> list[str]:
    """Return the answer in words; `--verbose`, `--json` and `--page` have further lines, the last
    of which is that of `what_was_measured`."""
    cluster = simulator.cluster
    lines = list(
        answer(
            job,
            cluster,
            result,
            price=options.price_per_hour,
            max_vio=options.max_vio,
            reserve_gib=options.reserve_gib,
            under_counts=options.trace is not None,
        )
    )

    if options.trace is None and options.max_vio is None:
        lines += _fewer(job, cluster, options, result.best.seconds)
    if options.trace is None:  # layouts of other systems are predicted under even routing
        lines += _as_others(job, cluster, options, best_speed(job, cluster, result.best), flags)
    elif flags is not None:
        lines.append("yours, under even routing, which is not compared with the plan above:")
        lines += explained(job, cluster, ours=None, flags=flags)

    if options.verbose or options.json or options.page is not None:
        lines += further(job, simulator, result, has_price=options.price_per_hour is not None)
    return lines


def _write_page(
    options: PlanOptions, lines: list[str], job: Job, result: Result, simulator: Simulator
) -> None:
    """Write the page about the best plan; `lines` is the answer in words."""
    from moesaic.report.plan_page import PlanAnswer, write_plan_page

    best = result.best
    cluster = simulator.cluster
    cost_model = SplitCostModel(job, best.grid, best.split, simulator)
    compiled = compile_plan(best.plan, best.grid)
    forward, backward = simulator.passes(
        compiled.forward, compiled.backward, cost_model.model.layer, compiled.grid
    )
    stages = None  # the passes of the micro-batches through pipeline stages
    if best.split.pp > 1:
        stages = cost_model.timed(forward, backward)
    flight = None  # the forward pass of two micro-batches in flight
    if best.split.in_flight > 1:
        forward_flight, _ = cost_model.flights(compiled, forward, backward)
        flight = forward_flight
    title = f"{options.model} on {cluster.name}, {cluster.world} devices"
    plan_answer = PlanAnswer(
        job=job,
        result=result,
        cluster=cluster,
        speed=best_speed(job, cluster, best),
        lines=lines,
        timelines={"forward": forward.timeline, "backward": backward.timeline},
        stages=stages,
        flight=flight,
        price=options.price_per_hour,
    )
    write_plan_page(title, plan_answer, Path(str(options.page)))


def _under_skew(
    job: Job, cluster: ClusterSpec, result: Result, max_vio: float
) -> list[SkewedStep | None]:
    """Return each plan of the ranking under a MaxVio; None for those that it cannot be predicted
    for.

    Raises:
        InputError: if the layout of the best plan allows no such MaxVio.
    """
    grid = result.best.grid
    most = largest_max_vio(grid.ep, job.step_model(cluster, grid.dp).layer)
    if grid.ep > 1 and max_vio > most:
        raise InputError(
            f"--max-vio {max_vio:g}: the best layout, {name_of(grid)}, allows at most {most:g}, "
            "since a token goes to an expert once: give a smaller one, or another layout with "
            "--ep"
        )
    return [under_skew(job, cluster, planned, max_vio) for planned in result.ranking]


def as_data(
    result: Result, cluster: ClusterSpec, skewed: Sequence[SkewedStep | None] = ()
) -> dict[str, Any]:
    """Return the result of a search as plain data; `skewed` has each plan of the ranking under a
    MaxVio, if one is given."""
    ranking = [_step_as_data(planned) for planned in result.ranking]
    for data, planned, step in zip(ranking, result.ranking, skewed):
        data["under_max_vio"] = None
        if step is not None:
            data["under_max_vio"] = {
                "seconds": step.longer * planned.seconds,
                "memory_bytes": {**asdict(step.memory), "total": step.memory.total},
            }
    return {
        "cluster": cluster.name,
        "ranks": cluster.world,
        "bound_seconds": result.bound_seconds,
        "layouts": result.num_layouts,
        "layouts_left_out": result.num_left_out,
        "plans_simulated": result.num_simulated,
        "ranking": ranking,
        "by_ep": {
            str(ep): {
                "floor_seconds": results.floor_seconds,
                "best_seconds": results.best.seconds if results.best else None,
                "searched": results.is_searched,
            }
            for ep, results in result.by_ep.items()
        },
    }


def _step_as_data(planned: PlannedStep) -> dict[str, Any]:
    """Return a plan of the ranking as plain data."""
    axes = ("dp", "tp", "edp", "ep", "etp", "innermost")
    return {
        "seconds": planned.seconds,
        "over_bound": planned.seconds / planned.bound_seconds,
        "mesh": {name: getattr(planned.grid, name) for name in axes},
        "split": asdict(planned.split),
        "plan": asdict(planned.plan),
        "bottleneck": planned.estimate.bottleneck,
        "parts": planned.estimate.parts,
        "limits": planned.estimate.limits,
        "memory_bytes": {**asdict(planned.memory), "total": planned.memory.total},
    }
