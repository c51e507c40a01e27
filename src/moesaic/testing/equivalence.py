"""Runs one case on all its ranks and compares the results with the dense reference: no plan may
change what a layer computes.

A case runs forward and backward over one or more micro-batches, then averages gradients and
finishes the step, as training does. Compared are:

- outputs, auxiliary losses, counts and the output of a forward-only pass;
- gradients of the input, the router, every expert and the shared expert;
- the router's state after the step;
- the ranks of a tensor-parallel group with each other, bit for bit.

Samples or experts that a case moves are returned home, to the rank that had them first, before they
are compared. A relocator decides where samples go; a trip is the movements of one forward pass,
with a move for each MoE layer. A group is the ranks that share their tokens (a data-parallel
group), and a quantity is what the values of a rank are compared under, such as "output" or "expert
gradient".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.balance.budget import MemoryBudget
from moesaic.balance.run.calls import BalancedCalls, calls_by
from moesaic.balance.run.expert_moves import ExpertPlacement
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
from moesaic.runtime.call_counts import CountedCall
from moesaic.runtime.routing_cache import checkpoint
from moesaic.testing.cases import Case
from moesaic.testing.expected import Values, expect, quantity_of
from moesaic.testing.reference import ratio, relative
from moesaic.testing.workload import CaseData, GroupBatch, draw_workload


def relocator_of(case: Case, mesh: Mesh) -> Relocator | None:
    """Return the relocator that moves a case's samples; None if they stay."""
    if case.placement == "none":
        return None
    return Relocator(mesh, _placer(case), ends_home=False)


def call_relocated(
    relocator: Relocator | None, layer: MoE, x: Any, *, recompute: bool = False, **options: Any
) -> tuple[Any, Routing]:
    """Call the layer and return (y, routing), with y for the samples of `x` even if they were moved
    in between.

    Args:
        relocator: moves samples; None to leave them.
        x: (sequences, length, dim).
        recompute: run under activation checkpointing.
        **options: options of the layer's call.
    """
    module = layer if relocator is None else MovingMoE(layer)
    call = partial(checkpoint, module) if recompute else module
    if relocator is None:
        y, routing = call(x, return_routing=True, **options)
        return y, routing
    num_sequences, length, _ = x.shape
    # samples are placed by where the layer's router is predicted to send their tokens
    trip = relocator.start([Following(layer.router, layer.top_k)], num_sequences, length)
    y, routing = call(x, move=trip.next(), return_routing=True, **options)
    return trip.take_home(y), routing


def expert_placement_of(layer: MoE, mesh: Mesh) -> ExpertPlacement:
    """Return an `ExpertPlacement` that moves a layer's experts between steps. It moves weights and
    gradients only.

    Args:
        layer: the layer, on the mesh.
        mesh: must have ep above 1.
    """
    # the optimizer never steps here, so its rate does not matter
    return ExpertPlacement(
        [layer], mesh, torch.optim.SGD(layer.experts.parameters(), lr=0.1), every=1
    )


def shuffle_experts(case: Case, layer: MoE, mesh: Mesh) -> Callable[[], None]:
    """Put the experts into a random order if the case moves them, and return a function that moves
    them home.

    That function moves the gradients too. All ranks call both together.

    Args:
        layer: the case's layer, on the mesh, before its first call.
    """
    if not case.experts_move:
        return lambda: None
    placement = expert_placement_of(layer, mesh)
    home = np.arange(layer.num_experts)  # the expert in each slot
    # a list with one order, for the only layer
    placement.place([np.random.default_rng(case.seed).permutation(layer.num_experts)])

    def take_home() -> None:
        placement.place([home])

    return take_home


def random_homes(grid: Grid, slots: int, rng: np.random.Generator) -> Homes:
    """Return a random placement of samples in which each stays within the ranks of its replica of
    the experts.

    Args:
        slots: number of samples of each rank.
    """
    rank_of_sample = np.repeat(np.arange(grid.world), slots)
    for replica in {grid.group(member, ("ep", "etp")) for member in range(grid.world)}:
        # the samples of the replica's ranks change places among themselves
        samples = np.flatnonzero(np.isin(rank_of_sample, replica))
        rank_of_sample[samples] = rng.permutation(rank_of_sample[samples])
    return Homes.of_ranks(rank_of_sample, grid.world)


def _placer(case: Case) -> AbstractPlacer:
    """Return the policy that places a case's samples."""
    if case.placement == "solved":
        return Weighed(least_gain=0.0) if case.seed % 2 else TwoStage(least_gain=0.0)
    rng = np.random.default_rng(case.seed)
    slots = case.sequences // case.grid.tp  # the ranks of a tp group share them out
    # one placement for each micro-batch
    return Given([random_homes(case.grid, slots, rng) for _ in case.lengths])


Errors = dict[str, float]
"""Quantity -> the largest error on any rank, relative to the largest expected value; infinite if
shapes differ."""
Norm = Callable[[MoE, Mesh], float]
"""Computes the norm of the gradients of a layer that is spread over a mesh."""
Change = Callable[[Compiled], Compiled]
"""Plants a bug into a compiled plan."""
Patch = Callable[[], AbstractContextManager[object]]
"""Returns a context inside which a bug is planted."""


@dataclass(frozen=True)
class Ran:
    """A case that ran: each rank's values, and those that it must have."""

    case: Case
    expected: list[Values]
    """What each rank must have, by rank."""
    results: list[Values]
    """What each rank has, by rank."""

    @property
    def errors(self) -> Errors:
        """The largest error of each quantity over all ranks."""
        errors: Errors = {}
        for quantity, actual, expected in self._values():
            error = _error(quantity, actual, expected)
            errors[quantity] = max(errors.get(quantity, 0.0), error)
        if self.case.replicates_bits:
            grid = self.case.grid
            differences = []
            for rank, own in enumerate(self.results):
                first_of_group = grid.group(rank, ("tp",))[0]
                differences.append(_difference(self.results[first_of_group], own))
            # 0 or 1, like the error of a count
            errors["tensor group agrees"] = max(differences)
        return errors

    @property
    def ratios(self) -> dict[str, float]:
        """The factor by which all wrong values of a quantity are off, by quantity, where there is
        such a factor."""
        wrong: dict[str, list[tuple[Tensor, Tensor]]] = {}  # (actual, expected) by quantity
        for quantity, actual, expected in self._values():
            # None stands for zeros of the other's shape
            present = expected if actual is None else actual
            if present is None or _error(quantity, actual, expected) <= self.case.tolerance:
                continue
            zeros = torch.zeros_like(present)
            if actual is None:
                actual = zeros
            if expected is None:
                expected = zeros
            pair = (actual.double().flatten(), expected.double().flatten())
            wrong.setdefault(quantity, []).append(pair)

        within = max(self.case.tolerance, 1e-9)  # rounding may exceed the tolerance of float64
        factors: dict[str, float] = {}
        for quantity, pairs in wrong.items():
            all_actual = torch.cat([actual for actual, _ in pairs])
            all_expected = torch.cat([expected for _, expected in pairs])
            factor = ratio(all_actual, all_expected, within=within)
            if factor is not None:
                factors[quantity] = factor
        return factors

    @property
    def wrong(self) -> list[str]:
        """A text for each wrong quantity, with its error and its ratio."""
        factors = self.ratios
        lines = []
        for quantity, error in failures(self.case, self.errors).items():
            line = f"{quantity} {error:.1e}"
            if quantity in factors:
                line += f" ({factors[quantity]:.4g} times what it should be)"
            lines.append(line)
        return lines

    def _values(self) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
        """Yield (quantity, actual value, expected value) of all ranks.

        Only processes compute a gradient norm, and a rank has only its own experts if they are
        modules.
        """
        optional = {"gradient norm"}
        if self.case.experts == "modules":
            optional.add("expert gradient")
        for own, expected in zip(self.results, self.expected, strict=True):
            for key, value in expected.items():
                if key in own or key.quantity not in optional:
                    yield key.quantity, own.get(key), value


def run_case(case: Case, change: Change | None = None, patch: Patch = nullcontext) -> Errors:
    """Run a case on loopback and return its errors; see `ran_case`."""
    return ran_case(case, change, patch).errors


def ran_case(case: Case, change: Change | None = None, patch: Patch = nullcontext) -> Ran:
    """Run a case on loopback and compute the expected results.

    Args:
        change: applied to the compiled plan before it runs, to plant a bug.
        patch: a context that is entered while the case runs, to plant a bug elsewhere.
    """
    work = draw_workload(case)
    expected = expect(case, work)
    with patch():
        compiled = compile_case(case, change)

        def rank(transport: AbstractTransport) -> Values:
            return run_rank(case, work, compiled, Mesh(case.grid, transport))

        results = run_ranks(case.grid.world, rank, seed=case.seed)
    return Ran(case, expected, results)


def compile_case(case: Case, change: Change | None = None) -> Compiled:
    """Compile a case's plan, once for all ranks."""
    compiled = compile_plan(case.plan, case.grid, bias=case.experts == "gelu")
    return compiled if change is None else change(compiled)


def run_rank(
    case: Case, work: CaseData, compiled: Compiled, mesh: Mesh, norm: Norm | None = None
) -> Values:
    """Run one rank's part of a case, which is one step of training. All ranks call it together.

    Args:
        work: the case's layer and tokens.
        compiled: the case's compiled plan.
        norm: computes the norm of all gradients; None to leave it out.
    """
    layer = work.fresh_layer()
    values = Values()
    policy = case.policy
    layer.parallelize(mesh, compiled, calls=None if policy is None else calls_by(policy))
    budget_by_rows(layer)
    relocator = relocator_of(case, mesh)
    take_home = shuffle_experts(case, layer, mesh)
    group = case.grid.coordinate(mesh.rank, "dp")

    for micro, share in enumerate(work.shares):
        set_loss_scale(layer, share)
        batch = work.batches[micro][group]
        values.update(
            _forward_backward(case, layer, batch, share=share, micro=micro, relocator=relocator)
        )
        if case.evaluate and micro == 0:
            values.add("evaluation", "", _evaluate(case, layer, batch))

    data_parallel.average_gradients(layer, mesh)
    take_home()
    values.add("counts", "step", layer.step_counts.clone())
    layer.finish_step()
    for name, parameter in layer.named_parameters():
        values.add(quantity_of(name), name, _local(parameter.grad))
    for name, buffer in layer.router.named_buffers():
        values.add("router state", name, buffer)
    if norm is not None:
        values.add("gradient norm", "", torch.tensor(norm(layer, mesh), dtype=torch.float64))
    return values


def failures(case: Case, errors: Errors) -> Errors:
    """Return the errors that exceed the case's tolerance, or are NaN."""
    return {quantity: error for quantity, error in errors.items() if not error <= case.tolerance}


def _forward_backward(
    case: Case,
    layer: MoE,
    batch: GroupBatch,
    *,
    share: float,
    micro: int,
    relocator: Relocator | None,
) -> Values:
    """Run one micro-batch and return its values.

    Args:
        share: the micro-batch's weight in the loss of the step.
        micro: the number of the micro-batch, from 0.
        relocator: moves samples; None to leave them.
    """
    x = batch.x.detach().clone().requires_grad_()
    torch.default_generator.manual_seed(batch.seed)
    with _precision(case):
        y, routing = call_relocated(
            relocator, layer, x, recompute=case.recompute, mask=batch.mask, token_ids=batch.ids
        )
    ((y * batch.dy).sum() * share).backward()
    assert x.grad is not None
    values = Values()
    values.add("output", str(micro), y.detach())
    values.add("input gradient", str(micro), x.grad)
    values.add("counts", f"requested {micro}", routing.requested)
    values.add("counts", f"sent {micro}", routing.counts)
    for name, loss in routing.losses.items():
        values.add("auxiliary loss", f"{name} {micro}", loss)
    return values


def _evaluate(case: Case, layer: MoE, batch: GroupBatch) -> Tensor:
    """Return the layer's output in evaluation."""
    layer.eval()
    with torch.inference_mode(), _precision(case):
        y: Tensor = layer(batch.x, mask=batch.mask, token_ids=batch.ids)
    layer.train()
    return y.clone()


def _precision(case: Case) -> AbstractContextManager[object]:
    """Return a context in which the layer computes in a case's precision."""
    if case.precision == "autocast":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return nullcontext()


def _local(gradient: Tensor | None) -> Tensor | None:
    """Return this rank's part of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _error(quantity: str, actual: Tensor | None, expected: Tensor | None) -> float:
    """Return the error of a value; for counts, 1 if any differs and 0 otherwise."""
    if quantity != "counts":
        return relative(actual, expected)
    return float(actual is None or expected is None or not torch.equal(actual, expected))


def _difference(first: Values, other: Values) -> float:
    """Return 1 if two ranks of a tensor-parallel group differ in any bit of their results,
    else 0."""
    for key, value in other.items():
        # outputs and gradients are compared, but not experts', of which each rank has its own
        is_gradient = key.quantity.endswith("gradient") and key.quantity != "expert gradient"
        if key.quantity != "output" and not is_gradient:
            continue
        first_value = first[key]
        if first_value is None or value is None:
            continue
        if not torch.equal(first_value, value):
            return 1.0
    return 0.0


class RowsBudget(MemoryBudget):
    """A memory budget given as a number of rows at a rank's experts, since random cases cannot
    choose sensible bytes."""

    def budget(self, call: CountedCall) -> int:
        """Return the bytes that slices of that many rows hold."""
        # the plan's budget, which `MemoryBudget` takes for bytes, is the number of rows
        return self.bytes_of_rows(super().budget(call), call)


def budget_by_rows(layer: MoE) -> None:
    """Make a layer on a mesh read its plan's memory budget as a number of rows at a rank's experts,
    not as bytes."""
    assert layer.on_mesh is not None
    calls = layer.on_mesh.calls
    if isinstance(calls, BalancedCalls):
        calls.budget = RowsBudget(calls.compiled, calls.budget.num_experts, calls.budget.costs)
