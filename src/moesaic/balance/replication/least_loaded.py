"""Least-loaded expert parallelism: no place computes more than a limit while another has room, at any cost; to compare with.

Copies go from the fullest place to the emptiest one, with the weights sent after them. `spill.py` is ours: the same greedy, to
the limit that the cost model finds fastest.
"""

from __future__ import annotations

import numpy as np

from moesaic.balance.replication.cost import ReplicaLoad
from moesaic.balance.replication.policy import AbstractReplicaPolicy
from moesaic.balance.replication.spill import overflow
from moesaic.balance.replication.tables import Replications
from moesaic.errors import InputError


class LeastLoaded(AbstractReplicaPolicy):
    """Lets no place compute more than a limit, wherever there is room, whatever it costs: for bounded memory.

    Args:
        limit: copies per place over the mean; at least 1.
        budget: copies that one rank may compute, instead of `limit`; a load above all budgets together is spread evenly.
    """

    def __init__(self, limit: float = 1.0, *, budget: int | None = None) -> None:
        if limit < 1:
            raise InputError(f"replication limit={limit}: the mean must fit: choose 1 or more")
        if budget is not None and budget < 1:
            raise InputError(f"replication budget={budget}: choose at least one token copy per rank")
        self.limit, self.budget = limit, budget

    def replicated(self, replica: ReplicaLoad) -> Replications:
        mean = -(-int(replica.copies.sum()) // len(replica.origins))
        most = int(np.ceil(mean * self.limit)) if self.budget is None else max(self.budget, mean)
        return Replications.of(overflow(replica, most))
