"""`moesaic soak`: what growth is. (`make soak` trains for half an hour.)"""

from __future__ import annotations

import pytest

from moesaic.errors import InputError
from moesaic_lab.soak import BENCHMARK, claims, growth


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


def test_no_time_is_refused() -> None:
    with pytest.raises(InputError, match="--minutes 0"):
        BENCHMARK.run(["--minutes", "0"])
