"""Bytes that every schedule and all-to-all sends, counted on the wire and compared with the papers'
closed formulas.

A layer under even routing runs forward and backward on eight loopback ranks (two nodes of four) and
on four Gloo processes (two nodes of two). A recorder on the layer's transport counts the bytes of
every message by link. The formulas are written out below, for each movement of rows, and share no
code with the programs.

A movement is named after the slot that it fills: h are rows at their experts, z results back on
the token's rank, y and z_full what a tensor-parallel group gathers of these, x_wide its gathered
tokens, w_full gathered weights.

    moesaic bench schedules --json benchmarks/results/schedules.json
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh, open_transport
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.all_to_all import ALL_TO_ALLS
from moesaic.program.all_to_all.all_to_all import NodeMap
from moesaic.program.all_to_all.volume import messages_of
from moesaic.program.build import SCHEDULES
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Axis, Grid
from moesaic.program.joined_messages import bundles
from moesaic.program.plan import Crossing, Plan
from moesaic.program.sizes import CallSizes
from moesaic.program.task import INDEX_BYTES, Kind, Program, Task
from moesaic.routing.routers.hash import Hash
from moesaic.routing.routing import Choice, Scores
from moesaic.runtime.tasks import Indices
from moesaic.testing.runner import on_ranks
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, summary_of
from moesaic_lab.claims import Claim
from moesaic_lab.recorder import RecordedMessage, Recorder

DIM = 16
HIDDEN = 16
EXPERTS = 8
TOP_K = 2
TOKENS = 128
ELEMENT = 8
"""Bytes per element: the layers run in float64."""
GRIDS = {
    "loopback": Grid(world=8, tp=2, ep=4, etp=2, ranks_per_node=4),
    "gloo": Grid(world=4, tp=2, ep=2, etp=2, ranks_per_node=2),
}


class EvenRouter(Hash):
    """Sends a token's copies to TOP_K neighbouring experts; each expert gets equally many tokens
    from every rank."""

    def choose(
        self, scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None
    ) -> Choice:
        """Choose experts by the token's position."""
        token = torch.arange(len(scores.logits)).repeat_interleave(top_k)
        slot = torch.arange(top_k).repeat(len(scores.logits))
        expert = (token * top_k + slot) % self.num_experts
        return Choice(token=token, expert=expert, slot=slot, sent=None, per_token=top_k)


Counted = dict[str, tuple[int, int]]
"""Maps direction and slot of a movement to (bytes inside nodes, bytes across nodes), over all
ranks."""


def run_rank(grid: Grid, plan: Plan, transport: AbstractTransport) -> Counted:
    """Run a layer forward and backward on one rank; return the bytes of rows and weights that the
    rank sent, without routing weights and indices."""
    recorder = Recorder(transport)
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K, router=EvenRouter, losses=()).double()
    layer.parallelize(Mesh(grid, recorder), plan)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    assert layer.on_mesh is not None
    make_tables = layer.on_mesh._tables
    made_tables: list[tuple[CallSizes, Indices]] = []

    def make_and_keep(*arguments: Any) -> tuple[CallSizes, Indices]:
        made_tables.append(make_tables(*arguments))
        return made_tables[-1]

    layer.on_mesh._tables = make_and_keep  # type: ignore[assignment, method-assign]
    layer(x, token_ids=torch.arange(TOKENS)).sum().backward()
    sizes, _ = made_tables[0]
    compiled: Compiled = compile_plan(plan, grid)
    bundle_of = _bundles_by_tag(compiled)
    num_tasks = len(compiled.forward.tasks) + len(compiled.backward.tasks)
    of_layer = next(tags for tags in recorder.ranges if tags.length == num_tasks)

    counted: dict[str, tuple[int, int]] = {}
    for sent in of_layer.messages:
        direction, program, tasks = bundle_of[sent.tag]
        num_bytes = sent.num_bytes
        num_small = 0
        for task in tasks:
            source_slot, target_slot = task.of or (task.reads[0], task.writes[0])
            if program.slot(source_slot).kind in (Kind.LANE, Kind.INDEX):
                num_bytes -= small_bytes(task, program, sizes, sent)
                num_small += 1
        if num_small == len(tasks):
            continue
        key = f"{direction} {target_slot}"  # a message has the name of its last task
        inside, across = counted.get(key, (0, 0))
        crosses = grid.node_of(sent.source) != grid.node_of(sent.target)
        counted[key] = (inside, across + num_bytes) if crosses else (inside + num_bytes, across)
    return counted


def _bundles_by_tag(compiled: Compiled) -> dict[int, tuple[str, Program, list[Task]]]:
    """Return direction, program and tasks of each bundle, whose tag is its first task's place in
    the forward and backward program, one after the other."""
    bundle_of = {}
    offset = 0
    for direction, program in (("forward", compiled.forward), ("backward", compiled.backward)):
        for bundle in bundles(program):
            tasks = [program.tasks[place] for place in bundle]
            bundle_of[offset + bundle[0]] = (direction, program, tasks)
        offset += len(program.tasks)
    return bundle_of


def small_bytes(task: Task, program: Program, sizes: CallSizes, sent: RecordedMessage) -> int:
    """Return a message's bytes of routing weights or indices, which a task adds to it."""
    slots = {slot.name: slot for slot in program.slots}
    row_bytes = ELEMENT if slots[task.reads[0]].kind is Kind.LANE else INDEX_BYTES
    num_bytes = 0
    for source, target, rows in messages_of(task, slots, sizes):
        if (source, target) == (sent.source, sent.target):
            num_bytes += row_bytes * rows
    return num_bytes


def on_loopback(grid: Grid, plan: Plan) -> Counted:
    """Run all ranks in this process, and return their total bytes."""
    return total(run_ranks(grid.world, lambda transport: run_rank(grid, plan, transport)))


def on_gloo(grid: Grid, plans: list[Plan]) -> list[Counted]:
    """Run each rank as a process, and return the total bytes of every plan."""
    per_rank = on_ranks(grid.world, _run_plans, grid, plans)
    totals = []
    for number in range(len(plans)):
        of_plan = [counted[number] for counted in per_rank]
        totals.append(total(of_plan))
    return totals


def _run_plans(grid: Grid, plans: list[Plan]) -> list[Counted]:
    """Return the bytes that this process sends under each plan."""
    transport = open_transport()
    return [run_rank(grid, plan, transport) for plan in plans]


def total(per_rank: list[Counted]) -> Counted:
    """Return the sum of the ranks' bytes."""
    sums: Counted = {}
    for counted in per_rank:
        for key, (inside, across) in counted.items():
            inside_before, across_before = sums.get(key, (0, 0))
            sums[key] = (inside_before + inside, across_before + across)
    return dict(sorted(sums.items()))


def formulas(grid: Grid, plan: Plan) -> Counted | None:
    """Return the forward bytes of every movement of rows by the papers' formulas, over all ranks;
    None if there is no formula."""
    rows = _rows_by_formula(grid, plan)
    if rows is None:
        return None
    row_bytes = grid.world * DIM * ELEMENT  # of one row on each rank
    return {
        f"forward {name}": (round(inside * row_bytes), round(across * row_bytes))
        for name, (inside, across) in rows.items()
    }


def _rows_by_formula(grid: Grid, plan: Plan) -> dict[str, tuple[float, float]] | None:
    """Return the rows of DIM elements that a rank sends, (inside its node, across nodes), by the
    slot that receives them; None if there is no formula.

    n copies and T tokens of a tensor-parallel group, m = tp, p = ep, s = etp, L indices of ep on a
    node. Per rank, an all-to-all over ep sends 1 / p of its rows to each index, of which L - 1
    others are on the node and p - L elsewhere.
    """
    n = TOKENS * TOP_K
    m = grid.tp
    p = grid.ep
    s = grid.etp
    local = (grid.ranks_per_node or grid.world) // s
    inside = (local - 1) / p
    across = (p - local) / p
    # Each of a rank's n / m rows goes to the s shards of its expert, except to the rank itself.
    to_all = (s * n / m * local / p - n / m / p, s * n / m * across)
    over_ep = (n / m * inside, n / m * across)
    # At the end the tensor-parallel group gathers: S1 the results, other schedules the copies.
    gather = {"z_full": ((m - 1) * n / m, 0)}
    if plan.schedule == "s1":
        gather = {"y": ((m - 1) * TOKENS / m, 0)}

    shard = 3 * EXPERTS * HIDDEN / (p * s)  # rows of a rank's weights: 3 matrices of HIDDEN x DIM
    if plan.gather_weights == 0:
        # every rank gathers all weights except its own share
        return {"w_full": (shard * (local * s - 1), shard * (p - local) * s), **gather}
    if plan.gather_weights == 1:
        # a token visits one rank of an expert, and the ranks of etp gather the shards
        return {"h": over_ep, "z": over_ep, "w_full": (shard * (s - 1), 0), **gather}
    if plan.crossing is Crossing.MULTICAST:
        return multicast_formulas(grid, plan, local)
    if plan.schedule in ("s1", "s2"):
        return {"h": hops(plan, grid, to_all), "z": hops(plan, grid, to_all), **gather}
    if plan.schedule == "s3":
        # the shards of an expert exchange its rows before and after it
        shards = ((s - 1) * n / m, 0)
        moved = hops(plan, grid, over_ep)
        return {"arrived": moved, "h": shards, "reduced": shards, "z": moved, **gather}
    if plan.schedule == "ted":
        # a ring all-reduce sends its input 2 (s - 1) / s times
        once = (n * inside, n * across)
        return {"h_same": once, "summed": (2 * (s - 1) / s * n, 0), "back": once}
    if plan.schedule == "baseline":
        wide = (s * n * inside, s * n * across)
        return {
            "x_wide": ((s - 1) * TOKENS, 0),
            "h": wide,
            "summed": (2 * (s - 1) / s * s * n, 0),
            "back": wide,
        }
    return None


def hops(plan: Plan, grid: Grid, direct: tuple[float, float]) -> tuple[float, float]:
    """Return rows per rank (inside, across) for the plan's all-to-all, where a direct exchange
    sends `direct`.

    2DH, with g ranks of the group on a node: rows that cross first move inside the node, unless the
    sender already has the target's place; that is 1 - 1 / g of them. One rank per node (1DH): rows
    go to the leader and from a leader, 1 - 1 / g each. For other algorithms, which have no formula
    here, the mean number of legs of their paths is used.
    """
    inside, across = direct
    over_etp = SCHEDULES[plan.schedule]().delivers_at_once
    group_on_node = (grid.ranks_per_node or grid.world) // (1 if over_etp else grid.etp)
    moved = across * (1 - 1 / group_on_node)
    if plan.all_to_all in ("hier2d", "naive", "hier3d"):  # with two nodes the third level is empty
        return inside + moved, across
    if plan.all_to_all == "hier1d":
        return inside + 2 * moved, across
    if plan.all_to_all not in ("linear", "pipelined"):
        group: tuple[Axis, ...] = ("ep", "etp") if over_etp else ("ep",)
        staying, crossing = mean_legs(grid, plan.all_to_all, group)
        staying_inside, staying_across = staying
        crossing_inside, crossing_across = crossing
        return (
            inside * staying_inside + across * crossing_inside,
            inside * staying_across + across * crossing_across,
        )
    return inside, across


def mean_legs(grid: Grid, link: str, group: tuple[Axis, ...]) -> list[tuple[float, float]]:
    """Return the mean legs (inside, across nodes) of a packet that stays on its node, and of one
    that crosses nodes."""
    by_crossing: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for ranks in {grid.group(rank, group) for rank in range(grid.world)}:
        places = NodeMap(grid, ranks)
        for source, target in itertools.permutations(ranks, 2):
            path = list(ALL_TO_ALLS[link].path(places, source, target))
            across = 0
            for leg in path:
                if grid.node_of(leg.source) != grid.node_of(leg.target):
                    across += 1
            crosses = grid.node_of(source) != grid.node_of(target)
            by_crossing[crosses].append((len(path) - across, across))

    means = []
    for legs in by_crossing.values():
        num_packets = max(len(legs), 1)
        mean_inside = sum(inside for inside, _ in legs) / num_packets
        mean_across = sum(across for _, across in legs) / num_packets
        means.append((mean_inside, mean_across))
    return means


def multicast_formulas(grid: Grid, plan: Plan, local: int) -> dict[str, tuple[float, float]]:
    """Return the multicast's rows per rank: a token crosses once per node, then goes once to every
    shard on that node.

    A token's copies go to TOP_K neighbouring experts. Under S1 a rank has T / m tokens. Both copies
    of a token are at one place of ep unless they straddle two. Since TOP_K divides the EXPERTS / p
    experts of a place, every token stops at one place. Under S2 a rank holds every m-th part of
    each expert's run, so the same rank holds both copies of a token.
    """
    m = grid.tp
    p = grid.ep
    s = grid.etp
    nodes = p // local
    node_tokens = TOKENS / m
    crossing = (0.0, node_tokens * (nodes - 1) / nodes)
    fan_out = (s * node_tokens - node_tokens / local, 0.0)
    arrived = "node_tokens_here" if local > 1 else "rank_tokens_here"
    rows = {arrived: crossing, "rank_tokens_in": fan_out, "z_rank_tokens": fan_out, "z": crossing}
    if plan.schedule == "s1":
        return rows | {"y": ((m - 1) * TOKENS / m, 0.0)}
    return rows | {"y": (2 * (m - 1) / m * TOKENS, 0.0)}


def row(transport_name: str, grid: Grid, plan: Plan, counted: Counted) -> dict[str, Any]:
    """Return a row of the table, with all differences from the formulas."""
    # The chunks of a movement, "SLOT/0" and so on, count together.
    forward: Counted = {}
    sums = {"forward": (0, 0), "backward": (0, 0)}
    for key, (inside, across) in counted.items():
        direction, _ = key.split()
        inside_before, across_before = sums[direction]
        sums[direction] = (inside_before + inside, across_before + across)
        if direction == "forward":
            name = key.split("/")[0]
            inside_before, across_before = forward.get(name, (0, 0))
            forward[name] = (inside_before + inside, across_before + across)

    wrong = []
    expected = formulas(grid, plan)
    if expected is not None:
        for key in sorted({*forward, *expected}):
            counted_bytes = forward.get(key, (0, 0))
            expected_bytes = expected.get(key, (0, 0))
            if counted_bytes != expected_bytes:
                slot = key.split()[1]
                wrong.append(f"{slot} sends {counted_bytes}, the formula says {expected_bytes}")

    r = plan.gather_weights
    return {
        "transport": transport_name,
        "ranks": grid.world,
        "schedule": plan.schedule if r is None else f"{plan.schedule}, r={r}",
        "all_to_all": plan.all_to_all,
        "forward_inside_bytes": sums["forward"][0],
        "forward_across_bytes": sums["forward"][1],
        "backward_inside_bytes": sums["backward"][0],
        "backward_across_bytes": sums["backward"][1],
        "wrong": "; ".join(wrong),
    }


OTHERS = [link for link in ALL_TO_ALLS if link != Plan().link]
PLANS = (
    *(Plan(schedule=schedule) for schedule in SCHEDULES),
    *(
        Plan(schedule=schedule, all_to_all=link)
        for schedule in ("s1", "s2", "s3")
        for link in OTHERS
    ),
    *(Plan(schedule=schedule, all_to_all="multicast") for schedule in ("s1", "s2")),
    *(Plan(schedule="s2", gather_weights=r) for r in (0, 1)),
)


def measure(options: BenchmarkOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Count the bytes that every plan sends, over both transports."""
    rows = []
    for transport_name, grid in GRIDS.items():
        told(transport_name)
        if transport_name == "loopback":
            per_plan = [on_loopback(grid, plan) for plan in PLANS]
        else:
            per_plan = on_gloo(grid, list(PLANS))
        rows += [row(transport_name, grid, plan, counted) for plan, counted in zip(PLANS, per_plan)]
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the number of counted plans, and of plans whose bytes differ from the formulas."""
    wrong = sum(bool(row["wrong"]) for row in rows)
    return [
        Claim(
            name="schedules.plans", value=len(rows), unit="plans", target=len(PLANS) * 2, op=">="
        ),
        Claim(name="schedules.formula_mismatches", value=wrong, unit="plans", target=0),
    ]


BENCHMARK = Benchmark(
    name="schedules",
    description="Count the bytes of every schedule and all-to-all, and compare them with formulas.",
    options=BenchmarkOptions,
    notes=summary_of(__doc__),
    measure=measure,
    claims=claims,
    columns=(Shown(title="Rows and weights over all ranks, even routing, float64"),),
    is_proof=True,
)
