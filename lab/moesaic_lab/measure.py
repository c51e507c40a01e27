"""How every benchmark times: methods in turn, spans on one clock, medians with their spread, paired ratios.

What a machine does beside us drifts over seconds. So methods are never run one after another in blocks: each repeat runs
every method once, the order rotates, and a ratio is taken within a repeat before the median is.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Span = tuple[float, float]
"""Start and end in seconds on `time.monotonic`, which all processes of a machine share."""

RESAMPLES = 2000
"""Of the bootstrap."""
NEAR = 1.10
"""A ratio nearer to 1 than this, either way, wants many pairs."""
MANY = 30
"""Pairs under such a ratio."""


def in_turn(
    methods: Mapping[str, Callable[[], object]], repeats: int, *, barrier: Callable[[], object], warmup: int = 1
) -> dict[str, list[Span]]:
    """Time methods in turn; called on every rank with the same methods in the same order.

    Args:
        methods: name to what is timed; freeing what it returns is no part of its time.
        repeats: how often each method is timed; repeat r starts with method r, so that none always follows the same one.
        barrier: run by all ranks before each method; `moesaic.profiling.together.start_together` makes one.
        warmup: rounds before those that count.

    Returns:
        this rank's spans by method, one per repeat.
    """
    names = list(methods)
    spans: dict[str, list[Span]] = {name: [] for name in names}
    for repeat in range(-warmup, repeats):
        first = repeat % len(names) if names else 0
        for name in names[first:] + names[:first]:
            barrier()
            start = time.monotonic()
            result = methods[name]()
            end = time.monotonic()
            if repeat >= 0:
                spans[name].append((start, end))
            del result
    return spans


@contextmanager
def without_collections() -> Iterator[None]:
    """A stretch in which no garbage is looked for among what there is: all ranks would wait for the one that looks."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def over_ranks(found: Sequence[Mapping[str, Sequence[Span]]]) -> dict[str, tuple[float, ...]]:
    """Return seconds per method and repeat, from the first rank's start to the last rank's end.

    Args:
        found: what `in_turn` returned, per rank.
    """
    return {
        name: tuple(max(end for _, end in spans) - min(start for start, _ in spans) for spans in zip(*of_ranks))
        for name in (found[0] if found else {})
        for of_ranks in [[spans[name] for spans in found]]
    }


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One method's times."""

    seconds: tuple[float, ...]
    """Per repeat."""
    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Sum up the times of at least one repeat."""
        low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
        return cls(seconds=tuple(seconds), median=median, low=low, high=high)

    def row(self) -> dict[str, Any]:
        """Return it as part of a row."""
        return {
            "median_seconds": self.median, "low_seconds": self.low, "high_seconds": self.high, "repeats": len(self.seconds),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How long one method takes, over another in the same repeats."""

    median: float
    low: float
    """Lower end of the median's 95 % interval."""
    high: float
    """Upper end of the median's 95 % interval."""
    repeats: int
    """Pairs."""

    @property
    def is_near(self) -> bool:
        """Whether the two take so much alike that the ratio wants many pairs."""
        return 1 / NEAR < self.median < NEAR

    def row(self, name: str) -> dict[str, Any]:
        """Return it as part of a row, under a name."""
        return {name: self.median, f"{name}_95": [self.low, self.high], "pairs": self.repeats}


@dataclass(frozen=True, kw_only=True)
class TimedCell:
    """What methods took that ran in turn."""

    timings: Mapping[str, Timing]
    """By method, rounds in turn with all others."""
    near: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By method, seconds of all rounds in which the reference ran too; only of the reference and those near it."""

    def ratio(self, name: str, other: str) -> Ratio:
        """Return how long one method takes over another: from all rounds that both were in."""
        if name in self.near and other in self.near:
            return paired(self.near[name], self.near[other])
        return paired(self.timings[name].seconds, self.timings[other].seconds)


def timed(
    spans: Sequence[Mapping[str, Sequence[Span]]], pairs: Sequence[Mapping[str, Sequence[Span]]] = ()
) -> dict[str, Any]:
    """Return the fields of a `TimedCell`.

    Args:
        spans: per rank, of all methods by name.
        pairs: per rank, of the further rounds in which only those near the reference ran.
    """
    seconds, further = over_ranks(spans), over_ranks(pairs)
    return {
        "timings": {name: Timing.of(times) for name, times in seconds.items()},
        "near": {name: (*seconds[name], *times) for name, times in further.items()},
    }


def paired(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Ratio:
    """Return the median of a / b over repeats, with its 95 % interval by the percentile bootstrap.

    The resampling is seeded: the same times give the same interval. Efron and Tibshirani, An Introduction to the
    Bootstrap (1993), chapter 13.

    Args:
        a: seconds per repeat.
        b: seconds of the same repeats.
        level: of another interval; 0.9 is that of two one-sided tests at 5 %.
    """
    assert len(a) == len(b) > 0, f"{len(a)} and {len(b)} repeats do not pair"
    ratios = np.asarray(a, dtype=np.float64) / np.asarray(b, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(ratios, size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (50 - 50 * level, 50 + 50 * level)).tolist()
    return Ratio(median=float(np.median(ratios)), low=low, high=high, repeats=len(ratios))
