"""Cases over real processes: every rank of a case is a process on Gloo. Depth, where loopback gives breadth."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from moesaic.comm.gloo import Gloo
from moesaic.runtime.drive import drive
from moesaic.runtime.interpret import interpret
from moesaic.testing.cases import Case
from moesaic.testing.equivalence import Errors, Prepared


def run_on_gloo(cases: Sequence[Case]) -> list[Errors]:
    """Run cases of one world size, each rank a process, and compare them with the reference.

    Args:
        cases: at least one; all with the same number of ranks.

    Returns:
        the errors per case: the largest over the ranks, expert gradients of all ranks together.
    """
    world = cases[0].grid.world
    assert all(case.grid.world == world for case in cases), "cases of one call have one world size"
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, args=(world, list(cases), folder), nprocs=world)
        found: list[list[Errors]] = [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(world)]
    return [
        Errors(
            output=max(e.output for e in of_ranks),
            input_gradient=max(e.input_gradient for e in of_ranks),
            gate_gradient=max(e.gate_gradient for e in of_ranks),
            expert_gradient=max(e.expert_gradient for e in of_ranks),
        )
        for of_ranks in zip(*found)
    ]


def _process(rank: int, world: int, cases: list[Case], folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), world)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    wire = Gloo(group)
    found = []
    for number, case in enumerate(cases):
        run = Prepared.of(case)
        part = run.ranks[rank]
        tag = 1000 * number
        first = drive(interpret(run.forward, part.inputs, run.call(part, tag)), wire)
        second = drive(interpret(run.backward, run.cotangents(part, first), run.call(part, tag + 500)), wire)
        whole = [torch.zeros_like(parameter) for parameter in run.work.whole.parameters()]
        part.add_gradients(whole)
        for gradient in whole:
            dist.all_reduce(gradient)
        errors = run.errors(part, first, second)
        found.append(Errors(errors.output, errors.input_gradient, errors.gate_gradient, run.expert_error(whole)))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
