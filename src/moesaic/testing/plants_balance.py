"""Bugs to plant in what balances skewed routing: the arbiter's memory, where samples go and come back to, experts that move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from moesaic.runtime.balance import selector
from moesaic.runtime.balance.experts import move as place_experts_move
from moesaic.runtime.balance.samples.relocate import SampleMove, SampleTrip
from moesaic.runtime.expert_order import ExpertOrder


class _Forgetful(dict[object, object]):
    """Remembers nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        """Drop it."""


@contextmanager
def decides_again() -> Iterator[None]:
    """A recomputation asks the arbiter anew, and runs another program than its forward pass."""
    with mock.patch.object(selector, "WeakIdKeyDictionary", _Forgetful):
        yield


@contextmanager
def labels_stay() -> Iterator[None]:
    """Samples move, and what is compared with their results stays where it was."""

    def stay(self: SampleTrip, x: Tensor) -> Tensor:
        return x

    with mock.patch.object(SampleTrip, "take_home", stay):
        yield


@contextmanager
def slots_reversed() -> Iterator[None]:
    """Results go to the right rank, and there to another sample's place."""
    targets: Callable[[Any], tuple[np.ndarray, np.ndarray]] = SampleMove.targets

    def wrong(self: SampleMove) -> tuple[np.ndarray, np.ndarray]:
        rank, slot = targets(self)
        return rank, self.before.slots - 1 - slot

    with mock.patch.object(SampleMove, "targets", wrong):
        yield


@contextmanager
def counts_by_number() -> Iterator[None]:
    """Experts are in other slots, and sizes and replication are told counts by their numbers."""

    def by_number(self: ExpertOrder, counts: np.ndarray) -> np.ndarray:
        return counts

    with mock.patch.object(ExpertOrder, "columns", by_number):
        yield


@contextmanager
def gradients_stay() -> Iterator[None]:
    """Weights go to another rank, and what belongs to them besides does not."""
    belongings = place_experts_move._belongings

    def weights_only(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
        return (found for found in belongings(*arguments) if found[0] == "weight")

    with mock.patch.object(place_experts_move, "_belongings", weights_only):
        yield
