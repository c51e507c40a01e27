"""What calls of a layer take, forward and backward, told to all ranks with the counts of a later call.

A call's time starts when its counts are known and stops when its results are; the backward pass is timed around the node of
the autograd graph. On a GPU the times are those of events, read when they have happened: nothing waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

RECENT = 32
"""Tasks whose median is what a row takes: one that lost its core says nothing."""
UNLIKE = 0.25
"""Share by which a rank must be slower or faster than the median for its speed to count: calls of few rows are no measure of
it."""
STEP = 0.05
"""Speeds are told apart in steps of so much, so that decisions do not follow every flicker."""
OPEN = 64
"""Calls that may wait for their backward pass; what is older is never told."""


class Moment:
    """Now: on the host, or where a device's stream has got to.

    Args:
        device: that the layer runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._at, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_known(self) -> bool:
        """Whether it has come to pass; asking does not wait."""
        return self._event is None or self._event.query()

    def until(self, later: Moment) -> float:
        """Return the seconds from here to a later moment; both are known."""
        if self._event is not None and later._event is not None:
            return float(self._event.elapsed_time(later._event)) / 1e3
        return later._at - self._at


class TimedCall:
    """One call: its number, and four moments.

    Args:
        number: of the call, the same on all ranks.
        device: that it runs on.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self._device = number, device
        self._moments: list[Moment] = [Moment(device)]

    def ran(self, y: Tensor) -> Tensor:
        """Take down that results are there, and return them; watch for the backward pass.

        Args:
            y: what the program returned, as it did; what needs no gradient has no backward pass.
        """
        node = y.grad_fn
        if node is not None and len(self._moments) == 1:
            self._moments.append(Moment(self._device))
            node.register_prehook(self._backward_starts)
            node.register_hook(self._backward_ends)
        return y

    def ran_again(self) -> None:
        """Take down that a recomputation ran; if the backward pass waited for it, that starts now."""
        if len(self._moments) == 3:
            self._moments[2] = Moment(self._device)

    def seconds(self) -> float | None:
        """Return what the call took, forward and backward; None while that is not known."""
        if len(self._moments) < 4 or not self._moments[3].is_known:
            return None
        start, end, back, done = self._moments
        return start.until(end) + back.until(done)

    def _backward_starts(self, _: Any) -> None:
        if len(self._moments) == 2:
            self._moments.append(Moment(self._device))

    def _backward_ends(self, *_: Any) -> None:
        if len(self._moments) == 3:
            self._moments.append(Moment(self._device))


class CallClock:
    """Times the calls of one layer, and agrees with the other ranks on what they took.

    Args:
        ranks: that tell each other.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._calls = ranks, 0
        self._open: deque[TimedCall] = deque(maxlen=OPEN)
        self._heard: dict[int, dict[int, float]] = {}

    def start(self, device: torch.device) -> TimedCall:
        """Begin with a call; all ranks do."""
        self._calls += 1
        self._open.append(TimedCall(self._calls, device))
        return self._open[-1]

    def tell(self) -> list[float]:
        """Return what to tell the others: the oldest call whose time is known and was not told, its seconds, and whether the
        call that begins will have a backward pass."""
        told = [0.0, 0.0, float(torch.is_grad_enabled())]
        for call in self._open:
            seconds = call.seconds()
            if seconds is not None:
                told[:2] = [float(call.number), seconds]
                self._open.remove(call)
                break
        return told

    def hear(self, told: Sequence[Sequence[float]]) -> dict[int, float]:
        """Return the calls whose time all ranks know now, seconds of the slowest by number.

        Args:
            told: what each rank told, first what `tell` returned.
        """
        for rank, (number, seconds, *_) in enumerate(told):
            if number:
                self._heard.setdefault(int(number), {})[rank] = seconds
        known = {number: max(each.values()) for number, each in self._heard.items() if len(each) == self._ranks}
        for number in known:
            del self._heard[number]
        while len(self._heard) > OPEN:
            del self._heard[min(self._heard)]
        return known

    @staticmethod
    def is_timed(told: Sequence[Sequence[float]]) -> bool:
        """Return whether the call that begins has a backward pass on every rank, so that its time will be known."""
        return all(of_rank[2] for of_rank in told)


class WorkMeter:
    """Takes the time of the experts' tasks of one layer on this rank: what a product of a row takes.

    On a GPU it reads events when they have happened; nothing waits.
    """

    def __init__(self) -> None:
        self._each: deque[float] = deque(maxlen=RECENT)
        self.least = 0
        """Rows below which a task is no measure of speed."""
        self._open: deque[tuple[int, Moment, Moment]] = deque(maxlen=OPEN)

    @contextmanager
    def watch(self, rows: int, device: torch.device) -> Iterator[None]:
        """Watch a task of so many rows."""
        start = Moment(device)
        yield
        if rows and rows >= self.least:
            self._open.append((rows, start, Moment(device)))
        while self._open and self._open[0][2].is_known:
            done, begin, end = self._open.popleft()
            self._each.append(begin.until(end) / done)

    @property
    def seconds(self) -> float:
        """What a row takes of late; 0 while little was measured."""
        return median(self._each) if len(self._each) >= RECENT // 4 else 0.0


def speeds_of(seconds: np.ndarray) -> tuple[float, ...]:
    """Return the speeds of ranks over the median's, from the seconds that each told for a row, 1 for about the median's; ()
    while some rank has measured nothing.

    Args:
        seconds: (ranks,) float64.
    """
    if not (seconds > 0).all():
        return ()
    speeds = np.median(seconds) / seconds
    speeds = np.where(np.abs(speeds - 1) < UNLIKE, 1.0, np.maximum(np.round(speeds / STEP) * STEP, STEP))
    return tuple(speeds.tolist())
