"""Multicast: a token crosses to a node once, then goes once to each rank on the node that holds any
of its experts.

Developed here; DeepEP's kernels (github.com/deepseek-ai/DeepEP) send tokens in the same way. Ranks
with the same local rank on all nodes form a rail. A rank sends each of its tokens once per
destination node, to its rail mate there (`node_tokens`). The mate sends the token once to each ep
rank on the node that holds any of its experts (`rank_tokens`). Only that rank makes the copies.

On the way back, a token's results are summed in float32 on the rank that computed them. The mate
sums again, so one sum crosses between nodes. With top-k routing and expert shards this divides the
bytes between nodes by up to top_k * etp, in both directions. Those inside nodes are divided by up
to the number of experts per rank. The derived backward program does the same.

On a single node, or with one ep rank per node, node_tokens and rank_tokens coincide, and the
program has one step instead of two.

With two movements, the second waits for all of the first. DeepEP's kernels forward each piece as it
arrives (`csrc/kernels/internode.cu`), so both together take as long as the slower one and need no
copies before and after. `in_pieces` returns such a program for simulation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from moesaic.errors import InputError
from moesaic.program.build import s1, s2
from moesaic.program.build.builder import Builder, States
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import Flow, Kind, Layout, Op, Program, Slot, Stage, State, Task


def multicast(program: Program, grid: Grid) -> Program:
    """Return s1 or s2 with multicast in place of the movements to the experts and back.

    Instead of `index`, the program reads `rank_token_index`, the token of each of the rank_tokens.
    It also reads `copy_index`: for each copy, the position of its token among the rank_tokens of
    the same origin, ep rank and chunk.

    If a node has several ep ranks (two `Grid.cast_levels`), `rank_token_index` instead gives
    positions among the node_tokens, counted in the same way. `node_token_index` then gives the
    token of each of the node_tokens. `CallSizes` needs `node_tokens`.

    Args:
        program: the program that `s1` or `s2` returns.
        grid: the mesh, with nodes.

    Raises:
        InputError: for another program, or if replicas of the experts are uneven over nodes, or an
            expert's shards are not inside one.
    """
    bias = "b" in program.inputs
    if program not in (s1(bias), s2(bias)):
        raise InputError(
            f"multicast clashes with {program.name}: it replaces the all-to-all over ep and etp, "
            "which s1 and s2 have: choose one of them, or another plan.all_to_all"
        )
    if not grid.nodes_per_replica or not grid.has_shards_inside_nodes:
        raise InputError(
            "multicast needs each replica of the experts on whole nodes, and all shards of an "
            f"expert on one node, unlike mesh.ep={grid.ep}, mesh.etp={grid.etp} on nodes of "
            f"{grid.ranks_per_node} ranks: choose another plan.all_to_all"
        )
    slices = program.routes_slices
    build = Builder(f"{program.name}, multicast", bias)
    tokens, y_layout, y_states = _tokens(build, slices)
    arrived = _to_ranks(build, grid, tokens, slices)
    copies = build.permute(arrived.tokens, arrived.copy_index, "h", _at_ranks("copies"))
    outputs = build.expert(copies, arrived.gates, "out")
    sums = build.combine(outputs, arrived.copy_index, "sums", _at_ranks("rank_tokens"))
    returned = _to_origins(build, grid, sums, arrived.mate_index)
    y = build.combine(
        returned, arrived.token_index, name="y_part", layout=y_layout, states=y_states
    )
    whole = Layout(flow="tokens", whole_tp=True)
    build.move(y, "y", whole, group=("tp",), states={"tp": State.IDENTICAL}, stage=Stage.COMBINE)
    return build.build("y")


class _Arrived(NamedTuple):
    """Names of the slots at the ranks of the experts, and of the indices by which tokens came."""

    tokens: str
    copy_index: str
    gates: str
    """Routing weights."""
    token_index: str
    """The index by which origins sent their tokens."""
    mate_index: str
    """The index by which mates made rank_tokens of node_tokens; "" if they did not."""


def _to_ranks(build: Builder, grid: Grid, tokens: str, slices: bool) -> _Arrived:
    """Send tokens, routing weights and copy indices to the ranks of the experts.

    Args:
        tokens: the slot of the tokens that a rank sends.
        slices: whether these are a slice of the tokens of the tensor-parallel group.
    """
    has_node_tokens = len(grid.cast_levels) > 1
    flow: Flow = "node_tokens" if has_node_tokens else "rank_tokens"
    rank_token_index = build.input("rank_token_index", Kind.INDEX, Layout(flow="rank_tokens"), {})
    token_index = rank_token_index
    if has_node_tokens:
        token_index = build.input("node_token_index", Kind.INDEX, Layout(flow="node_tokens"), {})
    copy_index = build.input("copy_index", Kind.INDEX, Layout(), {})
    # What origins send: tokens, once for each destination of their flow.
    rows = build.permute(tokens, token_index, name=flow, layout=Layout(flow=flow), states={})
    gates = _gates(build, slices)

    mate_index = ""
    if _has_mates(grid):  # to the mates, which make rank_tokens of node_tokens
        rows = _to_mate(build, rows, flow)
        if has_node_tokens:
            mate_index = _to_mate(build, rank_token_index, "rank_token_index")
        copy_index = _to_mate(build, copy_index, "copy_index")
        gates = _to_mate(build, gates, "gates")
        if has_node_tokens:
            rows = build.permute(rows, mate_index, "rank_tokens", _at_mate("rank_tokens"))

    group: tuple[Axis, ...] = ("local",) if _has_mates(grid) else ("ep", "etp")
    return _Arrived(
        tokens=_to_experts(build, rows, "rank_tokens_in", group),
        copy_index=_to_experts(build, copy_index, "copy_index_in", group),
        gates=_to_experts(build, gates, "g", group),
        token_index=token_index,
        mate_index=mate_index,
    )


def _to_mate(build: Builder, slot: str, name: str) -> str:
    """Move a slot to the rail mates on the destination nodes."""
    layout = _at_mate(build.flow(slot))
    return build.move(
        slot, f"{name}_here", layout, group=("node",), states={}, stage=Stage.DISPATCH
    )


def _to_experts(build: Builder, slot: str, name: str, group: tuple[Axis, ...]) -> str:
    """Move a slot to the ranks of the experts, all shards included."""
    layout = _at_ranks(build.flow(slot))
    states: States = {"etp": State.REPLICATED}
    return build.move(slot, name, layout, group=group, states=states, stage=Stage.DISPATCH)


def _to_origins(build: Builder, grid: Grid, sums: str, mate_index: str) -> str:
    """Send the results back to their tokens' origins, and return the slot with what arrives.

    Args:
        sums: the slot of the results at the ranks of the experts, a sum for each rank_token.
        mate_index: the slot of the index by which mates sum rank_tokens to node_tokens, so that
            fewer rows cross between nodes; "" if they forward the rank_tokens.
    """
    # the results of an expert's shards are partial sums, which this movement adds up
    summed_shards: States = {"etp": State.SHARDED}
    if not _has_mates(grid):  # straight to the origins
        return build.move(
            sums,
            "z",
            Layout(flow="rank_tokens"),
            group=("ep", "etp"),
            states=summed_shards,
            stage=Stage.COMBINE,
        )
    # Inside the node to the mates, then between nodes.
    at_mate = build.move(
        sums,
        "z_rank_tokens",
        _at_mate("rank_tokens"),
        group=("local",),
        states=summed_shards,
        stage=Stage.COMBINE,
    )
    if mate_index:
        at_mate = build.combine(at_mate, mate_index, "z_here", _at_mate("node_tokens"))
    at_origin = Layout(flow=build.flow(at_mate))  # node_tokens, or still rank_tokens
    return build.move(at_mate, "z", at_origin, group=("node",), states={}, stage=Stage.COMBINE)


def _has_mates(grid: Grid) -> bool:
    """Return whether rows are relayed by rail mates: on several nodes with several ranks of a
    replica on each."""
    return 1 < grid.nodes_per_replica < grid.ep * grid.etp


def _at_mate(flow: Flow) -> Layout:
    """Return the layout of rows at the rail mates of their origins."""
    return Layout(flow=flow, spread=("node",), experts="node")


def _at_ranks(flow: Flow) -> Layout:
    """Return the layout of rows at the ranks of their experts, all shards included."""
    return Layout(flow=flow, spread=("ep", "etp"), experts="rank")


def _gates(build: Builder, slices: bool) -> str:
    """Declare the routing weights and return those of the rank's own copies. With `slices` each
    rank routes a slice of its group's tokens, so it has no others."""
    own = Layout()
    if slices:
        return build.input("gates", Kind.LANE, own, {})
    gates = build.input("gates", Kind.LANE, Layout(whole_tp=True), {"tp": State.IDENTICAL})
    return build.move(
        gates, "gates_mine", own, group=("tp",), states={"tp": State.SHARDED}, stage=Stage.DISPATCH
    )


def _tokens(build: Builder, slices: bool) -> tuple[str, Layout, States]:
    """Declare x and return the slot to take tokens from, the layout of their sums, and the states
    of these sums. With `slices` each rank routes a slice of its group's tokens."""
    whole = Layout(flow="tokens", whole_tp=True)
    x = build.input("x", Kind.TOKENS, whole, {"tp": State.IDENTICAL})
    if slices:
        own = replace(whole, whole_tp=False)
        sharded: States = {"tp": State.SHARDED}
        x_mine = build.move(x, "x_mine", own, group=("tp",), states=sharded, stage=Stage.DISPATCH)
        return x_mine, own, {}
    # Each rank of the group sends its share of all tokens' copies, so their sums are partial.
    shared: States = {"tp": State.REPLICATED}
    x_shared = build.move(x, "x_shared", whole, group=("tp",), states=shared, stage=Stage.DISPATCH)
    return x_shared, whole, {"tp": State.PARTIAL}


def in_pieces(program: Program, dispatched: str = "") -> Program:
    """Return a program of multicast in which rows move between nodes and inside nodes at the same
    time.

    The second movement starts with the first, the task between them is left to the kernel, and the
    readers of the result wait for both. Such a program tells when tasks run, not what they compute,
    so no executor accepts it.

    Args:
        program: a forward or backward program, not lowered to hops.
        dispatched: codec of rows sent to experts, forward and backward; "" for none. Sums are never
            encoded.
    """
    kinds = {slot.name: slot.kind for slot in program.slots}
    writer = {name: task for task in program.tasks for name in task.writes}
    slots: list[Slot] = list(program.slots)
    # By the name of a task, the tasks in its place.
    replacements: dict[str, list[Task]] = {task.name: [task] for task in program.tasks}
    for second in program.tasks:
        if not _moves_rows(second, kinds):
            continue
        # A pair: a task between makes what the second movement sends of what the first brings.
        between = writer.get(second.reads[0])
        first = writer.get(between.reads[0]) if between is not None else None
        if between is None or first is None or not _moves_rows(first, kinds):
            continue
        source = second.reads[0]
        target = second.writes[0]
        arriving = replace(program.slot(target), name=f"{target}@")
        slots.append(arriving)
        # `of` says which rows it moves: those of the second movement.
        at_once = replace(second, reads=first.reads, writes=(arriving.name,), of=(source, target))
        # A scale with power 0 takes no time.
        reads = (*first.writes, arriving.name)
        wait_for_both = replace(between, op=Op.SCALE, power=0, reads=reads, writes=(target,))
        replacements[first.name].append(at_once)
        replacements[between.name] = []  # left to the kernel
        replacements[second.name] = [wait_for_both]
    tasks = list[Task]()
    for task in program.tasks:
        for new_task in replacements[task.name]:
            if _moves_rows(new_task, kinds):
                new_task = _by_kernel(new_task, dispatched)
            tasks.append(new_task)
    return replace(
        program, name=f"{program.name}, in pieces", slots=tuple(slots), tasks=tuple(tasks)
    )


def _by_kernel(task: Task, dispatched: str) -> Task:
    """Return a movement as a kernel does it that reads and writes rows in place."""
    codec = dispatched if task.stage is Stage.DISPATCH else ""
    return replace(task, codec=codec, of=task.of or (task.reads[0], task.writes[0]))


def _moves_rows(task: Task, kinds: dict[str, Kind]) -> bool:
    """Return whether a task moves rows between nodes or inside one."""
    # a movement that a kernel does at once with another one reads what that one reads; `of` has the
    # rows that it moves
    moved = task.of[0] if task.of is not None else task.reads[0]
    return (
        task.op is Op.MOVE
        and kinds[moved] is Kind.ROWS
        and bool({"ep", "node", "local"}.intersection(task.group))
    )
