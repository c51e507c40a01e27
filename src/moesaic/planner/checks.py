"""Checks of the numbers in descriptions of clusters and workloads. Every error names the field and
what would be right."""

from __future__ import annotations

import math
from itertools import pairwise

from moesaic.errors import InputError


def check_above_zero(where: str, value: float) -> None:
    """Raise InputError unless a number is finite and above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{where}={value}: must be a finite number above 0")


def check_curve(where: str, at: str, share: str, holder: object) -> None:
    """Raise InputError unless two fields form a curve: ascending positions above 0, and as many
    shares above 0.

    Args:
        where: start of the message.
        at, share: names of the fields.
        holder: the object that has them.
    """
    positions = getattr(holder, at)
    shares = getattr(holder, share)
    if len(positions) != len(shares):
        raise InputError(
            f"{where}{at} has {len(positions)} values and {share} {len(shares)}: give one "
            "share for each"
        )
    # asked so that nan, of which every comparison is false, fails
    ascends = all(low < high for low, high in pairwise([0, *positions]))
    if not ascends or not all(map(math.isfinite, positions)):
        raise InputError(f"{where}{at}={list(positions)}: must be finite, above 0 and ascending")
    for value in shares:
        check_above_zero(f"{where}{share}", value)


def check_not_negative(where: str, value: float) -> None:
    """Raise InputError unless a number is finite and at least 0."""
    if not (value >= 0 and math.isfinite(value)):
        raise InputError(f"{where}={value}: must be a finite number of at least 0")
