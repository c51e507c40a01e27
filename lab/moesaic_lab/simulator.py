"""How long one simulation of a layer takes, forward and backward, at sizes that nobody owns.

One process, one thread. Cold: a new simulator, nothing cached. Warm: the same one again, as a planner uses it. Programs are
compiled once, on one replica of the experts: they are the same at any world size.

    moesaic bench simulator --json benchmarks/results/simulator.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moesaic.cli import plan
from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.program.grid import Grid
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, same
from moesaic_lab.claims import Claim
from moesaic_lab.ledger.records import read_published

COLD, WARM = 9, 30
"""Repeats."""
PLANNED = 64
"""Devices of the search."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCase:
    """A layer on a mesh."""

    world: int
    plan: Plan
    tp: int
    ep: int
    etp: int


CASES = (
    SimulatedCase(world=32, plan=Plan(schedule="s2", chunks=2, all_to_all="hier2d"), tp=2, ep=16, etp=2),
    SimulatedCase(world=2048, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=256, etp=8),
    SimulatedCase(world=2048, plan=Plan(chunks=4, all_to_all="hier2d"), tp=1, ep=2048, etp=1),
    SimulatedCase(world=131_072, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=64, etp=8),
    SimulatedCase(world=131_072, plan=Plan(schedule="s2", chunks=4, all_to_all="multicast"), tp=8, ep=1024, etp=4),
)


OF_MODEL = (
    SimulatedCase(world=2048, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=256, etp=8),
    SimulatedCase(world=2048, plan=Plan(chunks=4, all_to_all="hier2d"), tp=1, ep=2048, etp=1),
    SimulatedCase(world=100_352, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=64, etp=8),
    SimulatedCase(world=100_352, plan=Plan(schedule="s2", chunks=4, all_to_all="multicast"), tp=8, ep=1024, etp=2),
)
"""What `moesaic bench model` times, with 2048 experts."""


def simulations(
    case: SimulatedCase, num_experts: int
) -> tuple[Callable[[], Simulator], Callable[[Simulator], None], Compiled]:
    """Return what makes a new simulator for a case, what simulates the case with one, and the case's programs."""
    cluster = read_cluster("dgx-h100", nodes=case.world // 8)
    replica = Grid(world=max(8, case.ep * case.etp), tp=case.tp, ep=case.ep, etp=case.etp, ranks_per_node=8)
    grid = Grid(world=case.world, tp=case.tp, ep=case.ep, etp=case.etp, ranks_per_node=8)
    layer = Workload(tokens=4096, num_experts=num_experts, top_k=2, dim=4096, hidden=4096)
    compiled = compile_plan(case.plan, replica)

    def simulate(simulator: Simulator) -> None:
        simulator.run(compiled.forward, layer, grid)
        simulator.run(compiled.backward, layer, grid)

    return lambda: Simulator(cluster), simulate, compiled


def speeds(repeats: int = 5) -> dict[int, float]:
    """Return the seconds that one simulation takes by world, the slowest plan's; every time a new simulator, nothing kept."""
    found: dict[int, float] = {}
    for case in OF_MODEL:
        new, simulate, _ = simulations(case, num_experts=2048)
        cold = statistics.median(seconds(lambda: simulate(new()), repeats))  # noqa: B023
        found[case.world] = max(found.get(case.world, 0.0), cold)
    return found


def measure(case: SimulatedCase) -> dict[str, Any]:
    """Return one line of the table; seconds are medians, the slower case of a world makes the claim."""
    new, simulate, compiled = simulations(case, num_experts=max(case.ep, 64))
    warm = new()
    simulate(warm)
    cold_seconds = seconds(lambda: simulate(new()), COLD)
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


def seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each repeat."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def measure_plan(model: str, devices: int) -> dict[str, Any]:
    """Return how long `moesaic plan` takes for a model of the hub on H100s, its answers included, as a line of the table."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(read_published()["model"][model]), encoding="utf-8")
        arguments = ["--model", str(config), "--cluster", "dgx-h100", "--gpus", str(devices), "--json"]
        with redirect_stdout(StringIO()) as text:
            found = seconds(lambda: plan.run(arguments), 1)
    best = json.loads(text.getvalue())["ranking"][0]
    return {
        "ranks": devices, "mesh": f"searched for {model}", "plan": f"ep {best['mesh']['ep']}, {best['plan']['all_to_all']}",
        "tasks": 0, "cold_seconds": found[0], "cold_range": "", "warm_seconds": found[0], "warm_range": "",
    }  # fmt: skip


def measure_all(options: BenchmarkOptions, cases: tuple[SimulatedCase, ...], told: Told) -> list[dict[str, Any]]:
    """Measure case after case, and a whole search."""
    return [*(measure(case) for case in cases), measure_plan("mixtral-8x7b", PLANNED)]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the slower cold simulation of a world."""
    worst = {world: max(row["cold_seconds"] for row in rows if row["ranks"] == world) for world in (2048, 131_072)}
    planned = max(row["cold_seconds"] for row in rows if row["ranks"] == PLANNED)
    return [
        Claim(name="plan.seconds_64", value=planned, unit="s", target=10, op="<="),
        Claim(name="model.simulate_2048_seconds", value=worst[2048], unit="s", target=1, op="<="),
        Claim(name="model.simulate_100k_seconds", value=worst[131_072], unit="s", target=10, op="<="),
    ]


BENCHMARK = Benchmark(
    name="simulator", description="Measure how long the simulator takes.", options=BenchmarkOptions,
    notes=(__doc__ or "").splitlines()[0], cases=lambda options: CASES, measure=measure_all, rows=same, claims=claims,
    columns=(Shown(title="one layer, forward and backward"),), packages=("numpy",),
)  # fmt: skip
