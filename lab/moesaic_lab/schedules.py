"""Bytes that every schedule and all-to-all sends, counted on the wire and compared with the papers'
closed formulas.

A layer under even routing runs forward and backward on eight loopback ranks (two nodes of four) and
on four Gloo processes (two nodes of two). A recorder on the layer's transport counts the bytes of
every message by link. The formulas are written out below, for each movement of rows, and share no
code with the programs.

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
        return Choice(token, (token * top_k + slot) % self.num_experts, slot, None, top_k)


Counted = dict[str, tuple[int, int]]
"""Maps direction and slot of a movement to (bytes inside nodes, bytes across nodes), over all
ranks."""


def run_rank(grid: Grid, plan: Plan, transport: AbstractTransport) -> Counted:
    """Run a layer forward and backward on one rank; return the bytes that the rank sent."""
    recorder = Recorder(transport)
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K, router=EvenRouter, losses=()).double()
    layer.parallelize(Mesh(grid, recorder), plan)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    assert layer.on_mesh is not None
    tables_of = layer.on_mesh._tables
    seen = list[tuple[CallSizes, Indices]]()
    layer.on_mesh._tables = lambda *arguments: seen.append(tables_of(*arguments)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    layer(x, token_ids=torch.arange(TOKENS)).sum().backward()
    compiled: Compiled = compile_plan(plan, grid)
    bundle_of = {
        offset + bundle[0]: (direction, program, [program.tasks[place] for place in bundle])
        for direction, program, offset in (
            ("forward", compiled.forward, 0),
            ("backward", compiled.backward, len(compiled.forward.tasks)),
        )
        for bundle in bundles(program)
    }
    num_tasks = len(compiled.forward.tasks) + len(compiled.backward.tasks)
    of_program = next(r for r in recorder.ranges if r.length == num_tasks)
    counted: dict[str, tuple[int, int]] = {}
    for sent in of_program.messages:
        direction, program, tasks = bundle_of[sent.tag]
        small = [
            task
            for task in tasks
            if program.slot((task.of or task.reads)[0]).kind in (Kind.LANE, Kind.INDEX)
        ]
        if len(small) == len(tasks):
            continue
        num_bytes = sent.num_bytes - sum(
            small_bytes(task, program, seen[0][0], sent) for task in small
        )
        key = f"{direction} {(tasks[-1].of or (*tasks[-1].reads, tasks[-1].writes[0]))[-1]}"
        inside, across = counted.get(key, (0, 0))
        crosses = grid.node_of(sent.source) != grid.node_of(sent.target)
        counted[key] = (inside, across + num_bytes) if crosses else (inside + num_bytes, across)
    return counted


def small_bytes(task: Task, program: Program, sizes: CallSizes, sent: RecordedMessage) -> int:
    """Return a message's bytes of routing weights or indices."""
    slots = {slot.name: slot for slot in program.slots}
    pair = (sent.source, sent.target)
    each = ELEMENT if slots[task.reads[0]].kind is Kind.LANE else INDEX_BYTES
    return sum(
        each * rows
        for source, target, rows in messages_of(task, slots, sizes)
        if (source, target) == pair
    )


def on_loopback(grid: Grid, plan: Plan) -> Counted:
    """Run all ranks in this process, and return their total bytes."""
    return total(run_ranks(grid.world, lambda transport: run_rank(grid, plan, transport)))


def on_gloo(grid: Grid, plans: list[Plan]) -> list[Counted]:
    """Run each rank as a process, and return the total bytes of every plan."""
    per_rank = on_ranks(grid.world, _run_plans, grid, plans)
    return [total([counted[number] for counted in per_rank]) for number in range(len(plans))]


def _run_plans(grid: Grid, plans: list[Plan]) -> list[Counted]:
    transport = open_transport()
    return [run_rank(grid, plan, transport) for plan in plans]


def total(per_rank: list[Counted]) -> Counted:
    """Return the sum of the ranks' bytes."""
    keys = sorted({key for counted in per_rank for key in counted})
    return {
        key: tuple(sum(c.get(key, (0, 0))[i] for c in per_rank) for i in (0, 1))  # type: ignore[misc]
        for key in keys
    }


def formulas(grid: Grid, plan: Plan) -> Counted | None:
    """Return the forward bytes of every movement of rows by the papers' formulas, over all ranks;
    None if there is no formula.

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
    to_all = (s * n / m * local / p - n / m / p, s * n / m * across)
    over_ep = (n / m * inside, n / m * across)
    gather = (
        {"y": ((m - 1) * TOKENS / m, 0)}
        if plan.schedule == "s1"
        else {"z_full": ((m - 1) * n / m, 0)}
    )
    rows: dict[str, tuple[float, float]] = {}
    # every rank gathers all weights except its own share: 3 matrices of HIDDEN x DIM
    if plan.gather_weights == 0:
        shard = 3 * EXPERTS * HIDDEN / (p * s)
        rows = {"w_full": (shard * (local * s - 1), shard * (p - local) * s), **gather}
    elif plan.gather_weights == 1:
        # a token visits one rank of an expert, and the ranks of etp gather the shards
        rows = {
            "h": over_ep,
            "z": over_ep,
            "w_full": (3 * EXPERTS * HIDDEN / (p * s) * (s - 1), 0),
            **gather,
        }
    elif plan.crossing is Crossing.MULTICAST:
        rows = multicast_formulas(grid, plan, local)
    elif plan.schedule in ("s1", "s2"):
        rows = {"h": hops(plan, grid, to_all), "z": hops(plan, grid, to_all), **gather}
    elif plan.schedule == "s3":
        shards = ((s - 1) * n / m, 0)
        moved = hops(plan, grid, over_ep)
        rows = {"arrived": moved, "h": shards, "reduced": shards, "z": moved, **gather}
    elif plan.schedule == "ted":
        once = (n * inside, n * across)
        reduce = (2 * (s - 1) / s * n, 0)
        rows = {"h_same": once, "summed": reduce, "back": once}
    elif plan.schedule != "baseline":
        return None
    else:
        wide = (s * n * inside, s * n * across)
        reduce = (2 * (s - 1) / s * s * n, 0)
        rows = {"x_wide": ((s - 1) * TOKENS, 0), "h": wide, "summed": reduce, "back": wide}
    scale = grid.world * DIM * ELEMENT
    return {
        f"forward {name}": (round(a * scale), round(b * scale)) for name, (a, b) in rows.items()
    }


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
    of_group = (grid.ranks_per_node or grid.world) // (1 if over_etp else grid.etp)
    moved = across * (1 - 1 / of_group)
    if plan.all_to_all in ("hier2d", "naive", "hier3d"):  # with two nodes the third level is empty
        return inside + moved, across
    if plan.all_to_all == "hier1d":
        return inside + 2 * moved, across
    if plan.all_to_all not in ("linear", "pipelined"):
        group: tuple[Axis, ...] = ("ep", "etp") if over_etp else ("ep",)
        (a, b), (c, d) = mean_legs(grid, plan.all_to_all, group)
        return inside * a + across * c, inside * b + across * d
    return inside, across


def mean_legs(grid: Grid, link: str, group: tuple[Axis, ...]) -> list[tuple[float, float]]:
    """Return the mean legs (inside, across nodes) of a packet that stays on its node, and of one
    that crosses nodes."""
    by_crossing: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for ranks in {grid.group(rank, group) for rank in range(grid.world)}:
        places = NodeMap(grid, ranks)
        for source, target in itertools.permutations(ranks, 2):
            crosses = [
                grid.node_of(leg.source) != grid.node_of(leg.target)
                for leg in ALL_TO_ALLS[link].path(places, source, target)
            ]
            by_crossing[grid.node_of(source) != grid.node_of(target)].append(
                (len(crosses) - sum(crosses), sum(crosses))
            )
    return [
        (sum(a for a, _ in legs) / max(len(legs), 1), sum(b for _, b in legs) / max(len(legs), 1))
        for legs in by_crossing.values()
    ]


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
    expected = formulas(grid, plan)
    forward: Counted = {}
    for key, (inside, across) in counted.items():
        if key.startswith("forward"):
            name = key.split("/")[0]
            before = forward.get(name, (0, 0))
            forward[name] = (before[0] + inside, before[1] + across)
    wrong = [
        (
            f"{key.split()[1]} sends {forward.get(key, (0, 0))}, the formula says "
            f"{expected.get(key, (0, 0))}"
        )
        for key in sorted(set(forward) | set(expected or ()))
        if expected is not None and forward.get(key, (0, 0)) != expected.get(key, (0, 0))
    ]
    sums = {
        d: [sum(c[i] for k, c in counted.items() if k.startswith(d)) for i in (0, 1)]
        for d in ("forward", "backward")
    }
    return {
        "transport": transport_name,
        "ranks": grid.world,
        "schedule": plan.schedule
        + ("" if plan.gather_weights is None else f", r={plan.gather_weights}"),
        "all_to_all": plan.all_to_all,
        **{
            f"{way}_{where}_bytes": num
            for way, of in sums.items()
            for where, num in zip(("inside", "across"), of)
        },
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
        per_plan = (
            [on_loopback(grid, plan) for plan in PLANS]
            if transport_name == "loopback"
            else on_gloo(grid, list(PLANS))
        )
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
