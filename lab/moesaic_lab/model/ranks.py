"""The ranks' side of the model benchmark: one layer, one mesh; all plans in turn, then the fastest ones again."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from moesaic.comm.mesh import Mesh, open_transport
from moesaic.comm.transport import AbstractTransport
from moesaic.experts import ExpertsFactory
from moesaic.layer import MoE
from moesaic.plan import Compiled
from moesaic.profiling.host import BalancedRouter
from moesaic.profiling.together import hold_still, latest, start_together
from moesaic.program.grid import Grid
from moesaic_lab.across_ranks import SteppedLayer, gathered
from moesaic_lab.measure import in_turn, without_collections
from moesaic_lab.model.config import ModelCase
from moesaic_lab.virtual import Accelerator, virtual_experts


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """One case and the plans to be timed on it."""

    case: ModelCase
    grid: Grid
    """The mesh, on all ranks of the bed."""
    plans: dict[str, Compiled]
    """By name."""
    favourites: tuple[str, ...] = ()
    """Plans that are timed again whatever they take: what a model ranks first."""
    repeats: int = 3
    leaders: int = 4
    leader_repeats: int = 12
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class PlanTimes:
    """What a case took, from the first rank's start to the last one's end; seconds by plan, forward and backward."""

    screened: dict[str, tuple[float, ...]]
    """Of all plans."""
    confirmed: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Of those that were timed again, in turn with one another only."""


def layer_of(job: ModelJob, transport: AbstractTransport) -> SteppedLayer:
    """Return the layer of a case on its mesh, under the first plan."""
    case, grid = job.case, job.grid
    experts: str | ExpertsFactory = "swiglu"
    if case.compute == "virtual":
        experts = virtual_experts(Accelerator(flops_per_second=1e9 * case.gflops))
    router = partial(BalancedRouter, seed=job.seed)
    layer = MoE(case.dim, case.hidden, case.num_experts, case.top_k, router=router, experts=experts, losses=())
    layer.parallelize(Mesh(grid, transport), next(iter(job.plans.values())))
    return SteppedLayer(layer, case.tokens_per_rank * grid.tp, job.seed + grid.coordinate(transport.rank, "dp"))


def measure(job: ModelJob) -> PlanTimes:
    """Time all plans of a case, on this rank; all ranks call it together and return the same."""
    hold_still(dist.get_rank())
    torch.manual_seed(job.seed)
    runner = layer_of(job, open_transport(name="sockets"))
    steps = {name: partial(runner.step, compiled) for name, compiled in job.plans.items()}
    barrier = start_together(latest)
    for step in steps.values():  # what rows go where is worked out in a plan's first step
        step()
    with without_collections():
        screened = gathered(in_turn(steps, job.repeats, barrier=barrier, warmup=0))
        order = sorted(screened, key=lambda name: statistics.median(screened[name]))
        again = dict.fromkeys([*job.favourites, *order[: job.leaders]] if job.leaders else [])
        confirmed = gathered(in_turn({n: steps[n] for n in again}, job.leader_repeats, barrier=barrier, warmup=0))
    return PlanTimes(screened=screened, confirmed=confirmed)
