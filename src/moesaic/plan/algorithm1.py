"""Parm's Algorithm 1, which picks S1 or S2 for a layer: as published, and with its errors corrected.

Yin et al. (INFOCOM 2024), section V. Both need the start-up and rate of three operations. A profile has them measured, for
groups that are whole nodes or all ranks; elsewhere they come from the simulated cluster, so that only the algorithm differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moesaic.cost.cluster import ELEMENT_BYTES
from moesaic.cost.fit import Fit
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload
from moesaic.plan.compile import compile_plan
from moesaic.plan.plan import Plan
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import Kind, Lane, Op, Stage

CHOICES = {"s1": Plan(schedule="s1"), "s2": Plan(schedule="s2", overlap_gather=True)}
"""What it chooses between: S2 has its last all-to-all and all-gather overlapped (SAA)."""
SMALL, LARGE = 1024, 4096
"""Tokens of the two layers through whose times the lines go."""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What Algorithm 1 knows of a cluster: lines over elements, whose `beta` is in seconds per element."""

    all_to_all: Fit
    """Over the elements that a rank puts in."""
    gather: Fit
    """MP-AllGather, over the elements of its output."""
    overlapped: Fit
    """SAA: the second all-to-all with the gather behind it, over the elements that a rank puts in."""


def published(operations: Operations, layer: Workload, m: int, s: int) -> str:
    """Return "s1" or "s2" by Algorithm 1 as printed.

    Line 2's T already holds the width M, and line 3, y = E T M N_ESP, multiplies by it again; line 5 takes the overlapped
    operation of y, not of y / m (errata P1 and P3).
    """
    per_expert = layer.copies / layer.num_experts * layer.dim
    y = layer.num_experts * per_expert * layer.dim * s
    return _faster(operations, layer, y / m, y)


def corrected(operations: Operations, layer: Workload, m: int, s: int) -> str:
    """Return "s1" or "s2" by the closed forms: y = s E C M, everything of y / m."""
    y = s * layer.copies * layer.dim
    return _faster(operations, layer, y / m, y / m)


def _faster(operations: Operations, layer: Workload, entered: float, overlapped: float) -> str:
    """Return the schedule of less time, for so many elements of an all-to-all, and of the overlapped one."""
    first = 2 * operations.all_to_all.seconds(entered) + operations.gather.seconds(layer.tokens * layer.dim)
    second = operations.all_to_all.seconds(entered) + operations.overlapped.seconds(overlapped)
    return "s1" if first <= second else "s2"


RULES: dict[str, Callable[[Operations, Workload, int, int], str]] = {"parm_printed": published, "parm": corrected}
"""Both, by the names that a run's `planner.plan` has for them."""


def choose(rule: str, simulator: Simulator, layer: Workload, grid: Grid) -> Plan:
    """Return the plan that a rule takes for a layer.

    Args:
        rule: a key of `RULES`.
        simulator: of the cluster.
        layer: of the run, on one rank.
        grid: the mesh.
    """
    found = measured_operations(simulator.timing.collectives, grid, layer.dtype) or operations(
        simulator, grid, layer.top_k, layer.dtype, layer.capacity_factor
    )
    return CHOICES[RULES[rule](found, layer, grid.tp, grid.etp)]


def measured_operations(collectives: Mapping[str, Fit], grid: Grid, dtype: str) -> Operations | None:
    """Return the three lines as a profile has them; None where it has none for groups of these ranks.

    Args:
        collectives: lines by what was measured, as `ClusterProfile.collectives`.
        grid: the mesh; the profile's are those of whole nodes, of one rank per node, and of all ranks.
        dtype: of rows.
    """
    entered, held = (_span(grid, axes) for axes in (("ep", "etp"), ("tp",)))
    names = (f"all_to_all {entered}", f"all_gather {held}", f"saa {entered}")
    if held != "inside" or any(name not in collectives for name in names):
        return None
    lines = (replace(collectives[name], beta=collectives[name].beta * ELEMENT_BYTES[dtype]) for name in names)
    return Operations(**dict(zip(("all_to_all", "gather", "overlapped"), lines)))


def _span(grid: Grid, axes: tuple[Axis, ...]) -> str:
    """Return what the group of rank 0 spans, in the words of a profile; "" for none of these."""
    group, per_node = grid.group(0, axes), grid.ranks_per_node or grid.world
    known = {
        tuple(range(per_node)): "inside",
        tuple(range(0, grid.world, per_node)): "outside",
        tuple(range(grid.world)): "everywhere",
    }
    return known.get(group, "")


def operations(
    simulator: Simulator, grid: Grid, top_k: int, dtype: str = "fp32", capacity_factor: float = 1.2
) -> Operations:
    """Return the three lines on a cluster, each through two sizes, forward.

    Args:
        simulator: of the cluster.
        grid: the mesh.
        top_k: experts per token.
        dtype: of rows.
        capacity_factor: rows per expert over the mean.
    """
    layer = Workload(
        tokens=LARGE, num_experts=grid.ep, top_k=min(top_k, grid.ep), dim=4096, hidden=1024, matrices=2,
        dtype=dtype, capacity_factor=capacity_factor,  # type: ignore[arg-type]
    )  # fmt: skip
    small, large = ((each, _spans(simulator, grid, each)) for each in (replace(layer, tokens=SMALL), layer))

    def line(name: str, elements: Callable[[Workload], float]) -> Fit:
        (x0, t0), (x1, t1) = ((elements(layer), spans[name]) for layer, spans in (small, large))
        slope = (t1 - t0) / (x1 - x0)
        return Fit(alpha=max(t0 - slope * x0, 0.0), beta=slope)

    def entered(layer: Workload) -> float:
        return grid.etp * layer.copies * layer.dim / grid.tp

    return Operations(
        all_to_all=line("all_to_all", entered),
        gather=line("gather", lambda layer: layer.tokens * layer.dim),
        overlapped=line("overlapped", entered),
    )


def _spans(simulator: Simulator, grid: Grid, layer: Workload) -> dict[str, float]:
    """Return the seconds of the three operations in one layer."""
    one, two = (compile_plan(plan, grid) for plan in CHOICES.values())
    volumes = simulator.volumes(one.forward, layer, one.grid)
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
    run = simulator.run(two.forward, layer, two.grid)
    tail = [
        span
        for span in run.timeline.spans
        if span.stage is Stage.COMBINE and span.lane in (Lane.INTER, Lane.INTRA) and span.end > span.start
    ]
    found["overlapped"] = max((span.end for span in tail), default=0.0) - min(
        (span.start for span in tail), default=0.0
    )
    return found
