"""What one decision of the arbiter keeps a rank from going on, at a number of ranks and experts, on loads that drift.

No ranks are needed: all decide alike, from the same counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts
from moesaic.balance.selector.arbiter import Arbiter
from moesaic.cost.cluster import read_cluster
from moesaic.plan.plan import Plan
from moesaic.program.grid import Grid
from moesaic_lab.balance.simulated import machine_of

SKEW, PERSISTENCE, COPIES, BEGIN = 0.6, 0.999, 8192, 8
"""Exponent of Zipf's law, correlation of what makes experts popular from call to call, copies of a rank, and calls before
anything counts. 2 % of the copies change their expert from call to call."""
RATIO = 1.05
"""Measured over modelled seconds that the arbiter is told of every call."""


@dataclass(frozen=True, kw_only=True)
class TimedDecision:
    """One call's decision."""

    ranks: int
    experts: int
    seconds: float
    """In the way of the call."""
    weighing_seconds: float
    """Beside it, on a thread: processor time."""
    replicates: bool


def decisions(ranks: int = 64, experts: int = 256, calls: int = 120, seed: int = 0) -> list[TimedDecision]:
    """Return the decisions of calls that follow each other, on `dgx-h100`."""
    grid = Grid(world=ranks, ep=ranks, ranks_per_node=8)
    spec, plan = read_cluster("dgx-h100", nodes=ranks // 8), Plan(replication="arbiter")
    arbiter = Arbiter(costs=ReplicationCosts(machine=machine_of(spec, "bf16"), cluster=spec))
    arbitration = arbiter.start(plan, list(arbiter.option_plans(plan, grid)))
    found = []
    for number, copies in enumerate(_drifting(ranks, experts, calls, seed), start=1):
        load = CallLoad(grid, copies, experts, 1024, 2048)
        started = time.perf_counter()
        pick = arbitration.pick(load)
        seconds = time.perf_counter() - started
        verdict = arbitration.weigh(pick, call=number)
        arbitration.hear({number: RATIO * verdict.seconds[verdict.option]})
        if number > BEGIN:
            found.append(
                TimedDecision(
                    ranks=ranks, experts=experts, seconds=seconds, weighing_seconds=verdict.weighing_seconds,
                    replicates=pick.table is not None,
                )
            )  # fmt: skip
    return found


def _drifting(ranks: int, experts: int, calls: int, seed: int) -> Sequence[np.ndarray]:
    """Return the copies that each rank has for each expert, (ranks, experts) int64 for each call."""
    rng = np.random.default_rng(seed)
    lasting, found = rng.normal(size=experts), []
    for _ in range(calls):
        mixed = np.sqrt(PERSISTENCE) * lasting + np.sqrt(1 - PERSISTENCE) * rng.normal(size=experts)
        shares = (1.0 + np.argsort(np.argsort(-mixed))) ** -SKEW
        found.append(rng.multinomial(COPIES, shares / shares.sum(), size=ranks))
    return found
