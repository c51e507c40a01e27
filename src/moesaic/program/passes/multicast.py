"""Multicast: a token crosses to a node once, and there goes once to each rank that holds any of its experts.

Ours; DeepEP's kernels (github.com/deepseek-ai/DeepEP) send tokens so too. The ranks with the same place on every node form a
rail. A rank sends each of its tokens once per node to its rail-mate there: a visit. The mate sends it once to each place of
ep on the node that holds experts of it: a stop. The copies are made where they are computed. On the way back a token's
results are summed, in float32, where they were computed, and once more by the mate, before they cross once. For top-k
routing and shards this divides the bytes between nodes by up to top_k * etp, those inside by up to the experts of a rank, in
both directions; the backward program, derived, does the same.

On one node, and with one rank of ep per node, visits and stops are the same: the program has one of the two steps then.

As two movements the second waits for all of the first. DeepEP's kernels forward each piece as it comes
(`csrc/kernels/internode.cu`), so both take the time of the slower one, and copy nothing before and after: `in_pieces` is such
a program, for simulation.
"""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import InputError
from moesaic.program.build import s1, s2
from moesaic.program.build.builder import Builder, States
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import Flow, Kind, Layout, Op, Program, Slot, Stage, State, Task


def multicast(program: Program, grid: Grid) -> Program:
    """Return s1 or s2 with multicast in place of deliver and collect.

    In place of `index` the program reads `rank_token_index`, each stop's token, and `copy_index`, each copy's stop among those
    of its origin at its place of ep (and of its chunk). Where a node has several places of ep (two `Grid.cast_levels`),
    `rank_token_index` is each stop's visit, counted the same way on its node, and `node_token_index` each visit's
    token. `CallSizes` needs the visits.

    Args:
        program: what one of the two builds.
        grid: the mesh, with nodes.

    Raises:
        InputError: for another program, or experts that do not lie evenly on the nodes with all their shards inside one.
    """
    bias = "b" in program.inputs
    if program not in (s1(bias), s2(bias)):
        raise InputError(
            f"multicast clashes with {program.name}: it replaces the all-to-all over ep and etp, which s1 and s2 have: "
            "choose one of them, or another plan.all_to_all"
        )
    if not grid.nodes_per_replica or not grid.has_shards_inside_nodes:
        raise InputError(
            f"multicast needs every copy of the experts on whole nodes, and all shards of an expert on one: mesh.ep={grid.ep}, "
            f"mesh.etp={grid.etp} do not lie so on nodes of {grid.ranks_per_node} ranks: choose another plan.all_to_all"
        )
    slices = program.routes_slices
    build = Builder(f"{program.name}, multicast", bias)
    tokens, y_layout, tp = _tokens(build, slices)
    index, places, (once, copies, g) = _to_ranks(build, grid, tokens, slices)
    h = build.permute(once, copies, "h", _at_ranks("copies"))
    sums = build.combine(build.expert(h, g, "out"), copies, "sums", _at_ranks("rank_tokens"))
    y = build.combine(_home(build, grid, sums, places), index, "y_part", y_layout, tp)
    whole = Layout(flow="tokens", whole_tp=True)
    build.move(y, "y", whole, ("tp",), {"tp": State.IDENTICAL}, Stage.COMBINE)
    return build.build("y")


def _to_ranks(build: Builder, grid: Grid, tokens: str, slices: bool) -> tuple[str, str, list[str]]:
    """Bring tokens, the copies' stops and their routing weights to the ranks of the experts.

    Returns:
        the index by which tokens left home; that by which a mate made stops of visits, "" if none did; what arrived.
    """
    flow: Flow = "node_tokens" if len(grid.cast_levels) > 1 else "rank_tokens"
    rank_token_index = build.input("rank_token_index", Kind.INDEX, Layout(flow="rank_tokens"), {})
    index = (
        build.input("node_token_index", Kind.INDEX, Layout(flow="node_tokens"), {})
        if flow == "node_tokens"
        else rank_token_index
    )
    copy_index = build.input("copy_index", Kind.INDEX, Layout(), {})
    sent = {flow: build.permute(tokens, index, flow, Layout(flow=flow), {}), "rank_token_index": rank_token_index}
    if flow == "rank_tokens":
        del sent["rank_token_index"]
    sent |= {"copy_index": copy_index, "gates": _gates(build, slices)}
    places = ""
    if _has_mates(grid):
        sent = {
            name: build.move(slot, f"{name}_here", _at_mate(build.flow(slot)), ("node",), {}, Stage.DISPATCH)
            for name, slot in sent.items()
        }
        if flow == "node_tokens":
            places = sent.pop("rank_token_index")
            rows = build.permute(sent.pop("node_tokens"), places, "rank_tokens", _at_mate("rank_tokens"))
            sent = {"rank_tokens": rows, **sent}
    group: tuple[Axis, ...] = ("local",) if _has_mates(grid) else ("ep", "etp")
    shards: States = {"etp": State.REPLICATED}
    names = {"rank_tokens": "rank_tokens_in", "copy_index": "copy_index_in", "gates": "g"}
    arrived = [
        build.move(slot, names[name], _at_ranks(build.flow(slot)), group, shards, Stage.DISPATCH)
        for name, slot in sent.items()
    ]
    return index, places, arrived


def _home(build: Builder, grid: Grid, sums: str, places: str) -> str:
    """Bring the sums of stops home; a mate sums those of a visit, by the index `places`, if it made stops of visits."""
    added: States = {"etp": State.SHARDED}
    if not _has_mates(grid):
        return build.move(sums, "z", Layout(flow="rank_tokens"), ("ep", "etp"), added, Stage.COMBINE)
    here = build.move(sums, "z_rank_tokens", _at_mate("rank_tokens"), ("local",), added, Stage.COMBINE)
    if places:
        here = build.combine(here, places, "z_here", _at_mate("node_tokens"))
    return build.move(here, "z", Layout(flow=build.flow(here)), ("node",), {}, Stage.COMBINE)


def _has_mates(grid: Grid) -> bool:
    """Whether rows go by a mate: on several nodes, with several ranks of a copy of the experts on each."""
    return 1 < grid.nodes_per_replica < grid.ep * grid.etp


def _at_mate(flow: Flow) -> Layout:
    return Layout(flow=flow, spread=("node",), experts="node")


def _at_ranks(flow: Flow) -> Layout:
    return Layout(flow=flow, spread=("ep", "etp"), experts="rank")


def _gates(build: Builder, slices: bool) -> str:
    """Declare the routing weights and return those of the rank's own copies."""
    own = Layout()
    if slices:
        return build.input("gates", Kind.LANE, own, {})
    gates = build.input("gates", Kind.LANE, Layout(whole_tp=True), {"tp": State.IDENTICAL})
    return build.move(gates, "gates_mine", own, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH)


def _tokens(build: Builder, slices: bool) -> tuple[str, Layout, States]:
    """Declare x and return the tokens that visits are taken from, their layout, and the states of their sums."""
    whole = Layout(flow="tokens", whole_tp=True)
    x = build.input("x", Kind.TOKENS, whole, {"tp": State.IDENTICAL})
    if slices:
        own = replace(whole, whole_tp=False)
        return build.move(x, "x_mine", own, ("tp",), {"tp": State.SHARDED}, Stage.DISPATCH), own, {}
    shared: States = {"tp": State.REPLICATED}
    return build.move(x, "x_shared", whole, ("tp",), shared, Stage.DISPATCH), whole, {"tp": State.PARTIAL}


def in_pieces(program: Program, dispatched: str = "") -> Program:
    """Return a program of multicast in which rows move between nodes and inside them at once.

    The second movement begins with the first, what lies between is the kernel's own, and whoever reads the result waits for
    both. It says when tasks run, not what they compute: no executor takes it.

    Args:
        program: forward or backward, not lowered to hops.
        dispatched: codec of rows on their way to experts, forward and backward; "" for none. Sums are never coded.
    """
    kinds = {slot.name: slot.kind for slot in program.slots}
    writer = {name: task for task in program.tasks for name in task.writes}
    slots: list[Slot] = list(program.slots)
    behind: dict[str, list[Task]] = {}
    put: dict[str, list[Task]] = {}
    for second in program.tasks:
        if not _moves_rows(second, kinds):
            continue
        between = writer.get(second.reads[0])
        first = writer.get(between.reads[0]) if between is not None else None
        if between is None or first is None or not _moves_rows(first, kinds):
            continue
        source, target = second.reads[0], second.writes[0]
        arriving = replace(program.slot(target), name=f"{target}@")
        slots.append(arriving)
        behind[first.name] = [replace(second, reads=first.reads, writes=(arriving.name,), of=(source, target))]
        put[between.name] = []
        # A scale by nothing takes no time.
        both = (*first.writes, arriving.name)
        put[second.name] = [replace(between, op=Op.SCALE, power=0, reads=both, writes=(target,))]
    tasks = [
        _by_kernel(each, dispatched) if _moves_rows(each, kinds) else each
        for task in program.tasks
        for each in (*put.get(task.name, [task]), *behind.get(task.name, []))
    ]
    return replace(program, name=f"{program.name}, in pieces", slots=tuple(slots), tasks=tuple(tasks))


def _by_kernel(task: Task, dispatched: str) -> Task:
    """Return a movement that takes rows from where they lie and puts them where they belong."""
    codec = dispatched if task.stage is Stage.DISPATCH else ""
    return replace(task, codec=codec, of=task.of or (task.reads[0], task.writes[0]))


def _moves_rows(task: Task, kinds: dict[str, Kind]) -> bool:
    """Whether a task moves rows between nodes or inside one."""
    moved = task.of[0] if task.of is not None else task.reads[0]
    return task.op is Op.MOVE and kinds[moved] is Kind.ROWS and bool({"ep", "node", "local"}.intersection(task.group))
