"""Expert telemetry: statistics of a layer's load.

Counts are of token copies before capacity, without padding, so that they describe the router and
not the drops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from moesaic.routing.routing import Routing


@dataclass(frozen=True, kw_only=True)
class LoadStatistics:
    """The load of one layer over some tokens."""

    tokens_per_expert: list[int]
    """Number of copies that chose each expert."""
    max_violation: float = 0.0
    """MaxVio: the largest load over the mean load, minus 1 (Wang et al. 2024, section 4.1); 0 if
    balanced."""
    variation: float = 0.0
    """Coefficient of variation: standard deviation (population) over mean."""
    dead_experts: int = 0
    """Number of experts without a copy."""
    entropy: float = 0.0
    """Entropy of the load over that of a balanced load: 1 if balanced, 0 if one expert gets all
    copies."""
    needed_capacity_factor: float = 0.0
    """The smallest capacity factor that would drop nothing."""
    dropped: int = 0
    """Number of dropped copies."""
    nonfinite: int = 0
    """Number of copies whose routing weight was NaN or infinite; see `Routing.nonfinite`."""
    capacity: int | None = None
    """Rows that an expert may take, in the last call; None if dropless."""
    padded_capacity: int | None = None
    """Rows that every rank sends to each expert under a padded capacity; None under other
    capacities."""

    @classmethod
    def of(cls, tokens_per_expert: Sequence[int], dropped: int = 0) -> LoadStatistics:
        """Return the statistics of a load; all zero if there are no copies."""
        load = [int(count) for count in tokens_per_expert]
        total = sum(load)
        num_experts = len(load)
        if total == 0:
            return cls(tokens_per_expert=load, dead_experts=num_experts, dropped=dropped)
        mean = total / num_experts
        variance = sum((count - mean) ** 2 for count in load) / num_experts
        shares = [count / total for count in load if count]
        entropy = -sum(share * math.log(share) for share in shares)
        relative_entropy = 1.0  # a single expert's load is balanced, and log(1) is 0
        if num_experts > 1:
            relative_entropy = entropy / math.log(num_experts)
        return cls(
            tokens_per_expert=load,
            max_violation=max(load) / mean - 1,
            variation=math.sqrt(variance) / mean,
            dead_experts=load.count(0),
            entropy=relative_entropy,
            needed_capacity_factor=max(load) / mean,
            dropped=dropped,
        )

    def as_dict(self) -> dict[str, object]:
        """Return the statistics as plain data for JSON."""
        return asdict(self)


class LoadMeter:
    """Sums each layer's counts over the micro-batches of an interval, on the device, without a
    sync."""

    def __init__(self) -> None:
        self._sums: list[tuple[Tensor, ...]] = []
        """Sums of `_counts` by layer; [] before the first pass of the interval."""
        self._last: list[Routing] = []
        """The routing of the last pass by layer, for the capacities."""

    @torch.no_grad()
    def add(self, routings: Sequence[Routing]) -> None:
        """Add one forward pass: a routing per MoE layer, in order."""
        if not self._sums:
            self._sums = [tuple(map(torch.zeros_like, _counts(routing))) for routing in routings]
        self._last = list(routings)
        for sums, routing in zip(self._sums, routings):
            for total, counts in zip(sums, _counts(routing)):
                total += counts

    def take(self) -> list[LoadStatistics]:
        """Return the statistics per layer since the last `take`, and reset the sums."""
        statistics = []
        for (requested, dropped, nonfinite), routing in zip(self._sums, self._last):
            load = LoadStatistics.of(requested.tolist(), int(dropped))
            capacity = None if routing.capacity is None else int(routing.capacity)
            statistics.append(
                replace(
                    load,
                    nonfinite=int(nonfinite),
                    capacity=capacity,
                    padded_capacity=routing.padded_capacity,
                )
            )
        self._sums = []
        self._last = []
        return statistics


def _counts(routing: Routing) -> tuple[Tensor, ...]:
    """Return copies per expert, dropped copies, and copies with a nonfinite weight."""
    return routing.requested, routing.dropped, routing.nonfinite
