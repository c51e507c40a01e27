"""Experts that move between the ranks of a run: `balance.experts_every` steps apart. Off, it costs nothing.

Checkpoints are written with every expert at home, so they are those of a run whose experts stay, for any mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from moesaic.balance.experts import ExpertRates
from moesaic.balance.policies import EXPERT_PLACERS
from moesaic.balance.rates import machine_of, simulator_of
from moesaic.cost.alpha_beta import Machine
from moesaic.layer import MoE
from moesaic.plan.model import job_of
from moesaic.program.grid import Grid
from moesaic.runtime.balance.experts.place import ExpertPlacement, Moved
from moesaic.train.config import TrainConfig
from moesaic.train.state import RunState


class ExpertMover:
    """Moves a run's experts between its steps; all ranks make it and call it together.

    Args:
        run: a run.

    Raises:
        InputError: on every rank, for a model or mesh whose experts cannot move, or a cluster that is not the run's.
    """

    def __init__(self, run: RunState) -> None:
        self.placement: ExpertPlacement | None = None
        self._moves: list[Moved] = []
        config, mesh = run.config.balance, run.ranks.mesh
        if config.experts == "none":
            return
        assert mesh is not None, "experts are split over ranks"
        placer = EXPERT_PLACERS[config.experts](rates_of(run.config, mesh.grid, min(run.dtype.itemsize, 4)))
        layers = [module for module in run.model.modules() if isinstance(module, MoE)]
        self.placement = ExpertPlacement(layers, mesh, run.optimizer, every=config.experts_every, placer=placer)

    def after_step(self) -> None:
        """Count an optimizer step whose gradients are gone, and move experts where it is time to."""
        moved = None if self.placement is None else self.placement.after_step()
        if moved is not None:
            self._moves.append(moved)

    def values(self) -> dict[str, Any]:
        """Return for the metrics what moved since the last call; nothing where nothing was decided."""
        moves, self._moves = self._moves, []
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
        """A stretch in which every expert is where it began, as a checkpoint has it."""
        if self.placement is None:
            yield
            return
        with self.placement.at_home():
            yield


def rates_of(config: TrainConfig, grid: Grid, element_bytes: int) -> ExpertRates:
    """Return what rows cost in a run: by the cluster or profile that `planner` names, else by the usual `Machine`.

    Args:
        config: of the run.
        grid: its mesh.
        element_bytes: of activations.

    Raises:
        InputError: if the cluster does not fit the run.
    """
    planner = config.planner
    if not planner.cluster and not planner.profile:
        return ExpertRates(machine=Machine(), element_bytes=element_bytes)
    simulator = simulator_of(grid, cluster=planner.cluster, profile=planner.profile)
    layer = job_of(asdict(config), "planner").step_model(simulator.cluster, grid.dp).layer
    return ExpertRates(machine=machine_of(simulator.cluster, grid, layer), element_bytes=element_bytes)
