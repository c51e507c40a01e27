"""What a training step of a paper's model has around its MoE layers, so that figures of whole steps can be set side by side."""

from __future__ import annotations

from dataclasses import replace

from moesaic.cost.cluster import ClusterSpec
from moesaic.cost.simulate import Simulator
from moesaic.cost.step import StepCostModel
from moesaic.cost.timing import Simulated
from moesaic.plan.presets import PRESETS
from moesaic.program.grid import Grid


class WholeStep:
    """A model of `moesaic.plan.presets` on a mesh, in float32, nothing recomputed.

    Args:
        name: of the preset.
        cluster: on what.
        grid: the mesh.
        num_experts: of each MoE layer.
        sequences: of each tensor group.
    """

    def __init__(self, name: str, cluster: ClusterSpec, grid: Grid, num_experts: int, sequences: int) -> None:
        known = PRESETS[name]
        model = replace(
            known.model, checkpoint_activations=False, moe=replace(known.model.moe, num_experts=num_experts)
        )
        job = replace(known, batch_size=sequences * grid.dp, precision="float32", model=model)
        self.model = job.step_model(cluster, grid.dp)
        self._cost = StepCostModel(self.model, grid, Simulator(cluster))

    def around_seconds(self, there: Simulated, back: Simulated, *, exchanges: bool = True) -> float:
        """Return the seconds of a step without its MoE layers.

        Args:
            there: the forward program of an MoE layer.
            back: its backward program.
            exchanges: with the gradients of what is not an expert, as far as nothing hides them.
        """
        parts = self._cost.estimate(there, back).parts
        left_out = {"moe forward", "moe backward"} | (set() if exchanges else {"parameters"})
        return sum(seconds for name, seconds in parts.items() if name not in left_out)
