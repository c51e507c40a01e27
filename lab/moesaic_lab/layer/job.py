"""A job: one layer on one mesh, and the plans to be timed on it in turn. What travels to the ranks and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesaic.plan import Compiled
from moesaic.program.grid import Grid
from moesaic_lab.bounds import Message
from moesaic_lab.layer.config import LayerPlace
from moesaic_lab.measure import Span

BEST = "best"
"""What stands for the plan that a search found."""


@dataclass(frozen=True, kw_only=True)
class LayerJob:
    """What one run of a cluster measures."""

    section: str
    """The part of the benchmark that it belongs to."""
    label: str
    """Of the cell, for people."""
    place: LayerPlace
    """Bed, accelerators and sizes."""
    grid: Grid
    """The mesh, on all ranks of the bed."""
    methods: dict[str, Compiled]
    """Name to plan, in the order of the table; the first one is what the others are compared with."""
    same: dict[str, str] = field(default_factory=dict)
    """Further names of plans that do the same as a method on this mesh, and of which method."""
    candidates: dict[str, Compiled] = field(default_factory=dict)
    """Further plans that a search may choose."""
    compete: tuple[str, ...] = ()
    """Methods that the search may choose, the best by prediction first; empty: there is no search."""
    margin: float = 0.0
    """The search takes the first of these unless another plan's trial is shorter by more than this share."""
    trial_repeats: int = 0
    """Of the search."""
    reference: str = ""
    """Methods near this one are timed more often; "" for the first; `BEST` for what the search found."""
    factor: float | None = None
    """Capacity factor, padded; None: no copy is dropped, no row is empty."""
    beside: dict[str, float] = field(default_factory=dict)
    """Virtual products of a step besides those of the experts, by method: floating-point operations."""
    counts_switches: bool = False
    """Also count what a change of the plan costs."""
    warmup: int = 1
    seed: int = 0

    @property
    def everything(self) -> dict[str, Compiled]:
        """Methods and candidates."""
        return {**self.methods, **self.candidates}

    @property
    def tokens(self) -> int:
        """Of a tensor group."""
        return self.place.tokens_per_rank * self.grid.tp


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """What one step of a method did on one rank, counted."""

    forward: list[Message]
    """What it sent."""
    backward: list[Message]
    charged: float
    """Seconds of virtual compute."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """What a change of the plan cost on one rank, counted."""

    first_seconds: float
    """Processor time when the plan was new to the layer: it is compiled then."""
    first_call_seconds: float
    """Processor time that the first step under it takes beyond later ones: what rows go where is worked out then."""
    again_seconds: float
    """Processor time of coming back to it, median."""
    messages: int
    """Messages sent by coming back to it."""
    allocated_bytes: int
    """Bytes of tensors made by coming back to it."""


@dataclass(frozen=True, kw_only=True)
class LayerFound:
    """What one rank found."""

    spans: dict[str, list[Span]]
    """By method; more of those that are near the reference."""
    pairs: dict[str, list[Span]]
    """By method, of the rounds in which only those near the reference ran; empty for the others."""
    best: str
    """Which method or candidate the search chose; "" without a search."""
    trial: dict[str, float]
    """Median seconds of what the search tried."""
    steps: dict[str, CountedStep]
    """By method."""
    switches: dict[str, Switch]
    """By method, where the job asks for them."""
