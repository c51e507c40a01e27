"""Random cases of a layer over several ranks, and what the plain layer makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.experts import GatedExperts
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random case; it prints as what reproduces it."""

    schedule: str
    grid: Grid
    num_chunks: int
    num_experts: int
    top_k: int
    max_tokens: int
    """Each data-parallel group has 0 to so many tokens."""
    seed: int
    """Of weights, tokens, routing and the order in which ranks advance."""


@dataclass
class Workload:
    """The tokens, routing and cotangents of each data-parallel group, and the whole experts."""

    x: list[Tensor]
    """(tokens, dim) float64 per group."""
    experts_of: list[Tensor]
    """(tokens, top_k) int64 per group."""
    gates: list[Tensor]
    """(tokens, top_k) float64 per group."""
    dy: list[Tensor]
    """(tokens, dim) float64 per group: cotangents of the output."""
    whole: GatedExperts
    """All experts, unsharded."""


def draw_case(rng: random.Random, seed: int) -> Case:
    """Draw a case on at most 8 ranks; TED only where its groups coincide."""
    while True:
        world = rng.choice([1, 2, 4, 8])
        tp = rng.choice([size for size in (1, 2, 4) if world % size == 0])
        pairs = [(ep, etp) for ep in (1, 2, 4, 8) for etp in (1, 2, 4) if world % (ep * etp) == 0]
        ep, etp = rng.choice(pairs)
        grid = Grid(world=world, tp=tp, ep=ep, etp=etp, innermost=rng.choice(["etp", "ep"]))
        schedule = rng.choice(list(SCHEDULES))
        if schedule == "ted" and not grid.shares_tp_and_etp:
            continue
        num_experts = ep * rng.choice([1, 2, 3])
        return Case(
            schedule=schedule,
            grid=grid,
            num_chunks=rng.choice([1, 1, 2, 3]),
            num_experts=num_experts,
            top_k=rng.randint(1, num_experts),
            max_tokens=rng.choice([0, 1, 3, 9]),
            seed=seed,
        )


def draw_workload(case: Case) -> Workload:
    """Draw weights, tokens, skewed routing and cotangents from the case's seed: the same in every process."""
    generator = torch.Generator().manual_seed(case.seed)
    dim, hidden, groups = 4, 3 * case.grid.etp, case.grid.dp
    lengths = torch.randint(0, case.max_tokens + 1, (groups,), generator=generator).tolist()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    whole = GatedExperts(dim, hidden, case.num_experts).double()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(normal(*parameter.shape))
    skew = torch.rand(case.num_experts, generator=generator).pow(3) + 1e-3
    return Workload(
        x=[normal(n, dim) for n in lengths],
        experts_of=[
            torch.multinomial(skew.expand(n, -1), case.top_k, generator=generator)
            if n
            else torch.zeros(0, case.top_k).long()
            for n in lengths
        ],
        gates=[torch.rand(n, case.top_k, generator=generator, dtype=torch.float64) for n in lengths],
        dy=[normal(n, dim) for n in lengths],
        whole=whole,
    )


@dataclass
class Expected:
    """What the plain layer gives, per group; expert gradients over all groups."""

    y: list[Tensor]
    dx: list[Tensor]
    dgates: list[Tensor]
    dexperts: list[Tensor]


def expect(work: Workload) -> Expected:
    """Run the plain layer on every group: a loop over experts."""
    x = [value.requires_grad_() for value in work.x]
    gates = [value.requires_grad_() for value in work.gates]
    outputs = []
    for tokens, chosen, weights in zip(x, work.experts_of, gates):
        y = torch.zeros_like(tokens)
        for e in range(work.whole.num_experts):
            hidden = F.silu(tokens @ work.whole.w1[e].T) * (tokens @ work.whole.w3[e].T)
            y = y + (weights * (chosen == e)).sum(1, keepdim=True) * (hidden @ work.whole.w2[e].T)
        outputs.append(y)
    leaves = [*x, *gates, *work.whole.parameters()]
    grads = torch.autograd.grad(outputs, leaves, work.dy)
    groups = len(x)
    return Expected(
        y=[y.detach() for y in outputs],
        dx=list(grads[:groups]),
        dgates=list(grads[groups : 2 * groups]),
        dexperts=list(grads[2 * groups :]),
    )
