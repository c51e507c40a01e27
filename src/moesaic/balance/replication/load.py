"""What one call of a layer has to do, from which replication policies decide."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.program.grid import Grid


@dataclass(frozen=True)
class Load:
    """What one call of a layer has to do."""

    grid: Grid
    copies: np.ndarray
    """(world, num_experts) int64: copies that each origin has for each expert."""
    num_experts: int
    units: int
    """Hidden units of one shard of an expert, as its weights are packed."""
    dim: int
    """Width of a token."""

    @cached_property
    def home(self) -> np.ndarray:
        """Place in ep of each expert, (num_experts,)."""
        return np.arange(self.num_experts) // (self.num_experts // self.grid.ep)

    @cached_property
    def replicas(self) -> list[np.ndarray]:
        """The origins whose copies one replica of the experts computes, by place in ep: per replica (ep, origins) int64."""
        grid = self.grid
        found = []
        for replica in range(grid.edp):
            mates = [rank for rank in range(grid.world) if grid.coordinate(rank, "edp") == replica]
            by_place = [[r for r in mates if grid.coordinate(r, "ep") == place] for place in range(grid.ep)]
            found.append(np.array(by_place))
        return found
