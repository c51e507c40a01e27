"""Runs ranks: of any function in processes of this machine, and of the conformance suite's cases.

The suite runs most cases on loopback, with all ranks in one process, and some on real processes
over Gloo. Parameters are DTensors there, so the gradient norm of training is compared too. The
processes of a world size are started once for all its cases; each case creates its own mesh on
them. On loopback, values that a program declares replicated must also agree bit for bit.

A program is a layer's work on a mesh as data: tasks that read and write slots, which are named
values. A slot's state on each axis of the mesh says how its ranks' values belong together, for
example as copies of one value (`REPLICATED`).
"""

from __future__ import annotations

import datetime
import gc
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from moesaic.comm.mesh import Mesh
from moesaic.layer import MoE
from moesaic.parallel import clip_grad_norm_
from moesaic.program.grid import Axis, Grid
from moesaic.program.task import HELPERS, Kind, Program, Slot, State
from moesaic.runtime import executor
from moesaic.runtime.executor import Steps, interpret
from moesaic.runtime.tasks import Call, Environment, Value, rows
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import Errors, Patch, Ran, compile_case, ran_case, run_rank
from moesaic.testing.expected import Values, expect
from moesaic.testing.workload import draw_workload

TIMEOUT_SECONDS = 120
GLOO_CASES = {2: 8, 4: 6, 8: 4}
"""World size -> number of cases that run on processes. Few, since starting processes takes longer
than running a case."""
PART = 20
"""Number of cases that a worker runs per task."""


def on_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: object,
    timeout_seconds: float = 1800.0,
    backend: str = "gloo",
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call `function(*arguments)` in `world` processes that form a process group, and return each
    rank's result.

    Each process has a single thread.

    Args:
        world: number of processes.
        function: a module-level function with a result that can be pickled.
        arguments: arguments that can be pickled.
        timeout_seconds: timeout of the process group's collectives.
        preload: see `start_ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        # what `_process` gets after the rank, and before the function
        group_arguments = (world, folder, timeout_seconds, backend)
        start_ranks(world, _process, *group_arguments, function, arguments, preload=preload)
        results = []
        for rank in range(world):
            data = (Path(folder) / f"{rank}.pickle").read_bytes()
            results.append(pickle.loads(data))
        return results


def start_ranks(
    world: int, function: Callable[..., object], *arguments: object, preload: Sequence[str] = ()
) -> None:
    """Call `function(rank, *arguments)` in `world` processes and wait for them. If one fails, all
    are terminated.

    Importing torch takes longer than most ranks run. On Linux, processes are therefore forked from
    a server that imports this module once for all calls. On other systems each process imports it
    again.

    Args:
        world: number of processes.
        function: a module-level function.
        arguments: arguments that can be pickled.
        preload: names of further modules that the server imports; used by the first call only.
    """
    if sys.platform == "linux":
        multiprocessing.set_forkserver_preload([__name__, *preload])
        start_processes(_rank, args=(function, *arguments), nprocs=world, start_method="forkserver")
    else:
        start_processes(_rank, args=(function, *arguments), nprocs=world, start_method="spawn")


def _rank(rank: int, function: Callable[..., object], *arguments: object) -> None:
    """Run a function as one rank of the processes that were started."""
    # otherwise the first collection traverses all objects of torch, and copies the pages shared
    # with the server
    gc.freeze()
    renew_thread_pool()
    function(rank, *arguments)


def renew_thread_pool() -> None:
    """Replace torch's pool of threads, as a process of one thread that was forked from one that
    used it must.

    Otherwise the first use replaces it, and where two threads come first, one finds no pool
    ("Invalid thread pool!", torch 2.13).
    """
    torch.set_num_threads(torch.get_num_threads())


def _process(
    rank: int,
    world: int,
    folder: str,
    timeout_seconds: float,
    backend: str,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    """Join the process group, run a function and write its result to the folder."""
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), world)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    result = function(*arguments)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    leave()


def leave() -> None:
    """Exit this process once all ranks have called this function. Results must be on disk.

    Skips the interpreter's shutdown, which takes longer than most ranks run.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass(frozen=True)
class ProcessCase:
    """A case to run on processes, possibly with a planted bug."""

    case: Case
    patch: Patch = nullcontext
    """Plants the bug. Must be a module-level function, since it is pickled by name."""


def run_on_gloo(jobs: Sequence[ProcessCase]) -> list[Ran]:
    """Run cases, all of one world size, with a process for each rank; return each job's results
    with the expected ones."""
    world = jobs[0].case.grid.world
    assert all(job.case.grid.world == world for job in jobs), (
        "cases of one call have one world size"
    )
    results_by_rank = on_ranks(world, _run_all, list(jobs), timeout_seconds=TIMEOUT_SECONDS)
    ran = []
    for index, job in enumerate(jobs):
        expected = expect(job.case, draw_workload(job.case))
        ran.append(Ran(job.case, expected, [results[index] for results in results_by_rank]))
    return ran


def _run_all(jobs: Sequence[ProcessCase]) -> list[Values]:
    """Run cases on this rank, one after the other, and return its values of each."""
    results = []
    for job in jobs:
        grid = job.case.grid
        mesh = Mesh.create(
            tp=grid.tp,
            ep=grid.ep,
            etp=grid.etp,
            innermost=grid.innermost,
            ranks_per_node=grid.ranks_per_node,
        )
        with job.patch():
            work = draw_workload(job.case)
            compiled = compile_case(job.case)
            results.append(run_rank(job.case, work, compiled, mesh, norm=_norm))
    return results


def _norm(layer: MoE, mesh: Mesh) -> float:
    """Return the norm of a layer's gradients over the mesh; infinite instead of NaN."""
    norm = float(clip_grad_norm_(layer, math.inf))
    return norm if not math.isnan(norm) else math.inf


@dataclass(frozen=True)
class Checked:
    """A case that ran."""

    case: Case
    errors: Errors
    """Empty if the case raised an exception."""
    reason: str
    """Why it failed: the wrong quantities with their errors and ratios, or the exception; empty if
    it passed."""

    def __str__(self) -> str:
        return f"seed {self.case.seed}: {self.reason}\n  {self.case}"


@dataclass
class Evidence:
    """Results of the conformance suite."""

    loopback: list[Checked] = field(default_factory=list)
    processes: list[Checked] = field(default_factory=list)

    @property
    def failures(self) -> list[Checked]:
        """All failed cases, first those on loopback, by seed."""
        return [each for each in (*self.loopback, *self.processes) if each.reason]

    @property
    def worst(self) -> Errors:
        """Largest error of each quantity on loopback, over the cases that must be exact in
        float64."""
        worst: Errors = {}
        for checked in self.loopback:
            if checked.case.is_exact and checked.case.precision == "float64":
                for quantity, error in checked.errors.items():
                    worst[quantity] = max(error, worst.get(quantity, 0.0))
        return worst

    @property
    def worlds(self) -> dict[int, int]:
        """World size -> number of cases that ran on processes."""
        return dict(Counter(each.case.grid.world for each in self.processes))


def gather_evidence(
    seeds: Sequence[int],
    *,
    workers: int = 1,
    gloo: bool = False,
    progress: Callable[[str, int], object] = lambda *_: None,
) -> Evidence:
    """Run the conformance suite.

    Args:
        seeds: seeds of the cases on loopback.
        workers: number of worker processes for the cases on loopback; 1 runs them in this process.
        gloo: run cases on processes too.
        progress: called with ("cases", cases done so far) and ("worlds", world sizes done so far).
    """
    evidence = Evidence()
    parts = [seeds[start : start + PART] for start in range(0, len(seeds), PART)]
    for checked in _run_parts(parts, workers):
        evidence.loopback += checked
        progress("cases", len(evidence.loopback))
    evidence.loopback.sort(key=lambda each: each.case.seed)  # parts may end in any order
    if not gloo:
        return evidence
    for number, (world, count) in enumerate(GLOO_CASES.items(), start=1):
        jobs = [ProcessCase(draw_case(seed, world=world)) for seed in range(count)]
        for ran in run_on_gloo(jobs):
            evidence.processes.append(Checked(ran.case, ran.errors, ", ".join(ran.wrong)))
        progress("worlds", number)
    return evidence


def _run_parts(parts: Sequence[Sequence[int]], workers: int) -> Iterator[list[Checked]]:
    """Yield the results of each part as it is done."""
    if workers == 1:
        yield from map(run_part, parts)
        return
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        for future in as_completed([pool.submit(run_part, part) for part in parts]):
            yield future.result()


def run_part(seeds: Iterable[int]) -> list[Checked]:
    """Run the cases of `seeds` in this process."""
    return [check_case(draw_case(seed)) for seed in seeds]


def check_case(case: Case) -> Checked:
    """Run a case on loopback. If its plan is lossless, replicas must agree bit for bit at every
    slot of every program."""
    try:
        with observed() as runs:
            ran = ran_case(case)
        differing = disagreements(runs) if case.plan.is_lossless and case.replicates_bits else []
    except Exception as error:  # a bug may raise anything, and the suite must report it
        message = str(error).splitlines()[0] if str(error) else "no message"
        return Checked(case, {}, f"{type(error).__name__}: {message}")
    # the first three slots that differ say enough
    return Checked(case, ran.errors, ", ".join([*ran.wrong, *differing[:3]]))


@dataclass(frozen=True)
class Observed:
    """One run of a program on one rank."""

    program: Program
    call: Call
    """What the rank ran the program on."""
    values: Environment
    """The values of all slots, by name."""


@contextmanager
def observed() -> Iterator[list[Observed]]:
    """Collect every program that a layer runs inside the context, in the order in which the runs
    finish."""
    runs: list[Observed] = []

    def watching(
        program: Program,
        values: Mapping[str, Value],
        call: Call,
        wanted: Collection[str] | None = None,
        *,
        pauses: bool = False,
    ) -> Steps:
        """Interpret a program as a call does, and keep the values of all its slots."""
        # without `wanted`, so that every slot is computed
        environment = yield from interpret(program, values, call, pauses=pauses)
        runs.append(Observed(program, call, environment))
        return environment

    with mock.patch.object(executor, "interpret", watching):
        yield runs


def disagreements(runs: list[Observed]) -> list[str]:
    """Return a line for each slot that should be replicated or identical on an axis but has
    different bits on two ranks.

    Weights for replicated copies are not compared: each rank gets those that its copies need, so
    ranks may differ.

    Args:
        runs: the runs of all ranks; each rank must have done its runs in the same order.
    """
    by_rank: dict[int, list[Observed]] = {}
    for run in runs:
        by_rank.setdefault(run.call.rank, []).append(run)
    runs_of_ranks = [by_rank[rank] for rank in sorted(by_rank)]
    lines = set()
    for same_run in zip(*runs_of_ranks):  # one run, by rank
        grid = same_run[0].call.sizes.grid
        program = same_run[0].program
        for slot in program.slots:
            # weights for replicated copies
            if slot.kind is Kind.WEIGHT and slot.layout.chunk in HELPERS:
                continue
            for first, other in _replicas(slot, grid):
                value = same_run[first].values.get(slot.name)
                replica = same_run[other].values.get(slot.name)
                if value is not None and replica is not None and not _same(value, replica):
                    lines.add(
                        f"{program.name}: {slot.name} differs between ranks {first} and {other}"
                    )
    return sorted(lines)


def same_axes(slot: Slot) -> list[Axis]:
    """Return the axes along which all ranks hold the same value of a slot."""
    return [axis for axis, state in slot.state if state in (State.REPLICATED, State.IDENTICAL)]


def _replicas(slot: Slot, grid: Grid) -> Iterator[tuple[int, int]]:
    """Yield pairs (first rank of the group, other rank) that must hold the same value of a slot."""
    if slot.kind is Kind.PACKETS:  # messages in transit, of each rank its own
        return
    for axis in same_axes(slot):
        for rank in range(grid.world):
            first = grid.group(rank, (axis,))[0]
            if first != rank:
                yield first, rank


def _same(first: Value, second: Value) -> bool:
    """Return whether two results are equal in every bit."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(torch.equal, first, second))
    return torch.equal(rows(first), rows(second))
