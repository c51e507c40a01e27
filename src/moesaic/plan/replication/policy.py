"""The interface of replication policies: which copies another rank than their expert's home computes, from one call's counts.

A policy decides and never acts; every rank calls it with the same counts and gets the same answer, so nobody waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from moesaic.program.grid import Grid

if TYPE_CHECKING:
    from moesaic.plan.replication.cost import ReplicationCosts


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


class AbstractReplicationPolicy(ABC):
    """A policy."""

    costs: ReplicationCosts | None = None
    """The rates by which it decides, where it decides by rates."""

    @abstractmethod
    def decide(self, load: Load) -> np.ndarray:
        """Return which copies are replicated, (world, num_experts, ep) int64.

        Entry [o, e, h]: how many of the copies that origin o has for expert e the ranks at place h of ep compute; those at
        the expert's home are never replicated. Deterministic: ties break by number.

        Args:
            load: the same on all ranks.
        """

    def settings_text(self) -> str:
        """Return its settings as text: what has to be the same on all ranks, so that they decide alike.

        Numbers, words and records of them count; what a policy holds besides does not.
        """
        plain = {
            name: value
            for name, value in sorted(vars(self).items())
            if value is None or isinstance(value, (bool, int, float, str, tuple, dict)) or is_dataclass(value)
        }
        return f"{type(self).__name__} {plain}"


class Replicated(AbstractReplicationPolicy):
    """Lends what it is told, whatever the load: for tests and replays.

    Args:
        replicated: (world, num_experts, ep) int64; more than there are copies is cut down.
    """

    def __init__(self, replicated: np.ndarray) -> None:
        self.replicated = replicated

    def decide(self, load: Load) -> np.ndarray:
        """Return it, cut to the copies that there are, helpers in their order."""
        before = np.cumsum(self.replicated, axis=2) - self.replicated
        left = np.maximum(load.copies[:, :, None] - before, 0)
        return np.minimum(self.replicated, left)
