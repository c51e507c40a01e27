"""How every benchmark times: interleaved methods, a clock shared by all ranks, medians with
quartiles, paired ratios.

The other load of a machine drifts over seconds. So methods are never timed in blocks: each repeat
runs every method once, in rotating order. Ratios are computed within each repeat, and then their
median is taken.
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
"""Number of bootstrap samples."""
NEAR = 1.10
"""A ratio between 1 / NEAR and NEAR needs many repeats."""
MANY = 30
"""Repeats that such a ratio needs."""


def in_turn(
    methods: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    barrier: Callable[[], object],
    warmup: int = 1,
) -> dict[str, list[Span]]:
    """Time interleaved methods. Every rank must call this function with the same methods in the
    same order.

    Args:
        methods: the functions to time, by name; the time to free their results does not count.
        repeats: how often each method is timed; repeat r starts with method r, so no method always
            follows the same one.
        barrier: called on all ranks before each method; `moesaic.measure.together.start_together`
            makes one.
        warmup: untimed repeats at the beginning.

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
    """Exclude all existing objects from garbage collection inside the block: all ranks would wait
    for a collecting one."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def over_ranks(by_rank: Sequence[Mapping[str, Sequence[Span]]]) -> dict[str, tuple[float, ...]]:
    """Return seconds by method, one per repeat, from the first rank's start to the last rank's end.

    Args:
        by_rank: the result of `in_turn` on each rank.
    """
    return {
        name: tuple(
            max(end for _, end in spans) - min(start for start, _ in spans)
            for spans in zip(*of_ranks)
        )
        for name in (by_rank[0] if by_rank else {})
        for of_ranks in [[spans[name] for spans in by_rank]]
    }


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of one method over all repeats."""

    seconds: tuple[float, ...]
    """Seconds of each repeat."""
    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Compute median and quartiles from the times of at least one repeat."""
        low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
        return cls(seconds=tuple(seconds), median=median, low=low, high=high)

    def row(self) -> dict[str, Any]:
        """Return the timing as keys of a benchmark's row."""
        return {
            "median_seconds": self.median,
            "low_seconds": self.low,
            "high_seconds": self.high,
            "repeats": len(self.seconds),
        }


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The time of one method over the time of another, paired within repeats."""

    median: float
    low: float
    """Lower end of the median's 95 % interval."""
    high: float
    """Upper end of the median's 95 % interval."""
    repeats: int
    """Number of pairs."""

    @property
    def is_near(self) -> bool:
        """Whether the ratio is so near to 1 that it needs `MANY` repeats."""
        return 1 / NEAR < self.median < NEAR

    def row(self, name: str) -> dict[str, Any]:
        """Return the ratio, its interval and the number of pairs as keys of a benchmark's row."""
        return {name: self.median, f"{name}_95": [self.low, self.high], "pairs": self.repeats}


def spread(name: str, found: Timing | Ratio) -> dict[str, float]:
    """Return a median and the two ends around it as keys of a benchmark's row."""
    return {name: found.median, f"{name}_low": found.low, f"{name}_high": found.high}


@dataclass(frozen=True, kw_only=True)
class TimedCell:
    """The times of interleaved methods in one case."""

    timings: Mapping[str, Timing]
    """Times by method, from the repeats in which all methods ran."""
    near: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds by method, with the further repeats included that only the reference and methods near
    it ran. Only these methods have an entry."""

    def ratio(self, name: str, other: str, level: float = 0.95) -> Ratio:
        """Return the time of one method over another's, from all repeats in which both ran, with an
        interval of some level."""
        if name in self.near and other in self.near:
            return paired(self.near[name], self.near[other], level)
        return paired(self.timings[name].seconds, self.timings[other].seconds, level)


def timed(
    spans: Sequence[Mapping[str, Sequence[Span]]],
    pairs: Sequence[Mapping[str, Sequence[Span]]] = (),
) -> dict[str, Any]:
    """Return the fields of a `TimedCell`.

    Args:
        spans: per rank, the spans of all methods by name.
        pairs: per rank, the spans of further repeats that only the reference and methods near it
            ran.
    """
    seconds = over_ranks(spans)
    further = over_ranks(pairs)
    return {
        "timings": {name: Timing.of(times) for name, times in seconds.items()},
        "near": {name: (*seconds[name], *times) for name, times in further.items()},
    }


def paired(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Ratio:
    """Return the median of a / b over repeats, with its confidence interval by the percentile
    bootstrap.

    The resampling is seeded: the same times give the same interval. Efron and Tibshirani, An
    Introduction to the Bootstrap (1993), chapter 13.

    Args:
        a: seconds of each repeat.
        b: seconds of another method in the same repeats.
        level: the confidence level; 0.9 is the interval of two one-sided tests at 5 %.
    """
    assert len(a) == len(b) > 0, f"{len(a)} and {len(b)} repeats do not pair"
    ratios = np.asarray(a, dtype=np.float64) / np.asarray(b, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(ratios, size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (50 - 50 * level, 50 + 50 * level)).tolist()
    return Ratio(median=float(np.median(ratios)), low=low, high=high, repeats=len(ratios))
