"""The ranks' part of the balance benchmark: builds a layer per method, checks their results, and
times them in turn.

A case has several calls of a layer, each with its own routing, which `ToldRouter` is told. A
decision is what a method's policy replicates in a call. Methods are first checked and counted with
real experts, then timed with virtual ones, which sleep for as long as an accelerator would compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.balance.replication.cost import CallLoad
from moesaic.balance.replication.policy import AbstractChooser, CallDecision
from moesaic.balance.run.calls import BalancedCalls, calls_by
from moesaic.balance.run.moving import MovingMoE
from moesaic.balance.run.relocate import Following, Relocator, SampleTrip
from moesaic.balance.samples import TwoStage
from moesaic.comm.mesh import Mesh, open_transport
from moesaic.comm.transport import AbstractTransport
from moesaic.experts import ExpertsFactory, PlainExperts
from moesaic.layer import MoE
from moesaic.measure.together import hold_still, latest, start_together
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.replications import Replications
from moesaic_lab.across_ranks import ToldRouter, in_turn_and_near
from moesaic_lab.balance.config import SkewedCase
from moesaic_lab.balance.methods import OURS, PLAIN, BalanceMethod, placed_by, policy_of
from moesaic_lab.balance.tracked_memory import peak_bytes
from moesaic_lab.beds import Timed
from moesaic_lab.bounds import Message
from moesaic_lab.measure import paired, without_collections
from moesaic_lab.recorder import Range, Recorder
from moesaic_lab.virtual import Accelerator, virtual_experts

TOLERANCE = 1e-4
"""Allowed difference of float32 results that are summed in another order, relative to the largest
result."""
PROBES = 3
"""Number of random directions along which gradients of weights are compared."""


@dataclass(frozen=True, kw_only=True)
class BalanceJob:
    """One case to run on one cluster."""

    case: SkewedCase
    methods: dict[str, BalanceMethod]
    """Methods by name, in the order of the tables; the first is the plain layer."""
    seed: int = 0
    """Seed of inputs and weights."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Decisions of a method's policy on one rank, call by call."""

    seconds: tuple[float, ...]
    """Time by which each decision of the timed calls delayed the rank. For policies other than the
    arbiter: processor time."""
    options: tuple[str, ...]
    """For each call of the case: the option that the arbiter chose, or the policy's name."""
    replicated_experts: tuple[float, ...]
    """For each call of the case: experts that helper ranks computed."""
    replicated_copies: tuple[float, ...]
    """For each call of the case: copies that helper ranks computed."""


@dataclass(frozen=True, kw_only=True)
class BalanceFound(Timed):
    """Results of one rank for one case. The phases of a run are the movements of the case's first
    call, with real experts."""

    peak_bytes: dict[str, int]
    """By method: the most bytes of tensors alive at once in the first call, beyond those that
    existed before it."""
    error: dict[str, float]
    """By method: largest difference of results and gradients from the plain layer's, relative to
    its largest value."""
    decided: dict[str, Decided]
    """By method that replicates: its decisions."""
    charged: dict[str, float]
    """By method: seconds of virtual compute per step, averaged over the calls."""


class Watched(AbstractChooser):
    """Keeps what another chooser decides, with the processor time that it took.

    Args:
        decided: the list to which each decision is added.
    """

    def __init__(self, chooser: AbstractChooser, decided: list[CallDecision]) -> None:
        self._chooser = chooser
        self._decided = decided

    def choose(self, load: CallLoad) -> CallDecision:
        """Return the other chooser's decision."""
        start = time.thread_time()
        decision = self._chooser.choose(load)
        seconds = decision.decision_seconds or time.thread_time() - start
        self._decided.append(replace(decision, decision_seconds=seconds))
        return decision


class Subject:
    """One method's layer on one rank, with the input of the case.

    Args:
        name: name of the method in the job.
        compiled: the method's compiled plan.
        transport: the transport between the ranks.
        experts: factory of the layer's experts.
    """

    def __init__(
        self,
        job: BalanceJob,
        name: str,
        compiled: Compiled,
        transport: AbstractTransport,
        experts: ExpertsFactory,
    ) -> None:
        place = job.case.place
        method = job.methods[name]
        grid = place.grid
        routes = job.case.routes
        self.experts_at = np.arange(place.num_experts)
        if method.places_experts:
            self.experts_at = placed_by(routes.history, grid)
        """(num_experts,) int64, the slot of each expert; slots are numbered rank by rank."""
        torch.manual_seed(job.seed)
        self.layer = MoE(
            place.dim,
            place.hidden,
            place.num_experts,
            place.top_k,
            router=ToldRouter,
            experts=experts,
            losses=(),
        )
        expert_of_slot = torch.from_numpy(np.argsort(self.experts_at))
        for weights in self.layer.experts.parameters():
            weights.data = weights.data[expert_of_slot]  # a slot gets those of its expert
        is_arbiter = method.plan.replication == "arbiter"
        policy = policy_of(method, place.profiled_costs if is_arbiter else place.costs)
        self.decided: list[CallDecision] = []
        """Decisions since `start_over`."""
        mesh = Mesh(grid, transport)
        self.layer.parallelize(mesh, compiled, calls=None if policy is None else calls_by(policy))
        assert self.layer.on_mesh is not None
        calls = self.layer.on_mesh.calls
        if isinstance(calls, BalancedCalls) and calls._chooser:
            calls._chooser = Watched(calls._chooser, self.decided)
        self._option = "" if policy is None or policy.has_choice else method.plan.replication
        """Name of every decision's option; "" if the decision names it."""
        self.relocator: Relocator | None = None
        if method.moves_samples:
            self.relocator = Relocator(mesh, TwoStage(least_gain=0.0, rest=0), ends_home=False)
        # (calls, ranks, tokens, top_k) expert ids
        by_rank = routes.experts.reshape(len(routes.experts), grid.world, -1, place.top_k)
        own_calls = by_rank[:, transport.rank]
        self._routes = [torch.from_numpy(self.experts_at[call]) for call in own_calls]
        self._samples = place.samples_per_rank
        self._length = place.sample_tokens
        generator = torch.Generator().manual_seed(job.seed + 1 + transport.rank)
        self.x = torch.randn(place.tokens_per_rank, place.dim, generator=generator).requires_grad_()
        self.dy = torch.randn(place.tokens_per_rank, place.dim, generator=generator)
        self.steps = 0
        """Number of steps that were run."""

    def forward(self, call: int) -> tuple[Tensor, SampleTrip | None]:
        """Return the results of a call, (tokens, dim), and the trip of its samples if samples
        move."""
        router = self.layer.router
        assert isinstance(router, ToldRouter)
        router.tell(self._routes[call])
        if self.relocator is None:
            return self.layer(self.x), None
        trip = self.relocator.start(
            [Following(router, self.layer.top_k)], self._samples, self._length
        )
        return MovingMoE(self.layer)(self.x, move=trip.next()), trip

    def step(self) -> None:
        """Run forward and backward for the next call of the case."""
        y, _ = self.forward(self.steps % len(self._routes))
        self.steps += 1
        y.backward(self.dy)
        self.clear()

    def start_over(self) -> None:
        """Restart with the first call, and reset the counts of steps and decisions."""
        self.steps = 0
        self.decided.clear()

    def decisions(self, calls: int) -> Decided:
        """Return the decisions since `start_over`: the time of every decision, and the outcome of
        the first one for each call.

        Args:
            calls: number of calls of the case, which repeat in a cycle.
        """
        first = self.decided[:calls]
        replicated = [_num_replicated(decision.replicated) for decision in first]
        return Decided(
            seconds=tuple(decision.decision_seconds for decision in self.decided),
            replicated_experts=tuple(experts for experts, _ in replicated),
            options=tuple(self._option or decision.option for decision in first),
            replicated_copies=tuple(copies for _, copies in replicated),
        )

    def clear(self) -> None:
        """Reset the gradients."""
        self.x.grad = None
        self.layer.zero_grad()


def measure(jobs: Sequence[BalanceJob]) -> Iterator[BalanceFound]:
    """Compare, count and time all methods of some cases on one mesh, and yield this rank's results
    of each case. All ranks call it together.

    One process measures all cases, since a case spends most of its time on imports and on compiling
    plans.
    """
    hold_still(dist.get_rank())
    transport = open_transport(name="sockets")
    grid = jobs[0].case.place.grid
    plans = {name: compile_plan(each.plan, grid) for name, each in jobs[0].methods.items()}
    for job in jobs:
        yield measure_case(job, plans, transport)


def measure_case(
    job: BalanceJob, plans: Mapping[str, Compiled], transport: AbstractTransport
) -> BalanceFound:
    """Measure one case on this rank.

    Args:
        job: the case.
        plans: compiled plans by method.
        transport: the transport between the ranks.
    """
    place = job.case.place
    counted = counts(job, plans, transport)
    is_last = transport.rank == place.bed.world - 1
    speed = place.slow_rank if is_last else 1.0
    accelerators = {
        name: Accelerator(flops_per_second=1e9 * place.gflops * speed) for name in job.methods
    }
    subjects = {
        name: Subject(job, name, plans[name], transport, virtual_experts(accelerators[name]))
        for name in job.methods
    }
    calls = len(job.case.routes.experts)
    barrier = start_together(latest)
    steps = {name: subject.step for name, subject in subjects.items()}
    # plans are cached by now, but each layer's first calls cost extra
    for subject in subjects.values():
        for _ in range(calls):
            subject.step()
        subject.start_over()
    charged_before = {name: accelerator.charged for name, accelerator in accelerators.items()}
    near = partial(near_ours, methods=job.methods, balanced=job.case.max_vio == 0)
    with without_collections():
        spans, pairs = in_turn_and_near(
            steps, place.repeats, place.pairs, near, barrier=barrier, warmup=0
        )
    decided = {
        name: subject.decisions(calls)
        for name, subject in subjects.items()
        if job.methods[name].plan.replication != "none"
    }
    charged = {
        name: (accelerator.charged - charged_before[name]) / subjects[name].steps
        for name, accelerator in accelerators.items()
    }
    return BalanceFound(spans=spans, pairs=pairs, decided=decided, charged=charged, **counted)


def near_ours(
    seconds: Mapping[str, tuple[float, ...]], methods: Mapping[str, BalanceMethod], balanced: bool
) -> list[str]:
    """Return ours and those of the two fastest single techniques that are close to it, plus the
    plain layer if loads are balanced. Return [] if nothing is left to compare with.

    Args:
        seconds: seconds of the first rounds, by method.
        methods: the methods by name.
        balanced: whether loads are balanced.
    """
    if OURS not in seconds:
        return []
    others = [name for name in seconds if methods[name].is_single]
    others.sort(key=lambda name: paired(seconds[name], seconds[OURS]).median)
    near = [name for name in others[:2] if paired(seconds[name], seconds[OURS]).is_near]
    if balanced and PLAIN not in near:
        near.append(PLAIN)
    return [OURS, *near] if near else []


def counts(
    job: BalanceJob, plans: Mapping[str, Compiled], transport: AbstractTransport
) -> dict[str, dict[str, Any]]:
    """Run the case's first call with real experts under every method; return the counted fields of
    `BalanceFound`.

    Raises:
        RuntimeError: on every rank, if a method's results or gradients differ from the plain
            layer's.
    """
    sent = {}
    peaks = {}
    errors = {}
    plain_values = None  # of the first method, the plain layer
    for name in job.methods:
        recorder = Recorder(transport)
        subject = Subject(job, name, plans[name], recorder, PlainExperts)
        values = outcome(subject)
        subject.clear()
        if plain_values is None:
            plain_values = values
        error = max(difference(value, plain) for value, plain in zip(values, plain_values))
        num_before = len(recorder.ranges)
        peaks[name] = peak_bytes(partial(_run_first_call, subject))
        sent[name] = by_movement(recorder.ranges[num_before:])
        errors[name] = latest(error)  # the largest of all ranks
    # "not <=" also finds NaN
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    if wrong:
        raise RuntimeError(f"{job.case.label}: methods differ from the plain layer: {wrong}")
    return {"sent": sent, "peak_bytes": peaks, "error": errors}


def by_movement(ranges: Sequence[Range]) -> list[list[Message]]:
    """Return the messages of each movement; those of one number in forward and backward, which swap
    sides, together."""
    num_movements = max((tags.length for tags in ranges), default=0)
    movements: list[list[Message]] = [[] for _ in range(num_movements)]
    for tags in ranges:
        for message in tags.messages:
            sent = (message.source, message.target, float(message.num_bytes))
            movements[message.tag].append(sent)
    return movements


def outcome(subject: Subject) -> list[Tensor]:
    """Return a layer's results (tokens, dim), its input's gradient, and its experts' gradients
    along random directions."""
    y, trip = subject.forward(0)
    if trip is not None:
        y = trip.take_home(y.unflatten(0, (trip.home.slots, -1))).flatten(0, 1)
    y.backward(subject.dy)
    assert subject.x.grad is not None
    along: list[Tensor] = []
    for parameter in subject.layer.experts.parameters():
        assert parameter.grad is not None
        gradient: Any = parameter.grad
        if hasattr(gradient, "to_local"):  # a DTensor's part on this rank
            gradient = gradient.to_local()
        # (experts, numbers) -> (experts, PROBES); all methods and ranks draw the same directions
        generator = torch.Generator().manual_seed(len(along))
        probe = torch.randn(gradient[0].numel(), PROBES, generator=generator)
        along.append(gradient.flatten(1) @ probe)
    per_rank: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, torch.stack(along, dim=1))
    by_slot = torch.cat([part for part in per_rank if part is not None])
    by_expert = by_slot[torch.from_numpy(subject.experts_at)]
    return [y.detach(), subject.x.grad.clone(), by_expert]


def _num_replicated(replicated: Replications | None) -> tuple[int, int]:
    """Return the numbers of experts and of copies that helper ranks compute."""
    if replicated is None:
        return 0, 0
    return len(np.unique(replicated.expert)), replicated.total


def _run_first_call(subject: Subject) -> None:
    """Run the first call forward and backward."""
    y, _ = subject.forward(0)
    y.backward(subject.dy)


def difference(values: Tensor, others: Tensor) -> float:
    """Return the largest difference over the largest value; infinity if any value is NaN."""
    worst = float((values - others).abs().max() / others.abs().max())
    return float("inf") if math.isnan(worst) else worst
