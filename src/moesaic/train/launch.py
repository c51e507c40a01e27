"""Several processes, as a launcher starts them: joining them into a group, and one line on behalf of all when one fails.

Any launcher will do that sets what torch's env:// asks for: torchrun, `accelerate launch`, or srun and mpirun through a line
that names the variables (docs/training.md).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from moesaic.errors import InputError, TrainingError
from moesaic.train.config import START_PATIENCE
from moesaic.train.roll import ANSWER_SECONDS, Roll, answered, heed_sigterm, telling

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch's env:// asks of a launcher."""
OTHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Launchers that say under names of their own which rank this is, of how many, and which of its node."""


class Launch:
    """This process's place among those that a launcher started; alone without one.

    Args:
        roll: of all of them; None for one alone.
    """

    def __init__(self, roll: Roll | None = None) -> None:
        self._roll = roll

    @property
    def is_first(self) -> bool:
        """Whether this process talks to people."""
        return self._roll is None or dist.get_rank() == 0

    def fails_first(self, error: Exception) -> bool:
        """Note that this process fails; return whether no other did before, in which case it should say why.

        The first failure is also written down for torchrun, whose summary then holds it.

        Args:
            error: why it fails.

        Raises:
            ConnectionError: if nobody can be asked: the store is gone with the process that kept it, or cut off.
        """
        if self._roll is None:
            return True
        try:
            store = self._roll.store
            is_first = answered(lambda: store.add("moesaic/failures", 1), ANSWER_SECONDS) == 1
        except ConnectionError as lost:
            raise ConnectionError(
                f"rank {dist.get_rank()} of {dist.get_world_size()} lost the others: the process that kept their store is "
                f"gone or cut off, look at what rank 0 and its node said last (here: {_first_line(error)})"
            ) from lost
        if is_first:
            get_error_handler().record_exception(error)
        return is_first

    def leave(self) -> None:
        """End the process after a run that went well; return where there are no others.

        It does not wait for the interpreter to take itself apart, which takes a second and may go wrong while threads of
        process groups still run: torchrun would report a failure of a run that is saved.
        """
        if self._roll is not None:
            dist.barrier()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def launch(patience: float = START_PATIENCE) -> Launch:
    """Join the processes that a launcher started, Gloo on CPUs and NCCL on GPUs, each rank of a node with its own GPU.

    CPU tensors stay on Gloo where there are GPUs: what ranks agree on step by step then waits for no GPU. Where torchrun
    starts ranks anew (--max-restarts, --nnodes 1:4), they do not see what earlier ones left in the store. Where it dies, they
    save and end.

    Args:
        patience: seconds that ranks wait for each other to come.

    Raises:
        InputError: if a launcher started several processes and did not say enough for them to meet.
        TrainingError: if they do not meet in time.
    """
    if not dist.is_available() or not _has_company():
        return Launch()
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(dist.get_node_local_rank(0) % torch.cuda.device_count())
    if dist.is_torchelastic_launched():
        threading.Thread(target=_end_with, args=(os.getppid(),), name="moesaic-launcher", daemon=True).start()
    timeout = timedelta(seconds=patience)
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        store = PrefixStore(f"moesaic/{meet(store, rank, world, patience)}", store)
        roll = Roll(store, rank, world)
        roll.sign()
        heed_sigterm(roll, lambda: "in the start; start the run again")
        with telling(roll, "while the ranks met: start the run again"):
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except dist.DistError as error:
        raise TrainingError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {patience:g} s "
            f"({_first_line(error)}): see that every rank was started and reaches that port, or raise "
            "the first number of --patience"
        ) from error
    dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout)  # the watch over a run gives up before that
    return Launch(roll)


def meet(store: Store, rank: int, world: int, patience: float) -> str:
    """Return a word that only the ranks of this attempt know; all of them call it.

    The store outlives ranks, and nothing that torchrun sets tells one attempt from the next: a node that leaves or joins starts
    the ranks anew under the same count of restarts, and nodes count differently. So each rank leaves a word of its own, the
    first one answers each word with its own, and goes on once everybody has answered that.

    Args:
        store: that all of them reach, with whatever earlier attempts left there.
        rank: this one.
        world: how many there are.
        patience: seconds that they wait for each other.

    Raises:
        DistStoreError: if they do not all come in time.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set_timeout(timedelta(seconds=patience))
        store.set(f"moesaic/comes/{rank}", own)
        try:
            attempt = store.get(f"moesaic/answer/{own}").decode()
        except dist.DistStoreError as error:
            raise dist.DistStoreError("rank 0 did not answer") from error
        store.set(f"moesaic/{attempt}/came/{rank}", "")
        return attempt
    missing, until = set(range(1, world)), time.monotonic() + patience
    while missing:
        for each in missing:
            if store.check([f"moesaic/comes/{each}"]):  # perhaps of an earlier attempt: then its rank comes later
                store.set(f"moesaic/answer/{store.get(f'moesaic/comes/{each}').decode()}", own)
        missing = {each for each in missing if not store.check([f"moesaic/{own}/came/{each}"])}
        if time.monotonic() > until:
            raise dist.DistStoreError(
                f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))} did not come"
            )
        time.sleep(0.02)
    return own


def _end_with(parent: int) -> None:
    """Ask this process to save and end once the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    print(f"moesaic: torchrun (process {parent}) is gone: its ranks save and end", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _has_company() -> bool:
    """Whether a launcher started this process among others, or torchrun alone."""
    said = {name: os.environ.get(name, "") for name in NEEDED}
    if not said["RANK"] and not said["WORLD_SIZE"]:
        for launcher, rank, world, local in OTHERS:
            if rank in os.environ and os.environ.get(world, "1") != "1":
                raise InputError(
                    f"{launcher} started {os.environ[world]} processes, which RANK and WORLD_SIZE do not say: start each as "
                    f"sh -c 'RANK=${rank} WORLD_SIZE=${world} LOCAL_RANK=${local} exec python -m moesaic train ...', with "
                    "MASTER_ADDR and MASTER_PORT set to the first one's host and a free port of it"
                )
        return False
    if said["WORLD_SIZE"] == "1" and not dist.is_torchelastic_launched():
        return False
    missing = [name for name, value in said.items() if not value]
    if missing:
        there = ", ".join(f"{name}={value}" for name, value in said.items() if value)
        raise InputError(
            f"a launcher set {there} but not {' and '.join(missing)}: set all of {', '.join(NEEDED)}, or start the ranks "
            "with torchrun --nproc-per-node N -m moesaic train ..."
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not said[name].isdecimal():
            raise InputError(f"{name}={said[name]}: must be a whole number: correct what the launcher sets")
    return True


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '':.200}"
