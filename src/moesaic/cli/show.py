"""`moesaic show`: prints the stages of a plan's programs, the bytes that they move, and their
memory. Runs without torch.

A *movement* is a task of a program that sends something: inside nodes, or across them. `found` says
what a plan file was found for: a model, a cluster and a layer. `rows` are those of the table of
bytes (`_movement_rows`), by the name of a program.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from moesaic.balance import check_replication
from moesaic.balance.budget import MemoryBudget
from moesaic.balance.samples import Homes
from moesaic.cli.arguments import parse, value_of
from moesaic.cli.output import folded
from moesaic.codecs import is_coded
from moesaic.configfile import differing_fields
from moesaic.errors import InputError, counted, in_one_line
from moesaic.files import write
from moesaic.planner.call_sizes import copies_by_rank, sizes_of
from moesaic.planner.candidates import name_of
from moesaic.planner.cluster import ClusterSpec, Dtype, read_cluster
from moesaic.planner.in_flight import FEW, layers_in_flight
from moesaic.planner.plan_files import (
    MESH,
    FoundFor,
    read_found,
    read_planned,
    read_step,
    write_plan,
)
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, uniform_counts
from moesaic.program.all_to_all.volume import traffic
from moesaic.program.compile import Compiled, compile_plan, moving
from moesaic.program.expert_sizes import ExpertSizes
from moesaic.program.grid import Grid
from moesaic.program.layouts import LayoutIndex
from moesaic.program.plan import Crossing, Plan
from moesaic.program.sample_layouts import PlacedIndex, placed_sizes
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Kind, Lane, Op, Program
from moesaic.program.text import NAMES, to_text
from moesaic.program.timeline import Span, Timeline, to_trace
from moesaic.runtime.call_counts import CountedCall

if TYPE_CHECKING:
    from moesaic.report.style import Picture


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The mesh of `moesaic show`."""

    world: int = 8
    """Number of ranks; of one stage, if the plan is for several pipeline stages."""
    tp: int = 2
    """Tensor parallelism: number of ranks that hold the same tokens and share the dense layers."""
    ep: int = 4
    """Expert parallelism: number of ranks over which the experts are split."""
    etp: int = 2
    """Expert tensor parallelism: number of ranks over which each expert's inner width is split."""
    innermost: Literal["etp", "ep"] = "etp"
    """Which of etp and ep has consecutive ranks."""
    ranks_per_node: int = 4
    """Number of consecutive ranks that share a node."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The MoE layer of `moesaic show`, under even routing."""

    tokens: int = 4096
    """Tokens per data-parallel group."""
    dim: int = 1024
    """Width of a token."""
    hidden: int = 2816
    """Inner width of one expert."""
    num_experts: int = 8
    """Experts of the layer."""
    top_k: int = 2
    """Experts per token."""
    dtype: Dtype = "bf16"
    """Dtype of activations, weights and matrix products."""

    def __post_init__(self) -> None:
        for name in ("tokens", "dim", "hidden", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"--layer.{name.replace('_', '-')} {getattr(self, name)}: must be at least 1"
                )
        if self.top_k > self.num_experts:
            raise InputError(
                f"--layer.top-k {self.top_k}: choose at most --layer.num-experts {self.num_experts}"
            )


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of `moesaic show`."""

    plan: Plan = field(default_factory=lambda: Plan(schedule="s2"))
    """The plan to show."""
    mesh: MeshOptions = MeshOptions()
    """The mesh on which the plan runs."""
    layer: LayerOptions = LayerOptions()
    """The MoE layer that the plan runs; its routing is even."""
    samples: int = 0
    """Samples per rank, with equally many tokens, that sample placement (NetMoE) may move to other
    ranks; the programs are shown with every sample staying. 0: no sample placement."""
    cluster: str = "25gbe"
    """Cluster for the simulated times: a preset, or a .toml file; docs/planning.md describes
    both."""
    plan_file: str | None = None
    """Take what no flag gives from this file of --write: the plan, and of moesaic plan --write the
    mesh, the layer's sizes and the cluster too."""
    write: str | None = None
    """Write the plan to this file (.toml or .json)."""
    gantt: str | None = None
    """Write a Gantt chart of the programs to this HTML file."""
    in_flight: Literal[1, 2] = 1
    """2: the chart also shows two micro-batches of this layer in flight, so that one sees who
    waits."""
    between_ms: float | None = None
    """With two in flight: milliseconds that a micro-batch computes before each layer (attention,
    norms); None for as long as the layer computes."""
    perfetto: str | None = None
    """Write the timelines of the programs to this file, a Chrome trace in JSON, which
    ui.perfetto.dev and chrome://tracing open."""
    listing: bool = False
    """Print every slot and task of the programs too."""
    json: bool = False
    """Print the figures as JSON, movement by movement."""

    def __post_init__(self) -> None:
        if self.between_ms is not None and not 0 <= self.between_ms < float("inf"):
            raise InputError(f"--between-ms {self.between_ms}: must be at least 0")
        if self.in_flight == 2 and self.samples:
            raise InputError("--in-flight 2 shows samples at rest: leave out --samples")


DESCRIPTION = (
    "Print what a plan's programs do on a mesh: the time of their stages, the bytes that they "
    "move, and memory."
)
NARROWEST = 120
"""Columns that the tables need."""
WHAT = {Kind.LANE: "gates", Kind.WEIGHT: "weights", Kind.INDEX: "positions"}
"""What a movement carries, for the kinds of slots whose own name does not say it."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options, of_file = _parsed(arguments)
    plan = options.plan
    grid = Grid(**vars(options.mesh))
    found = None if of_file is None else of_file.found
    cluster = _cluster(options, found)
    sizes_of_layer = vars(options.layer)
    layer = Workload(**sizes_of_layer) if found is None else replace(found.layer, **sizes_of_layer)

    compiled = compile_plan(plan, grid)
    sizes_by_sample = None  # then the simulator has even routing
    if options.samples:
        compiled = moving(compiled)  # the programs of calls in which samples may move
    sizes = sizes_of(compiled.forward, layer, compiled.grid)
    if options.samples:
        sizes_by_sample = _by_sample(sizes, plan, options.layer, options.samples)
        sizes = sizes_by_sample
    programs = {"forward": compiled.forward, "backward": compiled.backward}
    if compiled.again is not None:  # what backward runs of forward again
        programs["again"] = compiled.again
    rows = {}
    timelines = {}
    simulator = Simulator(cluster)
    for name, program in programs.items():
        rows[name] = _movement_rows(program, sizes, layer)
        simulated = simulator.run(program, layer, compiled.grid, sizes=sizes_by_sample)
        timelines[name] = simulated.timeline

    if options.write is not None:
        write_plan(plan, Path(options.write))
    title = _title(options, of_file, cluster, grid)
    further = []
    if options.gantt is not None and options.in_flight == 2:
        further = _flights(options, simulator, compiled, layer, timelines["forward"])
    _write_pictures(options, timelines, title, further)
    memory = [] if options.samples else _memory_rows(compiled, layer)
    if options.json:
        print(json.dumps({**_as_data(programs, rows, timelines), "held": memory}, indent=2))
        return 0
    policy = f", policy {compiled.plan.replication}" if compiled.replicates else ""
    where = f"{_where(cluster, grid)}: {name_of(grid)}"
    print(in_one_line(f"{compiled.forward.name}{policy} on {where}"))
    print(folded(in_one_line(_whose(options, of_file))))
    console = Console(width=max(Console().width, NARROWEST))
    console.print(
        _stage_table(timelines, nodes=_nodes(grid)),
        _byte_table(rows, replicates=compiled.replicates),
        sep="\n",
    )
    for row in memory:
        print(folded(_memory_line(row, plan.memory_budget)))
    print(folded(NAMES))
    if options.listing:
        print(*map(to_text, programs.values()), sep="\n", end="")
    return 0


def _parsed(arguments: Sequence[str]) -> tuple[ShowOptions, OfFile | None]:
    """Return the options, and what a plan file gives of them.

    Raises:
        InputError: if there is no program to show.
    """
    file = value_of(arguments, "--plan-file")
    of_file = None if file is None else _of_file(Path(file))
    options = parse(
        ShowOptions,
        arguments,
        prog="moesaic show",
        description=DESCRIPTION,
        default=None if of_file is None else of_file.options,
    )

    plan = options.plan
    if plan.crossing is Crossing.DEEPEP:
        raise InputError(
            "plan.all_to_all=deepep runs the kernels of DeepEP, so there is no program to show: "
            "choose multicast, which sends a token once per node"
        )
    if plan.replicates:
        check_replication("plan.replication", plan.replication)
    return options, of_file


def _memory_rows(compiled: Compiled, layer: Workload) -> list[dict[str, Any]]:
    """Return the memory of a call on the rank that holds most, and how the call is run within the
    memory budget.

    There is one entry for even routing, and one for all tokens on the same experts.
    """
    grid = compiled.grid
    even = uniform_counts(compiled.grid.dp, layer)  # (dp, num_experts)
    skewed = np.zeros_like(even)
    skewed[:, : layer.top_k] = layer.tokens  # every token goes to the first top_k experts
    experts = ExpertSizes.stacked(
        layer.dim, layer.hidden // grid.etp, layer.matrices, layer.element_bytes
    )

    budget = MemoryBudget(compiled, layer.num_experts)
    rows = []
    for routing, counts in (("even", even), ("all tokens to the same experts", skewed)):
        copies = copies_by_rank(compiled.forward, grid, counts)
        tokens = -(-copies.sum(1) // layer.top_k)  # rounded up
        # units: hidden units of an expert's part on a rank
        call = CountedCall(copies, tokens=tokens, units=experts.units, experts=lambda: experts)
        unreplicated = budget.unreplicated  # the plan without replication: no rows (None) before
        # rows that the budget sends to other ranks, and slices; None if there are none
        _, replicated, cut = budget.hold(unreplicated, None, call)
        whole = float(budget.peak(unreplicated, None, call).max())
        rows.append(
            {
                "routing": routing,
                "bytes": int(whole),  # of the call in one piece, whatever the budget
                "replicated_rows": 0 if replicated is None else replicated.total,
                "slices": 1 if cut is None else cut.num_slices,
                "kept_slices": 1 if cut is None else cut.kept,
            }
        )
    return rows


def _memory_line(row: dict[str, Any], budget: int | None) -> str:
    """Return an entry of `_memory_rows` as a line; `budget` is in bytes."""
    line = (
        f"memory, {row['routing']}: a call holds {row['bytes'] / 1e6:,.2f} MB on a rank, forward "
        "and backward"
    )
    if budget is None or row["bytes"] <= budget:
        return line
    measures = []
    if row["replicated_rows"]:
        measures.append(f"{row['replicated_rows']} rows go to other ranks")
    if row["slices"] > 1:
        repeated = row["slices"] - row["kept_slices"]
        measures.append(f"{row['slices']} slices, of which {repeated} run again for backward")
    return f"{line}; within {budget / 1e6:,.2f} MB: {', '.join(measures)}"


@dataclass(frozen=True, kw_only=True)
class OfFile:
    """What a file of --plan-file gives."""

    options: ShowOptions
    """The options, where no flag gives others."""
    found: FoundFor | None
    """What the plan was found for; None if the file does not say."""
    stages: int
    """Pipeline stages, of which the mesh is one."""


def _of_file(path: Path) -> OfFile:
    """Return what a plan file gives."""
    table, plan = read_planned(path)
    found = read_found(path)
    stages = table.get("pp", 1)
    _, num_in_flight, _ = read_step(path)
    drawn_in_flight: Literal[1, 2] = 2 if num_in_flight > 1 else 1
    mesh = {name: table[name] for name in MESH if name in table}
    if found is None:  # the file has a plan, and maybe sizes of axes, alone
        options = ShowOptions(
            plan=plan, mesh=replace(MeshOptions(), **mesh), in_flight=drawn_in_flight
        )
        return OfFile(options=options, found=None, stages=stages)
    world = found.ranks // stages
    mesh["world"] = world
    mesh["ranks_per_node"] = min(found.devices_per_node, world)  # a stage may be part of a node
    layer = {field.name: getattr(found.layer, field.name) for field in fields(LayerOptions)}
    options = ShowOptions(
        plan=plan,
        mesh=MeshOptions(**mesh),
        layer=LayerOptions(**layer),
        cluster=found.cluster,
        in_flight=drawn_in_flight,
    )
    return OfFile(options=options, found=found, stages=stages)


def _cluster(options: ShowOptions, found: FoundFor | None) -> ClusterSpec:
    """Return the cluster, with at least as many nodes as the mesh has; `found` says what the plan
    of a plan file was found for, and None that no file said so."""
    mesh_nodes = options.mesh.world // options.mesh.ranks_per_node
    if found is None or options.cluster != found.cluster:  # --cluster or its default decides
        cluster = read_cluster(options.cluster)
        if cluster.nodes >= mesh_nodes:
            return cluster
        return read_cluster(options.cluster, nodes=mesh_nodes)
    # the plan file's cluster
    if mesh_nodes > found.nodes:  # --mesh asks for more nodes than the plan was found for
        return read_cluster(found.cluster, nodes=mesh_nodes)
    whole_nodes = read_cluster(found.cluster, nodes=found.nodes)
    return whole_nodes.of_devices(found.ranks)  # the search may have used a part of each node


def _nodes(grid: Grid) -> int:
    """Return the number of nodes of a mesh."""
    return grid.world // (grid.ranks_per_node or grid.world)


def _where(cluster: ClusterSpec, grid: Grid) -> str:
    """Return the cluster and the part of it that a mesh takes."""
    per_node = grid.ranks_per_node or grid.world
    nodes = counted(_nodes(grid), "node")
    return f"{cluster.name}, {nodes} of {counted(per_node, 'rank')}"


def _whose(options: ShowOptions, of_file: OfFile | None) -> str:
    """Return a line with the layer's sizes, and where they come from."""
    layer = options.layer
    sizes = (
        f"a layer of {layer.num_experts} experts, top {layer.top_k}, dim {layer.dim:,}, hidden "
        f"{layer.hidden:,}, for {layer.tokens:,} tokens in {layer.dtype}"
    )
    if of_file is None or of_file.found is None:
        return f"{sizes}: by --layer"
    found = of_file.found
    flags = differing_fields(of_file.options.layer, layer, "--layer.")
    others = f", but for {', '.join(flags)}" if flags else ""
    stage = f" in {of_file.stages} stages, one of which is shown" if of_file.stages > 1 else ""
    return f"{sizes}: {found.model}'s on {found.ranks} ranks{stage}{others}"


def _title(options: ShowOptions, of_file: OfFile | None, cluster: ClusterSpec, grid: Grid) -> str:
    """Return the title of pictures: model, cluster and mesh."""
    layer = options.layer
    model = f"{layer.num_experts} experts, dim {layer.dim:,}, hidden {layer.hidden:,}"
    stages = ""
    if of_file is not None and of_file.found is not None:
        model = f"A layer of {of_file.found.model}"
        if of_file.stages > 1:
            stages = f"a stage of {of_file.stages}, "
    return f"{model} on {_where(cluster, grid)}: {stages}{name_of(grid)}"


def _by_sample(
    sizes: CallSizes, plan: Plan, layer: LayerOptions, samples_per_rank: int
) -> CallSizes:
    """Return the sizes of a call whose copies are kept apart by sample, with every sample staying
    on its rank; `sizes` are those of a call that does not keep them apart."""
    grid = sizes.grid
    copies_per_expert = layer.tokens * layer.top_k // layer.num_experts
    length = layer.tokens // samples_per_rank
    splits_evenly = (
        copies_per_expert % samples_per_rank == 0 and layer.tokens % samples_per_rank == 0
    )
    if not splits_evenly or grid.tp > 1:
        raise InputError(
            f"--samples {samples_per_rank}: needs --mesh.tp 1, and samples among which a rank's "
            f"{layer.tokens} tokens and each expert's {copies_per_expert} copies split evenly"
        )
    copies = np.full(
        (grid.world, samples_per_rank, layer.num_experts), copies_per_expert // samples_per_rank
    )
    homes = Homes.start(grid.world, samples_per_rank)
    index = LayoutIndex(grid, layer.num_experts, samples_per_rank, parts=plan.chunks)
    # the target of each sample is the home that it has: none moves
    placed = PlacedIndex(index, targets=lambda: homes.targets(homes), length=length)
    return placed_sizes(grid, copies, placed, units=layer.hidden // grid.etp)


def _movement_rows(program: Program, sizes: CallSizes, layer: Workload) -> list[dict[str, Any]]:
    """Return a row of the table of bytes, as plain data, for each movement of a program."""
    rows = []
    stages = {task.name: task.stage.value for task in program.tasks}
    for moved in traffic(program, sizes, sizes.grid.node_of):
        # weights move by hidden units, each with `dim` numbers of every matrix of an expert
        inside, across = moved.num_bytes(
            layer.dim, layer.element_bytes, unit_columns=layer.matrices * layer.dim
        )
        rows.append(
            {
                "task": moved.task,
                "stage": stages[moved.task],
                "what": WHAT.get(moved.kind, moved.kind.value),
                "collective": moved.collective,
                "codec": moved.codec or "none",
                "inside_bytes": inside,
                "across_bytes": across,
                "inside_messages": moved.inside_messages,
                "across_messages": moved.across_messages,
            }
        )
    return rows


def _as_data(
    programs: dict[str, Program],
    rows: dict[str, list[dict[str, Any]]],
    timelines: dict[str, Timeline],
) -> dict[str, Any]:
    """Return what the tables and pictures show, for `--json`."""
    data: dict[str, Any] = {}
    for name, program in programs.items():
        expert_tasks = [task for task in program.tasks if task.op in (Op.EXPERT, Op.EXPERT_GRAD)]
        data[name] = {
            "program": program.name,
            "tasks": len(program.tasks),
            "experts": len(expert_tasks),
            "rows": rows[name],
            "inside_bytes": sum(row["inside_bytes"] for row in rows[name]),
            "across_bytes": sum(row["across_bytes"] for row in rows[name]),
            "seconds": timelines[name].makespan,
            "overlap": timelines[name].overlap,  # share of the moving that computing hides
        }
    return data


def _flights(
    options: ShowOptions,
    simulator: Simulator,
    compiled: Compiled,
    layer: Workload,
    forward: Timeline,
) -> list[Picture]:
    """Return charts of two micro-batches in flight through a few such layers; `forward` is the
    timeline of one layer's forward program."""
    from moesaic.report.gantt import in_flight_pictures

    if options.between_ms is None:
        between = sum(each.end - each.start for each in forward.spans if each.lane is Lane.COMPUTE)
    else:
        between = options.between_ms / 1e3
    # the gradients of what lies between layers take twice its time
    passes = {"forward": (compiled.forward, between), "backward": (compiled.backward, 2 * between)}
    flights = {}
    for name, (program, seconds) in passes.items():
        flights[name] = layers_in_flight(
            simulator, program, layer, compiled.grid, between=seconds, layers=FEW
        )
    return in_flight_pictures(flights, between)


def _write_pictures(
    options: ShowOptions, timelines: dict[str, Timeline], title: str, further: Sequence[Picture]
) -> None:
    """Write the Gantt chart, with further charts, and the trace that the options ask for."""
    if options.gantt is not None:
        from moesaic.report.gantt import write_gantt

        write_gantt(timelines, Path(options.gantt), title, further)
    if options.perfetto is not None:
        events = []
        for number, timeline in enumerate(timelines.values()):  # a process for each program
            events += [{**event, "pid": number} for event in to_trace(timeline)["traceEvents"]]
        try:
            write(Path(options.perfetto), json.dumps({"traceEvents": events}), typed=True)
        except OSError as error:
            raise InputError(
                f"--perfetto {options.perfetto}: cannot be written ({error.strerror}): choose "
                "another path"
            ) from error


def _stage_table(timelines: dict[str, Timeline], *, nodes: int) -> Table:
    """Return the table of times: a row per stage of a program, and one of the whole program."""
    # the lane between nodes carries messages inside one too, and all of them if there is no other
    inside = (Lane.INTRA,) if nodes > 1 else (Lane.INTRA, Lane.INTER)
    across = (Lane.INTER,) if nodes > 1 else ()
    columns = ((Lane.COMPUTE, Lane.HOST), inside, across)
    table = Table(
        title="milliseconds of a rank, whose lanes run side by side", box=None, title_justify="left"
    )
    for column in (
        "",
        "stage",
        "tasks",
        "computing",
        "inside nodes",
        "across nodes",
        "in all",
        "moving hidden",
    ):
        table.add_column(column, justify="left" if column in ("", "stage") else "right")

    for name, timeline in timelines.items():
        stages = dict.fromkeys(span.stage for span in timeline.spans)  # each once, in order
        for stage in stages:
            spans = [span for span in timeline.spans if span.stage == stage]
            table.add_row(name, stage.value, *_time_cells(spans, columns))
        whole = (f"{timeline.makespan * 1e3:,.2f}", f"{timeline.overlap:.0%}")
        table.add_row(name, "in all", *_time_cells(timeline.spans, columns), *whole)
    return table


def _time_cells(spans: Sequence[Span], columns: Sequence[tuple[Lane, ...]]) -> list[str]:
    """Return the number of some tasks, and their milliseconds by column, on the lanes of each."""
    cells = [str(len(spans))]
    for lanes in columns:
        seconds = sum(span.end - span.start for span in spans if span.lane in lanes)
        cells.append(f"{seconds * 1e3:,.2f}")
    return cells


def _byte_table(rows: dict[str, list[dict[str, Any]]], *, replicates: bool) -> Table:
    """Return the table of bytes: a row per kind of movement of a program's stage, over all its
    chunks, groups and hops."""
    routing = "even routing, so that nothing is replicated" if replicates else "even routing"
    table = Table(
        title=f"MB that all ranks move, {routing}, before any codec", box=None, title_justify="left"
    )
    for column in ("", "stage", "what", "how", "inside nodes", "across nodes", "messages", "tasks"):
        is_number = "nodes" in column or column == "messages"
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)

    for name, of_program in rows.items():
        kinds: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for row in of_program:
            if row["inside_messages"] + row["across_messages"] == 0:
                continue
            how = row["collective"]
            if is_coded(row["codec"]):
                how = f"{how}, {row['codec']}"
            kinds.setdefault((row["stage"], row["what"], how), []).append(row)

        for kind, of_kind in kinds.items():
            first_task = of_kind[0]["task"]
            tasks = first_task if len(of_kind) == 1 else f"{first_task}, ..."
            table.add_row(name, *kind, *_byte_cells(of_kind), tasks)
        table.add_row(name, "in all", "", "", *_byte_cells(of_program), "")
    return table


def _byte_cells(rows: list[dict[str, Any]]) -> list[str]:
    """Return the MB of some movements inside nodes and across nodes, and their messages."""
    inside = sum(row["inside_bytes"] for row in rows)
    across = sum(row["across_bytes"] for row in rows)
    messages = sum(row["inside_messages"] + row["across_messages"] for row in rows)
    return [f"{inside / 1e6:,.2f}", f"{across / 1e6:,.2f}", f"{messages:,}"]
