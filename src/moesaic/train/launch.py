"""Several processes, as torchrun starts them: joining them into a group, and one line on behalf of all when one fails."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class Launch:
    """This process's place among those that torchrun started; alone without torchrun.

    Args:
        store: which all of them reach; None for one alone.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    @property
    def is_first(self) -> bool:
        """Whether this process talks to people."""
        return self._store is None or dist.get_rank() == 0

    def fails_first(self) -> bool:
        """Note that this process fails; return whether no other did before, in which case it should say why."""
        if self._store is None:
            return True
        try:
            return bool(self._store.add("moesaic/failures", 1) == 1)
        except RuntimeError:  # the store went away with the process that failed first
            return False

    def leave(self) -> None:
        """End the process after a run that went well; return where there are no others.

        It does not wait for the interpreter to take itself apart: threads of process groups have aborted it there, after
        everything was saved (about one run in ten), and torchrun then reports a failure.
        """
        if self._store is not None:
            dist.barrier()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def launch() -> Launch:
    """Join the processes that torchrun started, Gloo on CPUs and NCCL on GPUs, each rank of a node with its own GPU.

    CPU tensors stay on Gloo where there are GPUs: what ranks agree on step by step then waits for no GPU.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return Launch()
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(dist.get_node_local_rank(0) % torch.cuda.device_count())
    store, rank, world = next(rendezvous("env://"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    return Launch(store)
