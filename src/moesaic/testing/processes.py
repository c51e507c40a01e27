"""Cases over real processes: every rank of a case is a process on Gloo. Depth, where loopback gives breadth.

Parameters are DTensors here, so the gradient norm of training is checked here too. One world is started once for all its
cases; each case lays its own mesh over it.
"""

from __future__ import annotations

import datetime
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from moesaic.comm.mesh import Mesh
from moesaic.layer import MoE
from moesaic.parallel import clip_grad_norm_
from moesaic.testing.cases import Case, draw_case
from moesaic.testing.equivalence import Patch, Ran, RankResult, compile_case, run_rank
from moesaic.testing.expected import expect
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
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, args=(world, list(jobs), folder), nprocs=world)
        found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
    works = [draw_workload(job.case) for job in jobs]
    return [
        Ran(job.case, work, expect(job.case, work), list(results))
        for job, work, results in zip(jobs, works, zip(*found))
    ]


def cases_for(world: int, count: int, first_seed: int = 0) -> list[Case]:
    """Return drawn cases for a world of processes, the first ones from a seed on."""
    return [draw_case(seed, world=world) for seed in range(first_seed, first_seed + count)]


def _process(rank: int, world: int, jobs: list[ProcessCase], folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), world)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    torch.save([_run(job) for job in jobs], Path(folder) / f"{rank}.pt")
    leave()


def leave() -> None:
    """End a process whose work is on disk, once all ranks are there; it does not return.

    Threads of process groups that were still referenced have aborted interpreters on their way out (about one in thirty).
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(job: ProcessCase) -> RankResult:
    grid = job.case.grid
    mesh = Mesh.create(
        tp=grid.tp, ep=grid.ep, etp=grid.etp, innermost=grid.innermost, ranks_per_node=grid.ranks_per_node
    )
    with job.patch():
        return run_rank(job.case, draw_workload(job.case), compile_case(job.case), mesh, _norm)


def _norm(layer: MoE, mesh: Mesh) -> float:
    assert isinstance(mesh, Mesh)
    norm = float(clip_grad_norm_(layer, math.inf))
    return norm if not math.isnan(norm) else math.inf
