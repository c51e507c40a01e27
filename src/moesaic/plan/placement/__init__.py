"""Policies that decide where samples live after a layer (NetMoE). To add one: a new file and a line in `PLACERS`."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.plan.placement.homes import Homes
from moesaic.plan.placement.load import SampleLoad, Volume
from moesaic.plan.placement.placer import AbstractPlacer, Given, PlacerOptions, Stay
from moesaic.plan.placement.two_stage import TwoStage
from moesaic.plan.placement.weighed import Weighed

PLACERS: dict[str, Callable[[PlacerOptions], AbstractPlacer]] = {
    "stay": lambda _: Stay(),
    "two_stage": lambda options: TwoStage(options.least_gain, rest=options.rest),
    "weighed": lambda options: Weighed(options.machine, least_gain=options.least_gain, rest=options.rest),
}
"""What builds each from the options of the run, by the name that `balance.placement` takes."""

__all__ = [
    "PLACERS",
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
