"""The schedules: where tensor parallelism pauses around the layer. Each is a function that returns a program.

Every schedule reads `x`, the tokens, `gates`, the routing weights, and `w`, the experts' weights (with `bias` also `b`,
what the shards of an expert hold in common), and writes `y`. Parm's papers call tp MP and etp ESP.
"""

from __future__ import annotations

from collections.abc import Callable

from moesaic.program.build.schedules import baseline, s1, s2, s3, ted
from moesaic.program.task import Program

SCHEDULES: dict[str, Callable[[bool], Program]] = {"baseline": baseline, "ted": ted, "s1": s1, "s2": s2, "s3": s3}

__all__ = ["SCHEDULES", "baseline", "s1", "s2", "s3", "ted"]
