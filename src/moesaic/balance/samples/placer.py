"""The interface of sample placement, and the two policies that look at no load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from moesaic.balance.samples.homes import Homes
from moesaic.balance.samples.load import SampleLoad
from moesaic.cost.alpha_beta import Machine
from moesaic.errors import InputError

LEAST_GAIN = 0.1
"""Share of the rows between nodes that moves must promise to save. Samples that hardly differ promise 6 to 9 % by chance, of
which nothing is left once the next layer has routed; those that do (locality 0.2 as `moesaic trace show` has it) promise 15 %
and more (`moesaic_lab/netmoe`, `moesaic_lab/relocate_train.py`)."""


REST = 15
"""Forward passes: with one asked after as many, deciding costs a sixteenth of what it does in every pass."""


def check(least_gain: float, rest: int) -> None:
    """Raise InputError for what is no share, or no number of passes."""
    if not 0 <= least_gain < 1:
        raise InputError(f"placement least_gain={least_gain}: choose a share from 0 to below 1")
    if rest < 0:
        raise InputError(f"placement rest={rest}: choose 0 or more passes")


@dataclass(frozen=True, kw_only=True)
class PlacerOptions:
    """What a run tells the policy that it names; a policy takes what it needs of it."""

    machine: Machine = field(default_factory=Machine)
    """Rates of one rank's links."""
    least_gain: float = LEAST_GAIN
    """Share of what moves are to save that they must save, else nobody moves; from 0 to below 1."""
    rest: int = REST
    """As `AbstractPlacer.rest`."""


class AbstractPlacer(ABC):
    """A policy: where samples live after a layer. Every rank calls it with the same load and gets the same answer."""

    rest: int = 0
    """After forward passes in which it moved nobody, so many may go by in which it is not asked, and nothing is told for it;
    0: it is asked in every pass."""

    @abstractmethod
    def decide(self, load: SampleLoad) -> Homes:
        """Return where the samples go; each stays within its copy of the experts.

        Args:
            load: the same on all ranks.
        """


class Stay(AbstractPlacer):
    """Nobody moves."""

    def decide(self, load: SampleLoad) -> Homes:
        """Return the homes as they are."""
        return load.homes


class Given(AbstractPlacer):
    """Goes where it is told, call after call, and then starts over: for tests and replays.

    Args:
        homes: one per call.
    """

    def __init__(self, homes: list[Homes]) -> None:
        self._homes, self._calls = homes, 0

    def decide(self, load: SampleLoad) -> Homes:
        """Return the next homes."""
        found = self._homes[self._calls % len(self._homes)]
        self._calls += 1
        return found
