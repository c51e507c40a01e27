"""Whether some of a cluster's machines train a model as fast as all of them do."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.errors import InputError
from moesaic.planner.simulated_plans import PlannedStep

MOST_RANKS = 16
"""Larger clusters are not asked: a search for each part of them would take seconds."""


def fewer_machines(
    machines: int, ranks: int, seconds: float, best_of: Callable[[int], PlannedStep]
) -> str | None:
    """Return a line about the fewest machines that are as fast as all; None if all are needed, or
    if there are too many ranks to ask (`MOST_RANKS`).

    Args:
        machines: how many there are.
        ranks: how many ranks run on all of them.
        seconds: a step on all of them.
        best_of: returns the best step of the same batch on a number of machines, or raises
            InputError if it does not fit them.
    """
    if ranks > MOST_RANKS:
        return None
    divisors = [number for number in range(1, machines) if machines % number == 0]
    for fewer in divisors:
        try:
            best = best_of(fewer)
        except InputError:
            continue
        if best.seconds <= seconds:
            are = "is" if fewer == 1 else "are"
            took = f"{1e3 * best.seconds:,.1f} ms a step instead of {1e3 * seconds:,.1f}"
            return (
                f"{fewer} of {machines} machines {are} as fast: {took}, with {best.layout}: leave "
                "the others out"
            )
    return None
