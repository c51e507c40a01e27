"""`plan="auto"`: all layers of a mesh run under the plan with the fastest training steps, found
while they train; and one micro-batch at a time or two (`moesaic.in_flight`), whichever is faster.

A *race* times plans in turn, each for a few steps; a *load* is the copies (tokens times experts
per token) of the busiest expert; a plan's *number* is its index in the plan table, which has each
plan twice if micro-batches are in flight: with one at a time, and with two.

The plan table (`planner/plan_table.py`) decides when to switch, by the times of whole steps on the
slowest rank. After two steps, the first rank searches candidate plans for the layers' sizes; the
links need not be known. Where a cluster is named, `prefill` gives the candidates and predicted
times instead, and the plan follows the load. A switch moves no weight, and plans are equivalent, so
times decide only how a layer runs, not what it computes.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moesaic.comm.collectives import all_reduce_max, broadcast
from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import TURN
from moesaic.configfile import override
from moesaic.errors import InputError
from moesaic.experts.experts import AbstractExperts
from moesaic.planner.plan_table import PlanTable, Predict, TableSettings
from moesaic.planner.predicted_plans import assumed_plans, layer_job
from moesaic.program.compile import Compiled, compile_plan
from moesaic.program.plan import Plan, plan_in_words
from moesaic.runtime.expert_parallel import ExpertParallel
from moesaic.runtime.routing_cache import is_recomputing

PLANS = 7
"""Number of candidates besides the first plan: a race of eight takes 52 steps, and the winner runs
20 in turn with the first plan."""
PLANS_IN_FLIGHT = 3
"""The same where each plan races twice, with one micro-batch at a time and with two: the best plan
on each of three assumed links, and again a race of eight."""
AT_ONCE = {1: "one micro-batch at a time", 2: "two micro-batches in flight"}
"""Numbers of micro-batches that run at a time, in words."""
WARM_UP = 2
"""Number of steps before the first timed one."""
PATIENCE = 300
"""Number of backward passes without an optimizer's step after which a line says that no plan is
timed."""
PERIOD = 8
"""After the race, a GPU's step time is averaged over this many steps, since reading it waits for
the GPU."""
LOG = logging.getLogger("moesaic")


class AutoPlan:
    """Chooses the plan of all layers on a mesh that have the plan "auto". Get it with
    `AutoPlan.of`.

    A step ends when a layer is called with gradients for the first time after an optimizer stepped.
    All ranks step together.

    Args:
        clock: returns the current time in seconds on this rank.
    """

    def __init__(self, mesh: Mesh, clock: Callable[[], float] = time.perf_counter) -> None:
        self._grid = mesh.grid
        self._transport = mesh.transport
        self._everyone = tuple(range(mesh.grid.world))
        self._layers: list[
            tuple[weakref.ref[ExpertParallel], weakref.ref[AbstractExperts], dict[str, int]]
        ] = []
        """Each layer's state on the mesh, its experts, and its sizes (dim, hidden, num_experts)."""
        self._parameters: list[Callable[[], Iterable[Tensor]]] = []
        """For each layer, a function that returns its parameters."""
        self._steps_layers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether an optimizer that has stepped has any of the layers' trained parameters."""
        self._compiled: dict[tuple[Plan, bool], Compiled] = {}
        """The compiled plans, by plan and whether the experts have biases."""
        self._in_flight = False
        """Whether micro-batches that may run two at a time have called a layer with gradients."""
        self._at_once: tuple[int, ...] = ()
        """By the plan's number, how many micro-batches run at a time; () if none are in flight."""
        self._last_call = (0, 1, 4)
        """Tokens, experts per token and bytes per element of the last call."""
        self._load_now: Callable[[], float] | None = None
        """Returns the load of the step that ends; None if the plan does not follow the load."""
        self._steps = 0
        """Number of steps since the last layer joined."""
        self._calls = 0
        """Number of calls of layers with gradients."""
        self._unrecorded = 0
        """Number of steps since the plan table was told a time."""
        self._has_stepped = False
        """Whether an optimizer has stepped since the last call."""
        self._timed_from = 0.0
        """When the first of the unrecorded steps began, by the clock."""
        self._reported = 0
        """Number of the table's decisions that `values` has returned."""

        self.clock = clock
        self.load = 0.0
        """The load of the last step on the rank with the largest; 0 if the plan does not follow the
        load."""
        self.table: PlanTable | None = None
        """The plan table; None until candidates were searched."""
        self.saved: dict[str, Any] | None = None
        """A `state` to go on from, the same on all ranks."""
        self.said: list[str] = []
        """The log lines, one for each finished race."""
        self.say: Callable[[str], None] = LOG.warning
        """Called on the first rank with every line."""

        self_ref = weakref.ref(self)
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, *_: _note_step(self_ref(), optimizer)
        )
        weakref.finalize(self, handle.remove)

    @classmethod
    def of(cls, mesh: Mesh) -> AutoPlan:
        """Return the object of a mesh, created at the first call."""
        if cls not in mesh.shared:
            mesh.shared[cls] = cls(mesh)
        auto: AutoPlan = mesh.shared[cls]
        return auto

    def join(
        self,
        on_mesh: ExpertParallel,
        experts: AbstractExperts,
        hidden: int,
        parameters: Callable[[], Iterable[Tensor]],
    ) -> None:
        """Add a layer. Earlier results are dropped, since they were measured for other layers.

        Args:
            on_mesh: the layer's state on the mesh; it calls `begin` before each call.
            experts: the layer's experts.
            hidden: inner width of one whole expert.
            parameters: returns the layer's parameters. Called late, since wrappers replace
                parameters.
        """
        if self._grid.world == 1:
            return
        sizes = {"dim": experts.dim, "hidden": hidden, "num_experts": experts.num_experts}
        self._layers.append((weakref.ref(on_mesh), weakref.ref(experts), sizes))
        self._parameters.append(parameters)
        self._steps_layers.clear()
        self._compiled.clear()
        self._forget_times()
        on_mesh.auto = self.begin

    def _forget_times(self) -> None:
        """Begin anew with the steps that warm up."""
        self._steps = 0
        self.table = None
        self._at_once = ()

    def prefill(
        self,
        plans: Sequence[Plan],
        predict: Predict | None,
        load: Callable[[], float],
        expected_load: float,
        settings: TableSettings,
    ) -> None:
        """Choose among plans by predicted times at first. All ranks call this after the layers
        joined.

        Args:
            plans: the candidates, the same on all ranks.
            predict: predicts step times by load on the first rank; None on the others.
            load: returns the load of the step that ends. Called just before the optimizer steps.
            expected_load: load of the first step.
        """
        if not self._layers:
            return
        self._load_now = load
        self.load = expected_load

        def predict_on_first_rank(load: float) -> list[float]:
            """Return the first rank's prediction for a load, the same on all ranks."""
            own_seconds = [] if predict is None else list(predict(load))
            seconds: list[float] = self._from_first_rank(own_seconds)
            return seconds

        self._begin_table(plans, predict_on_first_rank, settings)

    def begin(self, tokens: int, top_k: int, dtype: torch.dtype) -> None:
        """Called before each call of a layer. The first call after an optimizer step may switch to
        another plan. The first call of a micro-batch says whether another one may run beside it.

        Args:
            tokens: tokens of this rank's tensor-parallel group.
            top_k: experts per token.
            dtype: dtype of the rows that are sent.
        """
        turn = TURN.get()
        is_asked = turn is not None and turn.at_once is None
        if torch.is_grad_enabled() and not is_recomputing():
            self._note_call(tokens, top_k, dtype, is_in_flight=is_asked)
        if turn is not None and is_asked and self._at_once:
            assert self.table is not None
            assert self.table.running is not None
            turn.at_once = self._at_once[self.table.running]

    def _note_call(
        self, tokens: int, top_k: int, dtype: torch.dtype, *, is_in_flight: bool
    ) -> None:
        """Note a call with gradients, with the arguments of `begin`, and end the step before it if
        it is the first call of a step. `is_in_flight` says whether its micro-batch may run beside
        another one."""
        if is_in_flight and not self._in_flight:  # earlier times are of other steps
            self._in_flight = True
            self._forget_times()
        self._last_call = (tokens, top_k, dtype.itemsize)
        self._calls += 1
        never_stepped = not self._steps and not self._has_stepped
        # each backward pass follows one call of each layer
        if never_stepped and self._calls == PATIENCE * len(self._layers):
            self._say(
                f"plan auto: {PATIENCE} backward passes and no step of a torch optimizer with the "
                "layers' parameters, so plans are not timed: let a torch.optim.Optimizer step "
                "them, or name a plan instead of auto"
            )
        if self._has_stepped:
            self._has_stepped = False
            self._steps += 1
            self._end_step()

    def values(self) -> dict[str, Any]:
        """Return what runs and what was decided since the previous call, as plain data; empty
        without a plan table."""
        table = self.table
        if table is None or table.running is None:
            return {}
        new = table.decisions[self._reported :]
        self._reported = len(table.decisions)
        return {
            "running": self._in_words(table.running),
            "load": self.load,
            "estimated_seconds": table.estimates()[table.running],
            "switches": table.switches,
            "explored_share": table.explored / table.steps,  # steps on trial
            "decisions": [
                # a bucket is the number of a range of loads
                [each.step, each.why, each.bucket, self._in_words(each.plan)]
                for each in new
            ],
        }

    def state(self) -> dict[str, Any] | None:
        """Return the plan table as plain data for JSON; None if there is none yet."""
        if self.table is None:
            return None
        return {"mesh": asdict(self._grid), **self.table.state()}

    def _note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer steps. It counts only if the optimizer has any of the layers'
        trained parameters."""
        if optimizer not in self._steps_layers:
            trained: set[int] = set()
            for parameters_of in self._parameters:
                trained |= {id(each) for each in parameters_of() if each.requires_grad}
            stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
            # where all layers are frozen, any optimizer ends a step
            self._steps_layers[optimizer] = not trained or bool(trained & stepped)
        if self._steps_layers[optimizer]:
            self._has_stepped = True
            if self._load_now is not None:
                self.load = self._load_now()

    def _end_step(self) -> None:
        """Record the step that ended, and choose the plan of the next one."""
        if self.table is None:
            if self._steps >= WARM_UP:
                candidates = self._candidates(self._current_plan())
                if self._in_flight:
                    # one comes first: two must be faster to take its place
                    self._at_once = tuple(AT_ONCE) * len(candidates)
                    candidates = [plan for plan in candidates for _ in AT_ONCE]
                self._begin_table(candidates, predict=None, settings=None)
            return
        self._unrecorded += 1
        # several steps may share one reading of the clock where neither the load of each step nor
        # its time in a race is needed
        may_average = (
            self._transport.device.type == "cuda"
            and self._load_now is None
            and self.table.race is None
        )
        if may_average and self._unrecorded < PERIOD:
            return

        own_seconds = (self._now() - self._timed_from) / self._unrecorded  # per step
        own = torch.tensor([own_seconds, self.load], dtype=torch.float64)
        slowest = all_reduce_max(self._transport, self._everyone, own.to(self._transport.device))
        seconds, self.load = slowest.tolist()
        self.table.record(seconds, self.load)
        self._choose(self.table)

    def _now(self) -> float:
        """Return the time at which this rank's device has done its work."""
        if self._transport.device.type == "cuda":
            torch.cuda.synchronize(self._transport.device)
        return self.clock()

    def _members(self) -> Iterator[tuple[ExpertParallel, AbstractExperts, dict[str, int]]]:
        """Yield the layers that still exist and still take their plan from this object."""
        for layer_ref, experts_ref, sizes in self._layers:
            on_mesh = layer_ref()
            experts = experts_ref()
            if on_mesh is not None and experts is not None and on_mesh.auto == self.begin:
                yield on_mesh, experts, sizes

    def _current_plan(self) -> Plan:
        """Return the plan that the layers run under."""
        on_mesh, _, _ = next(self._members())
        return on_mesh.compiled.plan

    def _candidates(self, first: Plan) -> list[Plan]:
        """Return candidate plans for unknown links, as searched by the first rank. The current
        plan, `first`, comes first."""
        plans = [first]
        if self._transport.rank == 0:
            tokens, top_k, element_bytes = self._last_call
            _, _, sizes = next(self._members())
            on_cpu = self._transport.device.type == "cpu"
            try:
                job = layer_job(
                    self._grid, tokens=tokens, top_k=top_k, element_bytes=element_bytes, **sizes
                )
                others = PLANS_IN_FLIGHT if self._in_flight else PLANS
                plans = assumed_plans(job, self._grid, first, plans=others, on_cpu=on_cpu)
            except InputError as error:
                self.say(f"plan auto: nothing to choose from, {plan_in_words(first)} runs: {error}")
        tables = self._from_first_rank([asdict(plan) for plan in plans])
        return [override(Plan(), table, source="plan auto") for table in tables]

    def _from_first_rank(self, value: Any) -> Any:
        """Return the first rank's value, plain data that is sent as JSON; those of others are
        ignored."""
        device = self._transport.device
        encoded = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        own_length = torch.tensor([len(encoded)], device=device)
        length = broadcast(self._transport, self._everyone, own_length, source=0)
        if self._transport.rank != 0:
            encoded = torch.zeros(int(length), dtype=torch.uint8)  # only its shape counts
        received = broadcast(self._transport, self._everyone, encoded.to(device), source=0)
        return json.loads(bytes(received.tolist()))

    def _begin_table(
        self, plans: Sequence[Plan], predict: Predict | None, settings: TableSettings | None
    ) -> None:
        """Make the plan table, restored from `saved` if that is for the same mesh, and choose the
        first plan."""
        first = self._current_plan()
        # of plans with lossy codecs, only those with the first plan's run: the user chose them
        tested = {(first.codec, first.backward_codec)}
        self.table = PlanTable(plans, predict, settings, load=self.load, tested=tested)
        saved = self.saved
        self.saved = None
        try:
            if saved is not None and saved.get("mesh") == asdict(self._grid):
                self.table.restore(saved)
        except InputError as error:
            self.table = PlanTable(plans, predict, settings, load=self.load, tested=tested)
            self._tell(
                f"plan auto: the checkpoint's plan table is unusable ({error}), so plans are "
                "timed anew"
            )
        self._choose(self.table)

    def _choose(self, table: PlanTable) -> None:
        """Run the next step under the plan that the table chooses. Layers with and without biases
        get a compiled one each."""
        before = table.running
        was_racing = table.race is not None
        number = table.choose()
        if number != before:
            for on_mesh, experts, _ in self._members():
                _, common_names = experts.names
                has_bias = bool(common_names)
                plan = table.plans[number]
                key = (plan, has_bias)
                if key not in self._compiled:
                    self._compiled[key] = compile_plan(plan, self._grid, bias=has_bias)
                on_mesh.use(self._compiled[key], experts)
        if was_racing and table.race is None:  # this choice ended the race
            self._tell_winner(table, number)
        self._unrecorded = 0
        self._timed_from = self._now()

    def _tell_winner(self, table: PlanTable, number: int) -> None:
        """Say which plan won a race, and how long a step takes under it and under the first
        plan."""
        # `timed`: by number, the seconds of a step under each plan that the race timed
        milliseconds = 1e3 * table.timed.get(number, 0.0)
        why = "step times have changed; " if table.races > 1 else ""
        beside_first = ""
        if 0 in table.timed:  # the first plan
            beside_first = f", {self._in_words(0)} takes {1e3 * table.timed[0]:.1f} ms"
        ways = "ways" if self._at_once else "plans"
        self._tell(
            f"plan auto: {self._in_words(number)}, {milliseconds:.1f} ms a step: {why}the fastest "
            f"of {len(table.timed)} {ways}{beside_first}"
        )

    def _in_words(self, number: int) -> str:
        """Return a plan of the table in words, with how many micro-batches run at a time if that is
        a choice."""
        assert self.table is not None
        words = plan_in_words(self.table.plans[number])
        if not self._at_once:
            return words
        return f"{words}, {AT_ONCE[self._at_once[number]]}"

    def _tell(self, line: str) -> None:
        """Keep a line, and say it on the first rank."""
        self.said.append(line)
        self._say(line)

    def _say(self, line: str) -> None:
        """Say a line on the first rank."""
        if self._transport.rank == 0:
            self.say(line)


def _note_step(auto: AutoPlan | None, optimizer: Optimizer) -> None:
    """Call `AutoPlan._note_step` unless the object is gone."""
    if auto is not None:
        auto._note_step(optimizer)
