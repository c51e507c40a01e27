"""`moesaic plan`: searches the layout and plan with the shortest simulated step on a cluster. Runs without torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moesaic.cli.arguments import parse
from moesaic.errors import InputError
from moesaic.planner.algorithm1 import choose
from moesaic.planner.answer import (
    SkewedStep,
    Speed,
    again,
    changes,
    in_words,
    longer_by_rank_skew,
    remedies,
    speed_of,
    under_skew,
)
from moesaic.planner.candidates import Pins, SearchSpace, name_of
from moesaic.planner.cluster import ClusterSpec, presets, read_cluster
from moesaic.planner.files import write_planned
from moesaic.planner.hub import HubShape
from moesaic.planner.loads import typical_counts
from moesaic.planner.memory import GIB, usable_bytes
from moesaic.planner.model import Job
from moesaic.planner.others import (
    EMITTERS,
    VERSIONS,
    OthersLayout,
    from_flags,
    layout_of,
    longer_by_narrow_rate,
    predict,
    unread_flags,
)  # fmt: skip
from moesaic.planner.predict import APART
from moesaic.planner.presets import CONFIGS, PRESETS, read_job
from moesaic.planner.profile import read_profile
from moesaic.planner.profile_simulate import profiled_simulator
from moesaic.planner.search import LOSSLESS, LOSSY, EpResults, PlannedStep, Result, Settings, TooLargeError, search
from moesaic.planner.simulate import Simulator
from moesaic.planner.stages import best_in_stages
from moesaic.planner.workload import largest_max_vio, read_counts
from moesaic.program.compile import compile_plan
from moesaic.program.plan import AllToAll, Codec, Crossing, Order, Schedule, plan_in_words
from moesaic.traces.trace import Trace

if TYPE_CHECKING:
    EmitName: TypeAlias = str
else:
    EmitName = Literal[tuple(EMITTERS)]
"""A key of `EMITTERS`; the command line lists them as choices."""
GIVE_UP, REFINED = 1.5, 4
"""`give_up` and `refine` of `Settings`: 64 devices take ten seconds, and searching longer found no better plan."""
TABLES = 4
"""Number of calls of a trace under which plans are ranked."""
DESCRIPTION = """Search the layout and plan with the shortest simulated step for a model on a cluster, within its device memory.
All figures are predictions, from the description of a cluster or from what moesaic profile measured on it."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `moesaic plan`."""

    model: Annotated[str, tyro.conf.arg(help_behavior_hint="(required)")] = ""
    """A preset (demo, gpt-small, mixtral-8x7b, qwen3-30b-a3b, deepseek-v3), a training configuration (TOML, or the
    config.json of a run), or the config.json of a Hugging Face model."""
    cluster: Annotated[str, tyro.conf.arg(help_behavior_hint="(required without --profile)")] = ""
    """A cluster preset, or a .toml file that describes a cluster; docs/planning.md lists both."""
    nodes: int | None = None
    """Number of nodes; None for that of the cluster."""
    gpus: int | None = None
    """Number of devices, instead of --nodes: whole nodes, or a part of one node."""
    profile: str | None = None
    """A file that moesaic profile measured, instead of --cluster."""
    trace: str | None = None
    """Rank the best plans again under recorded routing: a trace (docs/traces.md), or one table of copies with a row per
    data-parallel group and a column per expert (.npy, .csv). Bounds still assume even routing."""
    max_vio: float | None = None
    """Also print the time and memory of each step under this MaxVio over ranks: in every layer the experts of one ep rank get
    1 + MAX_VIO times their share of the copies."""
    batch_size: int | None = None
    """Sequences per micro-batch over all ranks; None for that of the model (one per rank for a Hugging Face model)."""
    accumulation: int | None = None
    """Micro-batches per optimizer step; None for that of the model (about 4 million tokens for a Hugging Face model)."""
    seq_len: int | None = None
    """Tokens per sequence; None for that of the model (4096 for a Hugging Face model)."""
    price_per_hour: float | None = None
    """Price of one device per hour, to print what training on a trillion tokens costs."""
    emit: EmitName | None = None
    """Print only the flags with which this training system runs the best layout (or that of --explain). None prints the
    ranking."""
    explain: str | None = None
    """Megatron or torchtitan flags of a layout of your own, to predict its speed and compare it with the best layout."""
    tp: int | None = None
    """Search only layouts with this tensor parallelism (number of ranks); None tries all that fit inside a node."""
    ep: int | None = None
    """Search only layouts with this expert parallelism (number of ranks); None tries all."""
    etp: int | None = None
    """Search only layouts with this expert tensor parallelism (number of ranks); None tries all."""
    innermost: Literal["etp", "ep"] | None = None
    """Search only layouts in which this axis has consecutive ranks; None tries both."""
    pp: int | None = None
    """Pipeline stages of the Megatron-style layout that is compared with the ranking, which itself has no pipelines. None
    tries all numbers, 1 leaves pipelines out; above 1, --emit prints that layout."""
    schedules: tuple[Schedule, ...] = LOSSLESS.schedules
    """Schedules to try."""
    all_to_alls: tuple[AllToAll, ...] = LOSSLESS.all_to_alls
    """All-to-all algorithms to try."""
    chunks: tuple[int, ...] = LOSSLESS.chunks
    """Numbers of chunks to try."""
    orders: tuple[Order, ...] = LOSSLESS.orders
    """Task orders to try."""
    allow_lossy: bool = False
    """Also try codecs that lose precision (docs/codecs.md)."""
    exhaustive: bool = False
    """Try every combination of choices on the most promising layouts, which takes minutes instead of seconds."""
    reserve_gib: float = 1.0
    """Device memory in GiB set aside for the framework, in addition to allocator fragmentation."""
    top: int = 10
    """Number of plans in the ranking."""
    write: str | None = None
    """Write the best mesh and plan to this file (.toml or .json), for moesaic train --plan."""
    page: str | None = None
    """Write a page to share to this HTML file: results, time per part of a step, Gantt chart, memory and roofline."""
    json: bool = False
    """Print one JSON document."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp", "nodes", "gpus", "top", "batch_size", "accumulation", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise InputError(f"--price-per-hour {self.price_per_hour}: must be a finite number above 0")
        if self.max_vio is not None and not 0 <= self.max_vio < math.inf:
            raise InputError(f"--max-vio {self.max_vio}: must be a finite number of at least 0")
        if self.max_vio is not None and self.trace is not None:
            raise InputError("--trace and --max-vio both say how skewed the routing is: give one of them")
        if self.nodes is not None and self.gpus is not None:
            raise InputError("--nodes and --gpus both say how large the cluster is: give one of them")
        if self.profile is not None and self.gpus is not None:
            raise InputError(f"--gpus {self.gpus}: a profile holds for whole nodes of its machine: give --nodes")
        if not 0 <= self.reserve_gib < math.inf:
            raise InputError(f"--reserve-gib {self.reserve_gib}: must be a finite number of at least 0")
        for name in ("schedules", "all_to_alls", "chunks", "orders"):
            if not getattr(self, name):
                raise InputError(f"--{name.replace('_', '-')} is empty: name at least one, or leave it out")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(PlanOptions, _join_flag(arguments, "--explain"), prog="moesaic plan", description=DESCRIPTION)
    if not options.model:
        raise InputError(
            f"--model is missing: choose one of {', '.join({**PRESETS, **CONFIGS})}, or give a training configuration, or the "
            "config.json of a Hugging Face model"
        )
    if options.write is not None and Path(options.write).suffix not in (".toml", ".json"):
        raise InputError(f"--write {options.write}: choose a name that ends in .toml or .json")
    simulator = _simulator(options)
    cluster = simulator.cluster
    job = _job(options, cluster)
    counts = [] if options.trace is None else _counts(Path(options.trace))
    yours = None if options.explain is None else from_flags(options.explain)
    if yours is not None:  # refuse an impossible layout before the search
        unread_flags(str(options.explain), job)
        predict(job, cluster, yours)
        if options.emit is not None:
            return _emit(options.emit, EMITTERS[options.emit](job, yours, None))
    console = Console(stderr=True)
    try:
        with _progress_bar(console) as progress:
            job, result = _search(job, _settings(options), counts, simulator, progress)
    except TooLargeError as error:
        return _print_without_layout(error, cluster, options, console)
    if options.write is not None:
        write_planned(result.best, Path(options.write), model=options.model, cluster=cluster.name)
    if options.emit is not None:
        best = result.best
        if (options.pp or 1) > 1:
            return _emit(options.emit, _emitted_in_stages(job, cluster, options, best.grid.tp, best.plan.crossing))
        return _emit(options.emit, EMITTERS[options.emit](job, layout_of(job, best), best))
    skewed = [] if options.max_vio is None else _under_skew(job, cluster, result, options.max_vio)
    lines = [
        _about_parameters(job, cluster),
        *reasons(result, cluster),
        *answers(job, cluster, result, options),
        *_by_algorithm1(job, simulator, result.best),
    ]
    lines.append(what_was_measured(cluster))
    if options.page is not None:
        _write_page(options, lines, job, result, simulator)
    if options.json:
        parameters = dict(zip(("total", "active"), job.parameters(cluster)))
        print(json.dumps({**as_data(result, cluster, skewed), "parameters": parameters, "reasons": lines}, indent=2))
        return 0
    console.print(_table(result, cluster, options.model, skewed))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if options.write is not None:
        console.print(f"wrote {options.write}", highlight=False, soft_wrap=True)
    return 0


def _emit(system: EmitName, lines: list[str]) -> int:
    """Print flags, and on standard error the version of the system that accepts them; return the exit code."""
    if system in VERSIONS:
        print(f"flags of {VERSIONS[system]}", file=sys.stderr)
    print("\n".join(lines))
    return 0


def _emitted_in_stages(job: Job, cluster: ClusterSpec, options: PlanOptions, tp: int, crossing: Crossing) -> list[str]:
    """Return the best layout with `options.pp` stages as flags of the system `options.emit`."""
    best = _in_stages(job, cluster, options, tp, crossing)
    if best is None:
        raise InputError(
            f"--pp {options.pp}: no layout of {cluster.world} devices with {options.pp} stages fits: try another number"
        )
    return EMITTERS[str(options.emit)](job, best[0], None)


def _print_without_layout(error: TooLargeError, cluster: ClusterSpec, options: PlanOptions, console: Console) -> int:
    """Print what is known if no layout of the search fits the memory; returns the exit code.

    Prints single changes that make a layout fit, the best Megatron-style layout, and the layout of `--explain`.

    Raises:
        InputError: if there is no layout to explain or to emit. The message is one line.
    """
    job = error.job
    if options.emit is not None and (options.pp or 1) > 1:
        return _emit(options.emit, _emitted_in_stages(job, cluster, options, error.grid.tp, Crossing.LINK))

    def larger(count: int) -> tuple[Job, ClusterSpec]:
        larger_spec = read_cluster(options.cluster, nodes=-(-count // read_cluster(options.cluster).devices_per_node))
        return _job(options, larger_spec), larger_spec

    larger_cluster = None if options.profile is not None else larger
    lines = [f"{error}: {in_words(remedies(job, cluster, _settings(options), larger_cluster))}"]
    lines += [_about_parameters(job, cluster), *_with_stages(job, cluster, options, error.grid.tp, Crossing.LINK, None)]
    if options.explain is None or options.emit is not None:
        raise InputError("; ".join(lines))
    lines += _explained(job, cluster, None, options.explain)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def _write_page(options: PlanOptions, lines: list[str], job: Job, result: Result, simulator: Simulator) -> None:
    from moesaic.report.plan_page import write_plan_page

    best, cluster = result.best, simulator.cluster
    layer = job.step_model(cluster, best.grid.dp).layer
    compiled = compile_plan(best.plan, best.grid)
    timelines = {
        name: simulator.run(program, layer, compiled.grid).timeline
        for name, program in (("forward", compiled.forward), ("backward", compiled.backward))
    }
    title = f"{options.model} on {cluster.name}, {cluster.world} devices"
    write_plan_page(title, lines, job, result, cluster, timelines, Path(str(options.page)))


def _by_algorithm1(job: Job, simulator: Simulator, best: PlannedStep) -> list[str]:
    """Return a line about the schedule that Parm's Algorithm 1 chooses on the best layout; [] if tp and etp are 1."""
    if best.grid.tp == best.grid.etp == 1:
        return []
    layer = job.step_model(simulator.cluster, best.grid.dp).layer
    schedule = choose(simulator, layer, best.grid).schedule
    return [f"Parm's Algorithm 1 chooses {schedule} on the best layout (moesaic train --plan parm)"]


def _join_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """Return the words with `flag` and its value joined by "=": argparse takes no separate value that begins with hyphens."""
    words = list(arguments)
    if flag in words[:-1]:
        at = words.index(flag)
        words[at : at + 2] = [f"{flag}={words[at + 1]}"]
    return words


def _job(options: PlanOptions, cluster: ClusterSpec) -> Job:
    """Return the training job, with the batch size, accumulation and sequence length of the options."""
    job_of_model = read_job(options.model, seq_len=options.seq_len or 4096, world=cluster.world)
    job = job_of_model if options.batch_size is None else replace(job_of_model, batch_size=options.batch_size)
    if options.seq_len is not None and job.model.seq_len != options.seq_len:
        job = replace(job, model=replace(job.model, seq_len=options.seq_len))
    return job if options.accumulation is None else replace(job, accumulation=options.accumulation)


def _search(
    job: Job,
    settings: Settings,
    counts: list[np.ndarray],
    simulator: Simulator,
    progress: Callable[[str, int, int], None],
) -> tuple[Job, Result]:
    """Run the search; returns the job and the result. A Hugging Face model that does not fit is retried with recomputation."""
    try:
        return job, search(job, simulator.cluster, settings, counts=counts, simulator=simulator, progress=progress)
    except InputError:
        if not isinstance(job.model, HubShape):
            raise
    job = replace(job, model=replace(job.model, checkpoint_activations=True))
    return job, search(job, simulator.cluster, settings, counts=counts, simulator=simulator, progress=progress)


def _simulator(options: PlanOptions) -> Simulator:
    if options.profile is not None:
        if options.cluster:
            raise InputError("--profile and --cluster both say what the cluster is: give one of them")
        # A profile is usually that of another machine than the one that plans.
        return profiled_simulator(read_profile(Path(options.profile), any_machine=True), nodes=options.nodes)
    if not options.cluster:
        raise InputError(f"--cluster is missing: choose one of {', '.join(presets())}, give a file, or a --profile")
    cluster = read_cluster(options.cluster, nodes=options.nodes)
    cluster = cluster if options.gpus is None else cluster.of_devices(options.gpus)
    if options.pp is not None and cluster.world % options.pp:
        raise InputError(
            f"--pp {options.pp}: does not divide {cluster.world} devices: choose a divisor, or leave it out"
        )
    return Simulator(cluster)


def _counts(path: Path) -> list[np.ndarray]:
    """Return tables of copies, each (groups, num_experts): the table of a file, or the `TABLES` typical ones of a trace."""
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
        give_up=GIVE_UP,
        refine=REFINED,
        space=space,
        pins=pins,
        keep=options.top,
        exhaustive=options.exhaustive,
        reserve_gib=options.reserve_gib,
    )


@contextmanager
def _progress_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield the `progress` callback of a search, shown as a progress bar."""
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _under_skew(job: Job, cluster: ClusterSpec, result: Result, max_vio: float) -> list[SkewedStep | None]:
    """Return each plan of the ranking under a MaxVio; None for those that it cannot be predicted for.

    Raises:
        InputError: if the layout of the best plan allows no such MaxVio.
    """
    grid = result.best.grid
    most = largest_max_vio(grid.ep, job.step_model(cluster, grid.dp).layer)
    if grid.ep > 1 and max_vio > most:
        raise InputError(
            f"--max-vio {max_vio:g}: the best layout, {name_of(grid)}, allows at most {most:g}, since a token goes to an "
            "expert once: give a smaller one, or another layout with --ep"
        )
    return [under_skew(job, cluster, planned, max_vio) for planned in result.ranking]


def as_data(result: Result, cluster: ClusterSpec, skewed: Sequence[SkewedStep | None] = ()) -> dict[str, Any]:
    """Return the result of a search as plain data; `skewed` has each plan of the ranking under a MaxVio, if one is given."""
    ranking = [_step_as_data(planned) for planned in result.ranking]
    for data, planned, step in zip(ranking, result.ranking, skewed):
        data["under_max_vio"] = (
            None
            if step is None
            else {
                "seconds": step.longer * planned.seconds,
                "memory_bytes": {**asdict(step.memory), "total": step.memory.total},
            }
        )
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
            }
            for ep, results in result.by_ep.items()
        },
        "reasons": reasons(result, cluster),
    }


def _step_as_data(planned: PlannedStep) -> dict[str, Any]:
    grid = planned.grid
    return {
        "seconds": planned.seconds,
        "over_bound": planned.seconds / planned.bound_seconds,
        "mesh": {
            "dp": grid.dp,
            "tp": grid.tp,
            "edp": grid.edp,
            "ep": grid.ep,
            "etp": grid.etp,
            "innermost": grid.innermost,
        },
        "plan": asdict(planned.plan),
        "bottleneck": planned.estimate.bottleneck,
        "parts": planned.estimate.parts,
        "limits": planned.estimate.limits,
        "memory_bytes": {**asdict(planned.memory), "total": planned.memory.total},
    }


def _table(result: Result, cluster: ClusterSpec, model: str, skewed: Sequence[SkewedStep | None] = ()) -> Table:
    table = Table(
        title=f"{model} on {cluster.name}, {cluster.nodes} nodes of {cluster.devices_per_node}: simulated steps"
    )
    for name in ("", "ms", "over bound", "layout", "plan", "limited by", "GiB"):
        table.add_column(name, justify="right" if name in ("", "ms", "over bound", "GiB") else "left")
    for name in ("ms under skew", "GiB under skew") if skewed else ():
        table.add_column(name, justify="right")
    for number, planned in enumerate(result.ranking, start=1):
        step = skewed[number - 1] if skewed else None
        under_max_vio = (
            ["-", "-"]
            if step is None
            else [f"{step.longer * planned.seconds * 1e3:,.2f}", f"{step.memory.total / GIB:.1f}"]
        )
        table.add_row(
            str(number), f"{planned.seconds * 1e3:,.2f}", f"{planned.seconds / planned.bound_seconds:.2f}",
            name_of(planned.grid), plan_in_words(planned.plan), _limit(planned), f"{planned.memory.total / GIB:.1f}",
            *(under_max_vio if skewed else []),
        )  # fmt: skip
    return table


def _limit(planned: PlannedStep) -> str:
    limits, name = planned.estimate.limits, planned.estimate.bottleneck
    return f"{name} ({limits[name] / planned.seconds:.0%})"


def reasons(result: Result, cluster: ClusterSpec) -> list[str]:
    """Return lines that say what limits the best plan, how far it is from the bounds, and what ep = 1 would cost."""
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


def _about_parameters(job: Job, cluster: ClusterSpec) -> str:
    total, active = (
        f"{number / 1e9:,.1f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"
        for number in job.parameters(cluster)
    )
    return f"model: {total} total, {active} active parameters"


def what_was_measured(cluster: ClusterSpec) -> str:
    """Return a line that says which numbers of a cluster were measured, and where the others come from."""
    source = cluster.source or "its description does not say where its numbers come from (source = ...)"
    if not cluster.measured:
        return f"measured of {cluster.name}: nothing by us; {source}"
    return f"measured of {cluster.name}: {'; '.join(cluster.measured)}; the rest: {source}"


def _about_whole_experts(best: PlannedStep, by_ep: dict[int, EpResults]) -> list[str]:
    """Return a line about ep = 1, under which every rank has all experts."""
    if 1 not in by_ep or by_ep[1].is_too_large:
        return ["ep = 1, every rank with all experts, needs more memory than a device has, or was not searched"]
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
        f"{whole.estimate.bottleneck}); it wins if blocks have enough tokens to hide the gathering of experts"
    ]


def answers(job: Job, cluster: ClusterSpec, result: Result, options: PlanOptions) -> list[str]:
    """Return lines that answer common questions.

    They tell the speed and its uncertainty, what to change first, what skew and a trillion tokens cost, and how other
    layouts compare.
    """
    best, sequences = result.best, job.batch_size * job.accumulation
    longer = longer_by_rank_skew(job, cluster, best)
    speed = speed_of(job, best, cluster, devices=cluster.world, sequences=sequences, longer=longer or (1.0, 1.0))
    lines = [f"speed: {_speed_in_words(speed, best.seconds, sequences * job.model.seq_len)}"]
    lines += ["activations are recomputed: otherwise no layout fits the memory"] * (
        job.model.checkpoint_activations and isinstance(job.model, HubShape)
    )
    changed = changes(job, cluster, result, reserve_gib=options.reserve_gib)
    gains, losses = (
        [
            f"{change.what}: {change.speedup:.2f} times the speed"
            for change in changed
            if (change.speedup > 1) == is_gain
        ]
        for is_gain in (True, False)
    )
    lines.append(
        f"change first: {'; '.join(gains[:5]) or 'no change that was tried helps by more than half a percent'}"
    )
    lines += [f"slower: {'; '.join(losses[:3])}"] * bool(losses)
    lines += _about_skew(job, cluster, best, options.max_vio)
    if longer is not None:
        lines.append(
            f"ranks of different speed make steps {longer[0]:.2f} to {longer[1]:.2f} times as long (middle half of the steps)"
        )
    hourly = options.price_per_hour
    lines.append(
        f"price: unknown without --price-per-hour; at 2.5 per device and hour a trillion tokens cost {speed.price(2.5):,.0f}"
        if hourly is None
        else f"price: {speed.price(hourly):,.0f} for a trillion tokens at {hourly:g} an hour"
    )
    if options.trace is not None:  # Megatron-style layouts and those of --explain are predicted under even routing
        even = replace(best, estimate=replace(best.estimate, seconds=again(job, cluster, best)[0]))
        speed = speed_of(job, even, cluster, devices=cluster.world, sequences=sequences)
        lines.append(
            f"under even routing, which the lines below assume: {speed.tokens_per_second:,.0f} tokens/s and device"
        )
    lines += _with_stages(job, cluster, options, best.grid.tp, best.plan.crossing, speed)
    if options.explain is not None:
        lines += _explained(job, cluster, speed, options.explain)
    return lines


def _about_skew(job: Job, cluster: ClusterSpec, best: PlannedStep, max_vio: float | None) -> list[str]:
    """Return a line about the cost of skew, by default of a MaxVio of 1; [] if none is given and none is possible."""
    if best.grid.ep == 1:
        return [] if max_vio is None else [f"a MaxVio of {max_vio:g}: costs nothing, since every rank has all experts"]
    most = largest_max_vio(best.grid.ep, job.step_model(cluster, best.grid.dp).layer)
    asked = min(1.0, most) if max_vio is None else max_vio
    step = under_skew(job, cluster, best, asked)
    if step is None:
        return [f"a MaxVio of {asked:g}: not predicted, since more than {APART} ranks share a copy of the experts"]
    lacks = f", which a device of {cluster.device.memory_gib:g} does not have"
    return [
        f"a MaxVio of {asked:g} (one rank's experts get {1 + asked:g} times their share in every layer) makes a step "
        f"{step.longer:.2f} times as long and takes {step.memory.total / GIB:.1f} GiB instead of "
        f"{best.memory.total / GIB:.1f}" + lacks * (step.memory.total > usable_bytes(cluster, 0))
    ]


def _in_stages(
    job: Job, cluster: ClusterSpec, options: PlanOptions, tp: int, crossing: Crossing
) -> tuple[OthersLayout, PlannedStep] | None:
    return best_in_stages(job, cluster, tp=tp, crossing=crossing, stages=options.pp, reserve_gib=options.reserve_gib)


def _with_stages(
    job: Job, cluster: ClusterSpec, options: PlanOptions, tp: int, crossing: Crossing, ours: Speed | None
) -> list[str]:
    """Return a line with the predicted speed of the best Megatron-style layout, with or without a pipeline.

    Such a layout keeps whole parameters on every rank and shards only the optimizer. Returns [] for one device, for a model
    that is not a Hugging Face model, and for a profile.
    """
    if cluster.world == 1 or not isinstance(job.model, HubShape) or options.profile is not None:
        return []
    best = _in_stages(job, cluster, options, tp, crossing)
    if best is None:
        return [
            "as Megatron shards (parameters whole, the optimizer in parts): no layout fits, with a pipeline or without"
        ]
    layout, step = best
    speed = speed_of(job, step, cluster, devices=cluster.world, sequences=layout.sequences(cluster.world))
    sizes = [f"{name} {getattr(layout, name)}" for name in ("pp", "cp", "tp", "ep") if getattr(layout, name) > 1]
    choices = (
        sizes + [layout.schedule] * (layout.pp > 1) + [f"{layout.virtual_pp} runs a rank"] * (layout.virtual_pp > 1)
    )
    choices += ["blocks recomputed"] * bool(layout.recompute)
    choices = choices or ["every size 1"]
    emit = f" (--pp {layout.pp} --emit megatron prints it)" * (layout.pp > 1)
    times = "" if ours is None else f", {speed.tokens_per_second / ours.tokens_per_second:.2f} times the speed above"
    return [
        f"as Megatron shards (parameters whole, the optimizer in parts): {', '.join(choices)}: "
        f"{speed.tokens_per_second:,.0f} tokens/s and device, {step.memory.total / GIB:.1f} GiB{times}{emit}"
    ]


def _explained(job: Job, cluster: ClusterSpec, ours: Speed | None, flags: str) -> list[str]:
    """Return lines with the predicted speed of the layout that `flags` describe.

    Args:
        job: the training job.
        cluster: the cluster.
        ours: speed of the best layout of the search, to compare with; None if none fits.
        flags: the flags of --explain.
    """
    layout = from_flags(flags)
    step = predict(job, cluster, layout)
    sequences = layout.sequences(cluster.world)
    longer = longer_by_narrow_rate(job, cluster, layout)
    speed = speed_of(job, step, cluster, devices=cluster.world, sequences=sequences, longer=longer)
    fits = step.memory.total <= usable_bytes(cluster, 0)
    lines = [
        f"yours: {_speed_in_words(speed, step.seconds, sequences * job.model.seq_len)}; limited by {_limit(step)}; "
        f"{step.memory.total / GIB:.1f} GiB"
        + (f", which a device of {cluster.device.memory_gib:g} does not have" if not fits else ""),
        f"your parts: {', '.join(f'{part} {seconds * 1e3:,.1f} ms' for part, seconds in step.estimate.parts.items())}; "
        f"memory: {', '.join(f'{part} {num_bytes / GIB:.1f}' for part, num_bytes in asdict(step.memory).items())}",
    ]
    unread = unread_flags(flags, job)
    lines += [f"flags of yours that may matter but are not read: {', '.join(unread)}"] * bool(unread)
    if not layout.global_batch:
        lines.append(
            f"your flags give no global batch, so a step of yours is taken to have the fewest sequences, {sequences}: add one"
        )
    if ours is None:
        return lines
    gain = ours.tokens_per_second / speed.tokens_per_second
    return [
        *lines,
        f"the layout above reaches {gain:.2f} times as much"
        if gain > 1
        else f"the layout above reaches only {gain:.2f} of it",
    ]


def _speed_in_words(speed: Speed, seconds: float, tokens: int) -> str:
    low, high = speed.interval
    return (
        f"{speed.tokens_per_second:,.0f} tokens/s and device ({low:,.0f} to {high:,.0f} by published steps), a step of "
        f"{tokens:,} tokens in {seconds:,.2f} s, MFU {speed.utilization:.0%}"
    )
