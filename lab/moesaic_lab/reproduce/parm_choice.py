"""Parm's Algorithm 1, which picks S1 or S2 for a layer: as published, and with its errors corrected.

Yin et al. (INFOCOM 2024), section V. Both need the start-up and rate of three operations; here they are fitted to the same
simulated cluster on which the schedules run, so that only the algorithm differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moesaic.cost.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.task import Kind, Lane, Op, Stage
from moesaic_lab.reproduce.parm import Testbed


@dataclass(frozen=True, kw_only=True)
class CostLine:
    """t = startup + per_element * elements."""

    startup: float
    """Seconds."""
    per_element: float
    """Seconds."""

    def __call__(self, elements: float) -> float:
        """Return the seconds of an operation."""
        return self.startup + self.per_element * elements


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What Algorithm 1 knows of a cluster."""

    all_to_all: CostLine
    """Over the elements that a rank puts in."""
    gather: CostLine
    """MP-AllGather, over the elements of its output."""
    overlapped: CostLine
    """SAA: the second all-to-all with the gather behind it, over the elements that a rank puts in."""


def published(operations: Operations, layer: Workload, m: int, s: int) -> str:
    """Return "s1" or "s2" by Algorithm 1 as printed.

    Line 2's T already holds the width M, and line 3, y = E T M N_ESP, multiplies by it again; line 5 takes the overlapped
    operation of y, not of y / m (errata P1 and P3).
    """
    per_expert = layer.copies / layer.num_experts * layer.dim
    y = layer.num_experts * per_expert * layer.dim * s
    first = 2 * operations.all_to_all(y / m) + operations.gather(layer.tokens * layer.dim)
    second = operations.all_to_all(y / m) + operations.overlapped(y)
    return "s1" if first <= second else "s2"


def corrected(operations: Operations, layer: Workload, m: int, s: int) -> str:
    """Return "s1" or "s2" by the closed forms of papers.md 1.5: y = s E C M, everything of y / m."""
    y = s * layer.copies * layer.dim
    first = 2 * operations.all_to_all(y / m) + operations.gather(layer.tokens * layer.dim)
    second = operations.all_to_all(y / m) + operations.overlapped(y / m)
    return "s1" if first <= second else "s2"


RULES: dict[str, Callable[[Operations, Workload, int, int], str]] = {"published": published, "corrected": corrected}
"""Both, by name."""


def operations(bed: Testbed, grid: Grid) -> Operations:
    """Return the three lines on a simulated cluster, each through two sizes, forward.

    Args:
        bed: the cluster.
        grid: the mesh.
    """
    layer = Workload(
        tokens=4096, num_experts=grid.ep, top_k=bed.top_k, dim=4096, hidden=1024, matrices=2, dtype="fp32",
        capacity_factor=1.2,
    )  # fmt: skip
    small, large = ((each, _spans(bed, grid, each)) for each in (replace(layer, tokens=1024), layer))

    def line(name: str, elements: Callable[[Workload], float]) -> CostLine:
        (x0, t0), (x1, t1) = ((elements(layer), spans[name]) for layer, spans in (small, large))
        slope = (t1 - t0) / (x1 - x0)
        return CostLine(startup=max(t0 - slope * x0, 0.0), per_element=slope)

    def entered(layer: Workload) -> float:
        return grid.etp * layer.copies * layer.dim / grid.tp

    return Operations(
        all_to_all=line("all_to_all", entered),
        gather=line("gather", lambda layer: layer.tokens * layer.dim),
        overlapped=line("overlapped", entered),
    )


def _spans(bed: Testbed, grid: Grid, layer: Workload) -> dict[str, float]:
    """Return the seconds of the three operations in one layer."""
    one, two = bed.compiled("s1", grid), bed.compiled("s2", grid)
    volumes = bed.simulator.volumes(one.forward, layer, one.grid)
    slots = {slot.name: slot for slot in one.forward.slots}
    found = {"all_to_all": 0.0, "gather": 0.0}
    for task in one.forward.tasks:
        if task.op not in (Op.MOVE, Op.HOP):
            continue
        kind = slots[(task.of or task.reads)[0]].kind
        if kind is Kind.LANE or kind is Kind.INDEX:
            continue
        seconds = sum(moved.load.alone for moved in volumes.movements(task, slots, ""))
        if kind is Kind.TOKENS:
            found["gather"] += seconds
        elif task.stage is Stage.COMBINE:
            found["all_to_all"] += seconds
    run = bed.simulator.run(two.forward, layer, two.grid)
    tail = [
        span
        for span in run.timeline.spans
        if span.stage is Stage.COMBINE and span.lane in (Lane.INTER, Lane.INTRA) and span.end > span.start
    ]
    found["overlapped"] = max(span.end for span in tail) - min(span.start for span in tail)
    return found
