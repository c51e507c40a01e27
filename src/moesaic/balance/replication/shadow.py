"""Shadowing: hot experts' weights go to places that compute their own copies of them.

Ours, after FasterMoE (He et al., PPoPP 2022), section 4.1, whose own rule is `published.py`: it counts the tokens that still
travel, takes the best prefix of the hottest experts, and may replicate an expert to some places only.
"""

from __future__ import annotations

from moesaic.balance.replication.cost import ReplicaLoad, ReplicationCosts
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import Replications, shadows


class Shadow(AbstractReplicaPolicy):
    """Every place computes its own copies of experts that are replicated to it.

    Args:
        costs: rates; None for those of `cost.Machine`.
        whole: replicate an expert to all places or to none, as the paper does.
        at_most: experts that one place may be replicated at once; they need memory for weights and gradients.
    """

    def __init__(self, costs: ReplicationCosts | None = None, *, whole: bool = False, at_most: int = 8) -> None:
        self.costs = costs or ReplicationCosts()
        self.whole, self.at_most = whole, at_most

    def replicated(self, replica: ReplicaLoad) -> Replications:
        return shadows(replica, at_most=self.at_most, whole=self.whole)
