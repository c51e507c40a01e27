"""Every program computes what the plain layer computes: random meshes, schedules and workloads against a float64 reference.

A case runs all ranks on loopback, forward and backward, and compares the output, the gradients of input and routing
weights, and every expert's gradient with a loop over experts on the whole batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.comm.loopback import Loopback
from moesaic.experts import GatedExperts
from moesaic.program.build import SCHEDULES
from moesaic.program.grid import Grid
from moesaic.program.order.early import early
from moesaic.program.passes.split_capacity import split_capacity
from moesaic.program.sizes import Sizes
from moesaic.program.task import Program
from moesaic.program.transpose import saved, transpose
from moesaic.program.validate import validate
from moesaic.runtime.drive import drive_all
from moesaic.runtime.interpret import Call, Environment, interpret


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


@dataclass(frozen=True)
class Errors:
    """Largest absolute differences from the reference."""

    output: float
    input_gradient: float
    gate_gradient: float
    expert_gradient: float

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.output, self.input_gradient, self.gate_gradient, self.expert_gradient)


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
        if schedule == "ted" and not shares_groups(grid):
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


def shares_groups(grid: Grid) -> bool:
    """Whether the tensor groups are the expert-shard groups, as TED needs."""
    return all(grid.group(rank, ("tp",)) == grid.group(rank, ("etp",)) for rank in range(grid.world))


def run_case(case: Case, change: Callable[[Program], Program] = lambda program: program) -> Errors:
    """Run a case and compare it with the reference.

    Args:
        case: what to run.
        change: applied to the forward and the backward program before they run, to plant bugs.
    """
    work = _draw_workload(case)
    expected = _reference(work)
    forward = split_capacity(SCHEDULES[case.schedule](), case.num_chunks)
    backward = early(change(transpose(forward)))
    forward = early(change(forward))
    ranks = [_Rank(rank, case, work) for rank in range(case.grid.world)]
    sizes = Sizes(
        case.grid,
        np.stack([rank.copies for rank in ranks]),
        np.array([rank.num_tokens for rank in ranks]),
        case.num_chunks,
    )
    first = _run(forward, ranks, sizes, [rank.inputs for rank in ranks], case.seed)
    kept = [{name: values[name] for name in saved(forward)} for values in first]
    cotangents = [{"y'": work.dy[rank.group], **keep} for rank, keep in zip(ranks, kept)]
    second = _run(backward, ranks, sizes, cotangents, case.seed + 1)
    whole = [torch.zeros_like(parameter) for parameter in work.whole.parameters()]
    for rank in ranks:
        rank.add_gradients(whole)
    return Errors(
        output=_largest(values["y"] - expected.y[rank.group] for rank, values in zip(ranks, first)),
        input_gradient=_largest(values["x'"] - expected.dx[rank.group] for rank, values in zip(ranks, second)),
        gate_gradient=_largest(
            rank.by_token(values["gates'"]) - expected.dgates[rank.group][rank.routed]
            for rank, values in zip(ranks, second)
        ),
        expert_gradient=_largest(a - b for a, b in zip(whole, expected.dexperts)),
    )


class _Rank:
    """What one rank of a case holds: its part of the routing, its shard of the experts."""

    def __init__(self, rank: int, case: Case, work: Workload) -> None:
        grid = case.grid
        self.rank, self.group, place = rank, grid.coordinate(rank, "dp"), grid.coordinate(rank, "tp")
        tokens = len(work.x[self.group])
        share = slice(tokens * place // grid.tp, tokens * (place + 1) // grid.tp)
        self.num_tokens = tokens if case.schedule == "baseline" else share.stop - share.start
        self.routed = share if case.schedule == "s1" else slice(0, tokens)
        expert = work.experts_of[self.group][self.routed].reshape(-1)
        self._order = expert.argsort(stable=True)
        token = torch.arange(len(expert)) // case.top_k
        self._top_k = case.top_k
        self.copies = np.bincount(expert.numpy(), minlength=case.num_experts)
        if case.schedule not in ("s1", "baseline"):
            self.copies = self.copies * (place + 1) // grid.tp - self.copies * place // grid.tp
        self.inputs = {
            "x": work.x[self.group].detach(),
            "gates": work.gates[self.group][self.routed].reshape(-1)[self._order].unsqueeze(1).detach(),
            "index": token[self._order].unsqueeze(1),
        }
        each, width = case.num_experts // grid.ep, work.whole.w1.shape[1] // grid.etp
        ep, etp = grid.coordinate(rank, "ep"), grid.coordinate(rank, "etp")
        self._experts, self._hidden = slice(ep * each, (ep + 1) * each), slice(etp * width, (etp + 1) * width)
        self._shard = GatedExperts(work.whole.dim, width, each).double()
        with torch.no_grad():
            for mine, full in zip(self._parts(self._shard), self._parts(work.whole)):
                mine.copy_(self._cut(mine, full))
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []

    def experts(self, rows: Tensor, gates: Tensor, ends: Tensor) -> Tensor:
        """Run the shard, keeping its graph."""
        with torch.enable_grad():
            leaves = rows.detach().requires_grad_(), gates.detach().requires_grad_()
            out = self._shard(*leaves, ends)
        self._pending.append((*leaves, out))
        return out.detach()

    def gradient(self, dy: Tensor, rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cotangents of rows and gates; sum those of the weights."""
        match = next(i for i, (kept, _, _) in enumerate(self._pending) if kept.data_ptr() == rows.data_ptr())
        leaf, gate, out = self._pending.pop(match)
        parts = self._parts(self._shard)
        grads = torch.autograd.grad(out, [leaf, gate, *parts], dy)
        for parameter, grad in zip(parts, grads[2:]):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return grads[0], grads[1]

    def add_gradients(self, whole: list[Tensor]) -> None:
        """Add the shard's gradients to those of the whole experts."""
        for mine, full in zip(self._parts(self._shard), whole):
            if mine.grad is not None:
                self._cut(mine, full).add_(mine.grad)

    def by_token(self, gates: Tensor) -> Tensor:
        """Return gate gradients as (tokens, top_k), from the order in which copies travel."""
        out = torch.zeros(len(self._order), dtype=gates.dtype)
        out[self._order] = gates.squeeze(1)
        return out.view(-1, self._top_k)

    @staticmethod
    def _parts(experts: GatedExperts) -> list[Tensor]:
        return list(experts.parameters())

    def _cut(self, mine: Tensor, full: Tensor) -> Tensor:
        narrowed = full[self._experts]
        if mine.shape[1] != full.shape[1]:
            return narrowed[:, self._hidden]
        return narrowed if mine.shape[2] == full.shape[2] else narrowed[:, :, self._hidden]


def _run(
    program: Program, ranks: list[_Rank], sizes: Sizes, values: list[dict[str, Tensor]], seed: int
) -> list[Environment]:
    validate(program)
    wire = Loopback()
    calls = [Call(rank.rank, sizes, rank.experts, rank.gradient) for rank in ranks]
    results = drive_all([interpret(program, value, call) for value, call in zip(values, calls)], wire, seed)
    assert wire.is_empty, "messages that nobody received"
    return results


def _draw_workload(case: Case) -> Workload:
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
class _Expected:
    """What the plain layer gives, per group; expert gradients over all groups."""

    y: list[Tensor]
    dx: list[Tensor]
    dgates: list[Tensor]
    dexperts: list[Tensor]


def _reference(work: Workload) -> _Expected:
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
    return _Expected(
        y=[y.detach() for y in outputs],
        dx=list(grads[:groups]),
        dgates=list(grads[groups : 2 * groups]),
        dexperts=list(grads[2 * groups :]),
    )


def _largest(differences: object) -> float:
    return max((float(value.abs().max()) for value in differences if value.numel()), default=0.0)  # type: ignore[attr-defined]
