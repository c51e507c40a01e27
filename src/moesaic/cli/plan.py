"""`moesaic plan`: searches the layout and plan with the shortest simulated step on a cluster. Runs
without torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from moesaic.cli.arguments import parse
from moesaic.cli.output import WIDEST, folded
from moesaic.cli.plan_finetune import print_finetune
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
from moesaic.planner.candidates import Pins, SearchSpace, name_of
from moesaic.planner.cluster import ClusterSpec, presets, read_cluster
from moesaic.planner.emit import SYSTEMS, from_flags, layout_of, unread_flags
from moesaic.planner.fewer_machines import fewer_machines
from moesaic.planner.finetune import Method
from moesaic.planner.hub import HubShape
from moesaic.planner.job import Job
from moesaic.planner.loads import typical_counts
from moesaic.planner.other_systems import OthersLayout, best_layout, predict
from moesaic.planner.plan_files import FoundFor, write_planned
from moesaic.planner.presets import CONFIGS, read_job
from moesaic.planner.search import (
    GIVE_UP,
    LOSSLESS,
    LOSSY,
    REFINED,
    PlannedStep,
    Result,
    Settings,
    TooLargeError,
    search,
)
from moesaic.planner.simulator import Simulator
from moesaic.planner.split import SplitCostModel
from moesaic.planner.workload import largest_max_vio, read_counts
from moesaic.policies import REPLICATION
from moesaic.program.compile import compile_plan
from moesaic.program.plan import AllToAll, Codec, Order, Schedule
from moesaic.traces.trace import Trace

if TYPE_CHECKING:
    EmitName: TypeAlias = str
else:
    EmitName = Literal[tuple(SYSTEMS)]
"""A key of `SYSTEMS`; the command line lists them as choices."""
FINISHED = 2
"""`finished_eps` of `Settings`: the sizes of ep that the line "slower" gives."""
FOR_FINETUNE = (
    "model",
    "cluster",
    "nodes",
    "gpus",
    "batch_size",
    "accumulation",
    "seq_len",
    "finetune",
    "adapter_rank",
    "json",
)
"""Options that have a meaning with `--finetune`."""
MOST_STAGES = 16
"""`most_stages` of `Settings`."""
TABLES = 4
"""Number of calls of a trace under which plans are ranked."""
DESCRIPTION = f"""Search the layout and plan with the shortest simulated step for a model on a
cluster, within its memory. All figures are predictions, from the description of a cluster or from
what moesaic profile measured on it. Policies for uneven routing are not searched: choose
replication ({", ".join(REPLICATION)}), placement and memory
budgets for moesaic train."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `moesaic plan`."""

    model: Annotated[str, tyro.conf.arg(help_behavior_hint="(required)")] = ""
    """A preset (demo, gpt-small, mixtral-8x7b, qwen3-30b-a3b, deepseek-v3), a training
    configuration (TOML, or the config.json of a run), or the config.json of a Hugging Face
    model."""
    cluster: Annotated[str, tyro.conf.arg(help_behavior_hint="(required)")] = ""
    """A cluster preset, or a .toml file that describes a cluster, such as one that moesaic profile
    wrote; docs/planning.md lists both."""
    nodes: int | None = None
    """Number of nodes; None for that of the cluster."""
    gpus: int | None = None
    """Number of devices, instead of --nodes: whole nodes, or a part of one node."""
    trace: str | None = None
    """Rank the best plans again under recorded routing: a trace (docs/traces.md), or one table of
    copies with a row per data-parallel group and a column per expert (.npy, .csv). They must fit
    the memory under it. Bounds assume even routing."""
    max_vio: float | None = None
    """Also print the time and memory of each step under this MaxVio over ranks: in every layer the
    experts of one ep rank get 1 + MAX_VIO times their share of the copies. Plans that do not fit
    the memory under it are left out."""
    batch_size: int | None = None
    """Sequences per micro-batch over all ranks; None for that of the model (one per rank for a
    Hugging Face model)."""
    accumulation: int | None = None
    """Micro-batches per optimizer step; None for that of the model (about 4 million tokens for a
    Hugging Face model)."""
    seq_len: int | None = None
    """Tokens per sequence; None for that of the model (4096 for a Hugging Face model)."""
    finetune: Method | None = None
    """Predict a fine-tune of adapters on a frozen Hugging Face model, with experts in NF4 (qlora;
    qlora-double: with scales in eight bits) or in 16 bits (lora): what fits, how fast it is if
    ranks share experts or layers, and what would help. Accumulation is 4 unless given."""
    adapter_rank: int = 16
    """With --finetune: rank of the adapters, by default that of `moesaic finetune`."""
    price_per_hour: float | None = None
    """Price of one device per hour, in any currency, to print what training on a trillion tokens
    costs in it."""
    emit: EmitName | None = None
    """Print only the flags with which this training system runs the best layout (or that of
    --explain). None prints the ranking."""
    explain: str | None = None
    """Megatron or torchtitan flags of a layout of your own, to predict its speed and compare it
    with the best layout."""
    tp: int | None = None
    """Search only layouts with this tensor parallelism (number of ranks); None tries all that fit
    inside a node."""
    ep: int | None = None
    """Search only layouts with this expert parallelism (number of ranks); None tries all."""
    etp: int | None = None
    """Search only layouts with this expert tensor parallelism (number of ranks); None tries all."""
    innermost: Literal["etp", "ep"] | None = None
    """Search only layouts in which this axis has consecutive ranks; None tries both."""
    pp: int | None = None
    """Search only layouts with this number of pipeline stages, of ours and of the other system that
    is compared with them; None tries powers of two up to 16. With a number, --emit prints the
    other system's own best layout."""
    schedules: tuple[Schedule, ...] = LOSSLESS.schedules
    """Schedules to try."""
    all_to_alls: tuple[AllToAll, ...] = LOSSLESS.all_to_alls
    """All-to-all algorithms to try."""
    chunks: tuple[int, ...] = LOSSLESS.chunks
    """Numbers of chunks to try."""
    orders: tuple[Order, ...] = LOSSLESS.orders
    """Task orders to try."""
    allow_lossy: bool = False
    """Also try codecs that lose precision (docs/codecs.md), and for other systems float8
    products."""
    exhaustive: bool = False
    """Try every combination of choices on the most promising layouts, which takes minutes instead
    of seconds."""
    reserve_gib: float = 1.0
    """Device memory in GiB set aside for the framework, in addition to allocator fragmentation."""
    top: int = 5
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
        for name in (
            "tp",
            "pp",
            "ep",
            "etp",
            "nodes",
            "gpus",
            "top",
            "batch_size",
            "accumulation",
            "seq_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if self.price_per_hour is not None and not 0 < self.price_per_hour < math.inf:
            raise InputError(
                f"--price-per-hour {self.price_per_hour}: must be a finite number above 0"
            )
        if self.max_vio is not None and not 0 <= self.max_vio < math.inf:
            raise InputError(f"--max-vio {self.max_vio}: must be a finite number of at least 0")
        if self.max_vio is not None and self.trace is not None:
            raise InputError(
                "--trace and --max-vio both say how skewed the routing is: give one of them"
            )
        if self.nodes is not None and self.gpus is not None:
            raise InputError(
                "--nodes and --gpus both say how large the cluster is: give one of them"
            )
        if not 0 <= self.reserve_gib < math.inf:
            raise InputError(
                f"--reserve-gib {self.reserve_gib}: must be a finite number of at least 0"
            )
        for name in ("schedules", "all_to_alls", "chunks", "orders"):
            if not getattr(self, name):
                raise InputError(
                    f"--{name.replace('_', '-')} is empty: name at least one, or leave it out"
                )


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(
        PlanOptions,
        _join_flag(arguments, "--explain"),
        prog="moesaic plan",
        description=DESCRIPTION,
    )
    if not options.model:
        names = ", ".join(CONFIGS)
        raise InputError(
            f"--model is missing: name one ({names}), a training configuration, or a model's "
            "config.json"
        )
    if options.write is not None and Path(options.write).suffix not in (".toml", ".json"):
        raise InputError(f"--write {options.write}: choose a name that ends in .toml or .json")
    require_writable(options.write, "--write")
    require_writable(options.page, "--page", makes_parents=True)
    simulator = _simulator(options)
    if options.finetune is not None:
        return _finetune(options, options.finetune, simulator.cluster)
    job = _job(options, simulator.cluster)
    counts = [] if options.trace is None else _counts(Path(options.trace))
    if options.explain is not None:  # refuse an impossible layout before the search
        layout = from_flags(options.explain)
        unread_flags(options.explain, job)
        predict(job, simulator.cluster, layout)
        if options.emit is not None:
            return _emit(options.emit, job, layout)
    if options.emit not in (None, "moesaic") and options.pp is not None:
        best = _best_of(options.emit, job, simulator.cluster, options)
        if best is None:
            raise InputError(
                f"--pp {options.pp}: no layout of {simulator.cluster.world} devices with "
                f"{options.pp} stages fits: try another number"
            )
        return _emit(options.emit, job, best[0])
    try:
        with _progress_bar(Console(stderr=True)) as progress:
            job, result = _search(job, _settings(options), counts, simulator, progress)
    except TooLargeError as error:
        return _print_without_layout(error, simulator.cluster, options)
    if options.write is not None:
        write_planned(
            result.best, Path(options.write), _found_for(job, result.best, simulator, options)
        )
    if options.emit is not None:
        return _emit(options.emit, job, layout_of(job, result.best), result.best)
    return _print(job, simulator, result, options)


def _found_for(job: Job, best: PlannedStep, simulator: Simulator, options: PlanOptions) -> FoundFor:
    """Return what a plan was found for, as its file says it."""
    cluster = simulator.cluster
    return FoundFor(
        model=options.model,
        cluster=options.cluster,
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        layer=best.split.of(job).step_model(cluster, best.grid.dp).layer,
    )


def _finetune(options: PlanOptions, method: Method, cluster: ClusterSpec) -> int:
    """Print the prediction of a fine-tune; returns the exit code."""
    for each in fields(options):
        if each.name not in FOR_FINETUNE and getattr(options, each.name) != each.default:
            raise InputError(
                f"--{each.name.replace('_', '-')} has no meaning with --finetune: leave it out"
            )
    return print_finetune(
        _job(options, cluster),
        cluster,
        options.model,
        method=method,
        rank=options.adapter_rank,
        accumulation=options.accumulation or 4,
        as_json=options.json,
    )


def _print(job: Job, simulator: Simulator, result: Result, options: PlanOptions) -> int:
    """Print the answer on standard output; returns the exit code."""
    cluster = simulator.cluster
    skewed = [] if options.max_vio is None else _under_skew(job, cluster, result, options.max_vio)
    lines = _lines(job, simulator, result, options)
    if options.page is not None:
        # the page has the last line's sources one by one
        _write_page(options, lines[:-1], job, result, simulator)
    if options.json:
        described = as_data(result, cluster, skewed)
        described["parameters"] = dict(zip(("total", "active"), job.parameters(cluster)))
        described["speed"] = asdict(best_speed(job, cluster, result.best))
        described["reasons"] = lines
        print(json.dumps(described, indent=2))
        return 0
    Console(width=WIDEST).print(table_of(result, cluster, options.model, skewed))
    print(*map(folded, lines), sep="\n")
    if options.write is not None:
        print(in_one_line(f"wrote {options.write}"))
    return 0


def _emit(
    system: EmitName, job: Job, layout: OthersLayout, planned: PlannedStep | None = None
) -> int:
    """Print flags, and on standard error the version of the system that accepts them; return the
    exit code."""
    lines = SYSTEMS[system].flags(system, job, layout, planned)
    if SYSTEMS[system].version:
        print(f"flags of {SYSTEMS[system].version}", file=sys.stderr)
    print("\n".join(lines))
    return 0


def _best_of(
    system: str, job: Job, cluster: ClusterSpec, options: PlanOptions
) -> tuple[OthersLayout, PlannedStep] | None:
    """Return the best layout that another system can run, and its step; None if none fits."""
    offers = SYSTEMS[system].offers
    if not options.allow_lossy:
        # the first one is lossless
        offers = replace(offers, precisions=offers.precisions[:1])
    return best_layout(job, cluster, offers, stages=options.pp, reserve_gib=options.reserve_gib)


def _as_others(
    job: Job, cluster: ClusterSpec, options: PlanOptions, ours: Speed | None
) -> list[str]:
    """Return lines about the best layout of Megatron, for a Hugging Face model on several devices,
    and about `--explain`."""
    lines: list[str] = []
    if cluster.world > 1 and isinstance(job.model, HubShape):
        lines += as_others_shard(
            "megatron", job, cluster, _best_of("megatron", job, cluster, options), ours
        )
    return (
        lines
        if options.explain is None
        else [*lines, *explained(job, cluster, ours, options.explain)]
    )


def _fewer(job: Job, cluster: ClusterSpec, options: PlanOptions, seconds: float) -> list[str]:
    """Return a line about machines that could be left out; none if all are needed."""

    def best_of(machines: int) -> PlannedStep:
        """Return the best step on fewer machines."""
        part = cluster.of_devices(machines * cluster.devices_per_node)
        return search(job, part, _settings(options)).best

    line = fewer_machines(cluster.nodes, cluster.world, seconds, best_of)
    return [] if line is None else [line]


def _print_without_layout(error: TooLargeError, cluster: ClusterSpec, options: PlanOptions) -> int:
    """Print what is known if no layout of the search fits the memory; returns the exit code.

    Prints single changes that make a layout fit, the best layout of Megatron, and the layout of
    `--explain`.

    Raises:
        InputError: if there is no layout to explain or to emit. The message is one line.
    """

    def larger(count: int) -> tuple[Job, ClusterSpec]:
        """Return the job on at least `count` devices, and their cluster."""
        larger_spec = read_cluster(
            options.cluster, nodes=-(-count // read_cluster(options.cluster).devices_per_node)
        )
        return _job(options, larger_spec), larger_spec

    lines = [f"{error}: {in_words(remedies(error.job, cluster, _settings(options), larger))}"]
    lines += [about_parameters(error.job, cluster), *_as_others(error.job, cluster, options, None)]
    if options.explain is None:
        raise InputError("; ".join(lines))
    print(*map(folded, lines), sep="\n")
    return 0


def _lines(job: Job, simulator: Simulator, result: Result, options: PlanOptions) -> list[str]:
    """Return the answer in words; `--verbose`, `--json` and `--page` have further lines."""
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
        lines += _as_others(job, cluster, options, best_speed(job, cluster, result.best))
    elif options.explain is not None:
        lines.append("yours, under even routing, which is not compared with the plan above:")
        lines += explained(job, cluster, None, options.explain)
    if options.verbose or options.json or options.page is not None:
        lines += further(job, simulator, result, has_price=options.price_per_hour is not None)
    return lines


def _write_page(
    options: PlanOptions, lines: list[str], job: Job, result: Result, simulator: Simulator
) -> None:
    """Write the page of the answer, with the best layout simulated once more for its pictures."""
    from moesaic.report.plan_page import PlanAnswer, write_plan_page

    best = result.best
    cluster = simulator.cluster
    cost_model = SplitCostModel(job, best.grid, best.split, simulator)
    compiled = compile_plan(best.plan, best.grid)
    forward, backward = simulator.passes(
        compiled.forward, compiled.backward, cost_model.model.layer, compiled.grid
    )
    has_stages = best.split.pp > 1
    flies = best.split.in_flight > 1
    title = f"{options.model} on {cluster.name}, {cluster.world} devices"
    found = PlanAnswer(
        job=job,
        result=result,
        cluster=cluster,
        speed=best_speed(job, cluster, best),
        lines=lines,
        timelines={"forward": forward.timeline, "backward": backward.timeline},
        stages=cost_model.timed(forward, backward) if has_stages else None,
        flight=cost_model.flights(compiled, forward, backward)[0] if flies else None,
        price=options.price_per_hour,
    )
    write_plan_page(title, found, Path(str(options.page)))


def _join_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """Return the words with `flag` and its value joined by "=": argparse takes no separate value
    that begins with hyphens."""
    words = list(arguments)
    if flag in words[:-1]:
        at = words.index(flag)
        words[at : at + 2] = [f"{flag}={words[at + 1]}"]
    return words


def _job(options: PlanOptions, cluster: ClusterSpec) -> Job:
    """Return the training job, with the batch size, accumulation and sequence length of the
    options."""
    job_of_model = read_job(options.model, seq_len=options.seq_len or 4096, world=cluster.world)
    job = (
        job_of_model
        if options.batch_size is None
        else replace(job_of_model, batch_size=options.batch_size)
    )
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
    """Run the search; returns the job and the result. A Hugging Face model that does not fit is
    retried with recomputation."""
    try:
        return job, search(
            job, simulator.cluster, settings, counts=counts, simulator=simulator, progress=progress
        )
    except InputError:
        if not isinstance(job.model, HubShape):
            raise
    job = replace(job, model=replace(job.model, checkpoint_activations=True))
    return job, search(
        job, simulator.cluster, settings, counts=counts, simulator=simulator, progress=progress
    )


def _simulator(options: PlanOptions) -> Simulator:
    """Return the simulator of the cluster that the options name."""
    if not options.cluster:
        raise InputError(
            f"--cluster is missing: choose one of {', '.join(presets())}, or give a file"
        )
    cluster = read_cluster(options.cluster, nodes=options.nodes)
    cluster = cluster if options.gpus is None else cluster.of_devices(options.gpus)
    if options.pp is not None and cluster.world % options.pp:
        raise InputError(
            f"--pp {options.pp}: does not divide {cluster.world} devices: choose a divisor, "
            "or leave it out"
        )
    return Simulator(cluster)


def _counts(path: Path) -> list[np.ndarray]:
    """Return tables of copies, each (groups, num_experts): the table of a file, or the `TABLES`
    typical ones of a trace."""
    if path.suffix in (".npy", ".csv"):
        return [read_counts(path)]
    return typical_counts(Trace.open(path), TABLES)


def _settings(options: PlanOptions) -> Settings:
    """Return the search's settings that the options ask for."""
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
        finished_eps=FINISHED,
        reserve_gib=options.reserve_gib,
        max_vio=options.max_vio or 0.0,
        most_stages=MOST_STAGES,
        pp=options.pp,
        may_fly=True,
    )


@contextmanager
def _progress_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield the `progress` callback of a search, shown as a progress bar."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


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
                "searched": results.is_searched,
            }
            for ep, results in result.by_ep.items()
        },
    }


def _step_as_data(planned: PlannedStep) -> dict[str, Any]:
    """Return a planned step for `--json`."""
    grid = planned.grid
    return {
        "seconds": planned.seconds,
        "over_bound": planned.seconds / planned.bound_seconds,
        "mesh": {
            name: getattr(grid, name) for name in ("dp", "tp", "edp", "ep", "etp", "innermost")
        },
        "split": asdict(planned.split),
        "plan": asdict(planned.plan),
        "bottleneck": planned.estimate.bottleneck,
        "parts": planned.estimate.parts,
        "limits": planned.estimate.limits,
        "memory_bytes": {**asdict(planned.memory), "total": planned.memory.total},
    }
