"""Runs cases on real processes: every rank is a process on Gloo. It runs fewer cases than loopback, but under real conditions.

Parameters are DTensors here, so the gradient norm of training can be checked too. The processes of a world size are started
once for all its cases; each case creates its own mesh on them.

`gather_evidence` runs the whole conformance suite: cases on loopback, then cases on processes.
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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from moesaic.comm.mesh import Mesh
from moesaic.layer import MoE
from moesaic.parallel import clip_grad_norm_
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import Patch, Ran, RankResult, compile_case, failures, run_rank
from moesaic.testing.expected import expect
from moesaic.testing.suite import FailedCase, Summary, run_seeds
from moesaic.testing.workload import draw_workload

WORLDS = (2, 4, 8)
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class ProcessCase:
    """A case to run, possibly with a planted bug."""

    case: Case
    patch: Patch = nullcontext
    """Plants the bug. Must be a module-level function, since it is pickled by name."""


def run_on_gloo(jobs: Sequence[ProcessCase]) -> list[Ran]:
    """Run cases of one world size, with a process for each rank.

    Args:
        jobs: at least one case; all with the same number of ranks.

    Returns:
        each job's results, with the expected ones.
    """
    world = jobs[0].case.grid.world
    assert all(job.case.grid.world == world for job in jobs), "cases of one call have one world size"
    results_by_rank = on_ranks(world, _run_all, list(jobs), timeout_seconds=TIMEOUT_SECONDS)
    works = [draw_workload(job.case) for job in jobs]
    return [
        Ran(job.case, work, expect(job.case, work), list(results))
        for job, work, results in zip(jobs, works, zip(*results_by_rank))
    ]


def on_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: object,
    timeout_seconds: float = 1800.0,
    backend: str = "gloo",
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call `function(*arguments)` in `world` processes that form a process group, and return each rank's result.

    Each process has a single thread.

    Args:
        world: number of processes.
        function: a module-level function with a result that can be pickled.
        arguments: arguments that can be pickled.
        timeout_seconds: timeout of the process group's collectives.
        backend: backend of the process group.
        preload: see `start_ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(world, _process, world, folder, timeout_seconds, backend, function, arguments, preload=preload)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def start_ranks(world: int, function: Callable[..., object], *arguments: object, preload: Sequence[str] = ()) -> None:
    """Call `function(rank, *arguments)` in `world` processes and wait for them. If one fails, all are terminated.

    Importing torch takes longer than most ranks run. On Linux, processes are therefore forked from a server that imports this
    module once for all calls. On other systems each process imports it again.

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
    gc.freeze()  # otherwise the first collection traverses all objects of torch, and copies the pages shared with the server
    function(rank, *arguments)


def _process(
    rank: int,
    world: int,
    folder: str,
    timeout_seconds: float,
    backend: str,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
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


def _run_all(jobs: Sequence[ProcessCase]) -> list[RankResult]:
    results = []
    for job in jobs:
        grid = job.case.grid
        mesh = Mesh.create(
            tp=grid.tp, ep=grid.ep, etp=grid.etp, innermost=grid.innermost, ranks_per_node=grid.ranks_per_node
        )
        with job.patch():
            results.append(run_rank(job.case, draw_workload(job.case), compile_case(job.case), mesh, _norm))
    return results


def _norm(layer: MoE, mesh: Mesh) -> float:
    norm = float(clip_grad_norm_(layer, math.inf))
    return norm if not math.isnan(norm) else math.inf


GLOO_CASES = {2: 8, 4: 6, 8: 4}
"""World size -> number of cases that run on processes. Few, since starting processes takes longer than running a case."""


@dataclass
class Evidence:
    """Results of the conformance suite."""

    summary: Summary = field(default_factory=Summary)
    """Results of the cases on loopback."""
    worlds: dict[int, int] = field(default_factory=dict)
    """World size -> number of cases that ran on processes."""
    gloo_failures: list[FailedCase] = field(default_factory=list)

    @property
    def failures(self) -> list[FailedCase]:
        """All failed cases, on loopback and on processes."""
        return [*self.summary.failures, *self.gloo_failures]

    @property
    def passed(self) -> bool:
        """Whether no case failed."""
        return not self.failures


def gather_evidence(
    seeds: Sequence[int], *, workers: int, gloo: bool, progress: Callable[[str, int], None] = lambda what, number: None
) -> Evidence:
    """Run the conformance suite.

    Args:
        seeds: seeds of the cases on loopback.
        workers: number of worker processes for the cases on loopback.
        gloo: run cases on processes too.
        progress: called with ("cases", cases done so far) and ("worlds", world sizes done so far) to report progress.
    """
    evidence = Evidence()
    evidence.summary = run_seeds(seeds, workers=workers, progress=lambda summary: progress("cases", summary.cases))
    for world in WORLDS if gloo else ():
        cases = [draw_case(seed, world=world) for seed in range(GLOO_CASES[world])]
        for ran in run_on_gloo([ProcessCase(case) for case in cases]):
            if wrong := failures(ran.case, ran.errors):
                reason = ", ".join(f"{quantity} {error:.1e}" for quantity, error in wrong.items())
                evidence.gloo_failures.append(FailedCase(ran.case, f"on {world} processes: {reason}"))
        evidence.worlds[world] = len(cases)
        progress("worlds", len(evidence.worlds))
    return evidence
