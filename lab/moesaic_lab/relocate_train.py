"""Trains the demo's model under every method for skewed routing: times the steps, and checks that
the losses agree.

Four ranks in two nodes, with 16 of the 64 experts on each; routing of a model pretrained on the
Python standard library, and real matrix products on shared cores. Steps (forward, backward,
optimizer, moves of experts) are timed on an emulated cluster, all methods in turn on the same
batches and weights, with eight sequences of 128 per rank. The loss curves are of `moesaic train`
from scratch on four Gloo processes with eight sequences in all; each run replays the routing of the
plain run.

A move is what happens to the samples behind one MoE layer, a trip the moves of one forward pass.
"across" and "inter" are between nodes.

    moesaic bench relocate_train --json benchmarks/results/relocate_train.json
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from moesaic.balance import EXPERT_PLACERS
from moesaic.balance.run.calls import decisions_of
from moesaic.balance.run.expert_moves import ExpertPlacement
from moesaic.balance.samples import AbstractPlacer, TwoStage
from moesaic.comm.mesh import Mesh
from moesaic.configfile import override
from moesaic.layer import MoE
from moesaic.models.moving import MovingGPT
from moesaic.testing.runner import on_ranks
from moesaic.traces.load import locality
from moesaic.train.balance import costs_in, make_calls, place_samples
from moesaic.train.config import MeshConfig, TrainConfig
from moesaic.train.data import Batches, load_corpus
from moesaic.train.metrics import read_metrics
from moesaic.train.optimizer import make_optimizer
from moesaic.train.parallel import parallelize
from moesaic.train.presets import demo
from moesaic.train.state import open_run
from moesaic.train.task import make_decoder
from moesaic_lab.across_ranks import sent, timed_still
from moesaic_lab.beds import BedCell, Timed, joined
from moesaic_lab.benchmark import Benchmark, KeptOptions, Shown, Told, each_kept, keeping, notes_of
from moesaic_lab.bounds import Message
from moesaic_lab.claims import Claim, claimed, figures
from moesaic_lab.measure import spread
from moesaic_lab.policies.stay import Stay
from moesaic_lab.recorder import Recorder
from moesaic_lab.training import short_run, steps_of, train_all, train_quietly, train_step
from moesaic_testbed.bed import Bed
from moesaic_testbed.cluster import Launcher

BED = Bed(nodes=2, ranks_per_node=2, inter="200mbit")
ARBITER: dict[str, Any] = {"replication": "arbiter"}
SAMPLES: dict[str, Any] = {"samples": "two_stage"}
EXPERTS: dict[str, Any] = {"experts": "balanced", "experts_every": 4}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nobody moves": SAMPLES,
    "samples": SAMPLES,
    "samples, always": SAMPLES,
    "samples, weighed": {"samples": "weighed"},
    "experts": EXPERTS,
    "arbiter": ARBITER,
    "all": SAMPLES | EXPERTS | ARBITER,
}
"""Fields of `balance` that each method adds to the plain configuration. Policies that need rates
get those of the emulated cluster."""
ALWAYS = "samples, always"
"""The method that decides in every pass and moves for the least gain, as published."""
PLACERS: dict[str, AbstractPlacer] = {
    "nobody moves": Stay(),
    ALWAYS: TwoStage(least_gain=0.0, rest=0),
}
"""Sample-placement policies that cannot be configured in a training run, by method."""
HOUR = 3600.0
Part = Literal["train", "curves", "time"]


@dataclass(frozen=True, kw_only=True)
class RelocateTrainOptions(KeptOptions):
    """Command-line options."""

    trained: int = 240
    """Steps of pretraining, in one process."""
    steps: int = 40
    """Steps of the loss curves that are compared."""
    repeats: int = 8
    """Timed steps of each method."""
    sequences: int = 8
    """Sequences per rank in timed steps."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Methods to run; they must include plain."""
    parts: tuple[Part, ...] = ("train", "curves", "time")
    """Parts to run. Parts that the folder of --keep already has are not run again."""


def configuration(
    steps: int, batch_size: int, changes: dict[str, Any] | None = None
) -> TrainConfig:
    """Return the demo's configuration with sequences of 128, on four ranks in two nodes, with the
    tables of `changes` applied."""
    plain = demo()
    sizes: dict[str, Any] = {
        "model": replace(plain.model, seq_len=128),
        "mesh": MeshConfig(ep=4, ranks_per_node=2),
    }
    config = short_run(plain, steps, batch_size=batch_size, log_every=1, **sizes)
    return override(
        config, (changes or {}) | {"planner": {"cluster": "bed-2x2"}}, source="the method"
    )


def pretrain(weights: Path, steps: int) -> None:
    """Train in one process, and save the weights."""
    with tempfile.TemporaryDirectory() as out:
        config = replace(configuration(steps, 8), out=out, mesh=MeshConfig())
        train_quietly(config)
        run = open_run(replace(config, existing="resume"), lambda _: None)
        torch.save(run.model.state_dict(), weights)


def timed(weights: Path, options: RelocateTrainOptions) -> list[dict[str, Any]]:
    """Return the rows with step times on the emulated cluster.

    Args:
        weights: file of the pretrained state dict.
    """
    steps = options.repeats + 1  # the first one warms up
    batch_size = 4 * options.sequences
    configs = {
        name: configuration(steps, batch_size, {"balance": METHODS[name]})
        for name in options.methods
    }
    plain = configs["plain"]
    corpus = load_corpus(plain.data)
    batches = Batches(corpus.train, plain.model.seq_len, batch_size, seed=99)
    job = StepJob(
        methods={
            name: StepMethod(config=config, placer=PLACERS.get(name))
            for name, config in configs.items()
        },
        vocab=corpus.vocab_size,
        batches=[batches.get(number) for number in range(steps)],
        weights=str(weights.resolve()),
    )
    with Launcher() as launcher, launcher.open(BED) as ranks:
        of_ranks = ranks.run(step_times, job)
    cell = BedCell(**joined([timed for timed, _ in of_ranks], BED))
    _, found = of_ranks[0]  # what methods decided is equal on all ranks

    rows = []
    plain_bytes, _ = cell.across["plain"]
    for name, own in found.items():
        seconds = cell.timings[name]
        inter_bytes, _ = cell.across[name]
        chosen = [f"{option} {number}" for option, number in sorted(own.options.items())]
        rows.append(
            {
                "method": name,
                "repeats": options.repeats,
                "inter_bytes": inter_bytes,
                **asdict(own),
                "inter_saved": 1 - inter_bytes / plain_bytes,
                **spread("step_seconds", seconds),
                **spread("time_ratio", cell.ratio(name, "plain")),
                "total_ratio": sum(seconds.seconds) / sum(cell.timings["plain"].seconds),
                "chosen": ", ".join(chosen),
            }
        )
    return rows


def compared(options: RelocateTrainOptions) -> list[dict[str, Any]]:
    """Return the rows with the differences between losses under replayed routing and those of the
    plain run."""
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, TrainConfig] = {}
        for name in options.methods:
            if name in PLACERS:
                continue
            out = str(Path(folder) / name.replace(", ", "-").replace(" ", "-"))
            # The first method, plain, records its routing; the others replay it.
            routing: dict[str, Any] = {"record_routing": "tokens"}
            if runs:
                routing = {"replay_routing": runs["plain"].out}
            config = configuration(options.steps, 8, {"balance": METHODS[name]} | routing)
            runs[name] = replace(config, out=out)
        on_ranks(4, train_all, list(runs.values()), timeout_seconds=HOUR)
        lines = {name: steps_of(read_metrics(Path(run.out))) for name, run in runs.items()}
    rows = []
    plain = lines["plain"]
    for name, of_run in lines.items():
        differences = [
            abs(line["loss"] - plain_line["loss"])
            for line, plain_line in zip(of_run, plain, strict=True)
        ]
        layers = []
        experts_moved = 0
        for line in of_run:
            if "balance" in line:
                layers += line["balance"]["layers"]
            if "place_experts" in line:
                experts_moved += line["place_experts"]["experts"]
        rows.append(
            {
                "method": name,
                "steps": options.steps,
                "first_loss": of_run[0]["loss"],
                "last_loss": of_run[-1]["loss"],
                "loss_difference": max(differences),
                "samples_moved": sum(layer.get("samples_moved", 0.0) for layer in layers),
                "copies_replicated": sum(layer.get("copies_replicated", 0.0) for layer in layers),
                "experts_moved": experts_moved,
            }
        )
    return rows


Batch = tuple[Tensor, Tensor]
"""Tokens and targets of all ranks, (sequences, positions) int64 each."""


@dataclass(frozen=True, kw_only=True)
class StepMethod:
    """A training configuration for one method."""

    config: TrainConfig
    """The plan, the placement policies, the mesh and the model."""
    placer: AbstractPlacer | None = None
    """Sample-placement policy that replaces the configured one; None to keep that one."""


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """Methods and batches of the timed steps."""

    methods: Mapping[str, StepMethod]
    """Methods by name; all have the same model and mesh."""
    vocab: int
    batches: list[Batch]
    """One batch per step."""
    weights: str | None = None
    """File of the initial state dict; None initialises weights from the seed."""


@dataclass(frozen=True, kw_only=True)
class StepFound:
    """What a method decided in its steps; equal on all ranks."""

    decided_saved: float
    """Share of the rows between nodes that moving samples saves, as predicted by the decisions."""
    moved_nodes: float
    """Share of the samples that changed their node after a layer that decides."""
    moved_ranks: float
    """Share of the samples that changed their rank after a layer that decides."""
    predicted_right: float
    """Share of the copies whose expert was predicted correctly, compared as counts per sample."""
    locality: float
    """Mean locality of the layers' routing, as `cost.trace_load.locality` defines it."""
    experts_moved: int
    """Experts moved in all steps."""
    options: dict[str, int]
    """How often the arbiter chose each option, over all layers and steps."""


class Training:
    """A model on a mesh under one method, with an optimizer whose steps change no bit of the
    weights.

    Args:
        name: a method of the job.
    """

    def __init__(self, job: StepJob, name: str, mesh: Mesh) -> None:
        method = job.methods[name]
        config = method.config
        element_bytes = 4
        torch.manual_seed(config.seed)
        self.mesh = mesh
        self.model = make_decoder(config, job.vocab)
        if job.weights is not None:
            self.model.load_state_dict(torch.load(job.weights))
        parallelize(self.model, mesh, config.layer_plan, calls=make_calls(config, mesh.grid))
        place_samples(self.model, mesh, config)
        self.relocator = self.model.relocator if isinstance(self.model, MovingGPT) else None
        if method.placer is not None and self.relocator is not None:
            self.relocator.placer = method.placer
        tiny = 1e-30  # the optimizer refuses 0, and this rate changes no bit
        self._optimizer = make_optimizer(
            self.model, replace(config.optimizer, lr=tiny), torch.device("cpu")
        )
        self.layers = [module for module in self.model.modules() if isinstance(module, MoE)]
        self.experts_moved = 0
        self._placement: ExpertPlacement | None = None
        placing = config.balance
        if placing.moves_experts:
            rates = replace(costs_in(config, mesh.grid), element_bytes=element_bytes)
            placer = EXPERT_PLACERS[placing.experts](rates)
            self._placement = ExpertPlacement(
                self.layers, mesh, self._optimizer, every=placing.experts_every, placer=placer
            )

    def step(self, batch: Batch) -> float:
        """Run a training step; return the loss of this rank's own samples."""
        loss = train_step(self.model, self._optimizer, batch, self.mesh)
        moved = None if self._placement is None else self._placement.after_step()
        if moved is not None:
            self.experts_moved += moved.experts
        return loss

    def options(self) -> dict[str, int]:
        """Return how often the arbiters chose each option since the last call."""
        counts: dict[str, int] = {}
        for layer in self.layers:
            for verdict in decisions_of(None if layer.on_mesh is None else layer.on_mesh.calls):
                counts[verdict.option] = counts.get(verdict.option, 0) + 1
        return counts


def step_times(job: StepJob) -> tuple[Timed, dict[str, StepFound]]:
    """Time steps of all methods in turn, on the same batches and weights. All ranks call this
    together.

    Returns:
        this rank's spans and the messages of its MoE layers in the first step, forward and
        backward, with replicated weights but without moves of experts; and what each method
        decided.
    """
    plain = mesh_of(next(iter(job.methods.values())).config)
    recorder = Recorder(plain.transport)
    mesh = replace(plain, transport=recorder)
    trainings = {name: Training(job, name, mesh) for name in job.methods}
    steps_taken = dict.fromkeys(job.methods, 0)
    messages = dict[str, list[list[Message]]]()

    def step(name: str) -> None:
        recorder.ranges.clear()
        trainings[name].step(job.batches[steps_taken[name]])
        steps_taken[name] += 1
        if name not in messages:
            messages[name] = [sent(recorder)]

    steps = {name: partial(step, name) for name in job.methods}
    repeats = len(job.batches) - 1  # the first step warms up
    spans = timed_still(steps, repeats)
    found = {
        name: StepFound(
            experts_moved=training.experts_moved, options=training.options(), **_of_trip(training)
        )
        for name, training in trainings.items()
    }
    return Timed(spans=spans, sent=messages), found


def _of_trip(training: Training) -> dict[str, float]:
    """Return figures about the sample moves of the last forward pass; zeros if no complete set of
    decisions exists."""
    trip = None if training.relocator is None else training.relocator.trip
    moves = [] if trip is None else trip.moves
    # Copies are not counted where a policy pauses, or an arbiter left samples in place.
    if trip is None or any(move.copies is None for move in moves):
        return dict.fromkeys(
            ("decided_saved", "moved_nodes", "moved_ranks", "predicted_right", "locality"), 0.0
        )
    mesh = training.mesh
    top_k = training.layers[0].top_k
    node = np.array([mesh.grid.node_of(rank) for rank in range(mesh.grid.world)])
    decided = moves[:-1]  # behind the last layer samples only return
    samples = moves[0].before.samples.size
    volumes = [move.volumes() for move in decided]
    rows_before = sum(before.inter for before, _ in volumes)
    rows_after = sum(after.inter for _, after in volumes)

    right = []
    localities = []
    for move, following in zip(moves, [*moves[1:], None]):
        assert move.load is not None
        localities.append(locality(move.load.copies, top_k))
        if following is not None and following.load is not None and move.load.following is not None:
            # A copy at a wrong expert counts at two: where it was predicted, and where it went.
            wrong = np.abs(move.load.following - following.load.copies).sum() / 2
            right.append(1 - wrong / following.load.copies.sum())
    moved_nodes = sum(move.before.moved(move.after, node) for move in decided)
    moved_ranks = sum(move.before.moved(move.after) for move in decided)
    return {
        "decided_saved": 1 - rows_after / rows_before,
        "moved_nodes": moved_nodes / samples / len(decided),
        "moved_ranks": moved_ranks / samples / len(decided),
        "predicted_right": float(np.mean(right)),
        "locality": float(np.mean(localities)),
    }


def mesh_of(config: TrainConfig) -> Mesh:
    """Return the mesh of a configuration, over all processes."""
    mesh = config.mesh
    return Mesh.create(
        ep=mesh.ep,
        etp=mesh.etp,
        innermost=mesh.innermost,
        ranks_per_node=mesh.ranks_per_node,
        transport="sockets",
    )


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the figures that the documentation quotes."""

    def figure(name: str, key: str, unit: str, target: float | None, **where: str) -> Claim:
        return claimed(
            f"relocate_train.{name}", lambda: max(figures(rows, key, **where)), target, unit=unit
        )

    return [
        figure("time_ratio", "time_ratio", "1", 1.0, part="time", method="samples"),
        figure("time_ratio.always", "time_ratio", "1", None, part="time", method=ALWAYS),
        figure("time_ratio.experts", "total_ratio", "1", 1.0, part="time", method="experts"),
        figure("time_ratio.arbiter", "time_ratio", "1", 1.0, part="time", method="arbiter"),
        figure("time_ratio.all", "total_ratio", "1", 1.0, part="time", method="all"),
        figure(
            "inter_bytes_saved.always", "inter_saved", "share", None, part="time", method=ALWAYS
        ),
        figure("loss_difference", "loss_difference", "nats", 1e-4, part="curves"),
    ]


TIMES = (
    *(
        "method",
        "step_seconds",
        "time_ratio",
        "time_ratio_low",
        "time_ratio_high",
        "total_ratio",
        "inter_bytes",
    ),
    *(
        "inter_saved",
        "decided_saved",
        "moved_nodes",
        "moved_ranks",
        "predicted_right",
        "locality",
        "experts_moved",
    ),
)
LOSSES = (
    "method",
    "last_loss",
    "loss_difference",
    "samples_moved",
    "copies_replicated",
    "experts_moved",
)
TABLES = (
    Shown(title="steps on 2 nodes of 2, 200 Mbit/s", where={"part": ("time",)}, columns=TIMES),
    Shown(title="the same losses", where={"part": ("curves",)}, columns=LOSSES),
)


def measure(options: RelocateTrainOptions, cases: None, told: Told) -> list[dict[str, Any]]:
    """Run the parts that the folder does not have."""
    torch.set_num_threads(1)
    with keeping(options.keep) as keep:
        weights = keep / f"demo-{options.trained}.pt"
        if "train" in options.parts and not weights.exists():
            told("training")
            pretrain(weights, options.trained)
        runs = {"curves": partial(compared, options), "time": partial(timed, weights, options)}
        chosen: dict[str, Callable[[], Any]] = {
            part: run for part, run in runs.items() if part in options.parts
        }
        by_part = each_kept(keep, chosen, told)
        return [{"part": part, **row} for part, rows in by_part for row in rows]


BENCHMARK = Benchmark(
    name="relocate_train",
    description="Time training steps under every method for skewed routing, and compare losses.",
    options=RelocateTrainOptions,
    notes=notes_of(__doc__),
    measure=measure,
    claims=claims,
    columns=TABLES,
)
