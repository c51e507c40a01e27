"""What a search takes of simulated plans equals sorting all of them, with less computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from moesaic.planner.simulated_plans import by_seconds, cheapest, fastest


@dataclass(eq=False)
class Plan:
    """A made-up plan, which remembers whether its step has been asked for."""

    least_seconds: float
    true_seconds: float
    holds: bool
    asked: list[Plan] = field(default_factory=list)

    @property
    def step(self) -> Plan:
        self.asked.append(self)
        return self

    @property
    def seconds(self) -> float:
        self.asked.append(self)
        return self.true_seconds

    @property
    def fits(self) -> bool:
        self.asked.append(self)
        return self.holds

    @property
    def cost(self) -> tuple[bool, float]:
        return not self.fits, self.seconds


def drawn(seed: int, share: float) -> list[Plan]:
    """Return plans of which a share fits; some take equally long."""
    draw = np.random.default_rng(seed)
    plans = []
    for _ in range(int(draw.integers(1, 30))):
        least = float(draw.integers(1, 12))
        slower = float(draw.integers(0, 4)) * float(draw.integers(0, 2))
        plans.append(Plan(least, least + slower, bool(draw.random() < share)))
    return plans


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_is_what_sorting_gives(seed: int, share: float) -> None:
    plans = drawn(seed, share)
    assert cheapest(plans) is min(plans, key=lambda plan: (not plan.holds, plan.true_seconds))
    assert fastest(plans) is min(plans, key=lambda plan: plan.true_seconds)
    taken = [plan.true_seconds for plan in by_seconds(plans)]
    assert taken == sorted(plan.true_seconds for plan in plans if plan.holds)


def test_plans_that_are_slower_in_every_way_are_not_looked_at() -> None:
    plans = [Plan(1.0 + number, 1.5 + number, holds=True) for number in range(10)]
    assert cheapest(plans) is plans[0]
    assert next(by_seconds(plans)) is plans[0]
    assert [bool(plan.asked) for plan in plans] == [True] + [False] * 9
