"""Layouts: the meshes that a job fits on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.plan.compile import Compiled, compile_plan, durations_on
from moesaic.plan.model import Job
from moesaic.plan.plan import Plan
from moesaic.program.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Sizes of axes that a search must keep; None leaves one free."""

    tp: int | None = None
    """Tensor parallelism; free, it stays inside nodes."""
    ep: int | None = None
    """Expert parallelism."""
    etp: int | None = None
    """Expert tensor parallelism."""
    innermost: Literal["etp", "ep"] | None = None
    """Which of etp and ep has consecutive ranks."""


def layouts(job: Job, cluster: ClusterSpec, pins: Pins = Pins()) -> list[Grid]:
    """Return the meshes of all of a cluster's devices that a job fits on; pipeline stages are not among them.

    Raises:
        InputError: if there is none; the line names what refused the last.
    """
    found, refusal = [], ""
    for grid in _grids(cluster, pins):
        wrong = _refusal(job, grid)
        if wrong:
            refusal = wrong
        else:
            found.append(grid)
    if not found:
        why = f": the last one, {name_of(grid)}: {refusal}" if refusal else _undivided(cluster.world, pins)
        raise InputError(f"the search space holds no layout of {cluster.world} ranks{why}")
    return found


def _undivided(world: int, pins: Pins) -> str:
    """Return which sizes that must be kept do not divide the ranks."""
    given = {name: size for name in ("tp", "ep", "etp") if (size := getattr(pins, name)) is not None}
    alone = [name for name, size in given.items() if world % size]
    wrong = alone or [name for name in given if name != "tp"]
    said = " x ".join(f"{name} {given[name]}" for name in wrong)
    flags = " and ".join(f"--{name}" for name in wrong)
    return f": {said} does not divide them: choose a divisor, or leave {flags} out and every size is tried"


def name_of(grid: Grid) -> str:
    """Return a layout in a few words."""
    inner = ", ep innermost" if grid.innermost == "ep" else ""
    return f"tp {grid.tp}, ep {grid.ep}, etp {grid.etp}{inner}"


def _grids(cluster: ClusterSpec, pins: Pins) -> Iterator[Grid]:
    world = cluster.world
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    for tp in [size for size in sizes if size <= cluster.devices_per_node] if pins.tp is None else [pins.tp]:
        for ep in sizes if pins.ep is None else [pins.ep]:
            for etp in sizes if pins.etp is None else [pins.etp]:
                if world % tp or world % (ep * etp):
                    continue
                orders: tuple[Literal["etp", "ep"], ...] = ("etp", "ep") if ep > 1 and etp > 1 else ("etp",)
                for innermost in orders if pins.innermost is None else (pins.innermost,):
                    per_node = cluster.devices_per_node
                    yield Grid(world=world, tp=tp, ep=ep, etp=etp, innermost=innermost, ranks_per_node=per_node)


def _refusal(job: Job, grid: Grid) -> str:
    """Return why a job does not fit a mesh; "" if it does."""
    model = job.model
    wanted = [
        ("mesh.tp", grid.tp, "model.num_heads", model.num_heads),
        ("mesh.ep", grid.ep, "model.moe.num_experts", model.moe.num_experts),
        ("mesh.etp", grid.etp, "model.moe.hidden", model.moe.hidden),
        ("the data-parallel groups, ", grid.dp, "batch_size", job.batch_size),
    ]
    if job.dense_layers:
        wanted.append(("mesh.tp", grid.tp, "the dense layers' inner width", job.active_hidden))
    for axis, ranks, name, size in wanted:
        if size % ranks:
            return f"{axis}={ranks} does not divide {name}={size}".replace(", =", ", ")
    return ""


def compile_on(plan: Plan, grid: Grid, simulator: Simulator, layer: Workload) -> Compiled:
    """Return a plan's programs for a layer on a mesh of a simulator's devices."""
    on_cpu = simulator.cluster.host.runs_compute
    return compile_plan(plan, grid, durations=durations_on(simulator, layer), host_runs_compute=on_cpu)
