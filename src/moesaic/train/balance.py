"""What a run does about skewed routing: the replication policy of its layers, memory budgets,
moving samples and experts, and their metrics.

Experts move every `balance.experts_every` steps. Checkpoints are written with every expert at its
original home, so they equal those of a run without moving experts, and fit any mesh.

An arbiter decides in each call of a layer how it runs, such as with which experts replicated; a
trip is the movements of samples in one forward pass. Rates are what the policies calculate with:
latency and rate of each kind of link, and the speed of the ranks' products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from moesaic.balance import EXPERT_PLACERS, SAMPLE_PLACERS, replication_policy
from moesaic.balance.replication.policy import CallDecision
from moesaic.balance.run.calls import BalancedCalls, calls_by, decisions_of
from moesaic.balance.run.expert_moves import ExpertPlacement, Moved
from moesaic.balance.run.relocate import Following, Relocator, SampleMove, SampleTrip
from moesaic.balance.samples import AbstractPlacer, PlacerOptions
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import NoTransport
from moesaic.layer import MoE
from moesaic.models.gpt import GPT
from moesaic.models.moving import MovingGPT
from moesaic.planner.job import job_of
from moesaic.planner.policy_rates import seen_by, simulator_of
from moesaic.planner.simulator import Simulator
from moesaic.planner.workload import Workload
from moesaic.policies import CallsOf
from moesaic.program.grid import Grid
from moesaic.program.plan import NO_REPLICATION, Plan
from moesaic.program.rates import Rates
from moesaic.train.config import TrainConfig

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element that crosses links, by the run's precision."""


def known_cluster(config: TrainConfig, grid: Grid) -> tuple[Simulator, Workload]:
    """Return the simulator of the cluster that a run names, and the workload of the run's layer.

    Raises:
        InputError: if the cluster does not fit the run.
    """
    ranks_per_node = grid.ranks_per_node or grid.world
    simulator = simulator_of(config.planner.cluster, grid.world, ranks_per_node)
    job = job_of(asdict(config), source="planner")
    return simulator, job.step_model(simulator.cluster, grid.dp).layer


def costs_in(config: TrainConfig, grid: Grid) -> Rates:
    """Return the rates by which the policies of a run decide: those of the cluster that `planner`
    names, or else usual ones.

    Raises:
        InputError: if the cluster does not fit the run.
    """
    if config.planner.cluster:
        simulator, layer = known_cluster(config, grid)
        return seen_by(simulator.cluster, grid, layer)
    # of an expert: gate, up and down, or up and down
    matrices = 3 if config.model.moe.experts == "swiglu" else 2
    return Rates(element_bytes=ELEMENT_BYTES[config.precision], matrices=matrices)


def make_calls(config: TrainConfig, grid: Grid) -> CallsOf | None:
    """Return the call policies of a run's layers; None if the plan names all that is needed.

    Raises:
        InputError: if the cluster does not fit the run.
    """
    name = config.balance.replication
    if name == NO_REPLICATION:
        return None
    return calls_by(replication_policy(name, costs_in(config, grid)))


def hold_to_budget(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Make the MoE layers of a single-process run respect the plan's memory budget, if any, by
    running in slices."""
    if plan.memory_budget is None:
        return
    for module in model.modules():
        if isinstance(module, MoE):
            # onto a mesh of one rank, with a plan that has the budget alone
            module.parallelize(
                Mesh(Grid(world=1), NoTransport(device)), Plan(memory_budget=plan.memory_budget)
            )


def budget_values(model: nn.Module) -> dict[str, list[dict[str, int]]]:
    """Return what each MoE layer did to meet its memory budget since the previous call, as metrics;
    empty without a budget."""
    balanced: list[BalancedCalls] = []
    for module in model.modules():
        if isinstance(module, MoE) and module.on_mesh is not None:
            calls = module.on_mesh.calls
            if isinstance(calls, BalancedCalls):
                balanced.append(calls)
    if not any(calls.compiled.plan.memory_budget is not None for calls in balanced):
        return {}
    return {"memory_budget": [asdict(calls.budget.take()) for calls in balanced]}


def place_samples(model: GPT, mesh: Mesh, config: TrainConfig) -> None:
    """Make a model's samples move between its MoE layers in training, as `balance.samples`
    configures."""
    if isinstance(model, MovingGPT):  # made so if samples are to move (`make_decoder`)
        options = PlacerOptions(rates=costs_in(config, mesh.grid))
        model.relocator = WatchedRelocator(mesh, SAMPLE_PLACERS[config.balance.samples](options))


class WatchedRelocator(Relocator):
    """A relocator that keeps a list of its forward passes until `DecisionMeter` takes them."""

    def __init__(self, mesh: Mesh, placer: AbstractPlacer) -> None:
        super().__init__(mesh, placer)
        self.trips: list[SampleTrip] = []
        """The forward passes since they were last taken."""

    def start(self, followings: Sequence[Following], num_samples: int, length: int) -> SampleTrip:
        """Begin a forward pass; see `Relocator.start`."""
        trip = super().start(followings, num_samples, length)
        self.trips.append(trip)
        return trip


class ExpertMover:
    """Moves a run's experts between its steps. All ranks create it and call its methods together.

    Args:
        element_bytes: bytes per element of rows and weights, as the policy counts them.

    Raises:
        InputError: on every rank, if the model's or mesh's experts cannot move, or the cluster does
            not fit the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        mesh: Mesh | None,
        optimizer: torch.optim.Optimizer,
        element_bytes: int,
    ) -> None:
        self.placement: ExpertPlacement | None = None
        """What moves the experts; None if they stay."""
        self._moves: list[Moved] = []
        """The decisions since the last call of `values`, each with what it moved."""
        balance = config.balance
        if not balance.moves_experts:
            return
        assert mesh is not None, "experts are split over ranks"
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        costs = costs_in(config, mesh.grid)
        rates = replace(costs, element_bytes=element_bytes)
        self.placement = ExpertPlacement(
            layers,
            mesh,
            optimizer,
            every=balance.experts_every,
            speeds=costs.speeds,
            placer=EXPERT_PLACERS[balance.experts](rates),
        )

    def after_step(self) -> None:
        """Count an optimizer step, after its gradients are freed, and move experts if a decision is
        due."""
        moved = None if self.placement is None else self.placement.after_step()
        if moved is not None:
            self._moves.append(moved)

    def values(self) -> dict[str, Any]:
        """Return the metrics of moves since the previous call; empty if no decision was made."""
        moves = self._moves
        self._moves = []
        if not moves:
            return {}
        return {
            "place_experts": {
                "decisions": len(moves),
                "experts": sum(moved.experts for moved in moves),
                "bytes": sum(moved.num_bytes for moved in moves),
                "inter_node_bytes": sum(moved.inter_node_bytes for moved in moves),
                "busiest_before": list(moves[-1].busiest_before),
                "busiest_after": list(moves[-1].busiest_after),
            }
        }

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Return every expert to its original home for the length of the block, as checkpoints need
        it."""
        if self.placement is None:
            yield
            return
        with self.placement.at_home():
            yield


class DecisionMeter:
    """Collects what the layers' arbiters decided in training steps, and how their samples moved.

    Args:
        element_bytes: bytes per element of the rows that are sent.
    """

    def __init__(self, model: nn.Module, element_bytes: int) -> None:
        self._model = model
        self._element_bytes = element_bytes
        self._layers = [module for module in model.modules() if isinstance(module, MoE)]
        self._decisions: list[list[CallDecision]] = [[] for _ in self._layers]
        """By layer, then one for each of its calls since the last call of `values`."""
        self._moves: list[list[dict[str, float]]] = [[] for _ in self._layers]
        """By layer, then what `_sample_metrics` returned for each of its moves since then."""
        self._seconds = 0.0
        """Seconds of the steps since then."""

    def drop(self) -> None:
        """Discard decisions since the previous call, for example those of an evaluation."""
        for layer in self._layers:
            _taken_decisions(layer)

    def take(self) -> None:
        """Record the decisions of the forward passes since the previous call."""
        for number, layer in enumerate(self._layers):
            self._decisions[number] += _taken_decisions(layer)
        relocator = self._model.relocator if isinstance(self._model, MovingGPT) else None
        if isinstance(relocator, WatchedRelocator):
            for trip in relocator.trips:
                for number, move in enumerate(trip.moves):  # one for each MoE layer, in order
                    if move.load is not None:  # the layer was called
                        self._moves[number].append(_sample_metrics(move))
            relocator.trips = []

    def add_seconds(self, seconds: float) -> None:
        """Add the seconds that a step took."""
        self._seconds += seconds

    def values(self) -> dict[str, Any]:
        """Return the metrics of decisions since the previous call; empty if none were made."""
        decisions = self._decisions
        moves = self._moves
        seconds = self._seconds
        self._decisions = [[] for _ in self._layers]
        self._moves = [[] for _ in self._layers]
        self._seconds = 0.0
        if not any(decisions) and not any(moves):
            return {}
        deciding_seconds = 0.0
        for decisions_of_layer in decisions:
            for decision in decisions_of_layer:
                deciding_seconds += decision.decision_seconds
        # of a row in the forward pass, and of its gradient in the backward pass
        row_bytes = 2 * self._layers[0].dim * self._element_bytes
        layers = []
        for decisions_of_layer, moves_of_layer in zip(decisions, moves):
            sample_metrics = _mean_sample_metrics(moves_of_layer, row_bytes)
            layers.append(summary(decisions_of_layer) | sample_metrics)
        share = deciding_seconds / seconds if seconds else 0.0
        return {"balance": {"decision_share": share, "layers": layers}}


def _taken_decisions(layer: MoE) -> list[CallDecision]:
    """Return, and forget, what a layer's arbiter decided since the previous call; empty without
    one."""
    return list(decisions_of(None if layer.on_mesh is None else layer.on_mesh.calls))


def summary(decisions: Sequence[CallDecision]) -> dict[str, Any]:
    """Return decisions of one layer as plain data: means over the calls, and loads by place of
    ep.

    What is called "alone" is what would have happened without the decisions.
    """
    if not decisions:
        return {}
    alone = []
    decided = []
    for decision in decisions:
        traffic_alone, traffic_decided = decision.moved()
        alone.append(traffic_alone)
        decided.append(traffic_decided)
    replicated = [decision.replicated for decision in decisions]
    values_of_calls: dict[str, Sequence[float]] = {
        "copies_replicated": [0 if each is None else each.total for each in replicated],
        "decision_seconds": [decision.decision_seconds for decision in decisions],
        "token_bytes_alone": [each.token_bytes for each in alone],
        "token_bytes": [each.token_bytes for each in decided],
        "weight_bytes": [each.weight_bytes for each in decided],
    }
    return {
        "options": dict(Counter(decision.option for decision in decisions)),
        "predicted_seconds": dict(decisions[-1].seconds),
        "rows_alone": np.array([each.rows for each in alone]).mean(0).tolist(),
        "rows": np.array([each.rows for each in decided]).mean(0).tolist(),
        **{name: float(np.mean(values)) for name, values in values_of_calls.items()},
    }


def _sample_metrics(move: SampleMove) -> dict[str, float]:
    """Return how many samples moved, and how many more (or fewer) rows cross links inside nodes and
    between them because of it in the forward pass; in the backward pass as many gradients do."""
    stay, moved = move.volumes()
    return {
        "samples_moved": move.before.moved(move.after),
        "rows_inside": moved.intra - stay.intra,
        "rows_across": moved.inter - stay.inter,
    }


def _mean_sample_metrics(moves: Sequence[dict[str, float]], row_bytes: int) -> dict[str, float]:
    """Return means over forward passes: samples that moved, and how many more (or fewer) bytes
    crossed links because of it.

    Args:
        moves: what `_sample_metrics` returned for each pass.
        row_bytes: bytes of a row and of its gradient.
    """
    if not moves:
        return {}

    def mean(name: str) -> float:
        """Return the mean of one metric over the moves."""
        return float(np.mean([move[name] for move in moves]))

    return {
        "samples_moved": mean("samples_moved"),
        "sample_bytes_inside": row_bytes * mean("rows_inside"),
        "sample_bytes_across": row_bytes * mean("rows_across"),
    }
