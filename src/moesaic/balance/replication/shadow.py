"""Shadowing: hot experts' weights go to places that compute their own copies of them.

Ours, after FasterMoE (He et al., PPoPP 2022), section 4.1, whose own rule is `published.py`: it counts the tokens that still
travel, takes the best prefix of the hottest experts, and may replicate an expert to some places only.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import CallLoad, ReplicationCosts, replica_loads
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.balance.replication.tables import full_table, shadows


class Shadow(AbstractReplicationPolicy):
    """Every place computes its own copies of experts that are replicated to it.

    Args:
        costs: rates; None for those of `cost.Machine`.
        whole: replicate an expert to all places or to none, as the paper does.
        at_most: experts that one place may be replicated at once; they need memory for weights and gradients.
        tries: longest prefix that is looked at.
    """

    def __init__(
        self, costs: ReplicationCosts | None = None, *, whole: bool = False, at_most: int = 8, tries: int = 256
    ) -> None:
        self.costs: ReplicationCosts = costs or ReplicationCosts()
        self.whole, self.at_most, self.tries = whole, at_most, tries

    def decide(self, load: CallLoad) -> np.ndarray:
        """Return the replicated copies of the best prefix."""
        found = replica_loads(load, self.costs)
        replicated = [shadows(each, at_most=self.at_most, tries=self.tries, whole=self.whole) for each in found]
        return full_table(found, replicated)
