"""Runs one case on all its ranks and compares the results with the dense reference: no plan may change what a layer computes.

A case runs forward and backward over one or more micro-batches, then averages gradients and finishes the step, as training
does. Compared are:

- outputs, auxiliary losses, counts and the output of a forward-only pass;
- gradients of the input, the router, every expert and the shared expert;
- the router's state after the step;
- the ranks of a tensor-parallel group with each other, bit for bit.

Samples or experts that a case moves are returned home before they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.balance.budget import CountedCall, MemoryBudget
from moesaic.balance.run.calls import BalancedCalls
from moesaic.balance.run.experts import ExpertPlacement
from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator
from moesaic.balance.samples import AbstractPlacer, Given, Homes, TwoStage, Weighed
from moesaic.comm.loopback import run_ranks
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.grid import Grid
from moesaic.routing.injection import set_loss_scale
from moesaic.routing.routing import Routing
from moesaic.runtime import data_parallel
from moesaic.runtime.routing_cache import checkpoint
from moesaic.testing.cases import Case
from moesaic.testing.expected import Expected, expect, shard_of
from moesaic.testing.workload import CaseData, GroupBatch, draw_workload


def relocator_of(case: Case, mesh: Mesh) -> Relocator | None:
    """Return the relocator that moves a case's samples; None if they stay."""
    if case.placement == "none":
        return None
    return Relocator(mesh, _placer(case), ends_home=False)


def call_relocated(
    relocator: Relocator | None, layer: MoE, x: Any, *, recompute: bool = False, **options: Any
) -> tuple[Any, Routing]:
    """Call the layer and return (y, routing), with y for the samples of `x` even if they were moved in between.

    Args:
        relocator: moves samples; None to leave them.
        layer: the layer.
        x: (sequences, length, dim).
        recompute: run under activation checkpointing.
        **options: options of the layer's call.
    """
    module = layer if relocator is None else MovingMoE(layer)
    call = partial(checkpoint, module) if recompute else module
    if relocator is None:
        y, routing = call(x, return_routing=True, **options)
        return y, routing
    trip = relocator.start([Following(layer.router, layer.top_k)], *x.shape[:2])
    y, routing = call(x, move=trip.next(), return_routing=True, **options)
    return trip.take_home(y), routing


def expert_placement_of(layer: MoE, mesh: Mesh) -> ExpertPlacement:
    """Return an `ExpertPlacement` that moves a layer's experts between steps. It moves weights and gradients only.

    Args:
        layer: the layer, on the mesh.
        mesh: must have ep above 1.
    """
    return ExpertPlacement([layer], mesh, torch.optim.SGD(layer.experts.parameters(), lr=0.1), every=1)


def shuffle_experts(case: Case, layer: MoE, mesh: Mesh) -> Callable[[], None]:
    """Put the experts into a random order if the case moves them, and return a function that moves them home.

    That function moves the gradients too. All ranks call both together.

    Args:
        case: the case.
        layer: the case's layer, on the mesh, before its first call.
        mesh: the mesh.
    """
    if not case.experts_move:
        return lambda: None
    placement, home = expert_placement_of(layer, mesh), np.arange(layer.num_experts)
    placement.place([np.random.default_rng(case.seed).permutation(layer.num_experts)])

    def take_home() -> None:
        placement.place([home])

    return take_home


def random_homes(grid: Grid, slots: int, rng: np.random.Generator) -> Homes:
    """Return a random placement of samples in which each stays within the ranks of its replica of the experts."""
    rank = np.repeat(np.arange(grid.world), slots)
    for replica in {grid.group(member, ("ep", "etp")) for member in range(grid.world)}:
        members = np.flatnonzero(np.isin(rank, replica))
        rank[members] = rng.permutation(rank[members])
    return Homes.of_ranks(rank, grid.world)


def _placer(case: Case) -> AbstractPlacer:
    if case.placement == "solved":
        return Weighed(least_gain=0.0) if case.seed % 2 else TwoStage(least_gain=0.0)
    rng = np.random.default_rng(case.seed)
    slots = case.sequences // case.grid.tp
    return Given([random_homes(case.grid, slots, rng) for _ in case.lengths])


Errors = dict[str, float]
"""Quantity -> the largest error on any rank, relative to the largest expected value; infinite if shapes differ."""
Norm = Callable[[MoE, Mesh], float]
"""Computes the norm of the gradients of a layer that is spread over a mesh."""
Change = Callable[[Compiled], Compiled]
"""Plants a bug into a compiled plan."""
Patch = Callable[[], AbstractContextManager[object]]
"""Returns a context inside which a bug is planted."""


@dataclass
class RankResult:
    """Results of one rank of a case."""

    outputs: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor] = field(default_factory=list)
    losses: list[dict[str, Tensor]] = field(default_factory=list)
    requested: list[list[int]] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    evaluated: Tensor | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    step_counts: list[int] = field(default_factory=list)
    """Copies per expert over the whole step, from which the router adapts its biases."""
    norm: float | None = None
    """Norm of all gradients; None if it was not computed."""


@dataclass(frozen=True)
class Ran:
    """A case that ran: its results and the expected ones."""

    case: Case
    work: CaseData
    expected: Expected
    results: list[RankResult]
    """By rank."""

    @property
    def errors(self) -> Errors:
        """The largest error of each quantity over all ranks."""
        return compare(self.case, self.work, self.expected, self.results)


@dataclass(frozen=True)
class Pair:
    """One value of one rank, with the expected value."""

    quantity: str
    """The quantity under which its error is reported, such as "expert gradient"."""
    name: str
    """Which value of the quantity: a parameter, a loss or the number of a micro-batch; empty if there is only one."""
    actual: Tensor | None
    """None stands for zeros."""
    expected: Tensor | None
    """None stands for zeros."""


def run_case(case: Case, change: Change | None = None, patch: Patch = nullcontext) -> Errors:
    """Run a case on loopback and return its errors; see `ran_case`."""
    return ran_case(case, change, patch).errors


def ran_case(case: Case, change: Change | None = None, patch: Patch = nullcontext) -> Ran:
    """Run a case on loopback and compute the expected results.

    Args:
        case: the case.
        change: applied to the compiled plan before it runs, to plant a bug.
        patch: a context that is entered while the case runs, to plant a bug elsewhere.
    """
    work = draw_workload(case)
    expected = expect(case, work)
    with patch():
        compiled = compile_case(case, change)

        def rank(transport: AbstractTransport) -> RankResult:
            return run_rank(case, work, compiled, Mesh(case.grid, transport))

        results = run_ranks(case.grid.world, rank, seed=case.seed)
    return Ran(case, work, expected, results)


def compile_case(case: Case, change: Change | None = None) -> Compiled:
    """Compile a case's plan, once for all ranks."""
    compiled = compile_plan(case.plan, case.grid, bias=case.experts == "gelu")
    return compiled if change is None else change(compiled)


def run_rank(case: Case, work: CaseData, compiled: Compiled, mesh: Mesh, norm: Norm | None = None) -> RankResult:
    """Run one rank's part of a case, which is one step of training. All ranks call it together.

    Args:
        case: the case.
        work: the case's layer and tokens.
        compiled: the case's compiled plan.
        mesh: this rank's mesh.
        norm: computes the norm of all gradients; None to leave it out.
    """
    layer, result = work.fresh_layer(), RankResult()
    layer.parallelize(mesh, compiled, case.policy)
    budget_by_rows(layer)
    relocator, take_home = relocator_of(case, mesh), shuffle_experts(case, layer, mesh)
    group = case.grid.coordinate(mesh.rank, "dp")
    for micro, share in enumerate(work.shares):
        set_loss_scale(layer, share)
        _forward_backward(case, layer, work.batches[micro][group], share, result, relocator)
        if case.evaluate and micro == 0:
            result.evaluated = _evaluate(case, layer, work.batches[micro][group])
    data_parallel.average_gradients(layer, mesh)
    take_home()
    result.step_counts = layer.step_counts.tolist()
    layer.finish_step()
    result.gradients = {name: _local(parameter.grad) for name, parameter in layer.named_parameters()}
    result.buffers = dict(layer.router.named_buffers())
    result.norm = None if norm is None else norm(layer, mesh)
    return result


def compare(case: Case, work: CaseData, expected: Expected, results: list[RankResult]) -> Errors:
    """Return the largest error of each quantity over all ranks."""
    errors: Errors = {}
    for rank, result in enumerate(results):
        for pair in pairs_of(case, work, expected, rank, result):
            errors[pair.quantity] = max(errors.get(pair.quantity, 0.0), _error(pair))
    for rank, result in enumerate(results):
        if not case.replicates_bits:
            break
        first = results[case.grid.group(rank, ("tp",))[0]]
        errors["tensor group agrees"] = max(errors.get("tensor group agrees", 0.0), _difference(first, result))
    return errors


def failures(case: Case, errors: Errors) -> Errors:
    """Return the errors that exceed the case's tolerance, or are NaN."""
    return {quantity: error for quantity, error in errors.items() if not error <= case.tolerance}


def relative(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference divided by the largest expected value, or by 1 if that is less. None stands for zeros."""
    if actual is None or expected is None:
        present = next((value for value in (actual, expected) if value is not None), None)
        return 0.0 if present is None or not present.numel() else float(present.abs().max())
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    error = float((actual.double() - expected.double()).abs().max())
    return error / max(float(expected.abs().max()), 1.0) if error == error else float("inf")


def _forward_backward(
    case: Case, layer: MoE, batch: GroupBatch, share: float, result: RankResult, relocator: Relocator | None
) -> None:
    x = batch.x.detach().clone().requires_grad_()
    torch.default_generator.manual_seed(batch.seed)
    with _precision(case):
        y, routing = call_relocated(relocator, layer, x, recompute=case.recompute, mask=batch.mask, token_ids=batch.ids)
    ((y * batch.dy).sum() * share).backward()
    assert x.grad is not None
    result.outputs.append(y.detach())
    result.input_gradients.append(x.grad)
    result.losses.append(routing.losses)
    result.requested.append(routing.requested.tolist())
    result.sent.append(routing.counts.tolist())


def _evaluate(case: Case, layer: MoE, batch: GroupBatch) -> Tensor:
    layer.eval()
    with torch.inference_mode(), _precision(case):
        y: Tensor = layer(batch.x, mask=batch.mask, token_ids=batch.ids)
    layer.train()
    return y.clone()


def _precision(case: Case) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if case.precision == "autocast" else nullcontext()


def _local(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def pairs_of(case: Case, work: CaseData, expected: Expected, rank: int, result: RankResult) -> Iterator[Pair]:
    """Yield every value of one rank with its expected value."""
    group = case.grid.coordinate(rank, "dp")
    for micro in range(len(work.shares)):
        number = str(micro)
        yield Pair("output", number, result.outputs[micro], expected.outputs[micro][group])
        yield Pair("input gradient", number, result.input_gradients[micro], expected.input_gradients[micro][group])
        yield Pair("counts", "requested", *_counts(result.requested[micro], expected.requested[micro]))
        yield Pair("counts", "sent", *_counts(result.sent[micro], expected.sent[micro]))
        for name, value in expected.losses[micro].items():
            yield Pair("auxiliary loss", name, result.losses[micro].get(name), value)
    if expected.evaluated is not None:
        yield Pair("evaluation", "", result.evaluated, expected.evaluated[group])
    step_counts = [sum(of_expert) for of_expert in zip(*expected.requested)]
    yield Pair("counts", "step", *_counts(result.step_counts, step_counts))
    for name, buffer in expected.buffers.items():
        yield Pair("router state", name, result.buffers[name], buffer)
    if result.norm is not None:
        norms = torch.tensor([result.norm, expected.norm], dtype=torch.float64)
        yield Pair("gradient norm", "", norms[0], norms[1])
    for name, whole in expected.gradients.items():
        kind, parameter = name.split(".")[0], name.split(".")[-1]
        if kind == "experts" and case.experts == "modules":
            if name in result.gradients:
                yield Pair("expert gradient", name, result.gradients[name], whole)
        elif kind == "experts":
            dim = work.layer.experts.shard_dim(parameter)
            own_shard = None if whole is None else shard_of(whole, case.grid, rank, dim)
            yield Pair("expert gradient", name, result.gradients[name], own_shard)
        else:
            yield Pair(f"{kind} gradient", name, result.gradients[name], whole)


def _counts(actual: list[int], expected: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(actual), torch.tensor(expected)


def _error(pair: Pair) -> float:
    """Return the error of a value; for counts, 1 if any differs and 0 otherwise."""
    if pair.quantity == "counts":
        assert pair.actual is not None
        assert pair.expected is not None
        return float(not torch.equal(pair.actual, pair.expected))
    return relative(pair.actual, pair.expected)


def _difference(first: RankResult, other: RankResult) -> float:
    """Return 1 if two ranks of a tensor-parallel group differ in any bit of their results, else 0."""
    pairs: list[tuple[Tensor | None, Tensor]] = [
        *zip(first.outputs, other.outputs),
        *zip(first.input_gradients, other.input_gradients),
    ]
    pairs += [
        (first.gradients[name], value)
        for name, value in other.gradients.items()
        if value is not None and not name.startswith("experts")
    ]
    return max((float(not torch.equal(a, b)) for a, b in pairs if a is not None), default=0.0)


class RowsBudget(MemoryBudget):
    """A memory budget given as a number of rows at a rank's experts, since random cases cannot choose sensible bytes."""

    def budget(self, call: CountedCall) -> int:
        """Return the bytes that slices of that many rows hold."""
        return self.bytes_of_rows(super().budget(call), call)


def budget_by_rows(layer: MoE) -> None:
    """Make a layer on a mesh read its plan's memory budget as a number of rows at a rank's experts, not as bytes."""
    assert layer.on_mesh is not None
    calls = layer.on_mesh.calls
    if isinstance(calls, BalancedCalls):
        calls.budget = RowsBudget(calls.compiled, calls.budget.num_experts, calls.budget.costs)
