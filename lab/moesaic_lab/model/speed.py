"""How long the simulator itself takes for one layer, forward and backward, at sizes that nobody here owns."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from moesaic.cost.cluster_file import read_cluster
from moesaic.cost.simulate import Simulator
from moesaic.cost.workload import Workload
from moesaic.plan import Plan, compile_plan
from moesaic.program.grid import Grid

REPEATS = 5
LAYER = Workload(tokens=4096, num_experts=2048, top_k=2, dim=4096, hidden=4096)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A mesh of many ranks, eight to a node, and a plan on it."""

    world: int
    tp: int
    ep: int
    etp: int
    plan: Plan


SIZES = (
    Size(world=2048, tp=8, ep=256, etp=8, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d")),
    Size(world=2048, tp=1, ep=2048, etp=1, plan=Plan(chunks=4, all_to_all="hier2d")),
    Size(world=100_352, tp=8, ep=64, etp=8, plan=Plan(schedule="s2", chunks=4, all_to_all="hier2d")),
    Size(world=100_352, tp=8, ep=1024, etp=2, plan=Plan(schedule="s2", chunks=4, all_to_all="multicast")),
)


def speeds(repeats: int = REPEATS) -> dict[int, float]:
    """Return the seconds that one simulation takes by world, the slowest plan's; every time a new simulator, nothing kept."""
    found: dict[int, float] = {}
    for size in SIZES:
        replica = Grid(world=max(8, size.ep * size.etp), tp=size.tp, ep=size.ep, etp=size.etp, ranks_per_node=8)
        grid = Grid(world=size.world, tp=size.tp, ep=size.ep, etp=size.etp, ranks_per_node=8)
        cluster = read_cluster("dgx-h100", nodes=size.world // 8)
        compiled = compile_plan(size.plan, replica)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            simulator = Simulator(cluster)
            for program in (compiled.forward, compiled.backward):
                simulator.run(program, LAYER, grid)
            times.append(time.perf_counter() - start)
        found[size.world] = max(found.get(size.world, 0.0), statistics.median(times))
    return found
