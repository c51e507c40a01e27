"""`moesaic profile` tells in which of its own checks a profile fails."""

from __future__ import annotations

import pytest

from moesaic.cli.profile import failings
from moesaic.planner.profile import ClusterProfile, Errors


@pytest.mark.parametrize(
    ("median", "layers", "found"),
    [
        (0.1, (0.2, 0.3, 3.0), []),
        (0.1, (), []),
        (0.1, (0.2, 1.53, 3.1), ["whole layers 153% off, at most 50%"]),
        (0.4, (0.2,), ["processor time of plans 40% off, at most 25%"]),
    ],
)
def test_medians_beyond_the_limits_fail(median: float, layers: tuple[float, ...], found: list[str]) -> None:
    assert failings(ClusterProfile(errors=Errors(host_median=median)), layers) == found
