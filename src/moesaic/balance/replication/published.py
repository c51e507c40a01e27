"""FasterMoE's shadowing rule as printed (He et al., PPoPP 2022, section 4.1, Algorithm 1 with
equation 8), a baseline.

The rule's cost omits the tokens that still travel, so it may choose replicas that slow a layer
down. It stops at the first expert that does not help, so it replicates nothing if two experts are
equally hot. Loads are summed over origins, as in the paper; a released implementation summed over
experts and never replicated anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.program.replications import Replications


@dataclass(frozen=True, kw_only=True)
class ShadowRates:
    """The rates of a layer in equations 7 and 8, in seconds, forward and backward together."""

    copy: float
    """Seconds to compute a copy."""
    trip: float
    """Seconds of all transfers of a copy."""
    weights: float
    """Seconds to send an expert's weights and to fetch their gradients."""

    def unshadowed(self, computed: np.ndarray) -> float:
        """Return the seconds without shadows (eq. 7): all copies travel, including those that stay
        at home.

        Args:
            computed: (places,), copies that each place computes.
        """
        return float(computed.max()) * (self.copy + self.trip)

    def shadowed(self, computed: np.ndarray, shadows: int) -> float:
        """Return the seconds with shadows (eq. 8): no copy travels, but the weights of every shadow
        do.

        Args:
            computed: (places,), copies that each place computes.
            shadows: their number.
        """
        return float(computed.max()) * self.copy + shadows * self.weights


def shadows_of(copies: np.ndarray, home: np.ndarray, rates: ShadowRates) -> list[int]:
    """Return the experts to shadow by Algorithm 1, hottest first, as long as the time of equation 8
    falls.

    The first comparison is with the time of equation 7.

    Args:
        copies: (places, experts), copies of each place for each expert.
        home: (experts,), the home of each expert.
        rates: the rates of the layer.
    """
    computed = np.bincount(home, weights=copies.sum(0), minlength=len(copies))
    best = rates.unshadowed(computed)
    shadowed: list[int] = []
    for expert in np.argsort(-copies.sum(0), kind="stable").tolist():
        # every place computes its own copies for a shadowed expert
        computed[home[expert]] -= copies[:, expert].sum()
        computed += copies[:, expert]
        seconds = rates.shadowed(computed, len(shadowed) + 1)
        if seconds >= best:
            break
        best = seconds
        shadowed.append(expert)
    return shadowed


class Published(AbstractReplicaPolicy):
    """A policy that replicates experts to all places, hottest first, as long as the time of
    equation 8 falls."""

    def replicated(self, replica: ReplicaLoad) -> Replications:
        """Return the shadows that FasterMoE's rule chooses in one replica of the experts."""
        load = replica.load
        places = np.arange(len(replica.origins))
        slowest = float(replica.links.seconds_per_byte.max())
        rates = ShadowRates(
            copy=replica.seconds_per_copy,
            trip=replica.costs.passes * replica.row_bytes * slowest,
            # half of the passes: weights go out, and their gradients come back
            weights=replica.costs.passes / 2 * replica.weight_bytes * slowest,
        )
        experts = shadows_of(replica.copies, load.home, rates)
        is_shadowed = np.isin(np.arange(load.num_experts), experts)
        is_away = places[:, None] != load.home
        place, expert = np.nonzero(is_shadowed & is_away & (replica.copies > 0))
        return Replications(place, expert, helper=place, amount=replica.copies[place, expert])
