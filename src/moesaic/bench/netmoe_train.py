"""A model trained with samples that move, and without: step by step in turn, or the same routing twice for the same losses.

To replay routing where samples move, a rank needs the experts of the samples that are there: choices are looked up by sample.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.bench.across_ranks import gathered, latest
from moesaic.bench.measure import in_turn, start_together
from moesaic.comm.mesh import Mesh
from moesaic.comm.recorder import Recorder
from moesaic.cost.trace_load import locality
from moesaic.layer import MoE, finish_step
from moesaic.models.gpt import GPT
from moesaic.plan.placement import AbstractPlacer, Homes
from moesaic.routing.replay import encoded, replayed
from moesaic.routing.routing import Choice, Scores
from moesaic.runtime.relocate import Following, Relocator, SampleTrip
from moesaic.testbed.steady import hold_still
from moesaic.train.config import TrainConfig
from moesaic.train.parallel import parallelize
from moesaic.train.state import make_optimizer

Batch = tuple[Tensor, Tensor]
"""Tokens and targets of all ranks, (sequences, positions) int64 each."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained."""

    config: TrainConfig
    """Its mesh, plan, model and optimizer."""
    vocab: int
    methods: Mapping[str, AbstractPlacer | None]
    """Policies by name; None moves nobody and comes first."""
    batches: list[Batch]
    """One per step."""
    weights: str | None = None
    """File of a state dict to begin with; None draws them from the seed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What steps by one method were like."""

    seconds: tuple[float, ...]
    """Per step, over all ranks."""
    inter_bytes: int
    """That the MoE layers sent between nodes in the first of them, forward and backward, all ranks."""
    decided_saved: float
    """Share of the rows between nodes that the decisions saved, as predicted when they were made."""
    moved_nodes: float
    """Share of the samples that changed node after a layer that decides."""
    moved_ranks: float
    """The same of ranks."""
    predicted_right: float
    """Share of the copies whose expert was predicted, as counts per sample tell."""
    locality: float
    """Of the routing, mean over the layers, as `cost.trace_load.locality`."""


class Watched(Relocator):
    """Keeps the trip of the forward pass that it began last."""

    trip: SampleTrip | None = None

    def start(self, followings: Sequence[Following], num_samples: int, length: int) -> SampleTrip:
        """As `Relocator.start`."""
        self.trip = super().start(followings, num_samples, length)
        return self.trip


class Training:
    """A model on a mesh, with its optimizer.

    Args:
        job: what is trained.
        mesh: of all ranks.
        lr: in place of the configuration's; 0 for steps that leave the model as it is.
    """

    def __init__(self, job: Job, mesh: Mesh, lr: float | None = None) -> None:
        torch.manual_seed(job.config.seed)
        self.mesh, self.model = mesh, GPT(job.config.model, job.vocab)
        if job.weights is not None:
            self.model.load_state_dict(torch.load(job.weights))
        parallelize(self.model, mesh, job.config.plan)
        tiny = 1e-30  # a rate of 0 is refused; this one changes no bit
        config = job.config.optimizer if lr is None else replace(job.config.optimizer, lr=lr or tiny)
        self._optimizer = make_optimizer(self.model, config, torch.device("cpu"))
        self.layers = [module for module in self.model.modules() if isinstance(module, MoE)]

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
        return float(loss.detach())


def curves(job: Job) -> dict[str, list[float]]:
    """Return the loss of every step by method, the routing of the first method replayed in the others.

    All ranks call it together and return the same.
    """
    mesh = mesh_of(job.config)
    found: dict[str, list[float]] = {}
    table: list[list[Tensor]] = []
    for name, placer in job.methods.items():
        training = Training(job, mesh)
        relocator = training.model.relocator = None if placer is None else Watched(mesh, placer)
        losses = []
        for number, batch in enumerate(job.batches):
            if not found:
                with recorded(training.layers) as chosen:
                    losses.append(training.step(batch))
                table.append(_of_all_ranks(chosen, mesh.grid.world, len(batch[0])))
                continue
            with replayed([layer.router for layer in training.layers], _lookup(table[number], relocator, mesh)):
                losses.append(training.step(batch))
        mean = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(mean)
        found[name] = (mean / mesh.grid.world).tolist()
    return found


def _lookup(table: list[Tensor], relocator: Watched | None, mesh: Mesh) -> Callable[[int], Tensor]:
    """Return what tells each layer's experts of the samples that are here now, (tokens, top_k).

    Args:
        table: (sequences, length, top_k) int64 by layer.
        relocator: None where nobody moves.
        mesh: of all ranks.
    """
    ranks = mesh.grid.world

    def experts(place: int) -> Tensor:
        homes = Homes.start(ranks, len(table[place]) // ranks)
        if relocator is not None:
            assert relocator.trip is not None
            homes = relocator.trip.moves[-1].before
        return table[place][torch.from_numpy(homes.samples[mesh.rank].copy())].flatten(0, 1)

    return experts


@contextmanager
def recorded(layers: list[MoE]) -> Iterator[list[Tensor]]:
    """A stretch of one forward pass without moves; yields what is filled with every layer's choices, (tokens, top_k)."""
    chosen: list[Tensor] = []
    try:
        for layer in layers:
            setattr(layer.router, "choose", _recording(layer, chosen))  # noqa: B010  (a method, to the type checker)
        yield chosen
    finally:
        for layer in layers:
            layer.router.__dict__.pop("choose", None)


def _recording(layer: MoE, chosen: list[Tensor]) -> Callable[[Scores, int, Tensor | None, Tensor | None], Choice]:
    original = layer.router.choose

    def choose(scores: Scores, top_k: int, valid_T: Tensor | None, noise: Tensor | None) -> Choice:
        choice = original(scores, top_k, valid_T, noise)
        chosen.append(encoded(choice, top_k).clone())
        return choice

    return choose


def _of_all_ranks(chosen: list[Tensor], ranks: int, samples: int) -> list[Tensor]:
    """Return every layer's choices for the samples of all ranks, (samples, length, top_k)."""
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, chosen)
    return [torch.stack(of_layer).flatten(0, 1).unflatten(0, (samples, -1)) for of_layer in zip(*everyone)]


def step_times(job: Job) -> dict[str, Found]:
    """Time steps by all methods in turn, each on the same batches and weights; all ranks return the same."""
    hold_still(dist.get_rank())
    plain = mesh_of(job.config)
    recorder = Recorder(plain.wire)
    mesh = replace(plain, wire=recorder)
    training = Training(job, mesh, lr=0.0)
    relocators = {name: None if placer is None else Watched(mesh, placer) for name, placer in job.methods.items()}
    taken = dict.fromkeys(job.methods, 0)
    carried: dict[str, int] = {}

    def step(name: str) -> None:
        training.model.relocator = relocators[name]
        recorder.ranges.clear()
        training.step(job.batches[taken[name]])
        taken[name] += 1
        if taken[name] == 1:
            carried[name] = _across(recorder, mesh)

    gc.collect()
    gc.freeze()
    steps = {name: partial(step, name) for name in job.methods}
    seconds = gathered(in_turn(steps, len(job.batches) - 1, barrier=start_together(latest)))
    gc.unfreeze()
    top_k = training.layers[0].top_k
    return {
        name: Found(seconds=seconds[name], inter_bytes=carried[name], **_of_trip(relocators[name], mesh, top_k))
        for name in job.methods
    }


def _of_trip(relocator: Watched | None, mesh: Mesh, top_k: int) -> dict[str, float]:
    """Return what the last forward pass of a policy decided."""
    if relocator is None or relocator.trip is None:
        return dict.fromkeys(("decided_saved", "moved_nodes", "moved_ranks", "predicted_right", "locality"), 0.0)
    moves = relocator.trip.moves
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
    return Mesh.create(ep=asked.ep, etp=asked.etp, innermost=asked.innermost, ranks_per_node=asked.ranks_per_node)
