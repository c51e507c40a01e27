"""The part of the layer benchmark that runs on the ranks: one layer on one mesh, whose plans are
timed in turn.

Plans have names: those of the job's methods, which the tables show, and of its candidates, which
only the search may choose. Virtual compute: experts and codecs sleep instead of computing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.comm.mesh import Mesh, open_transport
from moesaic.comm.transport import AbstractTransport
from moesaic.layer import MoE
from moesaic.measure.host import BalancedRouter
from moesaic.measure.together import latest, start_together
from moesaic.routing.capacity import AbstractCapacity, Capacity, Dropless
from moesaic_lab.across_ranks import SteppedLayer, gathered, in_turn_and_near
from moesaic_lab.beds import Timed
from moesaic_lab.bounds import Message
from moesaic_lab.layer.cells import BEST, LayerJob
from moesaic_lab.measure import in_turn, paired
from moesaic_lab.recorder import Recorder
from moesaic_lab.virtual import Accelerator, virtual_codecs, virtual_experts

SWITCHES = 9
"""Timed repeats of a switch."""
BEHIND = 1.3
"""A plan is not tried again if its first trial takes at least this many times the fastest
plan's."""


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """The messages and virtual compute of one step of a method on one rank."""

    forward: list[Message]
    """Messages that the rank sent in the forward pass."""
    backward: list[Message]
    """Messages that the rank sent in the backward pass."""
    charged: float
    """Seconds of virtual compute."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """The cost of switching a layer to a plan, on one rank."""

    first_seconds: float
    """Processor time of the first switch, in which the plan is compiled."""
    first_call_seconds: float
    """Additional processor time of the first step under the plan over later steps; it works out
    which rows go where."""
    again_seconds: float
    """Median processor time of a later switch to the plan."""
    messages: int
    """Messages sent in all later switches to the plan."""
    allocated_bytes: int
    """Bytes of tensors created in all later switches to the plan."""


@dataclass(frozen=True, kw_only=True)
class LayerFound(Timed):
    """The measurements of one job on one rank. The phases of a run are forward and backward."""

    best: str
    """Method or candidate that the search chose; "" without a search."""
    trial: dict[str, float]
    """Median seconds of the plans that the search tried."""
    charged: dict[str, float]
    """Seconds of virtual compute in a step, by method."""
    switches: dict[str, Switch]
    """Costs of switching to a plan, by method; empty unless the job counts switches."""


class LayerRunner(SteppedLayer):
    """The layer of a job on its mesh, with virtual experts and codecs."""

    def __init__(self, job: LayerJob, transport: AbstractTransport) -> None:
        place = job.place
        capacity: AbstractCapacity = Dropless()
        if job.factor is not None:
            capacity = Capacity.fixed(job.factor, scope="rank", padded=True)
        self.accelerator = Accelerator(
            flops_per_second=1e9 * place.gflops,
            coded_bytes_per_second=1e6 * place.coded_mb_per_second,
        )
        layer = MoE(
            place.dim,
            place.hidden,
            place.num_experts,
            place.top_k,
            router=partial(BalancedRouter, seed=job.seed),
            experts=virtual_experts(self.accelerator),
            capacity=capacity,
            losses=(),
        )
        first_plan = next(iter(job.methods.values()))
        layer.parallelize(Mesh(job.grid, transport), first_plan)
        assert layer.on_mesh is not None
        layer.on_mesh.codecs = virtual_codecs(self.accelerator)
        super().__init__(layer, job.tokens, job.seed + job.grid.coordinate(transport.rank, "dp"))
        self.job = job

    def run(self, name: str) -> None:
        """Run one step of a method or candidate, including its other virtual products."""
        if name in self.job.other_flops:
            self.accelerator.multiply(self.job.other_flops[name])
        self.step(self.job.everything[name])


def measure(job: LayerJob) -> LayerFound:
    """Count, search and time the plans of a job on this rank. All ranks call this together."""
    transport = open_transport(name="sockets")
    runner = LayerRunner(job, transport)
    recorder = Recorder(transport)
    recorded_runner = LayerRunner(job, recorder)  # recording takes time, so it is not timed
    steps = {name: count(recorded_runner, recorder, name) for name in job.everything}
    switches = switch_costs(job, transport) if job.counts_switches else {}
    del recorded_runner
    gc.collect()
    gc.freeze()

    barrier = start_together(latest)
    runs = {name: partial(runner.run, name) for name in job.everything}
    methods = {name: runs[name] for name in job.methods}
    best = ""
    trial: dict[str, float] = {}
    if job.compete:
        best, trial = search(job, runs, barrier)
        methods[best] = runs[best]
    reference = job.reference or next(iter(methods))
    if job.reference == BEST:
        reference = best
    spans, pairs = in_turn_and_near(
        methods,
        job.place.repeats,
        job.place.pairs,
        partial(near_ones, job, reference=reference),
        barrier=barrier,
        warmup=job.warmup,
    )
    sent = {name: (steps[name].forward, steps[name].backward) for name in methods}
    charged = {name: steps[name].charged for name in methods}
    return LayerFound(
        spans=spans,
        pairs=pairs,
        sent=sent,
        charged=charged,
        best=best,
        trial=trial,
        switches=switches,
    )


def count(runner: LayerRunner, recorder: Recorder, name: str) -> CountedStep:
    """Run one step of a method or candidate, and return its messages and virtual compute.

    A step of the layer takes a range of message tags, one per task, the forward tasks first.
    Messages in other ranges, such as those of the routing, count as forward.
    """
    num_ranges = len(recorder.ranges)
    charged_before = runner.accelerator.charged
    runner.run(name)

    compiled = runner.job.everything[name]
    forward_tasks = len(compiled.forward.tasks)
    all_tasks = forward_tasks + len(compiled.backward.tasks)
    forward: list[Message] = []
    backward: list[Message] = []
    for tag_range in recorder.ranges[num_ranges:]:
        for message in tag_range.messages:
            is_backward = tag_range.length == all_tasks and message.tag >= forward_tasks
            sent = backward if is_backward else forward
            sent.append((message.source, message.target, float(message.num_bytes)))
    charged = runner.accelerator.charged - charged_before
    return CountedStep(forward=forward, backward=backward, charged=charged)


class _Counting(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        values = result if isinstance(result, tuple | list) else (result,)
        for value in values:
            if isinstance(value, Tensor):
                self.num_bytes += value.nbytes
        return result


def switch_costs(job: LayerJob, transport: AbstractTransport) -> dict[str, Switch]:
    """Return the cost of switching a new layer to each plan from another plan, for the first time
    and later, by method."""
    recorder = Recorder(transport)
    runner = LayerRunner(job, recorder)
    layer = runner.layer
    costs = {}
    plans = list(job.methods.values())
    for name, compiled in job.methods.items():
        other = plans[0] if compiled is not plans[0] else plans[-1]
        runner.step(other)
        first = _processor_seconds(partial(layer.use_plan, compiled.plan))
        calls = [_processor_seconds(partial(runner.step, None)) for _ in range(1 + SWITCHES)]
        extra_of_first_call = calls[0] - statistics.median(calls[1:])
        again = []
        messages = 0
        num_bytes = 0
        for _ in range(SWITCHES):
            layer.use_plan(other)
            before = _num_messages(recorder)
            with _Counting() as counting:
                again.append(_processor_seconds(partial(layer.use_plan, compiled.plan)))
            messages += _num_messages(recorder) - before
            num_bytes += counting.num_bytes
        costs[name] = Switch(
            first_seconds=first,
            first_call_seconds=max(extra_of_first_call, 0.0),
            again_seconds=statistics.median(again),
            messages=messages,
            allocated_bytes=num_bytes,
        )
    return costs


def search(
    job: LayerJob, runs: Mapping[str, Callable[[], None]], barrier: Callable[[], object]
) -> tuple[str, dict[str, float]]:
    """Try the candidates and the competing methods, and return the best plan and the median seconds
    of each plan.

    Plans that are far slower in the first trial are not tried again.
    """
    all_runs = {name: runs[name] for name in (*job.compete, *job.candidates)}
    first_repeats = min(job.trial_repeats, 1)
    seconds = gathered(in_turn(all_runs, first_repeats, barrier=barrier, warmup=0))

    contending = {name: runs[name] for name in contenders(seconds)}
    further_repeats = max(job.trial_repeats - 1, 0)
    further = gathered(in_turn(contending, further_repeats, barrier=barrier, warmup=0))
    for name, times in further.items():
        seconds[name] += times
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return choose(medians, job.compete[0], job.margin), medians


def contenders(seconds: Mapping[str, tuple[float, ...]]) -> list[str]:
    """Return the plans whose first trial was fast enough to be tried again; see `BEHIND`."""
    fastest = min(of_plan[0] for of_plan in seconds.values())
    return [name for name, of_plan in seconds.items() if of_plan[0] < BEHIND * fastest]


def choose(medians: Mapping[str, float], predicted: str, margin: float) -> str:
    """Return the plan `predicted`, unless the fastest plan's trial is shorter by more than the
    share `margin`."""
    fastest = min(medians, key=lambda name: medians[name])
    is_clearly_faster = medians[fastest] < (1 - margin) * medians[predicted]
    return fastest if is_clearly_faster else predicted


def near_ones(
    job: LayerJob, seconds_by_name: Mapping[str, tuple[float, ...]], reference: str
) -> list[str]:
    """Return the reference and the methods near it, or an empty list if no method is near it.
    `seconds_by_name` are those of each repeat, by method.

    If the reference is the plan that the search chose, only competing methods can be near.
    """
    others = job.compete if job.reference == BEST else tuple(seconds_by_name)
    near = [
        name
        for name in others
        if name != reference and paired(seconds_by_name[name], seconds_by_name[reference]).is_near
    ]
    return [reference, *near] if near else []


def _processor_seconds(function: Callable[[], object]) -> float:
    """Return the processor seconds of this thread in a function; they exclude ranks that share the
    core."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


def _num_messages(recorder: Recorder) -> int:
    """Return the number of recorded messages."""
    return sum(len(tag_range.messages) for tag_range in recorder.ranges)
