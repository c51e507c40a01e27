"""Times the simulator: how long it takes to compile and simulate a layer, forward and backward, on
very large clusters.

One process, one thread. Cold: the plan is compiled on the whole mesh and simulated, with empty
caches. Warm: simulated again, as in a planner's search. Under even routing, one rank is simulated
for all. If each group has its own loads, every rank is simulated.

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
from moesaic.planner.cluster import read_cluster
from moesaic.planner.loads import simulate_counts
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload, dirichlet_counts
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.program.plan import Plan
from moesaic_lab.benchmark import Benchmark, BenchmarkOptions, Shown, Told, summary_of
from moesaic_lab.claims import Claim
from moesaic_lab.ledger.records import read_published

COLD = 9
WARM = 30
"""Numbers of cold and of warm repeats."""
PLANNED = 64
"""Number of devices of the plan search."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCase:
    """A plan of a layer on a mesh."""

    world: int
    plan: Plan
    tp: int
    ep: int
    etp: int


CASES = (
    SimulatedCase(
        world=32, plan=Plan(schedule="s2", chunks=2, all_to_all="hier2d"), tp=2, ep=16, etp=2
    ),
    SimulatedCase(
        world=2048, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=256, etp=8
    ),
    SimulatedCase(world=2048, plan=Plan(chunks=4, all_to_all="hier2d"), tp=1, ep=2048, etp=1),
    SimulatedCase(
        world=131_072, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=64, etp=8
    ),
    SimulatedCase(
        world=131_072,
        plan=Plan(schedule="s2", chunks=4, all_to_all="multicast"),
        tp=8,
        ep=1024,
        etp=4,
    ),
)


SKEWED = SimulatedCase(
    world=4096, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d"), tp=8, ep=64, etp=8
)
"""Simulated rank by rank, since each data-parallel group prefers other experts."""
CONCENTRATION = 0.3
"""Dirichlet concentration of each group's shares of the experts: the busiest of its 64 experts has
about 9 times the mean."""


def whole(case: SimulatedCase) -> Compiled:
    """Return a case's plan compiled for the whole mesh, as a user compiles it."""
    return compile_plan(
        case.plan, Grid(world=case.world, tp=case.tp, ep=case.ep, etp=case.etp, ranks_per_node=8)
    )


def layer_of(case: SimulatedCase) -> Workload:
    """Return the workload of a case."""
    return Workload(tokens=4096, num_experts=max(case.ep, 64), top_k=2, dim=4096, hidden=4096)


def simulator_of(case: SimulatedCase) -> Simulator:
    """Return a simulator with empty caches, of as many H100s as the case has ranks."""
    return Simulator(read_cluster("dgx-h100", nodes=case.world // 8))


def simulate(simulator: Simulator, case: SimulatedCase, compiled: Compiled) -> None:
    """Simulate forward and backward under even routing."""
    simulator.run(compiled.forward, layer_of(case), compiled.grid)
    simulator.run(compiled.backward, layer_of(case), compiled.grid)


def simulate_skewed(case: SimulatedCase) -> None:
    """Compile a case, and simulate both passes where each group prefers other experts."""
    layer = layer_of(case)
    counts = dirichlet_counts(case.world // case.tp, layer, concentration=CONCENTRATION, seed=0)
    simulate_counts(simulator_of(case), whole(case), layer, counts)


def measure(case: SimulatedCase) -> dict[str, Any]:
    """Return a row of the table, with median seconds."""
    warm = simulator_of(case)
    compiled = whole(case)
    simulate(warm, case, compiled)  # fills the caches
    cold_seconds = seconds(lambda: simulate(simulator_of(case), case, whole(case)), COLD)
    warm_seconds = seconds(lambda: simulate(warm, case, compiled), WARM)
    return _line(case, compiled, "even", cold_seconds, warm_seconds)


def measure_skewed(case: SimulatedCase) -> dict[str, Any]:
    """Return the row of a case with uneven loads."""
    times = seconds(lambda: simulate_skewed(case), 1)
    return _line(case, whole(case), "each group's own", times, times)


def _line(
    case: SimulatedCase,
    compiled: Compiled,
    loads: str,
    cold_seconds: list[float],
    warm_seconds: list[float],
) -> dict[str, Any]:
    """Return the row of a case."""
    return {
        "ranks": case.world,
        "mesh": f"tp {case.tp}, ep {case.ep}, etp {case.etp}",
        "plan": f"{case.plan.schedule}, {case.plan.all_to_all}, {case.plan.chunks} chunks",
        "loads": loads,
        "tasks": len(compiled.forward.tasks) + len(compiled.backward.tasks),
        "cold_seconds": statistics.median(cold_seconds),
        "cold_range": f"{min(cold_seconds):.3g}-{max(cold_seconds):.3g}",
        "warm_seconds": statistics.median(warm_seconds),
        "warm_range": f"{min(warm_seconds):.3g}-{max(warm_seconds):.3g}",
    }


def seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each repeat of `run`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def measure_plan(model: str, devices: int) -> dict[str, Any]:
    """Return a row with the time of `moesaic plan` for a model of the Hugging Face hub on H100s,
    including its output."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(read_published()["model"][model]), encoding="utf-8")
        arguments = [
            "--model",
            str(config),
            "--cluster",
            "dgx-h100",
            "--gpus",
            str(devices),
            "--json",
        ]
        with redirect_stdout(StringIO()) as text:
            times = seconds(lambda: plan.run(arguments), 1)
    best = json.loads(text.getvalue())["ranking"][0]
    return {
        "ranks": devices,
        "mesh": f"searched for {model}",
        "plan": f"ep {best['mesh']['ep']}, {best['plan']['all_to_all']}",
        "loads": "even",
        "tasks": 0,  # a search has no single program; it is timed once, so has no range
        "cold_seconds": times[0],
        "cold_range": "",
        "warm_seconds": times[0],
        "warm_range": "",
    }


def measure_all(
    options: BenchmarkOptions, cases: tuple[SimulatedCase, ...], told: Told
) -> list[dict[str, Any]]:
    """Measure all cases, one with uneven loads, and a whole plan search."""
    return [
        *(measure(case) for case in cases),
        measure_skewed(SKEWED),
        measure_plan("mixtral-8x7b", PLANNED),
    ]


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the slowest cold time for each number of ranks, including compilation."""
    worst: dict[int, float] = {}
    for row in rows:
        worst[row["ranks"]] = max(worst.get(row["ranks"], 0.0), row["cold_seconds"])
    return [
        Claim(name=name, value=worst[world], unit="s", target=target)
        for name, world, target in (
            ("plan.seconds_64", PLANNED, 10),
            ("model.simulate_2048_seconds", 2048, 1),
            ("model.simulate_100k_seconds", 131_072, 1),
            ("model.simulate_skewed_4096_seconds", SKEWED.world, 30),
        )
    ]


BENCHMARK = Benchmark(
    name="simulator",
    description="Measure how long the simulator takes.",
    options=BenchmarkOptions,
    notes=summary_of(__doc__),
    cases=lambda options: CASES,
    measure=measure_all,
    claims=claims,
    columns=(Shown(title="one layer, forward and backward"),),
    packages=("numpy",),
)
