"""A step of a place: a command, what it must leave behind, and how long it may take."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from places.ground import Ground

GRACE_SECONDS = 20
"""Between asking a step that takes too long to end, and ending it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command.

    Args:
        name: a word or two for the table.
        command: its words.
        minutes: after which it is ended, and the place has failed.
        makes: files that must be there afterwards, relative to the clone.
        says: a regular expression that its output must hold.
        folder: where it runs, relative to the place's folder.
    """

    name: str
    command: tuple[str, ...]
    minutes: float = 20
    makes: tuple[str, ...] = ()
    says: str = ""
    folder: str = "moesaic"


def run(step: Step, ground: Ground, log: Path) -> str | None:
    """Run a step and append its command and output to a log; return what is wrong, None if
    nothing."""
    start = time.monotonic()
    with log.open("ab") as file:
        file.write(f"$ {' '.join(step.command)}\n".encode())
        file.flush()
        before = file.tell()
        code = _run(ground.words(step.command, step.folder), step, ground, file)
        said = _read(log, before)
        file.seek(0, os.SEEK_END)
        file.write(f"[exit code {code}, {time.monotonic() - start:.0f} s]\n\n".encode())
    if code is None:
        return f"still running after {step.minutes:g} minutes"
    if code != 0:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = lines[-1][:160] if lines else "nothing was printed"
        return f"exit code {code}: {last}"
    missing = [name for name in step.makes if not ground.here(f"moesaic/{name}").exists()]
    if missing:
        return f"did not write {', '.join(missing)}"
    if not re.search(step.says, said):
        return f"did not print {step.says!r}"
    return None


def _run(words: Sequence[str], step: Step, ground: Ground, output: IO[bytes]) -> int | None:
    """Run a command; return its exit code, None where it had to be ended."""
    folder = ground.here(step.folder)
    try:
        process = subprocess.Popen(
            words,
            cwd=folder if folder.exists() else None,
            env=ground.whole_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        output.write(f"{error}\n".encode())
        output.flush()
        return 127
    try:
        return process.wait(timeout=60 * step.minutes)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, if it still runs."""
    if process.poll() is not None:
        return
    if os.name == "nt":
        subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True)
        process.wait()
        return
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_SECONDS)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _read(log: Path, start: int) -> str:
    """Return what a log holds from a byte on."""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", errors="replace")
