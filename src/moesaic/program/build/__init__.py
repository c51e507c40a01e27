"""The schedules: functions that return a program, each with tensor parallelism paused at other
points around the layer.

Every schedule reads `x`, the tokens, `gates`, the routing weights, `index`, the copies' tokens, and
`w`, the experts' weights. With `bias` it also reads `b`, the parameters that the shards of an
expert share. It writes `y`. Parm's papers call tp MP and etp ESP.
"""

from __future__ import annotations

from typing import Protocol

from moesaic.program.build.schedules import baseline, s1, s2, s3, ted
from moesaic.program.task import Program


class ScheduleBuilder(Protocol):
    """A function that returns the program of a schedule."""

    def __call__(self, bias: bool = False) -> Program:
        """Return the program, which reads `b` if `bias`."""


SCHEDULES: dict[str, ScheduleBuilder] = {
    "baseline": baseline,
    "ted": ted,
    "s1": s1,
    "s2": s2,
    "s3": s3,
}

__all__ = ["SCHEDULES", "baseline", "s1", "s2", "s3", "ted"]
