"""All-to-all algorithms. `passes/route_all_to_all.py` lowers movements over ep to one of them.

`multicast` is a pass instead (`passes/multicast.py`), because it changes what is sent and not only
how. Each class explains itself.
"""

from __future__ import annotations

from moesaic.program.all_to_all.algorithms import (
    Hier1D,
    Hier2D,
    Hier3D,
    Linear,
    NaiveAggregation,
    Pipelined,
)
from moesaic.program.all_to_all.all_to_all import AbstractAllToAll
from moesaic.program.all_to_all.sequential import Sequential

ALL_TO_ALLS: dict[str, AbstractAllToAll] = {
    "linear": Linear(),
    "pipelined": Pipelined(),
    "hier1d": Hier1D(),
    "hier2d": Hier2D(),
    "hier3d": Hier3D(),
    "naive": NaiveAggregation(),
    "sequential": Sequential(),
}

__all__ = [
    "ALL_TO_ALLS",
    "AbstractAllToAll",
    "Hier1D",
    "Hier2D",
    "Hier3D",
    "Linear",
    "NaiveAggregation",
    "Pipelined",
]
