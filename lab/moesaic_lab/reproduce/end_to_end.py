"""The time of a training step outside its MoE layers, needed to compare the papers' figures of
whole steps."""

from __future__ import annotations

from dataclasses import replace

from moesaic.planner.cluster import ClusterSpec
from moesaic.planner.presets import PRESETS
from moesaic.planner.simulator import Simulator
from moesaic.planner.step import StepCostModel
from moesaic.planner.task_times import Simulated
from moesaic.program.grid import Grid


class WholeStep:
    """Cost model of a training step of a model preset on a mesh, in float32, without activation
    recomputation.

    Args:
        name: name of the model in `moesaic.planner.presets`.
        num_experts: number of experts in each MoE layer.
        sequences: number of sequences per tensor-parallel group.
    """

    def __init__(
        self, name: str, cluster: ClusterSpec, grid: Grid, num_experts: int, sequences: int
    ) -> None:
        known = PRESETS[name]
        model = replace(
            known.model,
            checkpoint_activations=False,
            moe=replace(known.model.moe, num_experts=num_experts),
        )
        job = replace(known, batch_size=sequences * grid.dp, precision="float32", model=model)
        # The papers' machines have their own start-ups in `cluster`.
        self.model = replace(job.step_model(cluster, grid.dp), launches=(0.0, 0.0))
        self._cost = StepCostModel(self.model, grid, Simulator(cluster))

    def around_seconds(
        self, forward: Simulated, backward: Simulated, *, exchanges: bool = True
    ) -> float:
        """Return the seconds of a step without its MoE layers.

        Args:
            forward: the simulated forward pass of an MoE layer.
            backward: the simulated backward pass of an MoE layer.
            exchanges: whether to include the exchange of the gradients of non-expert weights, as
                far as it is not hidden.
        """
        parts = self._cost.estimate(forward, backward).parts
        left_out = {"moe forward", "moe backward"}
        if not exchanges:
            left_out.add("parameters")
        return sum(seconds for name, seconds in parts.items() if name not in left_out)
