"""What the arbiter picked for a call, and what it tells about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesaic.balance.replication.cost import Board
from moesaic.balance.replication.tables import Lendings, spread
from moesaic.balance.selector.recipes import Choice, Option


@dataclass(frozen=True)
class Verdict:
    """What was decided for a call, and from what."""

    option: str
    """Its name, as `arbiter_options.name_of` gives it."""
    program: int
    """Which of the plans that were offered runs."""
    replicated: np.ndarray | None
    """(world, num_experts, ep) int64: copies that other ranks than their experts' homes compute; None for none."""
    seconds: Mapping[str, float]
    """Of every option that was weighed, forward and backward: the model's, corrected by what was measured."""
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    """Copies that each place of ep computes, replica after replica: if the call is left alone, and as it was decided."""
    token_bytes: tuple[int, int]
    """Of tokens and their gradients that cross links: left alone, and as it was decided."""
    weight_bytes: int
    """Of weights and their gradients that cross links."""
    decision_seconds: float
    """What deciding kept this rank from going on."""
    weighing_seconds: float = 0.0
    """What weighing for the next call took beside this one: processor time of a thread of its own."""
    is_trial: bool = False
    """Whether the option ran to learn what it takes."""

    @property
    def copies_replicated(self) -> int:
        """Copies that another rank computes."""
        return 0 if self.replicated is None else int(self.replicated.sum())


@dataclass(frozen=True)
class Pick:
    """What a call runs, decided before its counts were known, and the tables made from them."""

    choice: Choice
    found: tuple[Board, ...]
    replicated: tuple[Lendings, ...]
    """By replica of the experts."""
    is_trial: bool

    @cached_property
    def table(self) -> np.ndarray | None:
        """What is replicated, (world, num_experts, ep) int64; None for nothing."""
        return spread(self.found, self.replicated)


def verdict_of(
    pick: Pick, alone: Option, ran: Option, seconds: Mapping[str, float], started: float | None = None
) -> Verdict:
    """Return what was decided for a call.

    Args:
        pick: what runs.
        alone: the option of leaving it alone.
        ran: the option that runs.
        seconds: of every option that was weighed.
        started: on `time.perf_counter`, if deciding began then.
    """
    return Verdict(
        option=pick.choice.name,
        program=pick.choice.program,
        replicated=pick.table,
        seconds=seconds,
        rows=(alone.cost.rows, ran.cost.rows),
        token_bytes=(alone.cost.token_bytes, ran.cost.token_bytes),
        weight_bytes=ran.cost.weight_bytes,
        decision_seconds=0.0 if started is None else time.perf_counter() - started,
        is_trial=pick.is_trial,
    )
