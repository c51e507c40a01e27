"""Runs Python commands without the seconds that importing torch takes: each is forked from a
process that has imported it.

A command runs as under `python`, with its own arguments, environment, output files and exit code.
The ranks that torchrun starts are forks of torchrun, so they are its children here too. A few tests
start `sys.executable` instead, to test what a fork cannot show: that a command finds its modules,
and how an interpreter shuts down.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from worlds import preloaded

APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Forked:
    """A running command, with the part of the interface of `subprocess.Popen` that tests need.

    Args:
        words: the command line after `python`: `-m`, a module and its arguments, or a script and
            its arguments.
        environment: environment variables, in addition to those of this process.
        imports: names of slow modules that the command imports first, so the ranks that torchrun
            forks have them.
    """

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], imports: Sequence[str] = ()
    ) -> None:
        self._words = list(words)
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | dict(environment)
        arguments = (
            self._words,
            variables,
            str(self._out),
            str(self._err),
            tuple(imports),
            str(Path.cwd()),
        )
        multiprocessing.set_forkserver_preload(["moesaic.testing.runner", *preloaded()])
        # A daemon, so a test that fails leaves no process behind.
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_become, args=arguments, daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that killed the command; None while it
        runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        return self.returncode

    def said(self) -> tuple[str, str]:
        """Return standard output and standard error of the command so far."""
        out, err = (path.read_text() if path.exists() else "" for path in (self._out, self._err))
        return out, err

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end of the command; return standard output and standard error."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(self._words, timeout, *self.said())
        return self.said()

    def send_signal(self, kind: int) -> None:
        """Send a signal, unless the command has ended."""
        if self._process.is_alive():
            os.kill(self.pid, kind)

    def kill(self) -> None:
        """Kill the command with SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _become(
    words: list[str],
    environment: dict[str, str],
    out: str,
    err: str,
    imports: Sequence[str],
    folder: str,
) -> NoReturn:
    gc.freeze()  # collections then skip the server's modules, whose memory pages stay shared
    for descriptor, path in ((1, out), (2, err)):
        opened = os.open(path, APPENDING)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(folder)
    handle_signals_as_in_a_terminal()
    for name in imports:
        importlib.import_module(name)
    _run(words, environment)


def handle_signals_as_in_a_terminal() -> None:
    """Let every signal have its usual effect: pytest itself may run under nohup, or in the
    background of a script.

    Such a process ignores SIGHUP or SIGINT, and what it starts does so too.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for kind in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(kind, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python itself does


def _run(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a command line as `python` would, in this process, and exit with its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    subprocess_handler.Popen = _Rank  # type: ignore[attr-defined]
    dynamic_rendezvous.get_method_name = _method_name  # type: ignore[attr-defined]
    code = 1
    atexit._clear()  # an interpreter of its own ends with what this command registers
    try:
        if words[:2] == ["-m", "torch.distributed.run"]:
            torchrun.main(words[2:])
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _method_name(depth: int = 2) -> str:
    """Return the name of the function `depth` calls above, as torchrun's own function does.

    That one looks for the source of every caller, eighteen times a start: for callers without one,
    such as a fork server's, among thousands of modules.
    """
    frame: FrameType | None = sys._getframe()
    for _ in range(depth):
        frame = frame and frame.f_back
    return frame.f_code.co_name if frame else "no_method_name"


class _Rank:
    """A rank that torchrun forks from itself instead of starting a new interpreter."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            handle_signals_as_in_a_terminal()
            _run([word for word in args[1:] if word != "-u"], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode
