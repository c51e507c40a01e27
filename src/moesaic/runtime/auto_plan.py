"""Chooses the plan of a mesh's layers from times measured during training.

`plan="auto"` compares times of whole steps. After two steps, the first rank searches candidate plans for the layers' sizes; the
links need not be known. Then every candidate runs for a few steps, all layers under the same one, and the ranks agree on the
slowest rank's time. The plan table (`planner/table.py`) decides when to switch, which moves no weight. Plans are equivalent, so
times decide only how a layer runs, not what it computes.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from moesaic.comm.collectives import all_reduce_max, broadcast
from moesaic.comm.mesh import Mesh
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts
from moesaic.planner.predict import Predictor, layer_job
from moesaic.planner.table import PlanTable, TableSettings
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.plan import Plan, plan_in_words
from moesaic.runtime.expert_parallel import ExpertParallel
from moesaic.runtime.routing_cache import is_recomputing

PLANS = 7
"""Number of candidates besides the first plan: a race of eight takes 52 steps."""
WARM_UP = 2
"""Number of steps before the first timed one."""
PERIOD = 8
"""After the race, a GPU's step time is averaged over this many steps, since reading it waits for the GPU."""
RACE = TableSettings(race=True)
"""Settings of a plan table that starts with assumed times."""
LOG = logging.getLogger("moesaic")
Self = TypeVar("Self", bound="AbstractStepChooser")


class AbstractStepChooser(ABC):
    """Changes the plan of a mesh's layers between steps, identically on all ranks. Get it with `of`.

    Only layers that joined are changed. A step ends when a layer is called with gradients for the first time after an
    optimizer stepped. All ranks step together.

    Args:
        mesh: the mesh of the layers.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._grid, self._transport = mesh.grid, mesh.transport
        self._everyone = tuple(range(mesh.grid.world))
        self._layers: list[tuple[weakref.ref[ExpertParallel], weakref.ref[AbstractExperts], dict[str, int]]] = []
        self._parameters: list[Callable[[], Iterable[Tensor]]] = []
        self._steps_layers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._last_call = (0, 1, 4)
        self._steps, self._has_stepped = 0, False
        self_ref = weakref.ref(self)
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: _note_step(self_ref(), optimizer))
        weakref.finalize(self, handle.remove)

    @classmethod
    def of(cls: type[Self], mesh: Mesh) -> Self:
        """Return the chooser of a mesh, created at the first call."""
        chooser: Self = mesh.shared.setdefault(cls, None) or cls(mesh)
        mesh.shared[cls] = chooser
        return chooser

    def join(
        self, on_mesh: ExpertParallel, experts: AbstractExperts, hidden: int, parameters: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Add a layer. Earlier results are dropped, since they were measured for other layers.

        Args:
            on_mesh: the layer's state on the mesh; it calls `begin` before each call.
            experts: the layer's experts.
            hidden: inner width of one whole expert.
            parameters: returns the layer's parameters. Called late, since wrappers replace parameters.
        """
        if self._grid.world == 1:
            return
        sizes = {"dim": experts.dim, "hidden": hidden, "num_experts": experts.num_experts}
        self._layers.append((weakref.ref(on_mesh), weakref.ref(experts), sizes))
        self._parameters.append(parameters)
        self._steps = 0
        self._steps_layers.clear()
        self._reset()
        on_mesh.auto = self.begin

    @abstractmethod
    def _reset(self) -> None:
        """Drop earlier results."""

    @abstractmethod
    def _end_step(self) -> None:
        """Called between two steps; `_steps` already counts the step that ended."""

    def begin(self, tokens: int, top_k: int, dtype: torch.dtype) -> None:
        """Called before each call of a layer. The first call after an optimizer step may switch to another plan.

        Args:
            tokens: tokens of this rank's tensor-parallel group.
            top_k: experts per token.
            dtype: dtype of the rows that are sent.
        """
        if not torch.is_grad_enabled() or is_recomputing():
            return
        self._last_call = (tokens, top_k, dtype.itemsize)
        if self._has_stepped:
            self._has_stepped = False
            self._steps += 1
            self._end_step()

    def _note_step(self, optimizer: Optimizer) -> None:
        """Called after an optimizer's step. It counts only if the optimizer has any of the layers' trained parameters."""
        if optimizer not in self._steps_layers:
            trained = {id(p) for parameters_of in self._parameters for p in parameters_of() if p.requires_grad}
            stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
            self._steps_layers[optimizer] = not trained or bool(trained & stepped)
        self._has_stepped = self._has_stepped or self._steps_layers[optimizer]

    def _members(self) -> Iterator[tuple[ExpertParallel, AbstractExperts, dict[str, int]]]:
        """Yield the layers that still exist and still take their plan from this object."""
        for layer_ref, experts_ref, sizes in self._layers:
            on_mesh, experts = layer_ref(), experts_ref()
            if on_mesh is not None and experts is not None and on_mesh.auto == self.begin:
                yield on_mesh, experts, sizes


def _note_step(chooser: AbstractStepChooser | None, optimizer: Optimizer) -> None:
    if chooser is not None:
        chooser._note_step(optimizer)


class AutoPlan(AbstractStepChooser):
    """Chooses the plan of all layers on a mesh that have the plan "auto". Get it with `AutoPlan.of`.

    Args:
        mesh: the mesh of the layers.
        clock: returns the current time in seconds on this rank.
    """

    def __init__(self, mesh: Mesh, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(mesh)
        self.clock = clock
        self._compiled: dict[tuple[int, bool], Compiled] = {}
        self._unrecorded = 0
        self._timed_from = 0.0
        self.table: PlanTable | None = None
        """The plan table; None until candidates were searched."""
        self.said: list[str] = []
        """The log lines, one for each finished race."""

    def _reset(self) -> None:
        self.table = None
        self._compiled.clear()

    def _end_step(self) -> None:
        if self._steps < WARM_UP:
            return
        if self.table is None:
            first = next(self._members())[0].compiled.plan
            self.table = PlanTable(*self._candidates(first), RACE, tested={(first.codec, first.backward_codec)})
        else:
            self._unrecorded += 1
            on_gpu = self._transport.device.type == "cuda"
            if on_gpu and not self.table.is_racing and self._unrecorded < PERIOD:
                return
            seconds = torch.tensor([(self._now() - self._timed_from) / self._unrecorded], dtype=torch.float64)
            agreed = all_reduce_max(self._transport, self._everyone, seconds.to(self._transport.device))
            self.table.record(float(agreed))
        before, was_racing, raced = self.table.running, self.table.is_racing, self.table.races
        chosen = self.table.choose(0.0)
        if chosen != before:
            self._switch(self.table, chosen)
        if was_racing and not self.table.is_racing:
            self._log_choice(self.table, again=raced > 1)
        self._unrecorded, self._timed_from = 0, self._now()

    def _now(self) -> float:
        if self._transport.device.type == "cuda":
            torch.cuda.synchronize(self._transport.device)
        return self.clock()

    def _candidates(self, first: Plan) -> tuple[list[Plan], Callable[[float], list[float]]]:
        """Return candidate plans and their predicted seconds, as searched by the first rank. The current plan comes first."""
        candidates: dict[str, Any] = {}
        if self._transport.rank == 0:
            tokens, top_k, element_bytes = self._last_call
            sizes, on_cpu = next(self._members())[2], self._transport.device.type == "cpu"
            try:
                job = layer_job(self._grid, tokens=tokens, top_k=top_k, element_bytes=element_bytes, **sizes)
                predictor = Predictor.assumed(job, self._grid, first, plans=PLANS, on_cpu=on_cpu)
                candidates = {"plans": list(map(asdict, predictor.plans)), "seconds": predictor(0.0)}
            except InputError as error:
                LOG.warning("plan auto: nothing to choose from, %s runs: %s", plan_in_words(first), error)
                candidates = {"plans": [asdict(first)], "seconds": [1.0]}
        agreed = self._from_first_rank(candidates)
        return [override(Plan(), each, source="plan auto") for each in agreed["plans"]], lambda _: agreed["seconds"]

    def _from_first_rank(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the first rank's value."""
        device, encoded = self._transport.device, torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        length = broadcast(self._transport, self._everyone, torch.tensor([len(encoded)], device=device), 0)
        encoded = encoded if self._transport.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
        received = broadcast(self._transport, self._everyone, encoded.to(device), 0)
        first_value: dict[str, Any] = json.loads(bytes(received.tolist()))
        return first_value

    def _switch(self, table: PlanTable, number: int) -> None:
        """Run all layers under a plan from now on. Layers with and without biases get one compiled plan each."""
        for on_mesh, experts, _ in self._members():
            key = (number, bool(experts.names[1]))
            if key not in self._compiled:
                self._compiled[key] = compile_plan(table.plans[number], self._grid, bias=key[1])
            on_mesh.use(self._compiled[key], experts)

    def _log_choice(self, table: PlanTable, *, again: bool) -> None:
        assert table.running is not None
        best, first = table.timed.get(table.running, 0.0), table.timed.get(0, 0.0)
        why = "step times have changed; " if again else ""
        self.said.append(
            f"plan auto: {plan_in_words(table.plans[table.running])}, {1e3 * best:.1f} ms a step: {why}the fastest of "
            f"{len(table.timed)} plans, {plan_in_words(table.plans[0])} takes {1e3 * first:.1f} ms"
        )
        if self._transport.rank == 0:
            LOG.warning(self.said[-1])
