"""All-to-all algorithms. A movement over ep is lowered to one of them by `passes/route_all_to_all.py`.

`multicast` is not among them: it changes what is sent, not only how, and is a pass (`passes/multicast.py`). What each name of
`Plan.all_to_all` is, says `Crossing` (`plan/plan.py`).
"""

from __future__ import annotations

from moesaic.program.all_to_all.algorithms import Hier1D, Hier2D, Hier3D, Linear, NaiveAggregation, Pipelined
from moesaic.program.all_to_all.all_to_all import AbstractAllToAll

ALL_TO_ALLS: dict[str, AbstractAllToAll] = {
    "linear": Linear(),
    "pipelined": Pipelined(),
    "hier1d": Hier1D(),
    "hier2d": Hier2D(),
    "hier3d": Hier3D(),
    "naive": NaiveAggregation(),
}

__all__ = ["ALL_TO_ALLS", "AbstractAllToAll", "Hier1D", "Hier2D", "Hier3D", "Linear", "NaiveAggregation", "Pipelined"]
