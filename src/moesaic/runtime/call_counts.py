"""What all ranks know about a call and its experts before anything is sent: plain data, without
torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moesaic.errors import InputError
from moesaic.program.expert_sizes import ExpertSizes


class CountedCall(NamedTuple):
    """The counts and sizes of a call, which all ranks know before anything is sent."""

    copies: np.ndarray
    """(world, num_experts) int64, copies that each origin rank has for each expert."""
    tokens: np.ndarray
    """(world,) int64, tokens that each rank is the origin of."""
    units: int
    """Hidden units of one shard of an expert."""
    experts: Callable[[], ExpertSizes]
    """Returns the memory sizes of the experts."""


def check_order(order: np.ndarray, num_experts: int) -> None:
    """Raise InputError if an order does not name each expert once."""
    if not np.array_equal(np.sort(np.asarray(order)), np.arange(num_experts)):
        raise InputError(
            f"an order of experts must name each of 0 to {num_experts - 1} once, got {list(order)}"
        )
