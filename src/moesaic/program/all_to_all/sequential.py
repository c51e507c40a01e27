"""The all-to-all that sends to one peer after the other, as ScheMoE's equation 17 describes its
baseline."""

from __future__ import annotations

from moesaic.program.all_to_all.all_to_all import (
    PACKED,
    AbstractAllToAll,
    Hop,
    Leg,
    NodeMap,
    legs_of,
)
from moesaic.program.task import Lane


class Sequential(AbstractAllToAll):
    """In round t, a rank sends to the t-th rank after it and waits for the t-th one before it;
    rounds do not overlap.

    Shi et al. (EuroSys 2024), section 5, takes this for NCCL's all-to-all. Linear sends to all
    peers at once.
    """

    is_searched = False

    def hops(self, node_map: NodeMap) -> tuple[Hop, ...]:
        num_rounds = max(len(node_map.ranks) - 1, 1)  # an algorithm has a hop, also of a rank alone
        hops = [Hop(Lane.INTER, (PACKED,))]
        for number in range(1, num_rounds):  # each waits for the one before
            hops.append(Hop(Lane.INTER, (PACKED, number - 1)))
        return tuple(hops)

    def path(self, node_map: NodeMap, source: int, target: int) -> tuple[Leg, ...]:
        ranks = node_map.ranks
        distance = (ranks.index(target) - ranks.index(source)) % len(ranks)
        return legs_of((distance - 1, source, target))  # hops count from 0, distances from 1
