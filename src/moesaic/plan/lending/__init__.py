"""Policies that decide which copies are lent. To add one: a new file and a line in `LENDERS`."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.plan.lending.cost import LendingCosts
from moesaic.plan.lending.lender import AbstractLender
from moesaic.plan.lending.published import Published
from moesaic.plan.lending.shadow import Shadow
from moesaic.plan.lending.spill import LeastLoaded, Spill

LENDERS: dict[str, Callable[[LendingCosts], AbstractLender]] = {
    "shadow": Shadow,
    "published": Published,
    "spill": Spill,
    "least_loaded": lambda _: LeastLoaded(),
}
"""What builds each from the rates of a machine and a layer, by the name that `Plan.lending` takes."""
