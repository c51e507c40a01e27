"""Policies that decide where samples live after a layer (NetMoE)."""

from __future__ import annotations

from moesaic.balance.samples.placer import AbstractPlacer, Given, Homes, PlacerOptions, SampleLoad, Stay, Volume
from moesaic.balance.samples.policies import TwoStage, Weighed

__all__ = [
    "AbstractPlacer",
    "Given",
    "Homes",
    "PlacerOptions",
    "SampleLoad",
    "Stay",
    "TwoStage",
    "Volume",
    "Weighed",
]
