"""Policies that decide which copies are lent."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.plan.lending.lender import AbstractLender
from moesaic.plan.lending.published import Published
from moesaic.plan.lending.shadow import Shadow
from moesaic.plan.lending.spill import LeastLoaded, Spill

LENDERS: dict[str, Callable[[], AbstractLender]] = {
    "shadow": Shadow,
    "published": Published,
    "spill": Spill,
    "least_loaded": LeastLoaded,
}
"""By the name that `Plan.lending` takes."""
