"""What travels to the ranks of a bed and back: a case with its methods, and what one rank found."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic_lab.balance.config import SkewedCase
from moesaic_lab.balance.methods import BalanceMethod
from moesaic_lab.bounds import Message
from moesaic_lab.measure import Span


@dataclass(frozen=True, kw_only=True)
class BalanceJob:
    """One case on one cluster."""

    case: SkewedCase
    methods: dict[str, BalanceMethod]
    """By name, in the order of the tables; the first is the plain layer."""
    seed: int = 0
    """Of inputs and weights."""


@dataclass(frozen=True, kw_only=True)
class CountedPlan:
    """What one call of a method did on one rank, with real experts."""

    messages: dict[int, list[Message]]
    """That it sent, by movement in the order of issue, forward and backward."""
    peak_bytes: int
    """The most bytes of tensors that were alive at once, beyond those before the call."""
    error: float
    """Largest difference of results and gradients from those of the plain layer, over the largest of these."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What the policy of a method decided on one rank, call by call."""

    seconds: tuple[float, ...]
    """What every decision of the timed calls kept the rank from going on; of policies that are no arbiter processor time."""
    options: tuple[str, ...]
    """What runs, by call of the case: of the arbiter what it chose, else the policy's name."""
    replicated_experts: tuple[int, ...]
    """Experts that some other rank computed, by call of the case."""
    replicated_copies: tuple[int, ...]
    """Copies that it computed."""
    weighing_seconds: tuple[float, ...] = ()
    """Processor time of a thread that decided beside each of the timed calls, of an arbiter."""
    trials: tuple[int, int] = (0, 0)
    """Calls that ran an option to learn what it takes: before the timed calls, and among them."""


@dataclass(frozen=True, kw_only=True)
class BalanceFound:
    """What one rank found."""

    spans: dict[str, list[Span]]
    """By method, all in turn."""
    pairs: dict[str, list[Span]]
    """By method, of the further rounds in which only ours and those near it ran."""
    counted: dict[str, CountedPlan]
    """By method, of the case's first call."""
    decided: dict[str, Decided]
    """By method that replicates."""
    charged: dict[str, float]
    """By method: seconds of virtual compute per step, mean over the calls."""
