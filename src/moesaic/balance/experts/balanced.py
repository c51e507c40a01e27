"""Expert placement, ours: what is gained until the next decision must pay for the move."""

from __future__ import annotations

import numpy as np

from moesaic.balance.experts.placer import AbstractExpertPlacer, ExpertLoad, ExpertRates, ExpertSeconds
from moesaic.balance.experts.swaps import fewest_between_nodes, least_busiest, spread_by_load


class Balanced(AbstractExpertPlacer):
    """Ours: the least busiest place, then the fewest rows between nodes, as far as the way there pays for itself.

    Besides the best order it looks at each step of a way to it by swaps of two experts, which moves little at first.

    Args:
        rates: of rows; None for those of `cost.Machine`.
    """

    def __init__(self, rates: ExpertRates | None = None) -> None:
        self.rates = rates or ExpertRates()

    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the order of the least modelled time until the next decision, its move included."""
        seconds = ExpertSeconds(load, self.rates)
        way = least_busiest(load.weight, load.place, load.grid.ep)
        way += fewest_between_nodes(load.weight, load.crossing, way[-1])
        return load.order_at(min([*way, self.best(load)], key=seconds.in_all))  # the first is to stay: it wins ties

    def best(self, load: ExpertLoad) -> np.ndarray:
        """Return the place of each expert, (num_experts,) int64, if moving cost nothing."""
        ep = load.grid.ep
        starts = (load.place, spread_by_load(load.weight, ep))
        ends = [least_busiest(load.weight, start, ep)[-1] for start in starts]
        found = [fewest_between_nodes(load.weight, load.crossing, end, stay=load.place)[-1] for end in ends]
        return min(found, key=lambda place: (load.busiest(place), load.between_nodes(place)))
