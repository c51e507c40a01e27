"""Several processes, as a launcher starts them: joining them into a group, the roll of them, and one line on behalf of all when
one fails.

Any launcher will do that sets what torch's env:// asks for: torchrun, `accelerate launch`, or srun and mpirun through a line
that names the variables (docs/training.md). The roll tells which process each rank is, whether it still counts, and what
became of it: every rank signs in the store that all of them reach. A process of the same machine is looked up there; of one
elsewhere only its counting tells.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from moesaic.errors import InputError, TrainingError
from moesaic.train.config import START_PATIENCE

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
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


SignalHandler = Callable[[int, FrameType | None], Any] | int | None
"""What `signal.signal` takes and returns."""
ANSWER_SECONDS = 10.0
"""How long the store may take for an answer."""
OF_CONNECTIONS = ("gloo", "NCCL", "connection closed by rank")
"""Words of errors that come of a connection between ranks."""


class Roll:
    """The ranks of a run, seen from one of them.

    Args:
        pause: seconds between two signs of life of a rank.
    """

    def __init__(self, store: Store, rank: int, world: int, pause: float = 1.0) -> None:
        self.store, self.rank, self.world, self._pause = store, rank, world, pause

    def sign(self) -> None:
        """Write down which process this rank is."""
        self.store.set(f"roll/process/{self.rank}", own_name())

    def count(self, beats: int) -> None:
        """Give a sign of life."""
        self.store.set(f"roll/beats/{self.rank}", str(beats))

    def fate(self, rank: int) -> str:
        """Return what is known of a rank that does not answer."""
        process = self._told("process", rank)
        if not process:
            return "has not started"
        if self._is_elsewhere(rank):
            return f"does not answer ({process}): it died, or its node is cut off"
        return _fate_here(int(process.split()[1]))

    def dead(self) -> dict[int, str]:
        """Return ranks whose process is gone, with what is known of it.

        Raises:
            RuntimeError: if nobody can be asked, as the store is gone or cut off.
        """
        others = [rank for rank in range(self.world) if rank != self.rank]
        before = {rank: self._told("beats", rank) for rank in others}
        for _ in range(30):  # the system takes a moment to end a process whose connections are closed already
            dead = {rank: fate for rank in others if (fate := self.fate(rank)).startswith("died")}
            if dead:
                return dead
            time.sleep(0.1)
        elsewhere = [rank for rank in others if before[rank] and self._is_elsewhere(rank)]
        if elsewhere:  # of whom only the counting tells
            time.sleep(2 * self._pause)
        return {rank: self.fate(rank) for rank in elsewhere if self._told("beats", rank) == before[rank]}

    def _told(self, what: str, rank: int) -> str:
        """Return what a rank wrote down of itself; empty where it did not."""
        key = f"roll/{what}/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _is_elsewhere(self, rank: int) -> bool:
        return self._told("process", rank).partition(" on ")[2] != socket.gethostname()


@contextmanager
def telling(roll: Roll | None, when: str) -> Iterator[None]:
    """A stretch in which an error that comes of the death of other ranks, or of a connection to them, says so in one line.

    From the error on a process of several ignores SIGTERM: it ends anyway, and says why before.

    Raises:
        TrainingError: if it ends by an error, and other ranks are dead or a connection to them broke.
    """
    try:
        yield
    except TrainingError:
        raise
    except RuntimeError as error:
        if roll is not None:
            with suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would come before the words
        try:
            dead = {} if roll is None else roll.dead()
        except RuntimeError:
            raise error from None
        if not dead:
            if roll is None or not any(word in str(error) for word in OF_CONNECTIONS):
                raise
            raise TrainingError(
                f"rank {roll.rank} lost a connection to other ranks, whose processes live "
                f"({' '.join(str(error).split()):.200}), {when}: look at the links between their nodes"
            ) from error
        raise TrainingError(f"{_named(dead)}, {when}") from error


def heed_sigterm(roll: Roll, when: Callable[[], str]) -> SignalHandler:
    """Have SIGTERM end this process by saying which ranks are dead, as torchrun sends it once one of them is.

    It may come before this process has missed them. Where nobody is dead it has its usual effect.

    Returns:
        what SIGTERM did before; None where signals cannot be handled, outside the main thread.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        dead: dict[int, str] = {}
        with suppress(ConnectionError):
            dead = answered(roll.dead, ANSWER_SECONDS)
        if dead:
            raise TrainingError(f"{_named(dead)}, {when()}")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    with suppress(ValueError):
        return signal.signal(signal.SIGTERM, end)
    return None


def answered(ask: Callable[[], T], seconds: float) -> T:
    """Return what a question to the store is answered by.

    The store's own timeouts bound how long it waits for a key, not how long a cut link keeps its answer back.

    Args:
        seconds: how long to wait; the question goes on in a thread of its own.

    Raises:
        ConnectionError: if there is no answer, or the store is gone.
    """
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            found.append(ask())

    thread = threading.Thread(target=run, name="moesaic-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise ConnectionError("the store that the ranks share does not answer")
    return found[0]


def own_name() -> str:
    """Return the number and host of this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _named(dead: dict[int, str]) -> str:
    """Return one line on ranks and what became of them."""
    return ", ".join(f"rank {rank} {fate}" for rank, fate in dead.items())


def _fate_here(number: int) -> str:
    """Return what a process of this machine does."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        with suppress(ProcessLookupError):
            os.kill(number, 0)
            return f"does not answer (process {number})"
        return f"died (process {number})"
    state, code = fields[0], int(fields[-1])
    if state in "ZX":
        by = f" by {signal.Signals(code & 0x7F).name}" if code & 0x7F else ""
        return f"died{by} (process {number})"
    if state in "Tt":
        return f"is stopped (process {number}: SIGSTOP, or a debugger)"
    return f"does not answer (process {number})"
