"""Faults that strike at a chosen write: signals in the saves of `moesaic finetune`, and outputs
that get lost.

A trial starts the command on one or two ranks, forked from a process that has imported all that
they need, and strikes at its n-th write of a save, whichever library issues it; the row says which
write that was. Then the same command goes on, and must end with the bytes of a run that nobody
disturbed.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

from moesaic.cli import main
from moesaic.testing.runner import renew_thread_pool
from moesaic_lab.chaos.schedule import Fault
from moesaic_lab.fuzz import writes
from moesaic_lab.fuzz.examples import EXAMPLES
from moesaic_lab.fuzz.places import Place
from moesaic_lab.fuzz.readers import make_bases
from moesaic_lab.system_calls import STREAMS, Write

WAITS_SECONDS = 60.0
"""How long the ranks that are left have after one of them has ended, as torchrun lets them."""
STRUCK = {"finetune": EXAMPLES["finetune"][0], "train": EXAMPLES["train"][1]}
"""The commands that are disturbed: a fine-tune from its start, whose number of ranks is free, and a
training that goes on from a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """What a command does if nobody disturbs it."""

    wrote: object
    """Its results."""
    saves: int
    """Number of writes of its saves."""
    prints: int
    """Number of its writes on standard output."""


def rows_of(faults: Sequence[Fault], folder: Path, told: Callable[[str], object]) -> list[Any]:
    """Return a row per fault; `folder` is for what the commands get."""
    bases = folder / "bases"
    if not bases.exists():
        told("a model to fine-tune, and runs to go on from")
        process = get_context("spawn").Process(target=make_bases, args=(bases,))
        process.start()
        process.join()
        assert not process.exitcode, f"the folders could not be made ({process.exitcode})"
    found: list[Any] = writes.in_new_process(partial(_rows, bases, faults), told)
    return found


def _rows(bases: Path, faults: Sequence[Fault], told: Callable[[str], object]) -> list[Any]:
    """Return a row per fault."""
    known: dict[tuple[str, int], Undisturbed] = {}
    found = []
    for number, fault in enumerate(faults):
        told(f"fault {number + 1} of {len(faults)}: {fault.kind} {fault.way}")
        name = "finetune"
        if fault.kind == "output":
            name, _, _ = fault.way.partition(",")  # such as "train, disk full"
        # half of the faults of fine-tuning strike one of two ranks
        ranks = 1 + fault.rank % 2 if name == "finetune" else 1
        place = Place(bases, STRUCK[name])
        try:
            if (name, ranks) not in known:
                known[name, ranks] = _undisturbed(place, ranks)
            found.append(_row(place, ranks, fault, known[name, ranks]))
        finally:
            place.remove()
    return found


def _undisturbed(place: Place, ranks: int) -> Undisturbed:
    """Run a command to its end."""
    ended = _run(place, place.made(), ranks, lambda write: 0)
    assert ended.code == 0, f"{ended.out} {ended.err}"
    writes_seen = ended.watched.writes
    return Undisturbed(
        wrote=place.example.wrote(place.folder),
        saves=len([write for write in writes_seen if _is_of_save(write)]),
        prints=len([write for write in writes_seen if write.path == STREAMS[1]]),
    )


def _is_of_save(write: Write) -> bool:
    """Return whether a write is one of a checkpoint or of the results."""
    return "/.writing-" in write.path or "/checkpoint-" in write.path


class Strike:
    """Strikes at a chosen write.

    Args:
        fault: what strikes.
        number: at which of the writes of saves, or on standard output, from 1.
    """

    def __init__(self, fault: Fault, number: int) -> None:
        self._fault = fault
        self._left = number
        self.write: Write | None = None
        """The write at which it struck, once it has."""

    def __call__(self, write: Write) -> int:
        """Return the error of a write, or 0."""
        if self._fault.kind == "output":
            return self._of_output(write)
        if self.write is None and _is_of_save(write):
            self._left -= 1
            if self._left == 0:
                self.write = write
                with suppress(ProcessLookupError):
                    os.kill(_process_of(write.process), signal.Signals[self._fault.way])
        return 0

    def _of_output(self, write: Write) -> int:
        """Return the error of a write on standard output: of the chosen one and of all after it; or
        0."""
        if write.path != STREAMS[1]:
            return 0
        self._left -= 1
        if self._left > 0:
            return 0
        self.write = self.write or write
        return errno.EPIPE if self._fault.way.endswith("gone") else errno.ENOSPC


def _process_of(thread: int) -> int:
    """Return the process of a thread."""
    for line in Path(f"/proc/{thread}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return thread


def _row(place: Place, ranks: int, fault: Fault, known: Undisturbed) -> dict[str, Any]:
    """Disturb a command once, let it go on, and return what happened. Its steps are not counted:
    those reached, resumed from and lost are 0."""
    example = place.example
    loses_output = fault.kind == "output"
    num_writes = known.prints if loses_output else known.saves
    strike = Strike(fault, 1 + int(fault.chance * num_writes))
    started = time.monotonic()
    ended = _run(place, place.made(), ranks, strike)
    seconds = round(time.monotonic() - started, 2)
    broken = list(example.faults(place.folder))  # what is wrong with what it left
    output = ended.out + ended.err

    last = ended  # of one or two runs, since a run that is done needs no second one
    if ended.code != 0 or "done: " not in output:
        words = example.words_again(place.folder)
        last = _run(place, place.folder, ranks, lambda write: 0, words)
    if loses_output and ended.code == 0:
        last = ended  # whose output cannot say that it is done
    same = last.code == 0 and example.wrote(place.folder) == known.wrote
    named = "Traceback" not in output and (loses_output or _is_named(fault, ranks, ended))
    leftovers = list(place.folder.glob(f"{example.out[0]}/.writing-*"))
    row = {
        "number": fault.number,
        "kind": fault.kind,
        "way": fault.way,
        "ranks": ranks,
        "rank": fault.rank,
        "transport": "gloo",
        "in_background": False,
        "write": place.shown(strike.write),
        "seconds": seconds,
        "reached": 0,
        "resumed": 0,
        "lost": 0,
        "hung": ended.code is None or last.code is None,
        "named": named,
        "same": same and not broken,
        "recovered": last.code == 0 and (not loses_output or ended.code == 0),
        "leftovers": len(leftovers),
        "line": "",
    }
    if not (same and named):
        row["line"] = " | ".join([*broken, output[-6000:], last.err[-1000:]])
    sound = row["named"] and row["same"] and row["recovered"]
    return row | {"is_wrong": not sound or row["hung"] or bool(leftovers)}


def _is_named(fault: Fault, ranks: int, ended: writes.Ended) -> bool:
    """Return whether a rank that was left said what happened; true where none was left, since the
    only one was killed, and where the command ended well."""
    if ended.code == 0 or (fault.way == "SIGKILL" and ranks == 1):
        return True
    return any(line.startswith("moesaic ") for line in ended.err.splitlines())


def _run(
    place: Place,
    folder: Path,
    ranks: int,
    decide: Callable[[Write], int],
    words: Sequence[str] = (),
) -> writes.Ended:
    """Run the command of a place on one or two ranks, with other words if some are given; `decide`
    returns the error of each of its writes, or 0."""
    words = words or place.example.words
    if ranks == 1:
        return writes.run(folder, words, decide)
    return writes.run(folder, words, decide, partial(_on_ranks, ranks))


def _on_ranks(ranks: int, words: Sequence[str]) -> int:
    """Run a command on ranks that are forked from this process, as torchrun starts them; return
    the exit code of the first that failed, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _, port = free.getsockname()
    processes = {}
    for rank in range(ranks):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        pid = os.fork()
        if pid == 0:
            _become_rank(words, variables)
        processes[pid] = rank
    return _first_failure(processes)


def _become_rank(
    words: Sequence[str],
    variables: Mapping[str, str],
    command: Callable[[Sequence[str]], int] = main.main,
) -> NoReturn:
    """Run a command as a rank, and end this process."""
    code = 1
    try:
        os.environ.update(variables)
        renew_thread_pool()
        code = command(list(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _first_failure(processes: dict[int, int]) -> int:
    """Wait for ranks, and kill those that do not end some time after another has failed.

    Args:
        processes: process id -> rank; emptied as they end.

    Returns:
        the exit code of the first that failed, as a shell gives it; 0 if none did, 99 if some had
        to be killed.
    """
    first_failure = 0
    until = float("inf")
    while processes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            processes.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)  # of a signal, minus its number
            if code and not first_failure:
                first_failure = code if code > 0 else 128 - code
                until = time.monotonic() + WAITS_SECONDS
        elif time.monotonic() > until:
            for left in processes:
                os.kill(left, signal.SIGKILL)
            return 99
        else:
            time.sleep(0.02)
    return first_failure
