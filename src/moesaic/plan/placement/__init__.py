"""Policies that decide where samples live after a layer (NetMoE)."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.plan.placement.homes import Homes
from moesaic.plan.placement.load import SampleLoad, Volume
from moesaic.plan.placement.two_stage import AbstractPlacer, Given, Stay, TwoStage
from moesaic.plan.placement.weighed import Weighed

__all__ = ["PLACERS", "AbstractPlacer", "Given", "Homes", "SampleLoad", "Stay", "TwoStage", "Volume", "Weighed"]

PLACERS: dict[str, Callable[[], AbstractPlacer]] = {"stay": Stay, "two_stage": TwoStage, "weighed": Weighed}
"""By name."""
