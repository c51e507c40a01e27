"""Experts that move between the ranks of a run: `place_experts.every` steps apart. Off, it costs nothing.

Checkpoints are written with every expert at home, so they are those of a run whose experts stay, for any mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moesaic.layer import MoE
from moesaic.plan.expert_placement import EXPERT_PLACERS, ExpertRates
from moesaic.runtime.place_experts import ExpertPlacement, Moved
from moesaic.train.state import RunState


class ExpertMover:
    """Moves a run's experts between its steps; all ranks make it and call it together.

    Args:
        run: a run.

    Raises:
        InputError: on every rank, for a model or mesh whose experts cannot move.
    """

    def __init__(self, run: RunState) -> None:
        self.placement: ExpertPlacement | None = None
        self._moves: list[Moved] = []
        config, mesh = run.config.place_experts, run.ranks.mesh
        if not config.every:
            return
        assert mesh is not None, "experts are split over ranks"
        element_bytes = min(run.dtype.itemsize, 4)
        placer = EXPERT_PLACERS[config.policy](ExpertRates(machine=config.machine, element_bytes=element_bytes))
        layers = [module for module in run.model.modules() if isinstance(module, MoE)]
        self.placement = ExpertPlacement(layers, mesh, run.optimizer, every=config.every, placer=placer)

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
