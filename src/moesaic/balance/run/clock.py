"""Measures the time of a layer's calls, forward and backward. Ranks exchange the times with the counts of a later call.

A call's time starts when its counts are known and stops when its results are computed. The backward pass is timed by hooks on
its node of the autograd graph. On a GPU the times come from events, which are read once they are complete, without waiting.
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
"""Number of tasks over which the time per row is a median, so that a task that lost its core has no influence."""
UNLIKE = 0.25
"""A rank's speed counts only if it differs from the median by at least this share; calls of few rows measure it too roughly."""
STEP = 0.05
"""Speeds are rounded to multiples of this, so that decisions do not follow small fluctuations."""
OPEN = 64
"""Number of calls that may wait for their backward pass; the time of an older call is dropped."""


class Moment:
    """A point in time: on the host, or on a device's current stream.

    Args:
        device: the device on which the layer runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._at, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_known(self) -> bool:
        """Whether the moment has passed on the device; this does not wait."""
        return self._event is None or self._event.query()

    def until(self, later: Moment) -> float:
        """Return the seconds from this moment to a later one; both must be known."""
        if self._event is not None and later._event is not None:
            return float(self._event.elapsed_time(later._event)) / 1e3
        return later._at - self._at


class TimedCall:
    """The times of one call: start and end of its forward and its backward pass.

    Args:
        number: the number of the call, the same on all ranks.
        device: the device on which the call runs.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self._device = number, device
        self._moments: list[Moment] = [Moment(device)]

    def ran(self, y: Tensor) -> Tensor:
        """Record the end of the forward pass, and register hooks that time the backward pass.

        Args:
            y: the program's result itself, which is returned. Without a gradient, there is no backward pass.
        """
        node = y.grad_fn
        if node is not None and len(self._moments) == 1:
            self._moments.append(Moment(self._device))
            node.register_prehook(self._backward_starts)
            node.register_hook(self._backward_ends)
        return y

    def ran_again(self) -> None:
        """Record the end of a recomputation. If it ran inside the backward pass, the backward time restarts now."""
        if len(self._moments) == 3:
            self._moments[2] = Moment(self._device)

    def seconds(self) -> float | None:
        """Return the seconds of forward and backward pass; None until they are known."""
        if len(self._moments) < 4 or not self._moments[3].is_known:
            return None
        start, end, backward_start, backward_end = self._moments
        return start.until(end) + backward_start.until(backward_end)

    def _backward_starts(self, _: Any) -> None:
        if len(self._moments) == 2:
            self._moments.append(Moment(self._device))

    def _backward_ends(self, *_: Any) -> None:
        if len(self._moments) == 3:
            self._moments.append(Moment(self._device))


class CallClock:
    """Times the calls of one layer, and agrees with the other ranks on the slowest rank's time of each.

    Args:
        ranks: number of ranks that exchange times.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._calls = ranks, 0
        self._open: deque[TimedCall] = deque(maxlen=OPEN)
        self._rank_seconds: dict[int, dict[int, float]] = {}

    def start(self, device: torch.device) -> TimedCall:
        """Start to time a call. All ranks do so for the same calls."""
        self._calls += 1
        self._open.append(TimedCall(self._calls, device))
        return self._open[-1]

    def tell(self) -> list[float]:
        """Return three numbers for the other ranks: the number and seconds of the oldest call whose time is known and was not
        sent yet (else 0), and whether the call that starts now will have a backward pass."""
        numbers = [0.0, 0.0, float(torch.is_grad_enabled())]
        for call in self._open:
            seconds = call.seconds()
            if seconds is not None:
                numbers[:2] = [float(call.number), seconds]
                self._open.remove(call)
                break
        return numbers

    def hear(self, told: Sequence[Sequence[float]]) -> dict[int, float]:
        """Return, by number, the calls whose time is now known from all ranks, each with the slowest rank's seconds.

        Args:
            told: the numbers that each rank sent, beginning with those of `tell`.
        """
        for rank, (number, seconds, *_) in enumerate(told):
            if number:
                self._rank_seconds.setdefault(int(number), {})[rank] = seconds
        complete = {
            number: max(each.values()) for number, each in self._rank_seconds.items() if len(each) == self._ranks
        }
        for number in complete:
            del self._rank_seconds[number]
        while len(self._rank_seconds) > OPEN:
            del self._rank_seconds[min(self._rank_seconds)]
        return complete

    @staticmethod
    def is_timed(told: Sequence[Sequence[float]]) -> bool:
        """Return whether the call that starts now has a backward pass on every rank, so that its time will be known."""
        return all(of_rank[2] for of_rank in told)


class WorkMeter:
    """Measures the time that the experts' tasks of one layer take per row on this rank.

    On a GPU it reads events once they are complete, without waiting.
    """

    def __init__(self) -> None:
        self._row_seconds: deque[float] = deque(maxlen=RECENT)
        self.least = 0
        """Smallest number of rows of a task that is measured; smaller tasks say little about speed."""
        self._open: deque[tuple[int, Moment, Moment]] = deque(maxlen=OPEN)

    @contextmanager
    def watch(self, rows: int, device: torch.device) -> Iterator[None]:
        """Time a task of `rows` rows."""
        start = Moment(device)
        yield
        if rows and rows >= self.least:
            self._open.append((rows, start, Moment(device)))
        while self._open and self._open[0][2].is_known:
            rows_done, begin, end = self._open.popleft()
            self._row_seconds.append(begin.until(end) / rows_done)

    @property
    def seconds(self) -> float:
        """Recent median of the seconds per row; 0 until enough tasks were measured."""
        return median(self._row_seconds) if len(self._row_seconds) >= RECENT // 4 else 0.0


def speeds_of(seconds: np.ndarray) -> tuple[float, ...]:
    """Return the speed of each rank relative to the median, from the ranks' seconds per row; about 1 is rounded to 1.

    Args:
        seconds: (ranks,) float64; 0 for a rank that has not measured any.

    Returns:
        the speeds; () if any rank has not measured any.
    """
    if not (seconds > 0).all():
        return ()
    speeds = np.median(seconds) / seconds
    speeds = np.where(np.abs(speeds - 1) < UNLIKE, 1.0, np.maximum(np.round(speeds / STEP) * STEP, STEP))
    return tuple(speeds.tolist())
