"""Policies that decide where samples live after a layer (NetMoE), one a file."""

from __future__ import annotations

from moesaic.balance.samples.homes import Homes
from moesaic.balance.samples.load import SampleLoad, Volume
from moesaic.balance.samples.placer import AbstractPlacer, Given, PlacerOptions, Stay
from moesaic.balance.samples.two_stage import TwoStage
from moesaic.balance.samples.weighed import Weighed

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
