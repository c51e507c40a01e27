"""What a search is told and what it finds: settings, plans on layouts with their times, memory and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moesaic.codecs import CODECS, is_coded
from moesaic.cost.memory import Memory
from moesaic.cost.row_bytes import DTYPES, coded_bytes
from moesaic.cost.step import Estimate
from moesaic.errors import InputError
from moesaic.plan.candidates import Pins, SearchSpace
from moesaic.plan.plan import Codec, Plan
from moesaic.program.grid import Grid

LOSSLESS = SearchSpace(fuse=(False, True), chunks=(1, 2, 4, 8), orders=("optsche", "early", "fifo"))
"""What is searched unless told otherwise."""
LOSSY: tuple[Codec, ...] = tuple(CODECS)
"""Codecs that are searched, both ways, where losses are allowed."""
_MANY = 1 << 20
COMPRESSION = float(
    max(math.ceil(_MANY**2 * size / coded_bytes(codec, _MANY, _MANY, size)) for codec in CODECS for size in DTYPES)
)
"""At least as much as any codec divides the bytes of any rows by; only floors read it."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan on a layout."""

    plan: Plan
    grid: Grid
    """The mesh, etp not factored."""
    estimate: Estimate
    memory: Memory
    bound_seconds: float
    """What a perfect plan on this layout takes: its computing or its fullest link, whichever is longer."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.estimate.seconds


@dataclass(frozen=True, kw_only=True)
class OfEp:
    """How layouts with one size of ep fare."""

    floor_seconds: float
    """No plan on any of them takes less."""
    best: Found | None
    """The best plan that was simulated and fits the memory; None if there is none."""
    is_too_large: bool
    """Plans were simulated, and none of them fits the memory."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search found."""

    ranking: tuple[Found, ...]
    """The best plans that fit the memory, best first."""
    by_ep: dict[int, OfEp]
    """How each size of ep fares, by ep."""
    bound_seconds: float
    """The least bound of all layouts that fit."""
    num_layouts: int
    """Layouts that the job fits on."""
    num_left_out: int
    """Of them, those whose floor or memory told enough."""
    num_simulated: int
    """Plans that were simulated."""
    too_large: Found | None = None
    """The best plan that was simulated, faster than all of the ranking, but for the memory; None if there is none."""

    @property
    def best(self) -> Found:
        """The plan to use."""
        return self.ranking[0]


class TooLargeError(InputError):
    """No layout fits the memory of a device.

    Args:
        message: the line; says by how much the smallest layout does not fit.
        grid: that layout.
    """

    def __init__(self, message: str, grid: Grid) -> None:
        super().__init__(message)
        self.grid = grid


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to search."""

    space: SearchSpace = LOSSLESS
    """The choices."""
    pins: Pins = field(default_factory=Pins)
    """Sizes of axes to keep."""
    keep: int = 10
    """Plans in the ranking."""
    refine: int = 6
    """Layouts on which choices are changed."""
    exhaustive: bool = False
    """Try every combination on those layouts."""
    give_up: float = math.inf
    """Times the best step so far from which on no further plan is tried on a layout after its first one, and times a layout's
    best start from which on another schedule is no start. A smaller number is faster, and may miss a plan."""
    reserve_gib: float = 1.0
    """Memory that the framework takes, fragments of the allocator (`cost/memory.py`) not counted."""

    @property
    def compression(self) -> float:
        """What a floor must allow codecs to save."""
        return 1.0 if not any(map(is_coded, (*self.space.codecs, *self.space.backward_codecs))) else COMPRESSION
