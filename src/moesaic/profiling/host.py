"""Processor time of whole layers on the real transport, and how much longer it takes while all ranks of a machine compute.

The layers that the host is calibrated on have small shapes and every kind of task; they are never those of a benchmark.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from moesaic.comm.mesh import Mesh
from moesaic.comm.transport import AbstractTransport
from moesaic.cost.workload import Workload
from moesaic.errors import InputError
from moesaic.layer import MoE
from moesaic.plan import Compiled, Plan, compile_plan
from moesaic.profiling.idle import BalancedRouter, IdleExperts, visits
from moesaic.profiling.together import gathered
from moesaic.program.grid import Grid

SPIN_SECONDS = 0.02
"""Of processor time, for the sharing of cores: several time slices of a scheduler."""


@dataclass(frozen=True)
class CalibrationStep:
    """What one calibration took, per repeat, over all ranks."""

    processor: tuple[float, ...]
    """Seconds of processor time of a rank, all threads, the mean over ranks."""
    wall: tuple[float, ...]
    """Seconds from the first rank's start to the last one's end."""


def host_steps(
    found: Sequence[Calibration],
    transport: AbstractTransport,
    repeats: int,
    barrier: Callable[[], object],
    progress: Callable[[float], object],
) -> list[tuple[Calibration, CalibrationStep]]:
    """Time layers whose experts compute nothing, all in turn; all ranks call it together and get the same.

    Args:
        found: the layers.
        transport: between the ranks.
        repeats: of each layer's step, after a first one in which it is worked out what rows go where.
        barrier: lets all ranks go at one moment.
        progress: told the share that is done.
    """
    layers: dict[object, _Layer] = {}
    for each in found:
        key = (each.mesh, each.workload)
        if key not in layers:
            layers[key] = _Layer(each, transport)
    taken: list[list[tuple[float, float, float]]] = [[] for _ in found]
    gc.collect()
    for repeat in range(-1, repeats):
        for number, each in enumerate(found):
            progress((repeat + 1 + number / len(found)) / (repeats + 1))
            barrier()
            start, before = time.monotonic(), time.process_time()
            layers[each.mesh, each.workload].step(each)
            if repeat >= 0:
                taken[number].append((start, time.monotonic(), time.process_time() - before))
    everyone = gathered(taken)
    return [(each, _over_ranks([of_rank[number] for of_rank in everyone])) for number, each in enumerate(found)]


def _over_ranks(spans: list[list[tuple[float, float, float]]]) -> CalibrationStep:
    """Return what a step took, from each rank's (start, end, processor seconds) per repeat."""
    return CalibrationStep(
        processor=tuple(statistics.fmean(span[2] for span in each) for each in zip(*spans)),
        wall=tuple(max(span[1] for span in each) - min(span[0] for span in each) for each in zip(*spans)),
    )


class _Layer:
    def __init__(self, first: Calibration, transport: AbstractTransport) -> None:
        workload = first.workload
        self.layer = MoE(
            workload.dim,
            workload.hidden,
            workload.num_experts,
            workload.top_k,
            router=BalancedRouter,
            experts=IdleExperts,
            losses=(),
        )
        self.layer.parallelize(Mesh(first.mesh, transport), first.compiled)
        self.x = torch.ones(first.tokens, workload.dim).requires_grad_()
        self._dy = torch.ones(first.tokens, workload.dim)

    def step(self, each: Calibration) -> None:
        self.layer.use_plan(each.compiled)
        self.layer(self.x).backward(self._dy)
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None


def sharing(repeats: int, barrier: Callable[[], object]) -> tuple[float, ...]:
    """Return how much longer a rank takes for its processor time while all ranks compute, per repeat; at least 1."""
    mine = []
    for _ in range(repeats):
        barrier()
        start, before, count = time.monotonic(), time.thread_time(), 0
        while time.thread_time() - before < SPIN_SECONDS:
            count += sum(range(1000)) > 0
        mine.append((time.monotonic() - start) / (time.thread_time() - before))
    return tuple(max(1.0, statistics.fmean(each)) for each in zip(*gathered(mine)))


EXPERTS_PER_RANK = 2
SHAPES = ((32, 32, 1), (256, 32, 4), (256, 1024, 1))
"""dim, hidden, tokens per rank and expert: little of everything; wide rows; heavy weights."""
PLANS = (
    Plan(),
    Plan(chunks=4),
    Plan(chunks=2, all_to_all="hier2d"),
    Plan(chunks=4, all_to_all="naive"),
    Plan(schedule="baseline", all_to_all="pipelined"),
    Plan(schedule="baseline", chunks=2),
    Plan(schedule="s2", all_to_all="hier1d"),
    Plan(schedule="s2", chunks=4, all_to_all="pipelined"),
    Plan(schedule="s3", chunks=2, all_to_all="hier3d"),
    Plan(all_to_all="multicast", chunks=2),
)
"""Kinds of tasks in different proportions; those that do not fit a mesh are left out."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One layer under one plan."""

    name: str
    """Shown where it fails."""
    compiled: Compiled
    mesh: Grid
    """On which the layer is spread; the plan's own may factor etp."""
    workload: Workload

    @property
    def tokens(self) -> int:
        """Of a tensor group."""
        return self.workload.tokens

    @property
    def routed(self) -> Workload:
        """The workload, with what is known of how the balanced router routes it."""
        tokens = self.tokens // (self.mesh.tp if self.compiled.routes_slices else 1)
        chunks = self.compiled.plan.chunks
        return replace(self.workload, visits=visits(tokens, self.workload.top_k, self.workload.num_experts, 0, chunks))


def calibrations(world: int, ranks_per_node: int) -> Iterator[Calibration]:
    """Yield the layers for a number of ranks, shape by shape."""
    num_experts = EXPERTS_PER_RANK * world
    for (dim, hidden, each), grid in itertools.product(SHAPES, _grids(world, ranks_per_node)):
        workload = Workload(
            tokens=each * num_experts * grid.tp, num_experts=num_experts, top_k=min(2, num_experts), dim=dim, hidden=hidden,
            matrices=2, dtype="fp32",
        )  # fmt: skip
        seen: set[bytes] = set()
        for plan in PLANS:
            try:
                compiled = compile_plan(plan, grid)
            except InputError:
                continue
            if compiled.digest not in seen:
                seen.add(compiled.digest)
                name = f"tp {grid.tp}, etp {grid.etp}, dim {dim}, hidden {hidden}, {plan}"
                yield Calibration(name=name, compiled=compiled, mesh=grid, workload=workload)


def _grids(world: int, ranks_per_node: int) -> list[Grid]:
    if world % 2:
        return [Grid(world=world, ep=world, ranks_per_node=ranks_per_node)]
    return [
        Grid(world=world, tp=2, ep=world, ranks_per_node=ranks_per_node),
        Grid(world=world, ep=world // 2, etp=2, ranks_per_node=ranks_per_node),
    ]
