"""SmartMoE's placement of experts (Zhai et al., USENIX ATC 2023), as published; to compare with.

Its greedy is longest processing time first (Graham 1969) with room for equally many. What a move costs it ignores;
`balanced.py` is ours. All loads come with a leading axis of copies of the experts, which all have one placement.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.experts.placer import AbstractExpertPlacer, ExpertLoad


class SmartMoE(AbstractExpertPlacer):
    """As published: by descending load, each expert to the least loaded place with a free slot, its old one if equal.

    Taken whenever the busiest place gets less, whatever the move costs, wherever rows have to go. Kept to be compared with.
    """

    def decide(self, load: ExpertLoad) -> np.ndarray:
        """Return the greedy order if its busiest place has fewer rows."""
        place = spread_by_load(load.weight, np.ones_like(load.slowness), load.place)
        return load.order_at(place) if load.busiest(place) < load.busiest(load.place) else load.order


def spread_by_load(weight: np.ndarray, slowness: np.ndarray, before: np.ndarray | None = None) -> np.ndarray:
    """Return the place of each expert, (num_experts,) int64: by descending load to the least loaded place with room.

    Args:
        weight: (copies, num_experts) rows of each expert.
        slowness: (copies, ep) time of a row at each place.
        before: (num_experts,) the place of each expert now, which wins where places are equal.
    """
    num_experts, ep = weight.shape[1], slowness.shape[1]
    found, load = np.empty(num_experts, dtype=np.int64), np.zeros((len(weight), ep))
    room = np.full(ep, num_experts // ep)
    for expert in np.argsort(-weight.sum(0), kind="stable"):
        after = np.where(room > 0, ((load + weight[:, expert, None]) * slowness).max(0), np.inf)
        place = int(after.argmin())
        if before is not None and after[before[expert]] <= after[place]:
            place = int(before[expert])
        found[expert] = place
        load[:, place] += weight[:, expert]
        room[place] -= 1
    return found
