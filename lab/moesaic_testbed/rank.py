"""What a process of a bed runs: enter its node, then run a command, or connect, call a function and
report."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from moesaic.measure.together import hold_still
from moesaic_testbed.bed import Bed
from moesaic_testbed.kernel import enter_net
from moesaic_testbed.messages import Failure
from moesaic_testbed.wiring import NODE_DEVICE, node_address

TIMEOUT_SECONDS = 600
"""A collective fails after this time if a rank does not join it."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The report of a rank that has connected to all others."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The report of a rank whose function has returned, with the pickled result."""

    result: bytes


def launcher_variables(bed: Bed, rank: int, port: int, threads: int = 1) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank, and those that select
    the network device."""
    node, local = divmod(rank, bed.ranks_per_node)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(bed.world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(bed.ranks_per_node),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "GROUP_WORLD_SIZE": str(bed.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(bed.world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": node_address(0),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "testbed",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": NODE_DEVICE,
        "TP_SOCKET_IFNAME": NODE_DEVICE,
        "OMP_NUM_THREADS": str(threads),
    }


def start(net: int, environment: Mapping[str, str], cwd: str, output: Sequence[int]) -> None:
    """Make this freshly forked process a process of a node. If ranks share cores, pin each rank to
    one, see `hold_still`.

    Args:
        net: file descriptor of the node's network namespace.
        environment: variables to add to this process's own.
        cwd: the working directory.
        output: file descriptors that become standard output and error.
    """
    enter_net(net)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, *output)):  # 0, 1 and 2
        os.dup2(source, target)
    os.environ.update(environment)
    share_cores = int(environment.get("WORLD_SIZE", 0)) > len(os.sched_getaffinity(0))
    if share_cores and environment["OMP_NUM_THREADS"] == "1":
        hold_still(int(environment["RANK"]))
    os.chdir(cwd)
    # undo what the processes above this one have set
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def execute(words: Sequence[str]) -> None:
    """Replace this process by a command; does not return. The exit code is 127 if there is no such
    command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # so that signals reach what the command starts too, as Ctrl-C does at a terminal
    os.setpgid(0, 0)
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
        os._exit(127)


def serve_store(port: int, ready: int) -> None:
    """Serve the store through which ranks find each other, as torchrun's agent does; does not
    return. When the store runs, a byte is written to the file descriptor `ready`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore(node_address(0), port, is_master=True, wait_for_workers=False)
        os.write(ready, b"r")
        while store:
            signal.pause()
    finally:
        os._exit(1)


def call(
    rank: int, line: Connection, function: Any, arguments: tuple[Any, ...], threads: int
) -> None:
    """Connect, call a function when all ranks are ready, and report its result or exception over
    `line`; does not return.

    On the line, the rank sends `Ready`, waits, sends `Done` or a `Failure`, and waits again.
    """
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
        line.send(Ready())
        line.recv()
        message: object = Done(result=_pickled(function(*arguments)))
    except BaseException as error:
        # SystemExit and KeyboardInterrupt of the function are failures of this rank too
        message = failure_of(rank, error)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        line.send(message)
        line.recv()  # closing sockets early can lose bytes that other ranks still wait for
    finally:
        os._exit(0)


def _pickled(result: Any) -> bytes:
    """Return a result as bytes."""
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"what the function returned cannot be sent back: {error}") from error


def failure_of(rank: int | None, error: BaseException) -> Failure:
    """Describe an exception of a rank, or of the bed, for a process that raises it again."""
    at_seconds = time.monotonic()
    reason = "".join(traceback.format_exception_only(type(error), error)).strip()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)  # some exceptions pickle but do not unpickle
    except Exception:
        packed = b""
    return Failure(rank=rank, reason=reason, at_seconds=at_seconds, traceback=text, error=packed)
