"""Races between plans by the times of whole steps: rounds that drop the slower half, and pairs in
turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, median_low

ROUNDS = (2, 3, 5)
"""Steps that each round of a race measures per remaining plan, after one warm-up step; further
rounds are like the last."""
PAIRS = 5
"""How often the winner of a race and the first plan run in turn."""


class Race:
    """A race between plans: each round times a few steps of every remaining plan and drops the
    slower half.

    A race of eight plans takes 24 + 16 + 12 steps, including the warm-up steps.

    Args:
        plans: numbers of the plans, the most promising first.
        drift: see `TableSettings`.
    """

    def __init__(self, plans: Sequence[int], drift: float) -> None:
        self.left = list(plans)
        """Plans that are still in the race, the fastest of the last round first."""
        self.seconds: dict[int, list[list[float]]] = {plan: [[]] for plan in plans}
        """By plan, the step times of each round."""
        self._drift = drift
        self._round = 0
        """Number of the round, from 0 on."""
        self._waiting = list(plans)
        """Plans that this round still has to time."""
        self.is_void = False
        """Whether step times drifted during the race, so that the times of its plans are not
        comparable."""

    @property
    def steps(self) -> int:
        """Steps that this round measures per plan."""
        return ROUNDS[min(self._round, len(ROUNDS) - 1)]

    def next(self) -> int | None:
        """Return the plan to time next; None if only one plan is left."""
        if not self._waiting and len(self.left) > 1:
            self._end_round()
        if len(self.left) > 1 and self._waiting:  # more than one is left after the round too
            return self._waiting.pop(0)
        return None

    def record(self, plan: int, seconds: float) -> None:
        """Note the time of a step."""
        self.seconds[plan][-1].append(seconds)

    def times(self) -> dict[int, float]:
        """Return the low median of all step times of each plan that ran; the low one, since
        disturbances only make steps slower."""
        return {plan: self._median(plan) for plan in self.seconds if self.seconds[plan][0]}

    def _median(self, plan: int) -> float:
        """Return the low median of a plan's step times in all rounds."""
        times: list[float] = []
        for of_round in self.seconds[plan]:
            times += of_round
        return median_low(times)

    def _has_drifted(self) -> bool:
        """Return whether this round's times differ from those of the round before."""
        ratios = []
        for plan in self.left:
            # the last two lists are of the round before and of this one
            before = median_low(self.seconds[plan][-2])
            now = median_low(self.seconds[plan][-1])
            ratios.append(now / before)
        drift = abs(math.log(median(ratios)))
        return drift > math.log1p(self._drift)

    def _end_round(self) -> None:
        """Drop the slower half of the plans; from the second round on, also find out whether step
        times have drifted since the round before."""
        if self._round:
            self.is_void = self._has_drifted()
        ranked = sorted(self.left, key=lambda plan: (self._median(plan), self.left.index(plan)))
        self.left = ranked[: max(len(ranked) // 2, 1)]
        self._round += 1
        self._waiting = list(self.left)
        for plan in self.left:
            self.seconds[plan].append([])


class PairedSteps:
    """The winner of a race beside the first plan, in turn: what slows the machine down for a while
    slows both.

    Args:
        winner: number of the plan that won.
        first: number of the plan that stays unless the winner is faster in most pairs.
    """

    steps = 1
    """Steps that are measured in turn, each after one warm-up step."""

    def __init__(self, winner: int, first: int) -> None:
        self.winner = winner
        self._first = first
        self._waiting = [winner, first] * PAIRS
        """Plans that still have to be timed, in turn."""
        self.seconds: dict[int, list[float]] = {winner: [], first: []}
        """By plan, the step times."""

    def next(self) -> int | None:
        """Return the plan to time next; None after the last pair."""
        return self._waiting.pop(0) if self._waiting else None

    def record(self, plan: int, seconds: float) -> None:
        """Note the time of a step."""
        self.seconds[plan].append(seconds)

    def times(self) -> dict[int, float]:
        """Return the median step time of both plans."""
        return {plan: median(seconds) for plan, seconds in self.seconds.items()}

    @property
    def faster(self) -> int:
        """The plan to run: the winner if it was faster in most pairs, else the first one."""
        pairs = zip(self.seconds[self.winner], self.seconds[self._first])
        won = [winner_seconds < first_seconds for winner_seconds, first_seconds in pairs]
        if 2 * won.count(True) > PAIRS:
            return self.winner
        return self._first
