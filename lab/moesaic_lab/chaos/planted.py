"""Turn a forked process into a rank of `moesaic train` that faults itself where the schedule
says."""

from __future__ import annotations

import atexit
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from moesaic.cli.main import main
from moesaic.runtime import executor
from moesaic.train import loop
from moesaic_lab.chaos.schedule import INTERVAL, Fault

PACE_SECONDS = 0.05
"""Least duration of a step in a disturbed run, so that faults that last a while overlap some
steps."""
INSTANTS = {"forward": 6, "backward": 6, "save": 40}
"""Number of instants from which the instant of a fault is drawn, by kind. If fewer occur, the fault
strikes at the last one."""


def become_rank(
    words: Sequence[str],
    environment: Mapping[str, str],
    fault: Fault | None,
    strikes_at: int,
    tells: Path,
    paced: bool,
) -> NoReturn:
    """Run a command as a rank and end the process; does not return.

    Args:
        words: the arguments of the command line, after `moesaic`.
        environment: the environment variables that a launcher would set.
        fault: the fault that this rank inflicts on itself; None for none.
        strikes_at: the step, counted from 1, in which the fault strikes.
        tells: the file into which the first rank writes the number of its first step.
        paced: whether steps last at least `PACE_SECONDS`.
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    step = _follow_steps(tells, PACE_SECONDS if paced else 0.0)
    if fault is not None:
        _plant(fault, strikes_at, step)
    code = 1
    atexit._clear()  # an interpreter of its own ends with what this rank registers
    try:
        code = main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die() -> None:
    """Kill this process with SIGKILL, as the OOM killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _plant(fault: Fault, strikes_at: int, step: Callable[[], int]) -> None:
    """Plant a fault in this process, for the step at which it strikes."""
    instant = 1 + int(fault.chance * INSTANTS.get(fault.kind, 1))
    if fault.kind in ("forward", "backward", "restart"):
        name = "backward" if fault.kind == "backward" else "forward"
        _kill_between_messages(name, lambda: step() == strikes_at, instant)
    elif fault.kind == "optimizer":
        _kill_in_update(lambda: step() == strikes_at, fault.way)
    elif fault.kind == "save":
        _in_save(lambda: step() >= strikes_at, lambda: _kill_at_event(instant), die)
    elif fault.kind == "disk":
        # leaves room for the log file with the rank's error message
        limit = 4_000 + int(fault.chance * 16_000)
        _in_save(
            lambda: step() >= strikes_at,
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)),
            lambda: None,
        )
    elif fault.kind == "clock":
        _jump(lambda: step() >= strikes_at, random.Random(fault.number))


def _follow_steps(tells: Path, pace: float) -> Callable[[], int]:
    """Make each step last at least `pace` seconds and return a function that gives the number of
    the current step, from 1."""
    plain = loop.Trainer._step
    now = [0]

    def paced(self: Any) -> Any:
        if not now[0] and self.ranks.is_first:
            tells.write_text(str(self.state.step + 1), encoding="utf-8")
        now[0] = self.state.step + 1
        time.sleep(pace)
        return plain(self)

    loop.Trainer._step = paced  # type: ignore[method-assign]
    return lambda: now[0]


def _kill_between_messages(name: str, is_time: Callable[[], bool], instant: int) -> None:
    """Kill the process between two messages of a layer's pass."""
    plain = getattr(executor.RunProgram, name)
    start = vars(executor)["start"]
    remaining = [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] == 0:
            die()
        return start(*arguments, **options)

    def armed(*arguments: Any, **options: Any) -> Any:
        remaining[0] = instant if is_time() else 0
        result = plain(*arguments, **options)
        if remaining[0] > 0:
            die()
        return result

    setattr(executor, "start", counted)  # noqa: B010 - imported there
    setattr(executor.RunProgram, name, staticmethod(armed))


def _kill_in_update(is_time: Callable[[], bool], way: str) -> None:
    """Kill the process before or after the optimizer's update."""
    plain = torch.optim.AdamW.step

    def step(self: Any, *arguments: Any) -> Any:
        if is_time() and way == "before":
            die()
        result = plain(self, *arguments)
        if is_time():
            die()
        return result

    torch.optim.AdamW.step = step  # type: ignore[method-assign,assignment]


def _in_save(
    is_time: Callable[[], bool], strike: Callable[[], None], afterwards: Callable[[], None]
) -> None:
    """Strike while a checkpoint is saved."""
    save = loop.Trainer._save
    finish = loop.Trainer._finish_saving
    is_struck = [False]

    def saving(self: Any) -> None:
        if is_time() and self.state.step % INTERVAL == 0:
            is_struck[0] = True
            strike()
        save(self)

    def finishing(self: Any) -> None:
        is_saving = self._saving is not None
        finish(self)
        if is_saving and is_struck[0]:
            afterwards()

    loop.Trainer._save = saving  # type: ignore[method-assign]
    loop.Trainer._finish_saving = finishing  # type: ignore[method-assign]


def _kill_at_event(instant: int) -> None:
    """Kill the process when it opens, lists or changes a file for the `instant`-th time."""
    remaining = [instant]

    def hook(event: str, arguments: Any) -> None:
        if event in (
            "open",
            "os.mkdir",
            "os.rename",
            "os.remove",
            "os.rmdir",
            "os.listdir",
            "os.scandir",
        ):
            remaining[0] -= 1
            if remaining[0] == 0:
                die()

    sys.addaudithook(hook)


def _jump(is_time: Callable[[], bool], draw: random.Random) -> None:
    """Let the clock jump by years."""
    plain = time.time
    time.time = lambda: plain() + (draw.uniform(-9, 9) * 365 * 86400 if is_time() else 0.0)
