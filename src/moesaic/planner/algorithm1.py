"""Parm's Algorithm 1, which picks S1 or S2 for a layer, with the errors of the printed one
corrected.

Source: Pan et al. (INFOCOM 2024). It needs the start-up time and rate of three
operations. `moesaic profile` measures them for groups that are whole nodes or all ranks. Otherwise
they come from the simulated cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moesaic.planner.cluster import ELEMENT_BYTES, Dtype
from moesaic.planner.fit import Fit
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.compile import compile_plan
from moesaic.program.grid import Axis, Grid
from moesaic.program.plan import Plan
from moesaic.program.task import Kind, Lane, Op, Stage

CHOICES = {"s1": Plan(schedule="s1"), "s2": Plan(schedule="s2", overlap_gather=True)}
"""The two plans that Algorithm 1 chooses between; S2 overlaps its last all-to-all with the
all-gather (SAA)."""
SMALL = 1024
LARGE = 4096
"""Numbers of tokens of the two layers from which each line is computed."""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The input of Algorithm 1 about a cluster: times of operations as lines; `beta` is in seconds
    per element."""

    all_to_all: Fit
    """The all-to-all, as a function of the input elements of a rank."""
    gather: Fit
    """MP-AllGather, as a function of the output elements."""
    overlapped: Fit
    """SAA, the second all-to-all overlapped with the all-gather, as a function of the input
    elements of a rank."""


def corrected(operations: Operations, layer: Workload, m: int, s: int) -> str:
    """Return "s1" or "s2" by the closed forms: y = s E C M, with every all-to-all at y / m. E C are
    the copies that a data-parallel group sends, and M is the width of a token.

    Args:
        operations: times of the operations.
        layer: the workload.
        m: size of tp.
        s: size of etp.
    """
    y = s * layer.copies * layer.dim
    return faster(operations, layer, entered=y / m, overlapped=y / m)


def faster(operations: Operations, layer: Workload, entered: float, overlapped: float) -> str:
    """Return the faster schedule.

    S1 has two all-to-alls and then gathers the tokens; S2 overlaps the second one with gathering.

    Args:
        operations: times of the operations.
        layer: the workload.
        entered: input elements of a plain all-to-all.
        overlapped: input elements of the overlapped all-to-all.
    """
    all_to_all = operations.all_to_all.seconds(entered)
    gather = operations.gather.seconds(layer.tokens * layer.dim)
    s1_seconds = 2 * all_to_all + gather
    s2_seconds = all_to_all + operations.overlapped.seconds(overlapped)
    return "s1" if s1_seconds <= s2_seconds else "s2"


def choose(simulator: Simulator, layer: Workload, grid: Grid) -> Plan:
    """Return the plan that Algorithm 1 chooses for a layer.

    Args:
        simulator: simulator of the cluster.
        layer: the workload of a rank.
        grid: the mesh.
    """
    known = measured_operations(simulator.cluster.collectives, grid, layer.dtype)
    if known is None:
        known = operations(simulator, grid, layer.top_k, layer.dtype, layer.capacity_factor)
    return CHOICES[corrected(known, layer, m=grid.tp, s=grid.etp)]


def measured_operations(collectives: Sequence[Fit], grid: Grid, dtype: str) -> Operations | None:
    """Return the operations that `moesaic profile` measured; None if it has none for the groups of
    this mesh.

    Args:
        collectives: as in `ClusterSpec`: there are lines for groups of whole nodes, of one rank per
            node, and of all ranks.
        grid: the mesh.
        dtype: dtype of rows.
    """
    expert_span = _span(grid, ("ep", "etp"))
    tp_span = _span(grid, ("tp",))
    names = (f"all_to_all {expert_span}", f"all_gather {tp_span}", f"saa {expert_span}")
    known = {line.what: line for line in collectives}
    # tp must be the ranks of whole nodes
    if tp_span != "inside" or any(name not in known for name in names):
        return None

    def per_element(name: str) -> Fit:
        """Return a measured line over elements, in place of bytes."""
        line = known[name]
        return replace(line, beta=line.beta * ELEMENT_BYTES[dtype])

    all_to_all, gather, overlapped = map(per_element, names)
    return Operations(all_to_all=all_to_all, gather=gather, overlapped=overlapped)


def _span(grid: Grid, axes: tuple[Axis, ...]) -> str:
    """Return the span of the group of rank 0 in the words of `moesaic profile`; "" if it has no
    word for it."""
    group = grid.group(0, axes)
    per_node = grid.ranks_per_node or grid.world
    known = {
        tuple(range(per_node)): "inside",
        tuple(range(0, grid.world, per_node)): "outside",
        tuple(range(grid.world)): "everywhere",
    }
    return known.get(group, "")


def operations(
    simulator: Simulator,
    grid: Grid,
    top_k: int,
    dtype: Dtype = "fp32",
    capacity_factor: float = 1.2,
) -> Operations:
    """Return the operations of a simulated cluster: lines through the forward times at two sizes.

    Args:
        simulator: simulator of the cluster.
        grid: the mesh.
        top_k: experts per token.
        dtype: dtype of rows.
        capacity_factor: rows per expert over the mean.
    """
    layer = Workload(
        tokens=LARGE,
        num_experts=grid.ep,
        top_k=min(top_k, grid.ep),
        dim=4096,
        hidden=1024,
        matrices=2,
        dtype=dtype,
        capacity_factor=capacity_factor,
    )
    small_layer = replace(layer, tokens=SMALL)
    small_seconds = _operation_seconds(simulator, grid, small_layer)
    seconds = _operation_seconds(simulator, grid, layer)

    def line(name: str, elements: Callable[[Workload], float]) -> Fit:
        """Return the straight line through the seconds of an operation in both layers, over its
        elements."""
        small_elements = elements(small_layer)
        slope = (seconds[name] - small_seconds[name]) / (elements(layer) - small_elements)
        # a start-up cost is not negative, which rounding might make it
        alpha = max(small_seconds[name] - slope * small_elements, 0.0)
        return Fit(alpha=alpha, beta=slope)

    def exchanged(layer: Workload) -> float:
        """Return the input elements of a rank in an all-to-all."""
        return grid.etp * layer.copies * layer.dim / grid.tp

    def gathered(layer: Workload) -> float:
        """Return the output elements of gathering the tokens over tp."""
        return layer.tokens * layer.dim

    return Operations(
        all_to_all=line("all_to_all", exchanged),
        gather=line("gather", gathered),
        overlapped=line("overlapped", exchanged),
    )


def _operation_seconds(simulator: Simulator, grid: Grid, layer: Workload) -> dict[str, float]:
    """Return the seconds of the three operations in the forward pass of one layer, by the fields of
    `Operations`."""
    s1 = compile_plan(CHOICES["s1"], grid)
    s2 = compile_plan(CHOICES["s2"], grid)
    volumes = simulator.volumes(s1.forward, layer, s1.grid)
    slots = {slot.name: slot for slot in s1.forward.slots}
    seconds_of = {"all_to_all": 0.0, "gather": 0.0}
    # S1: the sum of its movements, each as if nothing else used the links
    for task in s1.forward.tasks:
        if task.op not in (Op.MOVE, Op.HOP):
            continue
        # the slot that the rows come from; a hop has it in `of`, which names the slots of the
        # all-to-all that it is a step of
        source, *_ = task.of or task.reads
        kind = slots[source].kind
        if kind is Kind.LANE or kind is Kind.INDEX:
            continue  # routing weights and positions of tokens, which Parm does not count
        movements = volumes.movements(task, slots, codec="")  # rows are sent as they are
        seconds = sum(moved.load.alone for moved in movements)
        if kind is Kind.TOKENS:  # at the end of S1, over tp
            seconds_of["gather"] += seconds
        elif task.stage is Stage.COMBINE:  # the second of two equal all-to-alls
            seconds_of["all_to_all"] += seconds

    # S2: from the first start to the last end of what it moves to combine results
    run = simulator.run(s2.forward, layer, s2.grid)
    combining = [
        span
        for span in run.timeline.spans
        if span.stage is Stage.COMBINE
        and span.lane in (Lane.INTER, Lane.INTRA)
        and span.end > span.start
    ]
    start = min((span.start for span in combining), default=0.0)
    end = max((span.end for span in combining), default=0.0)
    seconds_of["overlapped"] = end - start
    return seconds_of
