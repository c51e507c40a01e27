"""`moesaic plan`: the layout and the plan with the shortest simulated step on a cluster, and why. No torch needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.cluster_file import presets, read_cluster
from moesaic.cost.memory import GIB
from moesaic.cost.profile import read_profile
from moesaic.cost.profile_simulate import profiled_simulator
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import read_counts
from moesaic.errors import InputError
from moesaic.plan.candidates import SearchSpace
from moesaic.plan.files import write_planned
from moesaic.plan.findings import LOSSLESS, LOSSY, Found, OfEp, Result, Settings
from moesaic.plan.layouts import Pins, name_of
from moesaic.plan.loads import typical_counts
from moesaic.plan.model import PRESETS, read_job, with_batch
from moesaic.plan.plan import AllToAll, Codec, Order, Schedule, plan_in_words
from moesaic.plan.search import search
from moesaic.traces.trace import Trace

TABLES = 4
"""Calls of a trace that plans are ranked under."""
DESCRIPTION = """Search layouts and plans for a model on a cluster by simulated time, under the memory of its devices.
Figures are predictions, from a cluster's description or from what moesaic profile measured on it."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan."""

    model: str = ""
    """A preset (demo, gpt-tiny, gpt-small), or a training configuration: TOML, or a run's config.json."""
    cluster: str = ""
    """A preset, or a file that ends in .toml; docs/planning.md describes both."""
    nodes: int | None = None
    """Use so many nodes; None takes the cluster's number."""
    profile: str | None = None
    """What moesaic profile measured, in place of a cluster."""
    trace: str | None = None
    """Rank the best plans anew under recorded counts: a routing trace (docs/traces.md), or one table of copies per
    data-parallel group and expert (.npy, .csv). Bounds stay those of even routing."""
    batch_size: int | None = None
    """Sequences per micro-batch over all ranks, in place of the model's."""
    tp: int | None = None
    """Keep tensor parallelism at this."""
    ep: int | None = None
    """Keep expert parallelism at this."""
    etp: int | None = None
    """Keep expert tensor parallelism at this."""
    innermost: Literal["etp", "ep"] | None = None
    """Keep the order of etp and ep."""
    pp: int = 1
    """Pipeline stages: the runtime has none yet, so 1."""
    schedules: tuple[Schedule, ...] = LOSSLESS.schedules
    """Schedules to try."""
    all_to_alls: tuple[AllToAll, ...] = LOSSLESS.all_to_alls
    """All-to-alls to try."""
    chunks: tuple[int, ...] = LOSSLESS.chunks
    """Numbers of chunks to try."""
    orders: tuple[Order, ...] = LOSSLESS.orders
    """Orders of tasks to try."""
    allow_lossy: bool = False
    """Also try codecs that lose precision (docs/codecs.md)."""
    exhaustive: bool = False
    """On the most promising layouts try every combination: minutes in place of seconds."""
    reserve_gib: float = 1.0
    """Memory of a device that the framework and fragmentation take."""
    top: int = 10
    """Lines of the ranking."""
    write: str | None = None
    """Write the best mesh and plan to this file (.toml or .json), for moesaic train."""
    json: bool = False
    """Print one JSON document."""

    def __post_init__(self) -> None:
        if self.pp != 1:
            raise InputError(f"--pp {self.pp}: pipeline stages are not there yet: leave it at 1")
        for name in ("tp", "ep", "etp", "nodes", "top", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        for name in ("schedules", "all_to_alls", "chunks", "orders"):
            if not getattr(self, name):
                raise InputError(f"--{name.replace('_', '-')} is empty: name at least one, or leave it out")


def run(arguments: Sequence[str]) -> int:
    """Plan; returns the exit code."""
    options = parse(PlanOptions, arguments, prog="moesaic plan", description=DESCRIPTION)
    if not options.model:
        raise InputError(f"--model is missing: choose one of {', '.join(PRESETS)}, or give a training configuration")
    job = with_batch(read_job(options.model), options.batch_size)
    if options.write is not None and Path(options.write).suffix not in (".toml", ".json"):
        raise InputError(f"--write {options.write}: choose a name that ends in .toml or .json")
    simulator = _simulator(options)
    cluster = simulator.cluster
    counts = [] if options.trace is None else _counts(Path(options.trace))
    console = Console(stderr=True)
    with _shown(console) as progress:
        result = search(job, cluster, _settings(options), counts=counts, simulator=simulator, progress=progress)
    if options.write is not None:
        write_planned(result.best, Path(options.write), model=options.model, cluster=cluster.name)
    if options.json:
        print(json.dumps(as_data(result, cluster), indent=2))
        return 0
    console.print(_table(result, cluster, options.model))
    for line in reasons(result, cluster):
        console.print(line, highlight=False, soft_wrap=True)
    if options.write is not None:
        console.print(f"wrote {options.write}", highlight=False, soft_wrap=True)
    return 0


def _simulator(options: PlanOptions) -> Simulator:
    if options.profile is not None:
        if options.cluster:
            raise InputError("--profile and --cluster both say what the cluster is: give one of them")
        # Planning for another machine than this one is what a profile is for.
        return profiled_simulator(read_profile(Path(options.profile), any_machine=True), nodes=options.nodes)
    if not options.cluster:
        raise InputError(f"--cluster is missing: choose one of {', '.join(presets())}, give a file, or a --profile")
    return Simulator(read_cluster(options.cluster, nodes=options.nodes))


def _counts(path: Path) -> list[np.ndarray]:
    """Return tables of copies, (groups, num_experts): a file's own, or of a trace four that stand for its imbalance."""
    if path.suffix in (".npy", ".csv"):
        return [read_counts(path)]
    return typical_counts(Trace.open(path), TABLES)


def _settings(options: PlanOptions) -> Settings:
    codecs: tuple[Codec, ...] = LOSSY if options.allow_lossy else ("none",)
    space: SearchSpace = replace(
        LOSSLESS,
        schedules=options.schedules,
        all_to_alls=options.all_to_alls,
        chunks=options.chunks,
        orders=options.orders,
        codecs=codecs,
        backward_codecs=codecs,
    )
    pins = Pins(tp=options.tp, ep=options.ep, etp=options.etp, innermost=options.innermost)
    return Settings(
        space=space, pins=pins, keep=options.top, exhaustive=options.exhaustive, reserve_gib=options.reserve_gib
    )


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield what a search tells how far it is."""
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def as_data(result: Result, cluster: ClusterSpec) -> dict[str, Any]:
    """Return a result as plain data."""
    return {
        "cluster": cluster.name,
        "ranks": cluster.world,
        "bound_seconds": result.bound_seconds,
        "layouts": result.num_layouts,
        "layouts_left_out": result.num_left_out,
        "plans_simulated": result.num_simulated,
        "ranking": [_found_as_data(found) for found in result.ranking],
        "by_ep": {
            str(ep): {"floor_seconds": of.floor_seconds, "best_seconds": of.best.seconds if of.best else None}
            for ep, of in result.by_ep.items()
        },
        "reasons": reasons(result, cluster),
    }


def _found_as_data(found: Found) -> dict[str, Any]:
    grid = found.grid
    return {
        "seconds": found.seconds,
        "over_bound": found.seconds / found.bound_seconds,
        "mesh": {
            "dp": grid.dp,
            "tp": grid.tp,
            "edp": grid.edp,
            "ep": grid.ep,
            "etp": grid.etp,
            "innermost": grid.innermost,
        },
        "plan": asdict(found.plan),
        "bottleneck": found.estimate.bottleneck,
        "parts": found.estimate.parts,
        "limits": found.estimate.limits,
        "memory_bytes": {**asdict(found.memory), "total": found.memory.total},
    }


def _table(result: Result, cluster: ClusterSpec, model: str) -> Table:
    table = Table(
        title=f"{model} on {cluster.name}, {cluster.nodes} nodes of {cluster.devices_per_node}: simulated steps"
    )
    for name in ("", "ms", "over bound", "layout", "plan", "limited by", "GiB"):
        table.add_column(name, justify="right" if name in ("", "ms", "over bound", "GiB") else "left")
    for number, found in enumerate(result.ranking, start=1):
        table.add_row(
            str(number), f"{found.seconds * 1e3:,.2f}", f"{found.seconds / found.bound_seconds:.2f}", name_of(found.grid),
            plan_in_words(found.plan), _limit(found), f"{found.memory.total / GIB:.1f}",
        )  # fmt: skip
    return table


def _limit(found: Found) -> str:
    limits, name = found.estimate.limits, found.estimate.bottleneck
    return f"{name} ({limits[name] / found.seconds:.0%})"


def reasons(result: Result, cluster: ClusterSpec) -> list[str]:
    """Return in sentences what limits the best plan, how far it is from the bounds, what ep = 1 would cost."""
    best, memory = result.best, result.best.memory
    name = best.estimate.bottleneck
    parts = ", ".join(f"{part} {seconds * 1e3:,.1f} ms" for part, seconds in best.estimate.parts.items())
    lines = [
        f"best: {name_of(best.grid)} (dp {best.grid.dp}, edp {best.grid.edp}), {plan_in_words(best.plan)}: {parts}",
        f"limited by {name}, busy {best.estimate.limits[name] / best.seconds:.0%} of the step; "
        f"{best.seconds / best.bound_seconds:.2f} times the bound of this layout, "
        f"{best.seconds / result.bound_seconds:.2f} times that of any",
        f"memory: {memory.total / GIB:.1f} of {cluster.device.memory_gib:g} GiB: "
        + ", ".join(f"{part} {num_bytes / GIB:.1f}" for part, num_bytes in asdict(memory).items()),
    ]
    return [*lines, *_about_whole_experts(best, result.by_ep)]


def _about_whole_experts(best: Found, by_ep: dict[int, OfEp]) -> list[str]:
    """Return a sentence on ep = 1, where the search tried it."""
    if 1 not in by_ep or by_ep[1].is_too_large:
        return ["ep = 1, every rank with all experts, needs more memory than a device has, or does not fit the search"]
    whole = by_ep[1].best
    if best.grid.ep == 1:
        other = min(
            (of.best for ep, of in by_ep.items() if ep > 1 and of.best), key=lambda each: each.seconds, default=None
        )
        saved = f", {other.seconds / best.seconds:.2f} times faster than {name_of(other.grid)}" if other else ""
        return [f"ep = 1 wins{saved}: gathering experts' parameters costs less than sending tokens"]
    if whole is None:
        return [f"ep = 1 would take at least {by_ep[1].floor_seconds * 1e3:,.1f} ms"]
    return [
        f"ep = 1 would take {whole.seconds / best.seconds:.2f} times as long ({name_of(whole.grid)}, limited by "
        f"{whole.estimate.bottleneck}); it wins where a block has so many tokens that gathering its experts hides behind them"
    ]
