"""Runs of several processes: joining them into a process group, the roll of ranks, and one error
line for all ranks.

Any launcher works that sets the variables of torch's env:// rendezvous: torchrun,
`accelerate launch`, or srun and mpirun with a command that sets them (docs/training.md). Every rank
signs the roll, which lies in the store that all ranks share. The roll says which process each rank
is, whether that process still sends heartbeats, and what became of it. A process on the same
machine is also looked up in the system; of a process on another machine only the heartbeats are
known.

torchrun keeps that store. Without torchrun, rank 0 does: then it leaves last, so that the others
can still ask who died, and its own process is looked up without the store.

torchrun may start the ranks of a node anew: each time is another attempt. A fate is a text about a
rank that does not answer, and a patience is how many seconds ranks wait for each other.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from moesaic.comm.process_groups import set_timeout
from moesaic.errors import InputError, TrainingError, in_one_line
from moesaic.train.config import TrainConfig
from moesaic.train.machines import Machine
from moesaic.train.signals import ENDS, Again, end_by, is_ignored, leave_terminal

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torch's env:// rendezvous needs from a launcher."""
OTHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Launchers with variables of their own: launcher, then the variables of rank, world size and local
rank."""


class Launch:
    """This process among those that a launcher started, or alone without a launcher.

    Args:
        roll: the roll of all ranks; None for a single process.
    """

    def __init__(self, roll: Roll | None = None) -> None:
        self._roll = roll

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints."""
        return self._roll is None or dist.get_rank() == 0

    def fails_first(self, error: Exception) -> bool:
        """Note that this process fails. Return whether it is the first one to fail, and should
        therefore report the error. What all ranks refuse together, the first one of each machine
        reports.

        The first failure is also recorded for torchrun, which prints it in its summary. If the
        store of the ranks is gone or cut off, every process reports its own error.
        """
        if self._roll is None:
            return True
        try:
            fail = partial(self._roll.fail, is_refusal=isinstance(error, InputError))
            reports = ask_store(fail, ANSWER_SECONDS) == 1
        except ConnectionError:
            return True
        if reports:
            get_error_handler().record_exception(error)
        return reports

    def naming_dead_ranks(self, when: str) -> AbstractContextManager[None]:
        """Turn errors that the death of another rank caused into one line; see the function of this
        name."""
        return nullcontext() if self._roll is None else naming_dead_ranks(self._roll, when)

    def leave(self, *, was_stopped: bool = False, got_signal: bool = False) -> None:
        """End the process after a successful run; return if it is the only one.

        If a signal came to the torchrun of other machines alone, that of this machine is ended too.
        It would wait for those for five minutes, and a run that goes on would join it.

        It does not wait for the interpreter's shutdown, which takes a second. The shutdown may also
        crash while threads of process groups still run, and torchrun would then report a failure of
        a run that is saved.

        Args:
            was_stopped: whether a signal ended the run before its last step.
            got_signal: whether this process itself got one.
        """
        if self._roll is not None:
            machine = Machine.of_several(self._roll.command)
            ends_torchrun = False
            if machine is not None:
                machine.say_ended(was_stopped=was_stopped)
                ends_torchrun = was_stopped and _ends_torchrun(machine, got_signal)
            dist.barrier()
            if ends_torchrun and os.getppid() != 1:  # 1 takes the place of a parent that is gone
                os.kill(os.getppid(), signal.SIGTERM)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _ends_torchrun(machine: Machine, got_signal: bool) -> bool:
    """Return whether this rank, which itself got a signal or not, is to end its torchrun. That then
    passes the signal on to ranks that have saved. All ranks of a run that was stopped call it
    together."""
    was_asked: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(was_asked, (machine.number, got_signal))
    if not machine.ends_torchrun(was_asked):
        return False
    with suppress(ValueError):  # outside the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return machine.local_rank == 0


def launch(patience: float = TrainConfig.start_patience, command: str = "moesaic train") -> Launch:
    """Join the processes that a launcher started, with Gloo on CPUs and NCCL on GPUs. Each rank of
    a node gets its own GPU.

    CPU tensors use Gloo even if there are GPUs, so agreements between ranks in every step do not
    wait for a GPU. Ranks that torchrun restarts (--max-restarts, --nnodes 1:4) do not see entries
    of earlier attempts in the store. If torchrun dies, the ranks save and end.

    Args:
        patience: seconds that ranks wait for each other to join.
        command: the command that runs, as lines about it name it.

    Raises:
        InputError: if a launcher started several processes without the variables that they need to
            meet.
        TrainingError: if the ranks do not meet in time.
    """
    if not dist.is_available() or not _is_one_of_several():
        return Launch()
    if dist.is_torchelastic_launched():
        threading.Thread(
            target=_end_when_parent_is_gone,
            args=(os.getppid(),),
            name="moesaic-launcher",
            daemon=True,
        ).start()
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    roll = None
    machine = Machine.of_several(command)
    if machine is not None:
        machine.say_waits()
    try:
        store = _open_store(rank, patience)
        roll, missing = meet(store, rank, world, patience)
        roll.command = command
        atexit.register(roll.outlast)
        if missing:
            ranks = "ranks" if "," in missing else "rank"
            raise dist.DistStoreError(f"{ranks} {missing} did not come")
        handle_ends(roll, lambda: "in the start; start the run again")
        _init_process_group(roll, rank, world, patience)
    except (dist.DistError, TrainingError) as error:
        if isinstance(error, TrainingError):
            refusal = error
        else:
            refusal = TrainingError(_unmet(rank, world, patience, _first_line(error)))
        if not Launch(roll).fails_first(refusal):
            sys.exit(1)
        raise refusal from error
    if machine is not None:
        machine.say_met(roll.host_of(0))
    set_timeout(None, dist.default_pg_timeout)  # `Watch` ends a hanging run before that
    return Launch(roll)


def _init_process_group(roll: Roll, rank: int, world: int, patience: float) -> None:
    """Make the default process group of the ranks on the roll; end this process if that hangs."""
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0) % torch.cuda.device_count())

    def unmet() -> str:
        """Return the line for ranks that hang while they meet."""
        return _unmet(rank, world, patience, f"{store_keeper()} {roll.fate(0)}")

    # later than the timeout below, so that it ends the process only if that one does not
    with (
        _ends_after(patience + 2 * ANSWER_SECONDS, unmet, roll.command),
        naming_dead_ranks(roll, "while the ranks met: start the run again"),
    ):
        dist.init_process_group(
            backend,
            store=roll.store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=patience),
        )


def _unmet(rank: int, world: int, patience: float, why: object) -> str:
    """Return the line about ranks that did not meet."""
    return (
        f"rank {rank} of {world} did not meet the others at "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {patience:g} s "
        f"({why}): see that every rank was started and reaches that port, or raise "
        "--start-patience"
    )


def meet(store: Store, rank: int, world: int, patience: float) -> tuple[Roll, str]:
    """Return the roll of this attempt, which its ranks have signed, and the numbers of those that
    did not come in time.

    All ranks call it.

    The store outlives ranks, and no variable of torchrun identifies an attempt: if a node leaves or
    joins, the ranks restart under the same restart count, and nodes count differently. So each rank
    writes a random word. Rank 0 answers each word with its own, and once every rank has confirmed
    the answer, or some did not come in time, tells all.

    Args:
        store: the store that all ranks share, with possible entries of earlier attempts.
        patience: seconds that the ranks wait for each other.

    Raises:
        DistStoreError: if rank 0 does not answer in time.
    """
    word = secrets.token_hex(8)
    store.set_timeout(timedelta(seconds=patience))
    if rank == 0:
        roll = Roll(PrefixStore(f"moesaic/{word}", store), rank, world)
        roll.sign()
        missing = ", ".join(map(str, sorted(_never_came(roll, store, word, patience))))
        roll.store.set("missing", missing)
        return roll, missing

    def come() -> Roll:
        """Write this rank's word, and return the roll of the attempt that rank 0 answers with."""
        store.set(f"moesaic/comes/{rank}", word)
        attempt = store.get(f"moesaic/answer/{word}").decode()
        roll = Roll(PrefixStore(f"moesaic/{attempt}", store), rank, world)
        roll.sign()
        roll.store.set(f"came/{rank}", "")
        # rank 0 may have come last, and waits for others as long as this rank did; the store gives
        # up before `ask_store` below does
        store.set_timeout(timedelta(seconds=patience + ANSWER_SECONDS / 2))
        return roll

    try:
        roll = ask_store(come, patience + ANSWER_SECONDS)
        missing = ask_store(lambda: roll.store.get("missing").decode(), patience + ANSWER_SECONDS)
    except ConnectionError as error:
        raise dist.DistStoreError("rank 0 did not answer") from error
    return roll, missing


def _never_came(roll: Roll, store: Store, word: str, patience: float) -> set[int]:
    """Answer the ranks that come, as rank 0; return those that have not come when the patience is
    over.

    Args:
        roll: the roll of this attempt, whose store has only entries of this attempt.
        store: the store with the words of all attempts.
        word: rank 0's word, with which it answers.
        patience: seconds to wait.
    """
    missing = set(range(1, roll.world))
    until = time.monotonic() + patience
    while missing and time.monotonic() <= until:
        for other in missing:
            # the word may be of an earlier attempt; then this attempt's overwrites it later
            if store.check([f"moesaic/comes/{other}"]):
                word_of_other = store.get(f"moesaic/comes/{other}").decode()
                store.set(f"moesaic/answer/{word_of_other}", word)
        missing = {other for other in missing if not roll.store.check([f"came/{other}"])}
        time.sleep(0.02)
    return missing


def _open_store(rank: int, patience: float) -> Store:
    """Return torchrun's store, or else that of rank 0.

    It waits until something listens, since PyTorch's client waits twice and prints its own errors.

    Raises:
        DistStoreError: nothing answers in time.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_kept_here = rank == 0 and _is_of_rank_0()  # this process opens it itself
    until = time.monotonic() + patience
    while not is_kept_here:
        try:
            socket.create_connection((host, port), max(until - time.monotonic(), 0.1)).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{store_keeper()} does not answer: {error}") from error
            time.sleep(0.1)
    seconds = min(patience, ANSWER_SECONDS)

    def connect() -> Store:
        """Connect to the store, and serve it if this process keeps it."""
        return TCPStore(
            host,
            port,
            is_master=is_kept_here,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,  # `meet` waits for the ranks
            multi_tenant=True,  # as torch's env:// rendezvous has it
        )

    if is_kept_here:
        return connect()
    try:
        return ask_store(connect, 2 * seconds)  # longer than the store's own timeout
    except ConnectionError as error:
        raise dist.DistStoreError(f"{store_keeper()} does not answer") from error


def _is_of_rank_0() -> bool:
    """Return whether rank 0 keeps the ranks' store, since torchrun does not."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def store_keeper() -> str:
    """Return who keeps the ranks' store, in words."""
    return f"{'rank 0' if _is_of_rank_0() else 'torchrun'}, which keeps the ranks' store,"


@contextmanager
def _ends_after(seconds: float, line: Callable[[], str], command: str) -> Iterator[None]:
    """End this process with a line of a command if the block takes longer: a store of a stopped
    process lets its clients wait for ever."""

    def end() -> None:
        print(in_one_line(f"{command}: {line()}"), file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_when_parent_is_gone(parent: int) -> None:
    """Wait until the parent process is gone, then ask this one to save and end by the signal that
    the parent would have sent, unless it has: a second one would end it unsaved."""
    while os.getppid() == parent:
        time.sleep(1)
    print(
        f"moesaic: torchrun (process {parent}) is gone: its ranks save and end",
        file=sys.stderr,
        flush=True,
    )
    if not isinstance(signal.getsignal(signal.SIGTERM), Again):
        os.kill(os.getpid(), signal.SIGTERM)


def _is_one_of_several() -> bool:
    """Return whether this process is to join others: a launcher started several, or torchrun
    started one."""
    variables = {name: os.environ.get(name, "") for name in NEEDED}
    # no launcher, or one that sets variables of its own alone
    if not variables["RANK"] and not variables["WORLD_SIZE"]:
        _refuse_other_launchers()
        return False
    # a single process, which another launcher than torchrun started
    if variables["WORLD_SIZE"] == "1" and not dist.is_torchelastic_launched():
        return False
    missing = [name for name, value in variables.items() if not value]
    if missing:
        present = ", ".join(f"{name}={value}" for name, value in variables.items() if value)
        raise InputError(
            f"a launcher set {present} but not {' and '.join(missing)}: set all of "
            f"{', '.join(NEEDED)}, or start the ranks with torchrun --nproc-per-node N -m moesaic "
            "train ..."
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not variables[name].isdecimal():
            raise InputError(
                f"{name}={variables[name]}: must be a whole number: correct what the launcher sets"
            )
    return True


def _refuse_other_launchers() -> None:
    """Raise InputError if a launcher started several processes with variables of its own alone."""
    for launcher, rank, world, local in OTHERS:
        if rank in os.environ and os.environ.get(world, "1") != "1":
            raise InputError(
                f"{launcher} started {os.environ[world]} processes, which RANK and WORLD_SIZE "
                f"do not say: start each as sh -c 'RANK=${rank} WORLD_SIZE=${world} "
                f"LOCAL_RANK=${local} exec python -m moesaic train ...', with MASTER_ADDR and "
                "MASTER_PORT set to the first one's host and a free port of it"
            )


def _first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, which may have many."""
    lines = str(error).splitlines()
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first:.200}"


SignalHandler = Callable[[int, FrameType | None], Any] | int | None
"""The type of the handlers that `signal.signal` takes and returns."""
ANSWER_SECONDS = 10.0
"""Seconds that the store may take to answer."""
GONE = ("died", "is stopped")
"""How the fates of ranks begin for which nobody needs to wait."""
CONNECTION_WORDS = ("gloo", "NCCL", "connection closed by rank")
"""Words that mark an error as a broken connection between ranks."""


class Roll:
    """The ranks of a run and the state of their processes, as one rank sees them.

    Args:
        pause: seconds between two heartbeats of a rank.
    """

    def __init__(self, store: Store, rank: int, world: int, pause: float = 1.0) -> None:
        self.store = store
        """Where ranks write about themselves: the store of all ranks, below a prefix of this
        attempt."""
        self.rank = rank
        self.world = world
        self.command = "moesaic train"
        """The command that runs, as lines about it name it."""
        self._pause = pause
        self.is_kept_by_rank_0 = _is_of_rank_0()
        """Whether the store is gone when rank 0 is."""
        self._is_lost = False
        """Whether the store is gone with rank 0."""
        self._processes: dict[int, str] = {}
        """Process and host of the ranks that were looked up, as `process_name` has them."""

    def sign(self) -> None:
        """Write this rank's process and host into the store, and keep those of rank 0: if it keeps
        the store, they cannot be asked for once it is dead."""
        self.store.set(f"roll/process/{self.rank}", process_name())
        self._process(0)

    def beat(self, beats: int) -> None:
        """Write this rank's heartbeat count into the store."""
        self.store.set(f"roll/beats/{self.rank}", str(beats))

    def fate(self, rank: int) -> str:
        """Return in words what is known about a rank that does not answer."""
        process = self._process(rank)
        if not process:
            return "is gone, and the ranks' store with it" if self._is_lost else "has not started"
        if self._is_elsewhere(rank):
            return f"does not answer ({process}): it died, or its node is cut off"
        process_id = int(process.split()[1])  # of "process 123 on host"
        return _state_of_process(process_id)

    def dead(self) -> dict[int, str]:
        """Return the ranks with a dead or stopped process, and what is known about each.

        Raises:
            RuntimeError: if the store is gone or cut off, unless rank 0 kept it, which is then
                returned.
        """
        others = [rank for rank in range(self.world) if rank != self.rank]
        earlier_beats = {rank: self._entry("beats", rank) for rank in others}

        # a process may still exist for a moment after its connections are closed
        for _ in range(30):  # three seconds
            fates = {rank: self.fate(rank) for rank in others}
            dead = {rank: fate for rank, fate in fates.items() if fate.startswith(GONE)}
            if dead:
                return dead
            time.sleep(0.1)

        # `dead` is empty here; only a heartbeat shows whether a process on another machine lives
        elsewhere = [rank for rank in others if earlier_beats[rank] and self._is_elsewhere(rank)]
        if elsewhere:
            time.sleep(2 * self._pause)
        for rank in elsewhere:
            if self._entry("beats", rank) == earlier_beats[rank]:
                dead[rank] = self.fate(rank)
        return {0: self.fate(0)} if self._is_lost else dead

    def fail(self, *, is_refusal: bool = False) -> int:
        """Note in the store that this rank fails; return how many have failed, or for a refusal how
        many ranks of this host have refused."""
        number = self.store.add("roll/failures", 1)  # the counter's new value
        if is_refusal:
            number = self.store.add(f"roll/refusals/{socket.gethostname()}", 1)
        # it asks the store no more, so `outlast` of rank 0 need not wait for it
        self.store.set(f"roll/left/{self.rank}", "1")  # an empty entry reads as none
        return number

    def outlast(self) -> None:
        """Wait a while until the other ranks have left or are gone, if this one keeps their
        store."""
        if not self.is_kept_by_rank_0 or self.rank != 0:
            return
        until = time.monotonic() + 2 * ANSWER_SECONDS
        present = set(range(1, self.world))
        while present and time.monotonic() < until:
            for rank in list(present):
                # one without a process never signed the roll
                has_left = self._entry("left", rank) or not self._process(rank)
                if has_left or self.fate(rank).startswith(GONE):
                    present.remove(rank)
            time.sleep(0.1)

    def _entry(self, what: str, rank: int) -> str:
        """Return what a rank wrote about itself into the store; empty if it wrote nothing, or the
        store is gone with rank 0.

        Args:
            what: "process", "beats" or "left".
        """
        key = f"roll/{what}/{rank}"
        try:
            # `check` first, since `get` would wait until the rank has written it
            if self._is_lost or not self.store.check([key]):
                return ""
            return self.store.get(key).decode()
        except RuntimeError:
            if not self.is_kept_by_rank_0:
                raise
            self._is_lost = True
            return ""

    def _process(self, rank: int) -> str:
        """Return a rank's process and host, which stay known when the store is gone; empty if it
        has not signed."""
        if rank not in self._processes:
            process = self._entry("process", rank)
            if not process:
                return ""
            self._processes[rank] = process
        return self._processes[rank]

    def host_of(self, rank: int) -> str:
        """Return the host of a rank that has signed."""
        return self._process(rank).partition(" on ")[2]

    def _is_elsewhere(self, rank: int) -> bool:
        return self.host_of(rank) != socket.gethostname()


def is_of_lost_message(error: BaseException | None) -> TypeGuard[Exception]:
    """Return whether an error says that a message did not come (RuntimeError), or is an InputError
    because of such a one: both may come of the death of another rank."""
    return isinstance(error, RuntimeError) or (
        isinstance(error, InputError) and isinstance(error.__cause__, RuntimeError)
    )


@contextmanager
def naming_dead_ranks(roll: Roll, when: str) -> Iterator[None]:
    """Turn errors that the death or stop of other ranks, or a broken connection, caused into one
    TrainingError line.

    After such an error in a run of several ranks, the process ignores SIGTERM. It ends anyway, but
    first reports the reason.

    Raises:
        TrainingError: if the block raises, and other ranks are dead or a connection to them broke.
    """
    try:
        yield
    except TrainingError:
        raise
    except (RuntimeError, InputError) as error:
        if isinstance(error, InputError) and not is_of_lost_message(error):
            raise
        with suppress(ValueError):  # not in the main thread
            # torchrun's SIGTERM would come before the message
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            dead = roll.dead()
        except RuntimeError:
            why = (
                "the process that kept their store is gone or cut off, look at what its node said "
                "last"
            )
            raise TrainingError(
                f"rank {roll.rank} lost the others: {why} (here: {_first_line(error)})"
            ) from error
        if dead:
            raise TrainingError(f"{_fates_in_words(dead)}, {when}") from error

        if isinstance(error, InputError):  # it names the ranks and where they wait
            raise
        cause = str(error.__cause__ or error)
        if not any(word in cause for word in CONNECTION_WORDS):
            raise
        reason = " ".join(str(error).split())
        raise TrainingError(
            f"rank {roll.rank} lost a connection to other ranks, whose processes are alive "
            f"({reason:.200}), {when}: look at the links between their nodes"
        ) from error


def handle_ends(roll: Roll, when: Callable[[], str]) -> dict[signal.Signals, SignalHandler]:
    """Make SIGTERM and SIGHUP end this process with an error that names the dead ranks. torchrun
    sends SIGTERM once a rank has died.

    A signal may come before this process noticed the death. If no rank is dead, it has its usual
    effect, after a line of the first rank.

    Returns:
        the previous handlers; none outside the main thread, where signals cannot be handled.
    """

    def end(number: int, frame: FrameType | None) -> None:
        """End the run on a signal, and say which ranks died before it."""
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the question below
        dead: dict[int, str] = {}
        with suppress(ConnectionError):
            dead = ask_store(roll.dead, ANSWER_SECONDS)
        if dead:
            raise TrainingError(f"{_fates_in_words(dead)}, {when()}")
        end_by(number, roll.command, says=roll.rank == 0)

    with suppress(ValueError):
        return {kind: signal.signal(kind, end) for kind in ENDS if not is_ignored(kind)}
    return {}


@contextmanager
def stop_requests() -> Iterator[list[str]]:
    """Yield a list to which the first SIGINT, SIGTERM or SIGHUP appends its name. A second one has
    its usual effect.

    A terminal that closes sends SIGHUP, more than once, and is gone. nohup starts a process that
    ignores it.
    """
    received: list[str] = []
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        """Note a signal. A second SIGINT or SIGTERM has its usual effect; after SIGHUP the terminal
        is gone."""
        received.append(signal.Signals(number).name)
        if number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, Again(before[signal.Signals(number)]))
        else:
            signal.signal(number, signal.SIG_IGN)
            leave_terminal()

    for kind in (signal.SIGINT, *ENDS):
        try:
            if not is_ignored(kind):
                before[kind] = signal.signal(kind, ask)
        except ValueError:  # outside the main thread, signals cannot be handled
            break
    try:
        yield received
    except RuntimeError:
        if dist.is_initialized() and signal.SIGTERM in before:
            # torchrun sends it to the remaining ranks, which must still report
            before[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for stopped_by, handler in before.items():
            signal.signal(stopped_by, handler)


def ask_store(question: Callable[[], T], seconds: float) -> T:
    """Return the result of `question`, which asks the store.

    The store's own timeouts limit how long it waits for a key, but not how long a cut link delays
    the answer.

    Args:
        seconds: how long to wait for the answer; `question` runs in a thread that is not stopped.

    Raises:
        ConnectionError: if there is no answer in time, or the store is gone.
    """
    answers: list[T] = []

    def run() -> None:
        """Ask, in a thread that may never get an answer."""
        with suppress(RuntimeError):
            answers.append(question())

    thread = threading.Thread(target=run, name="moesaic-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise ConnectionError("the store that the ranks share does not answer")
    return answers[0]


def process_name() -> str:
    """Return the process id and host of this process."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _fates_in_words(dead: dict[int, str]) -> str:
    """Return one line that names ranks and what became of them."""
    return ", ".join(f"rank {rank} {fate}" for rank, fate in dead.items())


def _state_of_process(number: int) -> str:
    """Return the state of a process on this machine, in words; `number` is its process id."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text(encoding="ascii")
    except OSError:  # another system than Linux, or the process is gone
        with suppress(ProcessLookupError):
            os.kill(number, 0)  # sends nothing
            return f"does not answer (process {number})"
        return f"died (process {number})"
    # The fields behind the name in brackets, which may hold spaces; see proc(5).
    fields = stat.rpartition(")")[2].split()
    state = fields[0]
    exit_code = int(fields[-1])
    if state in "ZX":  # zombie, dead
        killed_by = exit_code & 0x7F  # the signal, or 0; the bits above are the exit status
        by = f" by {signal.Signals(killed_by).name}" if killed_by else ""
        return f"died{by} (process {number})"
    if state in "Tt":  # stopped, traced
        return f"is stopped (process {number}: SIGSTOP, or a debugger)"
    return f"does not answer (process {number})"
