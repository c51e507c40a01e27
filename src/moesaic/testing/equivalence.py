"""Every program computes what the plain layer computes: random meshes, schedules and workloads against a float64 reference.

A case runs all ranks on loopback, forward and backward, and compares the output, the gradients of input and routing
weights, and every expert's gradient with a loop over experts on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moesaic.comm.loopback import Loopback
from moesaic.experts import GatedExperts
from moesaic.program.build import SCHEDULES
from moesaic.program.order.early import early
from moesaic.program.passes.split_capacity import split_capacity
from moesaic.program.sizes import Sizes
from moesaic.program.task import Program
from moesaic.program.transpose import saved, transpose
from moesaic.program.validate import validate
from moesaic.runtime.drive import drive_all
from moesaic.runtime.interpret import Call, Environment, interpret
from moesaic.testing.cases import Case, Expected, Workload, draw_workload, expect


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


@dataclass(frozen=True)
class Prepared:
    """A case, ready to run on any wire."""

    forward: Program
    backward: Program
    ranks: list[RankPart]
    sizes: Sizes
    work: Workload
    expected: Expected

    @classmethod
    def of(cls, case: Case, change: Callable[[Program], Program] = lambda program: program) -> Prepared:
        """Build programs, sizes and every rank's part; `change` is applied to both programs, to plant bugs."""
        work = draw_workload(case)
        plain = split_capacity(SCHEDULES[case.schedule](), case.num_chunks)
        forward, backward = early(change(plain)), early(change(transpose(plain)))
        for program in (forward, backward):
            validate(program)
        ranks = [RankPart(rank, case, work) for rank in range(case.grid.world)]
        copies, tokens = np.stack([rank.copies for rank in ranks]), np.array([rank.num_tokens for rank in ranks])
        return cls(forward, backward, ranks, Sizes(case.grid, copies, tokens, case.num_chunks), work, expect(work))

    def call(self, rank: RankPart, first_tag: int = 0) -> Call:
        """Return a rank's call."""
        return Call(rank.rank, self.sizes, rank.experts, rank.gradient, first_tag)

    def cotangents(self, rank: RankPart, values: Environment) -> Environment:
        """Return what a rank's backward program reads, from the values of its forward program."""
        return {"y'": self.work.dy[rank.group]} | {name: values[name] for name in saved(self.forward)}

    def errors(self, rank: RankPart, forward: Environment, backward: Environment) -> Errors:
        """Compare a rank's values with the reference; expert gradients apart."""
        gates = rank.by_token(backward["gates'"]) - self.expected.dgates[rank.group][rank.routed]
        return Errors(
            output=_largest(forward["y"] - self.expected.y[rank.group]),
            input_gradient=_largest(backward["x'"] - self.expected.dx[rank.group]),
            gate_gradient=_largest(gates),
            expert_gradient=0.0,
        )

    def expert_error(self, whole: list[Tensor]) -> float:
        """Compare the sum of all shards' gradients with the reference."""
        return max(_largest(a - b) for a, b in zip(whole, self.expected.dexperts))


def run_case(case: Case, change: Callable[[Program], Program] = lambda program: program) -> Errors:
    """Run a case on loopback and compare it with the reference.

    Args:
        case: what to run.
        change: applied to the forward and the backward program before they run, to plant bugs.
    """
    run = Prepared.of(case, change)
    first = _on_loopback(run, run.forward, [rank.inputs for rank in run.ranks], case.seed)
    cotangents = [run.cotangents(rank, values) for rank, values in zip(run.ranks, first)]
    second = _on_loopback(run, run.backward, cotangents, case.seed + 1)
    whole = [torch.zeros_like(parameter) for parameter in run.work.whole.parameters()]
    for rank in run.ranks:
        rank.add_gradients(whole)
    found = [run.errors(*parts) for parts in zip(run.ranks, first, second)]
    return Errors(
        output=max(errors.output for errors in found),
        input_gradient=max(errors.input_gradient for errors in found),
        gate_gradient=max(errors.gate_gradient for errors in found),
        expert_gradient=run.expert_error(whole),
    )


class RankPart:
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


def _on_loopback(run: Prepared, program: Program, values: list[Environment], seed: int) -> list[Environment]:
    wire = Loopback()
    steps = [interpret(program, value, run.call(rank)) for rank, value in zip(run.ranks, values)]
    results = drive_all(steps, wire, seed)
    assert wire.is_empty, "messages that nobody received"
    return results


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0
