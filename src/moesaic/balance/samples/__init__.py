"""Policies that decide where samples live after a layer (NetMoE), one a file."""

from __future__ import annotations

from moesaic.balance.samples.homes import Homes
from moesaic.balance.samples.load import SampleLoad, Volume
from moesaic.balance.samples.placer import AbstractPlacer, Given, PlacerOptions, Stay
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
