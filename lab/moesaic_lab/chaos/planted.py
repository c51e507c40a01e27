"""Turn a forked process into a rank of `moesaic train` that faults itself where the schedule
says.

The methods and functions that such a rank replaces keep their work; before or after it they count,
and strike when it is time.
"""

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
    """Plant a fault in this process, for the step at which it strikes; `step` returns the current
    one."""
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
        most_bytes = 4_000 + int(fault.chance * 16_000)
        limits = (most_bytes, resource.RLIM_INFINITY)
        _in_save(
            lambda: step() >= strikes_at,
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
            lambda: None,
        )
    elif fault.kind == "clock":
        _jump(lambda: step() >= strikes_at, random.Random(fault.number))


def _follow_steps(tells: Path, pace: float) -> Callable[[], int]:
    """Make each step last at least `pace` seconds and return a function that gives the number of
    the current step, from 1."""
    plain = loop.Trainer._step
    current = 0

    def paced(self: Any) -> Any:
        """Tell the number of the first step, then sleep and take the step."""
        nonlocal current
        if not current and self.ranks.is_first:
            tells.write_text(str(self.state.step + 1), encoding="utf-8")
        current = self.state.step + 1
        time.sleep(pace)
        return plain(self)

    loop.Trainer._step = paced  # type: ignore[method-assign]
    return lambda: current


def _kill_between_messages(name: str, is_time: Callable[[], bool], instant: int) -> None:
    """Kill the process between two messages of a layer's pass.

    Args:
        name: the pass, forward or backward.
        instant: the message before which it dies, from 1; the end of the pass if there are fewer.
    """
    plain = getattr(executor.RunProgram, name)
    start = vars(executor)["start"]
    remaining = 0  # messages until it dies; it does not while this is at or below 0

    def counted(*arguments: Any, **options: Any) -> Any:
        """Start a message, unless it is time to die."""
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            die()
        return start(*arguments, **options)

    def armed(*arguments: Any, **options: Any) -> Any:
        """Run the pass, in which messages are counted when it is time."""
        nonlocal remaining
        remaining = instant if is_time() else 0
        result = plain(*arguments, **options)
        if remaining > 0:
            die()
        return result

    setattr(executor, "start", counted)  # noqa: B010 - imported there
    setattr(executor.RunProgram, name, staticmethod(armed))


def _kill_in_update(is_time: Callable[[], bool], way: str) -> None:
    """Kill the process before or after the optimizer's update."""
    plain = torch.optim.AdamW.step

    def step(self: Any, *arguments: Any) -> Any:
        """Update the parameters, and die before or after it."""
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
    """Strike while a checkpoint is saved; call `afterwards` once that save is complete."""
    save = loop.Trainer._save
    finish = loop.Trainer._finish_saving
    has_struck = False

    def saving(self: Any) -> None:
        """Strike when it is time, and save."""
        nonlocal has_struck
        if is_time() and self.state.step % INTERVAL == 0:
            has_struck = True
            strike()
        save(self)

    def finishing(self: Any) -> None:
        """Wait for a save in the background, if there is one."""
        is_saving = self._saving is not None
        finish(self)
        if is_saving and has_struck:
            afterwards()

    loop.Trainer._save = saving  # type: ignore[method-assign]
    loop.Trainer._finish_saving = finishing  # type: ignore[method-assign]


def _kill_at_event(instant: int) -> None:
    """Kill the process when it opens, lists or changes a file for the `instant`-th time."""
    remaining = instant
    events = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}

    def hook(event: str, arguments: Any) -> None:
        """Count an event of Python's audit."""
        nonlocal remaining
        if event in events:
            remaining -= 1
            if remaining == 0:
                die()

    sys.addaudithook(hook)


def _jump(is_time: Callable[[], bool], draw: random.Random) -> None:
    """Let the wall clock jump by years at every look."""
    plain = time.time

    def jumping() -> float:
        """Return the time, wrong by up to nine years when it is time."""
        years = draw.uniform(-9, 9) if is_time() else 0.0
        return plain() + years * 365 * 86400

    time.time = jumping
