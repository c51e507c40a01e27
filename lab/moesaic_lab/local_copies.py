"""Rows that a plan moves inside a device, per token and direction: what its movements cost besides
messages and products.

A layer runs forward and backward on loopback ranks. Every operator that only moves rows is counted
by the bytes that it writes, outside the experts' kernels and the messages. The unit is one row of
the layer's width. Sums of a token's rows are not counted: the layer on one device makes them too.

    moesaic bench local_copies --json benchmarks/results/local_copies.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, summary_of
from moesaic_lab.claims import Claim
from moesaic_lab.schedules import EvenRouter

DIM = 64
HIDDEN = 32
EXPERTS = 8
TOP_K = 2
TOKENS = 128
PARTS = ("index_copy_", "index_put_", "scatter_")
MOVES = ("index_select", "cat", "copy_", "_foreach_copy_", "clone", *PARTS)
"""Names of the operators that only move; those of `PARTS` write their last argument into a part of
the first."""
NODES = Grid(world=4, ep=4, ranks_per_node=2)
CASES: dict[str, tuple[Grid, Plan, tuple[float, float]]] = {
    "one_rank": (Grid(world=1), Plan(), (2.36, 2.0)),
    "ep4": (NODES, Plan(), (9.51, 9.14)),
    "ep4_chunks": (NODES, Plan(chunks=2), (13.57, 13.2)),
    "ep4_hier2d": (NODES, Plan(all_to_all="hier2d"), (12.47, 12.1)),
    "ep4_multicast": (NODES, Plan(all_to_all="multicast"), (12.12, 11.29)),
    "tp2_ep2_etp2": (Grid(world=4, tp=2, ep=2, etp=2), Plan(schedule="s2"), (15.97, 18.28)),
}
"""The mesh, the plan, and the rows per token forward and backward when every movement put its rows
in order."""


class CountedMoves(TorchDispatchMode):
    """Counts the bytes that operators of `MOVES` write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; if it moves, add the bytes that it writes."""
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in PARTS:
            self.num_bytes += args[-1].nbytes
        elif name in ("cat", "_foreach_copy_"):
            self.num_bytes += sum(each.nbytes for each in args[0])  # a list of tensors
        elif name in MOVES:
            self.num_bytes += result.nbytes
        return result


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one whose operators no mode sees."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def run_rank(grid: Grid, plan: Plan, transport: AbstractTransport) -> tuple[float, float]:
    """Run a layer on one rank; return the rows that it moves, forward and backward, per token of
    the rank."""
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN, EXPERTS, TOP_K, router=EvenRouter, losses=())
    layer.parallelize(Mesh(grid, transport), plan)

    # Products and messages are not counted.
    for owner, name in (
        (layer.experts, "run"),
        (layer.experts, "gradients"),
        (transport, "issue"),
        (transport, "wait"),
    ):
        setattr(owner, name, unseen(getattr(owner, name)))

    x = torch.randn(TOKENS, DIM, requires_grad=True)
    route: Any = partial(layer, x, token_ids=torch.arange(TOKENS))
    route()  # makes what later calls reuse
    with CountedMoves() as forward:
        y = route()
    with CountedMoves() as backward:
        y.backward(torch.ones_like(y))
    row_of_each_token = DIM * x.element_size() * TOKENS
    return forward.num_bytes / row_of_each_token, backward.num_bytes / row_of_each_token


def measure(options: BenchmarkOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Count every case, on all of its ranks."""
    rows = []
    for name, (grid, plan, before) in CASES.items():
        told(name)
        by_rank = run_ranks(grid.world, partial(run_rank, grid, plan))
        forward = [rows_forward for rows_forward, _ in by_rank]
        backward = [rows_backward for _, rows_backward in by_rank]
        counts = {"forward": forward, "backward": backward}
        for (direction, counted), old in zip(counts.items(), before):
            rows.append(
                {
                    "case": name,
                    "direction": direction,
                    "rows": sum(counted) / len(counted),
                    "before": old,
                }
            )
    return rows


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the rows per token of each case and direction; the target is nine tenths of what they
    were."""
    return [
        Claim(
            name=f"runtime.local_copies.{row['case']}.{row['direction']}",
            value=row["rows"],
            unit="rows per token",
            target=0.9 * row["before"],
        )
        for row in rows
    ]


BENCHMARK = Benchmark(
    name="local_copies",
    description="Count the rows that plans move inside a device.",
    options=BenchmarkOptions,
    notes=summary_of(__doc__),
    measure=measure,
    claims=claims,
    columns=[Shown(title="rows moved inside a device, per token")],
)
