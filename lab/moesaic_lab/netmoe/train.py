"""Steps of one model by every answer to skewed routing, in turn on the same batches: plans, samples and experts that move."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.balance.policies import EXPERT_PLACERS
from moesaic.balance.samples import AbstractPlacer
from moesaic.comm.mesh import Mesh
from moesaic.layer import MoE, finish_step
from moesaic.models.moving import MovingGPT
from moesaic.profiling.steady import hold_still
from moesaic.profiling.together import latest, start_together
from moesaic.runtime.balance.calls import decisions_of
from moesaic.runtime.balance.experts import ExpertPlacement
from moesaic.traces.load import locality
from moesaic.train.balance import make_arbiter, make_model, place_samples, rates_of
from moesaic.train.config import TrainConfig
from moesaic.train.parallel import parallelize
from moesaic.train.state import make_optimizer
from moesaic_lab.across_ranks import gathered
from moesaic_lab.measure import in_turn
from moesaic_lab.recorder import Recorder

Batch = tuple[Tensor, Tensor]
"""Tokens and targets of all ranks, (sequences, positions) int64 each."""


@dataclass(frozen=True, kw_only=True)
class StepMethod:
    """One answer to skewed routing."""

    config: TrainConfig
    """Its plan, what it places, its mesh and model."""
    placer: AbstractPlacer | None = None
    """Of samples, in place of the one that the configuration names; None for that one."""


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """What is trained."""

    methods: Mapping[str, StepMethod]
    """By name; of one model on one mesh."""
    vocab: int
    batches: list[Batch]
    """One per step."""
    weights: str | None = None
    """File of a state dict to begin with; None draws them from the seed."""


@dataclass(frozen=True, kw_only=True)
class StepFound:
    """What steps by one method were like."""

    seconds: tuple[float, ...]
    """Per step, over all ranks."""
    inter_bytes: int
    """That the MoE layers sent between nodes in the first of them, forward and backward, all ranks; weights that are
    replicated too, experts that change their place not."""
    decided_saved: float
    """Share of the rows between nodes that moves of samples saved, as predicted when they were decided."""
    moved_nodes: float
    """Share of the samples that changed node after a layer that decides."""
    moved_ranks: float
    """The same of ranks."""
    predicted_right: float
    """Share of the copies whose expert was predicted, as counts per sample tell."""
    locality: float
    """Of the routing, mean over the layers, as `cost.trace_load.locality`."""
    experts_moved: int
    """In all steps."""
    options: dict[str, int]
    """What the arbiter chose, over all layers and steps."""


class Training:
    """A model on a mesh under one method, with its optimizer; the optimizer takes steps that change no bit.

    Args:
        job: what is trained.
        name: of the method.
        mesh: of all ranks.
    """

    def __init__(self, job: StepJob, name: str, mesh: Mesh) -> None:
        method = job.methods[name]
        config, element_bytes = method.config, 4
        torch.manual_seed(config.seed)
        self.mesh, self.model = mesh, make_model(config, job.vocab)
        if job.weights is not None:
            self.model.load_state_dict(torch.load(job.weights))
        parallelize(self.model, mesh, config.layer_plan, policy_of=partial(make_arbiter, config))
        place_samples(self.model, mesh, config)
        self.relocator = self.model.relocator if isinstance(self.model, MovingGPT) else None
        if method.placer is not None and self.relocator is not None:
            self.relocator.placer = method.placer
        tiny = 1e-30  # a rate of 0 is refused; this one changes no bit
        self._optimizer = make_optimizer(self.model, replace(config.optimizer, lr=tiny), torch.device("cpu"))
        self.layers = [module for module in self.model.modules() if isinstance(module, MoE)]
        self.experts_moved = 0
        self._placement: ExpertPlacement | None = None
        placing = config.balance
        if placing.moves_experts:
            placer = EXPERT_PLACERS[placing.expert_policy](rates_of(config, mesh.grid, element_bytes))
            self._placement = ExpertPlacement(
                self.layers, mesh, self._optimizer, every=placing.experts_every, placer=placer
            )

    def step(self, batch: Batch) -> float:
        """Take a step; returns the loss of this rank's own samples."""
        place, groups = self.mesh.grid.coordinate(self.mesh.rank, "dp"), self.mesh.grid.dp
        tokens, targets = (part.chunk(groups)[place] for part in batch)
        loss = self.model(tokens, targets).loss
        assert loss is not None
        loss.backward()
        finish_step(self.model)
        self._optimizer.step()
        self._optimizer.zero_grad()
        moved = None if self._placement is None else self._placement.after_step()
        self.experts_moved += 0 if moved is None else moved.experts
        return float(loss.detach())

    def options(self) -> dict[str, int]:
        """Return what the arbiters chose since the last call, by option."""
        found: dict[str, int] = {}
        for layer in self.layers:
            for verdict in decisions_of(None if layer.on_mesh is None else layer.on_mesh.calls):
                found[verdict.option] = found.get(verdict.option, 0) + 1
        return found


def step_times(job: StepJob) -> dict[str, StepFound]:
    """Time steps by all methods in turn, each on the same batches and weights; all ranks return the same."""
    hold_still(dist.get_rank())
    plain = mesh_of(next(iter(job.methods.values())).config)
    recorder = Recorder(plain.transport)
    mesh = replace(plain, transport=recorder)
    trainings = {name: Training(job, name, mesh) for name in job.methods}
    taken = dict.fromkeys(job.methods, 0)
    carried: dict[str, int] = {}

    def step(name: str) -> None:
        recorder.ranges.clear()
        trainings[name].step(job.batches[taken[name]])
        taken[name] += 1
        if taken[name] == 1:
            carried[name] = _across(recorder, mesh)

    gc.collect()
    gc.freeze()
    steps = {name: partial(step, name) for name in job.methods}
    seconds = gathered(in_turn(steps, len(job.batches) - 1, barrier=start_together(latest)))
    gc.unfreeze()
    return {
        name: StepFound(
            seconds=seconds[name], inter_bytes=carried[name], experts_moved=training.experts_moved,
            options=training.options(), **_of_trip(training),
        )
        for name, training in trainings.items()
    }  # fmt: skip


def _of_trip(training: Training) -> dict[str, float]:
    """Return what the last forward pass decided about samples."""
    trip = None if training.relocator is None else training.relocator.trip
    counted = [] if trip is None else [move.copies is not None for move in trip.moves]
    if trip is None or not all(counted):  # where a policy rests, or an arbiter left samples in place
        return dict.fromkeys(("decided_saved", "moved_nodes", "moved_ranks", "predicted_right", "locality"), 0.0)
    moves, mesh, top_k = trip.moves, training.mesh, training.layers[0].top_k
    node = np.array([mesh.grid.node_of(rank) for rank in range(mesh.grid.world)])
    decided, samples = moves[:-1], moves[0].before.samples.size
    before, after = (sum(move.volumes()[part].inter for move in decided) for part in (0, 1))
    right, local = [], []
    for move, following in zip(moves, [*moves[1:], None]):
        assert move.load is not None
        local.append(locality(move.load.copies, top_k))
        if following is not None and following.load is not None and move.load.following is not None:
            wrong = np.abs(move.load.following - following.load.copies).sum() / 2
            right.append(1 - wrong / following.load.copies.sum())
    return {
        "decided_saved": 1 - after / before,
        "moved_nodes": sum(move.before.moved(move.after, node) for move in decided) / samples / len(decided),
        "moved_ranks": sum(move.before.moved(move.after) for move in decided) / samples / len(decided),
        "predicted_right": float(np.mean(right)),
        "locality": float(np.mean(local)),
    }


def _across(recorder: Recorder, mesh: Mesh) -> int:
    """Return the bytes that all ranks' layers sent between nodes."""
    messages = (sent for held in recorder.ranges for sent in held.messages)
    nodes = ((mesh.grid.node_of(sent.source), mesh.grid.node_of(sent.target), sent.num_bytes) for sent in messages)
    total = torch.tensor(sum(size for source, target, size in nodes if source != target))
    dist.all_reduce(total)
    return int(total)


def mesh_of(config: TrainConfig) -> Mesh:
    """Return the mesh of a configuration over all processes."""
    asked = config.mesh
    return Mesh.create(
        ep=asked.ep, etp=asked.etp, innermost=asked.innermost, ranks_per_node=asked.ranks_per_node, transport="sockets"
    )
