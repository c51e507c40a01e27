"""The part of the training benchmark that runs on the ranks: build and check the systems, choose a
plan, time them in turn.

A system is the demo model with its MoE layers run by one of our plans or by a peer, a layer of
others (`train/systems.py`). All systems start from the same weights and tokens.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.comm.mesh import open_transport
from moesaic.experts import AbstractExperts
from moesaic.layer import MoE
from moesaic.measure.together import latest, start_together
from moesaic_lab.across_ranks import gathered, in_turn_and_near
from moesaic_lab.bounds import Message
from moesaic_lab.measure import MANY, Span, in_turn, paired
from moesaic_lab.train.config import TrainBenchConfig, TrainCase
from moesaic_lab.train.step import GivenBatch, gradient_of
from moesaic_lab.train.systems import System, make_batch, make_model, make_systems


@dataclass(frozen=True, kw_only=True)
class MeasuredSystem:
    """The measurements of one system on one rank."""

    name: str
    kind: str
    exchange: str
    """Name, kind and exchange of the `System`."""
    is_lossless: bool
    errors: dict[str, float]
    """Largest relative errors of the loss, the dense gradient and the experts' gradient against the
    model in one process."""
    sent: list[Message]
    """Messages that this rank sent in one step."""
    spans: list[Span] = field(default_factory=list)
    """Spans of all repeats, those of further rounds last; empty for a plan of ours that the trial
    did not choose."""
    trial_seconds: float | None = None
    """Median seconds over all ranks in the trial; None except for our lossless plans."""
    phases: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each repeat on this rank, by phase."""
    exchanging: list[float] = field(default_factory=list)
    """Seconds of each repeat on this rank in exchanges and the dense reduction; empty for our
    plans."""


@dataclass(frozen=True, kw_only=True)
class TrainFound:
    """The measurements of one case on one rank."""

    systems: list[MeasuredSystem]
    best: str
    """Name of our lossless plan that the trial chose."""
    most_over_mean_load: float
    """Rows of the fullest expert over the mean with the initial weights, the largest of all
    layers."""
    items: int
    """Tokens per step over all ranks."""


def measure(config: TrainBenchConfig, case: TrainCase) -> TrainFound:
    """Check, try and time the systems of a case on this rank. All ranks call this together.

    Raises:
        RuntimeError: a lossless system differs from the model in one process by more than the
            tolerance.
    """
    systems = list(make_systems(config, case, open_transport(name="sockets")))
    errors = _agreement(config, case, systems)
    runs: dict[str, Callable[[], object]] = {}
    sent = {}
    for system in systems:
        step = system.step
        runs[system.name] = step.train if case.mode == "training" else step.infer
        runs[system.name]()
        sent[system.name] = step.messages()

    ours = [system.name for system in systems if system.kind == "ours" and system.is_lossless]
    gc.collect()
    gc.disable()  # all ranks would wait for a garbage collection on one of them
    barrier = start_together(latest)
    trial = _tried({name: runs[name] for name in ours}, case.trials, barrier)
    best = min(ours, key=lambda name: trial[name])

    # of our lossless plans, time the first one and the best one
    left_out = set(ours) - {best, ours[0]}
    timed = [system for system in systems if system.name not in left_out]
    timed_runs = {system.name: runs[system.name] for system in timed}
    barrier()
    in_turn(timed_runs, 0, barrier=barrier, warmup=1)  # unmeasured; its phases are forgotten
    for system in systems:
        system.step.forget()
    peers = [system.name for system in timed if system.kind != "ours" and case.in_sweep]
    near = partial(near_ones, best, peers)
    spans, further_spans = in_turn_and_near(
        timed_runs, case.repeats, MANY, near, barrier=barrier, warmup=0
    )
    for name, added in further_spans.items():
        spans[name] += added
    gc.enable()

    measured = [
        MeasuredSystem(
            name=system.name,
            kind=system.kind,
            exchange=system.exchange,
            is_lossless=system.is_lossless,
            errors=errors[system.name],
            sent=sent[system.name],
            spans=spans.get(system.name, []),
            trial_seconds=trial.get(system.name),
            phases=system.step.seconds,
            exchanging=system.step.exchanging,
        )
        for system in systems
    ]
    items = case.batch_size * systems[0].step.batch.inputs.shape[1]
    return TrainFound(
        systems=measured, best=best, most_over_mean_load=_imbalance(config, case), items=items
    )


def _tried(
    runs: Mapping[str, Callable[[], object]], trials: int, barrier: Callable[[], object]
) -> dict[str, float]:
    """Return the median seconds of each run over some trials, by name."""
    spans = in_turn(runs, trials, barrier=barrier)
    return {name: statistics.median(seconds) for name, seconds in gathered(spans).items()}


def near_ones(
    best: str, others: Sequence[str], seconds: Mapping[str, tuple[float, ...]]
) -> list[str]:
    """Return our best plan and the peers that take about as long and need more pairs; an empty list
    if there are none.

    Args:
        best: name of our best plan.
        others: names of the peers that it is compared with.
        seconds: seconds of each repeat over all ranks, by system.
    """
    near = [name for name in others if paired(seconds[best], seconds[name]).is_near]
    return [best, *near] if near else []


def _agreement(
    config: TrainBenchConfig, case: TrainCase, systems: Sequence[System]
) -> dict[str, dict[str, float]]:
    """Compare each system's first loss and gradients with those of the model in one process, and
    return the relative errors, by system and by what is compared (the keys of `_whole`)."""
    rank = dist.get_rank()
    world = case.world
    batch = make_batch(case, config.seed, rank, world)
    whole = make_model(case, config.seed)
    expected = _whole(whole, batch, world)
    errors: dict[str, dict[str, float]] = {}
    for system in systems:
        result = _spread(system)
        errors[system.name] = {}
        for what, exact in expected.items():
            difference = (result[what] - exact).abs().max()
            error = float(difference / exact.abs().max())
            errors[system.name][what] = error
            if system.is_lossless and not error <= config.tolerance:
                raise RuntimeError(
                    f"case {case.name}: {system.name} differs from the model in one process by "
                    f"{error:.1e} in its {what}: not more than {config.tolerance:.0e} is allowed"
                )
    return errors


def _whole(model: nn.Module, batch: GivenBatch, world: int) -> dict[str, Tensor]:
    """Return loss, dense gradient and norm of the experts' gradient of an unsharded model, averaged
    over all ranks' batches."""
    loss = model(batch.inputs, batch.targets).loss
    loss.backward()
    expert_ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, MoE):
            expert_ids.update(id(parameter) for parameter in module.experts.parameters())
    dense_gradients: list[Tensor] = []
    expert_gradients: list[Tensor] = []
    for parameter in model.parameters():
        gradients = expert_gradients if id(parameter) in expert_ids else dense_gradients
        gradients.append(gradient_of(parameter).flatten())
    dense = torch.cat(dense_gradients)
    experts = torch.cat(expert_gradients)

    total = torch.cat([loss.detach().view(1), dense, experts])
    dist.all_reduce(total)
    mean = total / world
    mean_loss, mean_dense, mean_experts = mean.split([1, len(dense), len(experts)])
    return {
        "loss": mean_loss,
        "dense gradient": mean_dense,
        "expert gradient": mean_experts.double().norm().view(1),
    }


def _spread(system: System) -> dict[str, Tensor]:
    """Return the three values of `_whole` of a system with sharded experts, without an optimizer
    step."""
    step = system.step
    loss = step.model(step.batch.inputs, step.batch.targets).loss
    loss.backward()
    step.reduce()
    total_loss = loss.detach().view(1).clone()
    # All shards of an expert have the bias that is not split, the last one: it counts once.
    shared_ids: set[int] = set()
    for module in step.model.modules():
        if isinstance(module, AbstractExperts) and module.is_spread:
            _, unsplit = module.names
            shared_ids.update(id(module.get_parameter(name)) for name in unsplit)
    shards = 1 if system.candidate is None else system.candidate.etp
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in step.experts:
        copies = shards if id(parameter) in shared_ids else 1
        squares += gradient_of(parameter).double().square().sum() / copies
    dist.all_reduce(total_loss)
    dist.all_reduce(squares)
    dense = torch.cat([gradient_of(parameter).flatten() for parameter in step.dense])
    step.optimizer.zero_grad()
    return {
        "loss": total_loss / dist.get_world_size(),
        "dense gradient": dense,
        "expert gradient": squares.sqrt().view(1),
    }


@torch.no_grad()
def _imbalance(config: TrainBenchConfig, case: TrainCase) -> float:
    """Return the rows of the fullest expert over the mean with the initial weights, the largest of
    all layers."""
    worst = 0.0
    model = make_model(case, config.seed)

    def observe(layer: MoE, inputs: tuple[Tensor, ...], _: object) -> None:
        nonlocal worst
        x_TD = inputs[0].reshape(-1, layer.dim)
        scores = layer.router.scores(x_TD, noise=None, token_ids=None)
        choice = layer.router.choose(scores, layer.top_k, valid_T=None, noise=None)
        counts = torch.bincount(choice.expert, minlength=layer.num_experts)
        dist.all_reduce(counts)
        worst = max(worst, float(counts.max() / counts.double().mean()))

    for module in model.modules():
        if isinstance(module, MoE):
            module.register_forward_hook(observe)
    batch = make_batch(case, config.seed, dist.get_rank(), case.world)
    model(batch.inputs, batch.targets)
    return worst
