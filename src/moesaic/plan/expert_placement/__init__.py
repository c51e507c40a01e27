"""Policies that decide which expert lives where, one a file. To add one: a new file and a line in `EXPERT_PLACERS`."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.plan.expert_placement.balanced import Balanced
from moesaic.plan.expert_placement.placer import (
    AbstractExpertPlacer,
    ExpertLoad,
    ExpertRates,
    ExpertSeconds,
    GivenOrders,
    check_order,
    places_of,
)
from moesaic.plan.expert_placement.smartmoe import SmartMoE

EXPERT_PLACERS: dict[str, Callable[[ExpertRates], AbstractExpertPlacer]] = {
    "balanced": Balanced,
    "smartmoe": lambda _: SmartMoE(),
}
"""What builds each from the rates of the run, by the name that `place_experts.policy` takes."""

__all__ = [
    "EXPERT_PLACERS",
    "AbstractExpertPlacer",
    "Balanced",
    "ExpertLoad",
    "ExpertRates",
    "ExpertSeconds",
    "GivenOrders",
    "SmartMoE",
    "check_order",
    "places_of",
]
