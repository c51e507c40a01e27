"""`Plan(order="exact")` where nothing is known of the cluster: the order is searched by what tasks take in the run itself.

Layers begin with the order of a middling layer. After a step, `TIMED` steps run every task alone: what it sends has arrived
before the next one begins, and all ranks begin it together. Then the ranks agree on what the slowest of them took, and all go
over to the order that is best by these times. An order decides when tasks run and not what they compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch import Tensor

from moesaic.comm.collectives import all_reduce_max
from moesaic.comm.mesh import Mesh
from moesaic.experts.experts import AbstractExperts
from moesaic.plan import Compiled, compile_plan
from moesaic.runtime.expert_parallel import ExpertParallel
from moesaic.runtime.step_chooser import AbstractStepChooser
from moesaic.runtime.tasks import TaskClock

WARM_UP = 1
"""Steps before tasks are timed."""
TIMED = 3
"""Steps whose tasks run alone; of all their calls the median counts."""


class MeasuredOrder(AbstractStepChooser):
    """Searches the order of all layers on a mesh that asked for it. Get it with `MeasuredOrder.of`.

    Args:
        mesh: of the layers.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._clocks: dict[bytes, TaskClock] = {}
        self._found: dict[bytes, Compiled] = {}

    def join(
        self, on_mesh: ExpertParallel, experts: AbstractExperts, hidden: int, parameters: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Take a layer in, unless its programs change from call to call: plans that replicate or have a memory budget."""
        if not on_mesh.compiled.replicates and on_mesh.compiled.again is None:
            super().join(on_mesh, experts, hidden, parameters)

    def _forget(self) -> None:
        self._clocks.clear()
        self._found.clear()

    def _end_step(self) -> None:
        if self._steps == WARM_UP:
            for on_mesh, _, _ in self._members():
                on_mesh.clock = self._clocks.setdefault(on_mesh.compiled.digest, TaskClock(self._transport))
        elif self._steps == WARM_UP + TIMED:
            for on_mesh, experts, _ in self._members():
                digest, on_mesh.clock = on_mesh.compiled.digest, None
                if digest not in self._found:
                    self._found[digest] = self._searched(on_mesh.compiled, self._clocks[digest])
                on_mesh.use(self._found[digest], experts)

    def _searched(self, compiled: Compiled, clock: TaskClock) -> Compiled:
        """Return the plan in the best order by the ranks' clocks; in the one that it has, where a task did not run."""
        names = [(p.name, task.name) for p in (compiled.forward, compiled.backward) for task in p.tasks]
        mine = torch.tensor([median(clock.seconds.get(name, [math.inf])) for name in names], dtype=torch.float64)
        agreed = all_reduce_max(self._transport, self._everyone, mine.to(self._transport.device)).tolist()
        if math.inf in agreed:
            return compiled
        seconds = dict(zip(names, agreed))
        return compile_plan(
            compiled.plan, self._grid, bias="b" in compiled.forward.inputs,
            durations=lambda program, _: {task.name: seconds[program.name, task.name] for task in program.tasks},
            host_runs_compute=self._transport.device.type == "cpu",
        )  # fmt: skip
