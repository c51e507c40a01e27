"""Shadowing, ours: hot experts' weights go to those places whose copies make it worth it.

FasterMoE (He et al., PPoPP 2022), section 4.1, with three changes: the cost counts the tokens that still travel; the best
prefix is taken instead of stopping at the first step that does not help, which two equally hot experts would block; and an
expert may be replicated to some places only.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicationCosts, boards
from moesaic.balance.replication.load import Load
from moesaic.balance.replication.policy import AbstractReplicationPolicy
from moesaic.balance.replication.tables import shadows, spread


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

    def decide(self, load: Load) -> np.ndarray:
        """Return the replicated copies of the best prefix."""
        found = boards(load, self.costs)
        replicated = [shadows(each, at_most=self.at_most, tries=self.tries, whole=self.whole) for each in found]
        table = spread(found, replicated)
        return np.zeros((*load.copies.shape, load.grid.ep), dtype=np.int64) if table is None else table
