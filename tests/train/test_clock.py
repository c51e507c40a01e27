"""The clock of training: which time it counts, and which it leaves out."""

from __future__ import annotations

import time

import pytest

from moesaic.train import progress as clock_module
from moesaic.train.progress import Clock


class Time:
    """A clock on the wall that the test moves."""

    now = 100.0


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Time:
    wall = Time()
    monkeypatch.setattr(time, "perf_counter", lambda: wall.now)
    assert clock_module.time is time
    return wall


def test_only_training_counts_and_earlier_processes_go_on(wall):
    clock = Clock(50.0)
    assert clock.tokens_per_second == 0
    with clock.training(30):
        wall.now += 2
    wall.now += 1000
    with clock.training():
        wall.now += 1
    assert clock.seconds == 53
    assert clock.tokens_per_second == pytest.approx(10)


def test_an_interval_begins_where_the_last_one_was_taken(wall):
    clock = Clock(7.0)
    speeds = []
    for tokens in (10, 40):
        with clock.training(tokens):
            wall.now += 2
        speeds.append(clock.interval())
    assert speeds == pytest.approx([5, 20])
    assert clock.tokens_per_second == pytest.approx(12.5)
    assert clock.interval() == 0
