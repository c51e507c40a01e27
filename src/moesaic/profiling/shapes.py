"""The layers that `moesaic profile` calibrates the host on: small shapes, every kind of task; never those of a benchmark."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.program.grid import Grid

EXPERTS_PER_RANK = 2
SHAPES = ((32, 32, 1), (256, 32, 4), (256, 1024, 1))
"""dim, hidden, tokens per rank and expert: little of everything; wide rows; heavy weights."""
PLANS = (
    Plan(),
    Plan(chunks=4),
    Plan(chunks=2, all_to_all="hier2d"),
    Plan(chunks=4, all_to_all="naive"),
    Plan(schedule="baseline", all_to_all="pipelined"),
    Plan(schedule="baseline", chunks=2),
    Plan(schedule="s2", all_to_all="hier1d"),
    Plan(schedule="s2", chunks=4, all_to_all="pipelined"),
    Plan(schedule="s3", chunks=2, all_to_all="hier3d"),
    Plan(all_to_all="multicast", chunks=2),
)
"""Kinds of tasks in different proportions; those that do not fit a mesh are left out."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One layer under one plan."""

    name: str
    """Shown where it fails."""
    compiled: Compiled
    mesh: Grid
    """On which the layer is spread; the plan's own may factor etp."""
    workload: Workload

    @property
    def tokens(self) -> int:
        """Of a tensor group."""
        return self.workload.tokens


def calibrations(world: int, ranks_per_node: int) -> Iterator[Calibration]:
    """Yield the layers for a number of ranks, shape by shape."""
    num_experts = EXPERTS_PER_RANK * world
    for (dim, hidden, each), grid in itertools.product(SHAPES, _grids(world, ranks_per_node)):
        workload = Workload(
            tokens=each * num_experts * grid.tp, num_experts=num_experts, top_k=min(2, num_experts), dim=dim, hidden=hidden,
            matrices=2, dtype="fp32",
        )  # fmt: skip
        seen: set[bytes] = set()
        for plan in PLANS:
            try:
                compiled = compile_plan(plan, grid)
            except InputError:
                continue
            if compiled.digest not in seen:
                seen.add(compiled.digest)
                name = f"tp {grid.tp}, etp {grid.etp}, dim {dim}, hidden {hidden}, {plan}"
                yield Calibration(name=name, compiled=compiled, mesh=grid, workload=workload)


def _grids(world: int, ranks_per_node: int) -> list[Grid]:
    if world % 2:
        return [Grid(world=world, ep=world, ranks_per_node=ranks_per_node)]
    return [
        Grid(world=world, tp=2, ep=world, ranks_per_node=ranks_per_node),
        Grid(world=world, ep=world // 2, etp=2, ranks_per_node=ranks_per_node),
    ]
