"""The part of the model benchmark that runs on the ranks: it times all plans of a layer in turn,
then the fastest again."""

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
from moesaic.measure.host import BalancedRouter
from moesaic.measure.profile import measure as profile
from moesaic.measure.together import hold_still, latest, start_together
from moesaic.planner.cluster import ClusterSpec
from moesaic.program.compile import Compiled
from moesaic.program.grid import Grid
from moesaic_lab.across_ranks import SteppedLayer, gathered
from moesaic_lab.measure import in_turn, without_collections
from moesaic_lab.model.config import ModelCase
from moesaic_lab.virtual import Accelerator, virtual_experts


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """A case and the plans to time on it. The other fields are those of `ModelBenchConfig`."""

    case: ModelCase
    grid: Grid
    """The mesh over all ranks of the bed."""
    plans: dict[str, Compiled]
    """Plans to time, by name."""
    favourites: tuple[str, ...] = ()
    """Names of plans with the shortest predicted times, which are timed again in any case."""
    repeats: int = 3
    leaders: int = 4
    leader_repeats: int = 12
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class PlanTimes:
    """Seconds of forward plus backward by plan and repeat, from the first rank's start to the last
    rank's end."""

    screened: dict[str, tuple[float, ...]]
    """Seconds of all plans, timed in turn."""
    confirmed: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of the plans that were timed again, in turn among themselves."""


def layer_of(job: ModelJob, transport: AbstractTransport) -> SteppedLayer:
    """Create the layer of a case on its mesh, to start with under the first plan."""
    case = job.case
    grid = job.grid
    experts: str | ExpertsFactory = "swiglu"
    if case.compute == "virtual":
        experts = virtual_experts(Accelerator(flops_per_second=1e9 * case.gflops))
    router = partial(BalancedRouter, seed=job.seed)
    layer = MoE(
        case.dim,
        case.hidden,
        case.num_experts,
        case.top_k,
        router=router,
        experts=experts,
        losses=(),
    )
    layer.parallelize(Mesh(grid, transport), next(iter(job.plans.values())))
    return SteppedLayer(
        layer, case.tokens_per_rank * grid.tp, job.seed + grid.coordinate(transport.rank, "dp")
    )


def measure(job: ModelJob) -> PlanTimes:
    """Time all plans of a case. All ranks call this together and return the same times."""
    hold_still(dist.get_rank())
    torch.manual_seed(job.seed)
    runner = layer_of(job, open_transport(name="sockets"))
    steps = {name: partial(runner.step, compiled) for name, compiled in job.plans.items()}
    barrier = start_together(latest)
    for step in steps.values():  # a plan's first step works out which rows go where
        step()
    with without_collections():
        screened = gathered(in_turn(steps, job.repeats, barrier=barrier, warmup=0))
        order = sorted(screened, key=lambda name: statistics.median(screened[name]))
        again = {}
        if job.leaders:
            again = {name: steps[name] for name in (*job.favourites, *order[: job.leaders])}
        confirmed = gathered(in_turn(again, job.leader_repeats, barrier=barrier, warmup=0))
    return PlanTimes(screened=screened, confirmed=confirmed)


def profiled(ranks_per_node: int, repeats: int) -> ClusterSpec:
    """Profile the bed on ranks that are each bound to one core, without showing progress. All ranks
    call this together and return the same."""
    hold_still(dist.get_rank())
    return profile(ranks_per_node, repeats, ("fp32",), lambda what, share: None, "sockets").cluster
