"""FasterMoE's rule for shadowing as printed (He et al., PPoPP 2022, section 4.1, Algorithm 1 with equation 8); to compare with.

Its cost forgets the tokens that still travel, and it stops at the first expert that does not help, so it may replicate what
makes a layer slower, and nothing where two experts are equally hot. Loads are summed over origins, as the paper says; a
released implementation summed over experts and never replicated anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad, ReplicationCosts
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import Replications


@dataclass(frozen=True, kw_only=True)
class ShadowRates:
    """What equations 7 and 8 know of a layer: seconds, forward and backward together."""

    copy: float
    """Of computing a copy."""
    trip: float
    """Of sending a copy every way that it goes."""
    weights: float
    """Of sending an expert's weights and fetching their gradients."""

    def unshadowed(self, computed: np.ndarray) -> float:
        """Return the time without shadows (eq. 7): all copies travel, those that stay at home too.

        Args:
            computed: copies that each place computes.
        """
        return float(computed.max()) * (self.copy + self.trip)

    def shadowed(self, computed: np.ndarray, shadows: int) -> float:
        """Return the time with shadows (eq. 8): no copy travels, and every shadow's weights do."""
        return float(computed.max()) * self.copy + shadows * self.weights


def shadows_of(copies: np.ndarray, home: np.ndarray, rates: ShadowRates) -> list[int]:
    """Return the experts to shadow by Algorithm 1, hottest first: while equation 8 falls, starting from equation 7.

    Args:
        copies: (places, experts) copies of a place for an expert.
        home: (experts,) the place of each.
        rates: of the layer.
    """
    computed = np.bincount(home, weights=copies.sum(0), minlength=len(copies))
    best = rates.unshadowed(computed)
    found: list[int] = []
    for expert in np.argsort(-copies.sum(0), kind="stable").tolist():
        computed[home[expert]] -= copies[:, expert].sum()
        computed += copies[:, expert]
        seconds = rates.shadowed(computed, len(found) + 1)
        if seconds >= best:
            break
        best = seconds
        found.append(expert)
    return found


class Published(AbstractReplicaPolicy):
    """Replicates experts to all places, hottest first, while equation 8 falls.

    Args:
        costs: rates; None for those of `cost.Machine`.
    """

    def __init__(self, costs: ReplicationCosts | None = None) -> None:
        self.costs = costs or ReplicationCosts()

    def replicated(self, replica: ReplicaLoad) -> Replications:
        load, places = replica.load, np.arange(len(replica.origins))
        slowest = float(replica.seconds_per_byte.max())
        rates = ShadowRates(
            copy=replica.seconds_per_copy,
            trip=replica.passes * replica.row_bytes * slowest,
            weights=replica.passes / 2 * replica.weight_bytes * slowest,
        )
        shadowed = np.isin(np.arange(load.num_experts), shadows_of(replica.copies, load.home, rates))
        place, expert = np.nonzero(shadowed & (places[:, None] != load.home))
        return Replications(place, expert, place, replica.copies[place, expert])
