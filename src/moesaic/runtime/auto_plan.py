"""Layers of a mesh that find their plan, or the order of its tasks, while they train, by measured times.

`plan="auto"` goes by the times of whole steps. After two steps the first rank searches candidates for the layers' sizes;
nothing needs to be known of the links. Then every candidate runs for a few steps, all layers under the same one, and the
ranks agree on what the slowest of them took. The plan table (`plan/table.py`) says when to switch, which moves no weight.
Plans are equivalent, so times decide what runs and not what is computed.

`Plan(order="exact")` where nothing is known of the cluster goes by what tasks take. Layers begin with the order of a middling
layer. After a step, `TIMED` steps run every task alone: what it sends has arrived before the next one begins, and all ranks
begin it together. Then the ranks agree on what the slowest of them took, and all go over to the order that is best by these
times. An order decides when tasks run and not what they compute.
"""

from __future__ import annotations

import json
import logging
import math
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from statistics import median
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
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.plan.plan import plan_in_words
from moesaic.plan.predict import Predictor, layer_job
from moesaic.plan.table import PlanTable, TableSettings
from moesaic.runtime.expert_parallel import ExpertParallel
from moesaic.runtime.routing_cache import is_recomputing
from moesaic.runtime.tasks import TaskClock

PLANS = 7
"""Candidates beside the plan that layers begin with: a race of eight takes 52 steps."""
WARM_UP = 2
"""Steps before any is timed."""
PERIOD = 8
"""Steps of which a GPU's mean is told once the plan is found: reading its time waits for it."""
RACE = TableSettings(race=True)
"""How a table learns that begins with assumptions."""
LOG = logging.getLogger("moesaic")
Self = TypeVar("Self", bound="AbstractStepChooser")


class AbstractStepChooser(ABC):
    """Chooses the plan of all layers on a mesh that asked for it, between steps, on all ranks alike. Get it with `of`.

    A step ends where an optimizer has stepped and a layer is called again with gradients. All ranks step together.

    Args:
        mesh: of the layers.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._grid, self._transport = mesh.grid, mesh.transport
        self._everyone = tuple(range(mesh.grid.world))
        self._layers: list[tuple[weakref.ref[ExpertParallel], weakref.ref[AbstractExperts], dict[str, int]]] = []
        self._parameters: list[Callable[[], Iterable[Tensor]]] = []
        self._ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._call = (0, 1, 4)
        self._steps, self._stepped = 0, False
        me = weakref.ref(self)
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: _note_step(me(), optimizer))
        weakref.finalize(self, handle.remove)

    @classmethod
    def of(cls: type[Self], mesh: Mesh) -> Self:
        """Return the one of a mesh."""
        found: Self = mesh.shared.setdefault(cls, None) or cls(mesh)
        mesh.shared[cls] = found
        return found

    def join(
        self, on_mesh: ExpertParallel, experts: AbstractExperts, hidden: int, parameters: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Take a layer in. What was found before is forgotten: it was found for other layers.

        Args:
            on_mesh: how the layer runs; it tells `begin` of each of its calls.
            experts: its experts.
            hidden: inner width of one of them, whole.
            parameters: those of the layer, when asked: wrappers put others in their place.
        """
        if self._grid.world == 1:
            return
        sizes = {"dim": experts.dim, "hidden": hidden, "num_experts": experts.num_experts}
        self._layers.append((weakref.ref(on_mesh), weakref.ref(experts), sizes))
        self._parameters.append(parameters)
        self._steps = 0
        self._ours.clear()
        self._forget()
        on_mesh.auto = self.begin

    @abstractmethod
    def _forget(self) -> None:
        """Forget what was found."""

    @abstractmethod
    def _end_step(self) -> None:
        """A step has ended, the next one begins; `_steps` counts it already."""

    def begin(self, tokens: int, top_k: int, dtype: torch.dtype) -> None:
        """Hear of a call that begins; the first one after an optimizer step may go over to another plan.

        Args:
            tokens: of this rank's tensor group.
            top_k: experts per token.
            dtype: of the rows that travel.
        """
        if not torch.is_grad_enabled() or is_recomputing():
            return
        self._call = (tokens, top_k, dtype.itemsize)
        if self._stepped:
            self._stepped = False
            self._steps += 1
            self._end_step()

    def _note_step(self, optimizer: Optimizer) -> None:
        """Hear of an optimizer's step; those of optimizers that hold none of the layers' trained parameters do not count."""
        if optimizer not in self._ours:
            trained = {id(each) for found in self._parameters for each in found() if each.requires_grad}
            held = {id(each) for group in optimizer.param_groups for each in group["params"]}
            self._ours[optimizer] = not trained or bool(trained & held)
        self._stepped = self._stepped or self._ours[optimizer]

    def _members(self) -> Iterator[tuple[ExpertParallel, AbstractExperts, dict[str, int]]]:
        """Yield the layers that are still there, and still want to be chosen for."""
        for of_layer, of_experts, sizes in self._layers:
            on_mesh, experts = of_layer(), of_experts()
            if on_mesh is not None and experts is not None and on_mesh.auto == self.begin:
                yield on_mesh, experts, sizes


def _note_step(chooser: AbstractStepChooser | None, optimizer: Optimizer) -> None:
    if chooser is not None:
        chooser._note_step(optimizer)


class AutoPlan(AbstractStepChooser):
    """Chooses the plan of all layers on a mesh that asked for it. Get it with `AutoPlan.of`.

    Args:
        mesh: of the layers.
        clock: seconds now, on this rank.
    """

    def __init__(self, mesh: Mesh, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(mesh)
        self.clock = clock
        self._compiled: dict[tuple[int, bool], Compiled] = {}
        self._untold = 0
        self._since = 0.0
        self.table: PlanTable | None = None
        """None until the candidates are known."""
        self.said: list[str] = []
        """A line for each time that a plan was found."""

    def _forget(self) -> None:
        self.table = None
        self._compiled.clear()

    def _end_step(self) -> None:
        if self._steps < WARM_UP:
            return
        if self.table is None:
            first = next(self._members())[0].compiled.plan
            self.table = PlanTable(*self._candidates(first), RACE, tested={(first.codec, first.backward_codec)})
        else:
            self._untold += 1
            on_gpu = self._transport.device.type == "cuda"
            if on_gpu and not self.table.is_racing and self._untold < PERIOD:
                return
            seconds = torch.tensor([(self._now() - self._since) / self._untold], dtype=torch.float64)
            agreed = all_reduce_max(self._transport, self._everyone, seconds.to(self._transport.device))
            self.table.record(float(agreed))
        before, was_racing, raced = self.table.running, self.table.is_racing, self.table.races
        chosen = self.table.choose(0.0)
        if chosen != before:
            self._switch(self.table, chosen)
        if was_racing and not self.table.is_racing:
            self._say(self.table, again=raced > 1)
        self._untold, self._since = 0, self._now()

    def _now(self) -> float:
        if self._transport.device.type == "cuda":
            torch.cuda.synchronize(self._transport.device)
        return self.clock()

    def _candidates(self, first: Plan) -> tuple[list[Plan], Callable[[float], list[float]]]:
        """Return plans and their predicted seconds, as the first rank finds them; the first is the one that runs."""
        found: dict[str, Any] = {}
        if self._transport.rank == 0:
            tokens, top_k, element_bytes = self._call
            sizes, on_cpu = next(self._members())[2], self._transport.device.type == "cpu"
            try:
                job = layer_job(self._grid, tokens=tokens, top_k=top_k, element_bytes=element_bytes, **sizes)
                predictor = Predictor.assumed(job, self._grid, first, plans=PLANS, on_cpu=on_cpu)
                found = {"plans": list(map(asdict, predictor.plans)), "seconds": predictor(0.0)}
            except InputError as error:
                LOG.warning("plan auto: nothing to choose from, %s runs: %s", plan_in_words(first), error)
                found = {"plans": [asdict(first)], "seconds": [1.0]}
        told = self._first_says(found)
        return [override(Plan(), each, source="plan auto") for each in told["plans"]], lambda _: told["seconds"]

    def _first_says(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return what the first rank brings."""
        device, text = self._transport.device, torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        length = broadcast(self._transport, self._everyone, torch.tensor([len(text)], device=device), 0)
        text = text if self._transport.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
        found = broadcast(self._transport, self._everyone, text.to(device), 0)
        told: dict[str, Any] = json.loads(bytes(found.tolist()))
        return told

    def _switch(self, table: PlanTable, number: int) -> None:
        """Run all layers under a plan from now on; layers that are alike share one compiled plan."""
        on_cpu = self._transport.device.type == "cpu"
        for on_mesh, experts, _ in self._members():
            key = (number, bool(experts.names[1]))
            if key not in self._compiled:
                self._compiled[key] = compile_plan(
                    table.plans[number], self._grid, bias=key[1], host_runs_compute=on_cpu
                )
            on_mesh.use(self._compiled[key], experts)

    def _say(self, table: PlanTable, *, again: bool) -> None:
        assert table.running is not None
        best, first = table.timed.get(table.running, 0.0), table.timed.get(0, 0.0)
        why = "steps did not take what they took before; " if again else ""
        self.said.append(
            f"plan auto: {plan_in_words(table.plans[table.running])}, {1e3 * best:.1f} ms a step: {why}the fastest of "
            f"{len(table.timed)} plans, {plan_in_words(table.plans[0])} takes {1e3 * first:.1f} ms"
        )
        if self._transport.rank == 0:
            LOG.warning(self.said[-1])


UNTIMED = 1
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
        if self._steps == UNTIMED:
            for on_mesh, _, _ in self._members():
                on_mesh.clock = self._clocks.setdefault(on_mesh.compiled.digest, TaskClock(self._transport))
        elif self._steps == UNTIMED + TIMED:
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
