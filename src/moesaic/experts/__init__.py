"""Expert feed-forward networks. They own weights and multiply; they never communicate and never route."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moesaic.experts.experts import AbstractExperts
from moesaic.experts.modules import ModuleExperts
from moesaic.experts.stacked import GatedExperts, PlainExperts

ExpertsFactory = Callable[[int, int, int], AbstractExperts]
"""Builds experts from (dim, hidden, num_experts)."""

EXPERTS: dict[str, ExpertsFactory] = {
    "swiglu": GatedExperts,
    "gelu": PlainExperts,
    "relu": partial(PlainExperts, activation="relu"),
}

__all__ = ["EXPERTS", "AbstractExperts", "ExpertsFactory", "GatedExperts", "ModuleExperts", "PlainExperts"]
