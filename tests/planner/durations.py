"""The seconds of single tasks."""

from __future__ import annotations

from moesaic.planner.compute import compute_seconds
from moesaic.planner.movement import movements_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.program.grid import Grid
from moesaic.program.sizes import CallSizes
from moesaic.program.task import Program


def durations(
    simulator: Simulator,
    program: Program,
    workload: Workload,
    grid: Grid,
    sizes: CallSizes | None = None,
) -> dict[str, float]:
    """Return the seconds of every task by name, on its slowest rank, if nothing else uses its
    links; arguments as of `Simulator.run`."""
    volumes = simulator.volumes(program, workload, grid, sizes=sizes)
    slots = {slot.name: slot for slot in program.slots}
    rates = simulator.rates_of(workload.products or workload.dtype)
    found = {}
    for task, movements in zip(program.tasks, movements_of(program, volumes)):
        computing = float(compute_seconds(task, slots, volumes, rates).max())
        # `alone`: the seconds of a movement if nothing else uses its links
        moving = max((movement.load.alone for movement in movements), default=0.0)
        found[task.name] = computing + moving
    return found
