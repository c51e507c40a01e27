"""How long one simulation of a layer takes, forward and backward, at sizes that nobody owns.

One process, one thread. Cold: a new simulator, nothing cached. Warm: the same one again, as a planner uses it. Programs are
compiled once, on one replica of the experts: they are the same at any world size.

    python -m moesaic_lab.simulator --json benchmarks/results/simulator.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload
from moesaic.plan import Plan, compile_plan
from moesaic.program.grid import Grid
from moesaic_lab.claims import Claim, Measurement

COLD, WARM = 9, 30
"""Repeats."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to write."""

    json: str | None = None
    """Write the results there; "-" for standard output."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer on a mesh."""

    world: int
    plan: Plan
    tp: int
    ep: int
    etp: int


CASES = (
    Case(world=32, plan=Plan(schedule="s2", chunks=2, all_to_all="hier2d"), tp=2, ep=16, etp=2),
    Case(world=2048, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=256, etp=8),
    Case(world=2048, plan=Plan(chunks=4, all_to_all="hier2d"), tp=1, ep=2048, etp=1),
    Case(world=131_072, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=64, etp=8),
    Case(world=131_072, plan=Plan(schedule="s2", chunks=4, all_to_all="multicast"), tp=8, ep=1024, etp=4),
)


def main() -> None:
    """Measure, print, write."""
    options = tyro.cli(Options, description=__doc__)
    rows = [measure(case) for case in CASES]
    Console(stderr=True).print(table(rows))
    worst = {world: max(row["cold_seconds"] for row in rows if row["ranks"] == world) for world in (2048, 131_072)}
    claims = [
        Claim(name="model.simulate_2048_seconds", value=worst[2048], unit="s", target=1, op="<="),
        Claim(name="model.simulate_100k_seconds", value=worst[131_072], unit="s", target=10, op="<="),
    ]
    measurement = Measurement(rows=rows, claims=claims, notes=__doc__.splitlines()[0], packages=("numpy",))
    if options.json:
        measurement.write(options.json)


def measure(case: Case) -> dict[str, Any]:
    """Return one line of the table; seconds are medians, the slower case of a world makes the claim."""
    cluster = read_cluster("dgx-h100", nodes=case.world // 8)
    replica = Grid(world=max(8, case.ep * case.etp), tp=case.tp, ep=case.ep, etp=case.etp, ranks_per_node=8)
    grid = Grid(world=case.world, tp=case.tp, ep=case.ep, etp=case.etp, ranks_per_node=8)
    layer = Workload(tokens=4096, num_experts=max(case.ep, 64), top_k=2, dim=4096, hidden=4096)
    compiled = compile_plan(case.plan, replica)

    def simulate(simulator: Simulator) -> None:
        simulator.run(compiled.forward, layer, grid)
        simulator.run(compiled.backward, layer, grid)

    warm = Simulator(cluster)
    simulate(warm)
    cold_seconds = seconds(lambda: simulate(Simulator(cluster)), COLD)
    warm_seconds = seconds(lambda: simulate(warm), WARM)
    return {
        "ranks": case.world,
        "mesh": f"tp {case.tp}, ep {case.ep}, etp {case.etp}",
        "plan": f"{case.plan.schedule}, {case.plan.all_to_all}, {case.plan.chunks} chunks",
        "tasks": len(compiled.forward.tasks) + len(compiled.backward.tasks),
        "cold_seconds": statistics.median(cold_seconds),
        "cold_range": f"{min(cold_seconds):.3g}-{max(cold_seconds):.3g}",
        "warm_seconds": statistics.median(warm_seconds),
        "warm_range": f"{min(warm_seconds):.3g}-{max(warm_seconds):.3g}",
    }


def seconds(run: Callable[[], None], repeats: int) -> list[float]:
    """Return the seconds of each repeat."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows for the terminal."""
    shown = Table(title="one layer, forward and backward")
    for key in rows[0]:
        shown.add_column(key)
    for row in rows:
        shown.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    return shown


if __name__ == "__main__":
    main()
