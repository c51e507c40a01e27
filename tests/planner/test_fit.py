"""The fit recovers start-up cost and rate, at small sizes too, and refuses noise."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.errors import InputError
from moesaic.planner.fit import fit

SIZES = [2.0**power for power in range(10, 27, 2)]


def times(
    alpha: float, beta: float, noise: float, seed: int = 0, repeats: int = 9
) -> list[list[float]]:
    draw = np.random.default_rng(seed)
    return [
        [(alpha + beta * size) * float(np.exp(draw.normal(0, noise))) for _ in range(repeats)]
        for size in SIZES
    ]


def test_recovers_both_constants_within_the_noise() -> None:
    line = fit(SIZES, times(2e-4, 4e-8, 0.03))
    assert not line.trouble
    assert line.alpha == pytest.approx(2e-4, rel=0.05)
    assert line.beta == pytest.approx(4e-8, rel=0.05)
    assert 1e-9 / line.beta == pytest.approx(0.025, rel=0.05)
    assert line.r2 > 0.99
    assert line.worst < 0.1
    assert line.seconds(0) == line.alpha


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """In an unweighted fit, the noise of the largest size determines the start-up cost."""
    measured = times(2e-4, 4e-8, 0.02, seed=4)
    medians = [float(np.median(repeats)) for repeats in measured]
    slope, start = np.polyfit(SIZES, medians, 1)
    plain = max(abs(start + slope * size - t) / t for size, t in zip(SIZES, medians))
    assert plain > 0.5
    assert fit(SIZES, measured).worst < 0.05


def test_constants_are_never_negative() -> None:
    flat = fit(SIZES, [[1e-3]] * len(SIZES))
    assert (flat.alpha, flat.beta) == (pytest.approx(1e-3), pytest.approx(0.0, abs=1e-14))
    steep = fit([1, 2, 4], [[0.9], [2.0], [4.2]])
    assert steep.alpha >= 0


def test_noise_is_reported_and_residuals_are_kept() -> None:
    draw = np.random.default_rng(1)
    scattered = [[float(draw.uniform(1, 3))] * 3 for _ in SIZES]
    line = fit(SIZES, scattered, what="all_gather inside")
    assert "all_gather inside: the times do not lie on a line over size" in line.trouble
    assert [
        repeats[0] / line.seconds(size) - 1 for size, repeats in zip(SIZES, scattered)
    ] == pytest.approx(line.residuals)
    assert fit(SIZES, times(2e-4, 4e-8, 0.6)).spread > 0.25


def test_times_that_hardly_depend_on_size_are_no_trouble() -> None:
    """With more ranks than cores, short and long transfers take about as long."""
    near = fit(SIZES, [[1e-3 * (1 + 0.1 * (-1) ** place)] for place in range(len(SIZES))])
    assert near.r2 < 0.5
    assert near.worst < 0.2
    assert not near.trouble
    assert fit(SIZES, [[1e-3 * (1 + 0.5 * (-1) ** place)] for place in range(len(SIZES))]).trouble


@pytest.mark.parametrize(
    ("sizes", "seconds", "line"),
    [
        ([1, 2], [[1], [2]], "measure at least 3 sizes"),
        ([1, 1, 1], [[1], [2], [3]], "measure at least 3 sizes"),
        ([1, 2, 3], [[1], [2], []], "a time is missing"),
        ([1, 2, 3], [[1], [2], [0]], "not above 0"),
        ([1, 2, 3], [[1], [2], [float("nan")]], "not finite"),
    ],
)
def test_invalid_times_are_refused(sizes: list, seconds: list, line: str) -> None:
    with pytest.raises(InputError, match=line):
        fit(sizes, seconds)
