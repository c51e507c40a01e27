"""All-to-all algorithms, one a file. A movement over ep is lowered to one of them by `passes/route_links.py`.

`multicast` is not among them: it changes what is sent, not only how, and is a pass (`passes/multicast.py`). What each name of
`Plan.all_to_all` is, says `Crossing` (`plan/plan.py`).
"""

from __future__ import annotations

from moesaic.program.links.hier1d import Hier1D
from moesaic.program.links.hier2d import Hier2D
from moesaic.program.links.hier3d import Hier3D
from moesaic.program.links.linear import Linear
from moesaic.program.links.link import AbstractLink
from moesaic.program.links.naive import NaiveAggregation
from moesaic.program.links.pipelined import Pipelined

LINKS: dict[str, AbstractLink] = {
    "linear": Linear(),
    "pipelined": Pipelined(),
    "hier1d": Hier1D(),
    "hier2d": Hier2D(),
    "hier3d": Hier3D(),
    "naive": NaiveAggregation(),
}

__all__ = ["LINKS", "AbstractLink", "Hier1D", "Hier2D", "Hier3D", "Linear", "NaiveAggregation", "Pipelined"]
