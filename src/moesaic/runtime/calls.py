"""What decides, call by call, which programs a layer runs on a mesh; and the one that decides nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moesaic.balance.slices import Cut
from moesaic.plan import Compiled
from moesaic.routing.route import RoutingRecord

NUMBERS = 3
"""Numbers that every rank tells the others with a call's counts, under every plan: ranks that brought different plans must be
able to tell so."""


class Chosen(NamedTuple):
    """What a call runs."""

    compiled: Compiled
    replicated: np.ndarray | None = None
    """(world, num_experts, ep) int64: copies that helpers compute; None where the programs replicate nothing."""
    cut: Cut | None = None
    """How the call is cut into slices; None where it runs as a whole."""


class AbstractCallPolicy(ABC):
    """Decides for the calls of one layer under one plan; alike on all ranks, from what all of them know.

    Args:
        compiled: of the layer.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled

    @property
    def digest(self) -> bytes:
        """16 bytes that two ranks share if they run the same programs and decide alike."""
        return self.compiled.digest

    def tell(self) -> Sequence[float]:
        """Return what to tell the other ranks with the counts of the call that begins, `NUMBERS` numbers."""
        return (0.0,) * NUMBERS

    def refuse_padding(self) -> None:
        """Raise InputError if decisions need the counts of a call, which no rank has under a padded capacity."""
        return

    @abstractmethod
    def choose(self, record: RoutingRecord, copies: np.ndarray, units: int) -> Chosen:
        """Return what a call runs.

        Args:
            record: of its routing; a recomputation has that of its forward pass.
            copies: (world, num_experts) int64 that each rank has for each expert.
            units: hidden units of one shard of an expert.
        """

    @abstractmethod
    def timed(self, record: RoutingRecord, chosen: Chosen, program: Callable[[], Tensor]) -> Tensor:
        """Run a call's program and return its result; a policy that learns takes the time.

        Args:
            record: of the call, after `choose`.
            chosen: what `choose` returned.
            program: runs it; it may be broken off in a recomputation, when all is there that the backward pass wants.
        """


class PlainCalls(AbstractCallPolicy):
    """Every call runs the plan's programs, whatever its counts."""

    def choose(self, record: RoutingRecord, copies: np.ndarray, units: int) -> Chosen:
        """Return the plan's programs."""
        del record, copies, units
        return Chosen(self.compiled)

    def timed(self, record: RoutingRecord, chosen: Chosen, program: Callable[[], Tensor]) -> Tensor:
        """Run it."""
        del record, chosen
        return program()
