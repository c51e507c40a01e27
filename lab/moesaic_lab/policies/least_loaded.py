"""Least-loaded expert parallelism, a baseline: no place computes more than a limit while another
has room, at any cost.

Copies go from the fullest place to the emptiest one, followed by the weights. The library's variant
is `spill`: the same greedy algorithm, with the limit that is fastest by the cost model.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.spill import overflow
from moesaic.errors import InputError
from moesaic.program.replications import Replications


class LeastLoaded(AbstractReplicaPolicy):
    """A policy for bounded memory: no place computes more than a limit as long as others have room,
    whatever the cost.

    Args:
        limit: most copies per place, relative to the mean; at least 1.
        budget: most copies per rank, instead of `limit`. A load above the sum of all budgets is
            spread evenly.
    """

    def __init__(self, limit: float = 1.0, *, budget: int | None = None) -> None:
        super().__init__()
        if limit < 1:
            raise InputError(f"replication limit={limit}: the mean must fit: choose 1 or more")
        if budget is not None and budget < 1:
            raise InputError(
                f"replication budget={budget}: choose at least one token copy per rank"
            )
        self.limit = limit
        self.budget = budget

    def replicated(self, replica: ReplicaLoad) -> Replications:
        """Return the copies that are computed away from the homes of their experts."""
        mean = -(-int(replica.copies.sum()) // len(replica.origins))  # rounded up
        if self.budget is None:
            return overflow(replica, int(np.ceil(mean * self.limit)))
        return overflow(replica, max(self.budget, mean))
