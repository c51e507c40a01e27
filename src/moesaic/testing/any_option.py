"""An arbiter that decides at random: every program that it may run, with every kind of replication, from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.balance.choices import PlanChoices
from moesaic.balance.replication.load import Load
from moesaic.balance.selector.arbiter import Arbiter, Arbitration
from moesaic.balance.selector.verdict import Verdict


def random_replication(load: Load, rng: np.random.Generator) -> np.ndarray:
    """Return copies replicated from anywhere to anywhere, (world, num_experts, ep) int64; more than there are, perhaps."""
    replicated: np.ndarray = rng.integers(0, 4, size=(load.grid.world, load.num_experts, load.grid.ep))
    replicated *= rng.random(replicated.shape) < rng.choice([0.1, 0.5, 1.0])
    replicated[:, np.arange(load.num_experts), load.home] = 0
    return replicated


def as_far_as_there_are(load: Load, replicated: np.ndarray) -> np.ndarray:
    """Return a table cut to the copies that there are, helpers in their order."""
    before = np.cumsum(replicated, axis=2) - replicated
    cut: np.ndarray = np.minimum(replicated, np.maximum(load.copies[:, :, None] - before, 0))
    return cut


@dataclass(frozen=True, kw_only=True)
class AnyOption(Arbiter):
    """Draws an option for every call, the same on all ranks."""

    seed: int
    """Of what is drawn."""

    def start(self, plan: PlanChoices, plans: Sequence[PlanChoices]) -> Arbitration:
        """Return what draws for one layer."""
        return _Drawing(self, plan, plans)


class _Drawing(Arbitration):
    """Draws by the number of the call."""

    settings: AnyOption
    goes_by_times = False
    _calls = 0

    def choose(self, load: Load) -> Verdict:
        """Return what is drawn for a call."""
        rng = np.random.default_rng((self.settings.seed, self._calls))
        self._calls += 1
        program = int(rng.integers(len(self.plans)))
        replicated = None
        if self.plans[program].replicates:
            replicated = as_far_as_there_are(load, random_replication(load, rng))
        return Verdict(
            option=f"program {program}",
            program=program,
            replicated=replicated,
            seconds={},
            rows=((), ()),
            token_bytes=(0, 0),
            weight_bytes=0,
            decision_seconds=0.0,
        )
