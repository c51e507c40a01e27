"""Cases over real processes: every rank of a case is a process on Gloo. Depth, where loopback gives breadth.

Parameters are DTensors here, so the gradient norm of training is checked here too. One world is started once for all its
cases; each case lays its own mesh over it.

`gather_evidence` runs the whole conformance suite: cases on loopback, and worlds of processes.
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
    """A case to run, with a bug or without."""

    case: Case
    patch: Patch = nullcontext
    """A function of a module, so that each process finds it by its name."""


def run_on_gloo(jobs: Sequence[ProcessCase]) -> list[Ran]:
    """Run cases of one world size, each rank a process.

    Args:
        jobs: at least one; all with the same number of ranks.

    Returns:
        what each job's ranks have at the end.
    """
    world = jobs[0].case.grid.world
    assert all(job.case.grid.world == world for job in jobs), "cases of one call have one world size"
    found = on_ranks(world, _run_all, list(jobs), timeout_seconds=TIMEOUT_SECONDS)
    works = [draw_workload(job.case) for job in jobs]
    return [
        Ran(job.case, work, expect(job.case, work), list(results))
        for job, work, results in zip(jobs, works, zip(*found))
    ]


def on_ranks(
    world: int,
    function: Callable[..., Any],
    *arguments: object,
    timeout_seconds: float = 1800.0,
    backend: str = "gloo",
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call `function(*arguments)` in `world` processes of one thread and one process group; return what each rank's returned.

    Args:
        world: processes.
        function: of a module; what it returns can be pickled.
        arguments: that can be pickled.
        timeout_seconds: of the process group.
        backend: of the process group.
        preload: as for `start_ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(world, _process, world, folder, timeout_seconds, backend, function, arguments, preload=preload)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def start_ranks(world: int, function: Callable[..., object], *arguments: object, preload: Sequence[str] = ()) -> None:
    """Call `function(rank, *arguments)` in `world` processes and wait for them; the first that fails ends all.

    Importing torch takes longer than most of what ranks do. So they are forked off a server that has imported this module once
    for all calls; elsewhere than on Linux each process starts anew.

    Args:
        world: processes.
        function: of a module.
        arguments: that can be pickled.
        preload: names of further modules that the server imports, if this call is the first.
    """
    if sys.platform == "linux":
        multiprocessing.set_forkserver_preload([__name__, *preload])
        start_processes(_rank, args=(function, *arguments), nprocs=world, start_method="forkserver")
    else:
        start_processes(_rank, args=(function, *arguments), nprocs=world, start_method="spawn")


def _rank(rank: int, function: Callable[..., object], *arguments: object) -> None:
    gc.freeze()  # else the first collection goes through all of torch, and copies its pages
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
    found = function(*arguments)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    leave()


def leave() -> None:
    """End a process whose work is on disk, once all ranks are there; it does not return.

    It does not wait for the interpreter to take itself apart, which takes longer than most of what ranks do.
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
"""World size to how many cases run as processes: starting these takes longer than running them."""


@dataclass
class Evidence:
    """What was found."""

    summary: Summary = field(default_factory=Summary)
    """Of the cases on loopback."""
    worlds: dict[int, int] = field(default_factory=dict)
    """World size to the cases that ran as processes."""
    gloo_failures: list[FailedCase] = field(default_factory=list)

    @property
    def failures(self) -> list[FailedCase]:
        """All cases that did not pass, on whatever transport."""
        return [*self.summary.failures, *self.gloo_failures]

    @property
    def passed(self) -> bool:
        """Whether no case failed."""
        return not self.failures


def gather_evidence(
    seeds: Sequence[int], *, workers: int, gloo: bool, told: Callable[[str, int], None] = lambda what, number: None
) -> Evidence:
    """Run cases and, with `gloo`, worlds of processes.

    Args:
        seeds: of the cases on loopback.
        workers: processes for these.
        gloo: start processes too.
        told: hears what is going on and how many of it are done.
    """
    evidence = Evidence()
    evidence.summary = run_seeds(seeds, workers=workers, done=lambda summary: told("cases", summary.cases))
    for world in WORLDS if gloo else ():
        cases = [draw_case(seed, world=world) for seed in range(GLOO_CASES[world])]
        for ran in run_on_gloo([ProcessCase(case) for case in cases]):
            if wrong := failures(ran.case, ran.errors):
                reason = ", ".join(f"{quantity} {error:.1e}" for quantity, error in wrong.items())
                evidence.gloo_failures.append(FailedCase(ran.case, f"on {world} processes: {reason}"))
        evidence.worlds[world] = len(cases)
        told("worlds", len(evidence.worlds))
    return evidence
