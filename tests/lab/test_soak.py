"""`moesaic soak`: what growth is. (`make soak` trains for half an hour.)"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from moesaic.errors import InputError, TrainingError
from moesaic_lab import soak
from moesaic_lab.soak import BENCHMARK, SoakOptions, claims, growth


def test_growth_is_told_from_the_noise_and_from_the_warming_up() -> None:
    assert growth([50.0, 90.0, *[100.0] * 20]) == 0
    assert growth([100.0 + n % 2 / 2 for n in range(30)]) <= 0.01
    assert growth([100.0 + n for n in range(30)]) > 0.1
    assert growth([100.0 - n for n in range(30)]) == 0
    with pytest.raises(InputError, match="too few"):
        growth([1.0] * 5)


def test_a_leak_of_one_rank_is_a_claim_that_does_not_hold() -> None:
    sound = {"minutes": 30.0, "rss_growth": 0.0, "descriptors_growth": 0.0, "threads_growth": 0.0}
    assert all(claim.holds for claim in claims([sound, sound]))
    leaks = {claim.name: claim.holds for claim in claims([sound, sound | {"rss_growth": 0.02}])}
    assert leaks == {
        "soak.rss_growth": False,
        "soak.descriptors_growth": True,
        "soak.threads_growth": True,
        "soak.minutes": True,
    }


def test_an_interrupted_run_tells_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [
        {"seconds": 60.0 * n, "step": n, "rss": 100.0, "descriptors": 9, "threads": 3}
        for n in range(12)
    ]

    def ranks(
        world: int, function: object, folder: Path, seconds: float
    ) -> list[list[dict[str, float]]]:
        while not soak._is_over(folder, 0, seconds):
            time.sleep(0.01)
        return [looks] * world

    def interrupt(what: str) -> None:
        if not heard:
            heard.append(what)
            raise KeyboardInterrupt

    heard: list[str] = []
    monkeypatch.setattr(soak, "on_ranks", ranks)
    rows = soak.measure(SoakOptions(), None, interrupt)
    assert [(row["interrupted"], row["minutes"]) for row in rows] == [(True, 11)] * 4
    assert {claim.name: claim.holds for claim in claims(rows)}["soak.minutes"] is False
    assert re.fullmatch(r"\d+\.\d of 30 minutes", *heard)


def test_a_rank_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(*arguments: object) -> None:
        raise RuntimeError("process 3 terminated with signal SIGKILL")

    monkeypatch.setattr(soak, "on_ranks", ranks)
    with pytest.raises(
        TrainingError, match=r"a rank ended after \d+\.\d of 30 minutes: process 3 terminated"
    ):
        soak.measure(SoakOptions(), None, lambda what: None)


def test_no_time_is_refused() -> None:
    with pytest.raises(InputError, match="--minutes 0"):
        BENCHMARK.run(["--minutes", "0"])
