"""Expert placement as published: SmartMoE (Zhai et al., USENIX ATC 2023)."""

from __future__ import annotations

import numpy as np

from moesaic.balance.experts.placer import AbstractExpertPlacer, ExpertLoad
from moesaic.balance.experts.swaps import spread_by_load


class SmartMoE(AbstractExpertPlacer):
    """As published: by descending load, each expert to the least loaded place with a free slot, its old one if equal.

    Taken whenever the busiest place gets less, whatever the move costs, wherever rows have to go. Kept to be compared with.
    """

    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the greedy order if its busiest place has fewer rows."""
        place = spread_by_load(load.weight, load.grid.ep, load.place)
        return load.order_at(place) if load.busiest(place) < load.busiest(load.place) else load.order
