"""The ranks' side of the model benchmark: one layer, one mesh; all plans in turn, then the fastest ones again."""

from __future__ import annotations

import gc
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
from moesaic.profiling.idle import BalancedRouter
from moesaic.profiling.steady import hold_still
from moesaic.profiling.together import latest, start_together
from moesaic.program.grid import Grid
from moesaic_lab.across_ranks import gathered
from moesaic_lab.measure import in_turn
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


class ModelRunner:
    """A layer on a mesh with its input.

    Args:
        case: what it is.
        grid: the mesh.
        first: the plan to begin with.
        transport: between the ranks.
        seed: of the routing's pattern.
    """

    def __init__(
        self, case: ModelCase, grid: Grid, first: Compiled, transport: AbstractTransport, seed: int = 0
    ) -> None:
        experts: str | ExpertsFactory = "swiglu"
        if case.compute == "virtual":
            experts = virtual_experts(Accelerator(flops_per_second=1e9 * case.gflops))
        self.layer = MoE(
            case.dim,
            case.hidden,
            case.num_experts,
            case.top_k,
            router=partial(BalancedRouter, seed=seed),
            experts=experts,
            losses=(),
        )
        self.layer.parallelize(Mesh(grid, transport), first)
        tokens = case.tokens_per_rank * grid.tp
        generator = torch.Generator().manual_seed(seed + grid.coordinate(transport.rank, "dp"))
        self.x = torch.randn(tokens, case.dim, generator=generator).requires_grad_()
        self._dy = torch.ones(tokens, case.dim)

    def step(self, compiled: Compiled) -> None:
        """Run forward and backward under a plan."""
        self.layer.use_plan(compiled)
        self.layer(self.x).backward(self._dy)
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None


def measure(job: ModelJob) -> PlanTimes:
    """Time all plans of a case, on this rank; all ranks call it together and return the same."""
    hold_still(dist.get_rank())
    torch.manual_seed(job.seed)
    runner = ModelRunner(job.case, job.grid, next(iter(job.plans.values())), open_transport(name="sockets"), job.seed)
    steps = {name: partial(runner.step, compiled) for name, compiled in job.plans.items()}
    barrier = start_together(latest)
    for step in steps.values():  # what rows go where is worked out in a plan's first step
        step()
    gc.collect()
    gc.freeze()
    screened = gathered(in_turn(steps, job.repeats, barrier=barrier, warmup=0))
    order = sorted(screened, key=lambda name: statistics.median(screened[name]))
    again = dict.fromkeys([*job.favourites, *order[: job.leaders]] if job.leaders else [])
    confirmed = {}
    if again:
        confirmed = gathered(in_turn({n: steps[n] for n in again}, job.leader_repeats, barrier=barrier, warmup=0))
    gc.unfreeze()
    return PlanTimes(screened=screened, confirmed=confirmed)
