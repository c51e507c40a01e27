"""The part of the layer benchmark that runs on the ranks: one layer on one mesh, whose plans are
timed in turn."""

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
from moesaic.routing.capacity import Capacity, Dropless
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
            capacity=Dropless()
            if job.factor is None
            else Capacity.fixed(job.factor, scope="rank", padded=True),
            losses=(),
        )
        layer.parallelize(Mesh(job.grid, transport), next(iter(job.methods.values())))
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
    recorded = LayerRunner(job, recorder)
    steps = {name: count(recorded, recorder, name) for name in job.everything}
    switches = switch_costs(job, transport) if job.counts_switches else {}
    del recorded
    gc.collect()
    gc.freeze()
    barrier = start_together(latest)
    run = {name: partial(runner.run, name) for name in job.everything}
    best, trial = search(job, run, barrier) if job.compete else ("", {})
    methods = {name: run[name] for name in job.methods} | ({best: run[best]} if best else {})
    reference = best if job.reference == BEST else job.reference or next(iter(methods))
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
    """Run one step of a method or candidate, and return its messages and virtual compute."""
    num_ranges = len(recorder.ranges)
    before = runner.accelerator.charged
    compiled = runner.job.everything[name]
    runner.run(name)
    forward_tasks = len(compiled.forward.tasks)
    of_program = forward_tasks + len(compiled.backward.tasks)
    sent: tuple[list, list] = ([], [])
    for tag_range in recorder.ranges[num_ranges:]:
        for message in tag_range.messages:
            is_backward = tag_range.length == of_program and message.tag >= forward_tasks
            sent[is_backward].append((message.source, message.target, float(message.num_bytes)))
    return CountedStep(
        forward=sent[0], backward=sent[1], charged=runner.accelerator.charged - before
    )


class _Counting(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            self.num_bytes += value.nbytes if isinstance(value, Tensor) else 0
        return result


def switch_costs(job: LayerJob, transport: AbstractTransport) -> dict[str, Switch]:
    """Return the cost of switching a new layer to each plan from another plan, for the first time
    and later."""
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
            first_call_seconds=max(calls[0] - statistics.median(calls[1:]), 0.0),
            again_seconds=statistics.median(again),
            messages=messages,
            allocated_bytes=num_bytes,
        )
    return costs


def search(
    job: LayerJob, run: Mapping[str, Callable[[], None]], barrier: Callable[[], object]
) -> tuple[str, dict[str, float]]:
    """Try the candidates and the competing methods, and return the best plan and the median seconds
    of each plan.

    Plans that are far slower in the first trial are not tried again.
    """
    all_runs = {name: run[name] for name in (*job.compete, *job.candidates)}
    first_repeats = min(job.trial_repeats, 1)
    seconds = gathered(in_turn(all_runs, first_repeats, barrier=barrier, warmup=0))
    contending = {name: run[name] for name in contenders(seconds)}
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
    return fastest if medians[fastest] < (1 - margin) * medians[predicted] else predicted


def near_ones(job: LayerJob, seconds: Mapping[str, tuple[float, ...]], reference: str) -> list[str]:
    """Return the reference and the methods near it, or an empty list if no method is near it.

    If the reference is the plan that the search chose, only competing methods can be near.
    """
    others = job.compete if job.reference == BEST else tuple(seconds)
    near = [
        name
        for name in others
        if name != reference and paired(seconds[name], seconds[reference]).is_near
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
