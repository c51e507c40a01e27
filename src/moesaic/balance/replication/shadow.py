"""Shadowing: places get the weights of hot experts and compute their own copies for these experts.

This is a variant of FasterMoE (He et al., PPoPP 2022), section 4.1; `published.py` has the paper's
own rule. The variant counts the tokens that still travel, takes the best prefix of the hottest
experts, and may replicate an expert to only some places.
"""

from __future__ import annotations

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.tables import shadows
from moesaic.program.rates import Rates
from moesaic.program.replications import Replications


class Shadow(AbstractReplicaPolicy):
    """A policy under which a place computes all its own copies for the experts that are replicated
    to it.

    Args:
        costs: rates of the cost model; None for the usual ones.
        whole: replicate an expert to all places or to none, as in the paper.
        at_most: most experts that may be replicated to one place, since they need memory for
            weights and gradients.
    """

    def __init__(
        self, costs: Rates | None = None, *, whole: bool = False, at_most: int = 8
    ) -> None:
        super().__init__(costs)
        self.whole = whole
        self.at_most = at_most

    def replicated(self, replica: ReplicaLoad) -> Replications:
        return shadows(replica, at_most=self.at_most, whole=self.whole)
