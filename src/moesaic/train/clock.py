"""How long training takes: seconds and tokens of the steps, with evaluation, logging and checkpoints left out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts the seconds and tokens that are spent in `training`.

    Args:
        seconds: spent by earlier processes of the run.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._earlier = seconds
        self._tokens = 0
        self._marked_seconds = seconds
        self._marked_tokens = 0

    @contextmanager
    def training(self, tokens: int = 0) -> Iterator[None]:
        """Count the time of the block, and `tokens`, as training."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self._tokens += tokens

    @property
    def tokens_per_second(self) -> float:
        """Of this process; 0 before its first step."""
        return _rate(self._tokens, self.seconds - self._earlier)

    def interval(self) -> float:
        """Return the tokens per second since the last call."""
        speed = _rate(self._tokens - self._marked_tokens, self.seconds - self._marked_seconds)
        self._marked_tokens, self._marked_seconds = self._tokens, self.seconds
        return speed


def _rate(tokens: int, seconds: float) -> float:
    return tokens / max(seconds, 1e-9)
