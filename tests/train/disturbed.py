"""Runs of `torchrun -m moesaic train`, or of any other launcher, that something disturbs."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from forked import Forked
from moesaic.train.config import TrainConfig
from runs import write_config

SCRIPT = """
import os, signal, socket, sys, threading, time
from contextlib import suppress
import moesaic.cli.train
from moesaic.cli.main import main
from moesaic.errors import TrainingError
from moesaic.runtime import executor
from moesaic.train import distributed_checkpoint, launch, loop

rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
place, name = {place}, {name!r}
plain = getattr(place, name)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def break_connections():
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            line = socket.socket(fileno=os.dup(number))
            if line.getpeername()[1] != int(os.environ["MASTER_PORT"]):
                line.shutdown(socket.SHUT_RDWR)

def steps_logged(path):
    return sum(1 for _ in open(path)) if os.path.exists(path) else 0

def disturbed(*given, **options):
    {before}
    result = plain(*given, **options)
    {after}
    return result

setattr(place, name, disturbed)
sys.exit(main(sys.argv[1:]))
"""


def disturbing(folder: Path, where: str, before: str = "pass", after: str = "pass") -> Path:
    """Write a script that runs `moesaic` and does something before and after each call of one of
    its functions.

    Args:
        where: the function, by one of the modules that the script imports.
        before, after: statements; `given` and `options` are the arguments of the call.
    """
    place, _, name = where.rpartition(".")
    path = folder / "disturbed.py"
    path.write_text(SCRIPT.format(place=place, name=name, before=before, after=after))
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(
    config: TrainConfig,
    folder: Path,
    *flags: str,
    script: Path | None = None,
    elastic: tuple[str, ...] = (),
) -> list[str]:
    """Return the words behind `python` that start two ranks by torchrun, with flags of ours and of
    its own."""
    file = write_config(config, folder / "given.json")
    program = ["-m", "moesaic"] if script is None else [str(script)]
    elastic = elastic or ("--master-port", str(free_port()))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *elastic, *program]
    return [*words, "train", "--config", str(file), *flags]


def start(
    config: TrainConfig, folder: Path, *flags: str, script: Path | None = None, elastic: tuple = ()
) -> Forked:
    """Start `command`."""
    return Forked(command(config, folder, *flags, script=script, elastic=elastic), {})


def finished(process: Forked) -> tuple[str, str]:
    """Wait for the end of a run; return what it wrote to standard output and standard error."""
    try:
        return process.communicate(timeout=600)
    finally:
        process.kill()


def failed(process: Forked) -> str:
    """Return the error output of a failing run. Rank 1 is killed once it is reported as stopped."""
    while process.poll() is None:
        stopped = re.search(r"rank 1 is stopped \(process (\d+)", process.said()[1])
        if stopped:  # torchrun would wait half a minute for it
            with suppress(ProcessLookupError):
                os.kill(int(stopped[1]), signal.SIGKILL)
            break
        time.sleep(0.1)
    _, err = finished(process)
    assert process.returncode != 0
    return err


def ours(text: str) -> list[str]:
    """Return the lines that are ours, not torchrun's."""
    return [line for line in text.splitlines() if line.startswith("moesaic train:")]
