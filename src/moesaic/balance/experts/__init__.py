"""Policies that decide which expert lives where."""

from __future__ import annotations

from moesaic.balance.experts.balanced import Balanced
from moesaic.balance.experts.placer import (
    AbstractExpertPlacer,
    ExpertLoad,
    ExpertRates,
    ExpertSeconds,
    GivenOrders,
    check_order,
    places_of,
)
from moesaic.balance.experts.smartmoe import SmartMoE

__all__ = [
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
